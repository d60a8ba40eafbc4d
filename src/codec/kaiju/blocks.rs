//! The bulk of one row: block scales, points and row scale.

use half::f16;

use super::code::CodeWidth;
use super::format::BulkRow;
use super::golay::LENGTH;
use super::leech::Point;
use super::search::{Block, Coset, PointSearch, best_search, trace::trace};
use crate::error::{Result, refuse};

/// Block scales there are.
const SCALES: usize = 16;
/// Where a block's largest weight is to lie, in integer lattice units: a coordinate reaches 14 (56 bits) or 10 (64 bits)
/// upwards. Source: of 9, 11, 13 and none the one that left the least on the tensors of `cargo bench --bench kaiju_rate`.
const LARGEST: f32 = 13.0;
/// Rounds of points and row scale.
const PASSES: usize = 2;

/// A block's scale and point.
#[derive(Debug, Clone, Copy)]
pub struct BlockFit {
    /// Block scale, 0 to 15.
    pub q: u8,
    /// The point.
    pub point: Point,
    /// Its code.
    pub code: u64,
}

impl BlockFit {
    /// The weights it stands for at a row scale.
    pub fn weights(&self, row_scale: f32) -> Block {
        // As a reader multiplies; the products are exact.
        let scale = row_scale / SCALES as f32 * f32::from(self.q + 1);
        self.point.coordinates().map(|x| scale * x as f32)
    }
}

/// Fits the blocks of rows that share their importance.
pub struct BlockFitter {
    code: CodeWidth,
    engine: &'static dyn PointSearch,
    /// By column of the bulk.
    importance: Vec<f64>,
    /// By block, the largest 1.
    weights: Vec<Block>,
}

impl BlockFitter {
    /// A fitter for bulk columns of given importance, a multiple of 24.
    pub fn new(code: CodeWidth, importance: Vec<f64>) -> Self {
        let weights = importance.as_chunks::<LENGTH>().0.iter().map(normalised).collect();
        Self { code, engine: best_search(), importance, weights }
    }

    /// The rms of a block's coordinates, in integer lattice units, that leaves the least error with block scales.
    /// Source: measured on normal weights (`cargo bench --bench kaiju_rate`).
    fn best_rms(&self) -> f32 {
        match self.code {
            CodeWidth::P56 => 3.4,
            CodeWidth::P64 => 3.9,
        }
    }

    /// The bulk of a row.
    ///
    /// # Errors
    /// Weights too large for a row scale in f16.
    pub fn row(&self, target: &[f32]) -> Result<BulkRow> {
        let blocks = target.as_chunks::<LENGTH>().0;
        let mut scale = self.first_scale(target)?;
        let mut fits = Vec::new();
        for _ in 0..PASSES {
            fits = (0..blocks.len()).map(|b| self.block(&blocks[b], b, scale)).collect();
            scale = self.least_squares(blocks, &fits, scale);
        }
        Ok(bulk_row(scale, &fits))
    }

    /// The row scale that lets the block of largest rms, or of the largest weight, have its best scale as the largest of 16;
    /// 0 for a row that is zero or vanishes in f16.
    ///
    /// # Errors
    /// As [`BlockFitter::row`].
    pub fn first_scale(&self, target: &[f32]) -> Result<f16> {
        let wanted = |block: &Block| {
            let largest = block.iter().fold(0.0f32, |largest, w| largest.max(w.abs()));
            rms(block).max(largest * self.best_rms() / LARGEST)
        };
        let most = target.as_chunks::<LENGTH>().0.iter().map(wanted).fold(0.0, f32::max);
        let scale = f16::from_f32(most / self.best_rms());
        if !scale.is_finite() {
            return refuse(format!("a block of 24 weights with an rms of {most}"))
                .wanted(format!("at most {}", self.best_rms() * f16::MAX.to_f32()))
                .err();
        }
        Ok(scale)
    }

