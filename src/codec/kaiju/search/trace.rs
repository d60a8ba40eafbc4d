//! The z of the best point of one coset.

use super::Region;
use crate::codec::kaiju::golay::{LENGTH, WORDS};
use crate::codec::kaiju::leech::{Point, coordinate};
use crate::codec::kaiju::search::Block;

/// Parity of the sum so far, and whether a coordinate outside of the box was met.
const STATES: usize = 4;

/// The cheapest z of each parity, inside and outside of the box; none where the region has no such value.
type Choices = [[Option<(f64, i32)>; 2]; 2];

/// The best point of a region within the coset (odd, word): least Σ w (y - x)² in f64, coordinates in ascending order; among
/// equals the values listed first by the region.
///
/// # Panics
/// When costs are not finite.
pub fn trace(region: Region, (odd, word): (bool, u16), target: &Block, weight: &Block) -> Point {
    let bits = WORDS[usize::from(word)];
    let mut costs = [0.0, f64::INFINITY, f64::INFINITY, f64::INFINITY];
    let mut paths = [[(0usize, 0i32); STATES]; LENGTH];
    for (i, path) in paths.iter_mut().enumerate() {
        let choices = choices(region, odd, bits >> i & 1, f64::from(target[i]), f64::from(weight[i]));
        let mut next = [f64::INFINITY; STATES];
        for (from, known) in costs.iter().enumerate() {
            for (outside, choices) in choices.iter().enumerate().take(2 - from / 2) {
                for (parity, choice) in choices.iter().enumerate() {
                    let Some((cost, z)) = *choice else { continue };
                    let to = ((from % 2) ^ parity) + 2 * (from / 2 + outside);
                    if known + cost < next[to] {
                        next[to] = known + cost;
                        path[to] = (from, z);
                    }
                }
            }
        }
        costs = next;
    }
    let parity = usize::from(odd);
    let mut state = if costs[parity] <= costs[parity + 2] { parity } else { parity + 2 };
    assert!(costs[state].is_finite(), "finite targets and weights");
    let mut z = [0; LENGTH];
    for (z, path) in z.iter_mut().zip(&paths).rev() {
        (state, *z) = path[state];
    }
    Point { odd, word, z }
}

fn choices(region: Region, odd: bool, bit: u32, target: f64, weight: f64) -> Choices {
    let square = |z: i32| weight * (target - f64::from(coordinate(odd, bit, z))).powi(2);
    let Some(values) = region.values() else {
        let inside = [0, 1].map(|parity| {
            // x = first + 8n or first - 8n: z = parity + 2n either way.
            let first = f64::from(coordinate(odd, bit, parity));
            let turned = if odd && bit == 1 { -1.0 } else { 1.0 };
            let z = parity + 2 * ((target - first) * turned / 8.0).round_ties_even() as i32;
            Some((square(z), z))
        });
        return [inside, [None; 2]];
    };
    let least = |values: &[i32]| {
        let mut best: Option<(f64, i32)> = None;
        for &z in values {
            let cost = square(z);
            if best.is_none_or(|(known, _)| cost < known) {
                best = Some((cost, z));
            }
        }
        best
    };
    [values.inside.map(least), values.outside.map(least)]
}
