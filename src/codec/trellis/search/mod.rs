//! The search for a tile's best state sequence.
//!
//! The answer is defined to the bit, so that every instruction set gives the same bytes. With `b` bits a weight, out-state
//! `e` is a state modulo `2^(16-b)`, and the `2^b` states `k * 2^(16-b) + e` lead into it. All costs are f16:
//!
//! - the target `w` is rounded to f16; `d = f16(c(s) - w)`, and state `s` costs `fma_f16(d, d, cost[s >> b])`;
//! - an out-state's cost is the least over its `k`, the smallest `k` winning ties.
//!
//! Pass one starts at position 128 from costs of zero and wraps round; the path back from its cheapest end (the smallest
//! on ties) crosses the boundary between positions 255 and 0 at the out-state that pass two is held to at both ends.
//! Pass two is the answer.
//!
//! Costs may overflow to infinity; the tie rule goes on deciding. Should an overflow cut pass two off from its boundary
//! (possible only where the whole path costs infinity), the states are rebuilt from their symbols, so that the sequence
//! always closes on itself. A NaN target is refused.
//!
//! Source: QTIP (arXiv 2406.11235) for the trellis and the two passes; exllamav3's quantize kernel for the arithmetic.
//! Its race in choosing pass one's end is not reproduced.

#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512fp16;
#[cfg(target_arch = "x86_64")]
mod buffer;
#[cfg(target_arch = "x86_64")]
mod layout;
pub mod platform;
pub mod scalar;

use super::codebook::Codebook;
use crate::error::{Result, refuse};

pub use platform::{Platform, available_searches, best_search};

/// Weights in a tile: 16 inputs by 16 outputs.
pub const TILE_LEN: usize = 256;

/// A tile's values in tile order.
pub type Tile = [f32; TILE_LEN];

/// A tile's 16-bit trellis states in tile order.
pub type States = [u16; TILE_LEN];

/// Where pass one starts: half way round from the boundary.
const PASS_ONE_START: usize = TILE_LEN / 2;

/// One engine of the search. All engines return the same states to the bit.
pub trait TileSearch: Send + Sync {
    /// The engine's name: `scalar`, `avx2`, `avx512-fp16`.
    fn name(&self) -> &'static str;

    /// Finds the states of each tile. A tile's result does not depend on its neighbours in the call.
    ///
    /// # Errors
    /// Refuses `bits` outside 1..=8, slices of different lengths, and a NaN target, naming its tile and position.
    fn search(&self, codebook: Codebook, bits: u32, targets: &[Tile], states: &mut [States]) -> Result<()>;
}

/// What every engine checks before it starts.
fn check(bits: u32, targets: &[Tile], states: usize) -> Result<()> {
    if !(1..=8).contains(&bits) {
        return refuse(format!("a trellis of {bits} bits a weight")).wanted("1 to 8 bits").err();
    }
    if targets.len() != states {
        return refuse(format!("{} target tiles, room for {states} tiles of states", targets.len()))
            .wanted("as many of one as of the other")
            .err();
    }
    for (tile, target) in targets.iter().enumerate() {
        if let Some(position) = target.iter().position(|w| w.is_nan()) {
            return refuse(format!("target of tile {tile}, position {position} is NaN"))
                .wanted("a number at every position")
                .err();
        }
    }
    Ok(())
}
