//! Strict reading of safetensors files over a memory map.
//!
//! A file is refused, by its name and the tensor's, when the header is longer than 100 MB or than the file, is no JSON
//! object, or names a tensor twice; when a dtype is unknown, a shape's byte count overflows or differs from the stated
//! range; when payloads overlap, leave a gap, reach beyond the file, or leave bytes over at its end; and, at every later
//! look at a payload, when the file is no longer as long as it was when it was opened.
//!
//! Format: 8 bytes little-endian header length N, N bytes JSON starting with `{`, payloads back to back.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};

use super::hash::{Hash, sha256_hex};
use super::strict_json::{UniqueMap, structs_from_objects};
use super::tensor_dtype::TensorDtype;
use crate::error::{IoContext, Result, refuse};

/// The longest header accepted, in bytes.
pub const MAX_HEADER: u64 = 100_000_000;

/// The one header entry that is no tensor.
const METADATA: &str = "__metadata__";

/// Bytes of the length field before the header.
const PREFIX: u64 = 8;

/// What a header says of one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Element type.
    pub dtype: TensorDtype,
    /// Extents, outermost first; empty for a scalar.
    pub shape: Vec<usize>,
    /// First payload byte, counted from the start of the file.
    pub start: u64,
    /// One past the last payload byte, counted from the start of the file.
    pub end: u64,
}

