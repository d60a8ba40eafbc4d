//! SHA-256 of bytes, files and streams, always as 64 lowercase hexadecimal digits.
//!
//! Source: FIPS 180-4, through the `sha2` crate.

use std::io::{self, Read, Write};
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::error::{IoContext, Result};

/// A SHA-256 as 64 lowercase hexadecimal digits.
pub type Hash = String;

/// Size of the buffer files are hashed through.
const CHUNK: usize = 1 << 18;

/// Lowercase hexadecimal of `bytes`.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes
        .iter()
        .flat_map(|byte| [DIGITS[usize::from(byte >> 4)] as char, DIGITS[usize::from(byte & 15)] as char])
        .collect()
}

/// SHA-256 of `bytes` as raw digest.
#[must_use]
pub fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

/// SHA-256 of `bytes`.
#[must_use]
pub fn sha256_hex(bytes: &[u8]) -> Hash {
    hex(&sha256(bytes))
}

/// SHA-256 of everything `reader` yields.
///
/// # Errors
/// What the reader says.
pub fn sha256_reader(mut reader: impl Read) -> io::Result<Hash> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; CHUNK];
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => return Ok(hex(&hasher.finalize())),
            Ok(n) => hasher.update(&buffer[..n]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// SHA-256 of the file at `path`.
///
/// # Errors
/// Names the path when it cannot be read.
pub fn sha256_file(path: impl AsRef<Path>) -> Result<Hash> {
    let path = path.as_ref();
    std::fs::File::open(path).and_then(sha256_reader).at(path)
}

/// Whether `text` is spelled like a [`Hash`](type@Hash).
#[must_use]
pub fn is_hash(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// A writer that hashes what passes through it on the way to `inner`.
#[derive(Debug)]
pub struct HashingWriter<W> {
    inner: W,
    hasher: Sha256,
    written: u64,
}

impl<W: Write> HashingWriter<W> {
    /// Wraps `inner`.
    pub fn new(inner: W) -> Self {
        Self { inner, hasher: Sha256::new(), written: 0 }
    }

    /// Bytes that went through so far.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// The SHA-256 of everything written so far.
    pub fn sha256(&self) -> Hash {
        hex(&self.hasher.clone().finalize())
    }

    /// The wrapped writer and the SHA-256 of everything written.
    pub fn finish(self) -> (W, Hash) {
        (self.inner, hex(&self.hasher.finalize()))
    }
}

impl<W: Write> Write for HashingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..n]);
        self.written += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn bytes_readers_files_and_writers_agree_with_fips_180() {
        assert_eq!(sha256_hex(b"abc"), ABC);
        assert_eq!(sha256_reader(&b"abc"[..]).unwrap(), ABC);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("abc");
        std::fs::write(&path, "abc").unwrap();
        assert_eq!(sha256_file(&path).unwrap(), ABC);
        let mut writer = HashingWriter::new(Vec::new());
        writer.write_all(b"a").unwrap();
        writer.write_all(b"bc").unwrap();
        assert_eq!(writer.written(), 3);
        assert_eq!(writer.finish(), (b"abc".to_vec(), ABC.to_owned()));
        assert!(is_hash(ABC) && !is_hash("abc") && !is_hash(&ABC.to_uppercase()));
    }

    #[test]
    fn a_file_longer_than_the_buffer_is_hashed_whole() {
        let bytes: Vec<u8> = (0..CHUNK + 1).map(|i| (i % 251) as u8).collect();
        assert_eq!(sha256_reader(&bytes[..]).unwrap(), sha256_hex(&bytes));
    }
}
