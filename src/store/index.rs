//! `model.safetensors.index.json`: which shard holds which tensor.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use super::atomic::is_plain;
use super::strict_json::{UniqueMap, parse_json, read_file};
use crate::error::{Result, refuse};

/// Its file name.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// An index whose shards are plain names of files beside it. Other keys (`metadata`) say nothing a reader needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardIndex {
    /// Shard by tensor.
    pub weight_map: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Contents {
    weight_map: UniqueMap<String>,
}

impl ShardIndex {
    /// Reads `path`.
    ///
    /// # Errors
    /// As [`ShardIndex::parse`], or when the file cannot be read.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::parse(path, &read_file(path)?)
    }

    /// Reads the `bytes` of an index; `path` is only named in refusals.
    ///
    /// # Errors
    /// Names the file and what is no JSON object of shards by tensor, or the shard that is no plain name.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let Contents { weight_map: UniqueMap(weight_map) } = parse_json(path, bytes)?;
        for (tensor, shard) in &weight_map {
            if !is_shard_name(shard) {
                return refuse(format!("the index names the shard {shard:?}"))
                    .file(path)
                    .tensor(tensor)
                    .wanted("plain file names that end in .safetensors")
                    .err();
            }
        }
        Ok(Self { weight_map })
    }
}

/// Whether it names a file beside the index on every system: no separators, no drive, no NUL.
fn is_shard_name(shard: &str) -> bool {
    shard.ends_with(".safetensors") && is_plain(shard)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_plain_names() {
        for good in
            ["model.safetensors", "model-00001-of-00002.safetensors", "größe 1.safetensors", "..safetensors"]
        {
            assert!(is_shard_name(good), "{good}");
        }
        for bad in [
            "",
            "..",
            "model.bin",
            "../m.safetensors",
            "/m.safetensors",
            "a/m.safetensors",
            "a\\m.safetensors",
            "C:m.safetensors",
            "m\0.safetensors",
            "m\n.safetensors",
            "m.safetensors/",
        ] {
            assert!(!is_shard_name(bad), "{bad:?}");
        }
    }
}
