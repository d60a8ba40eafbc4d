//! How fast this machine is, by trying: each kind of work of [`super::work`] for a slice of the time given.
//!
//! All threads do the same at once, each its own jobs, as the experts of a layer are worked on; what the walk does on one
//! thread while the others wait is tried on one. Sizes are the model's own up to [`LARGEST`]; the cost of a factor is
//! fitted as `a k² + b k³` to two sizes and goes from there to the model's. Caches and memory of the real sizes are not in
//! it.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use half::{bf16, f16};
use num_bigint::BigUint;
use rayon::prelude::*;
use serde::Serialize;

use super::work::{Op, Work};
use crate::calibrate::covariance::Covariance;
use crate::choose::allocation::{Measured, allocate};
use crate::choose::expert::decode;
use crate::codec::trellis::codebook::Codebook;
use crate::codec::trellis::factor::{factor, trace_d};
use crate::codec::trellis::hadamard::{BLOCK, rotate_columns, rotate_rows};
use crate::codec::trellis::linear::TrellisLinear;
use crate::codec::trellis::pack;
use crate::codec::trellis::search::{States, TILE_LEN, Tile, TileSearch};
use crate::codec::trellis::tile;
use crate::config::{Geometry, Recipe};
use crate::error::{IoContext, Result, refuse};
use crate::linalg::{Matrix, Packed, cholesky, cholesky_solve, silu};
use crate::store::atomic::{remove_file_durably, write_atomic};
use crate::store::hash::sha256_hex;
use crate::store::seed::SplitMix64;

/// No matrix is tried larger than this a side.
pub const LARGEST: usize = 1024;
/// Rows of products and sums.
const ROWS: usize = 512;
/// Bytes written to learn the disk's rate.
const DISK_BYTES: usize = 64 << 20;
/// Small files published to learn what one costs.
const DISK_FILES: usize = 16;

/// Seconds an amount takes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Rate {
    /// The kind of work.
    pub op: Op,
    /// What an amount counts.
    pub unit: &'static str,
    /// Seconds a unit, all threads at it together.
    pub seconds_a_unit: f64,
}

/// `a k² + b k³` seconds a matrix of side k, all threads together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Cubic {
    /// Of the square.
    pub square: f64,
    /// Of the cube.
    pub cube: f64,
}

impl Cubic {
    /// Through two sizes and their times; neither part is negative.
    pub fn through([(k0, t0), (k1, t1)]: [(f64, f64); 2]) -> Self {
        let cube = (t1 / k1.powi(2) - t0 / k0.powi(2)) / (k1 - k0);
        let square = t0 / k0.powi(2) - cube * k0;
        if cube < 0.0 {
            Self { square: t1 / k1.powi(2), cube: 0.0 }
        } else if square < 0.0 {
            Self { square: 0.0, cube: t1 / k1.powi(3) }
        } else {
            Self { square, cube }
        }
    }

    /// Seconds of a matrix of side k.
    pub fn seconds(&self, k: usize) -> f64 {
        let k = k as f64;
        self.square * k * k + self.cube * k * k * k
    }
}

/// A calibrated machine.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Machine {
    /// Threads it was tried on.
    pub threads: usize,
    /// The tile search that ran.
    pub tile_search: String,
    /// Seconds the calibration took.
    pub calibration_seconds: f64,
    /// All threads together.
    pub shared: Vec<Rate>,
    /// One thread while the others wait.
    pub alone: Vec<Rate>,
    /// Block LDL with its transform.
    pub factor: Cubic,
    /// tr(D).
    pub trace: Cubic,
    /// f64 solve.
    pub solve: Cubic,
    /// Whether durable writing was tried, in a folder that was given.
    pub disk_tried: bool,
}

