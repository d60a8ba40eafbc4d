//! The stages that choose and encode a layer's experts, and those that audit what they made.

use super::super::counts::{TENSORS, shared_families};
use super::super::size::shard_bytes;
use super::super::work::{Op, Work};
use super::{End, Model, StageWork};
use crate::choose::search::middle_bits;

/// Tokens of the install audit, at least.
const AUDIT_TOKENS: f64 = 64.0;
/// Times the install audit meets every expert, at least.
const AUDIT_HITS: f64 = 2.0;

impl Model<'_> {
    pub(super) fn search(&self, times: u64, end: End) -> StageWork {
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
    pub(super) fn probe_of_an_expert(&self, first: bool) -> Work {
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

    pub(super) fn probe(&self, times: u64, end: End) -> StageWork {
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

    pub(super) fn allocation(&self, times: u64) -> StageWork {
        let mut alone = Work::default();
        alone.add(Op::Allocate, if self.counts.changed.most > 0 { 2.0 } else { 1.0 });
        alone.add(Op::Publish, 2.0);
        let model = "the exact integer program over the layer's tensors, once a round";
        StageWork { stage: "allocation", model, times, shared: Work::default(), alone }
    }

    pub(super) fn finals(&self, times: u64) -> StageWork {
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

    pub(super) fn shard_of_a_layer(&self) -> f64 {
        let sizes = (self.geometry.hidden_size, self.geometry.moe_intermediate_size);
        shard_bytes(self.geometry.num_hidden_layers, sizes, self.bits.iter().copied().enumerate()) as f64
    }

    pub(super) fn emit(&self, times: u64) -> StageWork {
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

    pub(super) fn audit(&self, times: u64) -> StageWork {
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
}
