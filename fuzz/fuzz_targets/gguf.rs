//! Any bytes as a GGUF file: refused by name, or rows of numbers as long as it says, and an importance matrix or none.
#![no_main]

use libfuzzer_sys::fuzz_target;
use walk::store::gguf::GgufFile;
use walk::tensors::imatrix::Imatrix;

fuzz_target!(|bytes: &[u8]| {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gguf");
    std::fs::write(&path, bytes).unwrap();
    let named =
        |error: walk::Error| assert!(error.to_string().starts_with(path.to_str().unwrap()), "{error}");
    let file = match GgufFile::open(&path) {
        Ok(file) => file,
        Err(error) => return named(error),
    };
    for name in file.names() {
        let tensor = file.tensor(name).unwrap();
        match file.rows(name, 0, tensor.rows) {
            Ok(values) => assert_eq!(values.len() as u64, tensor.rows * tensor.cols),
            Err(error) => named(error),
        }
    }
    if let Err(error) = Imatrix::open(&path) {
        named(error);
    }
});
