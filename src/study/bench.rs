//! The ground of a study: a base walk, the layer it leads to, and what variants of it share.
//!
//! Under the study's work directory lie `base-walk/` (an ordinary walk by the base recipe, as far as it is needed, its
//! states kept), and `layer-NNN/NAME/` for each recipe a layer was processed under, with a journal of its own: a study
//! that was stopped goes on where it was.

use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::codec::trellis::search::TileSearch;
use crate::config::choices::CodecName;
use crate::config::{Recipe, ResolvedModel};
use crate::error::{Result, refuse};
use crate::eval::StateType;
use crate::store::atomic::{create_dir_durably, sweep_temporaries};
use crate::store::hash::Hash;
use crate::store::lock::WorkLock;
use crate::walk::capture::{LayerCapture, layer_folder};
use crate::walk::choosing::{EncodedLayer, encode_captured};
use crate::walk::driver::{Walk, codec_of};
use crate::walk::journal::Journal;
use crate::walk::layer::{LayerChoices, LayerWork};
use crate::walk::open::WalkOptions;
use crate::walk::progress::{Observer, Stopwatch};

use super::effect::Evaluator;

/// Folder of the base walk, within a study's work directory.
const BASE_WALK: &str = "base-walk";

/// What a study is made on.
#[derive(Debug, Clone)]
pub struct BenchOptions {
    /// The study's work directory.
    pub work: PathBuf,
    /// Layers to study.
    pub layers: Vec<usize>,
    /// Type of the state between layers in evaluations.
    pub state: StateType,
}

/// Refuses a base recipe of another codec: its ingredients are not there to be switched off.
///
/// # Errors
/// Names recipe and codec.
pub fn only_trellis(base: &Recipe) -> Result<()> {
    match base.codec {
        CodecName::Trellis => Ok(()),
        CodecName::Kaiju1 => refuse("studies are of the trellis codec's ingredients")
            .file(&base.origin)
            .field("codec")
            .wanted("\"trellis\"")
            .err(),
    }
}

/// What one recipe's processing of a layer took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spent {
    /// Wall-clock seconds, evaluation not counted.
    pub seconds: f64,
    /// Matrices encoded.
    pub encodes: u64,
    /// Whether an earlier run had begun it, whose share is in neither figure.
    pub resumed: bool,
}

/// An opened study.
pub struct Bench<'a> {
    /// The base walk.
    pub walk: Walk,
    /// Onlooker.
    pub observer: &'a dyn Observer,
    options: BenchOptions,
    search: &'static dyn TileSearch,
    /// `None` until it is needed; then `Some(None)` where the plan has nothing to score.
    evaluator: Option<Option<Evaluator>>,
    _lock: WorkLock,
}

impl<'a> Bench<'a> {
    /// Opens the base walk and checks the layers, which are put in ascending order.
    ///
    /// # Errors
    /// As [`Walk::open`]; a layer that has no routed experts, or none at all.
    pub fn open(
        model: &ResolvedModel,
        base: Recipe,
        plan: &Path,
        mut options: BenchOptions,
        search: &'static dyn TileSearch,
        observer: &'a dyn Observer,
    ) -> Result<Self> {
        only_trellis(&base)?;
        create_dir_durably(&options.work)?;
        let lock = WorkLock::acquire(&options.work)?;
        let kept = WalkOptions { keep_states: true, ..WalkOptions::default() };
        let walk = Walk::open(model, base, plan, &options.work.join(BASE_WALK), kept, observer)?;
        sweep_temporaries(&options.work)?;
        options.layers.sort_unstable();
        options.layers.dedup();
        let known = walk.geometry.moe_layers();
        if let Some(stranger) = options.layers.iter().find(|layer| !known.contains(layer)) {
            return refuse(format!("layer {stranger} has no routed experts"))
                .field("--layers")
                .wanted(format!("layers of {known:?}"))
                .err();
        }
        if options.layers.is_empty() {
            return refuse("no layer is named").field("--layers").wanted(format!("some of {known:?}")).err();
        }
        Ok(Self { walk, observer, options, search, evaluator: None, _lock: lock })
    }

