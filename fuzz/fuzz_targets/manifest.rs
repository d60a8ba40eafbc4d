//! Any bytes as the manifest of a v2 shard and as an inventory file: refused by name, or one that survives its canonical form.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use walk::checkpoint::inventory::InventoryFile;
use walk::checkpoint::manifest_v2::V2Manifest;
use walk::store::canonical;

fuzz_target!(|bytes: &[u8]| {
    let path = Path::new("file.json");
    match V2Manifest::parse(path, 1, bytes) {
        Ok(manifest) => {
            if let Ok(written) = canonical(&manifest) {
                assert_eq!(V2Manifest::parse(path, 1, &written).unwrap(), manifest);
            }
        }
        Err(error) => assert!(error.to_string().starts_with("file.json")),
    }
    if let Err(error) = InventoryFile::parse(path, bytes) {
        assert!(error.to_string().starts_with("file.json"));
    }
});
