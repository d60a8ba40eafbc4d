//! The rolling state: one safetensors file a prompt, and a manifest over all of them.
//!
//! `states/NNN/` holds the input of decoder layer NNN: `hidden` BF16 `[S, H]`, `topk_indices` I32 `[S, k]` (sorted by
//! score, then index; absent before the first layer), `positions` I32 `[S]`, `input_ids` I32 `[S]`. The SHA-256 of the
//! manifest is the state's name everywhere else. A file's header names the job it is the result of and the hash of its
//! tensors, so that a forward pass that was stopped goes on at the first prompt that is missing.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use half::bf16;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::corpus::sealed::SealedPrompt;
use crate::error::{Result, refuse};
use crate::model::TopK;
use crate::store::atomic::{create_dir_durably, remove_file_durably, remove_tree_durably, write_json_atomic};
use crate::store::canonical_json::canonical_hash;
use crate::store::hash::{Hash, sha256_file, sha256_hex};
use crate::store::safetensors_read::SafetensorsFile;
use crate::store::safetensors_write::{TensorData, safetensors_sha256, write_safetensors};
use crate::store::strict_json::read_json;
use crate::store::tensor_dtype::TensorDtype;

/// One prompt between two layers.
#[derive(Debug, Clone)]
pub struct PromptState {
    /// Hidden state `[S, H]`: f32 holding BF16 values.
    pub hidden: Tensor,
    /// The last full layer's top-k list; `None` before the first layer.
    pub topk: Option<TopK>,
    /// Position of every token.
    pub positions: Vec<u32>,
}

/// The complete state before a layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StateManifest {
    /// The layer whose input this is.
    pub layer: usize,
    /// SHA-256 of the manifest of the state before, `None` for embeddings.
    pub predecessor_sha256: Option<Hash>,
    /// What carried the state forward: SHA-256 of the v2 manifest of the layer before, `None` where it was not replaced.
    pub installed_sha256: Option<Hash>,
    /// SHA-256 of each prompt's file by prompt id: the complete calibration domain.
    pub prompts: BTreeMap<String, Hash>,
}

/// What a prompt's state is computed from, besides the walk's identity.
#[derive(Debug, Clone, Copy)]
pub struct StateJob<'a> {
    /// SHA-256 of the walk's identity.
    pub identity_sha256: &'a Hash,
    /// SHA-256 of the prompt's state before the layer; of its token ids where the state is embeddings.
    pub input_sha256: &'a Hash,
    /// SHA-256 of the v2 manifest of the layer, `None` where it was not replaced.
    pub installed_sha256: Option<&'a Hash>,
}

impl StateJob<'_> {
    /// The name of the job that gives the state before `layer`.
    ///
    /// # Errors
    /// None in practice; see [`canonical_hash`].
    pub fn sha256(&self, layer: usize, prompt: &SealedPrompt) -> Result<Hash> {
        let Self { identity_sha256, input_sha256, installed_sha256 } = self;
        canonical_hash(&("state", layer, &prompt.id, identity_sha256, input_sha256, installed_sha256))
    }
}

/// Name of the manifest within a state folder.
const MANIFEST: &str = "manifest.json";

/// `states/NNN`, relative to the work directory.
pub fn state_folder(layer: usize) -> PathBuf {
    PathBuf::from(format!("states/{layer:03}"))
}

/// The manifest's path, relative to the work directory.
pub fn manifest_path(layer: usize) -> PathBuf {
    state_folder(layer).join(MANIFEST)
}

/// The stage that makes the state before a layer.
pub fn stage_of(layer: usize) -> String {
    if layer == 0 { "embed".to_owned() } else { format!("layer-{:03}/forward", layer - 1) }
}

/// A prompt's state, relative to the work directory.
pub fn prompt_path(layer: usize, id: &str) -> PathBuf {
    state_folder(layer).join(format!("{id}.safetensors"))
}

impl PromptState {
    /// The hidden state as it is stored: BF16 little-endian, row major.
    ///
    /// # Errors
    /// None in practice.
    pub fn hidden_bytes(&self) -> Result<Vec<u8>> {
        let values: Vec<f32> = self.hidden.flatten_all()?.to_vec1()?;
        Ok(values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect())
    }

