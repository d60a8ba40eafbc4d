//! The Golay code over three disjoint octads, so that words fall into rows of 16.
//!
//! With the coordinates in the order of the trio, a word's part within octad g is a representative of one of 8 cosets plus
//! an element of a [8, 4, 4] code, and with the right labels the words are exactly
//! (coset r; labels i, j, i ^ j or i ^ j ^ `ones`) for all r, i, j: 8 · 16 · 16 · 2. A kernel holds i fixed and takes 16
//! words at once.
//!
//! Source: Turyn's construction, Conway and Sloane, chapter 11, section 12; here the labels are found in the code as it is.

use std::sync::LazyLock;

use crate::codec::kaiju::golay::{LENGTH, WORDS, index_of};

/// The code in the order of a trio.
#[derive(Debug)]
pub struct Trio {
    /// Coordinate at each position: three octads of 8.
    pub order: [usize; LENGTH],
    /// Pattern of 8 bits within the octad, by octad, coset and label.
    pub pattern: [[[u8; 16]; 8]; 3],
    /// Label of the all-ones element in octad 2.
    pub ones: usize,
    /// Word index by coset, label i, label j, and whether `ones` is added to octad 2.
    pub word: Box<[[[[u16; 16]; 2]; 16]; 8]>,
}

/// The trio of the code.
pub static TRIO: LazyLock<Trio> = LazyLock::new(Trio::find);

/// A linear map on patterns of 8 bits, as its 16 values by label.
type Elements = [u8; 16];

impl Trio {
    fn find() -> Self {
        let octads: Vec<u32> = WORDS.iter().copied().filter(|word| word.count_ones() == 8).collect();
        let first = octads[0];
        let second = *octads.iter().find(|&&octad| octad & first == 0).expect("disjoint octads exist");
        let third = !(first | second) & 0xFF_FFFF;
        let mut order = [0; LENGTH];
        let positions = [first, second, third]
            .into_iter()
            .flat_map(|octad| (0..LENGTH).filter(move |&i| octad >> i & 1 == 1));
        order.iter_mut().zip(positions).for_each(|(slot, i)| *slot = i);
        let part = |word: u32, octad: usize| {
            (0..8).fold(0u8, |bits, q| bits | ((word >> order[8 * octad + q] & 1) as u8) << q)
        };
        let parts: Vec<[u8; 3]> = WORDS.iter().map(|&word| [0, 1, 2].map(|g| part(word, g))).collect();

        // Words that vanish on one octad tie an element of one of the others to one of the last, up to all ones.
        let tied = |g: usize| {
            let other = 1 - g;
            move |parts: &&[u8; 3]| parts[other] == 0
        };
        let codes: [Vec<u8>; 2] = [0, 1].map(|g| {
            let mut elements: Vec<u8> = parts.iter().filter(tied(g)).map(|parts| parts[g]).collect();
            elements.sort_unstable();
            elements.dedup();
            elements
        });
        let lift = |g: usize, element: u8| {
            if element == 0xFF {
                return 0xFF;
            }
            let found = parts.iter().filter(tied(g)).filter(|parts| parts[g] == element);
            found.map(|parts| parts[2]).min().expect("an element of the octad's code")
        };
        // Octad 0's labels are coordinates over a basis; octad 2's follow by the lift, octad 1's by the lift's inverse.
        let mut basis = vec![0xFF];
        let mut spanned = vec![0, 0xFF];
        for &element in &codes[0] {
            if !spanned.contains(&element) {
                spanned.extend(spanned.clone().iter().map(|known| known ^ element));
                basis.push(element);
            }
        }
        let span = |basis: &[u8]| -> Elements {
            std::array::from_fn(|label| {
                (0..4).filter(|bit| label >> bit & 1 == 1).fold(0, |sum, bit| sum ^ basis[bit])
            })
        };
        let lifted: Vec<u8> = basis.iter().map(|&element| lift(0, element)).collect();
        let last = span(&lifted);
        // A basis of octad 1 that lifts to the same basis, up to all ones, which is made good by adding all ones to the sum.
        let middle: Vec<u8> = lifted
            .iter()
            .map(|&wanted| {
                let fits = |&&element: &&u8| {
                    let up = lift(1, element);
                    if wanted == 0xFF {
                        element == 0xFF
                    } else {
                        element != 0xFF && (up == wanted || up == !wanted)
                    }
                };
                *codes[1].iter().find(fits).expect("the two codes lift to the same code")
            })
            .collect();
        let elements = [span(&basis), span(&middle), last];

        let mut known = [false; 256];
        let mut representatives: Vec<[u8; 3]> = Vec::new();
        for parts in &parts {
            if !known[usize::from(parts[0])] {
                elements[0].iter().for_each(|element| known[usize::from(parts[0] ^ element)] = true);
                representatives.push(*parts);
            }
        }
        let pattern: [[[u8; 16]; 8]; 3] = std::array::from_fn(|g| {
            std::array::from_fn(|r| elements[g].map(|element| representatives[r][g] ^ element))
        });
        let whole = |patterns: [u8; 3]| {
            (0..LENGTH).fold(0u32, |word, p| word | u32::from(patterns[p / 8] >> (p % 8) & 1) << order[p])
        };
        let ones = 1;
        let word = Box::new(std::array::from_fn(|r| {
            std::array::from_fn(|i| {
                std::array::from_fn(|t| {
                    std::array::from_fn(|j| {
                        let labels = [i, j, i ^ j ^ (t * ones)];
                        let patterns = [0, 1, 2].map(|g: usize| pattern[g][r][labels[g]]);
                        index_of(whole(patterns)).expect("every combination of labels is a word")
                    })
                })
            })
        }));
        Self { order, pattern, ones, word }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_met_once() {
        let mut met = [0; 4096];
        TRIO.word.iter().flatten().flatten().flatten().for_each(|&k| met[usize::from(k)] += 1);
        assert!(met.iter().all(|&times| times == 1));
    }
}
