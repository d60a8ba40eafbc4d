//! What down is encoded under and towards, given the reconstructed gate and up that will feed it.
//!
//! With `I = silu(x·gate) * (x·up)` of the source and `J` the same of the reconstruction, down's covariance is
//! `E[JᵀJ]`. Encoding towards the source weight W leaves `(I - J) W` at the output whatever down does. Towards
//! `W' = W + (E[JᵀJ] + λ)⁻¹ E[Jᵀ(I - J)] W` the least-squares part of it is taken back, for no bit more (asymmetric
//! calibration: GPTAQ, arXiv 2504.02692). λ is cross-validated on two halves of the rows that calibrate: where the
//! correction would not carry over to unseen rows, it is damped or left out.

use crate::calibrate::covariance::{Covariance, drop_non_finite};
use crate::checkpoint::names::Projection;
use crate::config::choices::{DownCovariance, DownTarget};
use crate::error::{Result, refuse};
use crate::linalg::{Matrix, View, cholesky, cholesky_solve, matmul_f64};

use super::expert::{Expert, intermediate};

/// Rows summed at a time, in order.
const BLOCK: usize = 256;
/// Rows that go to one half of the cross-validation before the other has its turn.
const FOLD: usize = 64;
/// Dampings tried, as shares of the mean diagonal, weakest first; without any the source weight is the target.
const DAMPINGS: [f64; 3] = [0.025, 0.25, 2.5];

/// Down's side of an encode.
#[derive(Debug, Clone)]
pub struct DownInput {
    /// Mean of JᵀJ over the calibration rows, `[I, I]`.
    pub covariance: Matrix<f32>,
    /// The corrected weight `[I, H]`; `None` where the source weight is the target.
    pub target: Option<Matrix<f32>>,
    /// Rows left out because a derived value was not finite.
    pub dropped_rows: usize,
}

/// Means over calibration rows that a correction is solved from, `[I, I]` each.
struct Moments {
    /// E[JᵀJ].
    square: Matrix<f64>,
    /// E[Jᵀ(I - J)].
    cross: Matrix<f64>,
    /// E[(I - J)ᵀ(I - J)]; only cross-validation needs it.
    difference: Matrix<f64>,
}

/// Derived rows of both kinds, those not finite left out.
struct Derived {
    reconstructed: Matrix<f32>,
    difference: Option<Matrix<f32>>,
    dropped_rows: usize,
}

