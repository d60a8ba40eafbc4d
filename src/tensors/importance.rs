//! What the errors of a weight's inputs weigh, wherever it comes from.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::hessian::Hessians;
use super::imatrix::Imatrix;
use crate::codec::kaiju::Importance;
use crate::error::{Result, refuse};
use crate::linalg::Matrix;

/// Where importance is read from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImportanceFile {
    /// Nowhere: all inputs weigh the same.
    None,
    /// An importance matrix of llama.cpp, GGUF.
    Imatrix(PathBuf),
    /// Hessians by the name of the weight, safetensors.
    Hessian(PathBuf),
}

/// Where the importance of one tensor came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ImportanceSource {
    /// No file was given.
    Flat,
    /// The file has nothing of it, and that was allowed.
    FlatFallback,
    /// A mean square by input, of an importance matrix.
    Imatrix,
    /// A mean square by input.
    HessianDiagonal,
    /// The mean of xxᵀ.
    HessianFull,
}

impl ImportanceSource {
    /// As tables spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Flat => "flat",
            Self::FlatFallback => "flat (missing)",
            Self::Imatrix => "imatrix",
            Self::HessianDiagonal => "diagonal",
            Self::HessianFull => "Hessian",
        }
    }
}

/// What the errors of a weight's K inputs weigh.
#[derive(Debug, Clone, PartialEq)]
pub enum InputWeights {
    /// The mean of x² by input, `[K]`.
    Diagonal(Vec<f64>),
    /// The mean of xxᵀ, `[K, K]`.
    Full(Matrix),
}

impl InputWeights {
    /// The mean of x² by input.
    pub fn diagonal(&self) -> Vec<f64> {
        self.borrowed().diagonal()
    }

    /// As the codec takes it.
    pub fn borrowed(&self) -> Importance<'_> {
        match self {
            Self::Diagonal(diagonal) => Importance::Diagonal(diagonal),
            Self::Full(matrix) => Importance::Full(matrix),
        }
    }

    /// As a full covariance.
    pub fn into_covariance(self) -> Matrix {
        match self {
            Self::Full(matrix) => matrix,
            Self::Diagonal(diagonal) => {
                let k = diagonal.len();
                let mut matrix = Matrix::zeros(k, k);
                diagonal.iter().enumerate().for_each(|(i, &h)| matrix.data[i * k + i] = h as f32);
                matrix
            }
        }
    }
}

/// What a file says of a weight.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Found {
    /// Its importance.
    Weights(InputWeights, ImportanceSource),
    /// Nothing, and why.
    Missing(String),
}

/// An opened file of importance.
pub(super) enum ImportanceReader {
    Flat,
    Imatrix(Imatrix),
    Hessians(Hessians),
}

impl ImportanceReader {
    /// Opens the file.
    pub fn open(file: &ImportanceFile) -> Result<Self> {
        Ok(match file {
            ImportanceFile::None => Self::Flat,
            ImportanceFile::Imatrix(path) => Self::Imatrix(Imatrix::open(path)?),
            ImportanceFile::Hessian(path) => Self::Hessians(Hessians::open(path)?),
        })
    }

    /// The file, where there is one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Flat => None,
            Self::Imatrix(imatrix) => Some(imatrix.path()),
            Self::Hessians(hessians) => Some(hessians.path()),
        }
    }

    /// Kind of the file, for records.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Flat => "flat",
            Self::Imatrix(_) => "imatrix",
            Self::Hessians(_) => "hessian",
        }
    }

    /// The importance of the `cols` inputs of `weight`; flat where the file has nothing of it and `flat_missing` allows.
    ///
    /// # Errors
    /// Names the file and the tensor of what is missing or wrong.
    pub fn of(
        &self,
        weight: &str,
        cols: usize,
        flat_missing: bool,
    ) -> Result<(InputWeights, ImportanceSource)> {
        let flat = || InputWeights::Diagonal(vec![1.0; cols]);
        let (path, found) = match self {
            Self::Flat => return Ok((flat(), ImportanceSource::Flat)),
            Self::Imatrix(imatrix) => (imatrix.path(), imatrix.find(weight, cols)?),
            Self::Hessians(hessians) => (hessians.path(), hessians.find(weight, cols)?),
        };
        match found {
            Found::Weights(weights, source) => Ok((weights, source)),
            Found::Missing(_) if flat_missing => Ok((flat(), ImportanceSource::FlatFallback)),
            Found::Missing(why) => refuse(why)
                .file(path)
                .tensor(weight)
                .wanted(
                    "an entry for every encoded tensor, or --flat-missing to encode those without as flat",
                )
                .err(),
        }
    }
}

/// A diagonal of finite numbers from 0; missing where all are 0.
///
/// # Errors
/// The place and value of the first that is none.
pub(super) fn checked(diagonal: Vec<f64>, source: ImportanceSource) -> Result<Found> {
    if let Some(at) = diagonal.iter().position(|h| !h.is_finite() || *h < 0.0) {
        return refuse(format!("the importance of input {at} is {}", diagonal[at]))
            .wanted("finite numbers from 0")
            .err();
    }
    match diagonal.iter().all(|&h| h == 0.0) {
        true => Ok(Found::Missing("the importance of all its inputs is 0".to_owned())),
        false => Ok(Found::Weights(InputWeights::Diagonal(diagonal), source)),
    }
}
