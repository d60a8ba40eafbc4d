//! The packed modules of a file as plain weights, everything else copied.

use std::path::Path;

use serde::Serialize;
use serde_json::json;

use super::{check_output, noted, proceed};
use crate::checkpoint::{CheckpointDir, Reconstruction};
use crate::error::{IoContext, Result, refuse};
use crate::eval::table::{aligned, figure};
use crate::inspect::printable;
use crate::publish::dense::{Rounding, WeightDtype, payload};
use crate::store::hash::Hash;
use crate::store::safetensors_stream::{TensorSpec, stream_safetensors};
use crate::store::transaction::check_space;
use crate::walk::progress::Observer;

/// What was decoded.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DecodeReport {
    /// What was read.
    pub input: String,
    /// What was written.
    pub output: String,
    /// Type of the decoded weights.
    pub dtype: WeightDtype,
    /// SHA-256 of the file.
    pub sha256: Hash,
    /// Its length.
    pub bytes: u64,
    /// Tensors that were copied.
    pub copied: usize,
    /// The decoded weights, by name.
    pub tensors: Vec<DecodedTensor>,
}

/// A decoded weight.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DecodedTensor {
    /// Its name.
    pub name: String,
    /// `[N, K]`.
    pub shape: [usize; 2],
    /// What it was stored as.
    pub stored: String,
    /// How far it was rounded.
    pub rounding: Rounding,
}

/// Decodes the packed modules of the safetensors file `input` into the new file `out`.
///
/// # Errors
/// Names file and tensor of what is wrong: an output that is there, a payload that does not decode, a value that the type
/// does not hold, a file without packed modules. Nothing is published then.
pub fn decode(input: &Path, out: &Path, dtype: WeightDtype, observer: &dyn Observer) -> Result<DecodeReport> {
    check_output(input, out)?;
    let weights = Reconstruction::new(CheckpointDir::open_file(input)?.into())?;
    let checkpoint = weights.checkpoint().as_ref();
    let modules = weights.packed().len();
    if modules == 0 {
        return refuse("it has no packed weight")
            .file(input)
            .wanted("a file with KAIJU1 or EXL3 weights")
            .err();
    }
    let mut specs = Vec::new();
    for name in weights.weights() {
        let stored = match weights.packed_weight(&name) {
            Some(_) => dtype.stored(),
            None => checkpoint.info(&name)?.info.dtype,
        };
        specs.push(TensorSpec::new(&*name, stored, &weights.shape(&name)?));
    }
    check_space(out, specs.iter().filter_map(TensorSpec::bytes).sum())?;
    let metadata = noted(&weights, "walk_decode", &json!({ "dtype": dtype.name(), "tensors": modules }))?;
    let mut tensors = Vec::new();
    observer.begin("decode", None, modules as u64);
    let written = stream_safetensors(out, &metadata, &specs, |spec, sink| {
        let Some(module) = weights.packed_weight(&spec.name) else {
            return sink.write_all(checkpoint.tensor_bytes(&spec.name)?).at(out);
        };
        proceed(observer)?;
        let (bytes, rounding) = payload(module, checkpoint, dtype)?;
        sink.write_all(&bytes).at(out)?;
        tensors.push(DecodedTensor {
            name: spec.name.clone(),
            shape: [module.n, module.k],
            stored: module.form.name(),
            rounding,
        });
        observer.advance(&spec.name);
        Ok(())
    })?;
    observer.end();
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(DecodeReport {
        input: input.display().to_string(),
        output: out.display().to_string(),
        dtype,
        sha256: written.sha256,
        bytes: written.bytes,
        copied: specs.len() - modules,
        tensors,
    })
}

impl DecodeReport {
    /// The report as plain text.
    pub fn render_table(&self) -> String {
        let row = |tensor: &DecodedTensor| {
            vec![
                printable(&tensor.name),
                format!("{:?}", tensor.shape),
                tensor.stored.clone(),
                figure(tensor.rounding.max_error, 6),
                figure(tensor.rounding.max_relative_error, 6),
            ]
        };
        let rows: Vec<Vec<String>> = self.tensors.iter().map(row).collect();
        format!(
            "{}{} decoded to {}, {} copied; {} bytes in {}\n",
            aligned(&["tensor", "shape", "was", "rounded by", "of the value"], &rows),
            self.tensors.len(),
            self.dtype.name(),
            self.copied,
            self.bytes,
            self.output,
        )
    }
}