impl Machine {
    /// Tries everything that a walk of this geometry and recipe consists of, for about `time` in all; the disk only in a
    /// `folder` that is given.
    ///
    /// # Errors
    /// What the codec or the disk says.
    pub fn calibrate(
        geometry: &Geometry,
        recipe: &Recipe,
        search: &'static dyn TileSearch,
        time: Duration,
        folder: Option<&Path>,
        done: &dyn Fn(&str),
    ) -> Result<Self> {
        let started = Instant::now();
        let (h, i) = (geometry.hidden_size.min(LARGEST), geometry.moe_intermediate_size.min(LARGEST));
        let largest = h.max(i);
        let smaller = (largest / 2).next_multiple_of(BLOCK).min(largest);
        // Even where both are one size, a second one is needed for the fit.
        let sizes = if smaller == largest { [largest, largest + BLOCK] } else { [smaller, largest] };
        let slice = time.div_f64(Self::trials(recipe) as f64);
        let bench = Bench { slice, done };
        let sample = Sample::new(h, i, sizes[1]);

        let mut shared = Vec::new();
        for &bits in &recipe.candidate_bits {
            let mut targets = vec![[0.0; TILE_LEN]; 12];
            targets.iter_mut().zip(0..).for_each(|(tile, seed)| *tile = normal_tile(seed));
            let job = || {
                let mut states: Vec<States> = vec![[0; TILE_LEN]; targets.len()];
                search.search(Codebook::Mcg, bits, &targets, &mut states).expect("finite tiles");
                (targets.len() * TILE_LEN) as f64
            };
            shared.push(bench.together(Op::Search(bits), job));
        }
        shared.push(bench.together(Op::Syrk, || sample.syrk()));
        shared.push(bench.together(Op::ProductF32, || sample.product_f32()));
        shared.push(bench.together(Op::ProductF64, || sample.product_f64()));
        shared.push(bench.together(Op::Activation, || sample.activation()));
        shared.push(bench.together(Op::Rotate, || sample.rotate()));
        shared.push(bench.together(Op::Pack, || sample.pack()));
        shared.push(bench.together(Op::Decode, || sample.decode()));
        shared.push(bench.together(Op::Load, || sample.load()));
        shared.push(bench.together(Op::Scan, || sample.scan()));
        shared.push(bench.together(Op::Hash, || sample.hash()));

        let cubic = |op: fn(usize) -> Op, job: &(dyn Fn(usize) + Sync)| {
            Cubic::through(sizes.map(|k| {
                let once = || {
                    job(k);
                    1.0
                };
                (k as f64, bench.together(op(k), once).seconds_a_unit)
            }))
        };
        let factor = cubic(Op::Factor, &|k| sample.factor(k));
        let trace = cubic(Op::Trace, &|k| sample.trace(k));
        let solve = cubic(Op::Solve, &|k| sample.solve(k));

        let mut alone = vec![
            bench.alone(Op::Install, || sample.install()),
            bench.alone(Op::Load, || sample.load()),
            bench.alone(Op::Hash, || sample.hash()),
        ];
        if recipe.fixed_bits.is_none() {
            let tensors = 3 * geometry.n_routed_experts;
            alone.push(allocation(tensors, recipe)?);
            done(&Op::Allocate.to_string());
        }
        let disk_tried = match folder {
            Some(folder) => {
                let disk = disk(folder)?;
                shared.extend(disk);
                alone.extend(disk);
                true
            }
            None => false,
        };
        Ok(Self {
            threads: rayon::current_num_threads(),
            tile_search: search.name().to_owned(),
            calibration_seconds: started.elapsed().as_secs_f64(),
            shared,
            alone,
            factor,
            trace,
            solve,
            disk_tried,
        })
    }

    /// How many kinds of work a calibration tries, each for an equal slice of its time; the disk aside.
    pub fn trials(recipe: &Recipe) -> u64 {
        // Shared rates beside the searches; two sizes of three factors; what is tried on one thread.
        (recipe.candidate_bits.len() + 9 + 2 * 3 + 3 + usize::from(recipe.fixed_bits.is_none())) as u64
    }

    /// Seconds of shared work and of work on one thread. What was not tried takes none.
    pub fn seconds(&self, shared: &Work, alone: &Work) -> f64 {
        let sum = |work: &Work, rates: &[Rate]| -> f64 {
            work.amounts().map(|(op, amount)| amount * self.seconds_a_unit(op, rates)).sum()
        };
        sum(shared, &self.shared) + sum(alone, &self.alone)
    }

