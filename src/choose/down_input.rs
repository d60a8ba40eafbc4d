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
                Some(self.corrected(&solve(through.widened(), cross, damping).map_err(&named)?))
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
        let exact = weight.widened();
        let gram = exact.product(&exact.transposed());
        let mut best = (trace(&gram, &a.difference) + trace(&gram, &b.difference), None);
        for damping in DAMPINGS.into_iter().rev() {
            let mut error = 0.0;
            for (solved, unseen) in [(&a, &b), (&b, &a)] {
                // Half the rows can be all zero where the whole is not: no correction can be solved from them.
                let Ok(x) = solve(solved.square.clone(), solved.cross.clone(), damping) else {
                    error = f64::INFINITY;
                    break;
                };
                let squared = x.transposed().product(&unseen.square.product(&x));
                let crossed = x.transposed().product(&unseen.cross);
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
        let exact = weight.widened();
        let change = x.product(&exact);
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

/// `tr(a b)` for symmetric `a`.
fn trace(a: &Matrix<f64>, b: &Matrix<f64>) -> f64 {
    a.data.iter().zip(&b.data).map(|(x, y)| x * y).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choose::expert::ExpertWeights;
    use crate::choose::vectors::{ExpertChoice, SharedChoice, expert_vectors, shared_vectors};
    use crate::config::Recipe;
    use crate::store::seed::SplitMix64;

    const HIDDEN: usize = 12;
    const INNER: usize = 10;

    fn noise(rows: usize, cols: usize, seed: u64, scale: f32) -> Matrix<f32> {
        let mut random = SplitMix64::new(seed);
        let mut next = || (random.next_u64() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        Matrix::new(rows, cols, (0..rows * cols).map(|_| scale * next()).collect())
    }

    fn with_expert(rows: usize, test: impl FnOnce(&Expert<'_>, [&Matrix<f32>; 2])) {
        with_rows(noise(rows, HIDDEN, 4, 1.0), test);
    }

    fn with_rows(fit: Matrix<f32>, test: impl FnOnce(&Expert<'_>, [&Matrix<f32>; 2])) {
        let recipe = Recipe::built_in().unwrap();
        let weights = ExpertWeights {
            matrices: [
                noise(HIDDEN, INNER, 1, 1.0),
                noise(HIDDEN, INNER, 2, 1.0),
                noise(INNER, HIDDEN, 3, 1.0),
            ],
        };
        let shared = shared_vectors("r", 3, HIDDEN, &SharedChoice::default());
        let expert = Expert {
            layer: 3,
            id: 0,
            recipe: &recipe,
            weights,
            vectors: expert_vectors("r", 3, 0, &ExpertChoice::plain(INNER), &shared),
            fit,
            fallback: Matrix::zeros(0, HIDDEN),
            fallback_share: 0.0,
            holdout: noise(500, HIDDEN, 5, 1.0),
            clipped: Default::default(),
            median_diagonal: None,
        };
        let off = |m: &Matrix<f32>, seed| {
            let error = noise(m.rows, m.cols, seed, 0.2);
            Matrix::new(m.rows, m.cols, m.data.iter().zip(&error.data).map(|(w, e)| w + e).collect())
        };
        let (gate, up) = (off(&expert.weights.matrices[0], 6), off(&expert.weights.matrices[1], 7));
        test(&expert, [&gate, &up]);
    }

    #[test]
    fn the_corrected_target_makes_up_for_gate_and_up_on_rows_it_never_saw() {
        with_expert(600, |expert, [gate, up]| {
            let damping = expert.choose_damping(gate, up).unwrap();
            assert!(damping.is_some());
            let input = expert.down_input(gate, up, damping).unwrap();
            let reference = expert.reference();
            let plain = expert.loss(&reference, gate, up, &expert.weights.matrices[2]).absolute;
            let corrected = expert.loss(&reference, gate, up, &input.target.unwrap()).absolute;
            assert!(corrected < 0.9 * plain, "{corrected} {plain}");
            // The covariance is the same with and without a target.
            assert_eq!(input.covariance, expert.down_input(gate, up, None).unwrap().covariance);
        });
    }

    #[test]
    fn nothing_is_corrected_where_nothing_was_lost_or_too_little_is_known() {
        with_expert(600, |expert, _| {
            let [gate, up, _] = &expert.weights.matrices;
            assert_eq!(expert.choose_damping(gate, up).unwrap(), None);
        });
        // One run of rows: no second half to hold a correction against.
        with_expert(FOLD, |expert, [gate, up]| {
            assert_eq!(expert.choose_damping(gate, up).unwrap(), None);
        });
    }

    #[test]
    fn derived_rows_that_are_not_finite_are_counted_and_more_than_a_tenth_stop() {
        for damping in [None, Some(0.25)] {
            for spoilt in [0, 10, 11] {
                // Finite inputs whose products with gate and up are not.
                let mut fit = noise(100, HIDDEN, 4, 1.0);
                fit.data[..spoilt * HIDDEN].iter_mut().for_each(|x| *x = 3e38 * x.signum());
                with_rows(fit, |expert, [gate, up]| {
                    let input = expert.down_input(gate, up, damping);
                    if spoilt < 11 {
                        let input = input.unwrap();
                        assert_eq!(input.dropped_rows, spoilt);
                        assert!(input.covariance.data.iter().all(|x| x.is_finite()));
                        return;
                    }
                    let stopped = input.unwrap_err().to_string();
                    for part in ["layer 3", "expert 0", "11 of 100 derived rows are not finite", "10 %"] {
                        assert!(stopped.contains(part), "{stopped}");
                    }
                });
            }
        }
    }

    #[test]
    fn fewer_rows_are_damped_more() {
        let damping = |rows| {
            let mut found = None;
            with_expert(rows, |expert, [gate, up]| {
                found = expert.choose_damping(gate, up).unwrap();
            });
            found.unwrap_or(f64::INFINITY)
        };
        assert!(damping(FOLD + 2) >= damping(600), "{} {}", damping(FOLD + 2), damping(600));
    }
}
