//! The order in which a 16x16 tile's weights are visited, and tiles in and out of row-major matrices.
//!
//! The order is that of the tensor-core fragments the peer decodes into (exllamav3 `modules/quant/exl3_lib/quantize.py`,
//! `tensor_core_perm`). Rows are inputs (K), columns outputs (N).

use super::codebook::Codebook;
use super::search::{States, TILE_LEN, Tile};

/// Rows and columns of a tile.
pub const TILE_DIM: usize = 16;

const _: () = assert!(TILE_DIM * TILE_DIM == TILE_LEN);

/// Position in tile order -> `row * 16 + column`.
pub const TILE_ORDER: [u8; TILE_LEN] = tile_order();

const fn tile_order() -> [u8; TILE_LEN] {
    let mut order = [0; TILE_LEN];
    let mut position = 0;
    while position < TILE_LEN {
        let (t, i) = (position / 8, position % 8);
        // Within a group of eight: bit 0 steps one row, bit 1 eight rows, bit 2 eight columns.
        let row = (t % 4) * 2 + i % 2 + (i / 2 % 2) * 8;
        let column = t / 4 + (i / 4) * 8;
        order[position] = (row * TILE_DIM + column) as u8;
        position += 1;
    }
    order
}

/// The tile whose upper left weight is `matrix[row][column]`, in tile order. `matrix` is row-major with `stride` columns.
///
/// # Panics
/// If the tile does not lie within the matrix.
pub fn read_tile(matrix: &[f32], stride: usize, row: usize, column: usize) -> Tile {
    assert!(column + TILE_DIM <= stride, "tile at column {column} of a matrix of {stride} columns");
    let origin = row * stride + column;
    TILE_ORDER.map(|at| matrix[origin + usize::from(at) / TILE_DIM * stride + usize::from(at) % TILE_DIM])
}

/// Writes a tile given in tile order to `matrix[row..row+16][column..column+16]`; the inverse of [`read_tile`].
///
/// # Panics
/// If the tile does not lie within the matrix.
pub fn write_tile(tile: &Tile, matrix: &mut [f32], stride: usize, row: usize, column: usize) {
    assert!(column + TILE_DIM <= stride, "tile at column {column} of a matrix of {stride} columns");
    let origin = row * stride + column;
    for (value, at) in tile.iter().zip(TILE_ORDER) {
        matrix[origin + usize::from(at) / TILE_DIM * stride + usize::from(at) % TILE_DIM] = *value;
    }
}

/// The weights (in tile order, exact f16 values) that `states` stand for.
pub fn decode(codebook: Codebook, states: &States) -> Tile {
    let values = codebook.values();
    states.map(|state| values[usize::from(state)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_visits_every_weight_once() {
        let mut seen = [false; TILE_LEN];
        TILE_ORDER.iter().for_each(|&at| seen[usize::from(at)] = true);
        assert!(seen.iter().all(|&s| s));
    }

    #[test]
    fn tiles_go_in_and_out_of_a_matrix() {
        // 48 columns and 32 rows: tiles with neighbours on every side.
        let matrix: Vec<f32> = (0..48 * 32).map(|i| i as f32).collect();
        let mut copy = vec![0.0; matrix.len()];
        for row in [0, 16] {
            for column in [0, 16, 32] {
                let tile = read_tile(&matrix, 48, row, column);
                assert_eq!(tile[0], (row * 48 + column) as f32);
                assert_eq!(tile[1], ((row + 1) * 48 + column) as f32);
                write_tile(&tile, &mut copy, 48, row, column);
            }
        }
        assert_eq!(copy, matrix);
    }
}
