//! Speed of the tile search, against the least a core could take.
//!
//! `cargo bench --bench trellis_search [-- ROUNDS]`, one thread. Prints microseconds a weight (least over the rounds) of
//! every engine of this machine at 2 to 6 bits, and on AVX512-FP16 the ratio to the floor: a bare stream of subtract,
//! multiply-add and minimum on registers, of as many vectors as two passes of 65536 transitions take. Floor and kernels
//! take turns within each round, so that a change of clock speed meets both. Answers are held to the scalar engine's.
//! Lines that begin with `csv,` repeat the table for keeping.

use std::hint::black_box;
use std::time::Instant;
use walk::codec::trellis::codebook::Codebook;
use walk::codec::trellis::search::{States, TILE_LEN, Tile, TileSearch, available_searches};

const BITS: std::ops::RangeInclusive<u32> = 2..=6;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // `cargo test --all-targets` runs this too, without `--bench`: enough then to see that it works.
    let tiny = !arguments.iter().any(|a| a == "--bench") || arguments.iter().any(|a| a == "--test");
    let rounds = if tiny { 1 } else { arguments.iter().find_map(|a| a.parse().ok()).unwrap_or(200) };
    // Four tiles are what a kernel takes at once: a sample short enough to be spared by other programs now and then.
    let tiles: Vec<Tile> = (0..if tiny { 1 } else { 4 }).map(tile).collect();

    println!("{} tiles a sample, {rounds} rounds, codebook mcg", tiles.len());
    println!("{:<12} {:>4} {:>12} {:>9} {:>8}", "engine", "bits", "us/weight", "x floor", "mse");
    let engines = available_searches();
    let mut floor = f64::INFINITY;
    let mut least = vec![[f64::INFINITY; 9]; engines.len()];
    let mut found = vec![vec![vec![[0; TILE_LEN]; tiles.len()]; 9]; engines.len()];
    for round in 0..rounds {
        for bits in BITS {
            floor = floor.min(floor_microseconds(if tiny { 16 } else { 512 }).unwrap_or(f64::INFINITY));
            for (index, engine) in engines.iter().enumerate() {
                // The others take one tile at a time, and are far from any limit that many more looks would show.
                let alone = engine.name() != "avx512-fp16";
                if alone && round >= 20 {
                    continue;
                }
                let sample =
                    if alone { round % tiles.len()..round % tiles.len() + 1 } else { 0..tiles.len() };
                let states = &mut found[index][bits as usize][sample.clone()];
                let took = microseconds(*engine, bits, &tiles[sample], states);
                least[index][bits as usize] = least[index][bits as usize].min(took);
            }
        }
    }
    if floor.is_finite() {
        println!("{:<12} {:>4} {floor:>12.3}", "floor", "");
        println!("csv,floor,,{floor:.4},1,");
    }
    for (index, engine) in engines.iter().enumerate() {
        for bits in BITS {
            let states = &found[index][bits as usize];
            assert_eq!(*states, found[0][bits as usize], "{} at {bits} bits", engine.name());
            let error = mse(&tiles, states);
            let took = least[index][bits as usize];
            let ratio = took / floor;
            println!("{:<12} {bits:>4} {took:>12.3} {ratio:>9.2} {error:>8.5}", engine.name());
            println!("csv,{},{bits},{took:.4},{ratio:.3},{error:.6}", engine.name());
        }
    }
    println!("answers of every engine equal the scalar ones");
}

fn microseconds(engine: &dyn TileSearch, bits: u32, tiles: &[Tile], states: &mut [States]) -> f64 {
    let start = Instant::now();
    engine.search(Codebook::Mcg, bits, black_box(tiles), states).expect("finite tiles");
    start.elapsed().as_secs_f64() * 1e6 / (tiles.len() * TILE_LEN) as f64
}

fn mse(tiles: &[Tile], states: &[States]) -> f64 {
    let values = Codebook::Mcg.values();
    let pairs = tiles.iter().flatten().zip(states.iter().flatten());
    let squares: f64 = pairs.map(|(w, s)| f64::from(w - values[usize::from(*s)]).powi(2)).sum();
    squares / (tiles.len() * TILE_LEN) as f64
}

/// Nearly normal, of variance one: sums of twelve uniforms from SplitMix64.
fn tile(seed: u64) -> Tile {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut uniform = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) >> 40) as f32 / (1 << 24) as f32
    };
    std::array::from_fn(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0)
}

/// Microseconds that the vector operations of one weight take on registers alone; none without the instructions.
fn floor_microseconds(weights: u32) -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512fp16") {
        let start = Instant::now();
        // SAFETY: the instructions are there.
        unsafe { floor::stream(weights) };
        return Some(start.elapsed().as_secs_f64() * 1e6 / f64::from(weights));
    }
    let _ = weights;
    None
}

#[cfg(target_arch = "x86_64")]
mod floor {
    use std::arch::asm;

    /// Two passes of 65536 transitions, 32 a vector.
    const VECTORS: u32 = 2 * 65536 / 32;
    /// Independent minima in flight: enough to hide their latency.
    const CHAINS: u32 = 8;

    /// # Safety
    /// The machine has AVX512-FP16.
    #[target_feature(enable = "avx512fp16,avx512bw")]
    pub(super) unsafe fn stream(weights: u32) {
        // SAFETY: registers only; all that are written are named. In assembly, for a compiler would take the constant
        // operations out of the loop.
        unsafe {
            asm!(
                "mov {scratch:e}, 0x3c00",
                "vpbroadcastw zmm29, {scratch:e}",
                "mov {scratch:e}, 0x3800",
                "vpbroadcastw zmm30, {scratch:e}",
                "vpxorq zmm31, zmm31, zmm31",
                "2:",
                "vsubph zmm0, zmm29, zmm30",
                "vfmadd213ph zmm0, zmm0, zmm31",
                "vminph zmm8, zmm8, zmm0",
                "vsubph zmm1, zmm29, zmm30",
                "vfmadd213ph zmm1, zmm1, zmm31",
                "vminph zmm9, zmm9, zmm1",
                "vsubph zmm2, zmm29, zmm30",
                "vfmadd213ph zmm2, zmm2, zmm31",
                "vminph zmm10, zmm10, zmm2",
                "vsubph zmm3, zmm29, zmm30",
                "vfmadd213ph zmm3, zmm3, zmm31",
                "vminph zmm11, zmm11, zmm3",
                "vsubph zmm4, zmm29, zmm30",
                "vfmadd213ph zmm4, zmm4, zmm31",
                "vminph zmm12, zmm12, zmm4",
                "vsubph zmm5, zmm29, zmm30",
                "vfmadd213ph zmm5, zmm5, zmm31",
                "vminph zmm13, zmm13, zmm5",
                "vsubph zmm6, zmm29, zmm30",
                "vfmadd213ph zmm6, zmm6, zmm31",
                "vminph zmm14, zmm14, zmm6",
                "vsubph zmm7, zmm29, zmm30",
                "vfmadd213ph zmm7, zmm7, zmm31",
                "vminph zmm15, zmm15, zmm7",
                "dec {count:e}",
                "jnz 2b",
                scratch = out(reg) _,
                count = inout(reg) weights * (VECTORS / CHAINS) => _,
                out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _,
                out("zmm4") _, out("zmm5") _, out("zmm6") _, out("zmm7") _,
                out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _,
                out("zmm12") _, out("zmm13") _, out("zmm14") _, out("zmm15") _,
                out("zmm29") _, out("zmm30") _, out("zmm31") _,
                options(nomem, nostack),
            );
        }
    }
}
