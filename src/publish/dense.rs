//! Packed linears as the payloads of plain weights.
//!
//! A module decodes to f16 `[K, N]`: the values that every reader installs. Its weight is the transpose `[N, K]`, as it
//! is (F16, exact), upcast (F32, exact), or rounded to the nearest BF16, ties to even. An f16 value, subnormal or not,
//! lies within BF16's normal range, so that rounding is off by at most half a BF16 step: 2^-8 of the value.

use half::{bf16, f16};
use serde::Serialize;

use crate::checkpoint::packed::PackedModule;
use crate::checkpoint::trellis_tensors::TensorReader;
use crate::error::{Result, refuse};
use crate::store::tensor_dtype::TensorDtype;

/// Type of the weights that packed linears become.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightDtype {
    /// Rounded to nearest, ties to even.
    #[default]
    Bf16,
    /// Exact.
    F16,
    /// Exact.
    F32,
}

impl WeightDtype {
    /// As a safetensors header spells it.
    pub fn stored(self) -> TensorDtype {
        match self {
            Self::Bf16 => TensorDtype::BF16,
            Self::F16 => TensorDtype::F16,
            Self::F32 => TensorDtype::F32,
        }
    }

    /// As options spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
        }
    }
}

/// How far written weights are from decoded ones.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Rounding {
    /// Largest difference.
    pub max_error: f64,
    /// Largest difference relative to the decoded value.
    pub max_relative_error: f64,
}

impl Rounding {
    fn of(exact: f32, rounded: f32) -> Self {
        let error = f64::from((exact - rounded).abs());
        let relative = if error > 0.0 { error / f64::from(exact.abs()) } else { 0.0 };
        Self { max_error: error, max_relative_error: relative }
    }

    /// The larger of each.
    pub fn max(self, other: Self) -> Self {
        Self {
            max_error: self.max_error.max(other.max_error),
            max_relative_error: self.max_relative_error.max(other.max_relative_error),
        }
    }
}

/// The payload of a module's weight `[N, K]`, and how far it is from what the module decodes to.
///
/// # Errors
/// As [`PackedModule::dense`]; names the module where a decoded value is not finite.
pub fn payload(
    module: &PackedModule,
    tensors: &dyn TensorReader,
    dtype: WeightDtype,
) -> Result<(Vec<u8>, Rounding)> {
    let weight = module.dense(tensors)?.transposed();
    if let Some(at) = weight.data.iter().position(|x| !x.is_finite()) {
        return refuse(format!("the decoded value at flat index {at} is {}", weight.data[at]))
            .file(tensors.file_of(&module.slices[0].trellis))
            .tensor(format!("{}.weight", module.module))
            .row(at / weight.cols)
            .wanted("finite weights")
            .err();
    }
    let mut bytes = Vec::with_capacity(weight.data.len() * dtype.stored().size());
    let mut rounding = Rounding::default();
    match dtype {
        WeightDtype::F32 => weight.data.iter().for_each(|x| bytes.extend_from_slice(&x.to_le_bytes())),
        WeightDtype::F16 => {
            for &exact in &weight.data {
                let rounded = f16::from_f32(exact);
                rounding = rounding.max(Rounding::of(exact, rounded.to_f32()));
                bytes.extend_from_slice(&rounded.to_le_bytes());
            }
        }
        WeightDtype::Bf16 => {
            for &exact in &weight.data {
                let rounded = bf16::from_f32(exact);
                rounding = rounding.max(Rounding::of(exact, rounded.to_f32()));
                bytes.extend_from_slice(&rounded.to_le_bytes());
            }
        }
    }
    Ok((bytes, rounding))
}
