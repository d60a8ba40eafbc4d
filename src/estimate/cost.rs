//! What each stage of a walk computes: amounts of work an expert, a layer, the whole walk.
//!
//! The amounts follow the code of the stages: which products, factors, encodes and files each of them consists of, times
//! how often it is called. Rows are taken as spread evenly over the experts. Not counted: JSON, reading (taken to be cached or
//! overlapped), and threads that wait for the last experts of a stage. Work that one thread does while the others wait is kept apart.

use super::counts::{LayerCounts, SCALES_TRIED, TENSORS, shared_families};
use super::size::{attention_weights, even_bits, indexer_weights, shard_bytes, state_bytes};
use super::tokens::Tokens;
use super::work::{Op, Work};
use crate::choose::search::middle_bits;
use crate::codec::trellis::hadamard::BLOCK;
use crate::codec::trellis::search::TILE_LEN;
use crate::config::choices::{DownCovariance, DownTarget, Rounding};
use crate::config::{Geometry, Recipe};
use crate::corpus::batch::BATCH_TOKENS;
use crate::error::Result;

/// Dampings that are cross-validated, on two halves of the rows each.
const DAMPINGS: f64 = 3.0;
/// Tokens of the install audit, at least.
const AUDIT_TOKENS: f64 = 64.0;
/// Times the install audit meets every expert, at least.
const AUDIT_HITS: f64 = 2.0;

/// Rows of an expert, on average.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rows {
    /// Routed to it, on the fit side.
    pub fit: f64,
    /// Of others, that top them up.
    pub fallback: f64,
    /// That its losses are measured on.
    pub holdout: f64,
}

impl Rows {
    /// The rows of an average expert.
    pub fn of(geometry: &Geometry, recipe: &Recipe, tokens: &Tokens) -> Self {
        let all = tokens.calibrate as f64;
        let routed = all * geometry.num_experts_per_tok as f64 / geometry.n_routed_experts as f64;
        let held_out = 1.0 / recipe.fit_modulus as f64;
        let fit = routed * (1.0 - held_out);
        let others = all * (1.0 - held_out) - fit;
        Self {
            fit,
            fallback: (recipe.min_fit_rows as f64 - fit).clamp(0.0, others.max(0.0)),
            holdout: (routed * held_out).clamp(1.0, recipe.holdout_rows as f64),
        }
    }

    /// Rows that enter covariances.
    pub fn calibrating(&self) -> f64 {
        self.fit + self.fallback
    }
}

/// One stage: what all threads share, and what one does while the others wait.
#[derive(Debug, Clone, PartialEq)]
pub struct StageWork {
    /// The stage's name, as the walk's report has it.
    pub stage: &'static str,
    /// What it consists of, in words.
    pub model: &'static str,
    /// How often it happens.
    pub times: u64,
    /// Shared by all threads, each time.
    pub shared: Work,
    /// On one thread, each time.
    pub alone: Work,
}

/// Which end of the planning range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Fewest bundles, half of the experts changed.
    Least,
    /// Most bundles, all experts changed.
    Most,
}

/// What a walk's stages are made of.
pub struct Model<'a> {
    geometry: &'a Geometry,
    recipe: &'a Recipe,
    tokens: &'a Tokens,
    threads: usize,
    counts: LayerCounts,
    rows: Rows,
    bits: Vec<[u32; 3]>,
    checkpoint_bytes: [u64; 2],
}

impl<'a> Model<'a> {
    /// A model of a walk on so many threads; `checkpoint_bytes` are those of source and carrier (0 where they are one).
    ///
    /// # Errors
    /// As [`Recipe::upgrades`].
    pub fn new(
        geometry: &'a Geometry,
        recipe: &'a Recipe,
        tokens: &'a Tokens,
        threads: usize,
        checkpoint_bytes: [u64; 2],
    ) -> Result<Self> {
        Ok(Self {
            geometry,
            recipe,
            tokens,
            threads,
            counts: LayerCounts::of(geometry, recipe),
            rows: Rows::of(geometry, recipe, tokens),
            bits: even_bits(geometry, recipe)?,
            checkpoint_bytes,
        })
    }

