//! Reading GGUF files, as far as tables of numbers need it: texts of the metadata, and F32 tensors row by row.
//!
//! Versions 2 and 3, little-endian. Everything is held against what is left of the file before it is read, and nothing is
//! taken in that is not asked for. Candle's reader, which this crate depends on anyway, keeps the last of two tensors of one
//! name and divides by an alignment of zero.
//!
//! Source: `docs/gguf.md` of ggml-org/ggml.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use crate::error::{IoContext, Refusal, Result, refuse};

/// Longest name or key, bytes.
const MAX_NAME: u64 = 4096;
/// Longest text of the metadata, bytes.
const MAX_TEXT: u64 = 1 << 24;
/// Alignment where the file does not say.
const ALIGNMENT: u64 = 32;
/// The type number of F32.
const F32: u32 = 0;

/// An opened file.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    length: u64,
    data_start: u64,
    texts: BTreeMap<String, String>,
    tensors: BTreeMap<String, GgufTensor>,
}

/// A tensor's place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GgufTensor {
    /// Values a row: the innermost extent.
    pub cols: u64,
    /// Rows: the product of the other extents.
    pub rows: u64,
    kind: u32,
    offset: u64,
}

impl GgufFile {
    /// Opens `path` and reads its metadata and tensor list.
    ///
    /// # Errors
    /// Names the file, and field or tensor, of what is no GGUF, truncated, or beyond a cap.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = File::open(path).at(path)?;
        let length = file.metadata().at(path)?.len();
        let mut reader = Reader { path, input: BufReader::new(file), at: 0, length };
        if reader.array("magic")? != *b"GGUF" {
            return reader.wrong("it is no GGUF file").wanted("GGUF, version 2 or 3").err();
        }
        let version = reader.u32("version")?;
        if !(2..=3).contains(&version) {
            return reader.wrong(format!("GGUF of version {version}")).wanted("2 or 3, little-endian").err();
        }
        let (tensor_count, key_count) = (reader.u64("tensor count")?, reader.u64("metadata count")?);
        // At least a length, a type and a byte a key; a length, extents, type and offset a tensor.
        reader.fits(key_count, 13, "metadata")?;
        let (mut texts, mut alignment) = (BTreeMap::new(), ALIGNMENT);
        for _ in 0..key_count {
            let key = reader.text("key", MAX_NAME)?;
            let kind = reader.u32(&key)?;
            match (key.as_str(), kind) {
                ("general.alignment", 4) => alignment = u64::from(reader.u32(&key)?),
                (_, 8) => drop(texts.insert(key.clone(), reader.text(&key, MAX_TEXT)?)),
                _ => reader.skip_value(&key, kind)?,
            }
        }
        if !alignment.is_power_of_two() {
            return reader
                .wrong(format!("an alignment of {alignment}"))
                .field("general.alignment")
                .wanted("a power of two")
                .err();
        }
        reader.fits(tensor_count, 24, "tensors")?;
        let mut tensors = BTreeMap::new();
        for _ in 0..tensor_count {
            let (name, tensor) = reader.tensor(alignment)?;
            if tensors.insert(name.clone(), tensor).is_some() {
                return reader.wrong("the name occurs twice").tensor(name).wanted("each name once").err();
            }
        }
        let data_start = reader.at.next_multiple_of(alignment);
        let opened = Self { path: path.to_path_buf(), length, data_start, texts, tensors };
        for (name, tensor) in opened.tensors.iter().filter(|(_, tensor)| tensor.kind == F32) {
            opened.range(name, tensor, 0, tensor.rows)?;
        }
        Ok(opened)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A text of the metadata.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.texts.get(key).map(String::as_str)
    }

    /// Tensor names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// A tensor's extents.
    pub fn tensor(&self, name: &str) -> Option<&GgufTensor> {
        self.tensors.get(name)
    }

    /// `count` rows of an F32 tensor from `row` on.
    ///
    /// # Errors
    /// Names file and tensor of one that is missing, not F32, has no such rows or lies beyond the end.
    pub fn rows(&self, name: &str, row: u64, count: u64) -> Result<Vec<f32>> {
        let Some(tensor) = self.tensors.get(name) else {
            return self.wrong(name, "there is no such tensor").err();
        };
        if tensor.kind != F32 {
            return self.wrong(name, format!("its type is number {}", tensor.kind)).wanted("F32 (0)").err();
        }
        let (start, bytes) = self.range(name, tensor, row, count)?;
        let mut file = File::open(&self.path).at(&self.path)?;
        file.seek(SeekFrom::Start(start)).at(&self.path)?;
        let mut raw = vec![0; bytes];
        file.read_exact(&mut raw).at(&self.path)?;
        Ok(raw.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }

    /// First byte and length of some rows of an F32 tensor.
    fn range(&self, name: &str, tensor: &GgufTensor, row: u64, count: u64) -> Result<(u64, usize)> {
        let place = || {
            let end = row.checked_add(count).filter(|&end| end <= tensor.rows)?;
            let row_bytes = tensor.cols.checked_mul(4)?;
            let first = self.data_start.checked_add(tensor.offset)?;
            let start = first.checked_add(row.checked_mul(row_bytes)?)?;
            let past = first.checked_add(end.checked_mul(row_bytes)?)?;
            (past <= self.length).then_some((start, usize::try_from(past - start).ok()?))
        };
        match place() {
            Some(found) => Ok(found),
            None => self
                .wrong(
                    name,
                    format!("rows {row} to {} of {} values run past the end", row + count, tensor.cols),
                )
                .wanted(format!("at most {} rows, in a file of {} bytes", tensor.rows, self.length))
                .err(),
        }
    }

    fn wrong(&self, name: &str, what: impl Into<String>) -> Refusal {
        refuse(what).file(&self.path).tensor(name)
    }
}

