//! `walk assemble`: the finished layers of a walk and everything else of its carrier as one model directory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::Serialize;
use serde_json::{Value, json};

use super::carry::copy_file;
use super::directory::{Carried, Layers, Made, Target, check_apart, make};
use crate::checkpoint::CheckpointDir;
use crate::checkpoint::complete::{
    BlockFacts, CompleteManifest, KAIJU1_SCHEMA, Origin, QUANTIZATION_FILE, R7_BLOCK, V2_SCHEMA,
    assembled_quantization, read_config,
};
use crate::checkpoint::finished::{FinishedManifest, finished_folder, finished_path, finished_stem};
use crate::checkpoint::inventory::{Inventory, InventoryFile, Role};
use crate::checkpoint::kaiju1_block::{KAIJU1_BLOCK, kaiju1_block};
use crate::checkpoint::names::split_experts;
use crate::checkpoint::schema_v2::MARKER;
use crate::config::choices::CodecName;
use crate::config::{Geometry, Recipe};
use crate::error::{Result, refuse};
use crate::store::hash::{Hash, sha256_file};
use crate::store::lock::WorkLock;
use crate::store::safetensors_read::SafetensorsFile;
use crate::store::strict_json::{StrictValue, read_json};
use crate::store::transaction::DirTransaction;
use crate::walk::driver::{COMPLETE_FILE, CORPUS_FILE};
use crate::walk::journal::{JOURNAL_FILE, JournalRecord, key};
use crate::walk::locations::Locations;
use crate::walk::open::{CONFIG_FILE, RECIPE_FILE, inventory_file};
use crate::walk::progress::{Observer, advance};
use crate::walk::rungs::knobs;
use crate::walk::sealed_files::{faults_of, refuse_foreign};

/// What may be said besides the two directories.
#[derive(Debug, Clone, Default)]
pub struct AssembleOptions {
    /// The carrier, where it is not where the walk found it.
    pub carrier: Option<PathBuf>,
}

/// What an assembly did.
#[derive(Debug, Clone, Serialize)]
pub struct AssembleReport {
    /// What was made; nothing where the directory had been published before.
    pub made: Option<Made>,
    /// The work directory.
    pub work: PathBuf,
    /// The carrier.
    pub carrier: PathBuf,
    /// Tensors of the carrier that the layers replace.
    pub replaced_tensors: usize,
}

/// Assembles `out` from a finished walk.
///
/// # Errors
/// A walk that is not finished, sealed files that changed, a carrier that is not the walk's, a target that is there or was
/// begun from something else, a disk without the room.
pub fn assemble(
    work: &Path,
    out: &Path,
    options: &AssembleOptions,
    observer: &dyn Observer,
) -> Result<AssembleReport> {
    let finished = Finished::open(work, observer)?;
    let carrier = match &options.carrier {
        Some(carrier) => carrier.clone(),
        None => Locations::read(work)?.carrier,
    };
    check_apart(out, &[("the work directory", work), ("the carrier", &carrier)])?;
    let checkpoint = CheckpointDir::open(&carrier)?;
    finished.check_carrier(&checkpoint)?;
    let layers = finished.geometry.moe_layers();
    let inventory = &finished.carrier.inventory;
    let sealed = |name: &str| inventory.tensors.get(name).map(|tensor| tensor.sha256.clone());
    let carried =
        Carried { checkpoint: &checkpoint, sealed: &sealed, files: &inventory.files, replaced: &layers };
    let replaced_tensors = super::carry::CarryPlan::new(&checkpoint, &layers)?.dropped;
    let target = Target {
        out,
        binding: finished.binding(),
        config: finished.config(&carrier)?,
        manifest: finished.manifest()?,
        manifest_sha256: None,
    };
    let made = make(target, &carried, &finished, observer)?;
    Ok(AssembleReport { made, work: work.to_path_buf(), carrier, replaced_tensors })
}

/// A finished walk, its seals checked.
struct Finished {
    work: PathBuf,
    journal: JournalRecord,
    geometry: Geometry,
    recipe: Recipe,
    carrier: InventoryFile,
    manifests: BTreeMap<usize, FinishedManifest>,
    _lock: Option<WorkLock>,
}

