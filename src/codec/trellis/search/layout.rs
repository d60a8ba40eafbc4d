//! How [`super::avx512fp16`] lays out costs and codebooks in memory; described there.

use super::super::codebook::{Codebook, STATES};
use half::f16;
use std::sync::OnceLock;

/// The sizes that follow from the bits a weight.
pub(super) struct Shape<const B: u32>;

impl<const B: u32> Shape<B> {
    /// Branches into an out-state, and symbols.
    pub(super) const Q: usize = 1 << B;
    /// Out-states: costs in a row.
    pub(super) const R: usize = STATES >> B;
    /// Groups: out-states that differ only in the last symbol share a group and the costs they come from.
    pub(super) const J: usize = Self::R >> B;
    /// Costs from one branch to the next in a row, padding included.
    pub(super) const BRANCH: usize = Self::J + if B <= 3 { 32 } else { 0 };
    /// Costs a row takes in memory.
    pub(super) const ROW: usize = Self::Q * Self::BRANCH;
    /// Groups in a vector.
    pub(super) const G: usize = if B <= 5 { 32 >> B } else { 1 };

    /// The out-states of vector `u` in a block of `ju` begin here. They are neighbours up to 5 bits. At 6 bits neighbours
    /// share their cost: kept apart, each has a broadcast of its own, which is free as a memory operand of the
    /// multiply-add but takes a vector port where compilers load it once for both.
    pub(super) const fn first(block: usize, u: usize, ju: usize) -> usize {
        if B <= 5 { (block * ju + u) * 32 } else { block * 32 + u * (Self::R / ju) }
    }

    /// Where out-state `e` lies in a row.
    pub(super) const fn at(e: usize) -> usize {
        e / Self::J * Self::BRANCH + e % Self::J
    }

    /// Where in a vector the out-state lies that is `natural` places after the vector's first.
    pub(super) const fn lane(natural: usize) -> usize {
        if B <= 4 { natural % Self::Q * Self::G + natural / Self::Q } else { natural }
    }
}

/// 32 half-precision numbers as bits, aligned for a vector load.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Vector(pub(super) [u16; 32]);

const _: () = assert!(size_of::<Vector>() == 64);

/// A codebook laid out for one width.
pub(super) struct Tables {
    /// `[block][k][vector of the block][lane]`, for the steps.
    pub(super) forward: Box<[Vector]>,
    /// `[out-state][k]`, for tracing back.
    pub(super) back: Box<[Vector]>,
}

impl Tables {
    fn build<const B: u32, const JU: usize>(codebook: Codebook) -> Self {
        let bits = codebook.values().map(|value| f16::from_f32(value).to_bits());
        let zero = Vector([0; 32]);
        let (mut forward, mut back) = (vec![zero; STATES / 32], vec![zero; STATES / 32]);
        for k in 0..Shape::<B>::Q {
            for vector in 0..Shape::<B>::R / 32 {
                let (block, u) = (vector / JU, vector % JU);
                let first = k * Shape::<B>::R + Shape::<B>::first(block, u, JU);
                for natural in 0..32 {
                    forward[(block * Shape::<B>::Q + k) * JU + u].0[Shape::<B>::lane(natural)] =
                        bits[first + natural];
                }
            }
            for e in 0..Shape::<B>::R {
                let at = e * Shape::<B>::Q + k;
                back[at / 32].0[at % 32] = bits[k * Shape::<B>::R + e];
            }
        }
        Self { forward: forward.into(), back: back.into() }
    }

    /// Built on first use. A width is always asked for with the same `JU`, the vectors of a block.
    pub(super) fn get<const B: u32, const JU: usize>(codebook: Codebook) -> &'static Self {
        static TABLES: [[OnceLock<Tables>; 5]; 3] = [const { [const { OnceLock::new() }; 5] }; 3];
        TABLES[codebook as usize][B as usize - 2].get_or_init(|| Self::build::<B, JU>(codebook))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_hold_every_state_once_in_each_order() {
        let states = |table: &[Vector]| {
            let mut bits: Vec<u16> = table.iter().flat_map(|vector| vector.0).collect();
            bits.sort_unstable();
            bits
        };
        let mut all = Codebook::Mcg.values().map(|value| f16::from_f32(value).to_bits());
        all.sort_unstable();
        for tables in [Tables::get::<2, 1>(Codebook::Mcg), Tables::get::<6, 2>(Codebook::Mcg)] {
            assert_eq!(states(&tables.forward), all);
            assert_eq!(states(&tables.back), all);
        }
    }

    #[test]
    fn vectors_of_costs_are_adjacent_and_aligned() {
        fn check<const B: u32>() {
            for e in 0..Shape::<B>::R {
                assert_eq!(Shape::<B>::at(e), Shape::<B>::at(e / 32 * 32) + e % 32);
                assert!(Shape::<B>::at(e) < Shape::<B>::ROW);
            }
            assert_eq!(Shape::<B>::ROW % 32, 0);
        }
        check::<2>();
        check::<3>();
        check::<4>();
        check::<5>();
        check::<6>();
    }
}