/// The head of a file, read once.
struct Reader<'p> {
    path: &'p Path,
    input: BufReader<File>,
    at: u64,
    length: u64,
}

impl Reader<'_> {
    fn wrong(&self, what: impl Into<String>) -> Refusal {
        refuse(what).file(self.path)
    }

    /// Refuses `count` things of at least `size` bytes where there are no so many bytes left.
    fn fits(&self, count: u64, size: u64, what: &str) -> Result<()> {
        match count.checked_mul(size).is_some_and(|bytes| bytes <= self.length - self.at) {
            true => Ok(()),
            false => self
                .wrong(format!("{count} entries at byte {}, which run past the end", self.at))
                .field(what)
                .wanted(format!("entries within its {} bytes", self.length))
                .err(),
        }
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        self.fits(N as u64, 1, what)?;
        let mut bytes = [0; N];
        self.input.read_exact(&mut bytes).at(self.path)?;
        self.at += N as u64;
        Ok(bytes)
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn text(&mut self, what: &str, longest: u64) -> Result<String> {
        let length = self.u64(what)?;
        if length > longest {
            return self
                .wrong(format!("a text of {length} bytes"))
                .field(what)
                .wanted(format!("{longest} at most"))
                .err();
        }
        self.fits(length, 1, what)?;
        let mut bytes = vec![0; length as usize];
        self.input.read_exact(&mut bytes).at(self.path)?;
        self.at += length;
        match String::from_utf8(bytes) {
            Ok(text) => Ok(text),
            Err(_) => self.wrong("a text that is not UTF-8").field(what).wanted("UTF-8").err(),
        }
    }

    fn skip(&mut self, count: u64, size: u64, what: &str) -> Result<()> {
        self.fits(count, size, what)?;
        // `fits` has bounded the product by the file's length.
        let bytes = count * size;
        self.input.seek_relative(bytes as i64).at(self.path)?;
        self.at += bytes;
        Ok(())
    }

    fn skip_value(&mut self, key: &str, kind: u32) -> Result<()> {
        let size = |kind: u32| match kind {
            0 | 1 | 7 => Some(1),
            2 | 3 => Some(2),
            4..=6 => Some(4),
            10..=12 => Some(8),
            _ => None,
        };
        if let Some(size) = size(kind) {
            return self.skip(1, size, key);
        }
        let element = if kind == 9 { self.u32(key)? } else { kind };
        let count = if kind == 9 { self.u64(key)? } else { 1 };
        match (element, size(element)) {
            (_, Some(size)) => self.skip(count, size, key),
            (8, _) => {
                self.fits(count, 8, key)?;
                for _ in 0..count {
                    let length = self.u64(key)?;
                    self.skip(length, 1, key)?;
                }
                Ok(())
            }
            _ => self
                .wrong(format!("a value of type {element}"))
                .field(key)
                .wanted("numbers, texts, or lists of them")
                .err(),
        }
    }

    fn tensor(&mut self, alignment: u64) -> Result<(String, GgufTensor)> {
        let name = self.text("tensor name", MAX_NAME)?;
        let wrong = |this: &Self, what: String| this.wrong(what).tensor(&name);
        let dimensions = self.u32(&name)?;
        if !(1..=4).contains(&dimensions) {
            return wrong(self, format!("{dimensions} dimensions")).wanted("1 to 4").err();
        }
        let cols = self.u64(&name)?;
        let mut rows = Some(1u64);
        for _ in 1..dimensions {
            let extent = self.u64(&name)?;
            rows = rows.and_then(|rows| rows.checked_mul(extent));
        }
        let (kind, offset) = (self.u32(&name)?, self.u64(&name)?);
        let Some(rows) = rows.filter(|rows| rows.checked_mul(cols).is_some()) else {
            return wrong(self, "its size overflows".into()).wanted("a shape that fits a file").err();
        };
        if !offset.is_multiple_of(alignment) {
            return wrong(self, format!("its offset is {offset}"))
                .wanted(format!("a multiple of {alignment}"))
                .err();
        }
        Ok((name, GgufTensor { cols, rows, kind, offset }))
    }
}
