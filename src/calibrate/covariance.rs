//! Covariances: the mean of xxᵀ over rows, f32 data, f64 accumulation in row order.
//!
//! The product of two f32 is exact in f64, so only the additions round; rows are taken in blocks of fixed size, so the
//! sum has one order whatever the number of threads.

use crate::error::{Result, refuse};
use crate::linalg::{Matrix, syrk_f64};

/// Rows accumulated at a time.
const BLOCK: usize = 256;

/// A running sum of w·xxᵀ.
#[derive(Debug, Clone)]
pub struct Covariance {
    k: usize,
    rows: usize,
    sum: Vec<f64>,
}

impl Covariance {
    /// An empty sum over vectors of `k` entries.
    pub fn new(k: usize) -> Self {
        Self { k, rows: 0, sum: vec![0.0; k * k] }
    }

    /// Adds XᵀX for rows `x[rows, k]`.
    pub fn add(&mut self, x: &Matrix<f32>) {
        self.add_scaled(x, |_| 1.0);
    }

    /// Adds Xᵀ diag(w) X: the loss-weighted form of GuidedQuant (arXiv 2505.07004), used by pilots only.
    ///
    /// # Errors
    /// A weight that is negative or not finite.
    pub fn add_weighted(&mut self, x: &Matrix<f32>, weights: &[f32]) -> Result<()> {
        assert_eq!(x.rows, weights.len());
        if let Some(row) = weights.iter().position(|w| !w.is_finite() || *w < 0.0) {
            return refuse(format!("row weight is {}", weights[row]))
                .row(row)
                .wanted("finite, not negative")
                .err();
        }
        self.add_scaled(x, |row| f64::from(weights[row]).sqrt());
        Ok(())
    }

    fn add_scaled(&mut self, x: &Matrix<f32>, scale: impl Fn(usize) -> f64) {
        assert_eq!(x.cols, self.k);
        let mut block = Vec::with_capacity(BLOCK.min(x.rows) * self.k);
        for start in (0..x.rows).step_by(BLOCK) {
            let end = x.rows.min(start + BLOCK);
            block.clear();
            for row in start..end {
                let scale = scale(row);
                block.extend(x.row(row).iter().map(|&v| f64::from(v) * scale));
            }
            syrk_f64(end - start, self.k, &block, &mut self.sum);
        }
        self.rows += x.rows;
    }

    /// Rows added.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The mean over rows, symmetric, in f32.
    ///
    /// # Errors
    /// No rows, a zero matrix, or a value that is not finite in f32.
    pub fn finish(self) -> Result<Matrix<f32>> {
        self.blend(None, 0.0)
    }

    /// `(1 - share)` times the mean of these rows plus `share` times that of a cold expert's fallback rows.
    ///
    /// # Errors
    /// As [`Covariance::finish`], for the blend as a whole: a fallback mends routed rows that are missing or all zero.
    pub fn blend(self, fallback: Option<Covariance>, share: f64) -> Result<Matrix<f32>> {
        let k = self.k;
        let rows = self.rows + fallback.as_ref().map_or(0, |fallback| fallback.rows);
        if rows == 0 {
            return refuse("no rows to form a covariance from").wanted("a larger calibration corpus").err();
        }
        let parts: Vec<(&Covariance, f64)> = match &fallback {
            // A side without rows has no say, whatever its share.
            Some(fallback) if fallback.rows > 0 && self.rows > 0 => {
                vec![(&self, 1.0 - share), (fallback, share)]
            }
            Some(fallback) if fallback.rows > 0 => vec![(fallback, 1.0)],
            _ => vec![(&self, 1.0)],
        };
        let mut mean = Matrix::zeros(k, k);
        for i in 0..k {
            for j in 0..=i {
                let part =
                    |(part, share): &(&Covariance, f64)| part.sum[i * k + j] / part.rows as f64 * share;
                let value = parts.iter().map(part).sum::<f64>() as f32;
                mean.data[i * k + j] = value;
                mean.data[j * k + i] = value;
            }
        }
        if mean.data.iter().any(|x| !x.is_finite()) {
            return refuse("the covariance is not finite")
                .wanted("activations whose squares fit in f32")
                .err();
        }
        if (0..k).all(|i| mean.data[i * k + i] == 0.0) {
            return refuse(format!("the covariance of {rows} rows is zero"))
                .wanted("a row with a non-zero activation")
                .err();
        }
        Ok(mean)
    }
}

