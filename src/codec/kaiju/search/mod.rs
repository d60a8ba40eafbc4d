//! The search for the best lattice point of a region: the least Σ w (y - x)² over all 8192 cosets.
//!
//! The answer is defined to the bit, so that every instruction set gives the same bytes:
//!
//! - a value z of coordinate i in a class (parity of the point, bit of the word) costs `w * (d * d)` with `d = y - x`, in
//!   f32; for the whole lattice d is the distance to the nearest x of the class and of z's parity;
//! - what a set of coordinates costs is kept in four numbers ([`Costs`]): by parity of the summed z, with no coordinate
//!   outside of the region's box, and with at most one;
//! - sets are joined as ((0 1) (2 3)) ((4 5) (6 7)) within each of the three octads of [`trio`], then octads 0 and 1, then 2;
//! - the coset of least cost is the answer; among equals an even one, then the least word index.
//!
//! The z of the winner are traced by [`trace`] in f64, the same code for every engine.
//!
//! Source: the parity and coset decomposition of the Leech lattice in Conway and Sloane, chapter 20 (soft decoding by
//! cosets of the Golay code); the trio of octads is Turyn's construction, chapter 11.

pub mod lanes;
pub mod platform;
pub mod pruned;
pub mod scalar;
pub mod trace;
pub mod trio;

use super::golay::LENGTH;
use super::leech::{Point, coordinate};
use super::region::Region;

pub use platform::{available_searches, best_search};

/// Values or weights of 24 coordinates.
pub type Block = [f32; LENGTH];

/// The largest target that the search for the nearest point of the whole lattice is exact for.
pub const LARGEST_TARGET: f32 = 1e6;

/// A coset and what its best point costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Coset {
    /// Whether its points are odd.
    pub odd: bool,
    /// Index of its Golay word.
    pub word: u16,
    /// The least Σ w (y - x)², in the search's arithmetic.
    pub cost: f32,
}

/// One engine of the search. All engines return the same coset to the bit.
pub trait PointSearch: Send + Sync {
    /// The engine's name: `scalar`, `pruned`, `avx2`, `avx512`.
    fn name(&self) -> &'static str;

    /// The best coset of a region for a target under weights that are finite and not negative, if it costs less than
    /// `bound`.
    fn coset(&self, region: Region, target: &Block, weight: &Block, bound: f32) -> Option<Coset>;
}

/// The best point of a region for a target.
///
/// # Panics
/// When no point has a finite cost: a target or weight that is not finite, or sums that overflow.
pub fn best_point(engine: &dyn PointSearch, region: Region, target: &Block, weight: &Block) -> Point {
    let coset = engine.coset(region, target, weight, f32::INFINITY).expect("finite targets and weights");
    trace::trace(region, (coset.odd, coset.word), target, weight)
}

/// What a set of coordinates costs, by parity of its summed z.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// No coordinate outside of the box.
    pub inside: [f32; 2],
    /// At most one.
    pub once: [f32; 2],
}

impl Costs {
    /// One coordinate of a class.
    pub fn of(region: Region, odd: bool, bit: u32, target: f32, weight: f32) -> Self {
        let square = |d: f32| weight * (d * d);
        let Some(values) = region.values() else {
            let nearest = [0, 1].map(|parity| {
                let apart = (target - coordinate(odd, bit, parity) as f32) * 0.125;
                square((apart - apart.round_ties_even()) * 8.0)
            });
            return Self { inside: nearest, once: nearest };
        };
        let least = |values: &[i32]| {
            let cost = |&z: &i32| square(target - coordinate(odd, bit, z) as f32);
            values.iter().map(cost).fold(f32::INFINITY, f32::min)
        };
        let inside = values.inside.map(least);
        let outside = values.outside.map(least);
        Self { inside, once: [0, 1].map(|parity| inside[parity].min(outside[parity])) }
    }

    /// Two sets together.
    pub fn join(&self, other: &Self) -> Self {
        let (a, b) = (self, other);
        let inside =
            [0, 1].map(|parity| (a.inside[0] + b.inside[parity]).min(a.inside[1] + b.inside[1 - parity]));
        Self { inside, once: [0, 1].map(|parity| a.total(b, parity)) }
    }

    /// Two sets together, at most one coordinate outside, with a parity of the sum.
    pub fn total(&self, other: &Self, parity: usize) -> f32 {
        let (a, b) = (self, other);
        let even = (a.inside[0] + b.once[parity]).min(a.once[0] + b.inside[parity]);
        let odd = (a.inside[1] + b.once[1 - parity]).min(a.once[1] + b.inside[1 - parity]);
        even.min(odd)
    }
}
