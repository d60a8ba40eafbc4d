//! The matrix product of the forward pass: fixed order, any number of rows, any number of threads.
//!
//! Purpose: `y = x · B` in f32 for weights, attention scores and probabilities alike.
//!
//! Invariant: each value of the result is one chain of fused multiply-adds per [`DEPTH`] terms, in ascending order of
//! the inner index, the chains added up in ascending order too. That depends on nothing but the two vectors: not on the
//! other rows of the call, not on threads, and, a fused multiply-add being exactly rounded everywhere, not on the
//! instruction set. (Candle's own CPU product picks kernels by the number of rows and rounds differently for few; it
//! also reads `/proc/cpuinfo` in each call, to count its threads.)
//!
//! How: `B` is packed once into panels of [`PANEL`] columns. One kernel in plain Rust is compiled for each instruction
//! set by `pulp`, which picks at run time; its tile is small enough that the sums stay in registers.
//! [`multiply_reference`] is the same in three loops.
//!
//! What it does not do: be fast on a CPU without fused multiply-add (it stays exact there).

use pulp::{Arch, WithSimd};
use rayon::prelude::*;

use crate::error::{Result, refuse};

/// Columns of a panel.
pub const PANEL: usize = 32;
/// Terms of a chain of fused multiply-adds.
pub const DEPTH: usize = 256;
/// Rows that a job takes through a matrix.
const JOB_ROWS: usize = 64;
/// Panels of a job.
const JOB_PANELS: usize = 16;
/// Rows of a register tile.
const TILE: usize = 2;

/// A matrix `[k, m]`, packed: panel after panel, each `[k, PANEL]`, the last filled up with zeros.
#[derive(Debug, Clone)]
pub struct Packed {
    k: usize,
    m: usize,
    panels: Vec<f32>,
}

impl Packed {
    /// Packs a flat weight `[m, k]` (`[out, in]`), to be multiplied by its transpose.
    pub fn transposed(weight: &[f32], m: usize, k: usize) -> Self {
        let mut panels = vec![0f32; m.div_ceil(PANEL) * PANEL * k];
        panels.par_chunks_mut(PANEL * k).zip(weight.par_chunks(PANEL * k)).for_each(|(panel, rows)| {
            for (column, row) in rows.chunks_exact(k).enumerate() {
                for (inner, value) in row.iter().enumerate() {
                    panel[inner * PANEL + column] = *value;
                }
            }
        });
        Self { k, m, panels }
    }

    /// Packs a flat matrix `[k, m]`.
    pub fn plain(matrix: &[f32], k: usize, m: usize) -> Self {
        let mut panels = vec![0f32; m.div_ceil(PANEL) * PANEL * k];
        for (panel, columns) in panels.chunks_exact_mut(PANEL * k).zip((0..m).step_by(PANEL)) {
            let width = PANEL.min(m - columns);
            for (packed, row) in panel.chunks_exact_mut(PANEL).zip(matrix.chunks_exact(m)) {
                packed[..width].copy_from_slice(&row[columns..][..width]);
            }
        }
        Self { k, m, panels }
    }

    /// Inner size.
    pub fn rows(&self) -> usize {
        self.k
    }

    /// Width of the result.
    pub fn columns(&self) -> usize {
        self.m
    }

    /// `x [n, k]` (flat) times this: `[n, m]` (flat).
    ///
    /// # Errors
    /// When `x` is not made of whole rows.
    pub fn multiply(&self, x: &[f32]) -> Result<Vec<f32>> {
        self.part(x, self.k, self.m)
    }

    /// The same with the first `k` inner terms and the first `m` columns only: what a block of queries sees of the keys
    /// (`m`), and of the values (`k`), of a prompt.
    ///
    /// # Errors
    /// When `x` is not made of whole rows of `k`, or the matrix is smaller.
    pub fn part(&self, x: &[f32], k: usize, m: usize) -> Result<Vec<f32>> {
        if k == 0 || m == 0 || k > self.k || m > self.m || !x.len().is_multiple_of(k) {
            return refuse(format!("{} values for [{k}, {m}] of a matrix [{}, {}]", x.len(), self.k, self.m))
                .wanted("whole rows")
                .err();
        }
        let mut y = vec![0f32; x.len() / k * m];
        let panels: Vec<&[f32]> = self.panels.chunks_exact(PANEL * self.k).take(m.div_ceil(PANEL)).collect();
        if panels.len() <= JOB_PANELS {
            y.par_chunks_mut(JOB_ROWS * m).zip(x.par_chunks(JOB_ROWS * k)).for_each(|(y, x)| {
                Arch::new().dispatch(Job { x, k, panels: &panels, width: m, y });
            });
            return Ok(y);
        }
        let strip = JOB_PANELS * PANEL;
        y.par_chunks_mut(JOB_ROWS * m).zip(x.par_chunks(JOB_ROWS * k)).for_each(|(y, x)| {
            let strips: Vec<Vec<f32>> = panels
                .par_chunks(JOB_PANELS)
                .enumerate()
                .map(|(index, panels)| {
                    let width = strip.min(m - index * strip);
                    let mut y = vec![0f32; x.len() / k * width];
                    Arch::new().dispatch(Job { x, k, panels, width, y: &mut y });
                    y
                })
                .collect();
            for (row, y) in y.chunks_exact_mut(m).enumerate() {
                for (y, values) in y.chunks_mut(strip).zip(&strips) {
                    y.copy_from_slice(&values[row * y.len()..][..y.len()]);
                }
            }
        });
        Ok(y)
    }
}

