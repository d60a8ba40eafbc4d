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
//! How: `B` is packed once into panels of [`PANEL`] columns. One kernel is compiled for each instruction set by `pulp`,
//! which picks at run time; its tile is small enough that the sums stay in registers.
//! [`multiply_reference`] is the same in three loops.
//!
//! What it does not do: be fast on a CPU without fused multiply-add (it stays exact there).

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use crate::error::{Result, refuse};

/// Columns of a panel.
pub const PANEL: usize = 16;
/// Terms of a chain of fused multiply-adds.
pub const DEPTH: usize = 256;
/// Rows that a job takes through a matrix.
const JOB_ROWS: usize = 96;
/// Panels of a job.
const JOB_PANELS: usize = 32;
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
    fn with_simd<S: Simd>(self, simd: S) {
        // Rows and vectors of a register tile: as many sums as the instruction set has registers for.
        match S::F32_LANES {
            16 => self.run::<S, 12, 1>(simd),
            8 => self.run::<S, 6, 2>(simd),
            4 => self.run::<S, 4, 4>(simd),
            _ => self.run::<S, 1, PANEL>(simd),
        }
    }
}

impl Job<'_> {
    #[inline(always)]
    fn run<S: Simd, const R: usize, const V: usize>(self, simd: S) {
        let Self { x, k, panels, width, y } = self;
        for start in (0..k).step_by(DEPTH) {
            let terms = start..k.min(start + DEPTH);
            for (panel, column) in panels.iter().zip((0..width).step_by(PANEL)) {
                let panel = &panel[terms.start * PANEL..terms.end * PANEL];
                let columns = column..width.min(column + PANEL);
                for (x, y) in x.chunks(R * k).zip(y.chunks_mut(R * width)) {
                    if x.len() == R * k {
                        tile::<S, R, V>(simd, (x, k), terms.clone(), panel, y, columns.clone());
                        continue;
                    }
                    for (x, y) in x.chunks_exact(k).zip(y.chunks_exact_mut(width)) {
                        tile::<S, 1, V>(simd, (x, k), terms.clone(), panel, y, columns.clone());
                    }
                }
            }
        }
    }
}

/// Some terms of `R` rows of `x` (`k` values each) times one panel, into some columns of `R` rows of `y`.
///
/// A panel is `V` vectors wide; the `R` times `V` sums stay in registers.
#[inline(always)]
fn tile<S: Simd, const R: usize, const V: usize>(
    simd: S,
    (x, k): (&[f32], usize),
    terms: Range<usize>,
    panel: &[f32],
    y: &mut [f32],
    columns: Range<usize>,
) {
    let panel = S::as_simd_f32s(panel).0.as_chunks::<V>().0;
    let rows: [&[f32]; R] = std::array::from_fn(|row| &x[row * k..][terms.clone()][..panel.len()]);
    let mut sums = [[simd.splat_f32s(0.0); V]; R];
    for (term, vectors) in panel.iter().enumerate() {
        for (sums, row) in sums.iter_mut().zip(rows) {
            let value = simd.splat_f32s(row[term]);
            for (sum, vector) in sums.iter_mut().zip(vectors) {
                *sum = simd.mul_add_f32s(value, *vector, *sum);
            }
        }
    }
    let width = y.len() / R;
    for (y, sums) in y.chunks_exact_mut(width).zip(&sums) {
        let mut chain = [0f32; PANEL];
        S::as_mut_simd_f32s(&mut chain).0.copy_from_slice(sums);
        let y = &mut y[columns.clone()];
        if terms.start > 0 {
            for (y, sum) in y.iter_mut().zip(chain) {
                *y += sum;
            }
        } else if let Ok(whole) = <&mut [f32; PANEL]>::try_from(&mut *y) {
            *whole = chain;
        } else {
            y.copy_from_slice(&chain[..y.len()]);
        }
    }
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

    /// Inner sizes around a chain, widths around a panel, rows around the tiles (1, 4, 6, 12).
    #[test]
    fn every_instruction_set_has_the_bits_of_the_reference() {
        for (k, m) in [(1, 1), (7, 15), (255, 16), (256, 17), (257, 33), (600, 40)] {
            let (x, weight) = (noise(25 * k, 1), noise(k * m, 2));
            let packed = Packed::transposed(&weight, m, k);
            let panels: Vec<&[f32]> = packed.panels.chunks_exact(PANEL * k).collect();
            for rows in [1, 5, 6, 7, 12, 25] {
                let x = &x[..rows * k];
                let reference = multiply_reference(x, &weight, k);
                let check = |name: &str, run: &dyn Fn(Job<'_>)| {
                    let mut y = vec![0f32; rows * m];
                    run(Job { x, k, panels: &panels, width: m, y: &mut y });
                    let same = y.iter().zip(&reference).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{name}: {rows} rows, {k} to {m}");
                };
                check("scalar", &|job| pulp::Scalar::new().vectorize(job));
                check("the one in use", &|job| Arch::new().dispatch(job));
            }
        }
        println!("scalar and {:?} ran", Arch::new());
    }

    #[test]
    fn a_part_of_a_matrix_is_the_matrix_of_the_part() {
        let (k, m) = (300, 70);
        let (x, matrix) = (noise(9 * 290, 1), noise(k * m, 2));
        let packed = Packed::plain(&matrix, k, m);
        let mut weight = Vec::new();
        for column in 0..35 {
            weight.extend((0..290).map(|row| matrix[row * m + column]));
        }
        assert_eq!(packed.part(&x, 290, 35).unwrap(), multiply_reference(&x, &weight, 290));
        assert!(packed.part(&x, 290, 71).is_err() && packed.part(&x, 301, 35).is_err());
        assert!(packed.multiply(&x[..299]).is_err());
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
