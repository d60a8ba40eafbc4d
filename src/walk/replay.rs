//! The replay audit: sealed states forwarded once more from the sealed packed shards, and held against their successors.
//!
//! The state before layer 0 is the embeddings of the sealed tokens, and layer l makes the state before layer l + 1. Each
//! state that the journal seals is made again from the one before it: from the sealed files where they are kept, else from
//! what was replayed just before, as long as that is the sealed state by its hash. A state on disk is compared byte by
//! byte, a deleted one by the SHA-256 of its files, whose bytes are a function of the state and of what it was made from.
//!
//! Everything that enters is held against its seal first: corpus plan, config, shards and their manifests, kept states, and
//! of the carrier each tensor as it is loaded. Nothing is written to the work directory.

pub mod carrier;
pub mod compare;
mod open;
pub mod report;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use candle_core::Device;
use tempfile::TempDir;

use self::compare::{Difference, first_difference};
use self::report::{
    ComparedBy, EnvironmentDifference, InputFrom, NotReplayed, PromptDifference, Reason, ReplayReport,
    ReplayedLayer,
};
use super::forward::{embedded, forward_states};
use super::install::Installed;
use super::journal::{JOURNAL_FILE, JournalRecord, key};
use super::progress::{Observer, proceed};
use super::state::{
    PromptState, StateJob, StateManifest, create_folder, delete, job_of, prompt_path, read_prompt, stage_of,
    write_prompt,
};
use crate::checkpoint::WeightSource;
use crate::checkpoint::finished::finished_path;
use crate::config::Geometry;
use crate::config::choices::CodecName;
use crate::corpus::batch::{BATCH_TOKENS, batches};
use crate::corpus::{CorpusPlan, SealedPrompt};
use crate::error::{Error, Result, refuse};
use crate::model::{Embedding, Layer};
use crate::store::hash::Hash;
use crate::store::lock::WorkLock;

/// What to replay, and where the walk's checkpoints lie now.
#[derive(Debug, Clone, Default)]
pub struct ReplayOptions {
    /// This layer alone, from its sealed state; otherwise all from the embeddings on.
    pub layer: Option<usize>,
    /// This prompt alone.
    pub prompt: Option<String>,
    /// The carrier, where it is not where the walk found it.
    pub carrier: Option<PathBuf>,
    /// Where states are kept that are on their way to the next layer; the system's folder for temporary files otherwise.
    pub scratch: Option<PathBuf>,
}

/// An opened replay: everything that enters it held against its seal, nothing computed.
pub struct Replay {
    work: PathBuf,
    geometry: Geometry,
    codec: CodecName,
    corpus: CorpusPlan,
    carrier: Arc<dyn WeightSource>,
    record: JournalRecord,
    identity_sha256: Hash,
    prompt: Option<String>,
    /// Layers whose input state is to be made again, ascending.
    states: Vec<usize>,
    /// Layers whose input state is on disk.
    kept: BTreeSet<usize>,
    unreachable: Vec<NotReplayed>,
    environment: Vec<EnvironmentDifference>,
    /// Where states lie whose sealed files are deleted.
    scratch: Option<TempDir>,
    _lock: Option<WorkLock>,
    opened: Instant,
}

/// The sealed hash of an output of a stage.
fn output(work: &Path, record: &JournalRecord, stage: &str, path: &Path) -> Result<Hash> {
    match record.output(stage, path) {
        Some(hash) => Ok(hash.clone()),
        None => refuse(format!("stage {stage} has no sealed output {}", key(path)))
            .file(work.join(JOURNAL_FILE))
            .err(),
    }
}

/// Called before every batch of prompts.
fn go_on(observer: &dyn Observer) -> Result<()> {
    let lost = |_| Error::Interrupted("a replay keeps nothing: the same command begins anew".to_owned());
    proceed(observer).map_err(lost)
}

/// What makes a state.
enum Maker<'a> {
    /// Embeddings of the tokens.
    Embedding(Box<Embedding>),
    /// A layer.
    Layer(Box<LayerMaker<'a>>),
}

/// A layer with what it is given.
struct LayerMaker<'a> {
    layer: Layer,
    experts: Installed,
    /// Sealed hash of its v2 manifest, where its experts are replaced.
    installed_sha256: Option<Hash>,
    /// Where its input lies: the work directory or the scratch folder.
    root: &'a Path,
    /// Sealed hashes of its input.
    input: StateManifest,
}

