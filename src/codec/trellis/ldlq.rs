//! LDLQ over the trellis: tiles are encoded bottom-up over K, each row of tiles aimed at the weights plus the weighted
//! error of the rows already done (QuIP, arXiv 2307.13304; QTIP, arXiv 2406.11235), and refinement sweeps after it.
//!
//! With `H' = L D Lᵀ` and error `E = T - Q`, `tr(Eᵀ H' E) = |D^½ Lᵀ E|²`; block row b of `Lᵀ E` is small when tile row b
//! is aimed at `T_b + Σ_{j>b} L_jbᵀ E_j`.

use rayon::prelude::*;

use super::codebook::Codebook;
use super::factor::Factor;
use super::search::{States, TILE_LEN, Tile, TileSearch};
use super::tile::{TILE_DIM, decode, read_tile, write_tile};
use crate::error::Result;
use crate::linalg::{Matrix, View, matmul_f32};

/// Rows whose feedback is applied tile row by tile row; beyond it, one product a span.
const SPAN: usize = 128;
/// Tiles from which a row of tiles is shared out over threads.
const PARALLEL_TILES: usize = 48;

/// What an encode of the inner matrix yields.
#[derive(Debug, Clone)]
pub struct Quantized {
    /// States of all tiles, `[K/16, N/16]` row-major.
    pub states: Vec<States>,
    /// The decoded inner matrix `[K, N]`.
    pub inner: Matrix<f32>,
    /// Tiles changed by each refinement sweep, out of all tiles.
    pub refined_tiles: Vec<usize>,
}

/// The engine, codebook and width of an encode.
#[derive(Clone, Copy)]
pub struct Trellis<'a> {
    /// The tile search.
    pub search: &'a dyn TileSearch,
    /// The codebook.
    pub codebook: Codebook,
    /// Bits a weight.
    pub bits: u32,
}

impl Trellis<'_> {
    /// The best states of every tile.
    ///
    /// # Errors
    /// A target that is NaN.
    pub fn encode_tiles(&self, tiles: &[Tile], states: &mut [States]) -> Result<()> {
        if tiles.len() < PARALLEL_TILES {
            return self.search.search(self.codebook, self.bits, tiles, states);
        }
        // 12 holds whole groups of every engine (3 and 4 tiles at once).
        tiles
            .par_chunks(12)
            .zip(states.par_chunks_mut(12))
            .try_for_each(|(tiles, states)| self.search.search(self.codebook, self.bits, tiles, states))
    }
}

/// Encodes the inner target `[K, N]` under a factored metric.
///
/// # Errors
/// A target value that is NaN, which only a weight or covariance that is not finite can cause.
pub fn ldlq(target: &Matrix<f32>, factor: &Factor, trellis: Trellis<'_>, sweeps: usize) -> Result<Quantized> {
    let (k, n) = (target.rows, target.cols);
    let across = n / TILE_DIM;
    let mut aim = target.clone();
    let mut error = Matrix::<f32>::zeros(k, n);
    let mut inner = Matrix::<f32>::zeros(k, n);
    let mut states = vec![[0u16; TILE_LEN]; k / TILE_DIM * across];
    let mut tiles = vec![[0.0f32; TILE_LEN]; across];
    for span in (0..k.div_ceil(SPAN)).rev() {
        let (top, bottom) = (span * SPAN, k.min((span + 1) * SPAN));
        for row in (top..bottom).step_by(TILE_DIM).rev() {
            let done = row + TILE_DIM;
            feed_back(factor, &error, &mut aim, row..done, done..bottom);
            gather_tiles(&aim.data[row * n..done * n], n, &mut tiles);
            let row_states = &mut states[row / TILE_DIM * across..][..across];
            trellis.encode_tiles(&tiles, row_states)?;
            scatter_tiles(trellis.codebook, row_states, n, &mut inner.data[row * n..done * n]);
            for i in row * n..done * n {
                error.data[i] = target.data[i] - inner.data[i];
            }
        }
        feed_back(factor, &error, &mut aim, 0..top, top..bottom);
    }
    let mut quantized = Quantized { states, inner, refined_tiles: Vec::new() };
    if sweeps > 0 {
        refine(target, factor, trellis, sweeps, &mut error, &mut quantized)?;
    }
    Ok(quantized)
}