impl Finished {
    fn open(work: &Path, observer: &dyn Observer) -> Result<Self> {
        refuse_foreign(work)?;
        let lock = WorkLock::share(work)?;
        let journal = JournalRecord::read(work)?;
        if journal.sealed("complete").is_none() {
            return refuse("the walk is not finished")
                .file(work.join(JOURNAL_FILE))
                .wanted("a work directory whose walk is complete: run the walk's own command until it is")
                .err();
        }
        let geometry = Geometry::read(&work.join(CONFIG_FILE))?;
        let (recipe, layers) = (Recipe::load(work.join(RECIPE_FILE))?, geometry.moe_layers());
        let codec = recipe.codec;
        // The layers, and what they are told by: the rest of the work directory is the audit's.
        let mut used: Vec<PathBuf> =
            [COMPLETE_FILE, CONFIG_FILE, RECIPE_FILE, CORPUS_FILE, inventory_file(Role::Carrier)]
                .map(PathBuf::from)
                .to_vec();
        used.extend(
            layers
                .iter()
                .flat_map(|&layer| ["json", "safetensors"].map(|kind| finished_path(codec, layer, kind))),
        );
        let outputs: BTreeMap<&String, &Hash> =
            journal.stages.iter().flat_map(|seal| &seal.outputs).collect();
        let sealed = |path: &PathBuf| {
            let name = key(path);
            match outputs.get(&name) {
                Some(hash) => Ok((name, (*hash).clone())),
                None => {
                    refuse("no seal names the file").file(work.join(path)).wanted("a finished walk").err()
                }
            }
        };
        let used = used.iter().map(sealed).collect::<Result<BTreeMap<String, Hash>>>()?;
        observer.begin("sealed files", None, used.len() as u64);
        let faults = faults_of(work, &used, &|file| advance(observer, file))?;
        observer.end();
        if let Some(fault) = faults.into_iter().next() {
            return fault.err();
        }
        let folder = work.join(finished_folder(codec));
        let read = |layer: usize| Ok((layer, FinishedManifest::read(&folder, codec, layer)?));
        Ok(Self {
            manifests: layers.into_iter().map(read).collect::<Result<_>>()?,
            recipe,
            carrier: InventoryFile::read_as(work.join(inventory_file(Role::Carrier)), Role::Carrier)?,
            work: work.to_path_buf(),
            journal,
            geometry,
            _lock: lock,
        })
    }

    fn identity(&self, field: &str) -> Hash {
        self.journal.identity.get(field).cloned().unwrap_or_default()
    }

    fn output(&self, path: &str) -> Hash {
        let sealed = self.journal.stages.iter().find_map(|seal| seal.outputs.get(path));
        sealed.cloned().unwrap_or_default()
    }

    /// The carrier has the tensors that were sealed; their payloads are looked at as they are copied.
    fn check_carrier(&self, checkpoint: &CheckpointDir) -> Result<()> {
        let sealed: &Inventory = &self.carrier.inventory;
        let other = |what: &str, name: &str| {
            refuse(format!("the carrier is not the walk's: {what}"))
                .file(checkpoint.dir())
                .tensor(name)
                .wanted("the carrier that was inventoried")
                .err()
        };
        if let Some(name) = checkpoint.names().find(|name| !sealed.tensors.contains_key(*name)) {
            return other("this tensor was not in it", name);
        }
        for (name, tensor) in &sealed.tensors {
            if !checkpoint.contains(name) {
                return other("this tensor is gone", name);
            }
            let info = checkpoint.info(name)?.info;
            if info.dtype.name() != tensor.dtype || info.shape != tensor.shape {
                return other("this tensor is of another type or shape", name);
            }
        }
        // Configuration, tokenizer and index: what is written anew comes from them too.
        for (name, hash) in &sealed.files {
            let path = checkpoint.dir().join(name);
            let found = if path.exists() { sha256_file(&path)? } else { "nothing: it is gone".to_owned() };
            if found != *hash {
                return refuse(format!("the carrier is not the walk's: the file's SHA-256 is {found}"))
                    .file(path)
                    .wanted(format!("{hash}, as sealed"))
                    .err();
            }
        }
        Ok(())
    }

    fn binding(&self) -> Value {
        json!({
            "command": "assemble",
            "schema": self.schema(),
            "journal_head_sha256": self.journal.head_sha256,
            "walk_complete_sha256": self.output(COMPLETE_FILE),
            "carrier_inventory_sha256": self.carrier.inventory_sha256,
        })
    }

    /// The carrier's `config.json` with what the new directory says of quantization.
    fn config(&self, carrier: &Path) -> Result<serde_json::Map<String, Value>> {
        let mut config = read_config(carrier)?;
        let beside = carrier.join(QUANTIZATION_FILE);
        let carried = match config.get("quantization_config") {
            Some(Value::Null) | None if beside.exists() => {
                let StrictValue(value) = read_json(&beside)?;
                Some(value)
            }
            found => found.cloned(),
        };
        let mtp_layer = self.geometry.num_hidden_layers;
        let (method, block) = match self.recipe.codec {
            CodecName::Trellis => ("exl3", (R7_BLOCK, self.facts()?.r7())),
            CodecName::Kaiju1 => ("kaiju1", (KAIJU1_BLOCK, self.kaiju1_block()?)),
        };
        let quantization = assembled_quantization(carried.as_ref(), method, block, mtp_layer)?;
        config.insert("quantization_config".to_owned(), quantization);
        Ok(config)
    }

