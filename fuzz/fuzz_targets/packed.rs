//! Any bytes as a safetensors file with packed linears: refused by name, or modules that decode to their sizes, and a file
//! that can be inspected.
#![no_main]

use libfuzzer_sys::fuzz_target;
use walk::checkpoint::{CheckpointDir, Reconstruction};
use walk::inspect::Inspection;

fuzz_target!(|bytes: &[u8]| {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("packed.safetensors");
    std::fs::write(&path, bytes).unwrap();
    let named =
        |error: walk::Error| assert!(error.to_string().starts_with(path.to_str().unwrap()), "{error}");
    let found = CheckpointDir::open_file(&path).and_then(|file| Reconstruction::new(file.into()));
    let weights = match found {
        Ok(weights) => weights,
        Err(error) => return named(error),
    };
    for module in weights.packed().values() {
        match module.weight(weights.checkpoint().as_ref()) {
            Ok(weight) => assert_eq!((weight.rows, weight.cols, weight.data.len()), (module.n, module.k, module.k * module.n)),
            Err(error) => named(error),
        }
    }
    let inspection = Inspection::take(&path, true).unwrap();
    assert_eq!(inspection.weights.map(|listed| listed.len()), Some(weights.weights().len()));
    let stored = weights.checkpoint().names().map(|name| weights.checkpoint().tensor_bytes(name).unwrap().len() as u64);
    assert_eq!(inspection.total.bytes, stored.sum::<u64>());
});
