//! Packed linears as the payloads of plain weights.
//!
//! A module's weight `[N, K]`, the values that every reader installs, is written as it is (F32) or rounded to the nearest
//! F16 or BF16, ties to even. EXL3 decodes to f16 values: F16 is exact, and as an f16 value, subnormal or not, lies within
//! BF16's normal range, BF16 is off by at most half a step: 2^-8 of the value. KAIJU1 decodes to f32 values, which F16 may
//! not reach.

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
    /// Exact of EXL3; of KAIJU1 rounded to nearest, ties to even.
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
    /// Of one value that is not zero.
    fn of(exact: f32, rounded: f32) -> Self {
        let error = f64::from((exact - rounded).abs());
        Self { max_error: error, max_relative_error: error / f64::from(exact.abs()) }
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
/// As [`PackedModule::weight`]; names the module where a value is not finite, or too large for the type.
pub fn payload(
    module: &PackedModule,
    tensors: &dyn TensorReader,
    dtype: WeightDtype,
) -> Result<(Vec<u8>, Rounding)> {
    let weight = module.weight(tensors)?;
    let mut bytes = Vec::with_capacity(weight.data.len() * dtype.stored().size());
    let mut rounding = Rounding::default();
    let write: fn(f32, &mut Vec<u8>) -> f32 = match dtype {
        WeightDtype::F32 => |x, bytes| {
            bytes.extend_from_slice(&x.to_le_bytes());
            x
        },
        WeightDtype::F16 => |x, bytes| {
            let rounded = f16::from_f32(x);
            bytes.extend_from_slice(&rounded.to_le_bytes());
            rounded.to_f32()
        },
        WeightDtype::Bf16 => |x, bytes| {
            let rounded = bf16::from_f32(x);
            bytes.extend_from_slice(&rounded.to_le_bytes());
            rounded.to_f32()
        },
    };
    for (at, &exact) in weight.data.iter().enumerate() {
        let rounded = write(exact, &mut bytes);
        if !rounded.is_finite() {
            return refuse(format!("the decoded value at flat index {at} is {exact}"))
                .file(tensors.file_of(module.form.main_tensor()))
                .tensor(module.weight_name())
                .row(at / weight.cols)
                .wanted(format!("finite weights that {} holds", dtype.stored()))
                .err();
        }
        if rounded != exact {
            rounding = rounding.max(Rounding::of(exact, rounded));
        }
    }
    Ok((bytes, rounding))
}