    /// All stages, in the walk's order.
    pub fn stages(&self, end: End) -> Vec<StageWork> {
        let layers = self.geometry.moe_layers().len() as u64;
        let mut stages = vec![self.open(), self.prefix()];
        stages.push(self.capture(layers));
        if self.recipe.search {
            stages.push(self.search(layers, end));
        }
        if self.recipe.fixed_bits.is_none() {
            stages.push(self.probe(layers, end));
            stages.push(self.allocation(layers));
        }
        stages.push(self.finals(layers));
        stages.push(self.emit(layers));
        stages.push(self.audit(layers));
        stages.push(self.forward(layers.saturating_sub(1)));
        if self.tokens.evaluate > 0 {
            stages.push(self.evaluate());
        }
        stages
    }

    fn h(&self) -> f64 {
        self.geometry.hidden_size as f64
    }

    fn i(&self) -> f64 {
        self.geometry.moe_intermediate_size as f64
    }

    /// Weights of a tensor.
    fn w(&self) -> f64 {
        self.h() * self.i()
    }

    fn experts(&self) -> f64 {
        self.counts.experts as f64
    }

    fn sample(&self) -> f64 {
        self.counts.sample as f64
    }

    // Parts of a stage on one expert.

    /// One LDLQ encode of a tensor of `k` inputs, its factor left out.
    fn encode(&self, work: &mut Work, bits: u32, k: f64) {
        let (w, sweeps) = (self.w(), f64::from(self.recipe.refinement_sweeps));
        work.add(Op::Rotate, 2.0 * w);
        work.add(Op::Search(bits), w * (1.0 + sweeps));
        if self.recipe.rounding == Rounding::Ldlq {
            work.add(Op::Hash, 4.0 * k * k);
            let gradients = if sweeps > 0.0 { 2.0 + 2.0 * sweeps } else { 0.0 };
            work.add(Op::ProductF32, (1.0 + gradients) * k * w);
        }
        work.add(Op::Pack, w);
    }

    fn factor(&self, work: &mut Work, times: f64, k: usize) {
        if self.recipe.rounding == Rounding::Ldlq {
            work.add(Op::Factor(k), times);
        }
    }

    /// Gate and up at these widths, behind one another: they share a factor, which other experts' may push out of the
    /// encoder's memory in between.
    fn encode_across(&self, work: &mut Work, widths: &[u32]) {
        for &bits in widths.iter().chain(widths) {
            self.encode(work, bits, self.h());
        }
        let made = if widths.len() == 1 { 1 } else { self.threads.min(widths.len()) };
        self.factor(work, made as f64, self.geometry.hidden_size);
    }

    fn encode_down(&self, work: &mut Work, bits: u32) {
        self.encode(work, bits, self.i());
        self.factor(work, 1.0, self.geometry.moe_intermediate_size);
    }

    fn scale_search(&self, work: &mut Work, bits: u32) {
        let tiles = (self.recipe.scale_sample_tiles * TILE_LEN) as f64;
        work.add(Op::Rotate, self.w());
        work.add(Op::Search(bits), SCALES_TRIED as f64 * tiles.min(self.w()));
    }

    fn sketches(&self, work: &mut Work, times: f64) {
        let tiles = (self.recipe.sketch_tiles * TILE_LEN) as f64;
        work.add(Op::Scan, times * self.w());
        work.add(Op::Search(middle_bits(self.recipe)), times * tiles.min(self.w()));
        work.add(Op::Rotate, times * (self.recipe.sketch_tiles * BLOCK * BLOCK) as f64);
    }

    fn traces(&self, work: &mut Work, of_inputs: f64, of_down: f64) {
        work.add(Op::Trace(self.geometry.hidden_size), of_inputs);
        work.add(Op::Trace(self.geometry.moe_intermediate_size), of_down);
    }

    fn decode(&self, work: &mut Work, tensors: f64) {
        work.add(Op::Decode, tensors * self.w());
    }

    fn input_covariance(&self, work: &mut Work) {
        work.add(Op::Syrk, self.rows.calibrating() * self.h().powi(2));
    }

    /// `silu(x gate) * (x up)` of so many rows.
    fn intermediate(&self, work: &mut Work, rows: f64) {
        work.add(Op::ProductF32, 4.0 * rows * self.w());
        work.add(Op::Activation, rows * self.i());
    }

