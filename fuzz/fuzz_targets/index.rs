//! Any bytes as an index: refused by name, or shards that are plain names.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use walk::store::index::ShardIndex;

fuzz_target!(|bytes: &[u8]| {
    match ShardIndex::parse(Path::new("index.json"), bytes) {
        Ok(index) => {
            for shard in index.weight_map.values() {
                let path = Path::new(shard);
                assert_eq!(path.file_name(), Some(path.as_os_str()), "{shard:?}");
            }
        }
        Err(error) => assert!(error.to_string().starts_with("index.json")),
    }
});
