//! Any bytes as a schema-v2 shard and as a loose expert, width 128: refused by name, or linears that decode.
#![no_main]

use libfuzzer_sys::fuzz_target;
use walk::checkpoint::loose::read_loose;
use walk::checkpoint::schema_v2::V2Layer;

fuzz_target!(|bytes: &[u8]| {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("shard.safetensors");
    std::fs::write(&path, bytes).unwrap();
    let named =
        |error: walk::Error| assert!(error.to_string().starts_with(path.to_str().unwrap()), "{error}");
    match V2Layer::open(&path, 1, 128, 128) {
        Ok(layer) => match layer.expert(0) {
            Ok(expert) => expert.iter().for_each(|linear| assert_eq!(linear.dense().data.len(), 128 * 128)),
            Err(error) => named(error),
        },
        Err(error) => named(error),
    }
    if let Err(error) = read_loose(&path, 1, 0, (128, 128)) {
        named(error);
    }
});
