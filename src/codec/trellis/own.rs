//! A linear that owns both of its vectors, from weight and covariance to packed tensors: dense and carrier linears, and
//! those encoded outside of a walk.
//!
//! Signs of its own and the scales of its own channels ([`channel_vectors`]). Sign draws of the input side are ranked by the
//! trace of D in the block LDL of the covariance they transform ([`Codec::input_score`]); the output side takes draw 0.
//! Then the global scale is fitted and the linear encoded by LDLQ, which reads its own result back.

use super::encode::{COARSE_OF_MANY_BITS, TrellisCodec};
use super::linear::TrellisLinear;
use super::scales::channel_vectors;
use crate::codec::{Codec, EncodeJob};
use crate::error::Result;
use crate::linalg::Matrix;

/// Up to so many bits, linears take their global scale as experts do.
const MOST_BITS_OF_EXPERTS: u32 = 5;
/// Beyond, rare weights that no state reaches decide the scale, and few sampled tiles hold any: so many times as many.
/// Measured on the tiny model at 6 bits: a sample of 16 tiles costs 0 to 16 % of the proxy error.
const MORE_SAMPLES: usize = 4;

/// What an encode is to be like.
pub struct OwnVectors<'a> {
    /// Bits a weight.
    pub bits: u32,
    /// Share of the covariance's mean diagonal added to its diagonal.
    pub sigma_reg: f64,
    /// Sign draws of the input side; only one is not ranked.
    pub draws: u32,
    /// The seed of a role (`suh`, `svh`, `scale_sample`) and draw.
    pub seed: &'a (dyn Fn(&str, u32) -> u64 + Sync),
}

/// An encoded linear and how it came about.
pub struct OwnEncode {
    /// The linear.
    pub packed: TrellisLinear,
    /// The sign draw of the input side.
    pub draw: u32,
    /// tr(D) under every draw; none where only one was tried.
    pub draw_scores: Vec<f64>,
    /// Global scale relative to the codebook's.
    pub scale: f64,
}

impl OwnVectors<'_> {
    /// A codec whose scale search reaches as far as linears of these bits need.
    pub fn tune(bits: u32, mut codec: TrellisCodec) -> TrellisCodec {
        if bits > MOST_BITS_OF_EXPERTS {
            codec.coarse_scales = &COARSE_OF_MANY_BITS;
            codec.scale_sample_tiles *= MORE_SAMPLES;
        }
        codec
    }

    /// Encodes `weight` `[K, N]` by the covariance of its inputs `[K, K]`.
    ///
    /// # Errors
    /// As [`Codec::encode`].
    pub fn encode(&self, codec: &TrellisCodec, weight: &Matrix, covariance: &Matrix) -> Result<OwnEncode> {
        let Self { bits, sigma_reg, draws, seed } = *self;
        let vectors = |draw: u32| channel_vectors(weight, seed("suh", draw), seed("svh", 0));
        let (mut draw, mut chosen, mut least) = (0, vectors(0), f64::INFINITY);
        let mut draw_scores = Vec::new();
        for tried in (0..draws).take_while(|_| draws > 1) {
            let vectors = vectors(tried);
            let job = EncodeJob { weight, covariance, sigma_reg, vectors: &vectors, bits, scale: 1.0 };
            let score = codec.input_score(&job)?;
            draw_scores.push(score);
            // The earlier draw where two are equal.
            if score < least {
                (draw, chosen, least) = (tried, vectors, score);
            }
        }
        let scale = codec.fit_scale(weight, &chosen, bits, seed("scale_sample", 0))?;
        let job = EncodeJob { weight, covariance, sigma_reg, vectors: &chosen, bits, scale };
        Ok(OwnEncode { packed: codec.encode(&job)?, draw, draw_scores, scale })
    }
}

/// tr(EᵀHE) / tr(WᵀHW) for a weight and its reconstruction, both `[K, N]`, and H `[K, K]`.
pub fn proxy_error(weight: &Matrix, dense: &Matrix, covariance: &Matrix) -> f64 {
    let form = |m: &Matrix| -> f64 {
        covariance.product(m).data.iter().zip(&m.data).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    let error = weight.data.iter().zip(&dense.data).map(|(w, d)| w - d).collect();
    form(&Matrix::new(weight.rows, weight.cols, error)) / form(weight)
}
