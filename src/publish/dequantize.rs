//! A packed checkpoint as a plain one, which any software reads.
//!
//! Packed modules become `{module}.weight` `[N, K]` ([`dense`](super::dense)); every other tensor keeps its type and its
//! bytes. A directory gets new shards and an index for them, a `config.json` without what it said of quantization, and
//! the files beside (tokenizer, templates, cards); what describes the packed form is left out. Its transaction is bound
//! to options, headers, small files and the first bytes of every payload: stopped, it goes on shard by shard.
//!
//! Memory: as many decoded linears as there are threads. Bytes depend on the input and the options alone.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::Write;
use std::path::Path;

use rayon::prelude::*;
use serde::Serialize;
use serde_json::json;

use super::carry::{copy_file, side_files};
use super::check_apart;
use super::dense::{Rounding, WeightDtype, payload};
use crate::checkpoint::complete::{CARRIER_MANIFEST_FILE, CONFIG_FILE, MANIFEST_FILE, pretty, unverified};
use crate::checkpoint::names::layer_of;
use crate::checkpoint::packed::PackedModule;
use crate::checkpoint::roles::{QUANTIZATION_FILES, refuse_quantization, strip_quantization};
use crate::checkpoint::trellis_tensors::TensorReader;
use crate::checkpoint::{CheckpointDir, Reconstruction};
use crate::error::{IoContext, Result, refuse};
use crate::store::atomic::write_json_atomic;
use crate::store::canonical_json::{float17, parse_float17};
use crate::store::hash::{Hash, HashingWriter, sha256_file, sha256_hex};
use crate::store::index::INDEX_FILE;
use crate::store::safetensors_read::SafetensorsFile;
use crate::store::safetensors_stream::{TensorSpec, WrittenShard, stream_safetensors};
use crate::store::strict_json::{StrictValue, read_json};
use crate::store::transaction::{DirTransaction, check_space};
use crate::walk::progress::{Observer, proceed};

/// How much of every payload binds a transaction to its input.
const SAMPLE: usize = 1024;

/// What the plain checkpoint is to be.
#[derive(Debug, Clone, Copy)]
pub struct DequantizeOptions {
    /// Type of the weights that packed modules become.
    pub dtype: WeightDtype,
    /// Payload bytes a shard holds at most, unless a single tensor is larger. A single file is never cut.
    pub shard_bytes: u64,
}

/// What was made.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DequantizeReport {
    /// What was read.
    pub input: String,
    /// What was written.
    pub output: String,
    /// Type of the decoded weights.
    pub dtype: WeightDtype,
    /// Tensors written.
    pub tensors: usize,
    /// Those that were packed modules.
    pub modules_decoded: usize,
    /// Bytes of the tensors' payloads.
    pub bytes: u64,
    /// How far the decoded weights were rounded. Unknown where an earlier run had finished the directory and was stopped
    /// right after.
    pub rounding: Option<Rounding>,
    /// SHA-256 of the safetensors files.
    pub shards: BTreeMap<String, Hash>,
    /// Files that were copied.
    pub copied: Vec<String>,
    /// Files that were left out.
    pub left_out: Vec<String>,
    /// Keys that `config.json` lost.
    pub config_keys_removed: Vec<String>,
}

/// A shard to be written.
struct Shard {
    file: String,
    specs: Vec<TensorSpec>,
}

/// Writes the plain form of `input`, a file or a directory, to `out`, a file or a directory to be made.
///
/// # Errors
/// Names what is wrong with the input, its packed tensors among them; an output that is there already or was begun from
/// another input; how many bytes the disk lacks.
pub fn dequantize(
    input: &Path,
    out: &Path,
    options: DequantizeOptions,
    observer: &dyn Observer,
) -> Result<DequantizeReport> {
    let checkpoint = CheckpointDir::open_any(input)?;
    let weights = Reconstruction::new(checkpoint.into())?;
    let specs = specs(&weights, options.dtype)?;
    let report = DequantizeReport {
        input: input.display().to_string(),
        output: out.display().to_string(),
        dtype: options.dtype,
        tensors: specs.len(),
        modules_decoded: weights.packed().len(),
        bytes: specs.iter().filter_map(TensorSpec::bytes).sum(),
        rounding: None,
        shards: BTreeMap::new(),
        copied: Vec::new(),
        left_out: Vec::new(),
        config_keys_removed: Vec::new(),
    };
    if input.join(MANIFEST_FILE).exists() {
        observer.note(&unverified(input));
    }
    observer.begin("dequantize", None, specs.len() as u64);
    let report = match input.is_file() {
        true => to_file(&weights, specs, out, report, observer)?,
        false => to_directory(&weights, specs, input, out, options, report, observer)?,
    };
    observer.end();
    Ok(report)
}