    /// Outputs of so many rows.
    fn output(&self, work: &mut Work, rows: f64) {
        self.intermediate(work, rows);
        work.add(Op::ProductF32, 2.0 * rows * self.w());
    }

    fn corrects(&self) -> bool {
        self.recipe.down_target == DownTarget::Corrected
    }

    /// Down's covariance and target behind a gate and up.
    fn down_input(&self, work: &mut Work, corrected: bool) {
        let (rows, i) = (self.rows.calibrating(), self.i());
        self.intermediate(work, rows);
        work.add(Op::Syrk, rows * i * i);
        if corrected {
            self.intermediate(work, rows);
            work.add(Op::Solve(self.geometry.moe_intermediate_size), 1.0);
            work.add(Op::ProductF64, 2.0 * rows * i * i + 2.0 * i * self.w());
        }
        if self.recipe.down_covariance == DownCovariance::Source {
            self.intermediate(work, rows);
            work.add(Op::Syrk, rows * i * i);
        }
    }

    /// Cross-validation of the damping of down's correction.
    fn choose_damping(&self, work: &mut Work) {
        if !self.corrects() {
            return;
        }
        let (rows, i) = (self.rows.calibrating(), self.i());
        self.intermediate(work, 2.0 * rows);
        work.add(Op::ProductF64, 6.0 * rows * i * i + 2.0 * i * self.w());
        work.add(Op::Solve(self.geometry.moe_intermediate_size), 2.0 * DAMPINGS);
        work.add(Op::ProductF64, 2.0 * DAMPINGS * 6.0 * i.powi(3));
    }

    /// The source's output and the loss of so many reconstructions.
    fn losses(&self, work: &mut Work, reconstructions: f64) {
        self.output(work, (1.0 + reconstructions) * self.rows.holdout);
    }

    fn load(&self, work: &mut Work) {
        work.add(Op::Load, 3.0 * self.w());
    }

    /// A full round trip at the middle width, its prediction, and its record.
    fn round_trip(&self, settled: bool) -> Work {
        let mut work = Work::default();
        let bits = middle_bits(self.recipe);
        self.load(&mut work);
        self.input_covariance(&mut work);
        if !settled {
            (0..TENSORS).for_each(|_| self.scale_search(&mut work, bits));
            self.choose_damping(&mut work);
        }
        self.encode_across(&mut work, &[bits]);
        self.down_input(&mut work, self.corrects());
        self.encode_down(&mut work, bits);
        self.decode(&mut work, 3.0);
        self.losses(&mut work, 1.0);
        self.channel_costs(&mut work);
        self.sketches(&mut work, 3.0);
        self.traces(&mut work, 2.0, 1.0);
        work.add(Op::Publish, 1.0);
        work
    }

    fn channel_costs(&self, work: &mut Work) {
        self.intermediate(work, if self.rows.fit >= 1.0 { self.rows.fit } else { self.rows.fallback });
    }

    /// What a study of an expert behind its baseline starts with.
    fn study(&self) -> Work {
        let mut work = Work::default();
        self.load(&mut work);
        self.decode(&mut work, 2.0);
        self.input_covariance(&mut work);
        self.down_input(&mut work, false);
        self.channel_costs(&mut work);
        work.add(Op::Publish, 1.0);
        work
    }

    // Stages.

    fn open(&self) -> StageWork {
        let mut shared = Work::default();
        let bytes = (self.checkpoint_bytes[0] + self.checkpoint_bytes[1]) as f64;
        shared.add(Op::Hash, bytes);
        StageWork {
            stage: "open",
            model: "bytes of the source, and of a carrier of its own (taken as its tensors in BF16), through SHA-256",
            times: 1,
            shared,
            alone: Work::default(),
        }
    }