/// Encodes every tile of the inner target by itself: what LDLQ is measured against.
///
/// # Errors
/// A target value that is NaN.
pub fn nearest(target: &Matrix<f32>, trellis: Trellis<'_>) -> Result<Quantized> {
    let (k, n) = (target.rows, target.cols);
    let across = n / TILE_DIM;
    let mut inner = Matrix::<f32>::zeros(k, n);
    let mut states = vec![[0u16; TILE_LEN]; k / TILE_DIM * across];
    let mut tiles = vec![[0.0f32; TILE_LEN]; across];
    for (row, row_states) in states.chunks_exact_mut(across).enumerate() {
        let rows = row * TILE_DIM * n..(row + 1) * TILE_DIM * n;
        gather_tiles(&target.data[rows.clone()], n, &mut tiles);
        trellis.encode_tiles(&tiles, row_states)?;
        scatter_tiles(trellis.codebook, row_states, n, &mut inner.data[rows]);
    }
    Ok(Quantized { states, inner, refined_tiles: Vec::new() })
}

/// `aim[rows] += Lᵀ[rows, done] E[done]`.
fn feed_back(
    factor: &Factor,
    error: &Matrix<f32>,
    aim: &mut Matrix<f32>,
    rows: std::ops::Range<usize>,
    done: std::ops::Range<usize>,
) {
    if rows.is_empty() || done.is_empty() {
        return;
    }
    let (k, n) = (error.rows, error.cols);
    matmul_f32(
        (rows.len(), n, done.len()),
        View::transposed(&factor.lower.data[done.start * k + rows.start..], k),
        View::rows(&error.data[done.start * n..done.end * n], n),
        &mut aim.data[rows.start * n..rows.end * n],
        n,
    );
}

/// Sweeps of block coordinate descent on the exact objective `tr(Eᵀ H' E)`: tile row b is re-encoded towards
/// `Q_b + H'_bb⁻¹ (H' E)_b`, the optimum given all other rows, and a tile is kept where the objective falls.
fn refine(
    target: &Matrix<f32>,
    factor: &Factor,
    trellis: Trellis<'_>,
    sweeps: usize,
    error: &mut Matrix<f32>,
    quantized: &mut Quantized,
) -> Result<()> {
    let (k, n) = (target.rows, target.cols);
    let across = n / TILE_DIM;
    let metric = &factor.metric;
    let mut gradient = metric.product(error);
    let mut tiles = vec![[0.0f32; TILE_LEN]; across];
    let mut states = vec![[0u16; TILE_LEN]; across];
    let mut candidate = vec![0.0f32; TILE_DIM * n];
    for _ in 0..sweeps {
        let mut refined = 0;
        for row in (0..k).step_by(TILE_DIM).rev() {
            let here = row * n..(row + TILE_DIM) * n;
            let block = metric_block(metric, row);
            let mut aim = gradient.data[here.clone()].to_vec();
            solve_block(&block, &mut aim, n);
            aim.iter_mut().zip(&quantized.inner.data[here.clone()]).for_each(|(a, q)| *a += q);
            gather_tiles(&aim, n, &mut tiles);
            trellis.encode_tiles(&tiles, &mut states)?;
            scatter_tiles(trellis.codebook, &states, n, &mut candidate);
            // The step of the error, zero where a tile is kept as it was.
            let mut step = vec![0.0f32; TILE_DIM * n];
            for (tile, found) in states.iter().enumerate() {
                if !falls(&block, &quantized.inner, &gradient, &candidate, row, tile) {
                    continue;
                }
                refined += 1;
                quantized.states[row / TILE_DIM * across + tile] = *found;
                for r in 0..TILE_DIM {
                    for c in tile * TILE_DIM..(tile + 1) * TILE_DIM {
                        let at = (row + r) * n + c;
                        step[r * n + c] = quantized.inner.data[at] - candidate[r * n + c];
                        quantized.inner.data[at] = candidate[r * n + c];
                        error.data[at] = target.data[at] - candidate[r * n + c];
                    }
                }
            }
            matmul_f32(
                (k, n, TILE_DIM),
                View::rows(&metric.data[row..], k),
                View::rows(&step, n),
                &mut gradient.data,
                n,
            );
        }
        quantized.refined_tiles.push(refined);
        if refined == 0 {
            break;
        }
    }
    Ok(())
}

