//! Speed of KAIJU1's searches and row decoder, and what the lattice is worth.
//!
//! `cargo bench --bench kaiju_search [-- ROUNDS]`, one thread. Prints microseconds a block (least over the rounds) of every
//! engine for the nearest point and for the best representable points of both codes, without a bound as a search alone
//! pays; the ratio to the scalar reference; the decoder's weights a second; the normalised second moment of the lattice
//! over a million points; the mean square error of both codes on normal weights at one scale. Answers of every engine are
//! held to the scalar engine's. Lines that begin with `csv,` repeat the table for keeping.

use std::hint::black_box;
use std::time::Instant;
use walk::codec::kaiju::region::Region;
use walk::codec::kaiju::search::{Block, Coset, PointSearch, available_searches, best_point, best_search};
use walk::codec::kaiju::{CodeWidth, Importance, Settings, encode};
use walk::linalg::Matrix;
use walk::store::seed::SplitMix64;

/// A region, its name, and the rms of targets, in integer lattice units, that its code is used at.
const CASES: [(Region, &str, f32); 3] =
    [(Region::Lattice, "lattice", 3.9), (Region::P56, "p56", 3.4), (Region::P64, "p64", 3.9)];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // `cargo test --all-targets` runs this too, without `--bench`: enough then to see that it works.
    let tiny = !arguments.iter().any(|a| a == "--bench") || arguments.iter().any(|a| a == "--test");
    let rounds = if tiny { 1 } else { arguments.iter().find_map(|a| a.parse().ok()).unwrap_or(40) };
    speeds(rounds, if tiny { 4 } else { 256 });
    decoder(rounds, if tiny { (4, 1536) } else { (64, 6144) });
    moments(if tiny { 2_000 } else { 1_000_000 });
}

fn speeds(rounds: usize, blocks: usize) {
    println!("{blocks} blocks a sample, {rounds} rounds");
    println!("{:<10} {:<8} {:>10} {:>10}", "engine", "points", "us/block", "x scalar");
    let engines = available_searches();
    for (region, name, rms) in CASES {
        let targets = normal_blocks(7, blocks, rms);
        let mut least = vec![f64::INFINITY; engines.len()];
        let mut found: Vec<Vec<Option<Coset>>> = vec![Vec::new(); engines.len()];
        for round in 0..rounds {
            for (index, engine) in engines.iter().enumerate() {
                if engine.name() == "scalar" && round >= 3 {
                    continue;
                }
                let started = Instant::now();
                found[index] = search_all(*engine, region, &targets);
                least[index] = least[index].min(started.elapsed().as_secs_f64() * 1e6 / blocks as f64);
            }
        }
        for (index, engine) in engines.iter().enumerate() {
            assert_eq!(found[index], found[0], "{} on {name}", engine.name());
            let ratio = least[0] / least[index];
            println!("{:<10} {name:<8} {:>10.3} {ratio:>10.1}", engine.name(), least[index]);
            println!("csv,{},{name},{:.4},{ratio:.2}", engine.name(), least[index]);
        }
    }
    println!("answers of every engine equal the scalar ones");
}

fn search_all(engine: &dyn PointSearch, region: Region, targets: &[Block]) -> Vec<Option<Coset>> {
    let search = |target: &Block| engine.coset(region, black_box(target), &[1.0; 24], f32::INFINITY);
    targets.iter().map(search).collect()
}

fn decoder(rounds: usize, (rows, cols): (usize, usize)) {
    for (name, settings) in [("v1", Settings::v1()), ("v2", Settings::v2())] {
        let weight = Matrix::new(rows, cols, normal(5, rows * cols));
        let tensor =
            encode(&weight, Importance::Diagonal(&vec![1.0; cols]), &settings).expect("normal weights");
        let mut out = vec![0.0; cols];
        let mut least = f64::INFINITY;
        for _ in 0..rounds.max(2) {
            let started = Instant::now();
            for row in 0..rows {
                tensor.dequantize_row(row, &mut out);
                black_box(&out);
            }
            least = least.min(started.elapsed().as_secs_f64());
        }
        let rate = (rows * cols) as f64 / least / 1e9;
        println!("decoder    {name:<8} {rate:>10.3} Gweight/s a core, {rows} rows of {cols}");
        println!("csv,decoder,{name},{rate:.4},");
    }
}

fn moments(points: usize) {
    let engine = best_search();
    // Uniform over a fundamental region of a sublattice, so uniform over the Voronoi cell once the nearest point is taken
    // away: (8 Z)^24 lies in the lattice. A cell has a volume of 1 in true scale, where x / sqrt 8 is a point.
    let mut random = SplitMix64::new(11);
    let mut uniform = || ((random.next_u64() >> 40) as f64 / (1 << 24) as f64 * 8.0) as f32;
    let (mut sum, mut square) = (0.0, 0.0);
    for _ in 0..points {
        let target: Block = std::array::from_fn(|_| uniform());
        let apart = error(&target, &best_point(engine, Region::Lattice, &target, &[1.0; 24]).coordinates());
        let moment = apart / 8.0 / 24.0;
        sum += moment;
        square += moment * moment;
    }
    let mean = sum / points as f64;
    let deviation = ((square / points as f64 - mean * mean) / points as f64).sqrt();
    println!("normalised second moment {mean:.6} +- {deviation:.6} over {points} points (0.065754 wanted)");
    for (width, rms) in [(CodeWidth::P56, 3.4f32), (CodeWidth::P64, 4.2)] {
        let blocks = normal_blocks(13, points / 24 + 1, rms);
        let errors: f64 = blocks
            .iter()
            .map(|target| {
                error(target, &best_point(engine, width.region(), target, &[1.0; 24]).coordinates())
            })
            .sum();
        let error = errors / (blocks.len() * 24) as f64 / f64::from(rms * rms);
        println!("p{} at s = {rms}: mean square error {error:.5} on N(0, 1)", width.bits());
    }
}

fn error(target: &Block, x: &[i32; 24]) -> f64 {
    target.iter().zip(x).map(|(&y, &x)| (f64::from(y) - f64::from(x)).powi(2)).sum()
}

fn normal_blocks(seed: u64, count: usize, rms: f32) -> Vec<Block> {
    let values: Vec<f32> = normal(seed, 24 * count).into_iter().map(|x| x * rms).collect();
    values.as_chunks().0.to_vec()
}

/// Normal numbers of variance one (Box and Muller).
fn normal(seed: u64, count: usize) -> Vec<f32> {
    let mut random = SplitMix64::new(seed);
    let mut uniform = || ((random.next_u64() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    (0..count)
        .map(|_| ((-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()) as f32)
        .collect()
}
