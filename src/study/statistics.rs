//! Paired comparisons: the ratio of two weighted sums over experts, and the mean of differences over tokens.
//!
//! The interval of a ratio is the delete-one jackknife over experts on its logarithm (Efron and Tibshirani, "An
//! Introduction to the Bootstrap", chapter 11) with Student's t of n - 1 degrees of freedom: experts are few and their
//! losses differ by orders of magnitude, so their number is what the uncertainty has to come from. It needs no random
//! numbers. Tokens are taken as independent, which they are not quite; the standard error says so no more than that.

use serde::{Deserialize, Serialize};

/// An estimate between its 95 % bounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// The estimate.
    pub value: f64,
    /// Lower bound.
    pub low: f64,
    /// Upper bound.
    pub high: f64,
}

/// A mean and its standard error.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct MeanError {
    /// The mean.
    pub mean: f64,
    /// Standard error; NaN for a single value.
    pub standard_error: f64,
}

/// `Σ numerators / Σ denominators` with its interval over the pairs. `None` where there are fewer than two pairs, or a
/// sum that leaves nothing to compare (zero, or not finite).
pub fn ratio(numerators: &[f64], denominators: &[f64]) -> Option<Interval> {
    let n = numerators.len();
    assert_eq!(n, denominators.len(), "pairs");
    if n < 2 {
        return None;
    }
    let without = |left_out: Option<usize>| -> Option<f64> {
        let sum = |values: &[f64]| -> f64 {
            values.iter().enumerate().filter(|(at, _)| Some(*at) != left_out).map(|(_, x)| x).sum()
        };
        let value = (sum(numerators) / sum(denominators)).ln();
        value.is_finite().then_some(value)
    };
    let whole = without(None)?;
    let parts = (0..n).map(|at| without(Some(at))).collect::<Option<Vec<f64>>>()?;
    let count = n as f64;
    let mean = parts.iter().sum::<f64>() / count;
    let squares: f64 = parts.iter().map(|part| (part - mean).powi(2)).sum();
    let reach = student_t(n - 1) * (squares * (count - 1.0) / count).sqrt();
    Some(Interval { value: whole.exp(), low: (whole - reach).exp(), high: (whole + reach).exp() })
}

/// Mean of the differences `a - b` and its standard error.
pub fn paired_difference(a: &[f64], b: &[f64]) -> MeanError {
    assert_eq!(a.len(), b.len(), "pairs");
    let count = a.len() as f64;
    let mean = a.iter().zip(b).map(|(a, b)| a - b).sum::<f64>() / count;
    let squares: f64 = a.iter().zip(b).map(|(a, b)| (a - b - mean).powi(2)).sum();
    MeanError { mean, standard_error: (squares / (count - 1.0) / count).sqrt() }
}

/// The 97.5 % point of Student's t.
fn student_t(degrees: usize) -> f64 {
    const SMALL: [f64; 10] =
        [12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281];
    if let Some(t) = degrees.checked_sub(1).and_then(|at| SMALL.get(at)) {
        return *t;
    }
    // Expansion in 1/n (Abramowitz and Stegun 26.7.5); within 1e-3 from 11 degrees on.
    let (z, n) = (1.959_964f64, degrees as f64);
    let [z3, z5, z7] = [3, 5, 7].map(|power| z.powi(power));
    z + (z3 + z) / (4.0 * n)
        + (5.0 * z5 + 16.0 * z3 + 3.0 * z) / (96.0 * n * n)
        + (3.0 * z7 + 19.0 * z5 + 17.0 * z3 - 15.0 * z) / (384.0 * n * n * n)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn students_t_is_that_of_the_tables() {
        for (degrees, t) in [(1, 12.706), (7, 2.365), (10, 2.228), (11, 2.201), (30, 2.042), (255, 1.969)] {
            assert!((student_t(degrees) - t).abs() < 1e-3, "{degrees}: {}", student_t(degrees));
        }
    }

    #[test]
    fn a_ratio_that_is_the_same_for_every_expert_is_certain() {
        let base = [3.0, 1.0, 0.25, 7.0];
        let interval = ratio(&base.map(|x| 1.5 * x), &base).unwrap();
        for bound in [interval.value, interval.low, interval.high] {
            assert!((bound - 1.5).abs() < 1e-12, "{interval:?}");
        }
        assert_eq!(ratio(&[1.0], &[2.0]), None);
        assert_eq!(ratio(&[1.0, 2.0], &[0.0, 0.0]), None);
    }

    #[test]
    fn experts_that_disagree_make_the_interval_wide() {
        let interval = ratio(&[2.0, 1.0, 1.0, 1.0], &[1.0; 4]).unwrap();
        assert_eq!(interval.value, 1.25);
        assert!(interval.low < 1.0 && interval.high > 1.5, "{interval:?}");
        // By hand for two: logs of 3 and 1 left alone are 0 and ln 3, mean ln 3 / 2, reach t · ln 3 / 2.
        let two = ratio(&[1.0, 3.0], &[1.0, 1.0]).unwrap();
        assert!((two.value - 2.0).abs() < 1e-12);
        assert!((two.high.ln() - two.value.ln() - 12.7062 * 3f64.ln() / 2.0).abs() < 1e-9);
    }

    #[test]
    fn differences_are_paired() {
        let difference = paired_difference(&[11.0, 102.0, 1003.0], &[10.0, 100.0, 1000.0]);
        assert_eq!(difference.mean, 2.0);
        assert!((difference.standard_error - (1.0f64 / 3.0).sqrt()).abs() < 1e-12);
        assert!(paired_difference(&[1.0], &[0.0]).standard_error.is_nan());
    }
}
