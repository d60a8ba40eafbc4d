//! The search for a tile's best state sequence.

/// Weights in a tile: 16 inputs by 16 outputs.
pub const TILE_LEN: usize = 256;

/// A tile's values in tile order.
pub type Tile = [f32; TILE_LEN];

/// A tile's 16-bit trellis states in tile order.
pub type States = [u16; TILE_LEN];
