//! The tokenizer of a checkpoint, set to give exactly the ids of a text and nothing else.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use serde::de::IgnoredAny;
use tokenizers::Tokenizer;

use crate::error::{Result, refuse};
use crate::store::hash::{Hash, sha256_hex};
use crate::store::strict_json::read_file;

/// A `tokenizer.json` with truncation and padding switched off.
#[derive(Debug, Clone)]
pub struct TextEncoder {
    tokenizer: Tokenizer,
    path: PathBuf,
    sha256: Hash,
}

impl TextEncoder {
    /// Reads `path`.
    ///
    /// # Errors
    /// Names the file when it is missing or is no tokenizer.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::parse(path, &read_file(path)?)
    }

    /// Reads the `bytes` of a `tokenizer.json`; `path` is named in refusals.
    ///
    /// # Errors
    /// As [`TextEncoder::from_file`].
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let wrong = |error: String| {
            refuse(format!("not a tokenizer: {error}"))
                .file(path)
                .wanted("a tokenizer.json of the tokenizers library")
        };
        // The library panics on a file that ends, or is no JSON, within its decoder.
        serde_json::from_slice::<IgnoredAny>(bytes).map_err(|error| wrong(error.to_string()))?;
        let mut tokenizer = guarded(|| Tokenizer::from_bytes(bytes)).map_err(wrong)?;
        // A file may carry truncation or padding settings, which would silently shorten or lengthen documents.
        tokenizer.with_padding(None).with_truncation(None).map_err(|error| wrong(error.to_string()))?;
        Ok(Self { tokenizer, path: path.to_path_buf(), sha256: sha256_hex(bytes) })
    }

    /// Where it was read.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// SHA-256 of the file.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// The id of the token with exactly this string.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    /// The ids of `text`, without special tokens put around it. A special token spelled out in the text becomes its id.
    ///
    /// # Errors
    /// When the tokenizer cannot encode the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match guarded(|| self.tokenizer.encode_fast(text, false)) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(error) => {
                refuse(format!("the tokenizer cannot encode the text: {error}")).file(&self.path).err()
            }
        }
    }
}

/// Runs the library on a file it may not expect: a panic in it is an error as well.
fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(panic) => {
            let said = panic.downcast_ref::<String>().map(String::as_str);
            let said = said.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
            Err(format!("the tokenizers library gave up: {said}"))
        }
    }
}