impl Maker<'_> {
    /// The states of a batch of prompts, in its order.
    fn make(&self, batch: &[&SealedPrompt]) -> Result<Vec<PromptState>> {
        match self {
            Self::Embedding(embedding) => batch.iter().map(|prompt| embedded(embedding, prompt)).collect(),
            Self::Layer(maker) => {
                let read = |prompt: &&SealedPrompt| read_prompt(maker.root, &maker.input, prompt);
                let states = batch.iter().map(read).collect::<Result<Vec<_>>>()?;
                forward_states(&maker.layer, &maker.experts, states, batch)
            }
        }
    }

    /// The job by which the walk made a prompt's state before a layer.
    fn job(&self, identity_sha256: &Hash, state: usize, prompt: &SealedPrompt) -> Result<Hash> {
        let (input_sha256, installed_sha256) = match self {
            Self::Embedding(_) => (&prompt.token_ids_sha256, None),
            Self::Layer(maker) => (&maker.input.prompts[&prompt.id], maker.installed_sha256.as_ref()),
        };
        StateJob { identity_sha256, input_sha256, installed_sha256 }.sha256(state, prompt)
    }
}

impl Replay {
    /// Replays and compares; `each` is called with every layer as it is done.
    ///
    /// # Errors
    /// A file or tensor that is not the sealed one, by its name; a value that is not finite; what `each` says;
    /// [`Error::Interrupted`] where the observer asks to stop. A difference is no error: it is in the report.
    pub fn run(
        &self,
        observer: &dyn Observer,
        each: &mut dyn FnMut(&ReplayedLayer) -> Result<()>,
    ) -> Result<ReplayReport> {
        let prompts = self.prompts();
        let mut report = ReplayReport {
            equal: true,
            prompts: prompts.len(),
            walk_prompts: self.corpus.calibrate().count(),
            bytes: 0,
            environment: self.environment.clone(),
            layers: Vec::new(),
            not_replayed: Vec::new(),
            seconds: 0.0,
        };
        // The state in the scratch folder that is the sealed one.
        let mut replayed = None;
        for &state in &self.states {
            let Some(input) = self.input(state, replayed) else {
                report.not_replayed.push(NotReplayed { layer: state - 1, reason: Reason::InputDiffers });
                continue;
            };
            let layer = self.replay(state, input, &prompts, observer)?;
            if let (Some(scratch), Some(spent)) = (&self.scratch, state.checked_sub(1)) {
                delete(scratch.path(), spent)?;
            }
            replayed = layer.first_difference.is_none().then_some(state);
            report.bytes += layer.bytes;
            report.equal &= layer.first_difference.is_none();
            each(&layer)?;
            report.layers.push(layer);
        }
        report.not_replayed.extend_from_slice(&self.unreachable);
        report.seconds = self.opened.elapsed().as_secs_f64();
        Ok(report)
    }

    /// The prompts to replay, in plan order.
    fn prompts(&self) -> Vec<&SealedPrompt> {
        let wanted = |prompt: &&SealedPrompt| self.prompt.as_ref().is_none_or(|id| *id == prompt.id);
        self.corpus.calibrate().filter(wanted).collect()
    }

    /// The sealed hash of a prompt's state before a layer.
    fn sealed(&self, state: usize, prompt: &SealedPrompt) -> Result<Hash> {
        output(&self.work, &self.record, &stage_of(state), &prompt_path(state, &prompt.id))
    }

    /// What the seals say of some prompts' states before a layer.
    fn manifest(&self, layer: usize, prompts: &[&SealedPrompt]) -> Result<StateManifest> {
        let hash = |prompt: &&SealedPrompt| Ok((prompt.id.clone(), self.sealed(layer, prompt)?));
        Ok(StateManifest {
            layer,
            predecessor_sha256: None,
            installed_sha256: None,
            prompts: prompts.iter().map(hash).collect::<Result<BTreeMap<_, _>>>()?,
        })
    }

    /// Where the input lies of what makes `state`; nowhere if it is neither kept nor was `replayed`.
    fn input(&self, state: usize, replayed: Option<usize>) -> Option<(InputFrom, &Path)> {
        match (state.checked_sub(1), &self.scratch) {
            (None, _) => Some((InputFrom::Tokens, &self.work)),
            (Some(layer), _) if self.kept.contains(&layer) => Some((InputFrom::Sealed, &self.work)),
            (layer, Some(scratch)) if replayed == layer => Some((InputFrom::Replayed, scratch.path())),
            _ => None,
        }
    }

