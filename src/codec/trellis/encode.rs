//! The trellis encoder of a whole linear: global scale, stored vectors, inner target, LDLQ, packing, read-back.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use half::f16;
use sha2::{Digest, Sha256};

use super::codebook::{CODEBOOK_SCALE, Codebook};
use super::factor::{Factor, factor, trace_d};
use super::hadamard::{BLOCK, rotate_columns, rotate_rows};
use super::ldlq::{Quantized, Trellis, ldlq, nearest};
use super::linear::{TrellisLinear, check_vector};
use super::pack::{pack, unpack, words};
use super::search::{States, TILE_LEN, Tile, TileSearch, best_search};
use super::tile::{TILE_DIM, read_tile};
use crate::codec::{Codec, EncodeJob, PackedMatrix, PrivateSide, Vectors};
use crate::config::choices::{Metric, Rounding};
use crate::error::{Result, refuse};
use crate::linalg::Matrix;
use crate::store::hash::sha256_hex;
use crate::store::seed::SplitMix64;

/// The input normalisation every `suh` carries: it brings a weight of unit rms to the codebook's deviation.
pub const INPUT_NORMALISATION: f64 = -1.0 / CODEBOOK_SCALE;

/// Relative scales tried first; the fine grid goes ±3 steps of [`FINE_STEP`] around the best.
const COARSE: [f64; 7] = [0.75, 0.80, 0.85, 0.90, 0.95, 1.00, 1.05];
/// The same for linears of more bits: the finer the trellis, the dearer is a weight beyond its reach, and the smaller the
/// best scale (0.70 to 0.75 at 6 bits).
pub const COARSE_OF_MANY_BITS: [f64; 10] = [0.50, 0.55, 0.60, 0.65, 0.70, 0.75, 0.80, 0.85, 0.90, 0.95];
const FINE_STEP: f64 = 0.0125;

/// The encoder and its settings.
pub struct TrellisCodec {
    /// The tile search engine.
    pub search: &'static dyn TileSearch,
    /// The codebook written.
    pub codebook: Codebook,
    /// How rotated weights are rounded.
    pub rounding: Rounding,
    /// The metric LDLQ works in.
    pub metric: Metric,
    /// Refinement sweeps after LDLQ.
    pub sweeps: usize,
    /// Tiles sampled by the scale search.
    pub scale_sample_tiles: usize,
    /// Relative scales it tries first, ascending.
    pub coarse_scales: &'static [f64],
    encodes: AtomicU64,
    factors: Mutex<Vec<([u8; 32], Arc<Factor>)>>,
}

impl TrellisCodec {
    /// An encoder for the mcg codebook on the fastest engine present.
    pub fn new(sweeps: usize, scale_sample_tiles: usize) -> Self {
        Self::with_search(best_search(), sweeps, scale_sample_tiles)
    }

    /// The same on a chosen engine.
    pub fn with_search(search: &'static dyn TileSearch, sweeps: usize, scale_sample_tiles: usize) -> Self {
        Self {
            search,
            codebook: Codebook::Mcg,
            rounding: Rounding::Ldlq,
            metric: Metric::Stored,
            sweeps,
            scale_sample_tiles,
            coarse_scales: &COARSE,
            encodes: AtomicU64::new(0),
            factors: Mutex::new(Vec::new()),
        }
    }

    /// Matrices encoded so far: what a study's cost is told in.
    pub fn encodes(&self) -> u64 {
        self.encodes.load(Ordering::Relaxed)
    }

    /// The factored metric of a covariance under a stored `suh`, remembered for the next tensor that shares both.
    fn factor(&self, covariance: &Matrix<f32>, suh: &[f16], sigma_reg: f64) -> Result<Arc<Factor>> {
        let mut hash = Sha256::new();
        covariance.data.chunks(4096).for_each(|part| {
            let bytes: Vec<u8> = part.iter().flat_map(|x| x.to_le_bytes()).collect();
            hash.update(&bytes);
        });
        suh.iter().for_each(|s| hash.update(s.to_le_bytes()));
        hash.update(sigma_reg.to_le_bytes());
        let key: [u8; 32] = hash.finalize().into();
        {
            let mut kept = self.factors.lock().expect("no panic holds the lock");
            if let Some(at) = kept.iter().position(|(k, _)| *k == key) {
                // The one used last goes last: what other threads keep meanwhile does not push it out.
                let found = kept.remove(at);
                kept.push(found.clone());
                return Ok(found.1);
            }
        }
        let made = Arc::new(factor(covariance, suh, sigma_reg)?);
        // Gate and up share theirs over all widths, and each thread works on one expert.
        let mut kept = self.factors.lock().expect("no panic holds the lock");
        if kept.len() > rayon::current_num_threads() {
            kept.remove(0);
        }
        kept.push((key, made.clone()));
        Ok(made)
    }

