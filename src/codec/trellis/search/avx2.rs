//! The scalar search's arithmetic compiled for AVX2: eight f32 lanes, bit-equal to [`super::scalar`] because it is the
//! same code. For x86-64 without half-precision arithmetic.
#![allow(unsafe_code)]

use super::super::codebook::{Codebook, STATES};
use super::scalar::{self, Step};
use super::{States, Tile, TileSearch};
use crate::error::Result;

/// The AVX2 engine: all codebooks, 1 to 8 bits. Obtained from [`Avx2::detect`] alone.
#[derive(Debug, Clone, Copy)]
pub struct Avx2(());

impl Avx2 {
    /// The engine, if this machine has the instructions.
    pub fn detect() -> Option<&'static Self> {
        static ENGINE: Avx2 = Avx2(());
        is_x86_feature_detected!("avx2").then_some(&ENGINE)
    }
}

impl TileSearch for Avx2 {
    fn name(&self) -> &'static str {
        "avx2"
    }

    fn search(&self, codebook: Codebook, bits: u32, targets: &[Tile], states: &mut [States]) -> Result<()> {
        // The step is reached only through a value of this type, which only `detect` makes.
        scalar::search_with(avx2, codebook, bits, targets, states)
    }
}

fn avx2(bits: u32) -> Step {
    match bits {
        1 => checked::<1, 8>,
        2 => checked::<2, 4>,
        3 => checked::<3, 2>,
        4 => checked::<4, 1>,
        5 => checked::<5, 1>,
        6 => checked::<6, 1>,
        7 => checked::<7, 1>,
        _ => checked::<8, 1>,
    }
}

fn checked<const B: u32, const G: usize>(
    values: &[f32; STATES],
    target: f32,
    before: &[f32],
    after: &mut [f32],
) {
    // SAFETY: `avx2` is private and used by the engine alone, which exists only where the instructions do.
    unsafe { step::<B, G>(values, target, before, after) }
}

#[target_feature(enable = "avx2")]
fn step<const B: u32, const G: usize>(
    values: &[f32; STATES],
    target: f32,
    before: &[f32],
    after: &mut [f32],
) {
    scalar::step::<B, G>(values, target, before, after);
}
