//! The stages in order.
//!
//! Corpus plan, embeddings, the dense layers before the first MoE layer; then for each MoE layer: state audit, capture,
//! probes, allocation, final encode, interaction audit, emit, install audit, forward. Each stage is sealed in the journal
//! before the next begins, so the same command on the same work directory goes on where the last one stopped. The last
//! layer is never forwarded.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use candle_core::Device;

use super::capture::{LayerCapture, capture_layer, layer_folder};
use super::choosing::encode_captured;
use super::emit::emit_layer;
use super::finals::{FinalLayer, summary_path};
use super::forward::{ForwardInput, embed, forward_layer};
use super::install::Installed;
use super::install_audit::audit_install;
use super::interaction::audit_interaction;
use super::journal::Journal;
use super::layer::LayerWork;
use super::numeric::NumericEnvironment;
use super::open::WalkOptions;
pub use super::outcome::{LayerOutcome, LayerRates, Outcome};
pub use super::preflight::codec_of;
use super::progress::{Observer, Stopwatch, proceed};
use super::rates::Allocation;
use super::sealed_files::is_half_deleted;
use super::state::{StateManifest, audit, delete, manifest_path, stage_of};
use crate::checkpoint::finished::{finished_folder, finished_path};
use crate::checkpoint::inventory::Inventory;
use crate::checkpoint::{CheckpointDir, Reconstruction, WeightSource};
use crate::codec::trellis::search::TileSearch;
use crate::codec::weight::WeightCodec;
use crate::config::{Geometry, Recipe};
use crate::corpus::batch::BATCH_TOKENS;
use crate::corpus::{CorpusPlan, SealedPrompt};
use crate::error::Result;
use crate::model::Layer;
use crate::store::atomic::{create_dir_durably, write_json_atomic};
use crate::store::canonical_json::parse_float17;
use crate::store::hash::Hash;
use crate::store::lock::WorkLock;
use crate::store::strict_json::read_json;

/// The sealed corpus, within the work directory.
pub const CORPUS_FILE: &str = "CORPUS_PLAN.json";
/// Says that a walk is finished.
pub const COMPLETE_FILE: &str = "WALK_COMPLETE.json";

/// An opened walk: everything checked, nothing computed.
pub struct Walk {
    /// The model's geometry.
    pub geometry: Geometry,
    /// The recipe.
    pub recipe: Recipe,
    /// The sealed corpus.
    pub corpus: CorpusPlan,
    /// BF16 source of the experts.
    pub source: Arc<CheckpointDir>,
    /// Everything else.
    pub carrier: Arc<Reconstruction>,
    pub(super) work: PathBuf,
    pub(super) recipe_sha256: Hash,
    pub(super) corpus_sha256: Hash,
    pub(super) inventory: Inventory,
    pub(super) inventory_sha256: Hash,
    pub(super) environment: NumericEnvironment,
    pub(super) journal: Journal,
    pub(super) _lock: WorkLock,
    pub(super) clock: Stopwatch,
    pub(super) options: WalkOptions,
    pub(super) resumed: Vec<String>,
}

impl Walk {
    /// The encoder the recipe asks for, a trellis one on this tile search engine.
    ///
    /// # Errors
    /// Settings that no encoder has.
    pub fn codec(&self, search: &'static dyn TileSearch) -> Result<WeightCodec> {
        codec_of(&self.recipe, search)
    }