    fn trellis(&self, bits: u32) -> Trellis<'_> {
        Trellis { search: self.search, codebook: self.codebook, bits }
    }

    /// Packs, unpacks and decodes twice; every step must give back the encoder's own values.
    fn pack(&self, quantized: &Quantized, bits: u32, suh: Vec<f16>, svh: Vec<f16>) -> Result<TrellisLinear> {
        let words = words(bits);
        let mut trellis = vec![0u16; quantized.states.len() * words];
        let mut back: States = [0; TILE_LEN];
        for (index, (states, packed)) in
            quantized.states.iter().zip(trellis.chunks_exact_mut(words)).enumerate()
        {
            pack(states, bits, packed);
            unpack(packed, bits, &mut back);
            if back != *states {
                return Err(refuse(format!("tile {index} does not unpack to its states")).check());
            }
        }
        let (k, n) = (quantized.inner.rows, quantized.inner.cols);
        let linear = TrellisLinear::new((k, n), bits, self.codebook, trellis, suh, svh)?;
        for _ in 0..2 {
            if linear.inner() != quantized.inner {
                return Err(refuse("the packed bytes do not decode to the encoder's values").check());
            }
        }
        Ok(linear)
    }
}

impl PackedMatrix for TrellisLinear {
    fn dense(&self) -> Matrix<f32> {
        self.dense_f32()
    }

    fn packed_sha256(&self) -> String {
        TrellisLinear::packed_sha256(self)
    }

    fn reconstruction_sha256(&self, dense: &Matrix<f32>) -> String {
        sha256_hex(&dense.data.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect::<Vec<u8>>())
    }

    fn scale_outputs(&mut self, factors: &[f64]) -> Result<()> {
        assert_eq!(factors.len(), self.n, "a factor for every output");
        for (stored, factor) in self.svh.iter_mut().zip(factors) {
            *stored = f16::from_f32((stored.to_f64() * factor) as f32);
        }
        check_vector("svh", &self.svh)
    }
}

impl Codec for TrellisCodec {
    type Packed = TrellisLinear;

    /// Minimises MSE(Q(g·t) - g·t)/g² over the sampled tiles, ties to the smaller scale.
    fn fit_scale(&self, weight: &Matrix<f32>, vectors: &Vectors, bits: u32, seed: u64) -> Result<f64> {
        let rotated = rotate(weight, &vectors.suh, &vectors.svh)?;
        let unit = unit_scale(&rotated)?;
        let sample = sample_tiles(&rotated, self.scale_sample_tiles, seed);
        let mut best = (f64::INFINITY, self.coarse_scales[0]);
        self.try_scales(self.coarse_scales, unit, &sample, bits, &mut best)?;
        let centre = best.1;
        let fine: Vec<f64> =
            [-3.0, -2.0, -1.0, 1.0, 2.0, 3.0].iter().map(|step| centre + step * FINE_STEP).collect();
        self.try_scales(&fine, unit, &sample, bits, &mut best)?;
        Ok(best.1)
    }

    /// tr(D) of the metric under the unscaled `suh`: LDLQ's error is proportional to it (QuIP, arXiv 2307.13304).
    fn input_score(&self, job: &EncodeJob<'_>) -> Result<f64> {
        let suh: Vec<f16> = job.vectors.suh.iter().map(|&x| f16::from_f32(x)).collect();
        check_vector("suh", &suh)?;
        trace_d(job.covariance, &suh, job.sigma_reg)
    }

