//! Capture: what the router of a layer decides, and the rows its experts see.
//!
//! Attention, norm and router run for every prompt of the sealed input state. Routing goes to sidecar files, masses are
//! summed exactly, and the experts' input rows are kept in global row order.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::progress::{Observer, proceed};
use super::state::{PromptState, StateManifest, read_prompt};
use crate::calibrate::mass::{Mass, TokenRule};
use crate::config::Geometry;
use crate::corpus::SealedPrompt;
use crate::corpus::batch::{batches, name_prompt};
use crate::error::{Error, Refusal, Result, refuse};
use crate::linalg::Matrix;
use crate::model::{Capture, Layer, TopK};
use crate::store::atomic::{create_dir_durably, write_json_atomic};
use crate::store::hash::{Hash, sha256_file, sha256_hex};
use crate::store::safetensors_read::SafetensorsFile;
use crate::store::safetensors_write::{TensorData, write_safetensors};
use crate::store::strict_json::read_json;

/// A layer's captured rows, in global row order.
#[derive(Debug, Clone)]
pub struct LayerCapture {
    /// Input of the routed experts, `[rows, H]`.
    pub mlp_in: Matrix<f32>,
    /// Chosen experts, `[rows, k]`.
    pub ids: Vec<i32>,
    /// Router scores of all experts, unbiased, `[rows, E]`.
    pub scores: Vec<f32>,
    /// Experts a row is routed to.
    pub k: usize,
    /// Exact routing mass.
    pub mass: Mass,
    /// The published record.
    pub record: CaptureRecord,
    /// SHA-256 of `capture.json`.
    pub sha256: Hash,
}

/// `layer-NNN/capture.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaptureRecord {
    /// The layer.
    pub layer: usize,
    /// SHA-256 of the input state's manifest.
    pub state_sha256: Hash,
    /// Routing mass by expert, decimal integers in units of 2^-149.
    pub mass_units: Vec<String>,
    /// Rows routed to each expert.
    pub routed_rows: Vec<u64>,
    /// By prompt id.
    pub prompts: BTreeMap<String, PromptCapture>,
}

/// Hashes of one prompt's capture.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PromptCapture {
    /// SHA-256 of the routing sidecar.
    pub routing_sha256: Hash,
    /// SHA-256 of the expert input rows, f32 little-endian.
    pub mlp_in_sha256: Hash,
}

/// `layer-NNN`, relative to the work directory.
pub fn layer_folder(layer: usize) -> PathBuf {
    PathBuf::from(format!("layer-{layer:03}"))
}

/// The arguments of a layer call, from states.
pub fn layer_input(states: Vec<PromptState>) -> (Vec<candle_core::Tensor>, Vec<Vec<u32>>, Vec<Option<TopK>>) {
    let mut input = (Vec::new(), Vec::new(), Vec::new());
    for state in states {
        input.0.push(state.hidden);
        input.1.push(state.positions);
        input.2.push(state.topk);
    }
    input
}

/// `layer-NNN/capture.json`, relative to the work directory.
pub fn capture_path(layer: usize) -> PathBuf {
    layer_folder(layer).join("capture.json")
}

/// A prompt's routing sidecar, relative to the work directory.
pub fn routing_path(layer: usize, prompt: &str) -> PathBuf {
    layer_folder(layer).join("routing").join(format!("{prompt}.safetensors"))
}

impl LayerCapture {
    /// Every file the capture published, by path relative to the work directory.
    pub fn files(&self) -> Vec<(PathBuf, Hash)> {
        let layer = self.record.layer;
        let routing = self.record.prompts.iter();
        let mut files: Vec<(PathBuf, Hash)> =
            routing.map(|(id, prompt)| (routing_path(layer, id), prompt.routing_sha256.clone())).collect();
        files.push((capture_path(layer), self.sha256.clone()));
        files
    }
}

