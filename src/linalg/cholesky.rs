//! Cholesky factorisation in f64 on the fixed-order product, so that its bits are the same on every machine.
//!
//! Left-looking by block columns (Golub and Van Loan, "Matrix Computations", 4.2.8).

use super::{Matrix, View, matmul_f64};

/// Columns factored at a time: two panels of the product.
const BLOCK: usize = 64;

/// Why a matrix has no Cholesky factor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NotPositive {
    /// The row whose pivot failed.
    pub row: usize,
    /// The pivot found there: zero, negative or not finite.
    pub pivot: f64,
}

/// Overwrites the lower triangle of the symmetric `a` with `C` such that `A = C Cᵀ`, and zeroes the upper triangle.
///
/// # Errors
/// The first pivot that is not a positive finite number.
pub fn cholesky(a: &mut Matrix<f64>) -> Result<(), NotPositive> {
    let k = a.rows;
    assert_eq!(k, a.cols, "square");
    let mut update = vec![0.0f64; k * BLOCK];
    for b0 in (0..k).step_by(BLOCK) {
        let width = BLOCK.min(k - b0);
        if b0 > 0 {
            let height = k - b0;
            let below = &a.data[b0 * k..];
            update[..height * width].fill(0.0);
            matmul_f64(
                (height, width, b0),
                View::rows(below, k),
                View::transposed(below, k),
                &mut update[..height * width],
                width,
            );
            for i in 0..height {
                for j in 0..width {
                    a.data[(b0 + i) * k + b0 + j] -= update[i * width + j];
                }
            }
        }
        factor_columns(a, b0, width)?;
    }
    for i in 0..k {
        a.data[i * k + i + 1..(i + 1) * k].fill(0.0);
    }
    Ok(())
}

/// Factors columns `b0..b0 + width`, already updated by all columns to their left.
fn factor_columns(a: &mut Matrix<f64>, b0: usize, width: usize) -> Result<(), NotPositive> {
    let k = a.rows;
    let mut head = vec![0.0f64; width];
    for j in 0..width {
        let row = b0 + j;
        head[..j].copy_from_slice(&a.data[row * k + b0..row * k + b0 + j]);
        let pivot = a.data[row * k + row] - head[..j].iter().map(|x| x * x).sum::<f64>();
        if !(pivot > 0.0 && pivot.is_finite()) {
            return Err(NotPositive { row, pivot });
        }
        let root = pivot.sqrt();
        a.data[row * k + row] = root;
        for i in row + 1..k {
            let line = &mut a.data[i * k + b0..i * k + b0 + j + 1];
            let dot: f64 = line[..j].iter().zip(&head[..j]).map(|(x, y)| x * y).sum();
            line[j] = (line[j] - dot) / root;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_factor_reproduces_the_matrix() {
        // One below, at and above the block size, and several blocks.
        for k in [1, 63, 64, 65, 200] {
            let mut seed = 7u64;
            let x: Vec<f64> = (0..k * k)
                .map(|_| {
                    seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1);
                    (seed >> 33) as f64 / (1u64 << 31) as f64 - 0.5
                })
                .collect();
            let mut a = Matrix::zeros(k, k);
            matmul_f64((k, k, k), View::rows(&x, k), View::transposed(&x, k), &mut a.data, k);
            for i in 0..k {
                a.data[i * k + i] += 0.1;
            }
            let mut c = a.clone();
            cholesky(&mut c).unwrap();
            let mut back = Matrix::<f64>::zeros(k, k);
            matmul_f64((k, k, k), View::rows(&c.data, k), View::transposed(&c.data, k), &mut back.data, k);
            for (x, y) in a.data.iter().zip(&back.data) {
                assert!((x - y).abs() < 1e-10 * k as f64, "{x} {y}");
            }
        }
    }

    #[test]
    fn an_indefinite_matrix_names_its_row() {
        let mut a = Matrix::new(2, 2, vec![1.0, 2.0, 2.0, 1.0]);
        assert_eq!(cholesky(&mut a).unwrap_err().row, 1);
        let mut a = Matrix::new(1, 1, vec![f64::NAN]);
        assert_eq!(cholesky(&mut a).unwrap_err().row, 0);
    }
}
