//! Trial finalizations: the experts of a layer encoded once more at the bits, scales and damping that the base chose, under
//! a recipe with one pilot switched on; measured on both halves of the held-out rows.
//!
//! A half is a seeded hash of the row's id: `draw_seed(version, layer, shared, "pilot_half", row)` modulo 2. Nothing is
//! probed or allocated anew: a trial costs three encodes an expert and writes nothing.

use std::sync::atomic::Ordering;

use rayon::prelude::*;

use crate::checkpoint::names::Projection;
use crate::checkpoint::schema_v2::PackedExpert;
use crate::choose::expert::{Expert, decode, output};
use crate::choose::pilots::{OutputFactors, OutputSums};
use crate::codec::trellis::factor::factor;
use crate::error::{Result, refuse};
use crate::linalg::{Matrix, cholesky};
use crate::store::canonical_json::parse_float17;
use crate::store::seed::draw_seed;
use crate::walk::finals::FinalExpert;
use crate::walk::layer::LayerWork;

/// One expert of a trial.
pub struct TrialExpert {
    /// Gate, up, down.
    pub packed: PackedExpert,
    /// Output factors clipped.
    pub clipped: usize,
    /// Smallest over largest pivot of the factored metric: gate and up's, down's. NaN where it was not asked for.
    pub health: [f64; 2],
}

/// Mass-weighted relative held-out error in each half.
pub type Halves = [f64; 2];

/// Encodes every expert at what the base's records say.
///
/// # Errors
/// What an encode refuses, and a record whose numbers are none.
pub fn finalize(work: &LayerWork<'_>, records: &[FinalExpert], health: bool) -> Result<Vec<TrialExpert>> {
    let codec = work.codec.trellis()?;
    records
        .par_iter()
        .enumerate()
        .map(|(id, record)| {
            let expert = work.expert(id)?;
            let scale = |role: Projection| parse_float17(&record.tensors[role.as_str()].scale);
            let encode = |role: Projection, covariance: &Matrix<f32>, target: Option<&Matrix<f32>>| {
                let at = (record.bits[role as usize], scale(role)?);
                expert.encode(codec, role, at, covariance, target)
            };
            let input = expert.input_covariance()?;
            let gate = encode(Projection::Gate, &input, None)?;
            let up = encode(Projection::Up, &input, None)?;
            let (g, u) = (decode(&gate), decode(&up));
            let damping = record.down_damping.as_deref().map(parse_float17).transpose()?;
            let through = expert.down_input(&g.dense, &u.dense, damping)?;
            let down = encode(Projection::Down, &through.covariance, through.target.as_ref())?;
            let mut pivots = [f64::NAN; 2];
            if health {
                let sigma = |down: bool| work.recipe.sigma(down);
                pivots = [
                    pivot_ratio(factor(&input, &gate.suh, sigma(false))?.metric)?,
                    pivot_ratio(factor(&through.covariance, &down.suh, sigma(true))?.metric)?,
                ];
            }
            let clipped = expert.clipped.load(Ordering::Relaxed);
            Ok(TrialExpert { packed: [gate, up, down], clipped, health: pivots })
        })
        .collect()
}

/// Smallest over largest pivot (squared diagonal of the Cholesky factor).
fn pivot_ratio(metric: Matrix<f32>) -> Result<f64> {
    let k = metric.rows;
    let mut exact = Matrix::new(k, k, metric.data.iter().map(|&x| f64::from(x)).collect());
    cholesky(&mut exact)
        .map_err(|at| refuse(format!("pivot {} at row {}", at.pivot, at.row)).wanted("a positive pivot"))?;
    let pivots = (0..k).map(|i| exact.data[i * k + i].powi(2));
    let (low, high) = pivots.fold((f64::INFINITY, 0.0f64), |(low, high), x| (low.min(x), high.max(x)));
    Ok(low / high)
}

