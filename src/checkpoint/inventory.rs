//! Inventory of a checkpoint directory: every tensor's place and payload hash, and the hashes of its small files.
//!
//! The same pass looks at every value: a checkpoint with a weight that is not finite is refused before anything is
//! computed from it.

mod difference;
mod file;

pub use difference::{Aspect, InventoryDifference, Item};
pub use file::{InventoryFile, MAX_INVENTORY_BYTES, Role, SCHEMA};

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::directory::CheckpointDir;
use super::roles::{Carrier, ExpertGeometry, Source, refuse_quantization};
use crate::config::Geometry;
use crate::error::{Error, Result, refuse};
use crate::store::canonical_json::canonical_hash;
use crate::store::hash::{Hash, sha256_file, sha256_hex};
use crate::store::tensor_dtype::TensorDtype;

/// Files beside the shards that say what the checkpoint is: configuration, tokenizer, prompt template, processors, and the
/// index. Those a directory lacks are not listed.
const SMALL_FILES: [&str; 24] = [
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "configuration.json",
    "generation_config.json",
    "hf_quant_config.json",
    "image_processor_config.json",
    "merges.txt",
    "model.safetensors.index.json",
    "preprocessor_config.json",
    "processor_config.json",
    "quantization_config.json",
    "quantize_config.json",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.tiktoken",
    "tokenizer_config.json",
    "tiktoken.model",
    "video_preprocessor_config.json",
    "vocab.json",
    "vocab.txt",
];

/// One tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InventoryTensor {
    /// Shard within the directory.
    pub file: String,
    /// Stored element type.
    pub dtype: String,
    /// Extents.
    pub shape: Vec<usize>,
    /// First payload byte within the shard.
    pub start: u64,
    /// One past the last payload byte.
    pub end: u64,
    /// SHA-256 of the payload.
    pub sha256: Hash,
}

/// A whole checkpoint directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inventory {
    /// SHA-256 of config and tokenizer files, by name.
    pub files: BTreeMap<String, Hash>,
    /// Tensors by name.
    pub tensors: BTreeMap<String, InventoryTensor>,
}

impl Inventory {
    /// Reads a directory, tensors in parallel; `done` is called after each with its name, and may stop the reading.
    ///
    /// # Errors
    /// Names file, tensor and flat index of the first value (in name order) that is not finite; what `done` says.
    pub fn take(dir: &CheckpointDir, done: &(dyn Fn(&str) -> Result<()> + Sync)) -> Result<Self> {
        let mut files = BTreeMap::new();
        for name in SMALL_FILES {
            let path = dir.dir().join(name);
            if path.is_file() {
                files.insert(name.to_owned(), sha256_file(&path)?);
            }
        }
        let names: Vec<&str> = dir.names().collect();
        let stopped: OnceLock<Error> = OnceLock::new();
        let tensors: Vec<Result<InventoryTensor>> = names
            .par_iter()
            .filter(|_| stopped.get().is_none())
            .map(|name| {
                let place = dir.info(name)?;
                let bytes = dir.tensor_bytes(name)?;
                if let Some(at) = first_non_finite(place.info.dtype, bytes) {
                    let width = place.info.shape.last().copied().unwrap_or(1).max(1);
                    return refuse(format!("the value at flat index {at} is not finite"))
                        .file(dir.dir().join(place.file))
                        .tensor(*name)
                        .row(at / width)
                        .wanted("finite weights")
                        .err();
                }
                if let Err(stop) = done(name) {
                    // Of several threads the first says why.
                    let _ = stopped.set(stop);
                }
                Ok(InventoryTensor {
                    file: place.file.to_owned(),
                    dtype: place.info.dtype.to_string(),
                    shape: place.info.shape.clone(),
                    start: place.info.start,
                    end: place.info.end,
                    sha256: sha256_hex(bytes),
                })
            })
            .collect();
        if let Some(stop) = stopped.into_inner() {
            return Err(stop);
        }
        let tensors = names
            .into_iter()
            .zip(tensors)
            .map(|(name, tensor)| Ok((name.to_owned(), tensor?)))
            .collect::<Result<_>>()?;
        Ok(Self { files, tensors })
    }

    /// SHA-256 of the canonical JSON: the identity of the checkpoint's content, whatever its role and wherever it lies.
    ///
    /// # Errors
    /// None in practice.
    pub fn sha256(&self) -> Result<Hash> {
        canonical_hash(self)
    }

    /// Byte length of every shard. Payloads are known to lie back to back up to the end, so it is the largest `end`.
    pub fn shards(&self) -> BTreeMap<String, u64> {
        let mut shards: BTreeMap<String, u64> = BTreeMap::new();
        for tensor in self.tensors.values() {
            let bytes = shards.entry(tensor.file.clone()).or_default();
            *bytes = tensor.end.max(*bytes);
        }
        shards
    }
}

/// Opens `dir` in a role, with that role's refusals. What experts a source must have is read from its own `config.json`.
///
/// # Errors
/// As [`Source::open`] or [`Carrier::open`], or what is wrong with the source's `config.json`.
pub fn open_role(role: Role, dir: &Path) -> Result<Arc<CheckpointDir>> {
    match role {
        Role::Carrier => Ok(Carrier::open(dir)?.checkpoint().clone()),
        Role::Source => {
            if !dir.is_dir() {
                return refuse("no such directory").file(dir).wanted("a checkpoint directory").err();
            }
            // A quantized config may hold fields that no geometry is read from: say first what matters.
            refuse_quantization(dir)?;
            let geometry = Geometry::read(&dir.join("config.json"))?;
            let experts = ExpertGeometry {
                moe_layers: geometry.moe_layers(),
                experts: geometry.n_routed_experts,
                hidden: geometry.hidden_size,
                intermediate: geometry.moe_intermediate_size,
            };
            Ok(Source::open(dir, &experts)?.checkpoint().clone())
        }
    }
}

/// Flat index of the first infinity or NaN.
fn first_non_finite(dtype: TensorDtype, bytes: &[u8]) -> Option<usize> {
    // The exponent bits of each type: all ones in an infinity or NaN.
    let halves = |mask: u16| bytes.as_chunks().0.iter().position(|b| u16::from_le_bytes(*b) & mask == mask);
    match dtype {
        TensorDtype::BF16 => halves(0x7f80),
        TensorDtype::F16 => halves(0x7c00),
        TensorDtype::F32 => bytes.as_chunks().0.iter().position(|b| !f32::from_le_bytes(*b).is_finite()),
        TensorDtype::F64 => bytes.as_chunks().0.iter().position(|b| !f64::from_le_bytes(*b).is_finite()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_files_are_listed_once() {
        let listed: std::collections::BTreeSet<&str> = SMALL_FILES.into_iter().collect();
        assert_eq!(listed.len(), SMALL_FILES.len());
    }

    #[test]
    fn infinities_and_nans_are_found_in_every_float_type() {
        let bytes = |values: &[u16]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        assert_eq!(first_non_finite(TensorDtype::BF16, &bytes(&[0x3f80, 0x7f7f, 0xff80])), Some(2));
        assert_eq!(first_non_finite(TensorDtype::F16, &bytes(&[0x3c00, 0x7bff, 0x7e00])), Some(2));
        assert_eq!(first_non_finite(TensorDtype::F32, &f32::NAN.to_le_bytes()), Some(0));
        assert_eq!(first_non_finite(TensorDtype::I16, &bytes(&[0x7fff])), None);
    }
}