    /// The layers, ascending.
    pub fn layers(&self) -> &[usize] {
        &self.options.layers
    }

    /// Type of the state between layers in evaluations.
    pub fn state(&self) -> StateType {
        self.options.state
    }

    /// Where a recipe of this name works on a layer.
    pub fn folder(&self, layer: usize, name: &str) -> PathBuf {
        self.options.work.join(layer_folder(layer)).join(name)
    }

    /// Walks to a layer and captures it: the rows every recipe shares.
    ///
    /// # Errors
    /// As [`Walk::capture_after_walk`].
    pub fn capture(&mut self, layer: usize) -> Result<LayerCapture> {
        let codec = self.walk.codec(self.search)?;
        self.walk.capture_after_walk(layer, &codec, self.observer)
    }

    /// The source's side of evaluations, run at the first call. `None` when the plan has nothing to score.
    ///
    /// # Errors
    /// As [`Evaluator::new`].
    pub fn evaluator(&mut self) -> Result<Option<&Evaluator>> {
        if self.evaluator.is_none() {
            let Walk { geometry, source, corpus, .. } = &self.walk;
            let (layers, state) = (&self.options.layers, self.options.state);
            let made = Evaluator::new(geometry, source, corpus, layers, state, self.observer)?;
            self.evaluator = Some(made);
        }
        Ok(self.evaluator.as_ref().and_then(Option::as_ref))
    }

    /// A captured layer at work under `recipe`, its vectors and orders as chosen before, for what writes nothing.
    ///
    /// # Errors
    /// What `then` refuses.
    pub fn with_work<T>(
        &self,
        capture: &LayerCapture,
        recipe: &Recipe,
        choices: &LayerChoices,
        then: impl FnOnce(&LayerWork<'_>) -> Result<T>,
    ) -> Result<T> {
        let recipe_sha256: Hash = recipe.identity_hash()?;
        let codec = codec_of(recipe, self.search)?;
        let recipe = (recipe, &recipe_sha256);
        let mut work = self.walk.layer_work(&self.options.work, recipe, &codec, capture);
        work.choose_as(choices);
        then(&work)
    }

    /// Takes a captured layer through all choosing and encoding stages under `recipe`, and hands the finished experts to
    /// `then`.
    ///
    /// # Errors
    /// Whatever a stage or `then` refuses; a folder that was begun under another recipe, by the name of what differs.
    pub fn encode<T>(
        &self,
        capture: &LayerCapture,
        name: &str,
        recipe: &Recipe,
        then: impl FnOnce(&LayerWork<'_>, &EncodedLayer, Spent) -> Result<T>,
    ) -> Result<T> {
        let layer = capture.record.layer;
        let folder = self.folder(layer, name);
        create_dir_durably(folder.join(layer_folder(layer)))?;
        let recipe_sha256: Hash = recipe.identity_hash()?;
        let mut identity = self.walk.identity().clone();
        identity.insert("study_layer".to_owned(), layer.to_string());
        identity.insert("study_capture_sha256".to_owned(), capture.sha256.clone());
        identity.insert("study_recipe_sha256".to_owned(), recipe_sha256.clone());
        let mut journal = Journal::open(&folder, identity, &|_| Ok(()))?;
        let resumed = !journal.is_new();
        let codec = codec_of(recipe, self.search)?;
        let mut work = self.walk.layer_work(&folder, (recipe, &recipe_sha256), &codec, capture);
        let started = Instant::now();
        let mut clock = Stopwatch::default();
        let encoded = encode_captured(&mut journal, &mut clock, &mut work, self.observer)?;
        let spent = Spent { seconds: started.elapsed().as_secs_f64(), encodes: codec.encodes(), resumed };
        then(&work, &encoded, spent)
    }
}
