//! Safetensors files whose payloads are made one at a time, for tensors that are not held in memory together.
//!
//! The layout is decided here for every file the crate writes: the header has `__metadata__` first and then the tensors
//! by name, every object's keys sorted, padded with spaces to 8 bytes; payloads lie in order of dtype width descending,
//! then name, so every one is aligned to its element. Equal content gives equal bytes.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

use super::atomic::AtomicFile;
use super::hash::{Hash, HashingWriter};
use super::safetensors_read::MAX_HEADER;
use super::tensor_dtype::TensorDtype;
use crate::error::{Error, Result, refuse};

/// What a header says of one tensor before its place is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name in the file.
    pub name: String,
    /// Element type.
    pub dtype: TensorDtype,
    /// Extents, outermost first; empty for a scalar.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// A tensor to be written.
    pub fn new(name: impl Into<String>, dtype: TensorDtype, shape: &[usize]) -> Self {
        Self { name: name.into(), dtype, shape: shape.to_vec() }
    }

    /// Bytes of its payload, or `None` when that overflows.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        self.dtype.bytes_of(&self.shape)
    }
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenShard {
    /// SHA-256 of the file.
    pub sha256: Hash,
    /// Length of the file.
    pub bytes: u64,
    /// SHA-256 of each tensor's payload.
    pub payload_sha256: BTreeMap<String, Hash>,
}

/// What was written of a file without payloads. There are no hashes: nothing was read or made that they could be of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SparseShard {
    /// Bytes before the payloads: the length field and the header.
    pub header_bytes: u64,
    /// Length of the file, nearly all of it a hole.
    pub bytes: u64,
}

/// Publishes the safetensors file `path` with payloads that `make` writes, called once for each of `specs` in file order.
/// The order of `specs` makes no difference; a payload is handed on to the disk as it is made.
///
/// # Errors
/// Names file and tensor when a name occurs twice or is `__metadata__`, when a size overflows, or when `make` writes more
/// or less than dtype and shape take; names the file when the header would be longer than 100 MB or the file cannot be
/// written; what `make` says. Nothing is published then.
pub fn stream_safetensors(
    path: impl AsRef<Path>,
    metadata: &BTreeMap<String, String>,
    specs: &[TensorSpec],
    mut make: impl FnMut(&TensorSpec, &mut dyn Write) -> Result<()>,
) -> Result<WrittenShard> {
    let path = path.as_ref();
    let layout = Layout::of(path, metadata, specs)?;
    let mut file = AtomicFile::create(path)?;
    file.put(&layout.prefix)?;
    let mut payload_sha256 = BTreeMap::new();
    for (spec, bytes) in &layout.order {
        let mut payload = Payload {
            file: HashingWriter::new(&mut file),
            declared: *bytes,
            overrun: false,
            disk_error: None,
        };
        let made = make(spec, &mut payload);
        let Payload { file: hashing, overrun, disk_error, .. } = payload;
        if let Some(error) = disk_error {
            return Err(Error::io(path, error));
        }
        let written = hashing.written();
        let differs = |what: String| {
            refuse(format!("{what} were made for {} of shape {:?}", spec.dtype, spec.shape))
                .file(path)
                .tensor(&spec.name)
                .wanted(format!("{bytes} bytes"))
        };
        if overrun {
            return differs(format!("more than {bytes} bytes")).err();
        }
        made?;
        if written < *bytes {
            return differs(format!("{written} bytes")).err();
        }
        payload_sha256.insert(spec.name.clone(), hashing.finish().1);
    }
    let bytes = file.written();
    Ok(WrittenShard { sha256: file.commit()?, bytes, payload_sha256 })
}

/// Publishes the safetensors file `path` without its payloads: header, the payloads' first bytes `head` (in file order: of
/// the widest types), and a hole, which reads as zeros and takes no room where the file system knows holes. For
/// measuring what reads headers.
///
/// # Errors
/// As [`stream_safetensors`], as far as the header goes; a `head` longer than all payloads.
pub fn sparse_safetensors(
    path: impl AsRef<Path>,
    metadata: &BTreeMap<String, String>,
    specs: &[TensorSpec],
    head: &[u8],
) -> Result<SparseShard> {
    let path = path.as_ref();
    let layout = Layout::of(path, metadata, specs)?;
    if head.len() as u64 > layout.payload_bytes {
        return refuse(format!("{} bytes for payloads of {}", head.len(), layout.payload_bytes))
            .file(path)
            .wanted("the first bytes of the payloads")
            .err();
    }
    let mut file = AtomicFile::create(path)?;
    file.put(&layout.prefix)?;
    let header_bytes = file.written();
    file.put(head)?;
    let bytes = header_bytes + layout.payload_bytes;
    file.commit_with_hole(bytes)?;
    Ok(SparseShard { header_bytes, bytes })
}

