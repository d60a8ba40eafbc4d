//! A packed EXL3 linear: what is stored, and what a reader computes from it.
//!
//! `W[K, N] = diag(suh) · Hk · T · Hn · diag(svh)` with T the decoded tiles. [`TrellisLinear::dense`] fixes the order of
//! every operation, since its f16 result is hashed, installed and replayed.

use half::f16;

use super::codebook::Codebook;
use super::hadamard::{BLOCK, rotate_columns, rotate_rows};
use super::pack::{self, unpack};
use super::search::{States, TILE_LEN};
use super::tile::{TILE_DIM, decode, write_tile};
use crate::error::{Result, refuse};
use crate::linalg::{Matrix, View, matmul_f32};
use crate::store::hash::sha256_hex;

/// A linear of `K` inputs and `N` outputs at `bits` bits a weight.
#[derive(Debug, Clone, PartialEq)]
pub struct TrellisLinear {
    /// Inputs, a multiple of 128.
    pub k: usize,
    /// Outputs, a multiple of 128.
    pub n: usize,
    /// Bits a weight, 1 to 8.
    pub bits: u32,
    /// The codebook its states index.
    pub codebook: Codebook,
    /// Packed tiles, `[K/16, N/16, 16 * bits]` words: the `trellis` tensor.
    pub trellis: Vec<u16>,
    /// Input-side vector, `[K]`.
    pub suh: Vec<f16>,
    /// Output-side vector, `[N]`.
    pub svh: Vec<f16>,
}

impl TrellisLinear {
    /// Assembles a linear from its stored parts.
    ///
    /// # Errors
    /// Sizes that are no multiples of 128, a length that does not fit, bits outside 1..=8, a vector entry that is zero
    /// or not finite.
    pub fn new(
        (k, n): (usize, usize),
        bits: u32,
        codebook: Codebook,
        trellis: Vec<u16>,
        suh: Vec<f16>,
        svh: Vec<f16>,
    ) -> Result<Self> {
        if k == 0 || n == 0 || !k.is_multiple_of(BLOCK) || !n.is_multiple_of(BLOCK) {
            return refuse(format!("a linear of {k} x {n}")).wanted("both sizes multiples of 128").err();
        }
        if !(1..=8).contains(&bits) {
            return refuse(format!("{bits} bits a weight")).wanted("1 to 8").err();
        }
        let words = k / TILE_DIM * (n / TILE_DIM) * pack::words(bits);
        if trellis.len() != words || suh.len() != k || svh.len() != n {
            return refuse(format!(
                "trellis of {} words, suh of {}, svh of {} for a {k} x {n} linear at {bits} bits",
                trellis.len(),
                suh.len(),
                svh.len()
            ))
            .wanted(format!("{words}, {k} and {n}"))
            .err();
        }
        check_vector("suh", &suh)?;
        check_vector("svh", &svh)?;
        Ok(Self { k, n, bits, codebook, trellis, suh, svh })
    }

    /// The decoded tiles as a matrix `[K, N]`, before the rotation: every value is an exact f16.
    pub fn inner(&self) -> Matrix<f32> {
        let mut out = Matrix::zeros(self.k, self.n);
        let tiles_across = self.n / TILE_DIM;
        let mut states: States = [0; TILE_LEN];
        for (index, packed) in self.trellis.chunks_exact(pack::words(self.bits)).enumerate() {
            unpack(packed, self.bits, &mut states);
            let (row, column) = (index / tiles_across * TILE_DIM, index % tiles_across * TILE_DIM);
            write_tile(&decode(self.codebook, &states), &mut out.data, self.n, row, column);
        }
        out
    }

    /// The dense weight `[K, N]` rounded to f16: what the forward pass installs.
    pub fn dense(&self) -> Matrix<f16> {
        let mut w = self.inner();
        rotate_columns(&mut w.data, self.n);
        for (row, &scale) in w.data.chunks_exact_mut(self.n).zip(&self.suh) {
            let scale = scale.to_f32();
            row.iter_mut().for_each(|x| *x *= scale);
        }
        rotate_rows(&mut w.data, self.n);
        let svh: Vec<f32> = self.svh.iter().map(|s| s.to_f32()).collect();
        let data = w
            .data
            .chunks_exact(self.n)
            .flat_map(|row| row.iter().zip(&svh).map(|(x, s)| f16::from_f32(x * s)));
        Matrix { rows: self.k, cols: self.n, data: data.collect() }
    }

