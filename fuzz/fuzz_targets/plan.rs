//! Any bytes as a plan, sealed with the tiny model's tokenizer beside two texts: refused by name, or a sealed plan that
//! reads back from its own canonical bytes.
#![no_main]

use std::path::PathBuf;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use walk::corpus::{CorpusPlan, Plan, SealContext, TextEncoder, seal};
use walk::store::canonical;

/// A folder with texts, made once, and the tokenizer.
fn setting() -> &'static (PathBuf, TextEncoder) {
    static SETTING: OnceLock<(PathBuf, TextEncoder)> = OnceLock::new();
    SETTING.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap().keep();
        std::fs::create_dir(folder.join("sub")).unwrap();
        std::fs::write(folder.join("a.txt"), "zeile ä\nzwei\ndrei").unwrap();
        std::fs::write(folder.join("sub/b.txt"), "one\n%%\ntwo").unwrap();
        let tokenizer = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tiny/tokenizer.json");
        (folder, TextEncoder::from_file(tokenizer).unwrap())
    })
}

fuzz_target!(|bytes: &[u8]| {
    let (folder, encoder) = setting();
    let path = folder.join("plan.json");
    let prefix = ["<|endoftext|>".to_owned()];
    let context =
        SealContext { encoder, vocab_size: 2048, max_position_embeddings: 64, default_prefix: Some(&prefix) };
    match Plan::parse(&path, bytes).and_then(|plan| seal(&plan, &context)) {
        Ok(sealed) => {
            let mut bytes = canonical(&sealed).unwrap();
            bytes.push(b'\n');
            assert_eq!(CorpusPlan::parse(&path, &bytes).unwrap(), sealed);
        }
        Err(error) => assert!(error.to_string().starts_with(path.to_str().unwrap()), "{error}"),
    }
});
