//! One layer at work, without the driver: the state before the first MoE layer of a model, captured and planned by library
//! calls, so that a test can change what lies between two stages.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Device;
use walk::calibrate::mass::{Mass, units};
use walk::checkpoint::CheckpointDir;
use walk::checkpoint::inventory::Inventory;
use walk::codec::trellis::search::best_search;
use walk::codec::weight::WeightCodec;
use walk::config::{Geometry, Recipe};
use walk::corpus::batch::BATCH_TOKENS;
use walk::corpus::{CorpusPlan, Plan, SealContext, SealedPrompt, TextEncoder, seal};
use walk::linalg::Matrix;
use walk::model::Layer;
use walk::store::canonical_json::canonical_hash;
use walk::store::hash::Hash;
use walk::walk::capture::{CaptureRecord, LayerCapture, capture_layer, layer_folder};
use walk::walk::driver::codec_of;
use walk::walk::forward::{ForwardInput, embed, forward_layer};
use walk::walk::layer::{LayerWork, matrix_sha256};
use walk::walk::numeric::NumericEnvironment;
use walk::walk::progress::Silent;
use walk::walk::state::StateManifest;

/// A model before its first MoE layer.
pub struct Stage {
    folder: tempfile::TempDir,
    pub geometry: Geometry,
    pub recipe: Recipe,
    pub recipe_sha256: Hash,
    pub source: Arc<CheckpointDir>,
    pub inventory: Inventory,
    pub inventory_sha256: Hash,
    pub corpus: CorpusPlan,
    pub layer: usize,
    manifest: StateManifest,
    state_sha256: Hash,
    codec: WeightCodec,
}

impl Stage {
    /// Runs a model directory up to its first MoE layer. The recipe is the model's `fast` one with few scale samples,
    /// then changed.
    pub fn new(model: &Path, plan: &Path, change: impl FnOnce(&mut Recipe)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let geometry = Geometry::read(&model.join("config.json")).unwrap();
        let mut recipe = Recipe::load(model.join("recipe.json")).unwrap().fast();
        recipe.scale_sample_tiles = 2;
        change(&mut recipe);
        let source = Arc::new(CheckpointDir::open(model).unwrap());
        let inventory = Inventory::take(&source, &|_| Ok(())).unwrap();
        let encoder = TextEncoder::from_file(model.join("tokenizer.json")).unwrap();
        let context = SealContext {
            encoder: &encoder,
            vocab_size: geometry.vocab_size,
            max_position_embeddings: geometry.max_position_embeddings,
            default_prefix: Some(&["<|endoftext|>".to_owned()]),
        };
        let corpus = seal(&Plan::load(plan).unwrap(), &context).unwrap();
        let prompts: Vec<&SealedPrompt> = corpus.calibrate().collect();
        let work = folder.path();
        let identity = "a stage".to_owned();
        let mut state = embed(work, &geometry, source.as_ref(), &identity, &prompts, &Silent).unwrap();
        let layer = geometry.first_moe_layer();
        for index in 0..layer {
            let loaded = Layer::load(&geometry, index, source.as_ref(), &Device::Cpu).unwrap();
            let input = ForwardInput {
                manifest: &state.manifest,
                state_sha256: &state.sha256,
                installed_sha256: None,
                identity_sha256: &identity,
            };
            state = forward_layer(work, &loaded, source.as_ref(), &input, &prompts, &Silent).unwrap();
        }
        std::fs::create_dir(work.join(layer_folder(layer))).unwrap();
        Self {
            recipe_sha256: recipe.identity_hash().unwrap(),
            inventory_sha256: inventory.sha256().unwrap(),
            codec: codec_of(&recipe, best_search()).unwrap(),
            folder,
            geometry,
            recipe,
            source,
            inventory,
            corpus,
            layer,
            manifest: state.manifest,
            state_sha256: state.sha256,
        }
    }

    /// What this process computes with.
    pub fn environment(&self) -> NumericEnvironment {
        NumericEnvironment::measure(best_search(), self.recipe.codec).unwrap()
    }

    /// The work directory.
    pub fn path(&self) -> PathBuf {
        self.folder.path().to_path_buf()
    }

    /// Its calibration prompts in plan order.
    pub fn prompts(&self) -> Vec<&SealedPrompt> {
        self.corpus.calibrate().collect()
    }

    /// The capture of the walk.
    pub fn capture(&self) -> LayerCapture {
        self.capture_of(&self.prompts(), BATCH_TOKENS)
    }

    /// A capture with prompts in this order, so many tokens at a time.
    pub fn capture_of(&self, prompts: &[&SealedPrompt], batch_tokens: usize) -> LayerCapture {
        let loaded = Layer::load(&self.geometry, self.layer, self.source.as_ref(), &Device::Cpu).unwrap();
        let state = (&self.manifest, &self.state_sha256);
        capture_layer(
            self.folder.path(),
            &self.geometry,
            &loaded,
            state,
            prompts,
            batch_tokens,
            false,
            &Silent,
        )
        .unwrap()
    }

    /// A capture of made-up rows, one expert a row (`num_experts_per_tok` is 1): what routing would have to be to give it.
    pub fn made_up(&self, mlp_in: Matrix<f32>, ids: Vec<i32>) -> LayerCapture {
        let experts = self.geometry.n_routed_experts;
        let mut mass = Mass::new(experts);
        for &id in &ids {
            mass.rows[id as usize] += 1;
            mass.units[id as usize] += units(1.5).unwrap();
        }
        let record = CaptureRecord {
            layer: self.layer,
            state_sha256: self.state_sha256.clone(),
            mass_units: mass.decimal(),
            routed_rows: mass.rows.clone(),
            prompts: Default::default(),
        };
        // Scores that rank rows by their place.
        let scores = (0..ids.len() * experts).map(|place| 1.0 / (1.0 + place as f32)).collect();
        // Units of work are adopted by this name: other rows are another capture.
        let sha256 = canonical_hash(&(matrix_sha256(&mlp_in), &ids)).unwrap();
        LayerCapture { mlp_in, ids, scores, k: 1, mass, record, sha256 }
    }

    /// The layer at work over a capture.
    pub fn work<'a>(&'a self, work: &'a Path, capture: &'a LayerCapture) -> LayerWork<'a> {
        self.work_with(work, capture, (&self.recipe, &self.recipe_sha256))
    }

    /// The same under another recipe.
    pub fn work_with<'a>(
        &'a self,
        work: &'a Path,
        capture: &'a LayerCapture,
        recipe: (&'a Recipe, &'a Hash),
    ) -> LayerWork<'a> {
        let inventory = (&self.inventory, &self.inventory_sha256);
        LayerWork::new(
            work,
            self.layer,
            &self.geometry,
            recipe,
            &self.source,
            inventory,
            &self.codec,
            capture,
        )
    }
}
