//! A checkpoint directory: `model.safetensors.index.json` and its shards, or a single `model.safetensors`.
//!
//! Shards are memory-mapped; payloads are read when asked for. Index and shards must be a bijection: an index entry
//! without tensor, a tensor without index entry, a tensor in two shards, a shard that is missing and a `model*` shard
//! that the index does not know are refused by name.
//!
//! Shards may be symbolic links: a hub cache is a folder of links into its blobs. What they lead to is only read, and its
//! hash is in the inventory; nothing is ever written through them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};

use super::WeightSource;
use crate::error::{IoContext, Refusal, Result, refuse};
use crate::store::hash::{Hash, sha256_hex};
use crate::store::index::ShardIndex;
use crate::store::safetensors_read::{SafetensorsFile, TensorInfo};
use crate::store::tensor_dtype::TensorDtype;

pub use crate::store::index::INDEX_FILE;

/// File name of a checkpoint in one piece.
pub const SINGLE_FILE: &str = "model.safetensors";

/// Where a tensor lies.
#[derive(Debug, Clone, Copy)]
pub struct TensorPlace<'a> {
    /// File name of the shard within the directory.
    pub file: &'a str,
    /// Dtype, shape and byte range within that file.
    pub info: &'a TensorInfo,
}

/// An open checkpoint directory.
#[derive(Debug)]
pub struct CheckpointDir {
    dir: PathBuf,
    /// Shards sorted by file name.
    shards: Vec<(String, SafetensorsFile)>,
    /// Tensor name to position in `shards`.
    tensors: BTreeMap<String, usize>,
}

