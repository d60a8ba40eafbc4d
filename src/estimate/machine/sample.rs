//! The jobs of a calibration: each does what a stage does with matrices of seeded noise.

use std::path::Path;
use std::time::Instant;

use half::{bf16, f16};
use num_bigint::BigUint;

use super::super::work::Op;
use super::Rate;
use crate::calibrate::covariance::Covariance;
use crate::choose::allocation::{Measured, allocate};
use crate::choose::expert::decode;
use crate::codec::trellis::codebook::Codebook;
use crate::codec::trellis::factor::{factor, trace_d};
use crate::codec::trellis::hadamard::{rotate_columns, rotate_rows};
use crate::codec::trellis::linear::TrellisLinear;
use crate::codec::trellis::pack;
use crate::codec::trellis::search::{States, TILE_LEN, Tile};
use crate::codec::trellis::tile;
use crate::config::Recipe;
use crate::error::{IoContext, Result, refuse};
use crate::linalg::{Matrix, Packed, cholesky, cholesky_solve, silu};
use crate::store::atomic::{remove_file_durably, write_atomic};
use crate::store::hash::sha256_hex;
use crate::store::seed::SplitMix64;

/// Rows of products and sums.
const ROWS: usize = 512;
/// Bytes written to learn the disk's rate.
const DISK_BYTES: usize = 64 << 20;
/// Small files published to learn what one costs.
const DISK_FILES: usize = 16;

/// What jobs work on: seeded noise of the model's sizes, up to a largest one.
pub(super) struct Sample {
    /// `[h, i]`.
    weight: Matrix<f32>,
    /// The same, BF16 as stored.
    stored: Vec<u8>,
    /// `[ROWS, h]`.
    rows: Matrix<f32>,
    wide: [Matrix<f64>; 2],
    linear: TrellisLinear,
    states: Vec<States>,
    /// `[h]` and `[i]`.
    vectors: [Vec<f32>; 2],
    /// Positive definite, of the larger size of the fit.
    covariance: Matrix<f32>,
}

impl Sample {
    pub(super) fn new(h: usize, i: usize, largest: usize) -> Self {
        let mut random = SplitMix64::new(7);
        let mut noise = |count: usize| -> Vec<f32> {
            (0..count).map(|_| (random.next_u64() >> 40) as f32 / (1u64 << 23) as f32 - 1.0).collect()
        };
        let weight = Matrix::new(h, i, noise(h * i));
        let stored = weight.data.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect();
        let rows = Matrix::new(ROWS, h, noise(ROWS * h));
        let wide = [Matrix::new(ROWS, i, noise(ROWS * i)), Matrix::new(i, i, noise(i * i))];
        let mut covariance = Matrix::zeros(largest, largest);
        let few = noise(largest);
        for a in 0..largest {
            for b in 0..largest {
                let ridge = if a == b { 1.0 } else { 0.0 };
                covariance.data[a * largest + b] = few[a] * few[b] + ridge;
            }
        }
        let bits = 4;
        let mut random = SplitMix64::new(11);
        let tiles = h / 16 * (i / 16);
        let words: Vec<u16> = (0..tiles * pack::words(bits)).map(|_| random.next_u64() as u16).collect();
        let mut states = vec![[0; TILE_LEN]; tiles];
        for (packed, states) in words.chunks_exact(pack::words(bits)).zip(&mut states) {
            pack::unpack(packed, bits, states);
        }
        let ones = |n: usize| vec![f16::ONE; n];
        let linear = TrellisLinear::new((h, i), bits, Codebook::Mcg, words, ones(h), ones(i))
            .expect("sizes that a walk accepts");
        Self {
            vectors: [vec![1.0; h], vec![1.0; i]],
            wide: wide.map(|matrix| matrix.widened()),
            weight,
            stored,
            rows,
            linear,
            states,
            covariance,
        }
    }

    fn weights(&self) -> f64 {
        self.weight.data.len() as f64
    }

    pub(super) fn syrk(&self) -> f64 {
        let mut sum = Covariance::new(self.rows.cols);
        sum.add(&self.rows);
        (sum.rows() * self.rows.cols * self.rows.cols) as f64
    }

    pub(super) fn product_f32(&self) -> f64 {
        let out = self.rows.product(&self.weight);
        2.0 * (out.data.len() * self.weight.rows) as f64
    }

    pub(super) fn product_f64(&self) -> f64 {
        let out = self.wide[0].product(&self.wide[1]);
        2.0 * (out.data.len() * self.wide[1].rows) as f64
    }

    pub(super) fn activation(&self) -> f64 {
        let values: Vec<f32> = self.rows.data.iter().map(|&x| silu(x) * x).collect();
        std::hint::black_box(&values);
        values.len() as f64
    }

    pub(super) fn rotate(&self) -> f64 {
        let mut rotated = self.weight.clone();
        for (row, su) in rotated.data.chunks_exact_mut(self.weight.cols).zip(&self.vectors[0]) {
            row.iter_mut().zip(&self.vectors[1]).for_each(|(x, sv)| *x = *x / su / sv);
        }
        rotate_columns(&mut rotated.data, self.weight.cols);
        rotate_rows(&mut rotated.data, self.weight.cols);
        std::hint::black_box(&rotated);
        self.weights()
    }

