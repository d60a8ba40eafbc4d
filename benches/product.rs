//! Speed of the matrix product, per engine.
//!
//! `cargo bench --bench product [-- THREADS]`, one thread unless told. Prints GFLOP/s (best of eight samples) of
//! `matmul_f32` on every engine of this machine, of `Packed::multiply` (packed beforehand) and of `matmul_f64` on the
//! best; answers are held to those of the portable engine. Lines that begin with `csv,` repeat the table for keeping.

use std::hint::black_box;
use std::time::Instant;
use walk::linalg::{Engine, Packed, View, engines, matmul_f32_with, matmul_f64};

/// `m, n, k`: layers of a small model, one large, attention scores and values of a block of queries, and the narrow and
/// the flat.
const SHAPES: [(usize, usize, usize); 11] = [
    (1024, 256, 256),
    (1024, 768, 256),
    (64, 256, 256),
    (2048, 2048, 512),
    (128, 128, 48),
    (128, 1024, 48),
    (128, 48, 1024),
    (1024, 80, 64),
    (1024, 8, 256),
    (16, 768, 128),
    (1, 256, 256),
];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // `cargo test --all-targets` runs this too, without `--bench`: enough then to see that it works.
    let tiny = !arguments.iter().any(|a| a == "--bench") || arguments.iter().any(|a| a == "--test");
    let threads = arguments.iter().find_map(|a| a.parse().ok()).unwrap_or(1);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool of threads");
    pool.install(|| {
        let names: Vec<String> = engines().iter().map(|engine| format!("{engine:?}")).collect();
        println!("{threads} threads, GFLOP/s\n{:<14} {:>9} packed f64", "m x n x k", names.join(" "));
        for (index, shape) in SHAPES.into_iter().enumerate() {
            if !tiny || index == 4 {
                measure(shape, threads, if tiny { 0.0 } else { 0.02 });
            }
        }
    });
}

fn measure((m, n, k): (usize, usize, usize), threads: usize, seconds: f64) {
    let (a, b) = (noise(m * k, 1), noise(k * n, 2));
    let (rows, columns) = (View::rows(&a, k), View::rows(&b, n));
    let work = 2.0 * (m * n * k) as f64;
    let mut rates = Vec::new();
    let mut expected = vec![0f32; m * n];
    matmul_f32_with(Engine::Portable, (m, n, k), rows, columns, &mut expected, n);
    for engine in engines() {
        let mut c = vec![0f32; m * n];
        matmul_f32_with(engine, (m, n, k), rows, columns, &mut c, n);
        assert_eq!(c, expected, "{engine:?}");
        // A library call for each multiply-add is not worth the eight samples.
        let seconds = if engine == Engine::Portable { 0.0 } else { seconds };
        rates.push((
            format!("{engine:?}"),
            rate(work, seconds, || {
                matmul_f32_with(engine, (m, n, k), rows, columns, black_box(&mut c), n);
            }),
        ));
    }
    let packed = Packed::plain(&b, k, n);
    assert_eq!(packed.multiply(&a).expect("whole rows"), expected, "packed");
    rates.push(("packed".into(), rate(work, seconds, || drop(black_box(packed.multiply(black_box(&a)))))));
    let wide = |values: &[f32]| values.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
    let (a, b, mut c) = (wide(&a), wide(&b), vec![0f64; m * n]);
    rates.push((
        "f64".into(),
        rate(work, seconds, || {
            matmul_f64((m, n, k), View::rows(&a, k), View::rows(&b, n), black_box(&mut c), n);
        }),
    ));
    print!("{:<14}", format!("{m}x{n}x{k}"));
    rates.iter().for_each(|(_, rate)| print!(" {rate:>7.1}"));
    println!();
    rates.iter().for_each(|(name, rate)| println!("csv,{threads},{m}x{n}x{k},{name},{rate:.1}"));
}

/// Work a nanosecond: the best of eight samples of `seconds`, or one call.
fn rate(work: f64, seconds: f64, mut call: impl FnMut()) -> f64 {
    let mut time = |calls: usize| {
        let start = Instant::now();
        (0..calls).for_each(|_| call());
        start.elapsed().as_secs_f64() / calls as f64
    };
    let first = time(1);
    if seconds == 0.0 {
        return work / first / 1e9;
    }
    let calls = (seconds / time(1)).ceil() as usize;
    work / (0..8).map(|_| time(calls)).fold(first, f64::min) / 1e9
}

/// Values in -0.5..0.5.
fn noise(count: usize, mut seed: u64) -> Vec<f32> {
    let next = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    std::iter::repeat_with(next).take(count).collect()
}