impl CheckpointDir {
    /// Opens `dir` and checks index and headers; payloads are not read.
    ///
    /// # Errors
    /// Names file and tensor of the first disagreement, see the module's page and [`SafetensorsFile::open`].
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        if !dir.is_dir() {
            return refuse("no such directory").file(dir).wanted("a checkpoint directory").err();
        }
        let index_path = dir.join(INDEX_FILE);
        if index_path.exists() {
            let index = ShardIndex::read(&index_path)?;
            return Self::open_sharded(dir, &index_path, &index.weight_map);
        }
        if !dir.join(SINGLE_FILE).exists() {
            return refuse("the directory holds no weights")
                .file(dir)
                .wanted(format!("{INDEX_FILE} with its shards, or {SINGLE_FILE}"))
                .err();
        }
        Self::open_file(dir.join(SINGLE_FILE))
    }

    /// Opens one safetensors file as a checkpoint of its own, whatever lies beside it.
    ///
    /// # Errors
    /// As [`SafetensorsFile::open`].
    pub fn open_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let shard = SafetensorsFile::open(path)?;
        let tensors = shard.names().map(|name| (name.to_owned(), 0)).collect();
        let dir = path.parent().unwrap_or(Path::new("")).to_path_buf();
        let file = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        Ok(Self { dir, shards: vec![(file, shard)], tensors })
    }

    /// Opens whatever `path` is: one safetensors file, a checkpoint directory, or, without an index and
    /// [`SINGLE_FILE`], a folder of shards, such as a walk's finished layers.
    ///
    /// # Errors
    /// As [`CheckpointDir::open`]; names a tensor that is in two shards, or the path where there is nothing to open.
    pub fn open_any(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if path.is_file() {
            return Self::open_file(path);
        }
        if !path.is_dir() || [INDEX_FILE, SINGLE_FILE].iter().any(|file| path.join(file).exists()) {
            return Self::open(path);
        }
        let mut files = Vec::new();
        for entry in std::fs::read_dir(path).at(path)? {
            let name = entry.at(path)?.file_name().to_string_lossy().into_owned();
            if name.ends_with(".safetensors") && !name.starts_with('.') {
                files.push(name);
            }
        }
        files.sort();
        if files.is_empty() {
            return refuse("the directory holds no weights")
                .file(path)
                .wanted(format!("{INDEX_FILE} with its shards, or safetensors files"))
                .err();
        }
        let mut shards = Vec::new();
        let mut tensors = BTreeMap::new();
        for file in files {
            let shard = SafetensorsFile::open(path.join(&file))?;
            add_tensors(&mut tensors, &shards, &shard)?;
            shards.push((file, shard));
        }
        Ok(Self { dir: path.to_path_buf(), shards, tensors })
    }

    fn open_sharded(dir: &Path, index_path: &Path, weight_map: &BTreeMap<String, String>) -> Result<Self> {
        let files: BTreeSet<&String> = weight_map.values().collect();
        let mut shards = Vec::new();
        let mut tensors: BTreeMap<String, usize> = BTreeMap::new();
        for file in files {
            let path = dir.join(file);
            if !path.exists() {
                let tensor = weight_map.iter().find(|(_, f)| *f == file).map_or("", |(name, _)| name);
                return refuse(format!("the shard is missing; {INDEX_FILE} places tensors in it"))
                    .file(&path)
                    .tensor(tensor)
                    .wanted("all shards of the index in the directory")
                    .err();
            }
            let shard = SafetensorsFile::open(&path)?;
            add_tensors(&mut tensors, &shards, &shard)?;
            for name in shard.names() {
                match weight_map.get(name) {
                    Some(indexed) if indexed == file => {}
                    Some(indexed) => {
                        return refuse(format!(
                            "the tensor is here, but {INDEX_FILE} places it in {indexed}"
                        ))
                        .file(&path)
                        .tensor(name)
                        .wanted("an index that agrees with the shards")
                        .err();
                    }
                    None => {
                        return refuse(format!("the tensor has no entry in {INDEX_FILE}"))
                            .file(&path)
                            .tensor(name)
                            .wanted("an index that lists every tensor of its shards")
                            .err();
                    }
                }
            }
            shards.push((file.clone(), shard));
        }
        if let Some((name, file)) = weight_map.iter().find(|(name, _)| !tensors.contains_key(*name)) {
            return refuse(format!("the index places the tensor in {file}, which does not hold it"))
                .file(index_path)
                .tensor(name)
                .wanted("an index that agrees with the shards")
                .err();
        }
        refuse_unlisted(dir, &shards)?;
        Ok(Self { dir: dir.to_path_buf(), shards, tensors })
    }

    /// The directory as it was given.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// File names of the shards, sorted.
    pub fn shard_files(&self) -> impl Iterator<Item = &str> {
        self.shards.iter().map(|(file, _)| file.as_str())
    }

    /// The opened shards with their file names, sorted.
    pub fn shards(&self) -> impl Iterator<Item = (&str, &SafetensorsFile)> {
        self.shards.iter().map(|(file, shard)| (file.as_str(), shard))
    }

    /// Tensor names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether a tensor of this name exists.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// File, dtype, shape and byte range of a tensor.
    ///
    /// # Errors
    /// Names directory and tensor when it is missing.
    pub fn info(&self, name: &str) -> Result<TensorPlace<'_>> {
        let (file, shard) = self.shard_of(name)?;
        Ok(TensorPlace { file, info: shard.info(name)? })
    }

    /// The payload of a tensor, little endian, row major; not necessarily aligned.
    ///
    /// # Errors
    /// Names directory and tensor when it is missing, and a shard that is no longer as long as it was.
    pub fn tensor_bytes(&self, name: &str) -> Result<&[u8]> {
        self.shard_of(name)?.1.bytes(name)
    }

    /// SHA-256 of the payload of a tensor.
    ///
    /// # Errors
    /// Names directory and tensor when it is missing.
    pub fn payload_sha256(&self, name: &str) -> Result<Hash> {
        Ok(sha256_hex(self.tensor_bytes(name)?))
    }

    fn shard_of(&self, name: &str) -> Result<(&str, &SafetensorsFile)> {
        match self.tensors.get(name) {
            Some(&shard) => Ok((&self.shards[shard].0, &self.shards[shard].1)),
            None => refuse("the checkpoint holds no such tensor").file(&self.dir).tensor(name).err(),
        }
    }
}

/// Adds the tensors of the shard that comes after `shards`.
fn add_tensors(
    tensors: &mut BTreeMap<String, usize>,
    shards: &[(String, SafetensorsFile)],
    shard: &SafetensorsFile,
) -> Result<()> {
    for name in shard.names() {
        if let Some(other) = tensors.insert(name.to_owned(), shards.len()) {
            return refuse(format!("the tensor is also in {}", shards[other].0))
                .file(shard.path())
                .tensor(name)
                .wanted("each tensor in one shard")
                .err();
        }
    }
    Ok(())
}

