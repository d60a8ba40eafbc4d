//! Chosen weights of a file packed, everything else copied.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use candle_core::{DType, Device};
use serde_json::json;

use super::importance::ImportanceReader;
use super::linear::{Deviation, LinearCodec, Payloads};
use super::report::{EncodeReport, EncodedTensor, LeftPlain};
use super::{ImportanceFile, ImportanceSource, check_output, noted, proceed};
use crate::checkpoint::{CheckpointDir, Reconstruction, WeightSource};
use crate::codec::trellis::codebook::Codebook;
use crate::error::{IoContext, Result, refuse};
use crate::linalg::Matrix;
use crate::store::canonical_json::float17;
use crate::store::hash::sha256_file;
use crate::store::safetensors_read::TensorInfo;
use crate::store::safetensors_stream::{TensorSpec, stream_safetensors};
use crate::store::tensor_dtype::TensorDtype;
use crate::store::transaction::check_space;
use crate::walk::progress::Observer;

/// What is encoded, and how.
#[derive(Debug, Clone, PartialEq)]
pub struct EncodeOptions {
    /// The codec and its settings.
    pub codec: LinearCodec,
    /// Names of weights; none: all that the codec can take.
    pub tensors: Vec<String>,
    /// Where the importance of inputs is read from.
    pub importance: ImportanceFile,
    /// Weights that the importance has nothing of are encoded as flat, and counted.
    pub flat_missing: bool,
}

/// A weight that is encoded.
struct Chosen {
    /// Its name.
    name: String,
    /// The name without `.weight`.
    module: String,
    /// `[N, K]`.
    shape: [usize; 2],
}

/// Encodes weights of the safetensors file `input` into the new file `out`.
///
/// # Errors
/// Names file and tensor of what is wrong: an output that is there, a tensor that is asked for and cannot be encoded,
/// importance that is missing or no importance, a weight that is not finite. Nothing is published then.
pub fn encode(
    input: &Path,
    out: &Path,
    options: &EncodeOptions,
    observer: &dyn Observer,
) -> Result<EncodeReport> {
    check_output(input, out)?;
    let weights = Reconstruction::new(CheckpointDir::open_file(input)?.into())?;
    let checkpoint = weights.checkpoint();
    let importance = ImportanceReader::open(&options.importance)?;
    let (chosen, left_plain) = choose(input, &weights, options)?;
    if chosen.is_empty() {
        return refuse("no tensor of it can be encoded")
            .file(input)
            .wanted("a 2-D BF16, F16 or F32 weight")
            .err();
    }
    if importance.path().is_none() {
        observer.note("no importance is given: all inputs of a weight weigh the same");
    }
    // All of it before hours of work.
    for weight in &chosen {
        importance.of(&weight.name, weight.shape[1], options.flat_missing)?;
    }
    let mut specs = Vec::new();
    let mut owners: BTreeMap<String, &Chosen> = BTreeMap::new();
    for weight in &chosen {
        for spec in options.codec.specs(&weight.module, weight.shape)? {
            owners.insert(spec.name.clone(), weight);
            specs.push(spec);
        }
    }
    let encoded: BTreeSet<&str> = chosen.iter().map(|weight| weight.name.as_str()).collect();
    for name in checkpoint.names().filter(|name| !encoded.contains(name)) {
        let info = checkpoint.info(name)?.info;
        specs.push(TensorSpec::new(name, info.dtype, &info.shape));
    }
    check_space(out, specs.iter().filter_map(TensorSpec::bytes).sum())?;
    let metadata = noted(&weights, "walk_encode", &described(options, &importance, chosen.len())?)?;

    let mut reports: BTreeMap<&str, EncodedTensor> = BTreeMap::new();
    let mut waiting: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    observer.begin("encode", None, chosen.len() as u64);
    let written = stream_safetensors(out, &metadata, &specs, |spec, sink| {
        let Some(weight) = owners.get(&spec.name) else {
            return sink.write_all(checkpoint.tensor_bytes(&spec.name)?).at(out);
        };
        // Markers come before everything else in a file, and are known without an encode.
        if let (TensorDtype::I32, Some(marker)) = (spec.dtype, Codebook::Mcg.marker()) {
            return sink.write_all(&marker.to_le_bytes()).at(out);
        }
        if !waiting.contains_key(&spec.name) {
            proceed(observer)?;
            let (payloads, deviation, source) = weight
                .encode(&weights, options, &importance)
                .map_err(|error| error.place(|refusal| refusal.file(input).tensor(&weight.name)))?;
            reports.insert(&weight.name, weight.report(&options.codec, &payloads, deviation, source));
            waiting.extend(payloads);
            observer.advance(&weight.name);
        }
        match waiting.remove(&spec.name) {
            Some(payload) => sink.write_all(&payload).at(out),
            None => Err(refuse("the encode has no such tensor").file(out).tensor(&spec.name).check()),
        }
    })?;
    observer.end();
    let tensors: Vec<EncodedTensor> = reports.into_values().collect();
    let fallbacks =
        tensors.iter().filter(|tensor| tensor.importance == ImportanceSource::FlatFallback).count();
    for tensor in tensors.iter().filter(|tensor| tensor.vanished_rows > 0) {
        observer.note(&format!(
            "{}: {} rows are too small for the form's f16 scales and became zero",
            tensor.name, tensor.vanished_rows
        ));
    }
    if fallbacks > 0 {
        observer
            .note(&format!("{fallbacks} tensors have no importance in the file and were encoded as flat"));
    }
    Ok(EncodeReport {
        input: input.display().to_string(),
        output: out.display().to_string(),
        codec: options.codec.name().to_owned(),
        sha256: written.sha256,
        bytes: written.bytes,
        copied: checkpoint.names().count() - chosen.len(),
        flat_fallbacks: fallbacks,
        tensors,
        left_plain,
    })
}

