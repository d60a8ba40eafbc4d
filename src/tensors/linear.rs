//! One weight to packed tensors by either codec, and what that costs.

use half::f16;
use rayon::prelude::*;

use super::importance::InputWeights;
use crate::checkpoint::kaiju_tensor::{kaiju_data, kaiju_name};
use crate::checkpoint::trellis_tensors::LinearNames;
use crate::codec::kaiju::{self, Header, Settings};
use crate::codec::trellis::codebook::Codebook;
use crate::codec::trellis::encode::TrellisCodec;
use crate::codec::trellis::hadamard::BLOCK;
use crate::codec::trellis::linear::TrellisLinear;
use crate::codec::trellis::own::{OwnVectors, proxy_error};
use crate::codec::trellis::pack;
use crate::codec::trellis::tile::TILE_DIM;
use crate::error::{Result, refuse};
use crate::linalg::Matrix;
use crate::store::safetensors_stream::TensorSpec;
use crate::store::seed::{SeedPart, derive_seed};
use crate::store::tensor_dtype::TensorDtype;

/// What weights are encoded by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LinearCodec {
    /// KAIJU1.
    Kaiju(Settings),
    /// EXL3 (codebook mcg) at so many bits a weight, 1 to 8.
    Trellis(u32),
}

/// Sign draws that EXL3's input side is chosen from.
const DRAWS: u32 = 4;
/// Share of the mean diagonal that EXL3 adds to a covariance's diagonal, as walks do by default.
const SIGMA_REG: f64 = 0.025;
/// Tiles sampled for EXL3's global scale.
const SCALE_SAMPLE_TILES: usize = 24;

/// Stored tensors of one module: name and payload.
pub(super) type Payloads = Vec<(String, Vec<u8>)>;

/// How far a decoded weight is from its source.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Deviation {
    /// Σ h (w - q)² / Σ h w².
    pub weighted: f64,
    /// tr(EᵀHE) / tr(WᵀHW), where H is full.
    pub proxy: Option<f64>,
    /// Rows that are not zero and decode to zero: too small for the f16 scales of the form.
    pub vanished_rows: usize,
}

/// Rows of `weight` that are not zero and of `dense` that are; both `[N, K]`.
fn vanished_rows(weight: &Matrix, dense: &Matrix) -> usize {
    let zero = |row: &[f32]| row.iter().all(|&w| w == 0.0);
    (0..weight.rows).filter(|&row| zero(dense.row(row)) && !zero(weight.row(row))).count()
}

