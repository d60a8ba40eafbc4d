//! Helpers of the hostile-input suite.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use walk::store::safetensors_write::{TensorData, write_safetensors};

/// The project's folder.
pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Asserts that `result` is a refusal of bad input whose message holds every one of `parts`.
#[track_caller]
pub fn refused<T>(result: walk::Result<T>, parts: &[&str]) {
    let Err(error) = result else { panic!("this should have been refused, naming {parts:?}") };
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
    assert_eq!(error.exit_code(), 2, "{message}");
}

/// A safetensors file of raw header text and payload.
pub fn raw_file(header: &str, payload: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

/// Writes a shard of BF16 ones: (name, shape).
pub fn write_ones(path: &Path, tensors: &[(&str, &[usize])]) {
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(name, shape)| TensorData::bf16(*name, shape, &vec![half::bf16::ONE; shape.iter().product()]))
        .collect();
    write_safetensors(path, &BTreeMap::new(), &tensors).unwrap();
}

/// Writes an index over (tensor, shard file).
pub fn write_index(dir: &Path, entries: &[(&str, &str)]) {
    let map: BTreeMap<_, _> = entries.iter().copied().collect();
    let index = serde_json::json!({"metadata": {}, "weight_map": map});
    std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}