    /// What makes a state, from an input below `root`.
    fn maker<'a>(&self, state: usize, root: &'a Path, prompts: &[&SealedPrompt]) -> Result<Maker<'a>> {
        let (geometry, carrier) = (&self.geometry, self.carrier.clone());
        let Some(layer) = state.checked_sub(1) else {
            let embedding = Embedding::load(geometry, carrier.as_ref(), &Device::Cpu)?;
            return Ok(Maker::Embedding(Box::new(embedding)));
        };
        let loaded = Layer::load(geometry, layer, carrier.as_ref(), &Device::Cpu)?;
        let replaced: &[usize] = if geometry.is_moe(layer) { &[layer] } else { &[] };
        Ok(Maker::Layer(Box::new(LayerMaker {
            layer: loaded,
            experts: Installed::open(carrier, (&self.work, self.codec), replaced, geometry)?,
            installed_sha256: self.installed(layer)?,
            root,
            input: self.manifest(layer, prompts)?,
        })))
    }

    /// The sealed hash of a layer's v2 manifest, where its experts are replaced.
    fn installed(&self, layer: usize) -> Result<Option<Hash>> {
        let sealed = || {
            let stage = format!("layer-{layer:03}/emit");
            output(&self.work, &self.record, &stage, &finished_path(self.codec, layer, "json"))
        };
        self.geometry.is_moe(layer).then(sealed).transpose()
    }

    /// Makes a state again and compares it.
    fn replay(
        &self,
        state: usize,
        (input, root): (InputFrom, &Path),
        prompts: &[&SealedPrompt],
        observer: &dyn Observer,
    ) -> Result<ReplayedLayer> {
        let started = Instant::now();
        let layer = state.checked_sub(1);
        let compared_by = if self.kept.contains(&state) { ComparedBy::Bytes } else { ComparedBy::Hash };
        if let (ComparedBy::Hash, Some(scratch)) = (compared_by, &self.scratch) {
            create_folder(scratch.path(), state)?;
        }
        let (maker, sealed) = (self.maker(state, root, prompts)?, self.manifest(state, prompts)?);
        let mut done = ReplayedLayer {
            layer,
            state,
            input,
            compared_by,
            prompts: 0,
            differing_prompts: 0,
            bytes: 0,
            first_difference: None,
            seconds: 0.0,
        };
        observer.begin(
            if layer.is_some() { "replay" } else { "replay embeddings" },
            layer,
            prompts.len() as u64,
        );
        for range in batches(prompts, BATCH_TOKENS) {
            go_on(observer)?;
            let batch = &prompts[range];
            for (&prompt, made) in batch.iter().zip(maker.make(batch)?) {
                done.prompts += 1;
                done.bytes += (made.hidden_bytes()?.len() + made.topk_bytes().len()) as u64;
                let job = maker.job(&self.identity_sha256, state, prompt)?;
                if let Some(difference) = self.compare(&sealed, prompt, &made, &job)? {
                    done.differing_prompts += 1;
                    let prompt = prompt.id.clone();
                    done.first_difference.get_or_insert(PromptDifference { prompt, difference });
                }
                observer.advance(&prompt.id);
            }
        }
        observer.end();
        done.seconds = started.elapsed().as_secs_f64();
        Ok(done)
    }

    /// Holds a prompt's state against the sealed file, or against its hash where the file is deleted.
    fn compare(
        &self,
        sealed: &StateManifest,
        prompt: &SealedPrompt,
        made: &PromptState,
        job: &Hash,
    ) -> Result<Option<Difference>> {
        let state = sealed.layer;
        if let Some(scratch) = self.scratch.as_ref().filter(|_| !self.kept.contains(&state)) {
            let replayed = write_prompt(scratch.path(), state, prompt, made, job)?;
            let sealed = sealed.prompts[&prompt.id].clone();
            return Ok((replayed != sealed).then_some(Difference::Hash { replayed, sealed }));
        }
        let path = self.work.join(prompt_path(state, &prompt.id));
        let kept = read_prompt(&self.work, sealed, prompt)?;
        let difference = first_difference(made, &kept).map_err(|error| match error {
            Error::Refused(refusal) => refusal.file(path).prompt(&prompt.id).into(),
            other => other,
        })?;
        if difference.is_some() {
            return Ok(difference);
        }
        let named = job_of(&self.work, state, prompt)?;
        Ok((named != *job).then(|| Difference::Job { replayed: job.clone(), sealed: named }))
    }
}
