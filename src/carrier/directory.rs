//! A carrier's directory: shards, index, configuration, what is copied, manifest.
//!
//! A shard of the model keeps its name. One of which nothing is packed or left out is copied; any other is written anew, the
//! kept payloads as they are; one that would be empty is dropped. Every shard is read back: its payloads must have the
//! hashes that the model's inventory, or the finished linear, has for them. The index is made of the shards themselves.
//!
//! `config.json` gets a `quantization_config`, which is also `quantization_config.json`: the keys that exllamav3 and the
//! loaders after it look for (`quant_method`, `bits`, `head_bits`, `codebook`, `calibration`, `tensor_storage`), and `scope`.
//! Source: exllamav3 v0.0.43, `exllamav3/conversion/compile.py` and `quant_config.py`.

use std::collections::BTreeMap;
use std::path::Path;

use rayon::prelude::*;
use serde_json::{Map, Value, json};

use super::encode::ModuleRecord;
use super::linears::{Scope, Sorted};
use super::manifest::{KeptEntry, MANIFEST_FILE, Manifest, PackedEntry, SCHEMA};
use super::modules::ModuleStore;
use crate::checkpoint::CheckpointDir;
use crate::checkpoint::complete::{CONFIG_FILE, QUANTIZATION_FILE, pretty, read_config};
use crate::checkpoint::inventory::Inventory;
use crate::codec::trellis::codebook::Codebook;
use crate::error::{Result, refuse};
use crate::publish::{copy_file, side_files};
use crate::store::canonical_json::canonical_file;
use crate::store::hash::Hash;
use crate::store::index::INDEX_FILE;
use crate::store::safetensors_read::SafetensorsFile;
use crate::store::safetensors_write::{TensorData, write_safetensors};
use crate::store::tensor_dtype::TensorDtype;
use crate::store::transaction::DirTransaction;
use crate::walk::progress::{Observer, proceed};

/// Room for configuration, index and manifests: a tensor's entries in them, generously.
const BYTES_A_TENSOR: u64 = 1024;

/// Everything a carrier's directory is written from.
pub struct Made<'a> {
    /// The model.
    pub model: &'a CheckpointDir,
    /// Its inventory.
    pub inventory: &'a Inventory,
    /// What becomes of its tensors.
    pub sorted: &'a Sorted,
    /// The packed linears, in the order of `sorted`.
    pub records: &'a [ModuleRecord],
    /// Where they are kept.
    pub store: &'a ModuleStore,
    /// What the work is bound to.
    pub binding: &'a Value,
    /// Its hash.
    pub identity_sha256: &'a Hash,
    /// Calibration prompts and their tokens.
    pub calibration: (usize, u64),
}

/// Bytes that a carrier's directory takes, and those of the packed linears among them.
///
/// # Errors
/// Names a tensor that is missing.
pub fn bytes_written(model: &CheckpointDir, sorted: &Sorted, bits: u32) -> Result<(u64, u64)> {
    let mut kept: u64 = side_files(model.dir())?.iter().map(|(_, bytes)| bytes).sum();
    for name in sorted.kept.keys() {
        let info = model.info(name)?.info;
        kept += info.end - info.start + BYTES_A_TENSOR;
    }
    let packed = sorted.packed.iter().map(|linear| {
        let vectors = 2 * (linear.k + linear.n) as u64;
        (linear.k * linear.n) as u64 / 8 * u64::from(bits) + vectors + 4 * BYTES_A_TENSOR
    });
    let packed: u64 = packed.sum();
    Ok((kept + packed, packed))
}

