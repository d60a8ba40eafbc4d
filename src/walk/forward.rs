//! The forward stages: embeddings, and every prompt through one layer into the next sealed state.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::Device;
use serde::{Deserialize, Serialize};

use super::capture::{layer_folder, layer_input};
use super::progress::{Observer, proceed};
use super::state::{
    PromptState, StateJob, StateManifest, adopt_prompt, create_folder, manifest_path, prompt_path,
    read_prompt, write_manifest, write_prompt,
};
use crate::checkpoint::WeightSource;
use crate::config::Geometry;
use crate::corpus::SealedPrompt;
use crate::corpus::batch::{BATCH_TOKENS, batches, name_prompt};
use crate::error::{Error, Refusal, Result, refuse};
use crate::model::{Embedding, Layer, round_bf16};
use crate::store::atomic::{create_dir_durably, write_json_atomic};
use crate::store::hash::{Hash, sha256_hex};

/// A published state: its manifest, the manifest's SHA-256, and every file with its own.
#[derive(Debug, Clone)]
pub struct PublishedState {
    /// The manifest.
    pub manifest: StateManifest,
    /// Its SHA-256: the state's name.
    pub sha256: Hash,
    /// All files, the manifest too, by path relative to the work directory.
    pub files: Vec<(PathBuf, Hash)>,
}

/// `layer-NNN/forward-audit.json`: a prompt that went through the layer twice, to the same bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForwardAudit {
    /// The layer.
    pub layer: usize,
    /// SHA-256 of the manifest of the state before it.
    pub state_sha256: Hash,
    /// SHA-256 of the v2 manifest that was installed, `None` where the layer was not replaced.
    pub installed_sha256: Option<Hash>,
    /// The prompt's id.
    pub prompt: String,
    /// SHA-256 of the hidden state of either run, BF16 little-endian.
    pub hidden_sha256: [Hash; 2],
    /// SHA-256 of the top-k list of either run, I32 little-endian.
    pub topk_indices_sha256: [Hash; 2],
}

/// `layer-NNN/forward-audit.json`, relative to the work directory.
pub fn forward_audit_path(layer: usize) -> PathBuf {
    layer_folder(layer).join("forward-audit.json")
}

/// Publishes the manifest over prompt files that are there.
fn publish(work: &Path, manifest: StateManifest) -> Result<PublishedState> {
    let sha256 = write_manifest(work, &manifest)?;
    let mut files: Vec<(PathBuf, Hash)> =
        manifest.prompts.iter().map(|(id, hash)| (prompt_path(manifest.layer, id), hash.clone())).collect();
    files.push((manifest_path(manifest.layer), sha256.clone()));
    Ok(PublishedState { manifest, sha256, files })
}

/// The embeddings of a prompt: its state before layer 0.
///
/// # Errors
/// Names the prompt's row whose token has no embedding.
pub fn embedded(embedding: &Embedding, prompt: &SealedPrompt) -> Result<PromptState> {
    Ok(PromptState {
        hidden: embedding.embed(&prompt.token_ids)?,
        topk: None,
        positions: (0..prompt.token_ids.len() as u32).collect(),
    })
}

/// Writes the state before layer 0: the embeddings of every calibration prompt. What an interrupted run finished is
/// adopted.
///
/// # Errors
/// What the carrier or the file system says.
pub fn embed(
    work: &Path,
    geometry: &Geometry,
    carrier: &dyn WeightSource,
    identity_sha256: &Hash,
    prompts: &[&SealedPrompt],
    observer: &dyn Observer,
) -> Result<PublishedState> {
    let embedding = Embedding::load(geometry, carrier, &Device::Cpu)?;
    create_folder(work, 0)?;
    let mut hashes = BTreeMap::new();
    observer.begin("embed", None, prompts.len() as u64);
    for prompt in prompts {
        proceed(observer)?;
        let input_sha256 = &prompt.token_ids_sha256;
        let job = StateJob { identity_sha256, input_sha256, installed_sha256: None }.sha256(0, prompt)?;
        let hash = match adopt_prompt(work, 0, prompt, &job)? {
            Some(hash) => hash,
            None => write_prompt(work, 0, prompt, &embedded(&embedding, prompt)?, &job)?,
        };
        hashes.insert(prompt.id.clone(), hash);
        observer.advance(&prompt.id);
    }
    observer.end();
    publish(
        work,
        StateManifest { layer: 0, predecessor_sha256: None, installed_sha256: None, prompts: hashes },
    )
}

/// What [`forward_layer`] starts from.
pub struct ForwardInput<'a> {
    /// Sealed state before the layer.
    pub manifest: &'a StateManifest,
    /// SHA-256 of that manifest.
    pub state_sha256: &'a Hash,
    /// SHA-256 of the installed v2 manifest, where the layer's experts were replaced.
    pub installed_sha256: Option<Hash>,
    /// SHA-256 of the walk's identity.
    pub identity_sha256: &'a Hash,
}

