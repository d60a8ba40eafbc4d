//! What is done to one expert, from a single encode to a whole round trip: the parts that stages are made of.

use super::super::counts::{SCALES_TRIED, TENSORS};
use super::super::work::{Op, Work};
use super::Model;
use crate::choose::search::middle_bits;
use crate::codec::trellis::hadamard::BLOCK;
use crate::codec::trellis::search::TILE_LEN;
use crate::config::choices::{DownCovariance, DownTarget, Rounding};

/// Dampings that are cross-validated, on two halves of the rows each.
const DAMPINGS: f64 = 3.0;

impl Model<'_> {
    /// One LDLQ encode of a tensor of `k` inputs, its factor left out.
    pub(super) fn encode(&self, work: &mut Work, bits: u32, k: f64) {
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

    pub(super) fn factor(&self, work: &mut Work, times: f64, k: usize) {
        if self.recipe.rounding == Rounding::Ldlq {
            work.add(Op::Factor(k), times);
        }
    }

    /// Gate and up at these widths, behind one another: they share a factor, which other experts' may push out of the
    /// encoder's memory in between.
    pub(super) fn encode_across(&self, work: &mut Work, widths: &[u32]) {
        for &bits in widths.iter().chain(widths) {
            self.encode(work, bits, self.h());
        }
        let made = if widths.len() == 1 { 1 } else { self.threads.min(widths.len()) };
        self.factor(work, made as f64, self.geometry.hidden_size);
    }

    pub(super) fn encode_down(&self, work: &mut Work, bits: u32) {
        self.encode(work, bits, self.i());
        self.factor(work, 1.0, self.geometry.moe_intermediate_size);
    }

    pub(super) fn scale_search(&self, work: &mut Work, bits: u32) {
        let tiles = (self.recipe.scale_sample_tiles * TILE_LEN) as f64;
        work.add(Op::Rotate, self.w());
        work.add(Op::Search(bits), SCALES_TRIED as f64 * tiles.min(self.w()));
    }

    pub(super) fn sketches(&self, work: &mut Work, times: f64) {
        let tiles = (self.recipe.sketch_tiles * TILE_LEN) as f64;
        work.add(Op::Scan, times * self.w());
        work.add(Op::Search(middle_bits(self.recipe)), times * tiles.min(self.w()));
        work.add(Op::Rotate, times * (self.recipe.sketch_tiles * BLOCK * BLOCK) as f64);
    }

    pub(super) fn traces(&self, work: &mut Work, of_inputs: f64, of_down: f64) {
        work.add(Op::Trace(self.geometry.hidden_size), of_inputs);
        work.add(Op::Trace(self.geometry.moe_intermediate_size), of_down);
    }

    pub(super) fn decode(&self, work: &mut Work, tensors: f64) {
        work.add(Op::Decode, tensors * self.w());
    }

    pub(super) fn input_covariance(&self, work: &mut Work) {
        work.add(Op::Syrk, self.rows.calibrating() * self.h().powi(2));
    }

    /// `silu(x gate) * (x up)` of so many rows.
    pub(super) fn intermediate(&self, work: &mut Work, rows: f64) {
        work.add(Op::ProductF32, 4.0 * rows * self.w());
        work.add(Op::Activation, rows * self.i());
    }

    /// Outputs of so many rows.
    pub(super) fn output(&self, work: &mut Work, rows: f64) {
        self.intermediate(work, rows);
        work.add(Op::ProductF32, 2.0 * rows * self.w());
    }

    pub(super) fn corrects(&self) -> bool {
        self.recipe.down_target == DownTarget::Corrected
    }

    /// Down's covariance and target behind a gate and up.
    pub(super) fn down_input(&self, work: &mut Work, corrected: bool) {
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
    pub(super) fn choose_damping(&self, work: &mut Work) {
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
    pub(super) fn losses(&self, work: &mut Work, reconstructions: f64) {
        self.output(work, (1.0 + reconstructions) * self.rows.holdout);
    }

    pub(super) fn load(&self, work: &mut Work) {
        work.add(Op::Load, 3.0 * self.w());
    }

    /// A full round trip at the middle width, its prediction, and its record.
    pub(super) fn round_trip(&self, settled: bool) -> Work {
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

    pub(super) fn channel_costs(&self, work: &mut Work) {
        self.intermediate(work, if self.rows.fit >= 1.0 { self.rows.fit } else { self.rows.fallback });
    }

    /// What a study of an expert behind its baseline starts with.
    pub(super) fn study(&self) -> Work {
        let mut work = Work::default();
        self.load(&mut work);
        self.decode(&mut work, 2.0);
        self.input_covariance(&mut work);
        self.down_input(&mut work, false);
        self.channel_costs(&mut work);
        work.add(Op::Publish, 1.0);
        work
    }
}