/// A checked header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The `__metadata__` entries.
    pub metadata: BTreeMap<String, String>,
    /// All tensors by name.
    pub tensors: BTreeMap<String, TensorInfo>,
    /// First byte after the header, counted from the start of the file.
    pub data_start: u64,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct RawInfo {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The header object as it stands, names checked for uniqueness.
#[derive(Default)]
struct RawHeader {
    metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, RawInfo>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut header = RawHeader::default();
                let mut metadata = None;
                while let Some(name) = map.next_key::<String>()? {
                    let at = |error: A::Error| de::Error::custom(format!("entry {name:?}: {error}"));
                    let twice = if name == METADATA {
                        let UniqueMap(entries) = map.next_value().map_err(at)?;
                        metadata.replace(entries).is_some()
                    } else {
                        let info = map.next_value::<RawInfo>().map_err(at)?;
                        header.tensors.insert(name.clone(), info).is_some()
                    };
                    if twice {
                        return Err(de::Error::custom(format!("the name {name:?} occurs twice")));
                    }
                }
                header.metadata = metadata.unwrap_or_default();
                Ok(header)
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

impl Header {
    /// Checks the whole of a file's `bytes`; `file` is only named in refusals.
    ///
    /// # Errors
    /// See the module's page.
    pub fn parse(file: &Path, bytes: &[u8]) -> Result<Self> {
        let file_length = bytes.len() as u64;
        let Some(prefix) = bytes.first_chunk::<8>() else {
            return refuse(format!(
                "the file has {file_length} bytes, no room for a safetensors header length"
            ))
            .wanted("a safetensors file")
            .file(file)
            .err();
        };
        let header_length = u64::from_le_bytes(*prefix);
        if header_length > MAX_HEADER {
            return refuse(format!("the header length says {header_length} bytes"))
                .wanted(format!("a safetensors file with a header of at most {MAX_HEADER} bytes"))
                .file(file)
                .err();
        }
        let data_start = PREFIX + header_length;
        if data_start > file_length {
            return refuse(format!(
                "the header should end at byte {data_start}, but the file ends at byte {file_length}"
            ))
            .wanted("the whole file")
            .file(file)
            .err();
        }
        let text = &bytes[PREFIX as usize..data_start as usize];
        if text.first() != Some(&b'{') {
            return refuse("the header does not start with `{`")
                .wanted("a safetensors file")
                .file(file)
                .err();
        }
        let raw = structs_from_objects::<RawHeader>(text).map_err(|error| {
            refuse(format!("the header is wrong: {error}"))
                .wanted("one JSON object of dtype, shape and data_offsets by name, each name once")
                .file(file)
        })?;
        let mut tensors = BTreeMap::new();
        for (name, raw) in raw.tensors {
            let info = check_tensor(file, &name, &raw, data_start, file_length)?;
            tensors.insert(name, info);
        }
        check_cover(file, &tensors, data_start, file_length)?;
        Ok(Self { metadata: raw.metadata, tensors, data_start })
    }
}

fn check_tensor(
    file: &Path,
    name: &str,
    raw: &RawInfo,
    data_start: u64,
    file_length: u64,
) -> Result<TensorInfo> {
    let dtype = TensorDtype::from_name(&raw.dtype).ok_or_else(|| {
        let known: Vec<_> = TensorDtype::ALL.iter().map(|dtype| dtype.name()).collect();
        refuse(format!("dtype {:?} is unknown", raw.dtype))
            .wanted(format!("one of {}", known.join(", ")))
            .file(file)
            .tensor(name)
    })?;
    let shape = raw.shape.iter().map(|&n| usize::try_from(n).ok()).collect::<Option<Vec<usize>>>();
    let bytes = shape.as_ref().and_then(|shape| dtype.bytes_of(shape));
    let (Some(shape), Some(bytes)) = (shape, bytes) else {
        return refuse(format!("the size of shape {:?} overflows", raw.shape))
            .wanted("a shape that fits the file")
            .file(file)
            .tensor(name)
            .err();
    };
    let [begin, end] = raw.data_offsets;
    if end < begin {
        return refuse(format!("data_offsets [{begin}, {end}] run backwards")).file(file).tensor(name).err();
    }
    if end - begin != bytes {
        return refuse(format!(
            "data_offsets [{begin}, {end}] span {} bytes, but {dtype} of shape {shape:?} takes {bytes}",
            end - begin
        ))
        .wanted("dtype, shape and length that agree")
        .file(file)
        .tensor(name)
        .err();
    }
    let available = file_length - data_start;
    if end > available {
        return refuse(format!("the payload ends at data byte {end}, but the file holds only {available}"))
            .wanted("the whole file; this one seems cut short")
            .file(file)
            .tensor(name)
            .err();
    }
    Ok(TensorInfo { dtype, shape, start: data_start + begin, end: data_start + end })
}

/// Payloads must tile the data part of the file: no overlap, no gap, nothing over.
fn check_cover(
    file: &Path,
    tensors: &BTreeMap<String, TensorInfo>,
    data_start: u64,
    file_length: u64,
) -> Result<()> {
    let mut order: Vec<(&String, &TensorInfo)> = tensors.iter().collect();
    order.sort_by_key(|(_, info)| (info.start, info.end));
    let mut cursor = data_start;
    let mut previous = "the header";
    for (name, info) in order {
        if info.start < cursor {
            return refuse(format!("its payload overlaps that of {previous}"))
                .tensor(name)
                .wanted("payloads back to back")
                .file(file)
                .err();
        }
        if info.start > cursor {
            return refuse(format!(
                "{} bytes between {previous} and its payload belong to nothing",
                info.start - cursor
            ))
            .tensor(name)
            .wanted("payloads back to back, without gaps")
            .file(file)
            .err();
        }
        cursor = info.end;
        previous = name;
    }
    if cursor < file_length {
        return refuse(format!("{} trailing bytes follow the payload of {previous}", file_length - cursor))
            .wanted("a file that ends with its last payload")
            .file(file)
            .err();
    }
    Ok(())
}

/// An open, checked, memory-mapped safetensors file.
#[derive(Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    file: File,
    map: Mmap,
    header: Header,
}

impl SafetensorsFile {
    /// Opens and checks `path`. Payloads are not read.
    ///
    /// # Errors
    /// See the module's page.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        // Before it is opened: opening a pipe would wait for a writer.
        if !std::fs::metadata(path).at(path)?.is_file() {
            return refuse("not a regular file").file(path).wanted("a safetensors file").err();
        }
        let file = File::open(path).at(path)?;
        let meta = file.metadata().at(path)?;
        if !meta.is_file() {
            return refuse("not a regular file").file(path).wanted("a safetensors file").err();
        }
        if meta.len() == 0 {
            return Header::parse(path, &[]).and_then(|_| refuse("the file is empty").file(path).err());
        }
        // SAFETY: the map is read-only and private to this value. Another process that shortens the file could make a
        // read fault: `unchanged_length` tells of it before payloads are read, as far as that can be told. Files are
        // only ever replaced by rename here, which leaves mapped bytes as they are.
        let map = unsafe { Mmap::map(&file) }.at(path)?;
        let header = Header::parse(path, &map)?;
        Ok(Self { path: path.to_path_buf(), file, map, header })
    }

    /// Refuses a file that was shortened or lengthened since it was opened, one system call.
    fn unchanged_length(&self) -> Result<()> {
        let (then, now) = (self.map.len() as u64, self.file.metadata().at(&self.path)?.len());
        let what = match now.cmp(&then) {
            std::cmp::Ordering::Equal => return Ok(()),
            std::cmp::Ordering::Less => "shortened",
            std::cmp::Ordering::Greater => "lengthened",
        };
        refuse(format!("the file was {what} while it was open, from {then} bytes to {now}"))
            .file(&self.path)
            .wanted("a file that nothing writes to during the walk")
            .err()
    }

    /// Where it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The checked header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The `__metadata__` entries.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    /// Tensor names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.header.tensors.keys().map(String::as_str)
    }

    /// Whether it holds `name`.
    pub fn contains(&self, name: &str) -> bool {
        self.header.tensors.contains_key(name)
    }

    /// Dtype, shape and byte range of `name`.
    ///
    /// # Errors
    /// When the file has no such tensor.
    pub fn info(&self, name: &str) -> Result<&TensorInfo> {
        self.header
            .tensors
            .get(name)
            .ok_or_else(|| refuse("the file holds no such tensor").file(&self.path).tensor(name).into())
    }

    /// The payload of `name`, little endian, row major; not necessarily aligned.
    ///
    /// The file's length is checked here and not again: a file that is shortened while the slice is being read ends the
    /// process (SIGBUS on Unix), and one that is overwritten in place gives other bytes, which hashes show and this does
    /// not.
    ///
    /// # Errors
    /// When the file has no such tensor, or is no longer as long as it was.
    pub fn bytes(&self, name: &str) -> Result<&[u8]> {
        let info = self.info(name)?;
        self.unchanged_length()?;
        Ok(&self.map[info.start as usize..info.end as usize])
    }

    /// The payload of `name` after checking dtype and shape.
    ///
    /// # Errors
    /// Names file and tensor when it is missing or is not of this dtype and shape.
    pub fn bytes_as(&self, name: &str, dtype: TensorDtype, shape: &[usize]) -> Result<&[u8]> {
        let info = self.info(name)?;
        if info.dtype != dtype || info.shape != shape {
            return refuse(format!("it is {} of shape {:?}", info.dtype, info.shape))
                .file(&self.path)
                .tensor(name)
                .wanted(format!("{dtype} of shape {shape:?}"))
                .err();
        }
        self.bytes(name)
    }

    /// The bytes before the payloads: length field and header.
    ///
    /// # Errors
    /// When the file is no longer as long as it was.
    pub fn prefix(&self) -> Result<&[u8]> {
        self.unchanged_length()?;
        Ok(&self.map[..self.header.data_start as usize])
    }

    /// SHA-256 of the payload of `name`.
    ///
    /// # Errors
    /// As [`SafetensorsFile::bytes`].
    pub fn payload_sha256(&self, name: &str) -> Result<Hash> {
        Ok(sha256_hex(self.bytes(name)?))
    }
}
