//! A checkpoint directory of an index and two shards: the input is cut in three at the first two lines of `%`.
#![no_main]

use candle_core::{DType, Device};
use libfuzzer_sys::fuzz_target;
use walk::checkpoint::inventory::Inventory;
use walk::checkpoint::{CheckpointDir, WeightSource};

/// The index and two shards.
fn parts(bytes: &[u8]) -> Vec<&[u8]> {
    let mut rest = bytes;
    let mut parts = Vec::new();
    for _ in 0..2 {
        let Some(at) = rest.windows(3).position(|window| window == b"%%\n") else { break };
        parts.push(&rest[..at]);
        rest = &rest[at + 3..];
    }
    parts.push(rest);
    parts
}

fuzz_target!(|bytes: &[u8]| {
    let dir = tempfile::tempdir().unwrap();
    for (part, file) in
        parts(bytes).into_iter().zip(["model.safetensors.index.json", "a.safetensors", "model-2.safetensors"])
    {
        std::fs::write(dir.path().join(file), part).unwrap();
    }
    let checkpoint = match CheckpointDir::open(dir.path()) {
        Ok(checkpoint) => checkpoint,
        Err(error) => {
            assert!(error.to_string().starts_with(dir.path().to_str().unwrap()), "{error}");
            return;
        }
    };
    for name in checkpoint.names() {
        let place = checkpoint.info(name).unwrap();
        let length = place.info.end - place.info.start;
        assert_eq!(checkpoint.tensor_bytes(name).unwrap().len() as u64, length);
        // A refusal is fine: whatever the type and the values are.
        let _ = checkpoint.load(name, &place.info.shape, DType::F32, &Device::Cpu);
    }
    let _ = Inventory::take(&checkpoint, &|_| {});
});
