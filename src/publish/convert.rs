//! `walk convert`: the experts of a complete checkpoint cut for tensor parallelism (schema v1), and put together again.
//!
//! Nothing is quantized anew. After a layer's slices are written they are read again: put together they have to be the v2
//! tensors word for word, and decoded side by side they have to be the decoded whole, bit for bit.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::carry::CarryPlan;
use super::directory::{Carried, Layers, Made, Target, check_apart, make};
use crate::checkpoint::CheckpointDir;
use crate::checkpoint::complete::{
    BlockFacts, CONFIG_FILE, CompleteManifest, HYBRID_BLOCK, HYBRID_TENSOR_SCHEMA, LayerEntry, MANIFEST_FILE,
    MANIFEST_HASH_FILE, R7_BLOCK, SlicedFrom, V1_SCHEMA, V2_SCHEMA, check_block, read_config,
};
use crate::checkpoint::manifest_v2::V2Manifest;
use crate::checkpoint::names::{Projection, expert_module};
use crate::checkpoint::schema_v1::{self, V1Layer, V1Manifest, manifest_name, shard_name, widths};
use crate::checkpoint::schema_v2::{V2Layer, shard_stem, stream_shard};
use crate::checkpoint::slices::{check_ranks, dense_of, reassemble};
use crate::codec::trellis::linear::reconstruction_sha256;
use crate::config::Geometry;
use crate::error::{IoContext, Result, refuse};
use crate::store::atomic::write_atomic;
use crate::store::canonical_json::canonical;
use crate::store::hash::{Hash, sha256_file, sha256_hex};
use crate::store::transaction::DirTransaction;
use crate::walk::progress::{Observer, advance};

/// What a conversion did.
#[derive(Debug, Clone, Serialize)]
pub struct ConvertReport {
    /// What was made; nothing where the directory had been published before.
    pub made: Option<Made>,
    /// What it was made from.
    pub from: PathBuf,
    /// Schema of the new directory's layers.
    pub schema_version: u32,
    /// Ranks, of the slices that were made or put together.
    pub tp_size: usize,
    /// The block of `quantization_config` that tells of the layers.
    pub config_block: &'static str,
    /// Why unmodified r13 loaders cannot read it; nothing where they can.
    pub not_for_unmodified_r13: Option<String>,
}

/// A complete checkpoint that is converted.
struct Complete {
    dir: PathBuf,
    manifest: CompleteManifest,
    manifest_sha256: Hash,
    geometry: Geometry,
    config: Map<String, Value>,
    layers: Vec<usize>,
}

