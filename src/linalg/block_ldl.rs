//! The block-triangular factor of an LDL decomposition, from a Cholesky factor.

use super::Matrix;

/// For `A = C Cᵀ` and diagonal blocks that begin at `starts` (ascending, the first 0): the unit block-lower-triangular L of
/// `A = L D Lᵀ` with its diagonal blocks zeroed, `L_jb = C_jb C_bb⁻¹`; `D_b = C_bb C_bbᵀ`.
///
/// # Panics
/// When a start lies beyond the matrix.
pub fn block_lower(c: &Matrix<f64>, starts: &[usize]) -> Matrix<f32> {
    let k = c.rows;
    let mut lower = Matrix::<f32>::zeros(k, k);
    for (at, &start) in starts.iter().enumerate() {
        let end = starts.get(at + 1).copied().unwrap_or(k);
        let inverse = invert_lower(c, start, end - start);
        for j in end..k {
            let line = &c.data[j * k + start..j * k + end];
            let out = &mut lower.data[j * k + start..j * k + end];
            for (col, value) in out.iter_mut().enumerate() {
                *value = line.iter().zip(&inverse).map(|(x, row)| x * row[col]).sum::<f64>() as f32;
            }
        }
    }
    lower
}

/// The inverse of the lower triangular diagonal block of a width at `b0`, by row.
fn invert_lower(c: &Matrix<f64>, b0: usize, width: usize) -> Vec<Vec<f64>> {
    let mut inverse: Vec<Vec<f64>> = Vec::with_capacity(width);
    for i in 0..width {
        let line = &c.data[(b0 + i) * c.cols + b0..];
        // Row i of the inverse: the unit row less what the rows above already account for.
        let mut row = vec![0.0; width];
        row[i] = 1.0;
        for (known, &weight) in inverse.iter().zip(line) {
            row.iter_mut().zip(known).for_each(|(x, k)| *x -= weight * k);
        }
        row.iter_mut().for_each(|x| *x /= line[i]);
        inverse.push(row);
    }
    inverse
}