/// The weights that are encoded, by name, and the 2-D tensors that are not, with the reason.
fn choose(
    input: &Path,
    weights: &Reconstruction,
    options: &EncodeOptions,
) -> Result<(Vec<Chosen>, Vec<LeftPlain>)> {
    let checkpoint = weights.checkpoint();
    let asked: BTreeSet<&str> = options.tensors.iter().map(String::as_str).collect();
    for &name in &asked {
        let why = match (weights.packed_weight(name), checkpoint.contains(name)) {
            (Some(module), _) => Some(format!("it is packed already ({})", module.form.name())),
            (None, false) => Some("there is no such tensor".to_owned()),
            (None, true) => candidate(name, checkpoint.info(name)?.info, &options.codec).err(),
        };
        if let Some(why) = why {
            return refuse(why)
                .file(input)
                .tensor(name)
                .wanted("a 2-D BF16, F16 or F32 tensor that ends in .weight and whose sizes the codec takes")
                .err();
        }
    }
    let parts: BTreeSet<&str> = weights.packed().values().flat_map(|module| module.form.tensors()).collect();
    let (mut chosen, mut left) = (Vec::new(), Vec::new());
    for name in checkpoint.names().filter(|name| !parts.contains(name)) {
        let info = checkpoint.info(name)?.info;
        match candidate(name, info, &options.codec) {
            Ok(weight) if asked.is_empty() || asked.contains(name) => chosen.push(weight),
            Err(reason) if asked.is_empty() && info.shape.len() == 2 => {
                left.push(LeftPlain { name: name.to_owned(), shape: info.shape.clone(), reason });
            }
            _ => {}
        }
    }
    Ok((chosen, left))
}

/// A tensor as a weight that the codec takes; else why it is none.
fn candidate(name: &str, info: &TensorInfo, codec: &LinearCodec) -> Result<Chosen, String> {
    let &[n, k] = &info.shape[..] else { return Err(format!("its shape is {:?}", info.shape)) };
    if !matches!(info.dtype, TensorDtype::BF16 | TensorDtype::F16 | TensorDtype::F32) {
        return Err(format!("it is {}", info.dtype));
    }
    let module = name.strip_suffix(".weight").filter(|module| !module.is_empty());
    let module = module.ok_or("its name does not end in .weight")?;
    match codec.objection([n, k]) {
        Some(objection) => Err(objection),
        None => Ok(Chosen { name: name.to_owned(), module: module.to_owned(), shape: [n, k] }),
    }
}

impl Chosen {
    fn encode(
        &self,
        weights: &Reconstruction,
        options: &EncodeOptions,
        importance: &ImportanceReader,
    ) -> Result<(Payloads, Deviation, ImportanceSource)> {
        let [n, k] = self.shape;
        let (inputs, source) = importance.of(&self.name, k, options.flat_missing)?;
        let stored = weights.checkpoint().load(&self.name, &self.shape, DType::F32, &Device::Cpu)?;
        let weight = Matrix::new(n, k, stored.flatten_all()?.to_vec1()?);
        drop(stored);
        let (payloads, deviation) = options.codec.encode(&self.module, weight, inputs)?;
        Ok((payloads, deviation, source))
    }

    fn report(
        &self,
        codec: &LinearCodec,
        payloads: &Payloads,
        deviation: Deviation,
        importance: ImportanceSource,
    ) -> EncodedTensor {
        let bytes = payloads.iter().map(|(_, payload)| payload.len() as u64).sum();
        let stored = match codec {
            LinearCodec::Kaiju(settings) => format!("kaiju1 p{}", settings.code.bits()),
            LinearCodec::Trellis(bits) => format!("exl3 {} {bits}-bit", Codebook::Mcg.name()),
        };
        EncodedTensor {
            name: self.name.clone(),
            shape: self.shape,
            stored,
            bytes,
            bits_per_weight: bytes as f64 * 8.0 / (self.shape[0] as f64 * self.shape[1] as f64),
            weighted_error: deviation.weighted,
            proxy_error: deviation.proxy,
            vanished_rows: deviation.vanished_rows,
            importance,
        }
    }
}

/// What was done, for the file's metadata.
fn described(
    options: &EncodeOptions,
    importance: &ImportanceReader,
    tensors: usize,
) -> Result<serde_json::Value> {
    let mut said = match options.codec {
        LinearCodec::Kaiju(settings) => json!({
            "code_bits": settings.code.bits(),
            "hi_frac": float17(settings.hi_frac),
            "feedback": settings.feedback && importance.kind() == "hessian",
        }),
        LinearCodec::Trellis(bits) => json!({ "bits": bits, "codebook": Codebook::Mcg.name() }),
    };
    said["codec"] = json!(options.codec.name());
    said["tensors"] = json!(tensors);
    said["importance"] = json!(importance.kind());
    if let Some(path) = importance.path() {
        said["importance_sha256"] = json!(sha256_file(path)?);
    }
    Ok(said)
}
