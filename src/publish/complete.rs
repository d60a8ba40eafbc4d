//! A complete checkpoint that is converted: opened, its manifest held against its files, and its carried part on the way to
//! a new directory.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::carry::CarryPlan;
use super::directory::{Carried, Layers, Made, Target, make};
use crate::checkpoint::CheckpointDir;
use crate::checkpoint::complete::{
    CONFIG_FILE, CompleteManifest, KAIJU1_SCHEMA, MANIFEST_FILE, MANIFEST_HASH_FILE, read_config,
};
use crate::checkpoint::manifest_v2::V2Manifest;
use crate::config::Geometry;
use crate::error::{IoContext, Result, refuse};
use crate::store::hash::{Hash, sha256_file};
use crate::walk::progress::Observer;

/// A complete checkpoint that is converted.
pub(super) struct Complete {
    pub(super) dir: PathBuf,
    pub(super) manifest: CompleteManifest,
    pub(super) manifest_sha256: Hash,
    pub(super) geometry: Geometry,
    pub(super) config: Map<String, Value>,
    pub(super) layers: Vec<usize>,
}

impl Complete {
    pub(super) fn open(dir: &Path, schema: &str) -> Result<Self> {
        let manifest = CompleteManifest::read(dir)?;
        if manifest.schema == KAIJU1_SCHEMA {
            return refuse("the checkpoint's experts are KAIJU1: rank slices are of the trellis codec only")
                .file(dir.join(MANIFEST_FILE))
                .wanted(schema)
                .err();
        }
        if manifest.schema != schema {
            return refuse(format!("the checkpoint is of schema {}", manifest.schema))
                .file(dir.join(MANIFEST_FILE))
                .wanted(schema)
                .err();
        }
        let complete = Self {
            manifest_sha256: sha256_file(dir.join(MANIFEST_FILE))?,
            geometry: Geometry::read(&dir.join(CONFIG_FILE))?,
            config: read_config(dir)?,
            layers: manifest.layer_numbers()?,
            dir: dir.to_path_buf(),
            manifest,
        };
        complete.check_files()?;
        if complete.layers != complete.geometry.moe_layers() {
            return refuse(format!("the manifest has the layers {:?}", complete.layers))
                .file(dir.join(MANIFEST_FILE))
                .field("layers")
                .wanted(format!("{:?}, the MoE layers of {CONFIG_FILE}", complete.geometry.moe_layers()))
                .err();
        }
        Ok(complete)
    }

    /// The files are those that the manifest lists, and all but the shards, which are held against it as they are read, are
    /// what it says.
    fn check_files(&self) -> Result<()> {
        let listed = &self.manifest.files_sha256;
        for entry in std::fs::read_dir(&self.dir).at(&self.dir)? {
            let name = entry.at(&self.dir)?.file_name().to_string_lossy().into_owned();
            let own = name == MANIFEST_FILE || name == MANIFEST_HASH_FILE || name.starts_with('.');
            if !own && !listed.contains_key(&name) {
                return refuse(format!("{MANIFEST_FILE} does not list this file"))
                    .file(self.dir.join(name))
                    .wanted("the files of the checkpoint and no others")
                    .err();
            }
        }
        for name in listed.keys() {
            if !name.ends_with(".safetensors") {
                self.check_file(name)?;
            } else if !self.dir.join(name).is_file() {
                return refuse("the shard is gone")
                    .file(self.dir.join(name))
                    .wanted("every listed file")
                    .err();
            }
        }
        Ok(())
    }

    /// A file of the directory is the one its manifest lists.
    pub(super) fn check_file(&self, name: &str) -> Result<Hash> {
        let path = self.dir.join(name);
        let found = sha256_file(&path)?;
        match self.manifest.files_sha256.get(name) {
            Some(listed) if *listed == found => Ok(found),
            listed => refuse(format!("its SHA-256 is {found}"))
                .file(path)
                .wanted(listed.map_or("no such file: the manifest does not list it".to_owned(), |hash| {
                    format!("{hash}, as {MANIFEST_FILE} has it")
                }))
                .err(),
        }
    }

    /// A layer's v2 manifest tells of all its experts, and adds up to what the checkpoint's manifest says.
    pub(super) fn check_layer(&self, manifest: &V2Manifest, path: &Path) -> Result<()> {
        let sizes = (self.geometry.n_routed_experts, self.geometry.moe_intermediate_size);
        self.manifest.check_layer(manifest, path, sizes)
    }

    /// Hidden size and expert width.
    pub(super) fn sizes(&self) -> (usize, usize) {
        (self.geometry.hidden_size, self.geometry.moe_intermediate_size)
    }

    pub(super) fn quantization(&self) -> Result<&Map<String, Value>> {
        match self.config.get("quantization_config") {
            Some(Value::Object(entries)) => Ok(entries),
            _ => refuse("it has no quantization_config").file(self.dir.join(CONFIG_FILE)).err(),
        }
    }

    /// Makes `out`: everything carried from here, `layers` in place of the layers here.
    pub(super) fn make_into(
        &self,
        out: &Path,
        (binding, config): (Value, Map<String, Value>),
        manifest: CompleteManifest,
        manifest_sha256: Option<&Hash>,
        layers: &dyn Layers,
        observer: &dyn Observer,
    ) -> Result<Option<Made>> {
        let checkpoint = CheckpointDir::open(&self.dir)?;
        let sealed = |name: &str| self.manifest.carried_tensor_payload_sha256.get(name).cloned();
        let carried = Carried {
            checkpoint: &checkpoint,
            sealed: &sealed,
            files: &self.manifest.files_sha256,
            replaced: &self.layers,
        };
        let kept = CarryPlan::new(&checkpoint, &self.layers)?.weight_map();
        if let Some(gone) =
            self.manifest.carried_tensor_payload_sha256.keys().find(|name| !kept.contains_key(*name))
        {
            return refuse("a carried tensor of the manifest is gone")
                .file(&self.dir)
                .tensor(gone)
                .wanted(format!("every tensor that {MANIFEST_FILE} lists"))
                .err();
        }
        let counts = [
            ("tensor_count", self.manifest.tensor_count, checkpoint.names().count()),
            ("carried_tensor_count", self.manifest.carried_tensor_count, kept.len()),
            ("r7_tensor_count", self.manifest.r7_tensor_count, checkpoint.names().count() - kept.len()),
        ];
        if let Some((field, said, found)) = counts.into_iter().find(|(_, said, found)| said != found) {
            return refuse(format!("it says {said}"))
                .file(self.dir.join(MANIFEST_FILE))
                .field(field)
                .wanted(found.to_string())
                .err();
        }
        let target = Target { out, binding, config, manifest, manifest_sha256 };
        make(target, &carried, layers, observer)
    }

    pub(super) fn binding(&self, tp_size: usize, schema: &str) -> Value {
        json!({
            "command": "convert",
            "schema": schema,
            "manifest_sha256": self.manifest_sha256,
            "tp_size": tp_size,
        })
    }
}
