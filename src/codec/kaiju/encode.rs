//! From weights to a payload.
//!
//! Columns by second moment to side-band or bulk; for each row the block scale and representable point of every 24-block
//! that leave the least weighted error, all 16 scales looked at; then the row scale by least squares, and once more.

use half::f16;
use rayon::prelude::*;

use super::Settings;
use super::blocks::BlockFitter;
use super::code::CodeWidth;
use super::decode::hi_value;
use super::feedback::encode_with_feedback;
use super::format::{BulkRow, Header, HiColumn, KaijuTensor, bulk_columns};
use crate::error::{Result, refuse};
use crate::linalg::Matrix;

/// What the errors of a tensor's inputs weigh.
#[derive(Debug, Clone, Copy)]
pub enum Importance<'a> {
    /// The mean of x² by input, `[K]`.
    Diagonal(&'a [f64]),
    /// The mean of xxᵀ, `[K, K]`.
    Full(&'a Matrix<f32>),
}

impl Importance<'_> {
    /// Its diagonal.
    pub fn diagonal(&self) -> Vec<f64> {
        match self {
            Self::Diagonal(diagonal) => diagonal.to_vec(),
            Self::Full(matrix) => {
                (0..matrix.rows).map(|i| f64::from(matrix.data[i * matrix.cols + i])).collect()
            }
        }
    }

    fn check(&self, cols: usize) -> Result<()> {
        let sizes = match self {
            Self::Diagonal(diagonal) => vec![diagonal.len()],
            Self::Full(matrix) => vec![matrix.rows, matrix.cols],
        };
        if sizes.iter().any(|&size| size != cols) {
            return refuse(format!("importance of {sizes:?} for {cols} inputs"))
                .wanted(format!("{cols}"))
                .err();
        }
        let diagonal = self.diagonal();
        if let Some(at) = diagonal.iter().position(|x| !x.is_finite() || *x < 0.0) {
            return refuse(format!("the importance of input {at} is {}", diagonal[at]))
                .wanted("finite numbers from 0")
                .err();
        }
        match self {
            Self::Full(matrix) if matrix.data.iter().any(|x| !x.is_finite()) => {
                refuse("the covariance has an entry that is not finite").wanted("finite numbers").err()
            }
            _ => Ok(()),
        }
    }
}

/// Encodes a weight `[N, K]`. The payload is read back and checked before it is returned.
///
/// # Errors
/// A weight that is not finite or too large for an f16 scale, by row and column; importance of another size, not finite,
/// or negative; a covariance that cannot be factored; settings out of range.
pub fn encode(weight: &Matrix<f32>, importance: Importance<'_>, settings: &Settings) -> Result<KaijuTensor> {
    if let Some(at) = weight.data.iter().position(|w| !w.is_finite()) {
        return refuse(format!("the weight at column {} is {}", at % weight.cols, weight.data[at]))
            .row(at / weight.cols)
            .wanted("finite weights")
            .err();
    }
    let header = Header::plan((weight.rows, weight.cols), settings.code, settings.hi_frac)?;
    importance.check(weight.cols)?;
    let mut diagonal = importance.diagonal();
    if diagonal.iter().all(|&h| h == 0.0) {
        diagonal.fill(1.0);
    }
    let hi_index = largest(&diagonal, header.hi_count);
    let bulk = bulk_columns(header.cols, &hi_index);
    let columns = (hi_index.as_slice(), bulk.as_slice());
    let (rows, hi) = match importance {
        Importance::Full(covariance) if settings.feedback => {
            encode_with_feedback(weight, covariance, settings.code, columns)?
        }
        _ => encode_plainly(weight, &diagonal, settings.code, columns)?,
    };
    KaijuTensor::assemble(&header, &hi, &rows)
}

/// Rows of the bulk and columns of the side-band.
pub(super) type Parts = (Vec<BulkRow>, Vec<HiColumn>);

/// Every block by itself under a diagonal.
fn encode_plainly(
    weight: &Matrix<f32>,
    diagonal: &[f64],
    code: CodeWidth,
    (hi_index, bulk): (&[u32], &[u32]),
) -> Result<Parts> {
    let fitter = BlockFitter::new(code, bulk.iter().map(|&c| diagonal[c as usize]).collect());
    let rows = (0..weight.rows)
        .into_par_iter()
        .map(|row| {
            let weights = weight.row(row);
            let target: Vec<f32> = bulk.iter().map(|&c| weights[c as usize]).collect();
            fitter.row(&target).map_err(|error| error.place(|refusal| refusal.row(row)))
        })
        .collect::<Result<_>>()?;
    let column = |&column: &u32| {
        let values: Vec<f32> = (0..weight.rows).map(|row| weight.row(row)[column as usize]).collect();
        hi_column(column, &values)
    };
    Ok((rows, hi_index.iter().map(column).collect::<Result<_>>()?))
}

/// The `count` columns of largest importance, the lower one among equals; ascending.
fn largest(diagonal: &[f64], count: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..diagonal.len() as u32).collect();
    order.sort_by(|&a, &b| diagonal[b as usize].total_cmp(&diagonal[a as usize]).then(a.cmp(&b)));
    order.truncate(count);
    order.sort_unstable();
    order
}

/// A column of the side-band, nearest values to a scale of absmax / 127, or to the least-squares scale of those values
/// where that leaves less.
pub(super) fn hi_column(column: u32, values: &[f32]) -> Result<HiColumn> {
    let most = values.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let first = f16::from_f32(most / 127.0);
    if !first.is_finite() {
        return refuse(format!("a weight of {most} in column {column}"))
            .wanted(format!("at most {}", 127.0 * f16::MAX.to_f32()))
            .err();
    }
    let round = |scale: f16| -> Vec<i8> {
        if scale.to_f32() == 0.0 {
            return vec![0; values.len()];
        }
        values.iter().map(|x| (x / scale.to_f32()).round_ties_even().clamp(-127.0, 127.0) as i8).collect()
    };
    let error = |scale: f16, rounded: &[i8]| -> f64 {
        let errors = values.iter().zip(rounded).map(|(x, &q)| f64::from(x - hi_value(scale, q)));
        errors.map(|e| e * e).sum()
    };
    let mut best = (first, round(first));
    let (mut dot, mut square) = (0.0, 0.0);
    for (&x, &q) in values.iter().zip(&best.1) {
        dot += f64::from(x) * f64::from(q);
        square += f64::from(q) * f64::from(q);
    }
    let fitted = f16::from_f64(dot / square);
    if square > 0.0 && fitted.is_finite() {
        let again = round(fitted);
        if error(fitted, &again) < error(best.0, &best.1) {
            best = (fitted, again);
        }
    }
    Ok(HiColumn { column, scale: best.0, values: best.1 })
}