/// Some rows times some panels, on one thread.
struct Job<'a> {
    x: &'a [f32],
    k: usize,
    panels: &'a [&'a [f32]],
    width: usize,
    y: &'a mut [f32],
}

impl WithSimd for Job<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _: S) {
        let Self { x, k, panels, width, y } = self;
        for (depth, start) in (0..k).step_by(DEPTH).enumerate() {
            let length = DEPTH.min(k - start);
            for (panel, column) in panels.iter().zip((0..width).step_by(PANEL)) {
                let panel = &panel[start * PANEL..(start + length) * PANEL];
                let columns = PANEL.min(width - column);
                let mut rows = x.chunks_exact(k).zip(y.chunks_exact_mut(width));
                loop {
                    let (Some(first), second) = (rows.next(), rows.next()) else { break };
                    let mut sums = [[0f32; PANEL]; TILE];
                    let a = &first.0[start..][..length];
                    let b = second.as_ref().map_or(a, |second| &second.0[start..][..length]);
                    tile(a, b, panel, &mut sums);
                    for ((_, y), sums) in std::iter::once(first).chain(second).zip(&sums) {
                        let y = &mut y[column..][..columns];
                        if depth == 0 {
                            y.copy_from_slice(&sums[..columns]);
                        } else {
                            for (y, sum) in y.iter_mut().zip(sums) {
                                *y += sum;
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Two rows times one panel: the sums stay in registers.
#[inline(always)]
fn tile(a: &[f32], b: &[f32], panel: &[f32], sums: &mut [[f32; PANEL]; TILE]) {
    let [mut first, mut second] = *sums;
    for ((panel, a), b) in panel.as_chunks::<PANEL>().0.iter().zip(a).zip(b) {
        for column in 0..PANEL {
            first[column] = a.mul_add(panel[column], first[column]);
            second[column] = b.mul_add(panel[column], second[column]);
        }
    }
    *sums = [first, second];
}

/// What [`Packed::multiply`] computes, bit for bit, in three loops: `x [n, k]` times the transpose of `weight [m, k]`.
pub fn multiply_reference(x: &[f32], weight: &[f32], k: usize) -> Vec<f32> {
    let mut y = Vec::new();
    for row in x.chunks_exact(k) {
        for column in weight.chunks_exact(k) {
            let chains = row.chunks(DEPTH).zip(column.chunks(DEPTH)).map(|(row, column)| {
                row.iter().zip(column).fold(0f32, |sum, (x, weight)| x.mul_add(*weight, sum))
            });
            y.push(chains.reduce(|sum, chain| sum + chain).unwrap_or(0.0));
        }
    }
    y
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(count: usize, mut seed: u64) -> Vec<f32> {
        let next = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        };
        std::iter::repeat_with(next).take(count).collect()
    }

    #[test]
    #[ignore = "a measurement, not a check"]
    fn speed() {
        for (k, m) in [(256, 768), (768, 256), (256, 256), (128, 48), (64, 80), (256, 2048), (6144, 2048)] {
            let x = noise(1024 * k, 1);
            let packed = Packed::transposed(&noise(k * m, 2), m, k);
            let (start, mut rounds) = (std::time::Instant::now(), 0);
            while start.elapsed().as_secs_f64() < 0.5 {
                packed.multiply(&x).unwrap();
                rounds += 1;
            }
            let rate = 2.0 * 1024.0 * (k * m * rounds) as f64 / start.elapsed().as_secs_f64() / 1e9;
            println!("{k} to {m}: {rate:.1} GFLOP/s");
        }
    }
}
