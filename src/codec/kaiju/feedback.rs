//! Errors fed forward through a full covariance: LDLQ over blocks of 24.
//!
//! In the order side-band, bulk, the covariance is H = L D Lᵀ with a block a column of the side-band and a block of 24 of
//! the bulk. An error E costs the blocks' sum of (E L)_b D_b (E L)_bᵀ, and (E L)_b = E_b + Σ_{a > b} E_a L_ab. So the last
//! block goes first, and each is encoded towards what the errors after it ask for; the side-band comes last and takes up,
//! in 8 bits, what the bulk left. A block's points are searched under the diagonal of its D.
//!
//! Source: LDLQ (QuIP, arXiv 2307.13304), with blocks for scalars as in QuIP# (arXiv 2402.04396).

use half::f16;
use rayon::prelude::*;

use super::CodeWidth;
use super::blocks::{BlockFit, BlockFitter, bulk_row};
use super::decode::hi_value;
use super::encode::{Parts, hi_column};
use super::golay::LENGTH;
use crate::error::{Result, refuse};
use crate::linalg::{Matrix, View, block_lower, cholesky, matmul_f32};

/// Blocks between two products with everything that is done.
const SPAN: usize = 10;
/// Rounds of feedback; the row scales of the next are fitted to the targets of the one before.
const ROUNDS: usize = 2;

/// Encodes a weight `[N, K]` under a covariance `[K, K]`, given the columns of side-band and bulk.
///
/// # Errors
/// As [`super::encode()`].
pub fn encode_with_feedback(
    weight: &Matrix<f32>,
    covariance: &Matrix<f32>,
    code: CodeWidth,
    (hi_index, bulk): (&[u32], &[u32]),
) -> Result<Parts> {
    let order: Vec<usize> = hi_index.iter().chain(bulk).map(|&column| column as usize).collect();
    let (hi, k) = (hi_index.len(), order.len());
    let mut factor = Matrix::<f64>::zeros(k, k);
    for (i, line) in factor.data.chunks_exact_mut(k).enumerate() {
        let source = covariance.row(order[i]);
        line.iter_mut().zip(&order).for_each(|(x, &column)| *x = f64::from(source[column]));
    }
    cholesky(&mut factor).map_err(|at| {
        refuse(format!(
            "the covariance is not positive definite: pivot {} at input {}",
            at.pivot, order[at.row]
        ))
        .wanted("a positive definite covariance: more rows, or a share of its mean diagonal added")
    })?;
    let starts: Vec<usize> = (0..hi).chain((hi..k).step_by(LENGTH)).collect();
    let lower = block_lower(&factor, &starts);
    // The diagonal of D by column: the row of C within its block, squared.
    let diagonal = (hi..k).map(|i| {
        let start = hi + (i - hi) / LENGTH * LENGTH;
        factor.data[i * k + start..=i * k + i].iter().map(|x| x * x).sum()
    });
    let fitter = BlockFitter::new(code, diagonal.collect());
    drop(factor);

    let source = Matrix::new(
        weight.rows,
        k,
        (0..weight.rows).flat_map(|row| order.iter().map(move |&column| weight.row(row)[column])).collect(),
    );
    let scales: Vec<f16> = (0..weight.rows)
        .map(|row| {
            let first = fitter.first_scale(&source.row(row)[hi..]);
            first.map_err(|error| error.place(|refusal| refusal.row(row)))
        })
        .collect::<Result<_>>()?;
    let mut work = Feedback { fitter: &fitter, lower: &lower, source: &source, hi, scales };
    let mut bulk = work.bulk();
    for _ in 1..ROUNDS {
        work.refit(&bulk);
        bulk = work.bulk();
    }
    let columns = work.side_band(&mut bulk, hi_index)?;
    let rows = work.scales.iter().zip(&bulk.fits).map(|(&scale, fits)| bulk_row(scale, fits)).collect();
    Ok((rows, columns))
}

struct Feedback<'a> {
    fitter: &'a BlockFitter,
    /// `[K, K]`, side-band first.
    lower: &'a Matrix<f32>,
    /// The weight `[N, K]`, columns in the same order.
    source: &'a Matrix<f32>,
    /// Columns of the side-band.
    hi: usize,
    /// Row scales.
    scales: Vec<f16>,
}

