//! A complete checkpoint in the making: carried shards, side files, layers, configuration, index, manifest, in that order.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde_json::{Map, Value, json};

use super::carry::{CarryPlan, copy_file, side_files};
use crate::checkpoint::CheckpointDir;
use crate::checkpoint::complete::{
    CONFIG_FILE, CompleteManifest, MANIFEST_FILE, MANIFEST_HASH_FILE, QUANTIZATION_FILE, hash_line, pretty,
};
use crate::checkpoint::directory::INDEX_FILE;
use crate::checkpoint::names::layer_prefix;
use crate::checkpoint::roles::resolve;
use crate::error::{IoContext, Result, refuse};
use crate::store::canonical_json::canonical_file;
use crate::store::hash::{Hash, sha256_hex};
use crate::store::transaction::DirTransaction;
use crate::walk::progress::{Observer, advance};

/// Room for configuration, index and manifests, beyond what is known of them: a tensor's entries in them, generously.
const BYTES_A_TENSOR: u64 = 1024;

/// The layers of a new directory, in either schema.
pub trait Layers {
    /// About how many bytes their files take.
    fn bytes(&self) -> u64;
    /// Their shards' file names.
    fn shards(&self) -> Vec<String>;
    /// Writes their files, those that are not finished yet, and checks them.
    ///
    /// # Errors
    /// What cannot be read, made or written; names file and tensor of what is not as it has to be.
    fn write(&self, work: &DirTransaction, observer: &dyn Observer) -> Result<()>;
}

/// Where a new directory's carried part comes from.
pub struct Carried<'a> {
    /// The checkpoint.
    pub checkpoint: &'a CheckpointDir,
    /// What was sealed of its payloads.
    pub sealed: &'a (dyn Fn(&str) -> Option<Hash> + Sync),
    /// What was sealed of the files beside its shards.
    pub files: &'a BTreeMap<String, Hash>,
    /// The layers whose experts are replaced.
    pub replaced: &'a [usize],
}

/// What is to be made.
pub struct Target<'a> {
    /// The directory.
    pub out: &'a Path,
    /// What it is made from: an object of hashes and settings.
    pub binding: Value,
    /// The new `config.json`, its `quantization_config` included.
    pub config: Map<String, Value>,
    /// The new manifest; files, payloads and counts are filled in.
    pub manifest: CompleteManifest,
    /// What the manifest's SHA-256 has to come out as, where that is known.
    pub manifest_sha256: Option<&'a Hash>,
}

/// What was made.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Made {
    /// The directory.
    pub path: PathBuf,
    /// Files in it.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Tensors in all.
    pub tensors: usize,
    /// Carried tensors.
    pub carried_tensors: usize,
    /// Carried shards copied byte for byte.
    pub shards_copied: usize,
    /// Carried shards written anew without replaced experts.
    pub shards_rewritten: usize,
    /// Carried shards of which nothing was left.
    pub shards_dropped: usize,
    /// Replaced layers.
    pub layers: usize,
    /// SHA-256 of `MANIFEST.json`.
    pub manifest_sha256: Hash,
}