    fn noise(&self, job: &EncodeJob<'_>, tiles: usize, seed: u64) -> Result<f64> {
        let (weight, vectors) = (job.weight, job.vectors);
        let mut energy = 0.0f64;
        for (row, su) in weight.data.chunks_exact(weight.cols).zip(&vectors.suh) {
            let sum = |(x, sv): (&f32, &f32)| f64::from(x / su / sv).powi(2);
            energy += row.iter().zip(&vectors.svh).map(sum).sum::<f64>();
        }
        let rms = (energy / weight.data.len() as f64).sqrt();
        if rms == 0.0 || !rms.is_finite() {
            return refuse(format!("the scaled weight has rms {rms}"))
                .wanted("finite weights that are not all zero")
                .err();
        }
        let unit = job.scale * CODEBOOK_SCALE / rms;
        let tiles: Vec<Tile> = sample_rotated(weight, vectors, tiles, seed)
            .into_iter()
            .map(|tile| tile.map(|x| (f64::from(x) * unit) as f32))
            .collect();
        let mut states = vec![[0u16; TILE_LEN]; tiles.len()];
        self.trellis(job.bits).encode_tiles(&tiles, &mut states)?;
        let values = self.codebook.values();
        let error: f64 = tiles
            .iter()
            .flatten()
            .zip(states.iter().flatten())
            .map(|(x, &s)| (f64::from(*x) - f64::from(values[usize::from(s)])).powi(2))
            .sum();
        Ok(error / (tiles.len() * TILE_LEN) as f64 / (unit * unit))
    }

    fn encode(&self, job: &EncodeJob<'_>) -> Result<TrellisLinear> {
        self.encodes.fetch_add(1, Ordering::Relaxed);
        let rotated = rotate(job.weight, &job.vectors.suh, &job.vectors.svh)?;
        let g = job.scale * unit_scale(&rotated)?;
        let (suh, svh) = stored_vectors(job.vectors, g)?;
        let exact = |stored: &[f16]| stored.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
        let target = rotate(job.weight, &exact(&suh), &exact(&svh))?;
        let quantized = match self.rounding {
            Rounding::Nearest => nearest(&target, self.trellis(job.bits))?,
            Rounding::Ldlq => {
                let factor = match self.metric {
                    Metric::Stored => self.factor(job.covariance, &suh, job.sigma_reg)?,
                    Metric::Signs => self.factor(job.covariance, &unit(&suh), job.sigma_reg)?,
                };
                ldlq(&target, &factor, self.trellis(job.bits), self.sweeps)?
            }
        };
        self.pack(&quantized, job.bits, suh, svh)
    }
}

impl TrellisCodec {
    /// Measures each relative scale and keeps the best, the smaller one where two are equal.
    fn try_scales(
        &self,
        scales: &[f64],
        unit: f64,
        sample: &[Tile],
        bits: u32,
        best: &mut (f64, f64),
    ) -> Result<()> {
        let tiles: Vec<Tile> = scales
            .iter()
            .flat_map(|t| sample.iter().map(move |tile| tile.map(|x| (f64::from(x) * t * unit) as f32)))
            .collect();
        let mut states = vec![[0u16; TILE_LEN]; tiles.len()];
        self.trellis(bits).encode_tiles(&tiles, &mut states)?;
        let values = self.codebook.values();
        for (index, &t) in scales.iter().enumerate() {
            let range = index * sample.len()..(index + 1) * sample.len();
            let error: f64 = tiles[range.clone()]
                .iter()
                .flatten()
                .zip(states[range].iter().flatten())
                .map(|(x, &s)| (f64::from(*x) - f64::from(values[usize::from(s)])).powi(2))
                .sum();
            let error = error / (t * t);
            if error < best.0 || (error == best.0 && t < best.1) {
                *best = (error, t);
            }
        }
        Ok(())
    }
}