impl Expert<'_> {
    /// The covariance and target of down behind these gate and up. `damping` is that of [`Expert::choose_damping`];
    /// `None` means the source weight.
    ///
    /// # Errors
    /// Rows that are all zero, or more than a tenth of them not finite.
    pub fn down_input(
        &self,
        gate: &Matrix<f32>,
        up: &Matrix<f32>,
        damping: Option<f64>,
    ) -> Result<DownInput> {
        let named = self.name(Projection::Down);
        let correct = damping.is_some();
        let fit = self.derive(&self.fit, gate, up, correct)?;
        let fallback = self.derive(&self.fallback, gate, up, correct)?;
        let dropped_rows = fit.dropped_rows + fallback.dropped_rows;
        let through = self.blend(&fit.reconstructed, &fallback.reconstructed).map_err(&named)?;
        let target = match damping {
            None => None,
            Some(damping) => {
                let cross = self.moment(&fit, &fallback, cross_of);
                let square = Matrix::new(
                    through.rows,
                    through.cols,
                    through.data.iter().map(|&x| f64::from(x)).collect(),
                );
                Some(self.corrected(&solve(square, cross, damping).map_err(&named)?))
            }
        };
        let covariance = match self.recipe.down_covariance {
            DownCovariance::Reconstructed => through,
            DownCovariance::Source => {
                let [gate, up, _] = &self.weights.matrices;
                let rows = |x: &Matrix<f32>| -> Result<Matrix<f32>> {
                    Ok(drop_non_finite(intermediate(x, gate, up)).map_err(&named)?.0)
                };
                let (fit, fallback) = (rows(&self.fit)?, rows(&self.fallback)?);
                self.blend(&fit, &fallback).map_err(&named)?
            }
        };
        Ok(DownInput { covariance, target, dropped_rows })
    }

    /// The damping of down's correction behind these gate and up: the one whose correction, solved on one half of the
    /// calibration rows, leaves the least error on the other. `None` where leaving the weight alone is best, or where the
    /// recipe wants the source weight.
    ///
    /// # Errors
    /// As [`Expert::down_input`].
    pub fn choose_damping(&self, gate: &Matrix<f32>, up: &Matrix<f32>) -> Result<Option<f64>> {
        if self.recipe.down_target == DownTarget::Source {
            return Ok(None);
        }
        let fit = self.derive(&self.fit, gate, up, true)?;
        let fallback = self.derive(&self.fallback, gate, up, true)?;
        let halves = [0, 1].map(|half| {
            let part = |rows: &Derived| rows.fold(half);
            let (fit, fallback) = (part(&fit), part(&fallback));
            if fit.reconstructed.rows + fallback.reconstructed.rows == 0 {
                return None;
            }
            Some(Moments {
                square: self
                    .moment(&fit, &fallback, |rows| mean_product(&rows.reconstructed, &rows.reconstructed)),
                cross: self.moment(&fit, &fallback, cross_of),
                difference: self.moment(&fit, &fallback, |rows| {
                    let difference = rows.difference.as_ref().expect("derived with a difference");
                    mean_product(difference, difference)
                }),
            })
        });
        let [Some(a), Some(b)] = halves else { return Ok(None) };
        let weight = &self.weights.matrices[Projection::Down as usize];
        let exact =
            Matrix::new(weight.rows, weight.cols, weight.data.iter().map(|&x| f64::from(x)).collect());
        let gram = product(&exact, &exact.transposed());
        let mut best = (trace(&gram, &a.difference) + trace(&gram, &b.difference), None);
        for damping in DAMPINGS.into_iter().rev() {
            let mut error = 0.0;
            for (solved, unseen) in [(&a, &b), (&b, &a)] {
                // Half the rows can be all zero where the whole is not: no correction can be solved from them.
                let Ok(x) = solve(solved.square.clone(), solved.cross.clone(), damping) else {
                    error = f64::INFINITY;
                    break;
                };
                let squared = product(&x.transposed(), &product(&unseen.square, &x));
                let crossed = product(&x.transposed(), &unseen.cross);
                error +=
                    trace(&gram, &unseen.difference) - 2.0 * trace(&gram, &crossed) + trace(&gram, &squared);
            }
            if error < best.0 {
                best = (error, Some(damping));
            }
        }
        Ok(best.1)
    }

    /// `W + X W`.
    fn corrected(&self, x: &Matrix<f64>) -> Matrix<f32> {
        let weight = &self.weights.matrices[Projection::Down as usize];
        let exact =
            Matrix::new(weight.rows, weight.cols, weight.data.iter().map(|&x| f64::from(x)).collect());
        let change = product(x, &exact);
        let data = exact.data.iter().zip(&change.data).map(|(w, d)| (w + d) as f32).collect();
        Matrix::new(weight.rows, weight.cols, data)
    }

    fn derive(
        &self,
        rows: &Matrix<f32>,
        gate: &Matrix<f32>,
        up: &Matrix<f32>,
        both: bool,
    ) -> Result<Derived> {
        let reconstructed = intermediate(rows, gate, up);
        if !both {
            let (reconstructed, dropped_rows) =
                drop_non_finite(reconstructed).map_err(self.name(Projection::Down))?;
            return Ok(Derived { reconstructed, difference: None, dropped_rows });
        }
        let [gate, up, _] = &self.weights.matrices;
        let mut difference = intermediate(rows, gate, up);
        difference.data.iter_mut().zip(&reconstructed.data).for_each(|(i, j)| *i -= j);
        // A value that is not finite on either side is not finite in the difference.
        let good: Vec<usize> =
            (0..rows.rows).filter(|&row| difference.row(row).iter().all(|x| x.is_finite())).collect();
        let dropped_rows = rows.rows - good.len();
        if dropped_rows == 0 {
            return Ok(Derived { reconstructed, difference: Some(difference), dropped_rows });
        }
        // The same limit and words as without a difference.
        drop_non_finite(difference.clone()).map_err(self.name(Projection::Down))?;
        let (reconstructed, difference) = (reconstructed.gather_rows(&good), difference.gather_rows(&good));
        Ok(Derived { reconstructed, difference: Some(difference), dropped_rows })
    }

    /// A mean over the expert's own rows and its fallback's, by the fallback's share.
    fn moment(
        &self,
        fit: &Derived,
        fallback: &Derived,
        mean: impl Fn(&Derived) -> Matrix<f64>,
    ) -> Matrix<f64> {
        match (fit.reconstructed.rows, fallback.reconstructed.rows) {
            (_, 0) => mean(fit),
            (0, _) => mean(fallback),
            _ => {
                let (mut own, other, share) = (mean(fit), mean(fallback), self.fallback_share);
                own.data.iter_mut().zip(&other.data).for_each(|(x, y)| *x = (1.0 - share) * *x + share * y);
                own
            }
        }
    }

    /// The covariance of rows and fallback rows under the expert's fallback share.
    pub(super) fn blend(&self, fit: &Matrix<f32>, fallback: &Matrix<f32>) -> Result<Matrix<f32>> {
        let sum = |rows: &Matrix<f32>| {
            let mut sum = Covariance::new(rows.cols);
            sum.add(rows);
            sum
        };
        sum(fit).blend((fallback.rows > 0).then(|| sum(fallback)), self.fallback_share)
    }
}