impl ForwardInput<'_> {
    /// The name of the job that gives a prompt's state after the layer.
    ///
    /// # Errors
    /// A prompt that the manifest lacks.
    pub fn job(&self, prompt: &SealedPrompt) -> Result<Hash> {
        let Some(input_sha256) = self.manifest.prompts.get(&prompt.id) else {
            return refuse("the state has no such prompt")
                .layer(self.manifest.layer)
                .prompt(&prompt.id)
                .err();
        };
        let installed_sha256 = self.installed_sha256.as_ref();
        let job = StateJob { identity_sha256: self.identity_sha256, input_sha256, installed_sha256 };
        job.sha256(self.manifest.layer + 1, prompt)
    }
}

/// Sends every calibration prompt through `layer` and publishes the state after it; prompts that an interrupted run
/// finished are adopted. The first prompt runs once more, alone: hidden and index bytes must be those that are stored.
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
) -> Result<PublishedState> {
    let next = layer.index() + 1;
    create_folder(work, next)?;
    let mut manifest = StateManifest {
        layer: next,
        predecessor_sha256: Some(input.state_sha256.clone()),
        installed_sha256: input.installed_sha256.clone(),
        prompts: BTreeMap::new(),
    };
    let mut missing = Vec::new();
    observer.begin("forward", Some(layer.index()), prompts.len() as u64);
    for &prompt in prompts {
        if let Some(hash) = adopt_prompt(work, next, prompt, &input.job(prompt)?)? {
            manifest.prompts.insert(prompt.id.clone(), hash);
            observer.advance(&format!("{} (adopted)", prompt.id));
        } else {
            missing.push(prompt);
        }
    }
    let read = |prompt: &&SealedPrompt| read_prompt(work, input.manifest, prompt);
    for range in batches(&missing, BATCH_TOKENS) {
        proceed(observer)?;
        let batch = &missing[range];
        let states = batch.iter().map(read).collect::<Result<Vec<_>>>()?;
        for (prompt, state) in batch.iter().zip(&forward_states(layer, experts, states, batch)?) {
            let hash = write_prompt(work, next, prompt, state, &input.job(prompt)?)?;
            manifest.prompts.insert(prompt.id.clone(), hash);
            observer.advance(&prompt.id);
        }
    }
    observer.end();
    let Some(first) = prompts.first() else {
        return refuse("there is no prompt to forward").layer(layer.index()).err();
    };
    let again = forward_states(layer, experts, vec![read(first)?], &[*first])?;
    let audit = repeated(layer.index(), input, first, &read_prompt(work, &manifest, first)?, &again[0])?;
    let mut state = publish(work, manifest)?;
    create_dir_durably(work.join(layer_folder(layer.index())))?;
    let path = forward_audit_path(layer.index());
    let sha256 = write_json_atomic(work.join(&path), &audit)?;
    state.files.push((path, sha256));
    Ok(state)
}

/// Sends prompts through a layer, all at once.
///
/// # Errors
/// Names layer, prompt and row of a value that is not finite.
pub fn forward_states(
    layer: &Layer,
    experts: &dyn WeightSource,
    states: Vec<PromptState>,
    batch: &[&SealedPrompt],
) -> Result<Vec<PromptState>> {
    let (hidden, positions, carry) = layer_input(states);
    let output = layer.forward(&hidden, &positions, &carry, experts).map_err(name_prompt(batch))?;
    let states = output.hidden.iter().zip(output.carry).zip(positions).zip(batch);
    states
        .map(|(((hidden, topk), positions), prompt)| {
            let hidden = round_bf16(hidden).map_err(|error| match error {
                Error::Refused(refusal) => refusal.layer(layer.index()).prompt(&prompt.id).into(),
                other => other,
            })?;
            Ok(PromptState { hidden, topk: Some(topk), positions })
        })
        .collect()
}

fn repeated(
    layer: usize,
    input: &ForwardInput<'_>,
    prompt: &SealedPrompt,
    first: &PromptState,
    second: &PromptState,
) -> Result<ForwardAudit> {
    let audit = ForwardAudit {
        layer,
        state_sha256: input.state_sha256.clone(),
        installed_sha256: input.installed_sha256.clone(),
        prompt: prompt.id.clone(),
        hidden_sha256: [sha256_hex(&first.hidden_bytes()?), sha256_hex(&second.hidden_bytes()?)],
        topk_indices_sha256: [sha256_hex(&first.topk_bytes()), sha256_hex(&second.topk_bytes())],
    };
    match audit.fault() {
        None => Ok(audit),
        Some(fault) => Err(fault.check()),
    }
}

impl ForwardAudit {
    /// What is wrong where the two runs differ.
    pub fn fault(&self) -> Option<Refusal> {
        let equal = |pair: &[Hash; 2]| pair[0] == pair[1];
        let same = equal(&self.hidden_sha256) && equal(&self.topk_indices_sha256);
        (!same).then(|| {
            refuse("the same prompt twice through the layer gave different bytes")
                .layer(self.layer)
                .prompt(&self.prompt)
                .wanted("equal hidden states and top-k lists")
        })
    }
}
