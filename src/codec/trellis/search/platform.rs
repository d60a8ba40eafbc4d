//! Which engines this machine can run, chosen at run time.

use super::TileSearch;
use super::scalar::Scalar;

/// An instruction set the search has an engine for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Platform {
    /// Any machine.
    Scalar,
}

impl Platform {
    /// All that this machine has, the portable one first and the quickest last.
    pub fn available() -> Vec<Self> {
        vec![Self::Scalar]
    }

    /// The quickest this machine has.
    pub fn detect() -> Self {
        Self::available().pop().unwrap_or(Self::Scalar)
    }

    /// The engine.
    pub fn search(self) -> &'static dyn TileSearch {
        match self {
            Self::Scalar => &Scalar,
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
