//! Any bytes as a safetensors file: refused by name, or payloads that tile the file.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use walk::store::safetensors_read::Header;

fuzz_target!(|bytes: &[u8]| {
    match Header::parse(Path::new("f.safetensors"), bytes) {
        Ok(header) => {
            let mut sizes = 0;
            for info in header.tensors.values() {
                assert!(header.data_start <= info.start && info.start <= info.end);
                assert!(info.end <= bytes.len() as u64);
                assert_eq!(info.dtype.bytes_of(&info.shape), Some(info.end - info.start));
                sizes += info.end - info.start;
            }
            assert_eq!(header.data_start + sizes, bytes.len() as u64);
        }
        Err(error) => assert!(error.to_string().starts_with("f.safetensors")),
    }
});
