//! The only randomness of this crate: SplitMix64, seeded by SHA-256 of what the numbers are for.
//!
//! A seed depends on its parts alone, so neither scheduling nor the order of draws can change a number. Generators of
//! other crates are never used for anything that reaches bytes: they may change between versions.
//!
//! Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), with the constants of
//! the public-domain `splitmix64.c` by Vigna.

use serde::{Serialize, Serializer};

use super::canonical_json::{MAX_INTEGER, canonical};
use super::hash::sha256;

/// One element of the array a seed is derived from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SeedPart<'a> {
    /// A word, such as a role.
    Text(&'a str),
    /// A number, such as a layer; beyond 2^53 it stands in the array as a decimal string.
    Number(u64),
}

impl<'a> From<&'a str> for SeedPart<'a> {
    fn from(text: &'a str) -> Self {
        Self::Text(text)
    }
}

impl From<usize> for SeedPart<'_> {
    fn from(number: usize) -> Self {
        Self::Number(number as u64)
    }
}

impl From<u64> for SeedPart<'_> {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

impl From<u32> for SeedPart<'_> {
    fn from(number: u32) -> Self {
        Self::Number(number.into())
    }
}

impl Serialize for SeedPart<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match *self {
            Self::Text(text) => serializer.serialize_str(text),
            Self::Number(number) if number > MAX_INTEGER => serializer.collect_str(&number),
            Self::Number(number) => serializer.serialize_u64(number),
        }
    }
}

/// First 8 bytes, little endian, of the SHA-256 of the canonical JSON array of `parts`.
#[must_use]
pub fn derive_seed(parts: &[SeedPart<'_>]) -> u64 {
    let bytes = canonical(parts).expect("texts and integers up to 2^53 always have a canonical form");
    let digest = sha256(&bytes);
    u64::from_le_bytes(std::array::from_fn(|i| digest[i]))
}

/// The seed of a draw: `["walk", recipe_version, layer, expert or "shared", role, draw]`. `expert` is `None` for what
/// all experts of a layer share.
#[must_use]
pub fn draw_seed(recipe_version: &str, layer: usize, expert: Option<usize>, role: &str, draw: u32) -> u64 {
    let expert = expert.map_or(SeedPart::Text("shared"), SeedPart::from);
    derive_seed(&["walk".into(), recipe_version.into(), layer.into(), expert, role.into(), draw.into()])
}

/// The SplitMix64 generator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SplitMix64 {
    state: u64,
}

impl SplitMix64 {
    /// Starts from `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A uniform integer below `bound` (at least 1), without bias: outputs in the incomplete last stretch of the
    /// 64-bit range are drawn again.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "no integer is below 0");
        let reject_below = bound.wrapping_neg() % bound;
        loop {
            let value = self.next_u64();
            if value >= reject_below {
                return value % bound;
            }
        }
    }

    /// +1 or -1: the top bit of one output, 1 meaning minus.
    pub fn next_sign(&mut self) -> f32 {
        if self.next_u64() >> 63 == 1 { -1.0 } else { 1.0 }
    }
}

/// A Rademacher vector of length `n`: entry `i` is -1 where the top bit of output `i` of SplitMix64 is 1, else +1.
#[must_use]
pub fn signs(seed: u64, n: usize) -> Vec<f32> {
    let mut generator = SplitMix64::new(seed);
    (0..n).map(|_| generator.next_sign()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::hash::sha256_hex;

    #[test]
    fn the_generator_gives_the_published_numbers() {
        let mut generator = SplitMix64::new(1_234_567);
        let got: Vec<u64> = (0..5).map(|_| generator.next_u64()).collect();
        assert_eq!(
            got,
            [
                6457827717110365317,
                3203168211198807973,
                9817491932198370423,
                4593380528125082431,
                16408922859458223821
            ]
        );
    }

    #[test]
    fn a_seed_is_the_head_of_the_hash_of_the_canonical_array() {
        let seed = draw_seed("v", 3, None, "gate_up_suh", 0);
        let hash = sha256_hex(br#"["walk","v",3,"shared","gate_up_suh",0]"#);
        let head: String = seed.to_le_bytes().iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hash[..16], head);
        assert_ne!(seed, draw_seed("v", 3, Some(0), "gate_up_suh", 0));
        assert_eq!(
            derive_seed(&[u64::MAX.into()]),
            derive_seed(&["18446744073709551615".into()]),
            "beyond 2^53 a number is its decimal string"
        );
    }

    #[test]
    fn a_set_top_bit_is_minus() {
        let mut generator = SplitMix64::new(7);
        for sign in signs(7, 1000) {
            assert_eq!(sign, if generator.next_u64() & (1 << 63) != 0 { -1.0 } else { 1.0 });
        }
        let sum: f32 = signs(1, 100_000).iter().sum();
        assert!(sum.abs() < 1500.0, "{sum} is within five standard deviations of an even coin");
    }

    #[test]
    fn below_stays_below_and_reaches_everything() {
        let mut generator = SplitMix64::new(0);
        let mut seen = [0; 7];
        for _ in 0..700 {
            seen[generator.below(7) as usize] += 1;
        }
        assert!(seen.iter().all(|&n| n > 50), "{seen:?}");
        assert_eq!(generator.below(1), 0);
    }
}
