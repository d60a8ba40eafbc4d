//! The forward stages: embeddings, and every prompt through one layer into the next sealed state.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{Device, Tensor};

use super::capture::layer_input;
use super::progress::Observer;
use super::state::{PromptState, StateManifest, create_folder, read_prompt, write_manifest, write_prompt};
use crate::checkpoint::WeightSource;
use crate::config::Geometry;
use crate::corpus::SealedPrompt;
use crate::corpus::batch::{BATCH_TOKENS, batches, name_prompt};
use crate::error::{Result, refuse};
use crate::model::{Embedding, Layer, TopK, round_bf16};
use crate::store::hash::Hash;

/// Writes the state before layer 0: the embeddings of every calibration prompt.
///
/// # Errors
/// What the carrier or the file system says.
pub fn embed(
    work: &Path,
    geometry: &Geometry,
    carrier: &dyn WeightSource,
    prompts: &[&SealedPrompt],
    observer: &dyn Observer,
) -> Result<Hash> {
    let embedding = Embedding::load(geometry, carrier, &Device::Cpu)?;
    create_folder(work, 0)?;
    let mut hashes = BTreeMap::new();
    observer.begin("embed", None, prompts.len() as u64);
    for prompt in prompts {
        let state = PromptState {
            hidden: embedding.embed(&prompt.token_ids)?,
            topk: None,
            positions: (0..prompt.token_ids.len() as u32).collect(),
        };
        hashes.insert(prompt.id.clone(), write_prompt(work, 0, prompt, &state)?);
        observer.advance(&prompt.id);
    }
    observer.end();
    let manifest =
        StateManifest { layer: 0, predecessor_sha256: None, installed_sha256: None, prompts: hashes };
    write_manifest(work, &manifest)
}

/// What [`forward_layer`] starts from.
pub struct ForwardInput<'a> {
    /// Sealed state before the layer.
    pub manifest: &'a StateManifest,
    /// SHA-256 of that manifest.
    pub state_sha256: &'a Hash,
    /// SHA-256 of the installed v2 manifest, where the layer's experts were replaced.
    pub installed_sha256: Option<Hash>,
}

/// Sends every calibration prompt through `layer` and seals the state after it. The first prompt runs twice, alone the
/// second time: hidden and index bytes must be equal.
///
/// # Errors
/// Names layer, prompt and row of a value that is not finite, and the prompt whose second run differs.
pub fn forward_layer(
    work: &Path,
    layer: &Layer,
    experts: &dyn WeightSource,
    input: &ForwardInput<'_>,
    prompts: &[&SealedPrompt],
    observer: &dyn Observer,
) -> Result<Hash> {
    let next = layer.index() + 1;
    create_folder(work, next)?;
    let mut hashes = BTreeMap::new();
    observer.begin("forward", Some(layer.index()), prompts.len() as u64);
    for range in batches(prompts, BATCH_TOKENS) {
        let (first, batch) = (range.start == 0, &prompts[range]);
        let states = run(work, layer, experts, input.manifest, batch)?;
        if first {
            let again = run(work, layer, experts, input.manifest, &batch[..1])?;
            same_bytes(layer.index(), batch[0], &states[0], &again[0])?;
        }
        for (prompt, state) in batch.iter().zip(&states) {
            hashes.insert(prompt.id.clone(), write_prompt(work, next, prompt, state)?);
            observer.advance(&prompt.id);
        }
    }
    observer.end();
    let manifest = StateManifest {
        layer: next,
        predecessor_sha256: Some(input.state_sha256.clone()),
        installed_sha256: input.installed_sha256.clone(),
        prompts: hashes,
    };
    write_manifest(work, &manifest)
}

fn run(
    work: &Path,
    layer: &Layer,
    experts: &dyn WeightSource,
    manifest: &StateManifest,
    batch: &[&SealedPrompt],
) -> Result<Vec<PromptState>> {
    let states = batch.iter().map(|p| read_prompt(work, manifest, p)).collect::<Result<Vec<_>>>()?;
    let (hidden, positions, carry) = layer_input(states);
    let output = layer.forward(&hidden, &positions, &carry, experts).map_err(name_prompt(batch))?;
    output
        .hidden
        .iter()
        .zip(output.carry)
        .zip(positions)
        .map(|((hidden, topk), positions)| {
            Ok(PromptState { hidden: round_bf16(hidden)?, topk: Some(topk), positions })
        })
        .collect()
}

fn same_bytes(layer: usize, prompt: &SealedPrompt, a: &PromptState, b: &PromptState) -> Result<()> {
    let bits = |tensor: &Tensor| -> Result<Vec<u32>> {
        Ok(tensor.flatten_all()?.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect())
    };
    let indices = |state: &PromptState| state.topk.as_ref().map(|TopK { indices, .. }| indices.clone());
    if bits(&a.hidden)? == bits(&b.hidden)? && indices(a) == indices(b) {
        return Ok(());
    }
    Err(refuse("the same prompt twice through the layer gave different bytes")
        .layer(layer)
        .prompt(&prompt.id)
        .check())
}
