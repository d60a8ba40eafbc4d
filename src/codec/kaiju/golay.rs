//! The extended binary Golay code [24, 12, 8].
//!
//! Word `k` is the sum of the rows `j` where bit `j` of `k` is set; row `j` is the generator polynomial
//! x^11 + x^10 + x^6 + x^5 + x^4 + x^2 + 1 (0xC75) shifted by `j` in 23 bits, and bit 23 makes the weight even. Bit `i` of a
//! word belongs to coordinate `i`.
//!
//! Source: Conway and Sloane, Sphere Packings, Lattices and Groups, chapter 3; the order of words is the format's.

use std::sync::LazyLock;

/// Length of a word.
pub const LENGTH: usize = 24;

/// Words of the code.
pub const COUNT: usize = 4096;

const GENERATOR: u32 = 0xC75;

/// All words by index.
pub static WORDS: [u32; COUNT] = words();

const fn words() -> [u32; COUNT] {
    let mut words = [0; COUNT];
    let mut k = 1;
    while k < COUNT {
        // The word without the highest set bit of k is known already.
        let j = k.ilog2();
        let cyclic = (words[k & !(1 << j)] ^ (GENERATOR << j)) & 0x7F_FFFF;
        words[k] = cyclic | (cyclic.count_ones() & 1) << 23;
        k += 1;
    }
    words
}

/// Words sorted by value, with their indices.
static BY_VALUE: LazyLock<Vec<(u32, u16)>> = LazyLock::new(|| {
    let mut sorted: Vec<(u32, u16)> = WORDS.iter().zip(0..).map(|(&word, k)| (word, k)).collect();
    sorted.sort_unstable();
    sorted
});

/// The index of a word, none where 24 bits are no word of the code.
pub fn index_of(word: u32) -> Option<u16> {
    let found = BY_VALUE.binary_search_by_key(&word, |&(word, _)| word).ok()?;
    Some(BY_VALUE[found].1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_weights_are_those_of_the_golay_code() {
        let mut weights = [0; 25];
        WORDS.iter().for_each(|word| weights[word.count_ones() as usize] += 1);
        let found: Vec<(usize, i32)> = (0..).zip(weights).filter(|(_, n)| *n > 0).collect();
        assert_eq!(found, [(0, 1), (8, 759), (12, 2576), (16, 759), (24, 1)]);
    }

    #[test]
    fn the_code_is_linear_and_indexed() {
        for (a, b) in [(1, 2), (0xABC, 0x123), (0xFFF, 0x800)] {
            assert_eq!(WORDS[a] ^ WORDS[b], WORDS[a ^ b]);
        }
        assert!((0..COUNT).all(|k| index_of(WORDS[k]) == Some(k as u16)));
        assert_eq!(index_of(1), None);
    }
}