/// `Hk (W / suh / svh) Hn` for `W[K, N]`.
fn rotate(weight: &Matrix<f32>, suh: &[f32], svh: &[f32]) -> Result<Matrix<f32>> {
    let (k, n) = (weight.rows, weight.cols);
    assert_eq!((suh.len(), svh.len()), (k, n), "one vector entry a row and a column");
    if !k.is_multiple_of(BLOCK) || !n.is_multiple_of(BLOCK) {
        return refuse(format!("a weight of {k} inputs and {n} outputs")).wanted("multiples of 128").err();
    }
    if let Some(at) = weight.data.iter().position(|x| !x.is_finite()) {
        return refuse(format!("weight [{}, {}] (input, output) is {}", at / n, at % n, weight.data[at]))
            .wanted("finite weights")
            .err();
    }
    let mut rotated = weight.clone();
    for (row, su) in rotated.data.chunks_exact_mut(n).zip(suh) {
        row.iter_mut().zip(svh).for_each(|(x, sv)| *x = *x / su / sv);
    }
    rotate_columns(&mut rotated.data, n);
    rotate_rows(&mut rotated.data, n);
    Ok(rotated)
}

/// The factor that brings the rotated weight to the codebook's deviation.
fn unit_scale(rotated: &Matrix<f32>) -> Result<f64> {
    let energy: f64 = rotated.data.iter().map(|&x| f64::from(x).powi(2)).sum();
    let rms = (energy / rotated.data.len() as f64).sqrt();
    if rms == 0.0 || !rms.is_finite() {
        return refuse(format!("the rotated weight has rms {rms}"))
            .wanted("weights that are not all zero")
            .err();
    }
    Ok(CODEBOOK_SCALE / rms)
}

/// Folds g into the tensor's private vector and rounds both to f16.
fn stored_vectors(vectors: &Vectors, g: f64) -> Result<(Vec<f16>, Vec<f16>)> {
    let stored = |vector: &[f32], private: bool| -> Vec<f16> {
        let scale = if private { 1.0 / g } else { 1.0 };
        vector.iter().map(|&x| f16::from_f32((f64::from(x) * scale) as f32)).collect()
    };
    let suh = stored(&vectors.suh, vectors.private == PrivateSide::Input);
    let svh = stored(&vectors.svh, vectors.private == PrivateSide::Output);
    check_vector("suh", &suh)?;
    check_vector("svh", &svh)?;
    Ok((suh, svh))
}

/// The signs of a stored vector.
fn unit(suh: &[f16]) -> Vec<f16> {
    suh.iter().map(|x| f16::ONE.copysign(*x)).collect()
}

/// `count` distinct tiles of the rotated weight.
fn sample_tiles(rotated: &Matrix<f32>, count: usize, seed: u64) -> Vec<Tile> {
    let across = rotated.cols / TILE_DIM;
    sample(rotated.rows / TILE_DIM * across, count, seed)
        .into_iter()
        .map(|tile| {
            read_tile(&rotated.data, rotated.cols, tile / across * TILE_DIM, tile % across * TILE_DIM)
        })
        .collect()
}

/// The same tiles without rotating more than the Hadamard blocks they lie in.
fn sample_rotated(weight: &Matrix<f32>, vectors: &Vectors, count: usize, seed: u64) -> Vec<Tile> {
    let across = weight.cols / TILE_DIM;
    sample(weight.rows / TILE_DIM * across, count, seed)
        .into_iter()
        .map(|tile| {
            let (top, left) = (tile / across * TILE_DIM, tile % across * TILE_DIM);
            let (row0, col0) = (top / BLOCK * BLOCK, left / BLOCK * BLOCK);
            let mut block = Vec::with_capacity(BLOCK * BLOCK);
            for row in row0..row0 + BLOCK {
                let line = &weight.row(row)[col0..col0 + BLOCK];
                let scaled = line.iter().zip(&vectors.svh[col0..]).map(|(x, sv)| x / vectors.suh[row] / sv);
                block.extend(scaled);
            }
            rotate_columns(&mut block, BLOCK);
            rotate_rows(&mut block, BLOCK);
            read_tile(&block, BLOCK, top - row0, left - col0)
        })
        .collect()
}

/// `count` distinct numbers below `total` by a partial Fisher-Yates shuffle; all of them, in order, when there are no
/// more.
fn sample(total: usize, count: usize, seed: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..total).collect();
    let count = count.clamp(1, total);
    if count < total {
        let mut random = SplitMix64::new(seed);
        for i in 0..count {
            let left = (total - i) as u64;
            order.swap(i, i + random.below(left) as usize);
        }
    }
    order.truncate(count);
    order
}