    /// Walks every layer that is not sealed yet and marks the walk complete, or stops after the layer the options name.
    ///
    /// # Errors
    /// Whatever a stage refuses; [`crate::Error::Interrupted`] where the observer asks to stop. What was sealed before stays
    /// sealed.
    pub fn run(&mut self, codec: &WeightCodec, observer: &dyn Observer) -> Result<Outcome> {
        // The corpus is not changed by the walk; a copy lets stages borrow it beside the journal.
        let corpus = self.corpus.clone();
        let prompts: Vec<&SealedPrompt> = corpus.calibrate().collect();
        self.prefix(&prompts, observer)?;
        let mut outcome = Outcome::default();
        let mut counts = [0u64; 6];
        for layer in self.geometry.moe_layers() {
            let (started, clock) = (Instant::now(), self.clock.clone());
            let (allocation, summary) = self.layer(layer, codec, &prompts, observer)?;
            let found = [
                summary.dropped_rows,
                summary.cold_experts,
                summary.unmeasured_experts,
                summary.clipped_outputs,
                summary.uncorrected_experts,
                usize::from(summary.own_choices_dropped),
            ];
            counts.iter_mut().zip(found).for_each(|(sum, found)| *sum += found as u64);
            outcome.layers.push(LayerOutcome {
                layer,
                rates: rates_of(&allocation),
                heldout_error: parse_float17(&summary.heldout_relative)?,
                seconds: started.elapsed().as_secs_f64(),
                stage_seconds: self.clock.since(&clock),
                resumed: self.resumed_stages(layer),
            });
            if self.options.stop_after == Some(layer) {
                break;
            }
        }
        let fallbacks = [
            "derived rows not finite, left out of a covariance",
            "cold experts, topped up with rows not routed to them",
            "experts without held-out rows, measured on rows not routed to them",
            "output factors beyond their bounds, clipped",
            "experts whose correction of down would not carry over to unseen rows, left out",
            "layers whose experts' own choices lost on held-out rows, dropped",
        ];
        for (what, times) in fallbacks.into_iter().zip(counts).filter(|(_, times)| *times > 0) {
            observer.note(&format!("{what}: {times}"));
            outcome.fallbacks.push((what.to_owned(), times));
        }
        outcome.complete = outcome.layers.len() == self.geometry.moe_layers().len();
        if outcome.complete {
            self.complete()?;
        }
        outcome.stage_seconds = self.clock.take();
        Ok(outcome)
    }

    /// Walks what lies before an MoE layer, and captures the layer: its rows and routing, on the output of the quantized
    /// layers before it.
    ///
    /// # Errors
    /// Whatever a stage refuses; a state that is gone or is not the sealed one.
    pub fn capture_after_walk(
        &mut self,
        layer: usize,
        codec: &WeightCodec,
        observer: &dyn Observer,
    ) -> Result<LayerCapture> {
        let corpus = self.corpus.clone();
        let prompts: Vec<&SealedPrompt> = corpus.calibrate().collect();
        self.prefix(&prompts, observer)?;
        for before in self.geometry.first_moe_layer()..layer {
            self.layer(before, codec, &prompts, observer)?;
        }
        self.capture(layer, &prompts, observer)
    }