/// A `model*.safetensors` beside the index that it does not list is a sign of a stale index.
fn refuse_unlisted(dir: &Path, shards: &[(String, SafetensorsFile)]) -> Result<()> {
    let mut unlisted = BTreeSet::new();
    for entry in std::fs::read_dir(dir).at(dir)? {
        let name = entry.at(dir)?.file_name().to_string_lossy().into_owned();
        let is_shard = name.starts_with("model") && name.ends_with(".safetensors");
        if is_shard && !shards.iter().any(|(file, _)| *file == name) {
            unlisted.insert(name);
        }
    }
    match unlisted.first() {
        None => Ok(()),
        Some(name) => refuse(format!("{INDEX_FILE} places no tensor in this shard"))
            .file(dir.join(name))
            .wanted("an index that lists all shards beside it")
            .err(),
    }
}

impl WeightSource for CheckpointDir {
    fn contains(&self, name: &str) -> bool {
        self.contains(name)
    }

    fn load(&self, name: &str, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
        let (_, shard) = self.shard_of(name)?;
        load_exact(shard, name, shape, dtype, device)
    }
}

/// Loads a BF16, F16 or F32 tensor of `shape` from `shard` as `dtype`, every value finite and unchanged.
///
/// # Errors
/// Names file and tensor when it is missing, of another shape or stored type, or holds a value that is not finite or
/// that `dtype` cannot hold exactly (flat index and row are named).
pub fn load_exact(
    shard: &SafetensorsFile,
    name: &str,
    shape: &[usize],
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let info = shard.info(name)?;
    let place = |refusal: Refusal| refusal.file(shard.path()).tensor(name);
    if info.shape != shape {
        return place(refuse(format!("its shape is {:?}", info.shape))).wanted(format!("{shape:?}")).err();
    }
    let bytes = shard.bytes(name)?;
    let bad_value = |(index, value): (usize, f32)| {
        let row = index / shape.last().copied().unwrap_or(1).max(1);
        let at = format!("value {value} at flat index {index}");
        if value.is_finite() {
            place(refuse(format!("{at} cannot be held by {dtype:?}")))
                .row(row)
                .wanted("a type that holds it exactly")
        } else {
            place(refuse(format!("{at} is not finite"))).row(row).wanted("finite weights")
        }
    };
    macro_rules! convert {
        ($stored:ty, $to_f32:expr) => {{
            let stored = bytes.as_chunks().0.iter().map(|chunk| <$stored>::from_le_bytes(*chunk));
            match dtype {
                DType::F32 => exact(stored, $to_f32, |x| x).map(|v| Tensor::from_vec(v, shape, device)),
                DType::BF16 => {
                    exact(stored, $to_f32, bf16::from_f32).map(|v| Tensor::from_vec(v, shape, device))
                }
                DType::F16 => {
                    exact(stored, $to_f32, f16::from_f32).map(|v| Tensor::from_vec(v, shape, device))
                }
                DType::F64 => exact(stored, $to_f32, f64::from).map(|v| Tensor::from_vec(v, shape, device)),
                other => return place(refuse(format!("weights cannot be loaded as {other:?}"))).err(),
            }
        }};
    }
    let tensor = match info.dtype {
        TensorDtype::BF16 => convert!(bf16, bf16::to_f32),
        TensorDtype::F16 => convert!(f16, f16::to_f32),
        TensorDtype::F32 => convert!(f32, |x: f32| x),
        other => {
            return place(refuse(format!("its dtype is {other}"))).wanted("BF16, F16 or F32").err();
        }
    };
    Ok(tensor.map_err(bad_value)??)
}

/// Types that [`exact`] converts to: their values widened, to see whether the conversion kept them.
trait Widen: Copy {
    fn widen(self) -> f64;
}

macro_rules! widen {
    ($($type:ty),*) => {
        $(impl Widen for $type {
            #[inline]
            fn widen(self) -> f64 {
                f64::from(self)
            }
        })*
    };
}

widen!(f32, f64, bf16, f16);

/// Converts every value, or gives flat index and value of the first that is not finite or not kept.
fn exact<S, T: Widen>(
    stored: impl ExactSizeIterator<Item = S>,
    to_f32: impl Fn(S) -> f32,
    convert: impl Fn(f32) -> T,
) -> Result<Vec<T>, (usize, f32)> {
    let mut values = Vec::with_capacity(stored.len());
    for (index, raw) in stored.enumerate() {
        let value = to_f32(raw);
        let converted = convert(value);
        if !value.is_finite() || converted.widen() != f64::from(value) {
            return Err((index, value));
        }
        values.push(converted);
    }
    Ok(values)
}