/// The covariance of all rows of `x`.
///
/// # Errors
/// See [`Covariance::finish`].
pub fn covariance(x: &Matrix<f32>) -> Result<Matrix<f32>> {
    let mut sum = Covariance::new(x.cols);
    sum.add(x);
    sum.finish()
}

/// Keeps the rows that are finite throughout and tells how many were dropped.
///
/// # Errors
/// More than a tenth of the rows dropped.
pub fn drop_non_finite(x: Matrix<f32>) -> Result<(Matrix<f32>, usize)> {
    let good: Vec<usize> = (0..x.rows).filter(|&row| x.row(row).iter().all(|v| v.is_finite())).collect();
    let dropped = x.rows - good.len();
    if dropped == 0 {
        return Ok((x, 0));
    }
    if dropped * 10 > x.rows {
        return refuse(format!("{dropped} of {} derived rows are not finite", x.rows))
            .wanted("at most 10 %")
            .err();
    }
    Ok((x.gather_rows(&good), dropped))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(n: usize, k: usize) -> Matrix<f32> {
        Matrix::new(n, k, (0..n * k).map(|i| ((i * 7919 % 1000) as f32 - 500.0) / 300.0).collect())
    }

    #[test]
    fn it_is_the_mean_outer_product() {
        let x = rows(300, 40);
        let mean = covariance(&x).unwrap();
        for (i, j) in [(0, 0), (3, 17), (39, 2)] {
            let want: f64 =
                (0..300).map(|r| f64::from(x.row(r)[i]) * f64::from(x.row(r)[j])).sum::<f64>() / 300.0;
            assert!((f64::from(mean.data[i * 40 + j]) - want).abs() < 1e-6 * want.abs().max(1.0));
        }
    }

    #[test]
    fn weights_scale_rows() {
        let x = rows(20, 8);
        let mut twice = Covariance::new(8);
        twice.add_weighted(&x, &[2.0; 20]).unwrap();
        let (a, b) = (twice.finish().unwrap(), covariance(&x).unwrap());
        assert!(a.data.iter().zip(&b.data).all(|(a, b)| (a - 2.0 * b).abs() < 1e-5));
        assert!(
            Covariance::new(8).add_weighted(&x, &[f32::NAN; 20]).unwrap_err().to_string().contains("row 0")
        );
    }

    #[test]
    fn a_fallback_is_blended_by_its_share_and_mends_what_is_missing() {
        let sum = |x: &Matrix<f32>| {
            let mut sum = Covariance::new(x.cols);
            sum.add(x);
            sum
        };
        let (routed, other) = (rows(10, 4), rows(30, 4));
        let (a, b) = (covariance(&routed).unwrap(), covariance(&other).unwrap());
        let mixed = sum(&routed).blend(Some(sum(&other)), 0.25).unwrap();
        for ((m, a), b) in mixed.data.iter().zip(&a.data).zip(&b.data) {
            assert!((m - (0.75 * a + 0.25 * b)).abs() < 1e-5);
        }
        assert_eq!(Covariance::new(4).blend(Some(sum(&other)), 1.0).unwrap(), b);
        assert_eq!(sum(&routed).blend(Some(Covariance::new(4)), 0.5).unwrap(), a);
        let zero = Matrix::zeros(3, 4);
        assert!(sum(&zero).blend(Some(sum(&other)), 0.5).is_ok());
        assert!(sum(&zero).blend(Some(sum(&zero)), 0.5).is_err());
    }

    #[test]
    fn nothing_is_made_of_nothing() {
        assert!(Covariance::new(8).finish().is_err());
        assert!(covariance(&Matrix::zeros(5, 8)).unwrap_err().to_string().contains("is zero"));
    }

    #[test]
    fn non_finite_rows_are_dropped_up_to_a_tenth() {
        let mut x = rows(20, 4);
        x.data[5] = f32::INFINITY;
        let (kept, dropped) = drop_non_finite(x.clone()).unwrap();
        assert_eq!((kept.rows, dropped), (19, 1));
        x.data[9] = f32::NAN;
        x.data[13] = f32::NAN;
        assert!(drop_non_finite(x).is_err());
    }
}