    /// The top-k list as it is stored: I32 little-endian; nothing before the first layer.
    pub fn topk_bytes(&self) -> Vec<u8> {
        self.topk.iter().flat_map(|topk| topk.indices.iter().flat_map(|x| x.to_le_bytes())).collect()
    }
}

/// Header entry: the job the state is the result of.
const JOB: &str = "job_sha256";
/// Header entry: the canonical hash of the payloads' hashes by tensor name.
const CONTENT: &str = "content_sha256";

/// Publishes one prompt's state as the result of `job` and returns the SHA-256 of its file.
///
/// # Errors
/// Names the path.
pub fn write_prompt(
    work: &Path,
    layer: usize,
    prompt: &SealedPrompt,
    state: &PromptState,
    job: &Hash,
) -> Result<Hash> {
    let hidden = state.hidden_bytes()?;
    let tensors = tensors_of(prompt, state, &hidden)?;
    let path = work.join(prompt_path(layer, &prompt.id));
    Ok(write_safetensors(path, &header(job, &tensors)?, &tensors)?.sha256)
}

/// The header entries of a state file.
fn header(job: &Hash, tensors: &[TensorData<'_>]) -> Result<BTreeMap<String, String>> {
    let contents: BTreeMap<&str, Hash> =
        tensors.iter().map(|tensor| (tensor.name.as_str(), sha256_hex(&tensor.data))).collect();
    let entries = [("format", "pt"), (JOB, job.as_str()), (CONTENT, &canonical_hash(&contents)?)];
    Ok(entries.map(|(key, value)| (key.to_owned(), value.to_owned())).into())
}

/// The SHA-256 of a prompt's file, if it is there and, to the byte, the result of `job` as [`write_prompt`] writes it.
///
/// # Errors
/// When a file that looks right cannot be read.
pub fn adopt_prompt(work: &Path, layer: usize, prompt: &SealedPrompt, job: &Hash) -> Result<Option<Hash>> {
    let path = work.join(prompt_path(layer, &prompt.id));
    if !path.exists() || job_of(work, layer, prompt).is_ok_and(|named| named != *job) {
        return Ok(None);
    }
    // What is no state at all is made again like one that is missing.
    let Ok(state) = parse_prompt(&path, prompt) else { return Ok(None) };
    let hidden = state.hidden_bytes()?;
    let tensors = tensors_of(prompt, &state, &hidden)?;
    let wanted = safetensors_sha256(&path, &header(job, &tensors)?, &tensors)?;
    Ok((sha256_file(&path)? == wanted).then_some(wanted))
}

/// The job that a prompt's file says it is the result of.
///
/// # Errors
/// Names the file that cannot be read, or says nothing of it.
pub fn job_of(work: &Path, layer: usize, prompt: &SealedPrompt) -> Result<Hash> {
    let path = work.join(prompt_path(layer, &prompt.id));
    match SafetensorsFile::open(&path)?.metadata().get(JOB) {
        Some(job) => Ok(job.clone()),
        None => refuse("the header names no job").file(&path).layer(layer).field(JOB).err(),
    }
}

fn tensors_of<'a>(
    prompt: &SealedPrompt,
    state: &PromptState,
    hidden: &'a [u8],
) -> Result<Vec<TensorData<'a>>> {
    let (rows, width) = state.hidden.dims2()?;
    let as_i32 = |values: &[u32]| values.iter().map(|&x| x as i32).collect::<Vec<_>>();
    let mut tensors = vec![
        TensorData::from_bytes("hidden", TensorDtype::BF16, &[rows, width], hidden),
        TensorData::i32("positions", &[rows], &as_i32(&state.positions)),
        TensorData::i32("input_ids", &[rows], &as_i32(&prompt.token_ids)),
    ];
    if let Some(topk) = &state.topk {
        tensors.push(TensorData::i32("topk_indices", &[rows, topk.k], &topk.indices));
    }
    Ok(tensors)
}

/// Reads one prompt's state back after checking its hash against the sealed manifest.
///
/// # Errors
/// Names file, prompt and tensor of what is not as it was sealed.
pub fn read_prompt(work: &Path, manifest: &StateManifest, prompt: &SealedPrompt) -> Result<PromptState> {
    let path = work.join(prompt_path(manifest.layer, &prompt.id));
    let found = sha256_file(&path)?;
    if manifest.prompts.get(&prompt.id) != Some(&found) {
        return refuse("the state is not the one that was sealed")
            .file(&path)
            .prompt(&prompt.id)
            .layer(manifest.layer)
            .wanted(format!(
                "sha256 {}",
                manifest.prompts.get(&prompt.id).map_or("of a prompt it has", |h| h)
            ))
            .err();
    }
    parse_prompt(&path, prompt)
}