/// The tensors of the plain checkpoint: what has no layer first, then layer by layer, each by name.
fn specs(weights: &Reconstruction, dtype: WeightDtype) -> Result<Vec<TensorSpec>> {
    let mut specs = Vec::new();
    for name in weights.weights() {
        let stored = match weights.packed_weight(&name) {
            Some(_) => dtype.stored(),
            None => weights.checkpoint().info(&name)?.info.dtype,
        };
        specs.push(TensorSpec::new(&*name, stored, &weights.shape(&name)?));
    }
    specs.sort_by_cached_key(|spec| (layer_of(&spec.name), spec.name.clone()));
    Ok(specs)
}

fn to_file(
    weights: &Reconstruction,
    specs: Vec<TensorSpec>,
    out: &Path,
    mut report: DequantizeReport,
    observer: &dyn Observer,
) -> Result<DequantizeReport> {
    if out.symlink_metadata().is_ok() {
        return refuse("it is there already").file(out).wanted("the name of a file to be made").err();
    }
    check_space(out, report.bytes)?;
    let (written, rounding) = write_shard(weights, out, &specs, report.dtype, observer)?;
    let name = out.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    report.shards.insert(name, written.sha256);
    report.rounding = Some(rounding);
    Ok(report)
}

fn to_directory(
    weights: &Reconstruction,
    specs: Vec<TensorSpec>,
    input: &Path,
    out: &Path,
    options: DequantizeOptions,
    mut report: DequantizeReport,
    observer: &dyn Observer,
) -> Result<DequantizeReport> {
    check_apart(out, &[("the checkpoint that is read", input)])?;
    let files = Beside::of(input)?;
    let config = match files.config {
        true => Some(plain_config(&input.join(CONFIG_FILE), &mut report.config_keys_removed)?),
        false => None,
    };
    let mut small = BTreeMap::new();
    let mut needed = report.bytes;
    for name in &files.copied {
        let path = input.join(name);
        needed += std::fs::metadata(&path).at(&path)?.len();
        small.insert(name.clone(), sha256_file(&path)?);
    }
    let shards = cut(specs, options.shard_bytes);
    let binding = json!({
        "made_by": "walk dequantize",
        "input": fingerprint(weights.checkpoint())?,
        "shards": shards_now(weights.checkpoint())?,
        "files_sha256": small,
        "config_sha256": config.as_deref().map(sha256_hex),
        "dtype": options.dtype.name(),
        "shard_bytes": options.shard_bytes,
    });
    (report.copied, report.left_out) = (files.copied, files.left_out);
    let Some(work) = DirTransaction::begin(out, &binding, needed)? else {
        for shard in shards {
            report.shards.insert(shard.file.clone(), sha256_file(out.join(shard.file))?);
        }
        return Ok(report);
    };
    let mut all = Rounding::default();
    for shard in &shards {
        let figures = work.scratch()?.join(format!("{}.json", shard.file));
        let sha256 = work.file(&shard.file, |path| {
            let (written, rounding) = write_shard(weights, path, &shard.specs, options.dtype, observer)?;
            // Kept to the last digit: a shard that is finished is not decoded again.
            let kept = [rounding.max_error, rounding.max_relative_error].map(float17);
            write_json_atomic(&figures, &kept)?;
            Ok(written.sha256)
        })?;
        let [max_error, max_relative_error] = read_json::<[String; 2]>(&figures)?;
        let (max_error, max_relative_error) =
            (parse_float17(&max_error)?, parse_float17(&max_relative_error)?);
        all = all.max(Rounding { max_error, max_relative_error });
        report.shards.insert(shard.file.clone(), sha256);
    }
    report.rounding = Some(all);
    let weight_map: BTreeMap<&str, &str> = shards
        .iter()
        .flat_map(|shard| shard.specs.iter().map(|spec| (spec.name.as_str(), shard.file.as_str())))
        .collect();
    let index = json!({ "metadata": { "total_size": report.bytes }, "weight_map": weight_map });
    work.put(INDEX_FILE, &pretty(&index)?)?;
    for (name, sha256) in &small {
        work.file(name, |path| copy_file(&input.join(name), path, Some(sha256)))?;
    }
    if let Some(config) = config {
        work.put(CONFIG_FILE, &config)?;
        refuse_quantization(work.path())?;
    }
    work.publish()?;
    Ok(report)
}

