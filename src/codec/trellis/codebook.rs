//! The three computed codebooks of EXL3: a 16-bit trellis state to an f16 value.
//!
//! Source: exllamav3 v0.0.43, `exllamav3_ext/quant/codebook.cuh`. Integer arithmetic is modulo 2^32, every f16 operation rounds
//! once ([`super::f16`]). Values are finite and below 4 in magnitude. The walk writes [`Codebook::Mcg`] only; the other
//! two are readable.

use super::f16::{add, fma};
use half::f16;
use std::sync::LazyLock;

/// Number of trellis states.
pub const STATES: usize = 1 << 16;

/// The scale the quantizer aims weights at: the standard deviation of [`Codebook::ThreeInst`], used for all codebooks.
pub const CODEBOOK_SCALE: f64 = 1.24371088;

/// Which computed codebook a linear's states are read with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Codebook {
    /// QTIP's "3INST"; a linear without a marker tensor.
    ThreeInst,
    /// A multiplicative congruential generator; marker tensor `mcg`.
    Mcg,
    /// One multiplication and a byte sum; marker tensor `mul1`.
    Mul1,
}

impl Codebook {
    /// All codebooks.
    pub const ALL: [Self; 3] = [Self::ThreeInst, Self::Mcg, Self::Mul1];

    /// The name used in files and reports: `3inst`, `mcg` or `mul1`.
    pub fn name(self) -> &'static str {
        match self {
            Self::ThreeInst => "3inst",
            Self::Mcg => "mcg",
            Self::Mul1 => "mul1",
        }
    }

    /// The bits of the int32 marker tensor that names this codebook; none for [`Codebook::ThreeInst`].
    pub const fn marker(self) -> Option<u32> {
        match self {
            Self::ThreeInst => None,
            Self::Mcg => Some(0xCBAC_1FED),
            Self::Mul1 => Some(0x83DC_D12D),
        }
    }

    /// The value of one state, computed.
    pub fn value(self, state: u16) -> f16 {
        let state = u32::from(state);
        let halves = |x: u32| {
            let x = (x & 0x8fff_8fff) ^ 0x3b60_3b60;
            add(f16::from_bits(x as u16), f16::from_bits((x >> 16) as u16))
        };
        match self {
            Self::ThreeInst => halves(state.wrapping_mul(89_226_354).wrapping_add(64_248_484)),
            Self::Mcg => halves(state.wrapping_mul(0xCBAC_1FED)),
            Self::Mul1 => {
                let x = state.wrapping_mul(0x83DC_D12D);
                let sum: u16 = x.to_le_bytes().into_iter().map(u16::from).sum();
                // 0x6400 is 1024, whose neighbours are one apart: adding to the bits adds to the value.
                fma(f16::from_bits(0x6400 + sum), f16::from_bits(0x1eee), f16::from_bits(0xc931))
            }
        }
    }

    /// The values of all states as f32 (exact), built on first use.
    pub fn values(self) -> &'static [f32; STATES] {
        static TABLES: [LazyLock<Box<[f32; STATES]>>; 3] = [
            LazyLock::new(|| table(Codebook::ThreeInst)),
            LazyLock::new(|| table(Codebook::Mcg)),
            LazyLock::new(|| table(Codebook::Mul1)),
        ];
        &TABLES[self as usize]
    }
}

fn table(codebook: Codebook) -> Box<[f32; STATES]> {
    let values: Vec<f32> = (0..=u16::MAX).map(|state| codebook.value(state).to_f32()).collect();
    values.try_into().expect("one value a state")
}
