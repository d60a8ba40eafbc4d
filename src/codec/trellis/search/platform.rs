//! Which engines this machine can run, chosen at run time.

use super::TileSearch;
use super::scalar::Scalar;
#[cfg(target_arch = "x86_64")]
use super::{avx2::Avx2, avx512fp16::Avx512Fp16};

/// An instruction set the search has an engine for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Platform {
    /// Any machine.
    Scalar,
    /// x86-64 with AVX2.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// x86-64 with AVX512-FP16 (Sapphire Rapids and later).
    #[cfg(target_arch = "x86_64")]
    Avx512Fp16,
}

impl Platform {
    /// All that this machine has, the portable one first and the quickest last.
    pub fn available() -> Vec<Self> {
        let mut platforms = vec![Self::Scalar];
        #[cfg(target_arch = "x86_64")]
        {
            platforms.extend(Avx2::detect().map(|_| Self::Avx2));
            platforms.extend(Avx512Fp16::detect().map(|_| Self::Avx512Fp16));
        }
        platforms
    }

    /// The quickest this machine has.
    pub fn detect() -> Self {
        Self::available().pop().unwrap_or(Self::Scalar)
    }

    /// The engine; the scalar one if this machine lacks the instructions.
    pub fn search(self) -> &'static dyn TileSearch {
        match self {
            Self::Scalar => &Scalar,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => Avx2::detect().map_or(&Scalar as &dyn TileSearch, |engine| engine),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Fp16 => Avx512Fp16::detect().map_or(&Scalar as &dyn TileSearch, |engine| engine),
        }
    }
}

/// The quickest engine of this machine.
pub fn best_search() -> &'static dyn TileSearch {
    Platform::detect().search()
}

/// Every engine this machine can run, the scalar one first.
pub fn available_searches() -> Vec<&'static dyn TileSearch> {
    Platform::available().into_iter().map(Platform::search).collect()
}