/// Shards of at most so many payload bytes, a larger tensor alone in its own.
fn cut(specs: Vec<TensorSpec>, shard_bytes: u64) -> Vec<Shard> {
    let mut shards: Vec<Vec<TensorSpec>> = Vec::new();
    let mut room = 0;
    for spec in specs {
        let bytes = spec.bytes().unwrap_or(u64::MAX);
        match shards.last_mut() {
            Some(shard) if bytes <= room => {
                room -= bytes;
                shard.push(spec);
            }
            _ => {
                room = shard_bytes.saturating_sub(bytes);
                shards.push(vec![spec]);
            }
        }
    }
    let count = shards.len();
    let named = shards
        .into_iter()
        .zip(1..)
        .map(|(specs, number)| Shard { file: format!("model-{number:05}-of-{count:05}.safetensors"), specs });
    named.collect()
}

/// Writes a shard, its packed modules decoded as many at a time as there are threads.
fn write_shard(
    weights: &Reconstruction,
    path: &Path,
    specs: &[TensorSpec],
    dtype: WeightDtype,
    observer: &dyn Observer,
) -> Result<(WrittenShard, Rounding)> {
    let tensors = weights.checkpoint().as_ref();
    let mut waiting: VecDeque<&PackedModule> =
        in_file_order(specs).filter_map(|spec| weights.packed_weight(&spec.name)).collect();
    let mut decoded: VecDeque<(Vec<u8>, Rounding)> = VecDeque::new();
    let mut rounding = Rounding::default();
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    let written = stream_safetensors(path, &metadata, specs, |spec, sink| {
        proceed(observer)?;
        if weights.packed_weight(&spec.name).is_none() {
            sink.write_all(tensors.tensor_payload(&spec.name)?).at(path)?;
        } else {
            if decoded.is_empty() {
                let next = waiting.drain(..waiting.len().min(rayon::current_num_threads()));
                let next: Vec<&PackedModule> = next.collect();
                let made: Vec<_> =
                    next.par_iter().map(|module| payload(module, tensors, dtype)).collect::<Result<_>>()?;
                decoded.extend(made);
            }
            let Some((bytes, off)) = decoded.pop_front() else {
                return refuse("more packed weights than the shard was planned with")
                    .file(path)
                    .tensor(&spec.name)
                    .err();
            };
            sink.write_all(&bytes).at(path)?;
            rounding = rounding.max(off);
        }
        observer.advance(&spec.name);
        Ok(())
    })?;
    Ok((written, rounding))
}

/// As [`stream_safetensors`] asks for them: wide types first, then by name.
fn in_file_order(specs: &[TensorSpec]) -> impl Iterator<Item = &TensorSpec> {
    let mut order: Vec<&TensorSpec> = specs.iter().collect();
    order.sort_by_key(|spec| (std::cmp::Reverse(spec.dtype.size()), &spec.name));
    order.into_iter()
}

