//! `walk convert`: the experts of a complete checkpoint cut for tensor parallelism (schema v1), and put together again.
//!
//! Nothing is quantized anew. After a layer's slices are written they are read again: put together they have to be the v2
//! tensors word for word, and decoded side by side they have to be the decoded whole, bit for bit.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::Serialize;
use serde_json::Value;

use super::blocks::sliced_quantization;
use super::complete::Complete;
use super::directory::{Layers, Made, check_apart};
use crate::checkpoint::complete::{
    CompleteManifest, HYBRID_BLOCK, LayerEntry, MANIFEST_FILE, R7_BLOCK, SlicedFrom, V1_SCHEMA, V2_SCHEMA,
};
use crate::checkpoint::manifest_v2::V2Manifest;
use crate::checkpoint::names::{Projection, expert_module};
use crate::checkpoint::schema_v1::{self, V1Layer, V1Manifest, manifest_name, shard_name};
use crate::checkpoint::schema_v2::{V2Layer, shard_stem, stream_shard};
use crate::checkpoint::slices::{check_ranks, dense_of, reassemble};
use crate::codec::trellis::linear::reconstruction_sha256;
use crate::error::{Result, refuse};
use crate::store::atomic::write_json_atomic;
use crate::store::canonical_json::canonical_file;
use crate::store::hash::{Hash, sha256_file};
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
            let sliced = V1Manifest::new(manifest, sha256, &shards);
            work.put(&manifest_name(layer), &canonical_file(&sliced)?)?;
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
            // The very file: its hash was held against `source_manifest_sha256` when the manifest was read.
            work.file(&format!("{}.json", shard_stem(layer)), |path| write_json_atomic(path, source))?;
            advance(observer, &source.shard)
        })?;
        observer.end();
        Ok(())
    }
}