    /// Attention, norms and router of all prompts of a set, the layers' weights loaded.
    fn attend(
        &self,
        layers: f64,
        full: f64,
        (tokens, squares): (f64, f64),
        work: &mut Work,
        alone: &mut Work,
    ) {
        let geometry = self.geometry;
        let a_row = layers * attention_weights(geometry) as f64 + full * indexer_weights(geometry) as f64;
        work.add(Op::ProductF32, 2.0 * tokens * a_row);
        // Scores and values of every query over the keys up to its block's end: half of the square.
        let heads = geometry.num_attention_heads as f64;
        let width = (geometry.qk_head_dim() + geometry.v_head_dim) as f64;
        let keys = geometry.index_n_heads as f64 * geometry.index_head_dim as f64;
        work.add(Op::ProductF32, squares * (layers * heads * width + full * keys));
        work.add(
            Op::Activation,
            layers * heads * tokens * self.tokens.mean_length().min(geometry.index_topk as f64),
        );
        alone.add(Op::Load, a_row);
    }

    fn calibration(&self) -> (f64, f64) {
        (self.tokens.calibrate as f64, self.tokens.squares)
    }

    /// A state through an audit: read and hashed.
    fn audit_state(&self, work: &mut Work, times: f64) {
        work.add(Op::Hash, times * state_bytes(self.geometry, self.tokens) as f64);
    }

    fn write_state(&self, alone: &mut Work) {
        let bytes = state_bytes(self.geometry, self.tokens) as f64;
        // File and payload are hashed as they are written, one prompt after the other.
        alone.add(Op::Hash, 2.0 * bytes);
        alone.add(Op::Write, bytes);
        alone.add(Op::Publish, self.tokens.prompts as f64 + 1.0);
    }

    fn prefix(&self) -> StageWork {
        let (mut shared, mut alone) = (Work::default(), Work::default());
        let dense = self.geometry.first_moe_layer();
        let full = (0..dense).filter(|&layer| self.geometry.indexer_is_full(layer)).count();
        alone.add(Op::Load, self.geometry.vocab_size as f64 * self.h());
        self.write_state(&mut alone);
        self.attend(dense as f64, full as f64, self.calibration(), &mut shared, &mut alone);
        let feed = dense as f64 * 3.0 * self.h() * self.geometry.intermediate_size as f64;
        shared.add(Op::ProductF32, 2.0 * self.tokens.calibrate as f64 * feed);
        alone.add(Op::Load, feed);
        for _ in 0..dense {
            self.audit_state(&mut shared, 2.0);
            self.audit_state(&mut alone, 1.0);
            self.write_state(&mut alone);
        }
        StageWork {
            stage: "prefix",
            model: "embeddings; dense layers: weights loaded, attention and MLP products of all tokens, states written",
            times: 1,
            shared,
            alone,
        }
    }

    /// Shares of full and other indexers over the MoE layers.
    fn full_share(&self) -> f64 {
        let layers = self.geometry.moe_layers();
        let full = layers.iter().filter(|&&layer| self.geometry.indexer_is_full(layer)).count();
        full as f64 / layers.len().max(1) as f64
    }

    fn capture(&self, times: u64) -> StageWork {
        let (mut shared, mut alone) = (Work::default(), Work::default());
        let tokens = self.tokens.calibrate as f64;
        self.audit_state(&mut shared, 1.0);
        self.audit_state(&mut alone, 1.0);
        self.attend(1.0, self.full_share(), self.calibration(), &mut shared, &mut alone);
        shared.add(Op::ProductF32, 2.0 * tokens * self.h() * self.experts());
        alone.add(Op::Hash, 4.0 * tokens * self.h());
        let routing = 8.0 * tokens * self.geometry.num_experts_per_tok as f64;
        alone.add(Op::Write, routing);
        alone.add(Op::Publish, self.tokens.prompts as f64 + 1.0);
        let model =
            "state audited; attention and router products of all tokens; rows hashed, routing written";
        StageWork { stage: "capture", model, times, shared, alone }
    }