/// Writes the directory into the transaction; files that an earlier run finished are left as they are.
///
/// # Errors
/// Names the file that cannot be written, and file and tensor of a payload that did not come through.
pub fn write(
    made: &Made<'_>,
    (bits, scope): (u32, Scope),
    transaction: &DirTransaction,
    observer: &dyn Observer,
) -> Result<Manifest> {
    let packed = made.packed()?;
    let expected = made.expected(&packed)?;
    let mut weight_map = BTreeMap::new();
    observer.begin("write", None, made.model.shard_files().count() as u64);
    for (file, shard) in made.model.shards() {
        proceed(observer)?;
        let names = made.names_after(shard);
        if !names.is_empty() {
            transaction.file(file, |path| {
                let sha256 = made.write_shard(path, shard)?;
                check_payloads(path, &names, &expected)?;
                Ok(sha256)
            })?;
        }
        weight_map.extend(names.into_iter().map(|name| (name, file.to_owned())));
        observer.advance(file);
    }
    observer.end();
    let carrier_bytes = made.carrier_bytes(&weight_map, &packed)?;
    let index = json!({"metadata": {"total_size": carrier_bytes}, "weight_map": weight_map});
    transaction.put(INDEX_FILE, &pretty(&index)?)?;
    let quantization = made.quantization_config(bits, scope);
    transaction.put(QUANTIZATION_FILE, &pretty(&quantization)?)?;
    let dir = made.model.dir();
    let mut config = read_config(dir)?;
    config.insert("quantization_config".to_owned(), quantization);
    transaction.put(CONFIG_FILE, &pretty(&Value::Object(config))?)?;
    for (file, _) in side_files(dir)?.into_iter().filter(|(file, _)| file != MANIFEST_FILE) {
        let sealed = made.inventory.files.get(&file);
        transaction.file(&file, |path| copy_file(&dir.join(&file), path, sealed))?;
    }
    let mut files_sha256 = transaction.files();
    files_sha256.remove(MANIFEST_FILE);
    let manifest = Manifest {
        schema: SCHEMA.to_owned(),
        made_of: made.binding.clone(),
        identity_sha256: made.identity_sha256.clone(),
        bits,
        scope: scope.as_str().to_owned(),
        codebook: Codebook::Mcg.name().to_owned(),
        kept: made.kept()?,
        packed,
        left_out: made.sorted.left_out.clone(),
        files_sha256,
        model_bytes: made.inventory.tensors.values().map(|tensor| tensor.end - tensor.start).sum(),
        carrier_bytes,
    };
    transaction.put(MANIFEST_FILE, &canonical_file(&manifest)?)?;
    Ok(manifest)
}