/// The bulk after a round.
struct Bulk {
    /// By row and block.
    fits: Vec<Vec<BlockFit>>,
    /// What was aimed at, `[N, K]`; of the side-band, what the bulk's errors ask for.
    aim: Matrix<f32>,
    /// Source less encoded, `[N, K]`; 0 for the side-band.
    error: Matrix<f32>,
}

impl Feedback<'_> {
    /// Encodes all blocks, last to first.
    fn bulk(&self) -> Bulk {
        let (n, k) = (self.source.rows, self.source.cols);
        let blocks = (k - self.hi) / LENGTH;
        let mut aim = self.source.clone();
        let mut error = Matrix::zeros(n, k);
        let mut columns: Vec<Vec<BlockFit>> = Vec::with_capacity(blocks);
        for span in (0..blocks.div_ceil(SPAN)).rev() {
            let (first, last) = (span * SPAN, blocks.min((span + 1) * SPAN));
            let top = self.hi + first * LENGTH;
            for block in (first..last).rev() {
                let at = self.hi + block * LENGTH;
                let fits = self.block(block, at, &aim, &mut error);
                columns.push(fits);
                self.feed(&error, &mut aim, top..at, at..at + LENGTH);
            }
            self.feed(&error, &mut aim, 0..top, top..self.hi + last * LENGTH);
        }
        let fits = (0..n).map(|row| columns.iter().rev().map(|column| column[row]).collect()).collect();
        Bulk { fits, aim, error }
    }

    /// One block of all rows.
    fn block(&self, block: usize, at: usize, aim: &Matrix<f32>, error: &mut Matrix<f32>) -> Vec<BlockFit> {
        let k = aim.cols;
        error
            .data
            .par_chunks_mut(k)
            .enumerate()
            .map(|(row, error)| {
                let target = aim.row(row)[at..].first_chunk::<LENGTH>().expect("whole blocks");
                let fit = self.fitter.block(target, block, self.scales[row]);
                let weights = fit.weights(self.scales[row].to_f32());
                let source = &self.source.row(row)[at..at + LENGTH];
                for ((error, source), weight) in error[at..].iter_mut().zip(source).zip(weights) {
                    *error = source - weight;
                }
                fit
            })
            .collect()
    }

    /// `aim[.., columns] += error[.., done] L[done, columns]`.
    fn feed(
        &self,
        error: &Matrix<f32>,
        aim: &mut Matrix<f32>,
        columns: std::ops::Range<usize>,
        done: std::ops::Range<usize>,
    ) {
        if columns.is_empty() || done.is_empty() {
            return;
        }
        let (n, k) = (aim.rows, aim.cols);
        matmul_f32(
            (n, columns.len(), done.len()),
            View::rows(&error.data[done.start..], k),
            View::rows(&self.lower.data[done.start * k + columns.start..], k),
            &mut aim.data[columns.start..],
            k,
        );
    }

    /// Row scales by least squares on what was aimed at.
    fn refit(&mut self, bulk: &Bulk) {
        for (row, scale) in self.scales.iter_mut().enumerate() {
            let aim = bulk.aim.row(row)[self.hi..].as_chunks::<LENGTH>().0;
            *scale = self.fitter.least_squares(aim, &bulk.fits[row], *scale);
        }
    }

    /// The side-band's columns, last to first, each towards what all errors so far ask for.
    fn side_band(&self, bulk: &mut Bulk, hi_index: &[u32]) -> Result<Vec<super::format::HiColumn>> {
        let n = self.source.rows;
        let mut columns = Vec::with_capacity(self.hi);
        for at in (0..self.hi).rev() {
            let target: Vec<f32> = (0..n).map(|row| bulk.aim.row(row)[at]).collect();
            let column = hi_column(hi_index[at], &target)?;
            let k = bulk.error.cols;
            for (row, &value) in column.values.iter().enumerate() {
                bulk.error.data[row * k + at] = self.source.row(row)[at] - hi_value(column.scale, value);
            }
            columns.push(column);
            self.feed(&bulk.error, &mut bulk.aim, 0..at, at..at + 1);
        }
        columns.reverse();
        Ok(columns)
    }
}