impl Complete {
    fn open(dir: &Path, schema: &str) -> Result<Self> {
        let manifest = CompleteManifest::read(dir)?;
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
    fn check_file(&self, name: &str) -> Result<Hash> {
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
    fn check_layer(&self, manifest: &V2Manifest, path: &Path) -> Result<()> {
        let experts = self.geometry.n_routed_experts;
        manifest.check_whole(path, experts, self.geometry.moe_intermediate_size)?;
        let entry = self.manifest.layers.get(&manifest.layer.to_string());
        let same = entry.is_some_and(|entry| entry.bit_units == manifest.allocation_bit_units)
            && manifest.recipe_version == self.manifest.recipe_version;
        match same {
            true => Ok(()),
            false => refuse(format!("{MANIFEST_FILE} has other bit units, or another recipe version"))
                .file(path)
                .layer(manifest.layer)
                .wanted("the layer's own")
                .err(),
        }
    }

    /// Hidden size and expert width.
    fn sizes(&self) -> (usize, usize) {
        (self.geometry.hidden_size, self.geometry.moe_intermediate_size)
    }

    fn quantization(&self) -> Result<&Map<String, Value>> {
        match self.config.get("quantization_config") {
            Some(Value::Object(entries)) => Ok(entries),
            _ => refuse("it has no quantization_config").file(self.dir.join(CONFIG_FILE)).err(),
        }
    }

    /// Makes `out`: everything carried from here, `layers` in place of the layers here.
    fn make_into(
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

    fn binding(&self, tp_size: usize, schema: &str) -> Value {
        json!({
            "command": "convert",
            "schema": schema,
            "manifest_sha256": self.manifest_sha256,
            "tp_size": tp_size,
        })
    }
}

/// Cuts the experts of the complete checkpoint `dir` for `tp_size` ranks into `out`. With `unmodified_r13` a checkpoint that
/// loaders without [`FEATURE`](crate::checkpoint::complete::FEATURE) cannot read is refused.
///
/// # Errors
/// Ranks that cut off the 128-element boundaries, a checkpoint that is not complete or changed, and what
/// [`assemble`](fn@super::assemble) refuses of a target.
pub fn to_v1(
    dir: &Path,
    out: &Path,
    tp_size: usize,
    unmodified_r13: bool,
    observer: &dyn Observer,
) -> Result<ConvertReport> {
    let whole = Complete::open(dir, V2_SCHEMA)?;
    check_ranks(whole.geometry.moe_intermediate_size, tp_size)?;
    check_apart(out, &[("the checkpoint it is made from", dir)])?;
    let read = |&layer: &usize| {
        let name = format!("{}.json", shard_stem(layer));
        let sha256 = whole.check_file(&name)?;
        let manifest = V2Manifest::read(dir, layer)?;
        whole.check_layer(&manifest, &dir.join(name))?;
        Ok((layer, (manifest, sha256)))
    };
    let manifests: BTreeMap<usize, (V2Manifest, Hash)> =
        whole.layers.iter().map(read).collect::<Result<_>>()?;
    let (quantization, reason) = sliced_quantization(&whole, &manifests, tp_size)?;
    if let Some(reason) = reason.as_ref().filter(|_| unmodified_r13) {
        return Err(refuse(reason.clone())
            .file(dir)
            .field("--assert-unmodified-r13")
            .wanted("one bit width for all tensors of all layers, or a loader with r7-asymmetric-two-stack")
            .check());
    }
    let config_block = if reason.is_some() { R7_BLOCK } else { HYBRID_BLOCK };
    let mut config = whole.config.clone();
    config.insert("quantization_config".to_owned(), Value::Object(quantization));
    let entry = |(layer, (manifest, _)): (&usize, &(V2Manifest, Hash))| {
        (layer.to_string(), LayerEntry::named(*layer, Some(tp_size), manifest.allocation_bit_units))
    };
    let modules: usize = manifests.values().map(|(manifest, _)| manifest.bit_map.len()).sum();
    let manifest = CompleteManifest {
        schema: V1_SCHEMA.to_owned(),
        layers: manifests.iter().map(entry).collect(),
        r7_tensor_count: modules * 4 * tp_size,
        sliced_from: Some(SlicedFrom {
            manifest_sha256: whole.manifest_sha256.clone(),
            quantization_config: Value::Object(whole.quantization()?.clone()),
            tp_size,
        }),
        ..whole.manifest.clone()
    };
    let binding = whole.binding(tp_size, V1_SCHEMA);
    let layers = ToSlices { whole: &whole, manifests: &manifests, tp_size };
    let made = whole.make_into(out, (binding, config), manifest, None, &layers, observer)?;
    Ok(ConvertReport {
        made,
        from: dir.to_path_buf(),
        schema_version: schema_v1::SCHEMA_VERSION,
        tp_size,
        config_block,
        not_for_unmodified_r13: reason,
    })
}

/// The `quantization_config` of slices, and why unmodified r13 loaders cannot read them.
fn sliced_quantization(
    whole: &Complete,
    manifests: &BTreeMap<usize, (V2Manifest, Hash)>,
    tp_size: usize,
) -> Result<(Map<String, Value>, Option<String>)> {
    let mut quantization = whole.quantization()?.clone();
    let Some(block) = quantization.remove(R7_BLOCK) else {
        return refuse(format!("quantization_config has no {R7_BLOCK}"))
            .file(whole.dir.join(CONFIG_FILE))
            .err();
    };
    let used: BTreeSet<u32> = manifests.values().flat_map(|(manifest, _)| widths(manifest)).collect();
    check_block(&whole.dir.join(CONFIG_FILE), &block, &used)?;
    let (Some(&first), Some(&last)) = (whole.layers.first(), whole.layers.last()) else {
        return refuse("the checkpoint has no replaced layer").file(&whole.dir).err();
    };
    let mtp = whole.manifest.mtp_layer;
    match one_width(manifests) {
        Ok(bits) => {
            let mut hybrid = json!({
                "format": "exl3-trellis",
                "codebook": "mcg",
                "tp": tp_size,
                "bits": bits,
                "experts_per_layer": whole.geometry.n_routed_experts,
                "moe_layers": [first, last],
                "tensor_schema": HYBRID_TENSOR_SCHEMA,
            });
            let carried = quantization.get(HYBRID_BLOCK).cloned();
            let same = |key: &str| carried.as_ref().is_none_or(|carried| carried[key] == hybrid[key]);
            match ["tp", "bits", "codebook"].into_iter().find(|key| !same(key)) {
                None => {
                    if carried.is_some() {
                        hybrid["moe_layers"] = json!([first, mtp]);
                    }
                    quantization.insert(HYBRID_BLOCK.to_owned(), hybrid);
                    Ok((quantization, None))
                }
                Some(key) => {
                    let carried = carried.unwrap_or_default();
                    let reason = format!(
                        "{HYBRID_BLOCK} can describe one layout only: the carried MTP layer {mtp} has {key} {}, the \
                         replaced layers {}",
                        carried[key], hybrid[key]
                    );
                    Ok((with_r7(quantization, &block, manifests, whole, Some(tp_size)), Some(reason)))
                }
            }
        }
        Err(reason) => Ok((with_r7(quantization, &block, manifests, whole, Some(tp_size)), Some(reason))),
    }
}

fn with_r7(
    mut quantization: Map<String, Value>,
    block: &Value,
    manifests: &BTreeMap<usize, (V2Manifest, Hash)>,
    whole: &Complete,
    tp_size: Option<usize>,
) -> Map<String, Value> {
    let text = |key: &str| block[key].as_str().unwrap_or_default().to_owned();
    let widths = block["k_values"].as_array().cloned().unwrap_or_default();
    let facts = BlockFacts {
        recipe_version: text("recipe_version"),
        moe_layers: (whole.layers[0], whole.layers[whole.layers.len() - 1]),
        mtp_layer: whole.manifest.mtp_layer,
        k_values: widths.iter().filter_map(|bits| u32::try_from(bits.as_u64()?).ok()).collect(),
        target_bpw: text("target_bpw"),
        manifests: manifests.keys().map(|&layer| manifest_name(layer)).collect(),
        tp_size,
    };
    quantization.insert(R7_BLOCK.to_owned(), facts.r7());
    quantization
}

/// The one width of all tensors; else why there is none.
fn one_width(manifests: &BTreeMap<usize, (V2Manifest, Hash)>) -> Result<u32, String> {
    let mut only: Option<(usize, u32)> = None;
    for (&layer, (manifest, _)) in manifests {
        let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
        manifest.bit_map.values().for_each(|&bits| *counts.entry(bits).or_default() += 1);
        let spelt: Vec<String> =
            counts.iter().map(|(bits, n)| format!("{n} tensors at {bits} bits")).collect();
        let mut widths = counts.keys();
        let (Some(&bits), None) = (widths.next(), widths.next()) else {
            let mean = &manifest.allocation_target_bpw;
            let never = match mean.parse::<u32>() {
                Ok(_) => "",
                Err(_) => ", which no single integer width can average to",
            };
            return Err(format!(
                "layer {layer} has {}: {mean} bits a weight{never}; unmodified r13 loaders pass one width to a layer",
                spelt.join(", ")
            ));
        };
        match only {
            Some((before, other)) if other != bits => {
                return Err(format!(
                    "layer {before} is at {other} bits and layer {layer} at {bits}; {HYBRID_BLOCK} has one `bits` for \
                     all layers"
                ));
            }
            _ => only = Some((layer, bits)),
        }
    }
    only.map(|(_, bits)| bits).ok_or_else(|| "there is no replaced layer".to_owned())
}

/// Whole layers to slices.
struct ToSlices<'a> {
    whole: &'a Complete,
    manifests: &'a BTreeMap<usize, (V2Manifest, Hash)>,
    tp_size: usize,
}

impl Layers for ToSlices<'_> {
    fn bytes(&self) -> u64 {
        let layer = |(manifest, _): &(V2Manifest, Hash)| {
            let shard = schema_v1::shard_bytes(manifest, self.whole.sizes(), self.tp_size);
            // The manifest holds the whole layer's manifest and a line a module more.
            shard * self.tp_size as u64 + manifest.bit_map.len() as u64 * 8192
        };
        self.manifests.values().map(layer).sum()
    }

    fn shards(&self) -> Vec<String> {
        let ranks = |&layer: &usize| (0..self.tp_size).map(move |rank| shard_name(layer, rank));
        self.manifests.keys().flat_map(ranks).collect()
    }

    fn write(&self, work: &DirTransaction, observer: &dyn Observer) -> Result<()> {
        for (&layer, (manifest, sha256)) in self.manifests {
            if work.finished(&manifest_name(layer))?.is_some() {
                continue;
            }
            let found = sha256_file(self.whole.dir.join(&manifest.shard))?;
            if found != manifest.shard_sha256 {
                return refuse(format!("its SHA-256 is {found}"))
                    .file(self.whole.dir.join(&manifest.shard))
                    .layer(layer)
                    .wanted(format!("{}, as its manifest has it", manifest.shard_sha256))
                    .err();
            }
            let (hidden, inner) = self.whole.sizes();
            let opened = V2Layer::open(&self.whole.dir.join(&manifest.shard), layer, hidden, inner)?;
            observer.begin("slice", Some(layer), self.tp_size as u64);
            let rank = |rank: usize| {
                let name = shard_name(layer, rank);
                let hash = work.file(&name, |path| {
                    let written = schema_v1::write_rank(
                        path,
                        &opened,
                        manifest,
                        (hidden, inner),
                        (self.tp_size, rank),
                    )?;
                    Ok(written.sha256)
                })?;
                advance(observer, &name)?;
                Ok(hash)
            };
            let shards: Vec<Hash> = (0..self.tp_size).into_par_iter().map(rank).collect::<Result<_>>()?;
            observer.end();
            check_slices(work.path(), &opened, manifest, self.tp_size, observer)?;
            let mut bytes = canonical(&V1Manifest::new(manifest, sha256, &shards))?;
            bytes.push(b'\n');
            work.put(&manifest_name(layer), &bytes)?;
        }
        Ok(())
    }
}

/// The written slices of a layer under `dir`, read again: put together they are the whole, and so are they decoded.
///
/// # Errors
/// Names layer and module of slices that do not; what cannot be read.
pub fn check_slices(
    dir: &Path,
    whole: &V2Layer,
    manifest: &V2Manifest,
    tp_size: usize,
    observer: &dyn Observer,
) -> Result<()> {
    let layer = manifest.layer;
    let ranks = V1Layer::open(dir, layer, tp_size)?;
    let experts = manifest.permutations.len();
    observer.begin("check slices", Some(layer), experts as u64);
    (0..experts).into_par_iter().try_for_each(|expert| {
        for role in Projection::ALL {
            let module = expert_module(layer, expert, role);
            let wrong = |what: &str| {
                Err(refuse(what).file(dir.join(shard_name(layer, 0))).layer(layer).tensor(&module).check())
            };
            let (linear, slices) = (whole.linear(expert, role)?, ranks.slices(expert, role)?);
            if reassemble(&slices, role)? != linear {
                return wrong("the slices put together are not the tensor they were cut from");
            }
            let dense = dense_of(&slices, role);
            if dense != linear.dense() {
                return wrong("the slices decode to something else than the whole");
            }
            let hashes = manifest.roundtrip_hashes.get(&module);
            if hashes.is_none_or(|hashes| hashes.reconstruction_sha256 != reconstruction_sha256(&dense)) {
                return wrong("the slices decode to something else than the manifest has");
            }
        }
        advance(observer, &format!("expert {expert}"))
    })?;
    observer.end();
    Ok(())
}

/// Puts the rank slices of the complete checkpoint `dir` together again into `out`, which is, to the byte, the directory they
/// were cut from.
///
/// # Errors
/// Slices that are not of one checkpoint, changed, or do not make up the bytes they were cut from; and what
/// [`assemble`](fn@super::assemble) refuses of a target.
pub fn to_v2(dir: &Path, out: &Path, observer: &dyn Observer) -> Result<ConvertReport> {
    let sliced = Complete::open(dir, V1_SCHEMA)?;
    check_apart(out, &[("the checkpoint it is made from", dir)])?;
    let Some(from) = sliced.manifest.sliced_from.clone() else {
        return refuse("the manifest does not say what the slices were cut from")
            .file(dir.join(MANIFEST_FILE))
            .field("sliced_from")
            .wanted("rank slices by `walk convert --to v1`")
            .err();
    };
    let read = |&layer: &usize| {
        sliced.check_file(&manifest_name(layer))?;
        let manifest = V1Manifest::read(dir, layer)?;
        sliced.check_layer(&manifest.source_manifest, &dir.join(manifest_name(layer)))?;
        if manifest.tp_size != from.tp_size {
            return refuse(format!("the layer has {} ranks", manifest.tp_size))
                .file(dir.join(manifest_name(layer)))
                .layer(layer)
                .wanted(format!("{}, as {MANIFEST_FILE} says", from.tp_size))
                .err();
        }
        Ok((layer, manifest))
    };
    let manifests: BTreeMap<usize, V1Manifest> = sliced.layers.iter().map(read).collect::<Result<_>>()?;
    let entry = |(layer, manifest): (&usize, &V1Manifest)| {
        let units = manifest.source_manifest.allocation_bit_units;
        (layer.to_string(), LayerEntry::named(*layer, None, units))
    };
    let mut config = sliced.config.clone();
    config.insert("quantization_config".to_owned(), from.quantization_config.clone());
    let manifest = CompleteManifest {
        schema: V2_SCHEMA.to_owned(),
        layers: manifests.iter().map(entry).collect(),
        r7_tensor_count: manifests
            .values()
            .map(|manifest| manifest.source_manifest.payload_sha256.len())
            .sum(),
        sliced_from: None,
        ..sliced.manifest.clone()
    };
    let binding = sliced.binding(from.tp_size, V2_SCHEMA);
    let layers = FromSlices { sliced: &sliced, manifests: &manifests };
    let wanted = Some(&from.manifest_sha256);
    let made = sliced.make_into(out, (binding, config), manifest, wanted, &layers, observer)?;
    Ok(ConvertReport {
        made,
        from: dir.to_path_buf(),
        schema_version: 2,
        tp_size: from.tp_size,
        config_block: R7_BLOCK,
        not_for_unmodified_r13: Some("whole layers: unmodified r13 loaders read rank slices".to_owned()),
    })
}

/// Slices to whole layers.
struct FromSlices<'a> {
    sliced: &'a Complete,
    manifests: &'a BTreeMap<usize, V1Manifest>,
}

