//! RMSNorm and LayerNorm over rows.
//!
//! Sums run in f64 over eight lanes in a fixed order, so they are as good as exact and the same everywhere; the
//! statistics are then rounded to f32 and applied in f32, as Transformers does. The weight is applied after the
//! normalised value has been rounded to the compute type, which is f32 here.

use candle_core::{DType, Device};

use crate::checkpoint::WeightSource;
use crate::error::Result;

/// Epsilon of `q_a_layernorm`, `kv_a_layernorm` and the indexer's LayerNorm, whatever `rms_norm_eps` says.
pub const LATENT_NORM_EPS: f64 = 1e-6;

/// Sum of `f(x)` over a row, eight lanes, f64.
fn sum(row: &[f32], f: impl Fn(f64) -> f64) -> f64 {
    let mut lanes = [0f64; 8];
    let chunks = row.chunks_exact(8);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += f(f64::from(*x));
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane += f(f64::from(*x));
    }
    lanes.iter().sum()
}

/// `x / sqrt(mean(x²) + eps) · weight`.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    weight: Vec<f32>,
    eps: f32,
}

impl RmsNorm {
    /// Loads the weight `name` of `width` values.
    ///
    /// # Errors
    /// What the source says.
    pub fn load(
        weights: &dyn WeightSource,
        name: &str,
        width: usize,
        eps: f64,
        device: &Device,
    ) -> Result<Self> {
        let weight = weights.load(name, &[width], DType::F32, device)?.to_vec1()?;
        Ok(Self { weight, eps: eps as f32 })
    }

    /// Normalises flat rows `[n, width]`.
    pub fn forward(&self, x: &[f32]) -> Vec<f32> {
        let width = self.weight.len();
        let mut out = Vec::with_capacity(x.len());
        for row in x.chunks_exact(width) {
            let mean = (sum(row, |x| x * x) / width as f64) as f32;
            let scale = 1.0 / (mean + self.eps).sqrt();
            out.extend(row.iter().zip(&self.weight).map(|(x, w)| w * (x * scale)));
        }
        out
    }
}

/// `(x - mean) / sqrt(var + eps) · weight + bias`, the variance being the biased one.
#[derive(Debug, Clone)]
pub struct LayerNorm {
    weight: Vec<f32>,
    bias: Vec<f32>,
    eps: f32,
}

impl LayerNorm {
    /// Loads weight and bias of `width` values each.
    ///
    /// # Errors
    /// What the source says.
    pub fn load(
        weights: &dyn WeightSource,
        (weight, bias): (&str, &str),
        width: usize,
        eps: f64,
        device: &Device,
    ) -> Result<Self> {
        let weight = weights.load(weight, &[width], DType::F32, device)?.to_vec1()?;
        let bias = weights.load(bias, &[width], DType::F32, device)?.to_vec1()?;
        Ok(Self { weight, bias, eps: eps as f32 })
    }

    /// Normalises flat rows `[n, width]`.
    pub fn forward(&self, x: &[f32]) -> Vec<f32> {
        let width = self.weight.len();
        let mut out = Vec::with_capacity(x.len());
        for row in x.chunks_exact(width) {
            let mean = sum(row, |x| x) / width as f64;
            let variance = (sum(row, |x| (x - mean) * (x - mean)) / width as f64) as f32;
            let scale = 1.0 / (variance + self.eps).sqrt();
            let mean = mean as f32;
            let scaled = row.iter().zip(&self.weight).map(|(x, w)| (x - mean) * scale * w);
            out.extend(scaled.zip(&self.bias).map(|(x, b)| x + b));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_norms_do_what_their_formula_says() {
        let x = [3.0f32, -4.0, 0.0, 5.0, 1.0, 1.0, 1.0, 1.0, 2.0];
        let rms = RmsNorm { weight: vec![2.0; 9], eps: 0.0 };
        let scale = 2.0 / (58.0f32 / 9.0).sqrt();
        for (y, x) in rms.forward(&x).iter().zip(x) {
            assert!((y - x * scale).abs() < 1e-6);
        }
        let layer = LayerNorm { weight: vec![1.0; 9], bias: vec![0.5; 9], eps: 0.0 };
        let y = layer.forward(&x);
        assert!((y.iter().sum::<f32>() - 4.5).abs() < 1e-5);
        assert!((y.iter().map(|y| (y - 0.5).powi(2)).sum::<f32>() - 9.0).abs() < 1e-5);
    }
}