    pub(super) fn pack(&self) -> f64 {
        let mut packed = vec![0u16; pack::words(self.linear.bits)];
        let mut back = [0; TILE_LEN];
        let mut values = 0.0;
        for states in &self.states {
            pack::pack(states, self.linear.bits, &mut packed);
            pack::unpack(&packed, self.linear.bits, &mut back);
            values += tile::decode(Codebook::Mcg, &back)[0];
        }
        // The second read-back, into a matrix.
        let inner = self.linear.inner();
        std::hint::black_box((values, inner));
        self.weights()
    }

    pub(super) fn decode(&self) -> f64 {
        decode(&self.linear).dense.data.len() as f64
    }

    pub(super) fn install(&self) -> f64 {
        let weight = self.linear.dense_f32().transposed();
        // What a tensor and a layer's own layout make of it.
        let copies = (weight.data.clone(), Packed::transposed(&weight.data, weight.rows, weight.cols));
        std::hint::black_box(copies.1.rows());
        self.weights()
    }

    pub(super) fn load(&self) -> f64 {
        let wide = self.stored.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32());
        let loaded: Vec<f32> = wide.filter(|x| x.is_finite()).collect();
        let transposed = Matrix::new(self.weight.rows, self.weight.cols, loaded).transposed();
        std::hint::black_box(&transposed);
        self.weights()
    }

    pub(super) fn scan(&self) -> f64 {
        let mut energy = 0.0f64;
        for (row, su) in self.weight.data.chunks_exact(self.weight.cols).zip(&self.vectors[0]) {
            let sum = |(x, sv): (&f32, &f32)| f64::from(x / su / sv).powi(2);
            energy += row.iter().zip(&self.vectors[1]).map(sum).sum::<f64>();
        }
        std::hint::black_box(energy);
        self.weights()
    }

    pub(super) fn hash(&self) -> f64 {
        std::hint::black_box(sha256_hex(&self.stored));
        self.stored.len() as f64
    }

    fn part(&self, k: usize) -> Matrix<f32> {
        let data = self.covariance.data.chunks_exact(self.covariance.cols).take(k);
        Matrix::new(k, k, data.flat_map(|row| row[..k].iter().copied()).collect())
    }

    pub(super) fn factor(&self, k: usize) {
        factor(&self.part(k), &vec![f16::ONE; k], 0.025).expect("positive definite");
    }

    pub(super) fn trace(&self, k: usize) {
        trace_d(&self.part(k), &vec![f16::ONE; k], 0.025).expect("positive definite");
    }

    pub(super) fn solve(&self, k: usize) {
        let mut square = self.part(k).widened();
        let mut rhs = square.clone();
        cholesky(&mut square).expect("positive definite");
        cholesky_solve(&square, &mut rhs);
    }
}

/// Nearly normal, of variance one: sums of twelve uniforms.
pub(super) fn normal_tile(seed: u64) -> Tile {
    let mut random = SplitMix64::new(seed);
    let mut uniform = || (random.next_u64() >> 40) as f32 / (1u64 << 24) as f32;
    std::array::from_fn(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0)
}

/// One integer program of the model's size, on losses of a likely spread.
pub(super) fn allocation(tensors: usize, recipe: &Recipe) -> Result<Rate> {
    let mut random = SplitMix64::new(13);
    let mut share = || (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
    let measured: Vec<Measured> = (0..tensors)
        .map(|_| {
            let loss = 1e-3 * (0.5 + share());
            let losses = (0..recipe.candidate_bits.len()).map(|width| loss * 0.26f64.powi(width as i32));
            // A mass of some thousand rows in units of 2^-149.
            Measured { losses: losses.collect(), mass: BigUint::from((share() * 1e9) as u64) << 130 }
        })
        .collect();
    let budget = recipe.upgrades(tensors as u64)? as usize;
    let started = Instant::now();
    allocate(&measured, budget)?;
    let op = Op::Allocate;
    Ok(Rate { op, unit: op.unit(), seconds_a_unit: started.elapsed().as_secs_f64() })
}

/// Durable writing in a folder: a large file, and small ones.
/// In the folder, or in the nearest one above it where it is still to be made. Nothing is left there.
pub(super) fn disk(folder: &Path) -> Result<[Rate; 2]> {
    let absolute = std::path::absolute(folder).at(folder)?;
    let Some(existing) = absolute.ancestors().find(|folder| folder.is_dir()) else {
        return refuse("no folder above it exists").file(folder).wanted("a path to write to").err();
    };
    let path = existing.join(".walk-calibration");
    let time = |bytes: &[u8]| -> Result<f64> {
        let started = Instant::now();
        write_atomic(&path, bytes)?;
        Ok(started.elapsed().as_secs_f64())
    };
    let mut random = SplitMix64::new(5);
    let large: Vec<u8> = (0..DISK_BYTES / 8).flat_map(|_| random.next_u64().to_le_bytes()).collect();
    let write = time(&large)?;
    let mut small = 0.0;
    for _ in 0..DISK_FILES {
        small += time(b"{}\n")?;
    }
    remove_file_durably(&path)?;
    let rate = |op: Op, seconds_a_unit: f64| Rate { op, unit: op.unit(), seconds_a_unit };
    Ok([rate(Op::Write, write / DISK_BYTES as f64), rate(Op::Publish, small / DISK_FILES as f64)])
}