    /// Seconds a unit of shared work takes.
    pub fn shared_seconds(&self, op: Op) -> f64 {
        self.seconds_a_unit(op, &self.shared)
    }

    /// Seconds a unit takes on one thread.
    pub fn alone_seconds(&self, op: Op) -> f64 {
        self.seconds_a_unit(op, &self.alone)
    }

    fn seconds_a_unit(&self, op: Op, rates: &[Rate]) -> f64 {
        match op {
            Op::Factor(k) => self.factor.seconds(k),
            Op::Trace(k) => self.trace.seconds(k),
            Op::Solve(k) => self.solve.seconds(k),
            _ => rates.iter().find(|rate| rate.op == op).map_or(0.0, |rate| rate.seconds_a_unit),
        }
    }
}

/// Tries jobs for a slice of time each.
struct Bench<'a> {
    slice: Duration,
    done: &'a dyn Fn(&str),
}

impl Bench<'_> {
    /// All threads at it, each over and over until the time is up; every one finishes at least one job.
    fn together(&self, op: Op, job: impl Fn() -> f64 + Sync) -> Rate {
        // The first touch of memory and code is not the rate.
        job();
        let (started, slice) = (Instant::now(), self.slice);
        let (amounts, finished) = (AtomicU64::new(0), AtomicU64::new(0));
        (0..rayon::current_num_threads()).into_par_iter().with_max_len(1).for_each(|_| {
            loop {
                let amount = job();
                amounts.fetch_add(amount as u64, Ordering::Relaxed);
                finished.fetch_max(started.elapsed().as_nanos() as u64, Ordering::Relaxed);
                if started.elapsed() >= slice {
                    break;
                }
            }
        });
        self.rate(op, amounts.into_inner(), finished.into_inner())
    }

    /// One thread at it.
    fn alone(&self, op: Op, job: impl Fn() -> f64) -> Rate {
        job();
        let started = Instant::now();
        let mut amount = 0.0;
        while amount == 0.0 || started.elapsed() < self.slice {
            amount += job();
        }
        self.rate(op, amount as u64, started.elapsed().as_nanos() as u64)
    }

    fn rate(&self, op: Op, amount: u64, nanoseconds: u64) -> Rate {
        (self.done)(&op.to_string());
        Rate { op, unit: op.unit(), seconds_a_unit: nanoseconds as f64 * 1e-9 / amount.max(1) as f64 }
    }
}