    fn schema(&self) -> &'static str {
        match self.recipe.codec {
            CodecName::Trellis => V2_SCHEMA,
            CodecName::Kaiju1 => KAIJU1_SCHEMA,
        }
    }

    /// First and last MoE layer, which loaders are told.
    fn moe_range(&self) -> Result<(usize, usize)> {
        let layers = self.geometry.moe_layers();
        let (Some(&first), Some(&last)) = (layers.first(), layers.last()) else {
            return refuse("the model has no MoE layer").file(self.work.join(CONFIG_FILE)).err();
        };
        if last - first + 1 != layers.len() {
            return refuse(format!("the MoE layers {layers:?} are no range"))
                .file(self.work.join(CONFIG_FILE))
                .wanted("MoE layers that follow one another: loaders are told the first and the last")
                .err();
        }
        Ok((first, last))
    }

    fn kaiju1_block(&self) -> Result<Value> {
        self.moe_range()?;
        let own = |(&layer, manifest): (&usize, &FinishedManifest)| match manifest {
            FinishedManifest::V2(_) => None,
            FinishedManifest::Kaiju1(manifest) => Some((layer, manifest.clone())),
        };
        let manifests = self.manifests.iter().filter_map(own).collect();
        Ok(kaiju1_block(knobs(&self.recipe)?.preset, self.geometry.num_hidden_layers, &manifests))
    }

    fn facts(&self) -> Result<BlockFacts> {
        let moe_layers = self.moe_range()?;
        let target_bpw = match &self.manifests[&moe_layers.0] {
            FinishedManifest::V2(manifest) => manifest.allocation_target_bpw.clone(),
            FinishedManifest::Kaiju1(manifest) => manifest.bits_per_weight.clone(),
        };
        let stem = |layer: &usize| finished_stem(self.recipe.codec, *layer);
        Ok(BlockFacts {
            recipe_version: self.recipe.recipe_version.clone(),
            moe_layers,
            mtp_layer: self.geometry.num_hidden_layers,
            k_values: self.recipe.candidate_bits.clone(),
            target_bpw,
            manifests: self.manifests.keys().map(|layer| format!("{}.json", stem(layer))).collect(),
            tp_size: None,
        })
    }

    fn manifest(&self) -> Result<CompleteManifest> {
        let layer = |(layer, manifest): (&usize, &FinishedManifest)| (layer.to_string(), manifest.entry());
        Ok(CompleteManifest {
            schema: self.schema().to_owned(),
            marker: MARKER.to_owned(),
            recipe_version: self.recipe.recipe_version.clone(),
            files_sha256: BTreeMap::new(),
            carried_tensor_payload_sha256: BTreeMap::new(),
            tensor_count: 0,
            carried_tensor_count: 0,
            r7_tensor_count: self.manifests.values().map(FinishedManifest::tensors).sum(),
            layers: self.manifests.iter().map(layer).collect(),
            mtp_layer: self.geometry.num_hidden_layers,
            mtp_carried_tensor_payload_sha256: BTreeMap::new(),
            origin: Origin {
                walk_complete_sha256: self.output(COMPLETE_FILE),
                journal_head_sha256: self.journal.head_sha256.clone(),
                recipe_sha256: self.identity("recipe_sha256"),
                corpus_plan_sha256: self.identity("corpus_plan_sha256"),
                source_inventory_sha256: self.identity("source_inventory_sha256"),
                carrier_inventory_sha256: self.identity("carrier_inventory_sha256"),
            },
            sliced_from: None,
        })
    }
}

/// The layers are copied as the walk sealed them.
impl Layers for Finished {
    fn bytes(&self) -> u64 {
        let bytes = |file: String| {
            let folder = self.work.join(finished_folder(self.recipe.codec));
            std::fs::metadata(folder.join(file)).map_or(0, |meta| meta.len())
        };
        self.files().map(bytes).sum()
    }

    fn shards(&self) -> Vec<String> {
        self.manifests.values().map(|manifest| manifest.shard().to_owned()).collect()
    }

    fn write(&self, work: &DirTransaction, observer: &dyn Observer) -> Result<()> {
        let files: Vec<String> = self.files().collect();
        observer.begin("layers", None, files.len() as u64);
        files.par_iter().try_for_each(|file| {
            let from = Path::new(finished_folder(self.recipe.codec)).join(file);
            let sealed = self.output(&key(&from));
            work.file(file, |path| copy_file(&self.work.join(&from), path, Some(&sealed)))?;
            advance(observer, file)
        })?;
        observer.end();
        // A name of another layer, above all of the MTP layer, would stand for a carried tensor.
        for (&layer, manifest) in &self.manifests {
            let path = work.path().join(manifest.shard());
            let shard = SafetensorsFile::open(&path)?;
            let stranger = shard.names().find(|name| split_experts(name).is_none_or(|(of, _)| of != layer));
            if let Some(name) = stranger {
                return refuse("a tensor that is no routed expert of the layer")
                    .file(path)
                    .layer(layer)
                    .tensor(name)
                    .wanted("replaced experts only: everything else is carried")
                    .err();
            }
        }
        Ok(())
    }
}

impl Finished {
    fn files(&self) -> impl Iterator<Item = String> {
        let codec = self.recipe.codec;
        self.manifests.keys().flat_map(move |&layer| {
            ["json", "safetensors"].map(|kind| format!("{}.{kind}", finished_stem(codec, layer)))
        })
    }
}