/// Makes a directory, or finishes it. `None`: an earlier run of the same command had published it and was stopped right
/// after.
///
/// # Errors
/// What is refused of the target, what does not have its sealed hash, what cannot be written; nothing is published then.
pub fn make(
    target: Target<'_>,
    carried: &Carried<'_>,
    layers: &dyn Layers,
    observer: &dyn Observer,
) -> Result<Option<Made>> {
    let Target { out, binding, config, mut manifest, manifest_sha256: wanted } = target;
    let plan = CarryPlan::new(carried.checkpoint, carried.replaced)?;
    let sides = side_files(carried.checkpoint.dir())?;
    let of_layers = layers.shards();
    if let Some(shard) = plan.shards.iter().find(|shard| of_layers.contains(&shard.to)) {
        return refuse("a carried shard has the name of a replaced layer's")
            .file(carried.checkpoint.dir().join(&shard.from))
            .wanted("another name: replaced layers are r7-experts-layer-NNN, kaiju1-experts-layer-NNN and r7-v1-layer-NNN-rank-RR")
            .err();
    }
    let unsealed: Vec<&str> = sides
        .iter()
        .map(|(name, _)| name.as_str())
        .filter(|name| !carried.files.contains_key(*name))
        .collect();
    if !unsealed.is_empty() {
        observer.note(&format!("copied as they are, nothing sealed them: {}", unsealed.join(", ")));
    }
    let size = |files: &[(String, u64)]| files.iter().map(|(_, bytes)| bytes).sum::<u64>();
    let entries = plan.weight_map().len() + manifest.r7_tensor_count;
    let needed = plan.bytes() + size(&sides) + layers.bytes() + entries as u64 * BYTES_A_TENSOR;
    let Some(work) = DirTransaction::begin(out, &binding, needed)? else { return Ok(None) };

    observer.begin("carried shards", None, plan.shards.len() as u64);
    plan.shards.par_iter().try_for_each(|shard| {
        work.file(&shard.to, |path| shard.write(carried.checkpoint, carried.sealed, path))?;
        advance(observer, &shard.to)
    })?;
    observer.end();
    for (name, _) in &sides {
        let from = carried.checkpoint.dir().join(name);
        work.file(name, |path| copy_file(&from, path, carried.files.get(name)))?;
    }
    layers.write(&work, observer)?;

    work.put(CONFIG_FILE, &pretty(&Value::Object(config.clone()))?)?;
    match config.get("quantization_config") {
        Some(quantization) => drop(work.put(QUANTIZATION_FILE, &pretty(quantization)?)?),
        None => return refuse("a complete checkpoint without quantization_config").file(out).err(),
    }
    let names = index(&work, &plan, &of_layers)?;
    let sealed = |name: &str| {
        let known = (carried.sealed)(name).map(|hash| (name.to_owned(), hash));
        known.ok_or_else(|| refuse("the payload was never sealed").tensor(name).into())
    };
    let kept = plan.weight_map();
    manifest.carried_tensor_payload_sha256 = kept.keys().map(|name| sealed(name)).collect::<Result<_>>()?;
    let mtp = layer_prefix(manifest.mtp_layer);
    manifest.mtp_carried_tensor_payload_sha256 = manifest
        .carried_tensor_payload_sha256
        .iter()
        .filter(|(name, _)| name.starts_with(&mtp))
        .map(|(name, hash)| (name.clone(), hash.clone()))
        .collect();
    (manifest.tensor_count, manifest.carried_tensor_count) = (names, kept.len());
    if names != kept.len() + manifest.r7_tensor_count {
        return Err(refuse(format!("{names} tensors, {} of them carried", kept.len()))
            .file(out)
            .wanted(format!("{} of the replaced layers", manifest.r7_tensor_count))
            .check());
    }
    manifest.files_sha256 = work.files();
    // An earlier run may have come this far.
    for own in [MANIFEST_FILE, MANIFEST_HASH_FILE] {
        manifest.files_sha256.remove(own);
    }
    let bytes = canonical_file(&manifest.to_json()?)?;
    let manifest_sha256 = sha256_hex(&bytes);
    if let Some(wanted) = wanted.filter(|wanted| **wanted != manifest_sha256) {
        return Err(refuse(format!("the manifest would have the SHA-256 {manifest_sha256}"))
            .file(out.join(MANIFEST_FILE))
            .wanted(wanted)
            .check());
    }
    work.put(MANIFEST_FILE, &bytes)?;
    work.put(MANIFEST_HASH_FILE, hash_line(&manifest_sha256).as_bytes())?;
    let files = work.files().len();
    let length = |name: &String| {
        let path = work.path().join(name);
        std::fs::metadata(&path).at(&path).map(|meta| meta.len())
    };
    let bytes = work.files().keys().map(length).sum::<Result<u64>>()?;
    work.publish()?;
    Ok(Some(Made {
        path: out.to_path_buf(),
        files,
        bytes,
        tensors: names,
        carried_tensors: kept.len(),
        shards_copied: plan.shards.iter().filter(|shard| shard.whole).count(),
        shards_rewritten: plan.shards.iter().filter(|shard| !shard.whole).count(),
        shards_dropped: plan.emptied,
        layers: carried.replaced.len(),
        manifest_sha256,
    }))
}

/// Writes the index over all shards in the directory and opens the result: index and tensors have to be a bijection. Gives
/// the number of tensors.
fn index(work: &DirTransaction, plan: &CarryPlan, of_layers: &[String]) -> Result<usize> {
    let mut weight_map = plan.weight_map();
    let mut total = 0;
    let shards = plan.shards.iter().map(|shard| &shard.to);
    for file in shards.chain(of_layers) {
        let shard = CheckpointDir::open_file(work.path().join(file))?;
        for name in shard.names() {
            let info = shard.info(name)?.info;
            total += info.end - info.start;
            weight_map.insert(name.to_owned(), file.clone());
        }
    }
    let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
    work.put(INDEX_FILE, &pretty(&index)?)?;
    Ok(CheckpointDir::open(work.path())?.names().count())
}

/// Refuses a target within, or around, a directory that is read from.
///
/// # Errors
/// Names the target.
pub fn check_apart(out: &Path, others: &[(&str, &Path)]) -> Result<()> {
    let target = resolve(out)?;
    for (what, dir) in others {
        let other = dir.canonicalize().at(dir)?;
        if target.starts_with(&other) || other.starts_with(&target) {
            return refuse(format!("it overlaps {what}, {}", dir.display()))
                .file(out)
                .wanted("a directory elsewhere")
                .err();
        }
    }
    Ok(())
}