impl Derived {
    /// One half of the rows, in alternate runs.
    fn fold(&self, half: usize) -> Self {
        let rows: Vec<usize> = (0..self.reconstructed.rows).filter(|row| row / FOLD % 2 == half).collect();
        Self {
            reconstructed: self.reconstructed.gather_rows(&rows),
            difference: self.difference.as_ref().map(|difference| difference.gather_rows(&rows)),
            dropped_rows: 0,
        }
    }
}

fn cross_of(rows: &Derived) -> Matrix<f64> {
    mean_product(&rows.reconstructed, rows.difference.as_ref().expect("derived with a difference"))
}

/// Mean over rows of `aᵀ b`, f32 data, f64 sums in row order.
fn mean_product(a: &Matrix<f32>, b: &Matrix<f32>) -> Matrix<f64> {
    let k = a.cols;
    let mut sum = Matrix::<f64>::zeros(k, k);
    let wide = |m: &Matrix<f32>, rows: std::ops::Range<usize>| -> Vec<f64> {
        m.data[rows.start * k..rows.end * k].iter().map(|&x| f64::from(x)).collect()
    };
    for start in (0..a.rows).step_by(BLOCK) {
        let rows = start..a.rows.min(start + BLOCK);
        let (x, y) = (wide(a, rows.clone()), wide(b, rows.clone()));
        matmul_f64((k, k, rows.len()), View::transposed(&x, k), View::rows(&y, k), &mut sum.data, k);
    }
    let rows = a.rows as f64;
    sum.data.iter_mut().for_each(|x| *x /= rows);
    sum
}

/// `(square + damping · mean diagonal)⁻¹ cross`.
fn solve(mut square: Matrix<f64>, mut cross: Matrix<f64>, damping: f64) -> Result<Matrix<f64>> {
    let k = square.rows;
    let mean = (0..k).map(|i| square.data[i * k + i]).sum::<f64>() / k as f64;
    (0..k).for_each(|i| square.data[i * k + i] += damping * mean);
    cholesky(&mut square).map_err(|at| {
        refuse(format!(
            "the damped covariance is not positive definite: pivot {} at row {}",
            at.pivot, at.row
        ))
        .wanted("at least one row with a non-zero activation")
    })?;
    cholesky_solve(&square, &mut cross);
    Ok(cross)
}

fn product(a: &Matrix<f64>, b: &Matrix<f64>) -> Matrix<f64> {
    let mut out = Matrix::<f64>::zeros(a.rows, b.cols);
    matmul_f64(
        (a.rows, b.cols, a.cols),
        View::rows(&a.data, a.cols),
        View::rows(&b.data, b.cols),
        &mut out.data,
        b.cols,
    );
    out
}

/// `tr(a b)` for symmetric `a`.
fn trace(a: &Matrix<f64>, b: &Matrix<f64>) -> f64 {
    a.data.iter().zip(&b.data).map(|(x, y)| x * y).sum()
}