impl Layers for FromSlices<'_> {
    fn bytes(&self) -> u64 {
        let layer = |manifest: &V1Manifest| {
            let source = &manifest.source_manifest;
            schema_v1::shard_bytes(source, self.sliced.sizes(), 1) + source.bit_map.len() as u64 * 8192
        };
        self.manifests.values().map(layer).sum()
    }

    fn shards(&self) -> Vec<String> {
        self.manifests.values().map(|manifest| manifest.source_manifest.shard.clone()).collect()
    }

    fn write(&self, work: &DirTransaction, observer: &dyn Observer) -> Result<()> {
        let dir = &self.sliced.dir;
        observer.begin("layers", None, self.manifests.len() as u64);
        self.manifests.par_iter().try_for_each(|(&layer, manifest)| {
            let source = &manifest.source_manifest;
            let hash = work.file(&source.shard, |path| {
                for (shard, listed) in &manifest.shards_sha256 {
                    let found = sha256_file(dir.join(shard))?;
                    if found != *listed {
                        return refuse(format!("its SHA-256 is {found}"))
                            .file(dir.join(shard))
                            .layer(layer)
                            .wanted(format!("{listed}, as its manifest has it"))
                            .err();
                    }
                }
                let ranks = V1Layer::open(dir, layer, manifest.tp_size)?;
                let read = |expert, role| reassemble(&ranks.slices(expert, role)?, role);
                let written = stream_shard(path, layer, &source.bit_map, self.sliced.sizes(), &read)?;
                Ok(written.sha256)
            })?;
            if hash != source.shard_sha256 {
                return Err(refuse(format!("put together, the layer's shard has the SHA-256 {hash}"))
                    .file(dir.join(manifest_name(layer)))
                    .layer(layer)
                    .wanted(format!("{}, which the slices were cut from", source.shard_sha256))
                    .check());
            }
            let mut bytes = canonical(source)?;
            bytes.push(b'\n');
            if sha256_hex(&bytes) != manifest.source_manifest_sha256 {
                return Err(refuse("the manifest it carries is not the one the slices were cut with")
                    .file(dir.join(manifest_name(layer)))
                    .layer(layer)
                    .field("source_manifest")
                    .check());
            }
            work.file(&format!("{}.json", shard_stem(layer)), |path| write_atomic(path, &bytes))?;
            advance(observer, &source.shard)
        })?;
        observer.end();
        Ok(())
    }
}
