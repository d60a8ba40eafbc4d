//! One linear, from its weight and the covariance of its inputs to packed tensors and their record.
//!
//! The tensors of a carrier share no vectors, so each has signs of its own and the scales of its own channels
//! ([`channel_vectors`]). Sign draws of the input side are ranked by the trace of D in the block LDL of the covariance they
//! transform ([`Codec::input_score`]); the output side takes draw 0. Then the global scale is fitted and the linear encoded
//! by LDLQ, which reads its own result back.

use serde::{Deserialize, Serialize};

use super::linears::CarriedLinear;
use crate::codec::trellis::encode::TrellisCodec;
use crate::codec::trellis::linear::{TrellisLinear, reconstruction_sha256};
use crate::codec::trellis::scales::channel_vectors;
use crate::codec::{Codec, EncodeJob};
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
    let vectors = |draw: u32| channel_vectors(weight, seed("suh", draw), seed("svh", 0));
    let sigma_reg = recipe.sigma(linear.site == Site::Gated);
    let encode = || -> Result<_> {
        let (mut draw, mut chosen, mut least) = (0, vectors(0), f64::INFINITY);
        let mut draw_scores = Vec::new();
        for tried in (0..recipe.draws).take_while(|_| recipe.draws > 1) {
            let vectors = vectors(tried);
            let covariance = &covariance.matrix;
            let job = EncodeJob { weight, covariance, sigma_reg, vectors: &vectors, bits, scale: 1.0 };
            let score = codec.input_score(&job)?;
            draw_scores.push(Decimal(score));
            // The earlier draw where two are equal.
            if score < least {
                (draw, chosen, least) = (tried, vectors, score);
            }
        }
        let vectors = chosen;
        let scale = codec.fit_scale(weight, &vectors, bits, seed("scale_sample", 0))?;
        let job =
            EncodeJob { weight, covariance: &covariance.matrix, sigma_reg, vectors: &vectors, bits, scale };
        let packed = codec.encode(&job)?;
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
            draw_scores,
            codebook_scale: Decimal(scale),
            proxy_error: Decimal(proxy_error(
                weight,
                dense.data.iter().map(|x| x.to_f32()),
                &covariance.matrix,
            )),
            packed_sha256: packed.packed_sha256(),
            reconstruction_sha256: reconstruction_sha256(&dense),
        };
        Ok((packed, record))
    };
    encode().map_err(|error: Error| match error {
        Error::Refused(refusal) => refusal.layer(linear.layer).tensor(&linear.module).into(),
        Error::Check(refusal) => refusal.layer(linear.layer).tensor(&linear.module).check(),
        other => other,
    })
}

/// tr(EᵀHE) / tr(WᵀHW) for a weight and its reconstruction, both `[k, n]`.
fn proxy_error(weight: &Matrix<f32>, dense: impl Iterator<Item = f32>, covariance: &Matrix<f32>) -> f64 {
    let form = |m: &Matrix<f32>| -> f64 {
        covariance.product(m).data.iter().zip(&m.data).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    let error = weight.data.iter().zip(dense).map(|(w, d)| w - d).collect();
    form(&Matrix::new(weight.rows, weight.cols, error)) / form(weight)
}