/// Runs the capture of a layer over all calibration prompts, at most `batch_tokens` tokens (or one prompt) at a time;
/// `state` is the sealed input state's manifest and its SHA-256. What is captured of a prompt does not depend on the
/// others, and masses are integer sums: only the order of `prompts` shows in the result, as the order of the rows.
/// Where the capture was `sealed` before, rows are computed again and nothing is written.
///
/// # Errors
/// Names layer, prompt and row of routing that fails its audit or of a value that is not finite; the prompt whose
/// repeated capture differs from the sealed one (a failed check).
#[allow(clippy::too_many_arguments)]
pub fn capture_layer(
    work: &Path,
    geometry: &Geometry,
    layer: &Layer,
    (manifest, state_sha256): (&StateManifest, &Hash),
    prompts: &[&SealedPrompt],
    batch_tokens: usize,
    sealed: bool,
    observer: &dyn Observer,
) -> Result<LayerCapture> {
    let index = layer.index();
    let before: Option<CaptureRecord> =
        if sealed { Some(read_json(work.join(capture_path(index)))?) } else { None };
    if !sealed {
        create_dir_durably(work.join(layer_folder(index)).join("routing"))?;
    }
    let (width, k) = (geometry.hidden_size, geometry.num_experts_per_tok);
    let rule =
        TokenRule { normalised: geometry.norm_topk_prob, factor: geometry.routed_scaling_factor as f32 };
    let mut mass = Mass::new(geometry.n_routed_experts);
    let (mut rows, mut ids, mut scores) = (Vec::new(), Vec::new(), Vec::new());
    let mut records = BTreeMap::new();
    observer.begin("capture", Some(index), prompts.len() as u64);
    for range in batches(prompts, batch_tokens) {
        proceed(observer)?;
        let batch = &prompts[range];
        let states = batch.iter().map(|p| read_prompt(work, manifest, p)).collect::<Result<Vec<_>>>()?;
        let (hidden, positions, carry) = layer_input(states);
        let attended = layer.attend(&hidden, &positions, &carry).map_err(name_prompt(batch))?;
        for (prompt, attended) in batch.iter().zip(attended) {
            let capture = attended.capture.expect("a MoE layer captures");
            audit_tokens(&capture, k, geometry.n_routed_experts, rule, &mut mass).map_err(
                |error| match error {
                    Error::Refused(refusal) => refusal.layer(index).prompt(&prompt.id).into(),
                    other => other,
                },
            )?;
            let x: Vec<f32> = capture.mlp_in.flatten_all()?.to_vec1()?;
            let bytes: Vec<u8> = x.iter().flat_map(|v| v.to_le_bytes()).collect();
            let tokens = x.len() / width;
            let sidecar = [
                TensorData::i32("ids", &[tokens, k], &capture.expert_ids),
                TensorData::f32("weights", &[tokens, k], &capture.expert_weights),
            ];
            let path = work.join(routing_path(index, &prompt.id));
            let mlp_in_sha256 = sha256_hex(&bytes);
            let routing_sha256 = match &before {
                None => write_safetensors(path, &BTreeMap::new(), &sidecar)?.sha256,
                Some(record) => same_as_sealed(record, &path, &prompt.id, &sidecar, &mlp_in_sha256)?,
            };
            records.insert(prompt.id.clone(), PromptCapture { routing_sha256, mlp_in_sha256 });
            rows.extend(x);
            ids.extend(capture.expert_ids);
            scores.extend(capture.router_scores);
            observer.advance(&prompt.id);
        }
    }
    observer.end();
    let record = CaptureRecord {
        layer: index,
        state_sha256: state_sha256.clone(),
        mass_units: mass.decimal(),
        routed_rows: mass.rows.clone(),
        prompts: records,
    };
    let path = work.join(capture_path(index));
    let sha256 = match &before {
        None => write_json_atomic(path, &record)?,
        Some(sealed) if *sealed == record => sha256_file(path)?,
        Some(_) => return Err(differs(&path, index).check()),
    };
    let mlp_in = Matrix::new(rows.len() / width, width, rows);
    Ok(LayerCapture { mlp_in, ids, scores, k, mass, record, sha256 })
}

fn differs(path: &Path, layer: usize) -> Refusal {
    refuse("the repeated capture differs from the sealed one")
        .file(path)
        .layer(layer)
        .wanted("the machine and build that began this walk")
}

/// Holds a repeated capture of a prompt against its sealed record and sidecar; gives the sidecar's hash.
fn same_as_sealed(
    record: &CaptureRecord,
    path: &Path,
    prompt: &str,
    sidecar: &[TensorData<'_>],
    mlp_in_sha256: &Hash,
) -> Result<Hash> {
    let file = SafetensorsFile::open(path)?;
    let mut same = true;
    for tensor in sidecar {
        same &= file.bytes_as(&tensor.name, tensor.dtype, &tensor.shape)? == &*tensor.data;
    }
    match record.prompts.get(prompt) {
        Some(sealed) if same && sealed.mlp_in_sha256 == *mlp_in_sha256 => Ok(sealed.routing_sha256.clone()),
        _ => Err(differs(path, record.layer).prompt(prompt).check()),
    }
}

fn audit_tokens(capture: &Capture, k: usize, experts: usize, rule: TokenRule, mass: &mut Mass) -> Result<()> {
    let tokens = capture.expert_ids.chunks_exact(k).zip(capture.expert_weights.chunks_exact(k));
    for (row, ((ids, weights), scores)) in tokens.zip(capture.router_scores.chunks_exact(experts)).enumerate()
    {
        mass.add_token(ids, weights, scores, rule).map_err(|error| match error {
            Error::Refused(refusal) => refusal.row(row).into(),
            other => other,
        })?;
    }
    Ok(())
}
