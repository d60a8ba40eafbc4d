//! Linear modules of the checkpoint, and the two ways between tensors and flat rows.
//!
//! A weight is packed once when it is loaded; how it is multiplied, and why a row's bytes depend on that row alone, is
//! said in [`linalg`](crate::linalg).

use candle_core::{DType, Device, Tensor};

use crate::checkpoint::WeightSource;
use crate::error::{Result, refuse};
use crate::linalg::Packed;

/// A linear module: weight `[out, in]` and, where the config says so, a bias `[out]`.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Packed,
    bias: Option<Vec<f32>>,
}

impl Linear {
    /// Takes a weight `[out, in]` of type f32 on the CPU.
    ///
    /// # Errors
    /// When the tensor is no f32 CPU matrix, or the bias has not one value per output.
    pub fn new(weight: &Tensor, bias: Option<Vec<f32>>) -> Result<Self> {
        let (out, input) = weight.dims2()?;
        if weight.dtype() != DType::F32 || !weight.device().is_cpu() || out == 0 || input == 0 {
            return refuse(format!("a weight {:?} of type {:?}", weight.dims(), weight.dtype()))
                .wanted("an f32 matrix on the CPU")
                .err();
        }
        if let Some(bias) = &bias
            && bias.len() != out
        {
            return refuse(format!("a bias of {} values", bias.len())).wanted(format!("{out} values")).err();
        }
        let weight: Vec<f32> = weight.flatten_all()?.to_vec1()?;
        Ok(Self { weight: Packed::transposed(&weight, out, input), bias })
    }

    /// Loads the weight `name` of shape `[out, in]`, without bias.
    ///
    /// # Errors
    /// What the source says.
    pub fn load(
        weights: &dyn WeightSource,
        name: &str,
        out: usize,
        input: usize,
        device: &Device,
    ) -> Result<Self> {
        Self::new(&weights.load(name, &[out, input], DType::F32, device)?, None)
    }

    /// Adds the bias `name`.
    ///
    /// # Errors
    /// What the source says.
    pub fn with_bias(mut self, weights: &dyn WeightSource, name: &str, device: &Device) -> Result<Self> {
        let out = self.out_features();
        self.bias = Some(weights.load(name, &[out], DType::F32, device)?.to_vec1()?);
        Ok(self)
    }

    /// Width of the input.
    pub fn in_features(&self) -> usize {
        self.weight.rows()
    }

    /// Width of the result.
    pub fn out_features(&self) -> usize {
        self.weight.columns()
    }

    /// `x [n, in]` (flat) to `[n, out]` (flat).
    ///
    /// # Errors
    /// When `x` is not made of whole rows.
    pub fn forward(&self, x: &[f32]) -> Result<Vec<f32>> {
        let mut y = self.weight.multiply(x)?;
        if let Some(bias) = &self.bias {
            for row in y.chunks_exact_mut(bias.len()) {
                for (y, b) in row.iter_mut().zip(bias) {
                    *y += b;
                }
            }
        }
        Ok(y)
    }
}

/// Copies a tensor `[n, width]` into flat f32 rows.
///
/// # Errors
/// When it is no matrix of that width.
pub(super) fn rows_of(tensor: &Tensor, width: usize) -> Result<Vec<f32>> {
    match tensor.dims() {
        [_, w] if *w == width => Ok(tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?),
        dims => refuse(format!("a tensor of shape {dims:?}")).wanted(format!("[rows, {width}]")).err(),
    }
}

/// Wraps flat rows as a tensor `[n, width]` on the CPU.
///
/// # Errors
/// When they are not whole rows.
pub(super) fn tensor_of(rows: Vec<f32>, width: usize) -> Result<Tensor> {
    let count = rows.len() / width.max(1);
    Ok(Tensor::from_vec(rows, (count, width), &Device::Cpu)?)
}
