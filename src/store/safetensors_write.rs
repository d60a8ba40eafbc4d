//! Writing safetensors so that equal content gives equal bytes.
//!
//! The published crate writes several `__metadata__` keys in random order (safetensors issue 584), with mode 0600 and
//! without fsync. Here the header has `__metadata__` first and then the tensors by name, every object's keys sorted;
//! payloads lie in order of dtype width descending, then name; the header is padded with spaces to 8 bytes, so every
//! payload is aligned to its element. That layout is [`safetensors_stream`](super::safetensors_stream)'s, which also
//! writes tensors that are not in memory.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::hash::{Hash, hex};
pub use super::safetensors_stream::WrittenShard;
use super::safetensors_stream::{Layout, TensorSpec, stream_safetensors};
use super::tensor_dtype::TensorDtype;
use crate::error::{IoContext, Result, refuse};

/// One tensor to be written: payload little endian, row major.
#[derive(Debug, Clone)]
pub struct TensorData<'a> {
    /// Name in the file.
    pub name: String,
    /// Element type.
    pub dtype: TensorDtype,
    /// Extents, outermost first; empty for a scalar.
    pub shape: Vec<usize>,
    /// Payload.
    pub data: Cow<'a, [u8]>,
}

macro_rules! from_slice {
    ($($(#[$doc:meta])* $function:ident: $type:ty => $dtype:ident;)*) => {
        $($(#[$doc])*
        pub fn $function(name: impl Into<String>, shape: &[usize], values: &[$type]) -> TensorData<'static> {
            let data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            TensorData { name: name.into(), dtype: TensorDtype::$dtype, shape: shape.to_vec(), data: Cow::Owned(data) }
        })*
    };
}

impl<'a> TensorData<'a> {
    /// A tensor over bytes that are already in file form.
    pub fn from_bytes(name: impl Into<String>, dtype: TensorDtype, shape: &[usize], data: &'a [u8]) -> Self {
        Self { name: name.into(), dtype, shape: shape.to_vec(), data: Cow::Borrowed(data) }
    }

    from_slice! {
        /// A BF16 tensor.
        bf16: half::bf16 => BF16;
        /// An F16 tensor.
        f16: half::f16 => F16;
        /// An F32 tensor.
        f32: f32 => F32;
        /// An F64 tensor.
        f64: f64 => F64;
        /// An I16 tensor.
        i16: i16 => I16;
        /// An I32 tensor.
        i32: i32 => I32;
        /// An I64 tensor.
        i64: i64 => I64;
        /// A U8 tensor.
        u8: u8 => U8;
    }
}

/// Publishes `tensors` and `metadata` as the safetensors file `path`; the order of `tensors` makes no difference.
///
/// # Errors
/// Names file and tensor when a name occurs twice or is `__metadata__`, when a payload's length is not what its dtype and
/// shape take, when the header would be longer than 100 MB, or when the file cannot be written.
pub fn write_safetensors(
    path: impl AsRef<Path>,
    metadata: &BTreeMap<String, String>,
    tensors: &[TensorData<'_>],
) -> Result<WrittenShard> {
    let path = path.as_ref();
    let (specs, payloads) = (checked(path, tensors)?, payloads(tensors));
    stream_safetensors(path, metadata, &specs, |spec, sink| sink.write_all(payloads[&spec.name]).at(path))
}

/// SHA-256 of the file that [`write_safetensors`] would publish.
///
/// # Errors
/// As [`write_safetensors`]; nothing is written.
pub fn safetensors_sha256(
    path: impl AsRef<Path>,
    metadata: &BTreeMap<String, String>,
    tensors: &[TensorData<'_>],
) -> Result<Hash> {
    let path = path.as_ref();
    let (specs, payloads) = (checked(path, tensors)?, payloads(tensors));
    let layout = Layout::of(path, metadata, &specs)?;
    let mut hasher = Sha256::new();
    hasher.update(&layout.prefix);
    layout.order.iter().for_each(|(spec, _)| hasher.update(payloads[&spec.name]));
    Ok(hex(&hasher.finalize()))
}

/// The tensors without their payloads, whose lengths agree.
fn checked(path: &Path, tensors: &[TensorData<'_>]) -> Result<Vec<TensorSpec>> {
    let check = |TensorData { name, dtype, shape, data }: &TensorData<'_>| {
        if dtype.bytes_of(shape) != Some(data.len() as u64) {
            return refuse(format!("{} bytes are given for {dtype} of shape {shape:?}", data.len()))
                .file(path)
                .tensor(name)
                .wanted("dtype, shape and length that agree")
                .err();
        }
        Ok(TensorSpec::new(name, *dtype, shape))
    };
    tensors.iter().map(check).collect()
}

/// The payloads by name; of two of one name either, for the layout refuses them.
fn payloads<'t>(tensors: &'t [TensorData<'_>]) -> BTreeMap<&'t String, &'t [u8]> {
    tensors.iter().map(|tensor| (&tensor.name, &tensor.data[..])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::hash::sha256_file;
    use crate::store::safetensors_read::SafetensorsFile;

    fn sample() -> Vec<TensorData<'static>> {
        vec![
            TensorData::u8("z.u8", &[3], &[1, 2, 3]),
            TensorData::i32("scalar", &[], &[-7]),
            TensorData::f64("b.f64", &[1, 2], &[0.5, -1.0]),
            TensorData::bf16("a.bf16", &[2], &[half::bf16::ONE, half::bf16::MIN]),
            TensorData::f16("empty", &[0, 4], &[]),
            TensorData::i64("q\"uoted", &[1], &[i64::MIN]),
        ]
    }

    fn metadata() -> BTreeMap<String, String> {
        [("r7_schema", "2"), ("format", "pt"), ("a", "ä\"")].map(|(k, v)| (k.into(), v.into())).into()
    }

    #[test]
    fn the_order_given_makes_no_difference_and_two_writes_are_equal() {
        let dir = tempfile::tempdir().unwrap();
        let mut tensors = sample();
        let first = write_safetensors(dir.path().join("1"), &metadata(), &tensors).unwrap();
        tensors.reverse();
        let second = write_safetensors(dir.path().join("2"), &metadata(), &tensors).unwrap();
        assert_eq!(first, second);
        let bytes = std::fs::read(dir.path().join("1")).unwrap();
        assert_eq!(bytes, std::fs::read(dir.path().join("2")).unwrap());
        assert_eq!(first.sha256, sha256_file(dir.path().join("1")).unwrap());
        assert_eq!(first.bytes, bytes.len() as u64);
        let length = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
        assert_eq!(length % 8, 0);
        let header = std::str::from_utf8(&bytes[8..8 + length]).unwrap();
        assert!(header.starts_with(
            "{\"__metadata__\":{\"a\":\"ä\\\"\",\"format\":\"pt\",\"r7_schema\":\"2\"},\"a.bf16\":"
        ));
        // Widths 8, 8, 4, 2, 2, 1; then by name.
        assert!(header.contains("\"b.f64\":{\"data_offsets\":[0,16]"), "{header}");
        assert!(header.contains("\"q\\\"uoted\":{\"data_offsets\":[16,24]"), "{header}");
        assert!(header.contains("\"z.u8\":{\"data_offsets\":[32,35]"), "{header}");
    }

    #[test]
    fn the_published_crate_and_our_reader_read_it_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        let written = write_safetensors(&path, &metadata(), &sample()).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let ours = SafetensorsFile::open(&path).unwrap();
        assert_eq!(theirs.len(), sample().len());
        for tensor in sample() {
            let view = theirs.tensor(&tensor.name).unwrap();
            assert_eq!((view.shape(), view.data()), (&tensor.shape[..], &tensor.data[..]));
            assert_eq!(format!("{:?}", view.dtype()), tensor.dtype.name());
            assert_eq!(ours.bytes_as(&tensor.name, tensor.dtype, &tensor.shape).unwrap(), &tensor.data[..]);
            assert_eq!(ours.payload_sha256(&tensor.name).unwrap(), written.payload_sha256[&tensor.name]);
        }
        assert_eq!(ours.metadata(), &metadata());
        let (_, theirs) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(theirs.metadata().clone().unwrap().into_iter().collect::<BTreeMap<_, _>>(), metadata());
    }

    #[test]
    fn what_cannot_be_written_is_named_and_leaves_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        let mut twice = sample();
        twice.push(twice[0].clone());
        let mut short = sample();
        short[2].data.to_mut().pop();
        for (tensors, name, what) in [(twice, "z.u8", "twice"), (short, "b.f64", "15 bytes")] {
            let error = write_safetensors(&path, &metadata(), &tensors).unwrap_err().to_string();
            assert!(
                error.contains(name) && error.contains(what) && error.contains("x.safetensors"),
                "{error}"
            );
        }
        assert!(!path.exists());
    }
}