fn parse_prompt(path: &Path, prompt: &SealedPrompt) -> Result<PromptState> {
    let file = SafetensorsFile::open(path)?;
    let rows = prompt.token_ids.len();
    let i32s = |name: &str, shape: &[usize]| -> Result<Vec<i32>> {
        let bytes = file.bytes_as(name, TensorDtype::I32, shape)?;
        Ok(bytes.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b)).collect())
    };
    if i32s("input_ids", &[rows])?.iter().zip(&prompt.token_ids).any(|(a, b)| *a as u32 != *b) {
        return refuse("the tokens are not those of the corpus plan")
            .file(path)
            .prompt(&prompt.id)
            .tensor("input_ids")
            .err();
    }
    let shape = file.info("hidden")?.shape.clone();
    if shape.len() != 2 || shape[0] != rows {
        return refuse(format!("its shape is {shape:?}"))
            .file(path)
            .tensor("hidden")
            .wanted(format!("[{rows}, hidden size]"))
            .err();
    }
    let bytes = file.bytes_as("hidden", TensorDtype::BF16, &shape)?;
    let values: Vec<f32> = bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect();
    let topk = if file.contains("topk_indices") {
        let k = *file.info("topk_indices")?.shape.last().unwrap_or(&0);
        Some(TopK { indices: i32s("topk_indices", &[rows, k])?, k })
    } else {
        None
    };
    Ok(PromptState {
        hidden: Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(DType::F32)?,
        topk,
        positions: i32s("positions", &[rows])?.into_iter().map(|p| p as u32).collect(),
    })
}

/// Publishes the manifest of a complete state and returns its SHA-256.
///
/// # Errors
/// Names the path.
pub fn write_manifest(work: &Path, manifest: &StateManifest) -> Result<Hash> {
    write_json_atomic(work.join(manifest_path(manifest.layer)), manifest)
}

/// Makes the folder of a state.
///
/// # Errors
/// Names the path.
pub fn create_folder(work: &Path, layer: usize) -> Result<()> {
    create_dir_durably(work.join(state_folder(layer)))
}

/// Reads a manifest and audits it: the one that was sealed, the complete prompt domain, every file present with its hash.
///
/// # Errors
/// Names the first prompt or file that is not as it was sealed.
pub fn audit(work: &Path, layer: usize, sealed: &Hash, prompts: &[&SealedPrompt]) -> Result<StateManifest> {
    let path = work.join(manifest_path(layer));
    if sha256_file(&path)? != *sealed {
        return refuse("the state is not the one that was sealed")
            .file(&path)
            .layer(layer)
            .wanted(format!("sha256 {sealed}"))
            .err();
    }
    let manifest: StateManifest = read_json(&path)?;
    if manifest.layer != layer {
        return refuse(format!("the manifest is that of layer {}", manifest.layer))
            .file(&path)
            .layer(layer)
            .err();
    }
    let expected: BTreeMap<&str, ()> = prompts.iter().map(|p| (p.id.as_str(), ())).collect();
    if manifest.prompts.keys().map(String::as_str).ne(expected.keys().copied()) {
        return refuse("the prompts are not those of the corpus plan").file(&path).layer(layer).err();
    }
    prompts.par_iter().try_for_each(|prompt| {
        let file = work.join(prompt_path(layer, &prompt.id));
        if sha256_file(&file)? == manifest.prompts[&prompt.id] {
            return Ok(());
        }
        refuse("the state is not the one that was sealed")
            .file(&file)
            .layer(layer)
            .prompt(&prompt.id)
            .wanted("the file as the walk sealed it")
            .err()
    })?;
    Ok(manifest)
}

/// Deletes the state before a layer, manifest first, so that a half-deleted state never looks whole.
///
/// # Errors
/// Names the path.
pub fn delete(work: &Path, layer: usize) -> Result<()> {
    let folder = work.join(state_folder(layer));
    if !folder.exists() {
        return Ok(());
    }
    let manifest = folder.join(MANIFEST);
    if manifest.exists() {
        remove_file_durably(&manifest)?;
    }
    remove_tree_durably(&folder)
}
