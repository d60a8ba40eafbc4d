//! Carried tensors: which shards are taken over whole, which are rewritten without the replaced experts, which go away;
//! and the files beside them.
//!
//! A payload is hashed as it is copied and held against what was sealed of it: nothing is published that the walk did not
//! see.

use std::collections::BTreeMap;
use std::path::Path;

use crate::checkpoint::CheckpointDir;
use crate::checkpoint::complete::{CONFIG_FILE, MANIFEST_FILE, MANIFEST_HASH_FILE, QUANTIZATION_FILE};
use crate::checkpoint::directory::{INDEX_FILE, SINGLE_FILE};
use crate::checkpoint::names::split_experts;
use crate::error::{IoContext, Result, refuse};
use crate::store::atomic::AtomicFile;
use crate::store::hash::{Hash, sha256_hex};
use crate::store::safetensors_read::SafetensorsFile;
use crate::store::safetensors_stream::{TensorSpec, stream_safetensors};

/// What a checkpoint in one piece is called beside other shards: loaders would take `model.safetensors` for all there is.
const ONE_OF_ONE: &str = "model-00001-of-00001.safetensors";

/// A shard that goes on, whole or in part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CarriedShard {
    /// Its name where it comes from.
    pub from: String,
    /// Its name in the new directory.
    pub to: String,
    /// The tensors that are kept.
    pub kept: Vec<String>,
    /// Whether that is all of them.
    pub whole: bool,
    /// Bytes that will be written, or a few more.
    pub bytes: u64,
}

/// The carried tensors of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CarryPlan {
    /// The shards that go on, sorted.
    pub shards: Vec<CarriedShard>,
    /// Shards of which nothing is left.
    pub emptied: usize,
    /// Tensors that are replaced.
    pub dropped: usize,
}

impl CarryPlan {
    /// Everything of a checkpoint but the routed experts of the layers `replaced`, in whatever form they are stored.
    ///
    /// # Errors
    /// Names the shard whose length cannot be read.
    pub fn new(checkpoint: &CheckpointDir, replaced: &[usize]) -> Result<Self> {
        let alone = checkpoint.shard_files().count() == 1;
        let mut plan = Self { shards: Vec::new(), emptied: 0, dropped: 0 };
        for (file, shard) in checkpoint.shards() {
            let all = shard.names().count();
            let stays = |name: &&str| split_experts(name).is_none_or(|(layer, _)| !replaced.contains(&layer));
            let kept: Vec<String> = shard.names().filter(stays).map(str::to_owned).collect();
            plan.dropped += all - kept.len();
            if kept.is_empty() {
                plan.emptied += 1;
                continue;
            }
            let header = shard.prefix()?.len() as u64;
            let payload = |name: &String| shard.info(name).map(|info| info.end - info.start);
            let bytes = header + kept.iter().map(payload).sum::<Result<u64>>()?;
            let to = if file == SINGLE_FILE && alone { ONE_OF_ONE } else { file };
            plan.shards.push(CarriedShard {
                from: file.to_owned(),
                to: to.to_owned(),
                whole: kept.len() == all,
                kept,
                bytes,
            });
        }
        Ok(plan)
    }

    /// Names of the kept tensors with the files they go to.
    pub fn weight_map(&self) -> BTreeMap<String, String> {
        let entries = |shard: &CarriedShard| {
            let file = shard.to.clone();
            shard.kept.iter().map(move |name| (name.clone(), file.clone())).collect::<Vec<_>>()
        };
        self.shards.iter().flat_map(entries).collect()
    }

    /// Bytes that will be written.
    pub fn bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.bytes).sum()
    }
}

impl CarriedShard {
    /// Writes the shard to `path`; every payload has to have its sealed hash.
    ///
    /// # Errors
    /// Names file and tensor of a payload that is another, or what cannot be written.
    pub fn write(
        &self,
        checkpoint: &CheckpointDir,
        sealed: &dyn Fn(&str) -> Option<Hash>,
        path: &Path,
    ) -> Result<Hash> {
        let Some((_, shard)) = checkpoint.shards().find(|(file, _)| *file == self.from) else {
            return refuse("the shard is gone").file(checkpoint.dir().join(&self.from)).err();
        };
        let verified = |name: &str| verified(shard, name, sealed);
        if !self.whole {
            let spec = |name: &String| {
                let info = shard.info(name)?;
                Ok(TensorSpec::new(name, info.dtype, &info.shape))
            };
            let specs = self.kept.iter().map(spec).collect::<Result<Vec<_>>>()?;
            let written = stream_safetensors(path, shard.metadata(), &specs, |spec, sink| {
                sink.write_all(verified(&spec.name)?).at(path)
            })?;
            return Ok(written.sha256);
        }
        let mut file = AtomicFile::create(path)?;
        file.put(shard.prefix()?)?;
        let mut order: Vec<&String> = self.kept.iter().collect();
        // Empty payloads share their place with the next one.
        order.sort_by_key(|name| shard.info(name).map_or((0, 0), |info| (info.start, info.end)));
        for name in order {
            file.put(verified(name)?)?;
        }
        file.commit()
    }
}

