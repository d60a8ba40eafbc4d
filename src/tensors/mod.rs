//! Single tensors and whole files, outside of a walk: weights of a safetensors file to KAIJU1 or EXL3, and back.
//!
//! [`encode()`] reads one file and writes another in which chosen 2-D weights are packed, by an importance of their inputs
//! from a llama.cpp importance matrix ([`imatrix`]), a file of Hessians ([`hessian`]), or none. [`decode()`] gives every
//! packed module of a file back as a plain weight. What is not chosen is copied byte for byte. One weight is in memory at a
//! time.

pub mod decode;
pub mod encode;
pub mod hessian;
pub mod imatrix;
pub mod importance;
mod linear;
mod llama_names;
mod report;

pub use decode::{DecodeReport, decode};
pub use encode::{EncodeOptions, encode};
pub use importance::{ImportanceFile, ImportanceSource};
pub use linear::LinearCodec;
pub use report::{EncodeReport, EncodedTensor, LeftPlain};

use std::collections::BTreeMap;
use std::path::Path;

use crate::checkpoint::Reconstruction;
use crate::error::{Error, Result, refuse};
use crate::store::canonical_json::canonical;
use crate::walk::progress::Observer;

/// Refuses an output that is there, or is the input.
fn check_output(input: &Path, out: &Path) -> Result<()> {
    if !input.is_file() {
        return refuse("it is no file").file(input).wanted("a safetensors file").err();
    }
    let same = std::fs::canonicalize(out)
        .is_ok_and(|out| std::fs::canonicalize(input).is_ok_and(|input| input == out));
    if same {
        return refuse("input and output are the same file").file(out).wanted("another name").err();
    }
    if out.symlink_metadata().is_ok() {
        return refuse("it is there already").file(out).wanted("the name of a file to be made").err();
    }
    Ok(())
}

/// Called before every tensor: a file appears whole or not at all, so that nothing is kept of one that is not finished.
fn proceed(observer: &dyn Observer) -> Result<()> {
    match observer.stop_requested() {
        false => Ok(()),
        true => Err(Error::Interrupted("nothing was written".to_owned())),
    }
}

/// The file's metadata with what was done added to a key: a line of JSON each time.
fn noted(weights: &Reconstruction, key: &str, done: &serde_json::Value) -> Result<BTreeMap<String, String>> {
    let mut metadata = BTreeMap::new();
    for (_, shard) in weights.checkpoint().shards() {
        metadata.extend(shard.metadata().clone());
    }
    let line = String::from_utf8_lossy(&canonical(done)?).into_owned();
    let before = metadata.get(key).map_or(String::new(), |before| format!("{before}\n"));
    metadata.insert(key.to_owned(), before + &line);
    Ok(metadata)
}
