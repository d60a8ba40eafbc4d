//! Finished linears on their way into a carrier: a small shard and a record each, in the transaction's scratch folder.
//!
//! The record is published after the shard and names its SHA-256, so that a record means a whole shard. What is adopted
//! was decoded again and has the hashes of its record; what does not is made anew.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};

use super::encode::ModuleRecord;
use super::linears::CarriedLinear;
use crate::checkpoint::reconstruction::install;
use crate::checkpoint::trellis_tensors::LinearNames;
use crate::checkpoint::{CheckpointDir, WeightSource};
use crate::codec::trellis::codebook::Codebook;
use crate::codec::trellis::linear::{TrellisLinear, reconstruction_sha256};
use crate::error::{Result, refuse};
use crate::store::atomic::write_json_atomic;
use crate::store::hash::{Hash, sha256_file};
use crate::store::safetensors_read::SafetensorsFile;
use crate::store::safetensors_write::write_safetensors;
use crate::store::strict_json::read_json;

/// Folder within the scratch folder.
pub const MODULES_FOLDER: &str = "modules";

/// A record with the shard it is of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredRecord {
    shard_sha256: Hash,
    record: ModuleRecord,
}

/// The finished linears of a carrier in the making.
#[derive(Debug, Clone)]
pub struct ModuleStore {
    folder: PathBuf,
}

impl ModuleStore {
    /// The store of a scratch folder, whose folder `modules` exists.
    pub fn new(scratch: &Path) -> Self {
        Self { folder: scratch.join(MODULES_FOLDER) }
    }

    /// A linear's shard.
    pub fn shard_path(&self, module: &str) -> PathBuf {
        self.folder.join(format!("{module}.safetensors"))
    }

    fn record_path(&self, module: &str) -> PathBuf {
        self.folder.join(format!("{module}.json"))
    }

    /// Publishes a linear.
    ///
    /// # Errors
    /// Names the file that cannot be written.
    pub fn put(&self, packed: &TrellisLinear, record: &ModuleRecord) -> Result<()> {
        let tensors = LinearNames::own(&record.module, packed.codebook).tensors(packed, |_| false);
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let shard_sha256 = write_safetensors(self.shard_path(&record.module), &metadata, &tensors)?.sha256;
        let stored = StoredRecord { shard_sha256, record: record.clone() };
        write_json_atomic(self.record_path(&record.module), &stored)?;
        Ok(())
    }

    /// The record of a finished linear whose shard is what it was.
    ///
    /// # Errors
    /// Names the record that cannot be read, or a shard that changed.
    pub fn record(&self, module: &str) -> Result<ModuleRecord> {
        let path = self.record_path(module);
        let StoredRecord { shard_sha256, record } = read_json(&path)?;
        let shard = self.shard_path(module);
        if record.module != module || sha256_file(&shard)? != shard_sha256 {
            return refuse("the packed linear is not the one that was recorded")
                .file(shard)
                .tensor(module)
                .wanted("the file as it was written")
                .err();
        }
        Ok(record)
    }

    /// A finished linear, decoded and compared with its record; `None` where there is none, or one of other work.
    ///
    /// # Errors
    /// As [`ModuleStore::record`], and a shard that does not decode to what was recorded.
    pub fn adopt(
        &self,
        linear: &CarriedLinear,
        bits: u32,
        bf16_sha256: &Hash,
    ) -> Result<Option<(TrellisLinear, ModuleRecord)>> {
        if !self.record_path(&linear.module).exists() {
            return Ok(None);
        }
        let record = self.record(&linear.module)?;
        let path = self.shard_path(&linear.module);
        let file = SafetensorsFile::open(&path)?;
        let packed = LinearNames::own(&linear.module, Codebook::Mcg).read(&file)?;
        let same = (record.bits, record.k, record.n) == (bits, linear.k, linear.n)
            && (packed.bits, packed.k, packed.n) == (bits, linear.k, linear.n)
            && record.bf16_sha256 == *bf16_sha256
            && packed.packed_sha256() == record.packed_sha256
            && reconstruction_sha256(&packed.dense()) == record.reconstruction_sha256;
        match same {
            true => Ok(Some((packed, record))),
            false => refuse("the packed linear does not decode to what was recorded")
                .file(path)
                .tensor(&linear.module)
                .wanted("the file as it was written; remove it and its record to have it made anew")
                .err(),
        }
    }
}

/// A model of which some linears are packed: these decoded, everything else as it is stored.
pub struct Overlay<'a> {
    model: &'a CheckpointDir,
    packed: BTreeMap<String, TrellisLinear>,
}

impl<'a> Overlay<'a> {
    /// The model itself.
    pub fn new(model: &'a CheckpointDir) -> Self {
        Self { model, packed: BTreeMap::new() }
    }

    /// Puts a packed linear in its place.
    pub fn put(&mut self, module: &str, packed: TrellisLinear) {
        self.packed.insert(format!("{module}.weight"), packed);
    }
}

impl WeightSource for Overlay<'_> {
    fn contains(&self, name: &str) -> bool {
        self.model.contains(name)
    }

    fn load(&self, name: &str, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
        let Some(packed) = self.packed.get(name) else {
            return self.model.load(name, shape, dtype, device);
        };
        if shape != [packed.n, packed.k] {
            return refuse(format!("its shape is [{}, {}]", packed.n, packed.k))
                .tensor(name)
                .wanted(format!("{shape:?}"))
                .err();
        }
        install(&packed.dense_f32(), dtype, device)
    }
}