    fn search(&self, times: u64, end: End) -> StageWork {
        let mut shared = Work::default();
        let (draws, families) = (f64::from(self.recipe.draws), self.recipe.scale_families.len() as f64);
        let of_weights = shared_families(self.recipe) as f64;
        let shard = shard_bytes(
            self.geometry.num_hidden_layers,
            (self.geometry.hidden_size, self.geometry.moe_intermediate_size),
            [(0, [middle_bits(self.recipe); 3])],
        ) as f64;

        let mut baseline = self.round_trip(false);
        // Written, hashed with its payloads, hashed again when it is taken up.
        baseline.add(Op::Hash, 3.0 * shard);
        baseline.add(Op::Write, shard);
        baseline.add(Op::Publish, 1.0);
        shared.add_times(self.experts(), &baseline);

        for candidates in [draws, of_weights] {
            let mut scores = self.study();
            self.sketches(&mut scores, 3.0 * candidates);
            self.traces(&mut scores, candidates, 1.0);
            shared.add_times(self.sample(), &scores);
        }
        let encodes = match end {
            End::Least => self.counts.search.least,
            End::Most => self.counts.search.most,
        };
        let settled = encodes as f64 / TENSORS as f64 - self.experts();
        shared.add_times(settled, &self.round_trip(true));

        let mut own = self.study();
        self.sketches(&mut own, 2.0 * (draws + families) + of_weights);
        self.traces(&mut own, 0.0, self.recipe.permutations.len() as f64 + draws + of_weights);
        shared.add_times(self.experts(), &own);
        StageWork {
            stage: "search",
            model: "full round trips (covariances, factors, three encodes, losses), sketches of candidates on sampled tiles, \
                    traces of D",
            times,
            shared,
            alone: Work::default(),
        }
    }

    /// One expert's probe; the first round searches scales, and settles the damping where no search has.
    fn probe_of_an_expert(&self, first: bool) -> Work {
        let mut work = Work::default();
        let widths = &self.recipe.candidate_bits;
        let (context, others) = (middle_bits(self.recipe), (widths.len() - 1) as f64);
        self.load(&mut work);
        self.input_covariance(&mut work);
        self.encode_across(&mut work, widths);
        for &bits in widths {
            self.encode_down(&mut work, bits);
            if first {
                (0..TENSORS).for_each(|_| self.scale_search(&mut work, bits));
            }
        }
        if first && !self.recipe.search {
            self.choose_damping(&mut work);
        }
        let rebuilt = 2.0 * others;
        let mut again = Work::default();
        self.down_input(&mut again, self.corrects());
        work.add_times(1.0 + rebuilt, &again);
        let mut down = Work::default();
        self.encode_down(&mut down, context);
        work.add_times(rebuilt, &down);
        self.decode(&mut work, self.counts.probe_of_an_expert as f64);
        self.losses(&mut work, 3.0 * widths.len() as f64);
        work.add(Op::Publish, 1.0);
        work
    }

    fn probe(&self, times: u64, end: End) -> StageWork {
        let mut shared = Work::default();
        shared.add_times(self.experts(), &self.probe_of_an_expert(true));
        let changed = match end {
            End::Least => self.counts.changed.least,
            End::Most => self.counts.changed.most,
        };
        shared.add_times(changed as f64, &self.probe_of_an_expert(false));
        StageWork {
            stage: "probe",
            model: "every expert: all widths of gate, up and down, down again for each gate and up off context, a loss each; \
                    then C experts once more",
            times,
            shared,
            alone: Work::default(),
        }
    }

    fn allocation(&self, times: u64) -> StageWork {
        let mut alone = Work::default();
        alone.add(Op::Allocate, if self.counts.changed.most > 0 { 2.0 } else { 1.0 });
        alone.add(Op::Publish, 2.0);
        let model = "the exact integer program over the layer's tensors, once a round";
        StageWork { stage: "allocation", model, times, shared: Work::default(), alone }
    }