/// The way of one payload into the file: hashed, and never longer than declared.
struct Payload<'f> {
    file: HashingWriter<&'f mut AtomicFile>,
    declared: u64,
    overrun: bool,
    /// Kept apart from what `make` says, which knows no path.
    disk_error: Option<io::Error>,
}

impl Write for Payload<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() as u64 > self.declared - self.file.written() {
            self.overrun = true;
            return Err(io::Error::other("the payload is longer than declared"));
        }
        self.file.write(bytes).map_err(|error| {
            if error.kind() == io::ErrorKind::Interrupted {
                return error;
            }
            let told = io::Error::from(error.kind());
            self.disk_error = Some(error);
            told
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Where everything of a file lies.
pub(super) struct Layout<'s> {
    /// Length field and header.
    pub prefix: Vec<u8>,
    /// The tensors in file order with the bytes of their payloads.
    pub order: Vec<(&'s TensorSpec, u64)>,
    /// Bytes of all payloads.
    pub payload_bytes: u64,
}

impl<'s> Layout<'s> {
    /// Checks the tensors, sorts them and writes the header; `path` is only named in refusals.
    pub fn of(path: &Path, metadata: &BTreeMap<String, String>, specs: &'s [TensorSpec]) -> Result<Self> {
        let mut by_name: BTreeMap<&str, (&TensorSpec, u64)> = BTreeMap::new();
        let mut total = 0_u64;
        for spec in specs {
            let place = |what: &str| refuse(what).file(path).tensor(&spec.name);
            if spec.name == "__metadata__" {
                return place("this name is reserved by the format").wanted("another tensor name").err();
            }
            let sizes = spec.bytes().and_then(|bytes| Some((bytes, total.checked_add(bytes)?)));
            let Some((bytes, sum)) = sizes else {
                return place("its size overflows").wanted("a shape that fits a file").err();
            };
            total = sum;
            if by_name.insert(&spec.name, (spec, bytes)).is_some() {
                return place("the name occurs twice").wanted("each name once a file").err();
            }
        }
        let mut order: Vec<_> = by_name.into_values().collect();
        order.sort_by_key(|(spec, _)| std::cmp::Reverse(spec.dtype.size()));
        let header = header_bytes(metadata, &order);
        if header.len() as u64 > MAX_HEADER {
            return refuse(format!("the header would take {} bytes", header.len()))
                .file(path)
                .wanted(format!("at most {MAX_HEADER}: fewer tensors a shard"))
                .err();
        }
        let mut prefix = (header.len() as u64).to_le_bytes().to_vec();
        prefix.extend_from_slice(&header);
        Ok(Self { prefix, order, payload_bytes: total })
    }
}

fn header_bytes(metadata: &BTreeMap<String, String>, order: &[(&TensorSpec, u64)]) -> Vec<u8> {
    let mut entries = BTreeMap::new();
    let mut cursor = 0;
    for (spec, bytes) in order {
        let end = cursor + bytes;
        let shape: Vec<String> = spec.shape.iter().map(usize::to_string).collect();
        let entry = format!(
            "{{\"data_offsets\":[{cursor},{end}],\"dtype\":\"{}\",\"shape\":[{}]}}",
            spec.dtype,
            shape.join(",")
        );
        entries.insert(&spec.name, entry);
        cursor = end;
    }
    let quoted = |text: &str| serde_json::to_string(text).expect("a string always has a JSON form");
    let mut parts = Vec::new();
    if !metadata.is_empty() {
        let pairs: Vec<String> =
            metadata.iter().map(|(k, v)| format!("{}:{}", quoted(k), quoted(v))).collect();
        parts.push(format!("\"__metadata__\":{{{}}}", pairs.join(",")));
    }
    parts.extend(entries.iter().map(|(name, entry)| format!("{}:{entry}", quoted(name))));
    let mut header = format!("{{{}}}", parts.join(",")).into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    header
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::safetensors_read::SafetensorsFile;
    use crate::store::safetensors_write::{TensorData, write_safetensors};

    fn specs() -> Vec<TensorSpec> {
        vec![
            TensorSpec::new("z", TensorDtype::U8, &[5]),
            TensorSpec::new("b", TensorDtype::I16, &[2, 3]),
            TensorSpec::new("a", TensorDtype::I16, &[1]),
            TensorSpec::new("none", TensorDtype::F32, &[0, 7]),
            TensorSpec::new("scalar", TensorDtype::I32, &[]),
        ]
    }

    fn metadata() -> BTreeMap<String, String> {
        [("format".to_owned(), "pt".to_owned())].into()
    }

    /// Bytes that tell tensors and places apart.
    fn payload(spec: &TensorSpec) -> Vec<u8> {
        (0..spec.bytes().unwrap()).map(|i| spec.name.as_bytes()[0] ^ i as u8).collect()
    }

    #[test]
    fn a_streamed_file_is_the_one_that_is_written_whole() {
        let dir = tempfile::tempdir().unwrap();
        let mut order = Vec::new();
        let streamed =
            stream_safetensors(dir.path().join("streamed"), &metadata(), &specs(), |spec, sink| {
                order.push(spec.name.clone());
                // In pieces, one of them empty.
                payload(spec).chunks(2).for_each(|piece| sink.write_all(piece).unwrap());
                sink.write_all(&[]).unwrap();
                Ok(())
            })
            .unwrap();
        assert_eq!(order, ["none", "scalar", "a", "b", "z"]);
        let payloads: Vec<Vec<u8>> = specs().iter().map(payload).collect();
        let tensors: Vec<TensorData<'_>> = specs()
            .iter()
            .zip(&payloads)
            .map(|(spec, data)| TensorData::from_bytes(&spec.name, spec.dtype, &spec.shape, data))
            .collect();
        let whole = write_safetensors(dir.path().join("whole"), &metadata(), &tensors).unwrap();
        assert_eq!(streamed, whole);
        let read = |name: &str| std::fs::read(dir.path().join(name)).unwrap();
        assert_eq!(read("streamed"), read("whole"));
        assert_eq!(read("streamed").len() as u64, streamed.bytes);
    }

    #[test]
    fn a_payload_of_another_length_is_refused_and_leaves_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        for (extra, what) in [(-1_i64, "11 bytes were made"), (1, "more than 12 bytes were made")] {
            let error = stream_safetensors(&path, &metadata(), &specs(), |spec, sink| {
                let mut bytes = payload(spec);
                if spec.name == "b" {
                    bytes.resize((bytes.len() as i64 + extra) as usize, 0);
                }
                // What `make` says of the sink's refusal is of no use; the tensor and both lengths are.
                sink.write_all(&bytes).map_err(|error| Error::io("elsewhere", error))
            })
            .unwrap_err()
            .to_string();
            for part in [what, "tensor b", "x.safetensors", "wanted: 12 bytes"] {
                assert!(error.contains(part), "{error}");
            }
        }
        let error = stream_safetensors(&path, &metadata(), &specs(), |spec, _| {
            refuse("no such weight").tensor(&spec.name).err()
        });
        assert_eq!(error.unwrap_err().to_string(), "tensor none: no such weight");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn names_and_sizes_are_refused_before_anything_is_made() {
        let dir = tempfile::tempdir().unwrap();
        let twice = [specs(), specs()].concat();
        let reserved = vec![TensorSpec::new("__metadata__", TensorDtype::U8, &[1])];
        let huge = vec![TensorSpec::new("huge", TensorDtype::F64, &[1 << 40, 1 << 40])];
        let many = vec![
            TensorSpec::new("p", TensorDtype::U8, &[usize::MAX]),
            TensorSpec::new("q", TensorDtype::U8, &[1]),
        ];
        for (specs, what) in
            [(twice, "occurs twice"), (reserved, "reserved"), (huge, "overflows"), (many, "overflows")]
        {
            let made = stream_safetensors(dir.path().join("x"), &metadata(), &specs, |_, _| unreachable!());
            assert!(made.unwrap_err().to_string().contains(what));
            let sparse = sparse_safetensors(dir.path().join("x"), &metadata(), &specs, &[]);
            assert!(sparse.unwrap_err().to_string().contains(what));
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_sparse_file_has_the_header_of_a_full_one_and_reads_as_zeros_after_its_head() {
        let dir = tempfile::tempdir().unwrap();
        let (full, sparse) = (dir.path().join("full"), dir.path().join("sparse"));
        let written = stream_safetensors(&full, &metadata(), &specs(), |spec, sink| {
            sink.write_all(&payload(spec)).unwrap();
            Ok(())
        })
        .unwrap();
        let hollow = sparse_safetensors(&sparse, &metadata(), &specs(), &7i32.to_le_bytes()).unwrap();
        assert_eq!(hollow.bytes, written.bytes);
        let (full, sparse) = (SafetensorsFile::open(full).unwrap(), SafetensorsFile::open(sparse).unwrap());
        assert_eq!(full.header(), sparse.header());
        assert_eq!(sparse.header().data_start, hollow.header_bytes);
        assert_eq!(
            (sparse.bytes("scalar").unwrap(), sparse.bytes("b").unwrap()),
            (&[7, 0, 0, 0][..], &[0; 12][..])
        );
        let long = sparse_safetensors(dir.path().join("long"), &metadata(), &specs(), &[0; 24]).unwrap_err();
        assert!(long.to_string().contains("24 bytes for payloads of 23"), "{long}");
    }
}