    /// What a block of a row without a scale is stored as.
    fn origin(&self) -> BlockFit {
        let point = Point { odd: false, word: 0, z: [0; LENGTH] };
        BlockFit { q: 0, point, code: self.code.encode(&point).expect("the origin has a code") }
    }

    /// The block scale and point that leave the least weighted error of a block at a row scale; the scales nearest to the block's rms
    /// are tried first, and the first among equals is kept.
    pub fn block(&self, target: &Block, block: usize, row_scale: f16) -> BlockFit {
        if row_scale.to_f32() == 0.0 {
            return self.origin();
        }
        let weight = &self.weights[block];
        let unit = row_scale.to_f32() / SCALES as f32;
        let wanted = (rms(target) / (self.best_rms() * unit)).round_ties_even().clamp(1.0, SCALES as f32);
        let region = self.code.region();
        let mut best: Option<(f32, u8, Coset)> = None;
        for q in nearest_first(wanted as usize - 1) {
            let scale = unit * f32::from(q + 1);
            let bound = best.map_or(f32::INFINITY, |(error, ..)| error / (scale * scale));
            if let Some(found) = self.engine.coset(region, &scaled(target, scale), weight, bound) {
                best = Some((found.cost * (scale * scale), q, found));
            }
        }
        let (_, q, coset) = best.expect("a point within reach of any target");
        let target = scaled(target, unit * f32::from(q + 1));
        let point = trace(region, (coset.odd, coset.word), &target, weight);
        let code = self.code.encode(&point).expect("the search keeps to the region");
        BlockFit { q, point, code }
    }

    /// The row scale of least weighted error for given points, rounded to f16; the one before where there is none.
    pub fn least_squares(&self, blocks: &[Block], fits: &[BlockFit], before: f16) -> f16 {
        let (mut dot, mut square) = (0.0, 0.0);
        let importance = self.importance.as_chunks::<LENGTH>().0;
        for ((target, fit), h) in blocks.iter().zip(fits).zip(importance) {
            for ((&w, u), h) in target.iter().zip(fit.weights(1.0)).zip(h) {
                dot += h * f64::from(w) * f64::from(u);
                square += h * f64::from(u) * f64::from(u);
            }
        }
        let scale = f16::from_f64(dot / square);
        if scale.is_finite() && scale.to_f32() > 0.0 { scale } else { before }
    }
}

/// A row's stored form.
pub fn bulk_row(scale: f16, fits: &[BlockFit]) -> BulkRow {
    BulkRow {
        scale,
        codes: fits.iter().map(|fit| fit.code).collect(),
        block_scales: fits.iter().map(|fit| fit.q).collect(),
    }
}

/// Weights of a block's coordinates for the search: the largest 1, none below a millionth of it, so that no coordinate is
/// left to chance; all 1 where the importance is 0.
pub fn normalised(importance: &[f64; LENGTH]) -> Block {
    let most = importance.iter().copied().fold(0.0, f64::max);
    if most == 0.0 { [1.0; LENGTH] } else { importance.map(|h| (h / most).max(1e-6) as f32) }
}

fn rms(block: &Block) -> f32 {
    let sum: f64 = block.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    (sum / LENGTH as f64).sqrt() as f32
}

fn scaled(block: &Block, scale: f32) -> Block {
    block.map(|x| x / scale)
}

/// All block scales, nearest to `first` first, the larger one of two as near.
fn nearest_first(first: usize) -> impl Iterator<Item = u8> {
    let steps = (1..SCALES).flat_map(move |step| [first.checked_add(step), first.checked_sub(step)]);
    std::iter::once(Some(first)).chain(steps).flatten().filter(|&q| q < SCALES).map(|q| q as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scale_is_tried_once() {
        for first in 0..SCALES {
            let mut tried: Vec<u8> = nearest_first(first).collect();
            assert_eq!(usize::from(tried[0]), first);
            tried.sort_unstable();
            assert_eq!(tried, (0..16).collect::<Vec<u8>>());
        }
    }
}