    fn finals(&self, times: u64) -> StageWork {
        let mut shared = Work::default();
        for (id, &bits) in self.bits.iter().enumerate() {
            let mut work = Work::default();
            self.load(&mut work);
            self.load(&mut work);
            self.input_covariance(&mut work);
            if self.recipe.fixed_bits.is_some() {
                bits.iter().for_each(|&bits| self.scale_search(&mut work, bits));
                if !self.recipe.search {
                    self.choose_damping(&mut work);
                }
            }
            self.encode(&mut work, bits[0], self.h());
            self.encode(&mut work, bits[1], self.h());
            self.factor(&mut work, 1.0, self.geometry.hidden_size);
            self.down_input(&mut work, self.corrects());
            self.encode_down(&mut work, bits[2]);
            // Once as encoded, once as reopened.
            self.decode(&mut work, 6.0);
            self.losses(&mut work, 1.0);
            // The permutation's oracle, two rows in f64.
            work.add(Op::Scan, 12.0 * self.w());
            let shard = shard_bytes(
                self.geometry.num_hidden_layers,
                (self.geometry.hidden_size, self.geometry.moe_intermediate_size),
                [(id, bits)],
            ) as f64;
            work.add(Op::Hash, 2.0 * shard + 4.0 * (self.h().powi(2) + self.i().powi(2) + self.w()));
            work.add(Op::Write, shard);
            work.add(Op::Publish, 2.0);
            shared.add_times(1.0, &work);
        }
        StageWork {
            stage: "final encode",
            model: "every expert: covariances, three encodes at their bits, loss, decoded as encoded and as reopened, sealed",
            times,
            shared,
            alone: Work::default(),
        }
    }

    fn shard_of_a_layer(&self) -> f64 {
        let sizes = (self.geometry.hidden_size, self.geometry.moe_intermediate_size);
        shard_bytes(self.geometry.num_hidden_layers, sizes, self.bits.iter().copied().enumerate()) as f64
    }

    fn emit(&self, times: u64) -> StageWork {
        let (mut shared, mut alone) = (Work::default(), Work::default());
        let shard = self.shard_of_a_layer();
        shared.add(Op::Hash, shard);
        // Whole, and once more in the slices of the finest split.
        self.decode(&mut shared, 6.0 * self.experts());
        alone.add(Op::Hash, 2.0 * shard);
        alone.add(Op::Write, shard);
        alone.add(Op::Publish, 3.0);
        let model = "the layer's shard hashed and written; every tensor decoded whole and in slices";
        StageWork { stage: "emit", model, times, shared, alone }
    }

    fn audit(&self, times: u64) -> StageWork {
        let (mut shared, mut alone) = (Work::default(), Work::default());
        let k = self.geometry.num_experts_per_tok as f64;
        let tokens = AUDIT_TOKENS.max((AUDIT_HITS * self.experts() / k).ceil());
        // Installed twice and decoded for the reference, one expert after the other.
        alone.add(Op::Install, 3.0 * 3.0 * self.experts() * self.w());
        shared.add(Op::ProductF32, 2.0 * 6.0 * tokens * k * self.w());
        shared.add(Op::Scan, 3.0 * tokens * k * self.w());
        alone.add(Op::Publish, 2.0);
        let model = "installed experts on seeded routes, twice, and an f64 reference: every expert decoded three times";
        StageWork { stage: "audit", model, times, shared, alone }
    }

    /// Routed and shared experts on all tokens of a set; every expert's weights are made ready once a batch by `ready`.
    fn experts_of_a_layer(&self, tokens: f64, ready: Op, shared: &mut Work, alone: &mut Work) {
        let k = self.geometry.num_experts_per_tok as f64;
        let together = 3.0 * self.h() * self.geometry.shared_intermediate_size() as f64;
        shared.add(Op::ProductF32, 2.0 * tokens * (together + 3.0 * k * self.w()));
        shared.add(Op::Activation, tokens * (k + 1.0) * self.i());
        let batches = (tokens / BATCH_TOKENS as f64).ceil().max(1.0);
        let met = self.experts().min(k * tokens / batches);
        alone.add(ready, batches * met * 3.0 * self.w());
        alone.add(Op::Load, together);
    }

    fn forward(&self, times: u64) -> StageWork {
        let (mut shared, mut alone) = (Work::default(), Work::default());
        let tokens = self.tokens.calibrate as f64;
        self.audit_state(&mut shared, 2.0);
        self.audit_state(&mut alone, 1.0);
        self.attend(1.0, self.full_share(), self.calibration(), &mut shared, &mut alone);
        self.experts_of_a_layer(tokens, Op::Install, &mut shared, &mut alone);
        self.write_state(&mut alone);
        StageWork {
            stage: "forward",
            model: "attention and expert products of all tokens, every expert decoded on one thread once a batch of 8192 tokens; \
                    states audited and written",
            times,
            shared,
            alone,
        }
    }