type Block = [[f64; TILE_DIM]; TILE_DIM];

fn metric_block(metric: &Matrix<f32>, row: usize) -> Block {
    std::array::from_fn(|i| {
        std::array::from_fn(|j| f64::from(metric.data[(row + i) * metric.cols + row + j]))
    })
}

/// Whether the objective falls when the candidate replaces the tile: `2 Δᵀ(H'E)_b + Δᵀ H'_bb Δ < 0`.
fn falls(
    block: &Block,
    inner: &Matrix<f32>,
    gradient: &Matrix<f32>,
    candidate: &[f32],
    row: usize,
    tile: usize,
) -> bool {
    let n = inner.cols;
    let mut change = 0.0f64;
    for c in tile * TILE_DIM..(tile + 1) * TILE_DIM {
        let step: [f64; TILE_DIM] = std::array::from_fn(|r| {
            f64::from(inner.data[(row + r) * n + c]) - f64::from(candidate[r * n + c])
        });
        for r in 0..TILE_DIM {
            let curvature: f64 = block[r].iter().zip(&step).map(|(h, s)| h * s).sum();
            change += step[r] * (2.0 * f64::from(gradient.data[(row + r) * n + c]) + curvature);
        }
    }
    change < 0.0
}

/// Solves `H'_bb x = rhs` in place for `n` right-hand sides (Gaussian elimination; the block is positive definite).
fn solve_block(block: &Block, rhs: &mut [f32], n: usize) {
    let mut a = *block;
    let mut inverse: Block = std::array::from_fn(|i| std::array::from_fn(|j| if i == j { 1.0 } else { 0.0 }));
    for p in 0..TILE_DIM {
        let pivot = 1.0 / a[p][p];
        a[p].iter_mut().chain(inverse[p].iter_mut()).for_each(|x| *x *= pivot);
        let (pivot_a, pivot_inverse) = (a[p], inverse[p]);
        for i in (0..TILE_DIM).filter(|&i| i != p) {
            let factor = a[i][p];
            for j in 0..TILE_DIM {
                a[i][j] -= factor * pivot_a[j];
                inverse[i][j] -= factor * pivot_inverse[j];
            }
        }
    }
    for c in 0..n {
        let column: [f64; TILE_DIM] = std::array::from_fn(|r| f64::from(rhs[r * n + c]));
        for r in 0..TILE_DIM {
            rhs[r * n + c] = inverse[r].iter().zip(&column).map(|(x, y)| x * y).sum::<f64>() as f32;
        }
    }
}

/// Cuts 16 rows of an `n`-column matrix into tiles.
fn gather_tiles(rows: &[f32], n: usize, tiles: &mut [Tile]) {
    tiles.iter_mut().enumerate().for_each(|(t, tile)| *tile = read_tile(rows, n, 0, t * TILE_DIM));
}

/// Decodes a row of tiles into 16 rows of an `n`-column matrix.
fn scatter_tiles(codebook: Codebook, states: &[States], n: usize, rows: &mut [f32]) {
    for (t, states) in states.iter().enumerate() {
        write_tile(&decode(codebook, states), rows, n, 0, t * TILE_DIM);
    }
}
