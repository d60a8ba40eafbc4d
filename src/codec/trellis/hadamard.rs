//! The block-diagonal Hadamard rotation: 128-point Sylvester Hadamard blocks over sqrt(128).
//!
//! Butterflies run at strides 1, 2, .. 64 with plain additions (no fused operations), then one multiplication by
//! 1/sqrt(128): this order is part of the format's decode, since decoded weights are hashed. The rotation is its own
//! inverse. Source: exllamav3's EXL3 format; QuIP# (arXiv 2402.04396) for the idea.

use std::ops::{Add, Mul, Sub};

/// Points of one block; dimensions of a linear are multiples of it.
pub const BLOCK: usize = 128;

/// The element types that are rotated.
pub trait Rotatable: Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> {
    /// 1/sqrt(128), rounded to the type.
    const NORM: Self;
}

impl Rotatable for f32 {
    const NORM: f32 = 0.088_388_346;
}

impl Rotatable for f64 {
    const NORM: f64 = 0.088_388_347_648_318_44;
}

/// Rotates along the row index of row-major `data` with `cols` columns: `data = H data`.
///
/// # Panics
/// When the number of rows is not a multiple of [`BLOCK`].
pub fn rotate_columns<T: Rotatable>(data: &mut [T], cols: usize) {
    assert_eq!(data.len() % (BLOCK * cols), 0, "rows must be a multiple of {BLOCK}");
    for block in data.chunks_exact_mut(BLOCK * cols) {
        let mut stride = 1;
        while stride < BLOCK {
            for pair in block.chunks_exact_mut(2 * stride * cols) {
                let (low, high) = pair.split_at_mut(stride * cols);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            stride *= 2;
        }
        block.iter_mut().for_each(|x| *x = *x * T::NORM);
    }
}

/// Rotates every row of row-major `data` with `cols` columns: `data = data H`.
///
/// # Panics
/// When `cols` is not a multiple of [`BLOCK`].
pub fn rotate_rows<T: Rotatable>(data: &mut [T], cols: usize) {
    assert_eq!(cols % BLOCK, 0, "columns must be a multiple of {BLOCK}");
    for block in data.chunks_exact_mut(BLOCK) {
        let mut stride = 1;
        while stride < BLOCK {
            for pair in block.chunks_exact_mut(2 * stride) {
                let (low, high) = pair.split_at_mut(stride);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            stride *= 2;
        }
        block.iter_mut().for_each(|x| *x = *x * T::NORM);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Entry (i, j) of the Sylvester Hadamard matrix: the parity of `i & j`.
    fn entry(i: usize, j: usize) -> f64 {
        if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 }
    }

    #[test]
    fn both_directions_multiply_by_the_sylvester_matrix() {
        let cols = 2 * BLOCK;
        let data: Vec<f64> = (0..BLOCK * cols).map(|i| ((i * 37 % 101) as f64) - 50.0).collect();
        let (mut down, mut right) = (data.clone(), data.clone());
        rotate_columns(&mut down, cols);
        rotate_rows(&mut right, cols);
        for (i, j) in [(0, 0), (5, 200), (127, 255), (64, 3)] {
            let want: f64 = (0..BLOCK).map(|p| entry(i, p) * data[p * cols + j]).sum::<f64>() / 128f64.sqrt();
            assert!((down[i * cols + j] - want).abs() < 1e-9);
            let base = j / BLOCK * BLOCK;
            let want: f64 = (0..BLOCK).map(|p| data[i * cols + base + p] * entry(p, j % BLOCK)).sum::<f64>()
                / 128f64.sqrt();
            assert!((right[i * cols + j] - want).abs() < 1e-9);
        }
    }

    #[test]
    fn it_is_its_own_inverse() {
        let data: Vec<f32> = (0..BLOCK * BLOCK).map(|i| (i % 17) as f32).collect();
        let mut twice = data.clone();
        rotate_rows(&mut twice, BLOCK);
        rotate_rows(&mut twice, BLOCK);
        assert!(data.iter().zip(&twice).all(|(a, b)| (a - b).abs() < 1e-4));
    }
}