    fn evaluate(&self) -> StageWork {
        let (mut shared, mut alone) = (Work::default(), Work::default());
        let geometry = self.geometry;
        let tokens = self.tokens.evaluate as f64;
        let layers = geometry.num_hidden_layers;
        let full = (0..layers).filter(|&layer| geometry.indexer_is_full(layer)).count();
        let moe = geometry.moe_layers().len() as f64;
        let dense = (layers as f64 - moe) * 3.0 * self.h() * geometry.intermediate_size as f64;
        let head = geometry.vocab_size as f64 * self.h();
        for ready in [Op::Load, Op::Install] {
            let set = (tokens, self.tokens.evaluate_squares);
            self.attend(layers as f64, full as f64, set, &mut shared, &mut alone);
            shared.add(Op::ProductF32, 2.0 * tokens * (dense + head));
            // Embeddings and head.
            alone.add(Op::Load, dense + 2.0 * head);
            let (mut layer, mut layer_alone) = (Work::default(), Work::default());
            self.experts_of_a_layer(tokens, ready, &mut layer, &mut layer_alone);
            shared.add_times(moe, &layer);
            alone.add_times(moe, &layer_alone);
        }
        // Two in f64 for every logit.
        shared.add(Op::Activation, 4.0 * tokens * geometry.vocab_size as f64);
        StageWork {
            stage: "evaluate",
            model: "source and result: all layers on the evaluation prompts, and the head's logits compared",
            times: 1,
            shared,
            alone,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn amounts(model: &str, choice: &str, tokens: u64) -> Vec<StageWork> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("models").join(model);
        let geometry = Geometry::read(&folder.join("config.json")).unwrap();
        let recipe = Recipe::choose(choice, Some(&folder.join("recipe.json"))).unwrap();
        let tokens = Tokens::assumed(tokens, &[1024]);
        Model::new(&geometry, &recipe, &tokens, 1, [0, 0]).unwrap().stages(End::Most)
    }

    fn searched(stages: &[StageWork], stage: &str) -> f64 {
        let found = stages.iter().find(|found| found.stage == stage).unwrap();
        let widths = found.shared.amounts().filter(|(op, _)| matches!(op, Op::Search(_)));
        widths.map(|(_, amount)| amount).sum()
    }

    #[test]
    fn searched_weights_are_those_of_the_counted_encodes() {
        let stages = amounts("glm52", "default", 1_000_000);
        let w = 6144.0 * 2048.0;
        assert_eq!(searched(&stages, "final encode"), 768.0 * w);
        // Sketches and scale searches come on top; all of them, over search and probe, are the counted equivalents.
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/glm52");
        let geometry = Geometry::read(&folder.join("config.json")).unwrap();
        let counts = LayerCounts::of(&geometry, &Recipe::built_in().unwrap());
        let on_top = searched(&stages, "search") + searched(&stages, "probe") - (1008.0 + 2.0 * 3328.0) * w;
        assert!((on_top / w - counts.test_encode_equivalents[1]).abs() < 1e-6, "{}", on_top / w);
    }

    #[test]
    fn stages_follow_the_recipe() {
        let names = |choice: &str| -> Vec<&str> {
            amounts("tiny", choice, 30_000).iter().map(|stage| stage.stage).collect()
        };
        assert_eq!(
            names("default"),
            [
                "open",
                "prefix",
                "capture",
                "search",
                "probe",
                "allocation",
                "final encode",
                "emit",
                "audit",
                "forward"
            ]
        );
        assert!(!names("fast").contains(&"search"));
        assert!(!names("uniform-3").contains(&"probe"));
    }

    #[test]
    fn cold_experts_are_topped_up_and_holdout_is_capped() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/glm52");
        let geometry = Geometry::read(&folder.join("config.json")).unwrap();
        let recipe = Recipe::built_in().unwrap();
        let rows = |tokens: u64| Rows::of(&geometry, &recipe, &Tokens::assumed(tokens, &[1024]));
        let few = rows(3200);
        assert_eq!((few.fit, few.fallback, few.holdout), (80.0, 944.0, 20.0));
        let many = rows(1_024_000);
        assert_eq!((many.fit, many.fallback, many.holdout), (25_600.0, 0.0, 4096.0));
    }
}
