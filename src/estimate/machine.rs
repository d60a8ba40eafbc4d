//! How fast this machine is, by trying: each kind of work of [`super::work`] for a slice of the time given.
//!
//! All threads do the same at once, each its own jobs, as the experts of a layer are worked on; what the walk does on one
//! thread while the others wait is tried on one. Sizes are the model's own up to [`LARGEST`]; the cost of a factor is
//! fitted as `a k² + b k³` to two sizes and goes from there to the model's. Caches and memory of the real sizes are not in
//! it.

mod sample;

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rayon::prelude::*;
use serde::Serialize;

use self::sample::{Sample, allocation, disk, normal_tile};
use super::work::{Op, Work};
use crate::codec::trellis::codebook::Codebook;
use crate::codec::trellis::hadamard::BLOCK;
use crate::codec::trellis::search::{States, TILE_LEN, TileSearch};
use crate::config::{Geometry, Recipe};
use crate::error::Result;

/// No matrix is tried larger than this a side.
pub const LARGEST: usize = 1024;

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
    /// Share of the threads' time that the calibration had to itself, where the system tells: well under 1 means that
    /// other work was going on, and that all times come out too long by about its inverse.
    pub processor_share: Option<f64>,
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
        let (trial, before) = (Instant::now(), processor_seconds());

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

        let share = |before: f64| {
            let had = processor_seconds()? - before;
            Some(had / (trial.elapsed().as_secs_f64() * rayon::current_num_threads() as f64))
        };
        let processor_share = before.and_then(share);

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
            processor_share,
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

/// Processor time of this process so far: user and system, in ticks of 10 ms.
fn processor_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The name may hold spaces; it ends with the last bracket.
    let (_, fields) = stat.rsplit_once(')')?;
    let tick = |field: usize| fields.split_whitespace().nth(field)?.parse::<f64>().ok();
    Some((tick(11)? + tick(12)?) / 100.0)
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
    #[cfg(target_os = "linux")]
    fn processor_time_moves_on() {
        let before = processor_seconds().unwrap();
        let started = Instant::now();
        while processor_seconds().unwrap() == before {
            assert!(started.elapsed() < Duration::from_secs(60), "{before} s");
        }
    }

    #[test]
    fn what_was_not_tried_takes_no_time_and_the_rest_adds_up() {
        let rate = |op: Op, seconds_a_unit: f64| Rate { op, unit: op.unit(), seconds_a_unit };
        let machine = Machine {
            threads: 1,
            tile_search: "scalar".to_owned(),
            calibration_seconds: 0.0,
            processor_share: None,
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