impl Made<'_> {
    /// The packed linear behind a tensor of the model: what neither stays nor is left out is packed.
    fn module_of<'n>(&self, name: &'n str) -> Option<&'n str> {
        let packed = !self.sorted.kept.contains_key(name) && !self.sorted.left_out.contains(name);
        name.strip_suffix(".weight").filter(|_| packed)
    }

    /// Names of the tensors that a shard of the model has in the carrier.
    fn names_after(&self, shard: &SafetensorsFile) -> Vec<String> {
        let mut names = Vec::new();
        for name in shard.names().filter(|name| !self.sorted.left_out.contains(*name)) {
            match self.module_of(name) {
                Some(module) => names.extend(parts(module)),
                None => names.push(name.to_owned()),
            }
        }
        names
    }

    fn write_shard(&self, path: &Path, shard: &SafetensorsFile) -> Result<Hash> {
        let touched = |name: &str| self.sorted.left_out.contains(name) || self.module_of(name).is_some();
        if !shard.names().any(touched) {
            return copy_file(shard.path(), path, None);
        }
        let opened = |module: &str| SafetensorsFile::open(self.store.shard_path(module));
        let modules: Vec<SafetensorsFile> =
            shard.names().filter_map(|name| self.module_of(name)).map(opened).collect::<Result<_>>()?;
        let mut tensors = Vec::new();
        for (file, name) in modules
            .iter()
            .flat_map(|file| file.names().map(move |name| (file, name)))
            .chain(shard.names().filter(|name| !touched(name)).map(|name| (shard, name)))
        {
            let info = file.info(name)?;
            tensors.push(TensorData::from_bytes(name, info.dtype, &info.shape, file.bytes(name)?));
        }
        Ok(write_safetensors(path, shard.metadata(), &tensors)?.sha256)
    }

    /// The packed linears with the payload hashes of their tensors.
    fn packed(&self) -> Result<BTreeMap<String, PackedEntry>> {
        let entry = |record: &ModuleRecord| {
            let file = SafetensorsFile::open(self.store.shard_path(&record.module))?;
            let payload_sha256 = parts(&record.module)
                .into_iter()
                .map(|name| Ok((name.clone(), file.payload_sha256(&name)?)))
                .collect::<Result<_>>()?;
            Ok((record.module.clone(), PackedEntry { record: record.clone(), payload_sha256 }))
        };
        self.records.iter().map(entry).collect()
    }

    fn kept(&self) -> Result<BTreeMap<String, KeptEntry>> {
        let entry = |(name, reason): (&String, &String)| {
            let Some(tensor) = self.inventory.tensors.get(name) else {
                return refuse("the inventory has no such tensor").tensor(name).err();
            };
            let entry = KeptEntry {
                reason: reason.clone(),
                linear_of_scope: self.sorted.kept_linears.contains(name),
                payload_sha256: tensor.sha256.clone(),
            };
            Ok((name.clone(), entry))
        };
        self.sorted.kept.iter().map(entry).collect()
    }

    /// The payload hash that every tensor of the carrier has to have.
    fn expected(&self, packed: &BTreeMap<String, PackedEntry>) -> Result<BTreeMap<String, Hash>> {
        let kept = self.kept()?.into_iter().map(|(name, entry)| (name, entry.payload_sha256));
        Ok(kept.chain(packed.values().flat_map(|entry| entry.payload_sha256.clone())).collect())
    }

    fn carrier_bytes(
        &self,
        weight_map: &BTreeMap<String, String>,
        packed: &BTreeMap<String, PackedEntry>,
    ) -> Result<u64> {
        let mut bytes = 0;
        for name in weight_map.keys().filter(|name| self.sorted.kept.contains_key(*name)) {
            let info = self.model.info(name)?.info;
            bytes += info.end - info.start;
        }
        for module in packed.keys() {
            let file = SafetensorsFile::open(self.store.shard_path(module))?;
            for name in file.names() {
                let info = file.info(name)?;
                bytes += info.end - info.start;
            }
        }
        Ok(bytes)
    }

    fn quantization_config(&self, bits: u32, scope: Scope) -> Value {
        let storage: Map<String, Value> = self
            .records
            .iter()
            .map(|record| {
                let mut tensors = Map::new();
                for (name, (dtype, shape)) in parts(&record.module).into_iter().zip(stored(record)) {
                    let n_bytes = dtype.bytes_of(&shape);
                    let dtype = match dtype {
                        TensorDtype::F16 => "torch.float16",
                        TensorDtype::I32 => "torch.int32",
                        _ => "torch.int16",
                    };
                    tensors.insert(name, json!({"shape": shape, "n_bytes": n_bytes, "dtype": dtype}));
                }
                let entry = json!({
                    "stored_tensors": tensors,
                    "quant_format": "exl3",
                    "bits_per_weight": record.bits,
                    "mcg_multiplier": Codebook::Mcg.marker(),
                });
                (record.module.clone(), entry)
            })
            .collect();
        let (rows, tokens) = self.calibration;
        json!({
            "quant_method": "exl3",
            "bits": bits,
            "head_bits": 16,
            "codebook": Codebook::Mcg.name(),
            "calibration": {"rows": rows, "cols": tokens.div_ceil(rows as u64)},
            "out_scales": "always",
            "scope": scope.as_str(),
            "tensor_storage": storage,
        })
    }
}

/// Names of a packed linear's tensors: trellis, suh, svh, marker.
fn parts(module: &str) -> [String; 4] {
    ["trellis", "suh", "svh", Codebook::Mcg.name()].map(|part| format!("{module}.{part}"))
}

/// Types and shapes of the same.
fn stored(record: &ModuleRecord) -> [(TensorDtype, Vec<usize>); 4] {
    let ModuleRecord { k, n, bits, .. } = *record;
    [
        (TensorDtype::I16, vec![k / 16, n / 16, 16 * bits as usize]),
        (TensorDtype::F16, vec![k]),
        (TensorDtype::F16, vec![n]),
        (TensorDtype::I32, vec![]),
    ]
}

/// Reads a written shard back: these tensors, no others, with the payloads they should have.
fn check_payloads(path: &Path, names: &[String], expected: &BTreeMap<String, Hash>) -> Result<()> {
    let file = SafetensorsFile::open(path)?;
    let wrong = |what: &str, name: &str| refuse(what).file(path).tensor(name).check();
    if file.names().count() != names.len() {
        return Err(refuse("the shard was written with other tensors").file(path).check());
    }
    names.par_iter().try_for_each(|name| match expected.get(name) {
        Some(hash) if file.payload_sha256(name)? == *hash => Ok(()),
        _ => Err(wrong("the payload was not written as it is in the model", name)),
    })
}
