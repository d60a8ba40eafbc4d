//! Hessians of weights in a safetensors file, by the weight's name: `[K]`, the mean of x² by input, or `[K, K]`, the mean of
//! xxᵀ, F32 or F64.

use std::path::Path;

use super::importance::{Found, ImportanceSource, InputWeights, checked};
use crate::error::{Result, refuse};
use crate::linalg::Matrix;
use crate::store::safetensors_read::SafetensorsFile;
use crate::store::tensor_dtype::TensorDtype;

/// How far two entries that mirror each other may differ, relative to what positive definiteness lets them reach.
const ASYMMETRY: f64 = 1e-3;

/// A file of Hessians.
#[derive(Debug)]
pub struct Hessians(SafetensorsFile);

impl Hessians {
    /// Opens a file.
    ///
    /// # Errors
    /// As [`SafetensorsFile::open`].
    pub fn open(path: &Path) -> Result<Self> {
        SafetensorsFile::open(path).map(Self)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// What it has for the `cols` inputs of a weight.
    pub(super) fn find(&self, weight: &str, cols: usize) -> Result<Found> {
        if !self.0.contains(weight) {
            return Ok(Found::Missing("there is no Hessian of this name".to_owned()));
        }
        let place = |what: String| refuse(what).file(self.path()).tensor(weight);
        let info = self.0.info(weight)?;
        let bytes = self.0.bytes(weight)?;
        let values: Vec<f64> = match info.dtype {
            TensorDtype::F32 => {
                bytes.as_chunks().0.iter().map(|x| f64::from(f32::from_le_bytes(*x))).collect()
            }
            TensorDtype::F64 => bytes.as_chunks().0.iter().map(|x| f64::from_le_bytes(*x)).collect(),
            other => return place(format!("it is {other}")).wanted("F32 or F64").err(),
        };
        if info.shape == [cols] {
            return checked(values, ImportanceSource::HessianDiagonal)
                .map_err(|error| error.place(|refusal| refusal.file(self.path()).tensor(weight)));
        }
        if info.shape != [cols, cols] {
            return place(format!("its shape is {:?}", info.shape))
                .wanted(format!("[{cols}] or [{cols}, {cols}]"))
                .err();
        }
        if let Some(at) = values.iter().position(|x| !(*x as f32).is_finite()) {
            return place(format!("entry [{}, {}] is {}", at / cols, at % cols, values[at]))
                .wanted("finite numbers of F32")
                .err();
        }
        let diagonal: Vec<f64> = (0..cols).map(|i| values[i * cols + i]).collect();
        for i in 0..cols {
            for j in 0..i {
                let (below, above) = (values[i * cols + j], values[j * cols + i]);
                let reach = (diagonal[i] * diagonal[j]).abs().sqrt();
                if (below - above).abs() > ASYMMETRY * reach {
                    return place(format!("entries [{i}, {j}] and [{j}, {i}] are {below} and {above}"))
                        .wanted("a symmetric matrix")
                        .err();
                }
            }
        }
        let found = checked(diagonal, ImportanceSource::HessianFull)
            .map_err(|error| error.place(|refusal| refusal.file(self.path()).tensor(weight)))?;
        Ok(match found {
            Found::Weights(_, source) => {
                let matrix = Matrix::new(cols, cols, values.iter().map(|&x| x as f32).collect());
                Found::Weights(InputWeights::Full(matrix), source)
            }
            missing => missing,
        })
    }
}
