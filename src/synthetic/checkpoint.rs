//! Checkpoint directories: a small one with all its weights, and the whole model's headers without them.

use std::collections::BTreeMap;
use std::path::Path;

use rayon::prelude::*;
use serde_json::{Value, json};

use super::noise::{Width, write_values};
use super::specs::{ModelTensor, model_tensors, v2_tensors};
use crate::checkpoint::directory::INDEX_FILE;
use crate::checkpoint::schema_v2::{shard_metadata, shard_stem};
use crate::codec::trellis::codebook::Codebook;
use crate::config::Geometry;
use crate::error::{IoContext, Result, refuse};
use crate::store::atomic::{create_dir_durably, write_atomic, write_json_atomic};
use crate::store::safetensors_stream::{TensorSpec, sparse_safetensors, stream_safetensors};
use crate::store::strict_json::{StrictValue, read_file, read_json};
use crate::store::tensor_dtype::TensorDtype;

/// What a directory consists of.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Written {
    /// Every tensor, as a reader has to find it.
    pub specs: Vec<TensorSpec>,
    /// Shards.
    pub shards: usize,
    /// Bytes of all headers with their length fields.
    pub header_bytes: u64,
    /// Bytes of the index.
    pub index_bytes: u64,
    /// Bytes of all payloads.
    pub payload_bytes: u64,
}

/// What a small checkpoint is made of.
#[derive(Debug, Clone, Copy)]
pub struct SmallModel<'a> {
    /// `config.json` of the model whose widths it has.
    pub config: &'a Path,
    /// A directory with `tokenizer.json`, which is copied with its companions and gives the vocabulary's size.
    pub tokenizer: &'a Path,
    /// Routed experts.
    pub experts: usize,
    /// Most payload bytes a shard, unless one tensor has more.
    pub shard_bytes: u64,
    /// Seed of all values.
    pub seed: u64,
}

/// Called after each tensor with its name; may stop the work.
pub type Done<'a> = &'a (dyn Fn(&str) -> Result<()> + Sync);

impl SmallModel<'_> {
    /// Its config: the model's widths, one dense layer and one MoE layer, the vocabulary of the tokenizer.
    ///
    /// # Errors
    /// What is wrong with config or tokenizer.
    pub fn config(&self) -> Result<Value> {
        small_config(self.config, self.experts, vocabulary(self.tokenizer)?)
    }

    /// Its tensors.
    ///
    /// # Errors
    /// As [`SmallModel::config`].
    pub fn tensors(&self) -> Result<Vec<ModelTensor>> {
        Ok(model_tensors(&Geometry::from_json(&self.config()?, self.config)?, true))
    }
}

/// Writes a checkpoint of the model's widths with one dense layer, one MoE layer and the MTP block.
///
/// # Errors
/// A directory that is not empty, what is wrong with config or tokenizer, what cannot be written, what `done` says.
pub fn write_small_model(dir: &Path, model: &SmallModel<'_>, done: Done<'_>) -> Result<Written> {
    let (config, tensors) = (model.config()?, model.tensors()?);
    begin(dir)?;
    for name in ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"] {
        let from = model.tokenizer.join(name);
        if from.is_file() {
            write_atomic(dir.join(name), &read_file(&from)?)?;
        }
    }
    let card = model.tokenizer.join("model.json");
    let prefix =
        if card.is_file() { read_json::<StrictValue>(&card)?.0["prefix_tokens"].clone() } else { json!([]) };
    let card = json!({"description": "seeded noise, of no use but to measure by", "prefix_tokens": prefix});
    write_json_atomic(dir.join("model.json"), &card)?;
    write_json_atomic(dir.join("config.json"), &config)?;
    finish(dir, sharded(tensors, model.shard_bytes), |path, tensors| {
        let specs: Vec<TensorSpec> = tensors.iter().map(|tensor| tensor.spec.clone()).collect();
        let noise: BTreeMap<&str, &ModelTensor> =
            tensors.iter().map(|tensor| (tensor.spec.name.as_str(), tensor)).collect();
        let written = stream_safetensors(path, &pt(), &specs, |spec, sink| {
            let width = if spec.dtype == TensorDtype::F32 { Width::F32 } else { Width::Bf16 };
            let count = spec.shape.iter().product();
            write_values((model.seed, &spec.name), count, noise[spec.name.as_str()].noise, width, sink)
                .at(path)?;
            done(&spec.name)
        })?;
        Ok((specs, written.bytes))
    })
}

/// Writes index and headers of the whole model as a BF16 checkpoint, with so many routed experts; payloads are holes.
///
/// # Errors
/// A directory that is not empty, what is wrong with the config, what cannot be written.
pub fn write_source_headers(dir: &Path, config: &Path, experts: usize, shard_bytes: u64) -> Result<Written> {
    let config = with_experts(config, experts)?;
    let geometry = Geometry::from_json(&config, dir)?;
    begin(dir)?;
    write_json_atomic(dir.join("config.json"), &config)?;
    let mtp = config["num_nextn_predict_layers"].as_u64().unwrap_or(0) > 0;
    finish(dir, sharded(model_tensors(&geometry, mtp), shard_bytes), |path, tensors| {
        let specs: Vec<TensorSpec> = tensors.into_iter().map(|tensor| tensor.spec).collect();
        let written = sparse_safetensors(path, &pt(), &specs, &[])?;
        Ok((specs, written.bytes))
    })
}

