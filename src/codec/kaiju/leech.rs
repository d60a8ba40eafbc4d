//! The Leech lattice in integer scale (a true point is x / √8).
//!
//! A coset is a parity `m` and a Golay word `c`. Its points are, with integers `z`,
//!
//! - even, m = 0: x = 2c + 4z;
//! - odd, m = 1: x = (1 - 2c)(1 + 4z);
//!
//! and such an x is in the lattice where Σz ≡ m (mod 2). Every lattice point has one coset and one z.
//!
//! Source: Conway and Sloane, chapters 4 and 10: coordinates of one parity, a Golay word where they are 2 modulo 4, a sum
//! that is 4m modulo 8.

use super::golay::{self, LENGTH, WORDS};

/// A lattice point by coset and offsets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Point {
    /// Whether its coordinates are odd.
    pub odd: bool,
    /// Index of the Golay word.
    pub word: u16,
    /// Offsets z, by coordinate.
    pub z: [i32; LENGTH],
}

impl Point {
    /// The coordinates in integer scale.
    pub fn coordinates(&self) -> [i32; LENGTH] {
        let word = WORDS[usize::from(self.word)];
        std::array::from_fn(|i| coordinate(self.odd, word >> i & 1, self.z[i]))
    }

    /// The point of given coordinates, none where they are no point of the lattice.
    pub fn from_coordinates(x: &[i32; LENGTH]) -> Option<Self> {
        let odd = x[0] & 1 == 1;
        if x.iter().any(|x| (x & 1 == 1) != odd) {
            return None;
        }
        // Even: x = 2c + 4z. Odd: x = 1 + 4z where c = 0, -1 - 4z where c = 1.
        let bit = |x: i32| if odd { x.rem_euclid(4) == 3 } else { x.rem_euclid(4) == 2 };
        let word = (0..LENGTH).fold(0, |word, i| word | u32::from(bit(x[i])) << i);
        let z = x.map(|x| match (odd, bit(x)) {
            (false, bit) => (x - 2 * i32::from(bit)) / 4,
            (true, false) => (x - 1) / 4,
            (true, true) => (-x - 1) / 4,
        });
        let point = Self { odd, word: golay::index_of(word)?, z };
        point.is_in_lattice().then_some(point)
    }

    /// Whether the offsets' sum has the lattice's parity.
    pub fn is_in_lattice(&self) -> bool {
        let odd_sum = self.z.iter().fold(0, |sum, z| sum ^ z) & 1 == 1;
        odd_sum == self.odd
    }
}

/// One coordinate of a coset's point: `bit` of the word and offset `z`.
pub fn coordinate(odd: bool, bit: u32, z: i32) -> i32 {
    let bit = bit as i32;
    if odd { (1 - 2 * bit) * (1 + 4 * z) } else { 2 * bit + 4 * z }
}

/// Σx² of a point.
pub fn norm(x: &[i32; LENGTH]) -> i32 {
    x.iter().map(|x| x * x).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coordinates_and_offsets_are_each_others_inverse() {
        for (odd, word, spread) in [(false, 0, 1), (true, 0xABC, 3), (false, 0xFFF, 5), (true, 1, 2)] {
            let mut z: [i32; LENGTH] = std::array::from_fn(|i| (i as i32 * 7 + 3) % (2 * spread) - spread);
            z[5] += i32::from(!Point { odd, word, z }.is_in_lattice());
            let point = Point { odd, word, z };
            assert_eq!(Point::from_coordinates(&point.coordinates()), Some(point));
        }
    }

    #[test]
    fn what_is_no_point_is_none() {
        let mut x = [0; LENGTH];
        assert!(Point::from_coordinates(&x).is_some());
        x[0] = 4;
        assert_eq!(Point::from_coordinates(&x), None, "an odd sum of z");
        x[1] = 4;
        assert!(Point::from_coordinates(&x).is_some());
        x[2] = 2;
        assert_eq!(Point::from_coordinates(&x), None, "no word of the code");
        x[2] = 1;
        assert_eq!(Point::from_coordinates(&x), None, "mixed parities");
    }
}
