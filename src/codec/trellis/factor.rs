//! The metric of a linear's inner domain and its block LDL factor.
//!
//! For stored input vector `suh` and covariance H the error of the inner tiles is measured by
//! `H' = Hk diag(suh) (H + reg) diag(suh) Hk`, `reg = sigma_reg · mean(diag H)` on the diagonal. `H' = L D Lᵀ` with
//! 16 x 16 blocks. exllamav3 transforms H by the signs of `suh` alone, although it also divides the weights by
//! per-channel scales; using the stored vector itself is what keeps LDLQ on the true metric. trace(D) is the cheap
//! predictor of LDLQ's error (QuIP, arXiv 2307.13304).

use half::f16;

use super::hadamard::{rotate_columns, rotate_rows};
use super::tile::TILE_DIM;
use crate::error::{Result, refuse};
use crate::linalg::{Matrix, block_lower, cholesky};

/// The factored metric of one (covariance, input vector) pair.
#[derive(Debug, Clone)]
pub struct Factor {
    /// Unit block-lower-triangular L with its diagonal blocks zeroed, `[K, K]`: `lower[j, i]` weighs the error of row j
    /// in the target of row i.
    pub lower: Matrix<f32>,
    /// H', `[K, K]`, regularisation included.
    pub metric: Matrix<f32>,
    /// Trace of D.
    pub trace_d: f64,
}

/// Factors a covariance `[K, K]` (symmetric, f32) under the stored input vector.
///
/// # Errors
/// A covariance that is zero, not finite or not positive definite after regularisation; never repaired silently.
pub fn factor(covariance: &Matrix<f32>, suh: &[f16], sigma_reg: f64) -> Result<Factor> {
    let mut h = transformed(covariance, suh, sigma_reg)?;
    let k = covariance.rows;
    let metric = Matrix::new(k, k, h.data.iter().map(|&x| x as f32).collect());
    decompose(&mut h)?;
    let starts: Vec<usize> = (0..k).step_by(TILE_DIM).collect();
    let lower = block_lower(&h, &starts);
    Ok(Factor { lower, metric, trace_d: trace(&h) })
}

/// The trace of D alone, for ranking vectors.
///
/// # Errors
/// As [`factor`].
pub fn trace_d(covariance: &Matrix<f32>, suh: &[f16], sigma_reg: f64) -> Result<f64> {
    let mut h = transformed(covariance, suh, sigma_reg)?;
    decompose(&mut h)?;
    Ok(trace(&h))
}

/// The trace of D, from the Cholesky factor.
fn trace(c: &Matrix<f64>) -> f64 {
    (0..c.rows).step_by(TILE_DIM).map(|b0| block_trace(c, b0)).sum()
}

/// H' in f64.
fn transformed(covariance: &Matrix<f32>, suh: &[f16], sigma_reg: f64) -> Result<Matrix<f64>> {
    let k = covariance.rows;
    assert_eq!((covariance.cols, suh.len()), (k, k));
    let mean = (0..k).map(|i| f64::from(covariance.data[i * k + i])).sum::<f64>() / k as f64;
    if !mean.is_finite() || covariance.data.iter().any(|x| !x.is_finite()) {
        return refuse("the covariance has a value that is not finite").wanted("finite activations").err();
    }
    if mean <= 0.0 {
        return refuse("the covariance is zero").wanted("at least one row with a non-zero activation").err();
    }
    let su: Vec<f64> = suh.iter().map(|s| s.to_f64()).collect();
    let mut h = Matrix::<f64>::zeros(k, k);
    for i in 0..k {
        for j in 0..k {
            let value = f64::from(covariance.data[i * k + j]) + if i == j { sigma_reg * mean } else { 0.0 };
            h.data[i * k + j] = su[i] * value * su[j];
        }
    }
    rotate_columns(&mut h.data, k);
    rotate_rows(&mut h.data, k);
    Ok(h)
}

fn decompose(h: &mut Matrix<f64>) -> Result<()> {
    cholesky(h).map_err(|at| {
        refuse(format!(
            "the regularised covariance is not positive definite: pivot {} at row {}",
            at.pivot, at.row
        ))
        .wanted("a positive definite covariance; a larger sigma_reg, or more calibration rows")
        .into()
    })
}

/// The trace of D's block at `b0`, from the Cholesky factor.
fn block_trace(c: &Matrix<f64>, b0: usize) -> f64 {
    let line = |i: usize| c.data[i * c.cols + b0..=i * c.cols + i].iter().map(|x| x * x).sum::<f64>();
    (b0..b0 + TILE_DIM).map(line).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::{View, matmul_f32};

    fn covariance(k: usize) -> Matrix<f32> {
        let mut seed = 5u64;
        let x: Vec<f32> = (0..2 * k * k)
            .map(|_| {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1);
                (seed >> 40) as f32 / (1u64 << 24) as f32 - 0.4
            })
            .collect();
        let mut h = Matrix::zeros(k, k);
        matmul_f32((k, k, 2 * k), View::transposed(&x, k), View::rows(&x, k), &mut h.data, k);
        h
    }

    #[test]
    fn l_d_lt_is_the_metric() {
        let k = 128;
        let suh: Vec<f16> = (0..k).map(|i| f16::from_f32(if i % 3 == 0 { -0.5 } else { 0.7 })).collect();
        let f = factor(&covariance(k), &suh, 0.025).unwrap();
        // D = L⁻¹ H' L⁻ᵀ must be block diagonal, with the trace we report.
        let mut h: Vec<f64> = f.metric.data.iter().map(|&x| f64::from(x)).collect();
        let l = |j: usize, i: usize| f64::from(f.lower.data[j * k + i]);
        for b0 in (0..k).step_by(16) {
            for j in b0 + 16..k {
                for i in b0..b0 + 16 {
                    for c in 0..k {
                        h[j * k + c] -= l(j, i) * h[i * k + c];
                    }
                }
            }
        }
        let trace: f64 = (0..k).map(|i| h[i * k + i]).sum();
        for j in 0..k {
            for i in 0..j / 16 * 16 {
                assert!(h[j * k + i].abs() < 1e-3, "row {j}, column {i}: {}", h[j * k + i]);
            }
        }
        assert!((trace / f.trace_d - 1.0).abs() < 1e-3, "{trace} {}", f.trace_d);
    }

    #[test]
    fn a_zero_or_unfinished_covariance_is_refused() {
        let suh = vec![f16::ONE; 128];
        let mut h = Matrix::zeros(128, 128);
        assert!(factor(&h, &suh, 0.025).unwrap_err().to_string().contains("is zero"));
        h.data[5] = f32::NAN;
        assert!(factor(&h, &suh, 0.025).unwrap_err().to_string().contains("not finite"));
    }
}
