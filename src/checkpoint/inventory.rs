//! Inventory of a checkpoint directory: every tensor's place and payload hash, and the hashes of its small files.
//!
//! The same pass looks at every value: a checkpoint with a weight that is not finite is refused before anything is
//! computed from it.

use std::collections::BTreeMap;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::directory::CheckpointDir;
use crate::error::{Result, refuse};
use crate::store::canonical_json::canonical_hash;
use crate::store::hash::{Hash, sha256_file, sha256_hex};
use crate::store::tensor_dtype::TensorDtype;

/// Files beside the shards that say what the checkpoint is.
const SMALL_FILES: [&str; 5] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
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
    /// Reads a directory, tensors in parallel; `done` is called after each with its name.
    ///
    /// # Errors
    /// Names file, tensor and flat index of the first value (in name order) that is not finite.
    pub fn take(dir: &CheckpointDir, done: &(dyn Fn(&str) + Sync)) -> Result<Self> {
        let mut files = BTreeMap::new();
        for name in SMALL_FILES {
            let path = dir.dir().join(name);
            if path.is_file() {
                files.insert(name.to_owned(), sha256_file(&path)?);
            }
        }
        let names: Vec<&str> = dir.names().collect();
        let tensors: Vec<Result<InventoryTensor>> = names
            .par_iter()
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
                done(name);
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
        let tensors = names
            .into_iter()
            .zip(tensors)
            .map(|(name, tensor)| Ok((name.to_owned(), tensor?)))
            .collect::<Result<_>>()?;
        Ok(Self { files, tensors })
    }

    /// SHA-256 of the canonical JSON.
    ///
    /// # Errors
    /// None in practice.
    pub fn sha256(&self) -> Result<Hash> {
        canonical_hash(self)
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
    fn infinities_and_nans_are_found_in_every_float_type() {
        let bytes = |values: &[u16]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        assert_eq!(first_non_finite(TensorDtype::BF16, &bytes(&[0x3f80, 0x7f7f, 0xff80])), Some(2));
        assert_eq!(first_non_finite(TensorDtype::F16, &bytes(&[0x3c00, 0x7bff, 0x7e00])), Some(2));
        assert_eq!(first_non_finite(TensorDtype::F32, &f32::NAN.to_le_bytes()), Some(0));
        assert_eq!(first_non_finite(TensorDtype::I16, &bytes(&[0x7fff])), None);
    }
}
