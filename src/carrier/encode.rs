//! One linear, from its weight and the covariance of its inputs to packed tensors and their record.
//!
//! The tensors of a carrier share no vectors: [`own`](crate::codec::trellis::own) encodes them.

use serde::{Deserialize, Serialize};

use super::linears::CarriedLinear;
use crate::codec::trellis::encode::TrellisCodec;
use crate::codec::trellis::linear::{TrellisLinear, reconstruction_sha256};
use crate::codec::trellis::own::{OwnEncode, OwnVectors, proxy_error};
use crate::config::Recipe;
use crate::config::recipe::Decimal;
use crate::error::{Error, Result};
use crate::linalg::Matrix;
use crate::model::Site;
use crate::store::hash::Hash;
use crate::store::seed::draw_seed;
use crate::walk::layer::matrix_sha256;

/// What was packed, and what of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModuleRecord {
    /// The linear's name without `.weight`.
    pub module: String,
    /// Its decoder layer.
    pub layer: usize,
    /// Bits a weight.
    pub bits: u32,
    /// Inputs.
    pub k: usize,
    /// Outputs.
    pub n: usize,
    /// SHA-256 of the BF16 payload `[n, k]` it was made of.
    pub bf16_sha256: Hash,
    /// Where its inputs were taken, see [`Site`].
    pub site: String,
    /// Calibration rows in the covariance.
    pub rows: usize,
    /// SHA-256 of the covariance `[k, k]`, f32 little-endian.
    pub covariance_sha256: Hash,
    /// The sign draw of the input side.
    pub draw: u32,
    /// tr(D) under every draw, 17 digits; none where only one was tried.
    pub draw_scores: Vec<Decimal>,
    /// Global scale relative to the codebook's, 17 digits.
    pub codebook_scale: Decimal,
    /// tr(EᵀHE) / tr(WᵀHW) of the reconstruction, H the covariance without regularisation, 17 digits.
    pub proxy_error: Decimal,
    /// SHA-256 of the packed words.
    pub packed_sha256: Hash,
    /// SHA-256 of the dense f16 weight `[k, n]`.
    pub reconstruction_sha256: Hash,
}

/// A covariance with what names it.
pub struct SiteCovariance {
    /// Where it was taken.
    pub site: Site,
    /// Mean of xxᵀ, `[k, k]`.
    pub matrix: Matrix<f32>,
    /// Rows it is the mean of.
    pub rows: usize,
    /// [`matrix_sha256`] of it.
    pub sha256: Hash,
}

impl SiteCovariance {
    /// Names a covariance.
    pub fn new(site: Site, matrix: Matrix<f32>, rows: usize) -> Self {
        Self { site, sha256: matrix_sha256(&matrix), matrix, rows }
    }
}

/// Encodes `weight` `[k, n]` at `bits` bits.
///
/// # Errors
/// Names layer and tensor of a weight or a covariance that cannot be encoded.
pub fn encode_linear(
    codec: &TrellisCodec,
    recipe: &Recipe,
    linear: &CarriedLinear,
    (weight, bf16_sha256): (&Matrix<f32>, &Hash),
    covariance: &SiteCovariance,
    bits: u32,
) -> Result<(TrellisLinear, ModuleRecord)> {
    let seed = |role: &str, draw: u32| {
        draw_seed(
            &recipe.recipe_version,
            linear.layer,
            None,
            &format!("carrier/{}/{role}", linear.module),
            draw,
        )
    };
    let own = OwnVectors {
        bits,
        sigma_reg: recipe.sigma(linear.site == Site::Gated),
        draws: recipe.draws,
        seed: &seed,
    };
    let encode = || -> Result<_> {
        let OwnEncode { packed, draw, draw_scores, scale } = own.encode(codec, weight, &covariance.matrix)?;
        let dense = packed.dense();
        let record = ModuleRecord {
            module: linear.module.clone(),
            layer: linear.layer,
            bits,
            k: linear.k,
            n: linear.n,
            bf16_sha256: bf16_sha256.clone(),
            site: covariance.site.as_str().to_owned(),
            rows: covariance.rows,
            covariance_sha256: covariance.sha256.clone(),
            draw,
            draw_scores: draw_scores.into_iter().map(Decimal).collect(),
            codebook_scale: Decimal(scale),
            proxy_error: Decimal(proxy_error(weight, &packed.dense_f32(), &covariance.matrix)),
            packed_sha256: packed.packed_sha256(),
            reconstruction_sha256: reconstruction_sha256(&dense),
        };
        Ok((packed, record))
    };
    encode().map_err(|error: Error| error.place(|refusal| refusal.layer(linear.layer).tensor(&linear.module)))
}