/// Refuses a trial of the base recipe that does not repeat the base's bytes: then the other trials mean nothing.
///
/// # Errors
/// A failed check that names layer, expert and tensor.
pub fn check_repeats(work: &LayerWork<'_>, records: &[FinalExpert], trials: &[TrialExpert]) -> Result<()> {
    for (id, (record, trial)) in records.iter().zip(trials).enumerate() {
        for role in Projection::ALL {
            let found = trial.packed[role as usize].packed_sha256();
            if found != record.tensors[role.as_str()].packed_sha256 {
                return Err(refuse("the trial of the base recipe differs from the base's final encode")
                    .layer(work.layer)
                    .expert(id)
                    .tensor(role.as_str())
                    .check());
            }
        }
    }
    Ok(())
}

/// The half a row is judged in.
fn half(work: &LayerWork<'_>, row: usize) -> usize {
    (draw_seed(&work.recipe.recipe_version, work.layer, None, "pilot_half", row as u32) % 2) as usize
}

/// Held-out error of the experts that `counts` names, in each half.
///
/// # Errors
/// A half without rows.
pub fn halves(
    work: &LayerWork<'_>,
    trials: &[TrialExpert],
    counts: impl Fn(usize) -> bool + Sync,
) -> Result<Halves> {
    let shares = work.capture.mass.shares();
    let sums = trials
        .par_iter()
        .enumerate()
        .map(|(id, trial)| {
            // Squared error, squared output and rows, by half.
            let mut sums = [[0.0f64; 3]; 2];
            if counts(id) {
                let expert = work.expert(id)?;
                let reference = expert.reference();
                let [g, u, d] = trial.packed.each_ref().map(|packed| packed.dense_f32());
                let got = output(&expert.holdout, &g, &u, &d);
                for (at, &row) in work.measured_rows(id).iter().enumerate() {
                    let sum = &mut sums[half(work, row)];
                    for (&want, &got) in reference.row(at).iter().zip(got.row(at)) {
                        sum[0] += (f64::from(want) - f64::from(got)).powi(2);
                        sum[1] += f64::from(want).powi(2);
                    }
                    sum[2] += 1.0;
                }
            }
            Ok(sums)
        })
        .collect::<Result<Vec<_>>>()?;
    let mut found = [0.0; 2];
    for (half, found) in found.iter_mut().enumerate() {
        let (mut error, mut energy) = (0.0, 0.0);
        for (sums, share) in sums.iter().zip(&shares) {
            let [squares, outputs, rows] = sums[half];
            if rows > 0.0 {
                error += share * squares / rows;
                energy += share * outputs / rows;
            }
        }
        if energy == 0.0 {
            return refuse(format!("half {} of the held-out rows has nothing to measure on", half + 1))
                .layer(work.layer)
                .wanted("a larger calibration corpus")
                .err();
        }
        *found = error / energy;
    }
    Ok(found)
}

/// One layer-level vector of output factors for down: least squares over all experts' calibration rows, each expert's
/// mean weighted by its mass.
///
/// # Errors
/// What reading an expert refuses.
pub fn down_factors(work: &LayerWork<'_>, trials: &[TrialExpert]) -> Result<OutputFactors> {
    let shares = work.capture.mass.shares();
    let parts = trials
        .par_iter()
        .enumerate()
        .map(|(id, trial)| {
            let expert = work.expert(id)?;
            let mut sums = OutputSums::new(work.geometry.hidden_size);
            let rows = if expert.fit.rows > 0 { &expert.fit } else { &expert.fallback };
            if rows.rows > 0 {
                let [g, u, d] = trial.packed.each_ref().map(|packed| packed.dense_f32());
                let wanted = source_output(&expert, rows);
                sums.add(&output(rows, &g, &u, &d), &wanted, shares[id] / rows.rows as f64);
            }
            Ok(sums)
        })
        .collect::<Result<Vec<_>>>()?;
    let mut all = OutputSums::new(work.geometry.hidden_size);
    parts.iter().for_each(|part| all.merge(part));
    Ok(all.factors())
}

fn source_output(expert: &Expert<'_>, rows: &Matrix<f32>) -> Matrix<f32> {
    let [gate, up, down] = &expert.weights.matrices;
    output(rows, gate, up, down)
}
