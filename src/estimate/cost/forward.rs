//! The stages that tokens go through: inventories, prefix, capture, forward, evaluation.

use super::super::size::{attention_weights, indexer_weights, state_bytes};
use super::super::work::{Op, Work};
use super::{Model, StageWork};
use crate::corpus::batch::BATCH_TOKENS;

/// Times an attention or indexer score is passed over beside its product, and a logit.
const PASSES: [f64; 2] = [3.0, 5.0];

impl Model<'_> {
    pub(super) fn open(&self) -> StageWork {
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
    pub(super) fn attend(
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
        let (heads, index_heads) = (geometry.num_attention_heads as f64, geometry.index_n_heads as f64);
        let width = (geometry.qk_head_dim() + geometry.v_head_dim) as f64;
        let index_width = geometry.index_head_dim as f64;
        work.add(Op::ProductF32, squares * (layers * heads * width + full * index_heads * index_width));
        work.add(Op::Scan, PASSES[0] * squares / 2.0 * (layers * heads + full * index_heads));
        let keys = (squares / tokens.max(1.0)).min(geometry.index_topk as f64);
        work.add(Op::Activation, layers * heads * tokens * keys);
        alone.add(Op::Load, a_row);
    }

    pub(super) fn calibration(&self) -> (f64, f64) {
        (self.tokens.calibrate as f64, self.tokens.squares)
    }

    /// A state through an audit: read and hashed.
    pub(super) fn audit_state(&self, work: &mut Work, times: f64) {
        work.add(Op::Hash, times * state_bytes(self.geometry, self.tokens) as f64);
    }

    pub(super) fn write_state(&self, alone: &mut Work) {
        let bytes = state_bytes(self.geometry, self.tokens) as f64;
        // File and payload are hashed as they are written, one prompt after the other.
        alone.add(Op::Hash, 2.0 * bytes);
        alone.add(Op::Write, bytes);
        alone.add(Op::Publish, self.tokens.prompts as f64 + 1.0);
    }

    pub(super) fn prefix(&self) -> StageWork {
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
    pub(super) fn full_share(&self) -> f64 {
        let layers = self.geometry.moe_layers();
        let full = layers.iter().filter(|&&layer| self.geometry.indexer_is_full(layer)).count();
        full as f64 / layers.len().max(1) as f64
    }

    pub(super) fn capture(&self, times: u64) -> StageWork {
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

    /// Routed and shared experts on all tokens of a set; every expert's weights are made ready once a batch by `ready`.
    pub(super) fn experts_of_a_layer(&self, tokens: f64, ready: Op, shared: &mut Work, alone: &mut Work) {
        let k = self.geometry.num_experts_per_tok as f64;
        let together = 3.0 * self.h() * self.geometry.shared_intermediate_size() as f64;
        shared.add(Op::ProductF32, 2.0 * tokens * (together + 3.0 * k * self.w()));
        shared.add(Op::Activation, tokens * (k + 1.0) * self.i());
        let batches = (tokens / BATCH_TOKENS as f64).ceil().max(1.0);
        let met = self.experts().min(k * tokens / batches);
        alone.add(ready, batches * met * 3.0 * self.w());
        alone.add(Op::Load, together);
    }

    pub(super) fn forward(&self, times: u64) -> StageWork {
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

    pub(super) fn evaluate(&self) -> StageWork {
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
        shared.add(Op::Scan, 2.0 * PASSES[1] * tokens * geometry.vocab_size as f64);
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