/// Writes index and headers of the packed v2 shards of all MoE layers, a shard a layer, with bits dealt out by `cycle`. Only
/// the codebook markers have payloads.
///
/// # Errors
/// As [`write_source_headers`].
pub fn write_v2_headers(dir: &Path, config: &Path, experts: usize, cycle: &[u32]) -> Result<Written> {
    let config = with_experts(config, experts)?;
    let geometry = Geometry::from_json(&config, dir)?;
    begin(dir)?;
    write_json_atomic(dir.join("config.json"), &config)?;
    let shards: Vec<(String, usize)> = geometry
        .moe_layers()
        .into_iter()
        .map(|layer| (format!("{}.safetensors", shard_stem(layer)), layer))
        .collect();
    finish(dir, shards, |path, layer| {
        let specs = v2_tensors(&geometry, layer, experts, cycle);
        // The markers are the widest tensors, so they come first.
        let markers = specs.iter().filter(|spec| spec.dtype == TensorDtype::I32).count();
        let head = Codebook::Mcg.marker().unwrap_or_default().to_le_bytes().repeat(markers);
        let written = sparse_safetensors(path, &shard_metadata(layer), &specs, &head)?;
        Ok((specs, written.bytes))
    })
}

/// Header metadata of a BF16 shard.
fn pt() -> BTreeMap<String, String> {
    [("format".to_owned(), "pt".to_owned())].into()
}

fn begin(dir: &Path) -> Result<()> {
    if dir.exists() && std::fs::read_dir(dir).at(dir)?.next().is_some() {
        return refuse("the directory is not empty").file(dir).wanted("a new directory").err();
    }
    create_dir_durably(dir)
}

/// Tensors in order, cut into shards of at most `limit` payload bytes, and the shards' file names.
fn sharded(tensors: Vec<ModelTensor>, limit: u64) -> Vec<(String, Vec<ModelTensor>)> {
    let mut shards: Vec<Vec<ModelTensor>> = Vec::new();
    let mut filled = 0;
    for tensor in tensors {
        let bytes = tensor.spec.bytes().unwrap_or(u64::MAX);
        match shards.last_mut() {
            Some(shard) if filled <= limit.saturating_sub(bytes) => {
                shard.push(tensor);
                filled += bytes;
            }
            _ => {
                shards.push(vec![tensor]);
                filled = bytes;
            }
        }
    }
    let count = shards.len();
    let name = |index: usize| format!("model-{:05}-of-{count:05}.safetensors", index + 1);
    shards.into_iter().enumerate().map(|(index, shard)| (name(index), shard)).collect()
}

/// Writes the shards, in parallel, and the index last: without it the directory is no checkpoint.
fn finish<S: Send>(
    dir: &Path,
    shards: Vec<(String, S)>,
    write: impl Fn(&Path, S) -> Result<(Vec<TensorSpec>, u64)> + Sync,
) -> Result<Written> {
    let files: Vec<(String, Vec<TensorSpec>, u64)> = shards
        .into_par_iter()
        .map(|(file, shard)| {
            let (specs, bytes) = write(&dir.join(&file), shard)?;
            Ok((file, specs, bytes))
        })
        .collect::<Result<_>>()?;
    let mut written = Written { shards: files.len(), ..Written::default() };
    let mut weight_map = BTreeMap::new();
    for (file, specs, bytes) in files {
        let payload: u64 = specs.iter().filter_map(TensorSpec::bytes).sum();
        written.payload_bytes += payload;
        written.header_bytes += bytes - payload;
        weight_map.extend(specs.iter().map(|spec| (spec.name.clone(), file.clone())));
        written.specs.extend(specs);
    }
    let index = json!({"metadata": {"total_size": written.payload_bytes}, "weight_map": weight_map});
    let path = dir.join(INDEX_FILE);
    write_json_atomic(&path, &index)?;
    written.index_bytes = std::fs::metadata(&path).at(&path)?.len();
    Ok(written)
}

/// Tokens of a tokenizer, those that were added included.
fn vocabulary(dir: &Path) -> Result<usize> {
    let path = dir.join("tokenizer.json");
    let bytes = read_file(&path)?;
    match tokenizers::Tokenizer::from_bytes(&bytes) {
        Ok(tokenizer) => Ok(tokenizer.get_vocab_size(true)),
        Err(error) => refuse(format!("not a tokenizer: {error}")).file(path).err(),
    }
}

/// The model's config with another number of routed experts, in one group, a token taking at most half of them.
fn with_experts(path: &Path, experts: usize) -> Result<Value> {
    let StrictValue(mut config) = read_json(path)?;
    let geometry = Geometry::from_json(&config, path)?;
    if experts != geometry.n_routed_experts {
        for (field, value) in [
            ("n_routed_experts", experts),
            ("num_experts_per_tok", geometry.num_experts_per_tok.min((experts / 2).max(1))),
            ("n_group", 1),
            ("topk_group", 1),
        ] {
            config[field] = json!(value);
        }
    }
    Ok(config)
}

/// One dense layer and one MoE layer, as the first of each in the model, and the vocabulary of the tokenizer.
fn small_config(path: &Path, experts: usize, vocabulary: usize) -> Result<Value> {
    let mut config = with_experts(path, experts)?;
    let geometry = Geometry::from_json(&config, path)?;
    let moe_indexer = if geometry.indexer_is_full(geometry.first_moe_layer()) { "full" } else { "shared" };
    for (field, value) in [
        ("num_hidden_layers", json!(2)),
        ("first_k_dense_replace", json!(1)),
        ("mlp_layer_types", json!(["dense", "sparse"])),
        ("indexer_types", json!(["full", moe_indexer])),
        ("num_nextn_predict_layers", json!(1)),
        ("vocab_size", json!(vocabulary)),
    ] {
        config[field] = value;
    }
    if let Value::Object(fields) = &mut config {
        // They speak of other layers, or of other tokens.
        for gone in ["layer_types", "index_topk_pattern", "bos_token_id", "eos_token_id", "pad_token_id"] {
            fields.remove(gone);
        }
    }
    Ok(config)
}