    /// [`TrellisLinear::dense`] upcast to f32.
    pub fn dense_f32(&self) -> Matrix<f32> {
        let dense = self.dense();
        Matrix { rows: dense.rows, cols: dense.cols, data: dense.data.iter().map(|x| x.to_f32()).collect() }
    }

    /// `y = ((x * suh) Hk T Hn) * svh` for rows `x[m, K]`: the way a kernel that never forms the dense weight computes.
    pub fn forward(&self, x: &Matrix<f32>) -> Matrix<f32> {
        assert_eq!(x.cols, self.k);
        let mut rotated = x.clone();
        for row in rotated.data.chunks_exact_mut(self.k) {
            row.iter_mut().zip(&self.suh).for_each(|(x, s)| *x *= s.to_f32());
        }
        rotate_rows(&mut rotated.data, self.k);
        let inner = self.inner();
        let mut y = Matrix::zeros(x.rows, self.n);
        matmul_f32(
            (x.rows, self.n, self.k),
            View::rows(&rotated.data, self.k),
            View::rows(&inner.data, self.n),
            &mut y.data,
            self.n,
        );
        rotate_rows(&mut y.data, self.n);
        for row in y.data.chunks_exact_mut(self.n) {
            row.iter_mut().zip(&self.svh).for_each(|(y, s)| *y *= s.to_f32());
        }
        y
    }

    /// The linear of a range of outputs, a multiple of 128 at both ends: the tensor-parallel slice of gate and up.
    ///
    /// # Panics
    /// When the range does not lie on 128-blocks.
    pub fn slice_outputs(&self, outputs: std::ops::Range<usize>) -> Self {
        assert!(
            outputs.start.is_multiple_of(BLOCK) && outputs.end.is_multiple_of(BLOCK) && outputs.end <= self.n
        );
        let words = pack::words(self.bits);
        let tiles = outputs.start / TILE_DIM * words..outputs.end / TILE_DIM * words;
        let trellis = self.trellis.chunks_exact(self.n / TILE_DIM * words);
        Self {
            n: outputs.len(),
            trellis: trellis.flat_map(|row| row[tiles.clone()].iter().copied()).collect(),
            svh: self.svh[outputs].to_vec(),
            suh: self.suh.clone(),
            ..*self
        }
    }

    /// The linear of a range of inputs, a multiple of 128 at both ends: the tensor-parallel slice of down.
    ///
    /// # Panics
    /// When the range does not lie on 128-blocks.
    pub fn slice_inputs(&self, inputs: std::ops::Range<usize>) -> Self {
        assert!(
            inputs.start.is_multiple_of(BLOCK) && inputs.end.is_multiple_of(BLOCK) && inputs.end <= self.k
        );
        let words = self.n / TILE_DIM * pack::words(self.bits);
        Self {
            k: inputs.len(),
            trellis: self.trellis[inputs.start / TILE_DIM * words..inputs.end / TILE_DIM * words].to_vec(),
            suh: self.suh[inputs].to_vec(),
            svh: self.svh.clone(),
            ..*self
        }
    }

    /// SHA-256 of the packed words as stored (little-endian).
    pub fn packed_sha256(&self) -> String {
        sha256_hex(&self.trellis.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>())
    }
}

/// SHA-256 of a dense f16 matrix `[K, N]`, little-endian row-major: `reconstruction_sha256` of schema v2.
pub fn reconstruction_sha256(dense: &Matrix<f16>) -> String {
    sha256_hex(&dense.data.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())
}

/// Refuses a stored vector entry of zero or one that is not finite.
pub(super) fn check_vector(name: &str, vector: &[f16]) -> Result<()> {
    match vector.iter().position(|x| !x.is_finite() || x.to_f32() == 0.0) {
        Some(at) => {
            refuse(format!("{name}[{at}] is {}", vector[at])).wanted("finite, non-zero f16 values").err()
        }
        None => Ok(()),
    }
}