/// Length and time of every shard: one that is written to between two runs would give a directory of two inputs.
fn shards_now(checkpoint: &CheckpointDir) -> Result<BTreeMap<String, String>> {
    let now = |(file, shard): (&str, &SafetensorsFile)| {
        let meta = std::fs::metadata(shard.path()).at(shard.path())?;
        let changed = meta.modified().at(shard.path())?.duration_since(std::time::UNIX_EPOCH);
        let nanoseconds = changed.map_or(0, |since| since.as_nanos());
        Ok((file.to_owned(), format!("{} bytes, {nanoseconds}", meta.len())))
    };
    checkpoint.shards().map(now).collect()
}

/// SHA-256 over every tensor's name, type, shape and first bytes. Payloads are not read to their ends: a checkpoint is up
/// to a terabyte, and another one with the same headers differs at the start of some payload.
fn fingerprint(checkpoint: &CheckpointDir) -> Result<Hash> {
    let mut hash = HashingWriter::new(std::io::sink());
    for name in checkpoint.names() {
        let info = checkpoint.info(name)?.info;
        let bytes = checkpoint.tensor_bytes(name)?;
        let head = format!("{name:?} {} {:?}\n", info.dtype, info.shape);
        hash.write_all(head.as_bytes()).at(checkpoint.dir())?;
        hash.write_all(&bytes[..bytes.len().min(SAMPLE)]).at(checkpoint.dir())?;
    }
    Ok(hash.finish().1)
}

/// The files beside the shards, sorted.
#[derive(Default)]
struct Beside {
    config: bool,
    copied: Vec<String>,
    left_out: Vec<String>,
}

impl Beside {
    fn of(dir: &Path) -> Result<Self> {
        let sides: BTreeSet<String> = side_files(dir)?.into_iter().map(|(name, _)| name).collect();
        let mut beside = Self::default();
        for entry in std::fs::read_dir(dir).at(dir)? {
            let name = entry.at(dir)?.file_name().to_string_lossy().into_owned();
            if name == CONFIG_FILE {
                beside.config = true;
            } else if name.ends_with(".safetensors") || name == INDEX_FILE {
                // Made anew.
            } else if sides.contains(&name) && !describes_packed_form(&name) {
                beside.copied.push(name);
            } else {
                beside.left_out.push(name);
            }
        }
        beside.copied.sort();
        beside.left_out.sort();
        Ok(beside)
    }
}

/// Whether a side file tells of the packed form, which the plain checkpoint does not have.
fn describes_packed_form(name: &str) -> bool {
    QUANTIZATION_FILES.contains(&name) || name.starts_with("MANIFEST") || name == CARRIER_MANIFEST_FILE
}

/// The config without what it says of quantization; the keys it loses are added to `removed`.
fn plain_config(path: &Path, removed: &mut Vec<String>) -> Result<Vec<u8>> {
    let StrictValue(mut config) = read_json(path)?;
    removed.extend(strip_quantization(&mut config));
    pretty(&config)
}

impl DequantizeReport {
    /// The report as plain text.
    pub fn render_table(&self) -> String {
        let mut text = format!(
            "tensors   {:>8}  {} bytes in {} safetensors files\ndecoded   {:>8}  packed modules to {}",
            self.tensors,
            self.bytes,
            self.shards.len(),
            self.modules_decoded,
            self.dtype.name()
        );
        text.push_str(&match (self.rounding, self.dtype) {
            (_, WeightDtype::F16 | WeightDtype::F32) => ", exact\n".to_owned(),
            (None, _) => ", rounded to nearest\n".to_owned(),
            (Some(Rounding { max_error, max_relative_error }), _) => format!(
                ", rounded to nearest: off by {max_error:.3e} at most, {max_relative_error:.3e} of the value\n"
            ),
        });
        for (what, names) in
            [("copied", &self.copied), ("left out", &self.left_out), ("removed", &self.config_keys_removed)]
        {
            if !names.is_empty() {
                let shown = names.iter().take(8).map(String::as_str).collect::<Vec<_>>().join(", ");
                let more = if names.len() > 8 { ", ..." } else { "" };
                let of = if what == "removed" { "config.json: " } else { "" };
                text.push_str(&format!("{what:<10}{:>8}  {of}{shown}{more}\n", names.len()));
            }
        }
        text.push_str(&format!("written to {}\n", self.output));
        text
    }
}
