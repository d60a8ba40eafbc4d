//! Seeded numbers, made in chunks that know nothing of each other.

use std::io::{self, Write};

use half::{bf16, f16};
use rayon::prelude::*;

use crate::store::seed::{SplitMix64, derive_seed};

/// Values a generator is seeded for. Chunks are made in parallel and written in order.
const CHUNK: usize = 1 << 18;
/// Deviation of the sum of four 16-bit uniform integers: 2^16 / sqrt(3).
const SUM_DEVIATION: f32 = 37837.23;

/// What a tensor's values are spread around, and how far.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Noise {
    /// Mean.
    pub centre: f32,
    /// Standard deviation. No value is further from the mean than 3.47 times this.
    pub deviation: f32,
}

impl Noise {
    /// The next value: the sum of four uniform integers, which is near enough to a normal one and takes no function that
    /// two machines could round differently.
    pub fn draw(self, random: &mut SplitMix64) -> f32 {
        let word = random.next_u64();
        let sum: i32 = (0..4).map(|part| (word >> (16 * part)) as u16 as i32).sum();
        self.centre + self.deviation * ((sum - 2 * 65535) as f32 / SUM_DEVIATION)
    }
}

/// Element types that noise is written as.
#[derive(Debug, Clone, Copy)]
pub enum Width {
    /// BF16.
    Bf16,
    /// F32.
    F32,
}

/// The generator of a chunk of a tensor.
pub fn generator(seed: u64, name: &str, chunk: usize) -> SplitMix64 {
    SplitMix64::new(derive_seed(&["synthetic".into(), seed.into(), name.into(), chunk.into()]))
}

/// Writes `count` values of the tensor `name`, little endian.
///
/// # Errors
/// What the sink says.
pub fn write_values(
    (seed, name): (u64, &str),
    count: usize,
    noise: Noise,
    width: Width,
    sink: &mut dyn Write,
) -> io::Result<()> {
    chunked(count, sink, |chunk, length| {
        let mut random = generator(seed, name, chunk);
        let mut values = (0..length).map(|_| noise.draw(&mut random));
        match width {
            Width::Bf16 => values.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
            Width::F32 => values.by_ref().flat_map(f32::to_le_bytes).collect(),
        }
    })
}

/// Writes `count` uniform 16-bit words of the tensor `name`, little endian: every one is part of a valid trellis.
///
/// # Errors
/// What the sink says.
pub fn write_words((seed, name): (u64, &str), count: usize, sink: &mut dyn Write) -> io::Result<()> {
    chunked(count, sink, |chunk, length| {
        words(seed, name, chunk, length).flat_map(u16::to_le_bytes).collect()
    })
}

/// The words that [`write_words`] writes.
pub fn all_words((seed, name): (u64, &str), count: usize) -> Vec<u16> {
    let mut all = Vec::with_capacity(count);
    for chunk in 0..count.div_ceil(CHUNK) {
        all.extend(words(seed, name, chunk, CHUNK.min(count - chunk * CHUNK)));
    }
    all
}

fn words(seed: u64, name: &str, chunk: usize, length: usize) -> impl Iterator<Item = u16> {
    let mut random = generator(seed, name, chunk);
    let four = move |_| {
        let word = random.next_u64();
        [0, 16, 32, 48].map(|shift| (word >> shift) as u16)
    };
    (0..length.div_ceil(4)).flat_map(four).take(length)
}

/// A rotation vector of the tensor `name`: seeded signs, magnitudes within a quarter of `magnitude`.
pub fn vector((seed, name): (u64, &str), length: usize, magnitude: f32) -> Vec<f16> {
    let mut random = generator(seed, name, 0);
    let mut entry = || {
        let sign = random.next_sign();
        let spread = (random.next_u64() >> 40) as f32 / (1 << 24) as f32 - 0.5;
        f16::from_f32(sign * magnitude * (1.0 + spread / 2.0))
    };
    (0..length).map(|_| entry()).collect()
}

/// Some chunks are held at a time, whatever the tensor's size.
fn chunked(
    count: usize,
    sink: &mut dyn Write,
    make: impl Fn(usize, usize) -> Vec<u8> + Sync,
) -> io::Result<()> {
    let chunks = count.div_ceil(CHUNK);
    let together = 4 * rayon::current_num_threads();
    for start in (0..chunks).step_by(together) {
        let made: Vec<Vec<u8>> = (start..chunks.min(start + together))
            .into_par_iter()
            .map(|chunk| make(chunk, CHUNK.min(count - chunk * CHUNK)))
            .collect();
        made.iter().try_for_each(|bytes| sink.write_all(bytes))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_has_the_mean_and_the_deviation_it_says() {
        let mut random = SplitMix64::new(7);
        let noise = Noise { centre: 0.5, deviation: 2.0 };
        let values: Vec<f64> = (0..1 << 18).map(|_| f64::from(noise.draw(&mut random))).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let deviation = (values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / values.len() as f64).sqrt();
        // Five times the standard error of each.
        assert!((mean - 0.5).abs() < 0.02 && (deviation - 2.0).abs() < 0.014, "{mean} {deviation}");
        assert!(values.iter().all(|x| (x - 0.5).abs() < 3.47 * 2.0));
    }

    #[test]
    fn threads_change_nothing_and_names_and_seeds_do() {
        // More chunks than are made together, the last one short.
        let count = 9 * CHUNK + 5;
        let made = |threads: usize, seed: u64, name: &str| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let noise = Noise { centre: 0.0, deviation: 1.0 };
            let mut bytes = Vec::new();
            pool.install(|| write_values((seed, name), count, noise, Width::Bf16, &mut bytes)).unwrap();
            bytes
        };
        let one = made(1, 3, "a");
        assert_eq!(one.len(), 2 * count);
        assert!(one == made(2, 3, "a"));
        assert!(one != made(2, 4, "a") && one != made(2, 3, "b"));
        assert!(one[..2 * CHUNK] != one[2 * CHUNK..4 * CHUNK]);
    }

    #[test]
    fn words_are_those_that_are_written() {
        let count = 2 * CHUNK + 3;
        let mut bytes = Vec::new();
        write_words((1, "t"), count, &mut bytes).unwrap();
        let words: Vec<u8> = all_words((1, "t"), count).into_iter().flat_map(u16::to_le_bytes).collect();
        assert_eq!(bytes.len(), 2 * count);
        assert!(bytes == words);
    }

    #[test]
    fn vectors_are_signs_of_like_magnitude() {
        let vector = vector((1, "v"), 512, 0.25);
        assert!(vector.iter().all(|x| (0.18..0.32).contains(&x.to_f32().abs())));
        let negative = vector.iter().filter(|x| x.is_sign_negative()).count();
        assert!((200..312).contains(&negative), "{negative}");
    }
}