    /// A captured layer at work under `folder`, by another recipe than the walk's where a study wants one.
    pub fn layer_work<'a>(
        &'a self,
        folder: &'a Path,
        recipe: (&'a Recipe, &'a Hash),
        codec: &'a WeightCodec,
        capture: &'a LayerCapture,
    ) -> LayerWork<'a> {
        LayerWork::new(
            folder,
            capture.record.layer,
            &self.geometry,
            recipe,
            &self.source,
            (&self.inventory, &self.inventory_sha256),
            codec,
            capture,
        )
    }

    /// A layer's stages that were sealed before this run began, without the layer's name.
    fn resumed_stages(&self, layer: usize) -> Vec<String> {
        let prefix = format!("layer-{layer:03}/");
        self.resumed.iter().filter_map(|stage| stage.strip_prefix(&prefix)).map(str::to_owned).collect()
    }

    /// The journal, to read from.
    pub fn journal(&self) -> &Journal {
        &self.journal
    }

    /// The work directory.
    pub fn work(&self) -> &Path {
        &self.work
    }

    /// What this walk is of: model, corpus, recipe and build, by field.
    pub fn identity(&self) -> &BTreeMap<String, String> {
        self.journal.identity()
    }

    /// The finished experts of all MoE layers over the carrier.
    ///
    /// # Errors
    /// Names the shard that cannot be read.
    pub fn result(&self) -> Result<Installed> {
        let carrier: Arc<dyn WeightSource> = self.carrier.clone();
        let place = (&*self.work, self.recipe.codec);
        Installed::open(carrier, place, &self.geometry.moe_layers(), &self.geometry)
    }

    /// Where the finished layers lie.
    pub fn finished_folder(&self) -> PathBuf {
        self.work.join(finished_folder(self.recipe.codec))
    }

    /// Embeddings and the layers before the first MoE layer.
    fn prefix(&mut self, prompts: &[&SealedPrompt], observer: &dyn Observer) -> Result<()> {
        let started = Instant::now();
        if self.journal.sealed("embed").is_none() {
            proceed(observer)?;
            let identity = self.journal.identity_sha256();
            let carrier = self.carrier.as_ref();
            let state = embed(&self.work, &self.geometry, carrier, identity, prompts, observer)?;
            let inputs = [("corpus_plan", self.corpus_sha256.clone())];
            self.journal.seal("embed", inputs, state.files)?;
        }
        for layer in 0..self.geometry.first_moe_layer() {
            self.forward(layer, None, prompts, observer)?;
        }
        self.clock.count("prefix", started);
        Ok(())
    }

    /// The sealed state before a layer, hashed anew, and its SHA-256.
    fn state(&self, layer: usize, prompts: &[&SealedPrompt]) -> Result<(StateManifest, Hash)> {
        let sealed = self.journal.output(&stage_of(layer), &manifest_path(layer))?;
        Ok((audit(&self.work, layer, &sealed, prompts)?, sealed))
    }

    /// Forwards a layer, seals the state after it, and deletes the state before it once the seal is audited.
    fn forward(
        &mut self,
        layer: usize,
        installed_sha256: Option<Hash>,
        prompts: &[&SealedPrompt],
        observer: &dyn Observer,
    ) -> Result<()> {
        let stage = format!("layer-{layer:03}/forward");
        if self.journal.sealed(&stage).is_none() {
            proceed(observer)?;
            let (manifest, state_sha256) = self.state(layer, prompts)?;
            let loaded = Layer::load(&self.geometry, layer, self.carrier.as_ref(), &Device::Cpu)?;
            let replaced: &[usize] = if installed_sha256.is_some() { &[layer] } else { &[] };
            let carrier: Arc<dyn WeightSource> = self.carrier.clone();
            let experts =
                Installed::open(carrier, (&self.work, self.recipe.codec), replaced, &self.geometry)?;
            let input = ForwardInput {
                manifest: &manifest,
                state_sha256: &state_sha256,
                installed_sha256: installed_sha256.clone(),
                identity_sha256: self.journal.identity_sha256(),
            };
            let state = forward_layer(&self.work, &loaded, &experts, &input, prompts, observer)?;
            let mut inputs = vec![("state", state_sha256)];
            inputs.extend(installed_sha256.map(|sha256| ("installed", sha256)));
            self.journal.seal(&stage, inputs, state.files)?;
            self.journal.audit(&stage)?;
        }
        // A state that is half deleted already cannot be kept.
        let gone = is_half_deleted(&self.work, layer);
        if self.options.keep_states && !gone { Ok(()) } else { delete(&self.work, layer) }
    }

    /// All stages of one MoE layer.
    fn layer(
        &mut self,
        layer: usize,
        codec: &WeightCodec,
        prompts: &[&SealedPrompt],
        observer: &dyn Observer,
    ) -> Result<(Allocation, FinalLayer)> {
        let emit_stage = format!("layer-{layer:03}/emit");
        if self.journal.sealed(&format!("layer-{layer:03}/install-audit")).is_none() {
            self.quantize(layer, codec, prompts, observer)?;
        } else {
            observer
                .note(&format!("layer {layer}: quantized and sealed before, taken from the work directory"));
        }
        let allocation = self.last_allocation(layer)?;
        let summary = read_json(self.work.join(summary_path(layer)))?;
        if layer + 1 < self.geometry.num_hidden_layers {
            let started = Instant::now();
            let installed =
                self.journal.output(&emit_stage, &finished_path(self.recipe.codec, layer, "json"))?;
            self.forward(layer, Some(installed), prompts, observer)?;
            self.clock.count("forward", started);
        }
        Ok((allocation, summary))
    }

    /// The allocation a layer ended with: that of its last sealed iteration.
    fn last_allocation(&self, layer: usize) -> Result<Allocation> {
        let sealed = |&iteration: &u32| {
            self.journal.sealed(&format!("layer-{layer:03}/allocation-iter-{iteration:02}")).is_some()
        };
        let last = (0..self.recipe.fixed_point_iterations).take_while(sealed).last().unwrap_or(0);
        Allocation::read(&self.work, self.recipe.codec, layer, last)
    }

    /// Capture to install audit.
    fn quantize(
        &mut self,
        layer: usize,
        codec: &WeightCodec,
        prompts: &[&SealedPrompt],
        observer: &dyn Observer,
    ) -> Result<()> {
        let stage = |name: &str| format!("layer-{layer:03}/{name}");
        let started = Instant::now();
        let capture = self.capture(layer, prompts, observer)?;
        if self.journal.sealed(&stage("capture")).is_none() {
            let inputs = [("state", capture.record.state_sha256.clone())];
            self.journal.seal(&stage("capture"), inputs, capture.files())?;
        }
        self.clock.count("capture", started);

        // The journal is borrowed mutably between stages; what they read is shared.
        let (geometry, recipe, source) = (self.geometry.clone(), self.recipe.clone(), self.source.clone());
        let (recipe_sha256, inventory_sha256) = (self.recipe_sha256.clone(), self.inventory_sha256.clone());
        let (inventory, work_path) = (self.inventory.clone(), self.work.clone());
        let mut work = LayerWork::new(
            &work_path,
            layer,
            &geometry,
            (&recipe, &recipe_sha256),
            &source,
            (&inventory, &inventory_sha256),
            codec,
            &capture,
        );
        let encoded = encode_captured(&mut self.journal, &mut self.clock, &mut work, observer)?;

        let started = Instant::now();
        audit_interaction(&mut self.journal, &work, &encoded)?;
        self.clock.count("audit", started);

        let started = Instant::now();
        if self.journal.sealed(&stage("emit")).is_none() {
            proceed(observer)?;
            let allocation = (&encoded.allocation, &encoded.allocation_sha256);
            let emitted = emit_layer(&work, &encoded.summary, allocation, &self.environment, observer)?;
            self.journal.seal(&stage("emit"), [("final_experts", encoded.summary_sha256)], emitted)?;
        }
        self.clock.count("emit", started);

        let started = Instant::now();
        let installed =
            Installed::open(self.carrier.clone(), (&work_path, recipe.codec), &[layer], &geometry)?;
        audit_install(&mut self.journal, &work, &installed, observer)?;
        self.clock.count("audit", started);
        Ok(())
    }

    /// Captures a layer from the sealed state before it.
    fn capture(
        &self,
        layer: usize,
        prompts: &[&SealedPrompt],
        observer: &dyn Observer,
    ) -> Result<LayerCapture> {
        proceed(observer)?;
        let (manifest, state_sha256) = self.state(layer, prompts)?;
        create_dir_durably(self.work.join(layer_folder(layer)))?;
        let loaded = Layer::load(&self.geometry, layer, self.carrier.as_ref(), &Device::Cpu)?;
        let state = (&manifest, &state_sha256);
        let sealed = self.journal.sealed(&format!("layer-{layer:03}/capture")).is_some();
        capture_layer(&self.work, &self.geometry, &loaded, state, prompts, BATCH_TOKENS, sealed, observer)
    }

    /// Publishes `WALK_COMPLETE.json` over all layers' manifests.
    fn complete(&mut self) -> Result<()> {
        if self.journal.sealed("complete").is_some() {
            return Ok(());
        }
        let mut layers = BTreeMap::new();
        for layer in self.geometry.moe_layers() {
            let path = finished_path(self.recipe.codec, layer, "json");
            let manifest = self.journal.output(&format!("layer-{layer:03}/emit"), &path)?;
            layers.insert(layer.to_string(), manifest);
        }
        let mut record = serde_json::json!({
            "schema": "walk-complete-v2",
            "recipe_sha256": self.recipe_sha256,
            "corpus_plan_sha256": self.corpus_sha256,
            "source_inventory_sha256": self.inventory_sha256,
            "journal_head_sha256": self.journal.head_sha256(),
        });
        let manifests = format!("{}_manifest_sha256", finished_folder(self.recipe.codec));
        record[manifests] = serde_json::json!(layers);
        let sha256 = write_json_atomic(self.work.join(COMPLETE_FILE), &record)?;
        self.journal.seal(
            "complete",
            [("recipe", self.recipe_sha256.clone())],
            [(PathBuf::from(COMPLETE_FILE), sha256)],
        )
    }
}

/// What the report tells of an allocation.
fn rates_of(allocation: &Allocation) -> LayerRates {
    match allocation {
        Allocation::Bits(record) => {
            LayerRates::Bits(record.histogram.iter().map(|(&bits, &n)| (bits, n as usize)).collect())
        }
        Allocation::Rungs(record) => LayerRates::Settings {
            counts: record.counts().into_iter().collect(),
            bits: record.bits,
            weights: record.weights,
        },
    }
}