/// What jobs work on: seeded noise of the model's sizes, up to [`LARGEST`].
struct Sample {
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
    fn new(h: usize, i: usize, largest: usize) -> Self {
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

    fn syrk(&self) -> f64 {
        let mut sum = Covariance::new(self.rows.cols);
        sum.add(&self.rows);
        (sum.rows() * self.rows.cols * self.rows.cols) as f64
    }

    fn product_f32(&self) -> f64 {
        let out = self.rows.product(&self.weight);
        2.0 * (out.data.len() * self.weight.rows) as f64
    }

    fn product_f64(&self) -> f64 {
        let out = self.wide[0].product(&self.wide[1]);
        2.0 * (out.data.len() * self.wide[1].rows) as f64
    }

    fn activation(&self) -> f64 {
        let values: Vec<f32> = self.rows.data.iter().map(|&x| silu(x) * x).collect();
        std::hint::black_box(&values);
        values.len() as f64
    }

    fn rotate(&self) -> f64 {
        let mut rotated = self.weight.clone();
        for (row, su) in rotated.data.chunks_exact_mut(self.weight.cols).zip(&self.vectors[0]) {
            row.iter_mut().zip(&self.vectors[1]).for_each(|(x, sv)| *x = *x / su / sv);
        }
        rotate_columns(&mut rotated.data, self.weight.cols);
        rotate_rows(&mut rotated.data, self.weight.cols);
        std::hint::black_box(&rotated);
        self.weights()
    }

    fn pack(&self) -> f64 {
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

    fn decode(&self) -> f64 {
        decode(&self.linear).dense.data.len() as f64
    }

    fn install(&self) -> f64 {
        let weight = self.linear.dense_f32().transposed();
        // What a tensor and a layer's own layout make of it.
        let copies = (weight.data.clone(), Packed::transposed(&weight.data, weight.rows, weight.cols));
        std::hint::black_box(copies.1.rows());
        self.weights()
    }

    fn load(&self) -> f64 {
        let wide = self.stored.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32());
        let loaded: Vec<f32> = wide.filter(|x| x.is_finite()).collect();
        let transposed = Matrix::new(self.weight.rows, self.weight.cols, loaded).transposed();
        std::hint::black_box(&transposed);
        self.weights()
    }

    fn scan(&self) -> f64 {
        let mut energy = 0.0f64;
        for (row, su) in self.weight.data.chunks_exact(self.weight.cols).zip(&self.vectors[0]) {
            let sum = |(x, sv): (&f32, &f32)| f64::from(x / su / sv).powi(2);
            energy += row.iter().zip(&self.vectors[1]).map(sum).sum::<f64>();
        }
        std::hint::black_box(energy);
        self.weights()
    }

    fn hash(&self) -> f64 {
        std::hint::black_box(sha256_hex(&self.stored));
        self.stored.len() as f64
    }

    fn part(&self, k: usize) -> Matrix<f32> {
        let data = self.covariance.data.chunks_exact(self.covariance.cols).take(k);
        Matrix::new(k, k, data.flat_map(|row| row[..k].iter().copied()).collect())
    }

    fn factor(&self, k: usize) {
        factor(&self.part(k), &vec![f16::ONE; k], 0.025).expect("positive definite");
    }

    fn trace(&self, k: usize) {
        trace_d(&self.part(k), &vec![f16::ONE; k], 0.025).expect("positive definite");
    }

    fn solve(&self, k: usize) {
        let mut square = self.part(k).widened();
        let mut rhs = square.clone();
        cholesky(&mut square).expect("positive definite");
        cholesky_solve(&square, &mut rhs);
    }
}

/// Nearly normal, of variance one: sums of twelve uniforms.
fn normal_tile(seed: u64) -> Tile {
    let mut random = SplitMix64::new(seed);
    let mut uniform = || (random.next_u64() >> 40) as f32 / (1u64 << 24) as f32;
    std::array::from_fn(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0)
}

/// One integer program of the model's size, on losses of a likely spread.
fn allocation(tensors: usize, recipe: &Recipe) -> Result<Rate> {
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
fn disk(folder: &Path) -> Result<[Rate; 2]> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cubic_goes_through_its_two_points_and_has_no_negative_part() {
        let exact = |k: f64| 2e-9 * k * k + 3e-12 * k * k * k;
        let fitted = Cubic::through([256.0, 512.0].map(|k| (k, exact(k))));
        assert!((fitted.seconds(6144) / exact(6144.0) - 1.0).abs() < 1e-9);
        // Less than quadratic growth, and more than cubic.
        let slow = Cubic::through([(256.0, 1.0), (512.0, 3.0)]);
        assert_eq!((slow.cube, slow.seconds(512)), (0.0, 3.0));
        let fast = Cubic::through([(256.0, 1.0), (512.0, 10.0)]);
        assert_eq!((fast.square, fast.seconds(512)), (0.0, 10.0));
    }

    #[test]
    fn what_was_not_tried_takes_no_time_and_the_rest_adds_up() {
        let rate = |op: Op, seconds_a_unit: f64| Rate { op, unit: op.unit(), seconds_a_unit };
        let machine = Machine {
            threads: 1,
            tile_search: "scalar".to_owned(),
            calibration_seconds: 0.0,
            shared: vec![rate(Op::Search(3), 2.0), rate(Op::Hash, 1.0)],
            alone: vec![rate(Op::Hash, 8.0)],
            factor: Cubic { square: 0.0, cube: 1.0 },
            trace: Cubic::default(),
            solve: Cubic::default(),
            disk_tried: false,
        };
        let (mut shared, mut alone) = (Work::default(), Work::default());
        shared.add(Op::Search(3), 10.0);
        shared.add(Op::Factor(2), 3.0);
        shared.add(Op::Publish, 7.0);
        alone.add(Op::Hash, 2.0);
        assert_eq!(machine.seconds(&shared, &alone), 20.0 + 24.0 + 16.0);
    }
}
