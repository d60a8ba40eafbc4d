//! Interleaved rotary positions.
//!
//! Pairs (0,1), (2,3), ... of a head are rotated by `position · theta^(-2j/width)`; the result holds all first
//! components, then all second ones, as Transformers lays it out. Queries and keys are laid out alike, so scores do not
//! see it. The width is always `qk_rope_head_dim`: for attention it is a whole rotary part, for the indexer the first
//! values of a wider head. `head_dim` of the config plays no part.
//!
//! Source: `GlmMoeDsaRotaryEmbedding` and the YaRN initialisation of Transformers 5.24; frequencies and angles are f32
//! there and here (for large positions the rounding of the angle is part of the model), sines and cosines of the
//! rounded angle are computed in f64 and rounded once.

use crate::config::geometry::Geometry;
use crate::config::rope::{Rope, Yarn};

/// Frequencies of one model.
#[derive(Debug, Clone)]
pub struct RotaryEmbedding {
    inverse_frequencies: Vec<f32>,
    attention_factor: f64,
}

/// Cosines and sines of a prompt's positions, `[positions, width / 2]` each.
#[derive(Debug, Clone)]
pub struct Angles {
    pairs: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RotaryEmbedding {
    /// Frequencies for `qk_rope_head_dim` values.
    pub fn new(geometry: &Geometry) -> Self {
        Self::with_width(&geometry.rope, geometry.qk_rope_head_dim)
    }

    fn with_width(rope: &Rope, width: usize) -> Self {
        let exponent = |pair: usize| (2 * pair) as f32 / width as f32;
        let power = |pair: usize| rope.theta.powf(f64::from(exponent(pair))) as f32;
        let plain: Vec<f32> = (0..width / 2).map(|pair| 1.0 / power(pair)).collect();
        match &rope.yarn {
            None => Self { inverse_frequencies: plain, attention_factor: 1.0 },
            Some(yarn) => Self {
                inverse_frequencies: stretched(&plain, yarn, rope.theta, width),
                attention_factor: yarn.attention_factor.unwrap_or_else(|| match yarn.mscale {
                    Some(mscale) => yarn.get_mscale(mscale) / yarn.get_mscale(yarn.mscale_all_dim),
                    None => yarn.get_mscale(1.0),
                }),
            },
        }
    }

    /// Cosines and sines for the positions of a prompt.
    pub fn angles(&self, positions: &[u32]) -> Angles {
        let pairs = self.inverse_frequencies.len();
        let mut angles = Angles { pairs, cos: Vec::with_capacity(positions.len() * pairs), sin: Vec::new() };
        angles.sin.reserve(positions.len() * pairs);
        for position in positions {
            for frequency in &self.inverse_frequencies {
                let (sin, cos) = f64::from(*position as f32 * frequency).sin_cos();
                angles.cos.push((cos * self.attention_factor) as f32);
                angles.sin.push((sin * self.attention_factor) as f32);
            }
        }
        angles
    }
}

/// YaRN's mixture of kept and divided frequencies.
fn stretched(plain: &[f32], yarn: &Yarn, theta: f64, width: usize) -> Vec<f32> {
    let dimension = |rotations: f64| {
        let turns = yarn.original_max_position_embeddings as f64 / (rotations * std::f64::consts::TAU);
        width as f64 * turns.ln() / (2.0 * theta.ln())
    };
    let (mut low, mut high) = (dimension(yarn.beta_fast), dimension(yarn.beta_slow));
    if yarn.truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    let (low, mut high) = (low.max(0.0), high.min((width - 1) as f64));
    if low == high {
        high += 0.001;
    }
    let mixed = plain.iter().enumerate().map(|(pair, frequency)| {
        let divided = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0) as f32;
        frequency / yarn.factor as f32 * divided + frequency * (1.0 - divided)
    });
    mixed.collect()
}

impl Angles {
    /// Rotates the first `2 · pairs` values of `head`, which belongs to row `row` of the prompt, in place.
    pub fn rotate(&self, row: usize, head: &mut [f32]) {
        let pairs = self.pairs;
        let (cos, sin) = (&self.cos[row * pairs..][..pairs], &self.sin[row * pairs..][..pairs]);
        let mut rotated = vec![0f32; 2 * pairs];
        let (first, second) = rotated.split_at_mut(pairs);
        for pair in 0..pairs {
            let (x0, x1) = (head[2 * pair], head[2 * pair + 1]);
            first[pair] = x0 * cos[pair] - x1 * sin[pair];
            second[pair] = x1 * cos[pair] + x0 * sin[pair];
        }
        head[..2 * pairs].copy_from_slice(&rotated);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(theta: f64, width: usize) -> RotaryEmbedding {
        RotaryEmbedding::with_width(&Rope { theta, yarn: None }, width)
    }

    #[test]
    fn pairs_are_interleaved_going_in_and_halved_coming_out() {
        let angles = plain(100.0, 4).angles(&[0, 3]);
        let mut head = [1.0f32, 2.0, 3.0, 4.0, 9.0];
        angles.rotate(0, &mut head);
        assert_eq!(
            head,
            [1.0, 3.0, 2.0, 4.0, 9.0],
            "position 0 only changes the layout; the rest is untouched"
        );
        let mut head = [1.0f32, 2.0, 3.0, 4.0, 9.0];
        angles.rotate(1, &mut head);
        let (s0, c0) = 3f32.sin_cos();
        let (s1, c1) = 0.3f32.sin_cos();
        let wanted = [c0 - 2.0 * s0, 3.0 * c1 - 4.0 * s1, 2.0 * c0 + s0, 4.0 * c1 + 3.0 * s1, 9.0];
        for (x, wanted) in head.iter().zip(wanted) {
            assert!((x - wanted).abs() < 1e-6, "{head:?} {wanted:?}");
        }
    }

    #[test]
    fn yarn_keeps_fast_frequencies_and_divides_slow_ones() {
        let yarn = Yarn {
            factor: 4.0,
            original_max_position_embeddings: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale: Some(1.0),
            mscale_all_dim: 1.0,
            attention_factor: None,
            truncate: true,
        };
        let stretched = RotaryEmbedding::with_width(&Rope { theta: 1e4, yarn: Some(yarn.clone()) }, 64);
        let kept = plain(1e4, 64);
        assert_eq!(stretched.inverse_frequencies[0], kept.inverse_frequencies[0]);
        assert_eq!(stretched.inverse_frequencies[31], kept.inverse_frequencies[31] / 4.0);
        assert_eq!(stretched.attention_factor, 1.0, "equal mscales cancel");
        assert!((yarn.get_mscale(1.0) - 1.138_629_436_111_989).abs() < 1e-12);
    }
}