impl LinearCodec {
    /// As `--codec` spells it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Kaiju(_) => "kaiju1",
            Self::Trellis(_) => "trellis",
        }
    }

    /// Why a weight `[n, k]` of this size cannot be encoded.
    pub(super) fn objection(&self, shape: [usize; 2]) -> Option<String> {
        match self {
            Self::Trellis(_) if shape.iter().any(|&size| size == 0 || !size.is_multiple_of(BLOCK)) => {
                Some(format!("sizes {shape:?} are not multiples of 128"))
            }
            Self::Kaiju(settings) => Header::plan(shape.into(), settings.code, settings.hi_frac)
                .err()
                .map(|error| error.to_string()),
            Self::Trellis(_) => None,
        }
    }

    /// The tensors that a module of shape `[n, k]` becomes.
    ///
    /// # Errors
    /// As [`Header::plan`].
    pub(super) fn specs(&self, module: &str, [n, k]: [usize; 2]) -> Result<Vec<TensorSpec>> {
        Ok(match self {
            Self::Kaiju(settings) => {
                let bytes = Header::plan((n, k), settings.code, settings.hi_frac)?.payload_len();
                vec![TensorSpec::new(kaiju_name(module), TensorDtype::U8, &[bytes])]
            }
            Self::Trellis(bits) => {
                let names = LinearNames::own(module, Codebook::Mcg);
                let tiles = [k / TILE_DIM, n / TILE_DIM, pack::words(*bits)];
                let mut specs = vec![
                    TensorSpec::new(names.trellis, TensorDtype::I16, &tiles),
                    TensorSpec::new(names.suh, TensorDtype::F16, &[k]),
                    TensorSpec::new(names.svh, TensorDtype::F16, &[n]),
                ];
                specs.extend(names.marker.map(|marker| TensorSpec::new(marker, TensorDtype::I32, &[])));
                specs
            }
        })
    }

    /// Encodes `weight` `[N, K]`, and measures what the stored bytes decode to.
    ///
    /// # Errors
    /// What cannot be encoded.
    pub(super) fn encode(
        &self,
        module: &str,
        weight: Matrix,
        importance: InputWeights,
    ) -> Result<(Payloads, Deviation)> {
        let diagonal = importance.diagonal();
        match self {
            Self::Kaiju(settings) => {
                let linear = kaiju::encode(&weight, importance.borrowed(), settings)?;
                let data = kaiju_data(module, &linear);
                let payloads = vec![(data.name, data.data.into_owned())];
                let dense = linear.dense();
                let proxy = match &importance {
                    InputWeights::Full(h) => Some(proxy_error(&weight.transposed(), &dense.transposed(), h)),
                    InputWeights::Diagonal(_) => None,
                };
                let weighted = weighted_error(&weight, &dense, &diagonal);
                let vanished_rows = vanished_rows(&weight, &dense);
                Ok((payloads, Deviation { weighted, proxy, vanished_rows }))
            }
            Self::Trellis(bits) => {
                let full = matches!(importance, InputWeights::Full(_));
                let covariance = importance.into_covariance();
                let seed = |role: &str, draw: u32| {
                    let parts = ["walk", "encode", module, role].map(SeedPart::from);
                    derive_seed(&[&parts[..], &[SeedPart::from(u64::from(draw))]].concat())
                };
                let own = OwnVectors { bits: *bits, sigma_reg: SIGMA_REG, draws: DRAWS, seed: &seed };
                let codec = OwnVectors::tune(*bits, TrellisCodec::new(0, SCALE_SAMPLE_TILES));
                let turned = weight.transposed();
                let linear = own.encode(&codec, &turned, &covariance)?.packed;
                let names = LinearNames::own(module, Codebook::Mcg);
                let tensors = names.tensors(&linear, |_| false);
                let payloads: Payloads =
                    tensors.into_iter().map(|tensor| (tensor.name, tensor.data.into_owned())).collect();
                let dense = decoded(&payloads, &linear)?;
                let proxy = full.then(|| proxy_error(&turned, &dense, &covariance));
                let dense = dense.transposed();
                let weighted = weighted_error(&weight, &dense, &diagonal);
                let vanished_rows = vanished_rows(&weight, &dense);
                Ok((payloads, Deviation { weighted, proxy, vanished_rows }))
            }
        }
    }
}

/// The dense weight `[K, N]` of a linear's stored bytes.
fn decoded(payloads: &Payloads, linear: &TrellisLinear) -> Result<Matrix> {
    let part = |ending: &str| {
        let found = payloads.iter().find(|(name, _)| name.ends_with(ending));
        found
            .map(|(_, bytes)| bytes.as_chunks().0)
            .ok_or_else(|| refuse(format!("no {ending} was made")).check())
    };
    let words = part(".trellis")?.iter().map(|word| u16::from_le_bytes(*word)).collect();
    let half = |bytes: &[[u8; 2]]| bytes.iter().map(|x| f16::from_le_bytes(*x)).collect::<Vec<f16>>();
    let (suh, svh) = (half(part(".suh")?), half(part(".svh")?));
    let again = TrellisLinear::new((linear.k, linear.n), linear.bits, linear.codebook, words, suh, svh)?;
    Ok(again.dense_f32())
}

/// Σ h (w - q)² / Σ h w² over two matrices `[N, K]`, h by column; 0 where there is no error at all. The sums run row by row,
/// so that they do not depend on threads.
fn weighted_error(weight: &Matrix, dense: &Matrix, h: &[f64]) -> f64 {
    let row = |(w, q): (&[f32], &[f32])| {
        w.iter().zip(q).zip(h).fold((0.0, 0.0), |(error, norm), ((&w, &q), h)| {
            let (w, q) = (f64::from(w), f64::from(q));
            (error + h * (w - q).powi(2), norm + h * w * w)
        })
    };
    let rows: Vec<(f64, f64)> =
        weight.data.par_chunks(weight.cols).zip(dense.data.par_chunks(dense.cols)).map(row).collect();
    let (error, norm) = rows.into_iter().fold((0.0, 0.0), |(a, b), (c, d)| (a + c, b + d));
    if error == 0.0 { 0.0 } else { error / norm }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_weighed_by_column() {
        let weight = Matrix::new(2, 2, vec![1.0, 2.0, 3.0, 4.0]);
        let dense = Matrix::new(2, 2, vec![1.0, 1.0, 3.0, 4.5]);
        // (3 + 0.75) / (10 + 60).
        assert_eq!(weighted_error(&weight, &dense, &[1.0, 3.0]), 3.75 / 70.0);
        assert_eq!(weighted_error(&Matrix::zeros(1, 2), &Matrix::zeros(1, 2), &[1.0, 1.0]), 0.0);
    }
}