fn verified<'a>(
    shard: &'a SafetensorsFile,
    name: &str,
    sealed: &dyn Fn(&str) -> Option<Hash>,
) -> Result<&'a [u8]> {
    let bytes = shard.bytes(name)?;
    let (found, wanted) = (sha256_hex(bytes), sealed(name));
    if wanted.as_ref() == Some(&found) {
        return Ok(bytes);
    }
    refuse(format!("its payload's SHA-256 is {found}"))
        .file(shard.path())
        .tensor(name)
        .wanted(
            wanted
                .map_or("no such tensor: it was not sealed".to_owned(), |hash| format!("{hash}, as sealed")),
        )
        .err()
}

/// The files beside the shards that a new directory takes over: tokenizer, templates, licences, model card. Not: weights in
/// any format, what is written anew (config, index, manifests), hidden files, and folders.
///
/// # Errors
/// Names the directory that cannot be read.
pub fn side_files(dir: &Path) -> Result<Vec<(String, u64)>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).at(dir)? {
        let entry = entry.at(dir)?;
        let Ok(name) = entry.file_name().into_string() else {
            return refuse("a file whose name is no Unicode")
                .file(entry.path())
                .wanted("names that a manifest can list")
                .err();
        };
        if !is_side_file(&name) {
            continue;
        }
        // A hub cache is a folder of links: what they lead to is copied.
        let meta = std::fs::metadata(entry.path()).at(entry.path())?;
        if meta.is_file() {
            files.push((name, meta.len()));
        }
    }
    files.sort();
    Ok(files)
}

fn is_side_file(name: &str) -> bool {
    const WEIGHTS: [&str; 10] =
        [".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json"];
    const ANEW: [&str; 5] = [CONFIG_FILE, QUANTIZATION_FILE, INDEX_FILE, MANIFEST_FILE, MANIFEST_HASH_FILE];
    let manifest = ["r7-", "kaiju1-"].iter().any(|stem| name.starts_with(stem)) && name.ends_with(".json");
    !name.starts_with('.')
        && !manifest
        && !ANEW.contains(&name)
        && !WEIGHTS.iter().any(|extension| name.ends_with(extension))
}

/// Copies a file; where its hash was sealed, it has to be that one.
///
/// # Errors
/// Names the file that changed, or what cannot be read or written.
pub fn copy_file(from: &Path, to: &Path, sealed: Option<&Hash>) -> Result<Hash> {
    let mut source = std::fs::File::open(from).at(from)?;
    let mut file = AtomicFile::create(to)?;
    // The writer's own errors name the target; reading is told apart by copying through a buffer.
    let mut buffer = vec![0; 1 << 20];
    loop {
        match std::io::Read::read(&mut source, &mut buffer).at(from)? {
            0 => break,
            n => file.put(&buffer[..n])?,
        }
    }
    match sealed {
        None => file.commit(),
        Some(sealed) => {
            file.commit_as(sealed).map_err(|error| match error {
                crate::Error::Refused(_) => refuse("the file is not the one that was sealed")
                    .file(from)
                    .wanted(format!("sha256 {sealed}"))
                    .into(),
                other => other,
            })?;
            Ok(sealed.clone())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_anew_or_is_weights_is_no_side_file() {
        for side in ["tokenizer.json", "tokenizer.model", "LICENSE", "README.md", "chat_template.jinja"] {
            assert!(is_side_file(side), "{side}");
        }
        for other in [
            "config.json",
            "model.safetensors.index.json",
            "pytorch_model.bin",
            "r7-experts-layer-003.json",
            "kaiju1-experts-layer-003.json",
            ".gitattributes",
            "MANIFEST.json",
            "x.gguf",
        ] {
            assert!(!is_side_file(other), "{other}");
        }
    }
}
