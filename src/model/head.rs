//! Both ends of the model: token embeddings, and the final norm with the output head; and the rounding between layers.

use candle_core::{DType, Device, Tensor};

use super::linear::{Linear, rows_of, tensor_of};
use super::norm::RmsNorm;
use crate::checkpoint::{WeightSource, names};
use crate::config::Geometry;
use crate::error::{Result, refuse};

/// `model.embed_tokens`.
#[derive(Debug, Clone)]
pub struct Embedding {
    weight: Tensor,
}

impl Embedding {
    /// Loads the embedding matrix.
    ///
    /// # Errors
    /// What the source says.
    pub fn load(geometry: &Geometry, weights: &dyn WeightSource, device: &Device) -> Result<Self> {
        let shape = [geometry.vocab_size, geometry.hidden_size];
        Ok(Self { weight: weights.load(names::EMBED_TOKENS, &shape, DType::F32, device)? })
    }

    /// The state before layer 0: token ids of a prompt to `[S, H]`, f32.
    ///
    /// # Errors
    /// Names the row whose id is outside the vocabulary.
    pub fn embed(&self, ids: &[u32]) -> Result<Tensor> {
        let vocabulary = self.weight.dims()[0];
        if let Some(row) = ids.iter().position(|id| *id as usize >= vocabulary) {
            return refuse(format!("token id {}", ids[row]))
                .row(row)
                .wanted(format!("below vocab_size = {vocabulary}"))
                .err();
        }
        let ids = Tensor::from_slice(ids, ids.len(), self.weight.device())?;
        Ok(self.weight.index_select(&ids, 0)?)
    }
}

/// `model.norm` and `lm_head` (the embedding matrix where the config ties them).
#[derive(Debug, Clone)]
pub struct Head {
    norm: RmsNorm,
    lm_head: Linear,
    hidden: usize,
}

impl Head {
    /// Loads norm and head.
    ///
    /// # Errors
    /// What the source says.
    pub fn load(geometry: &Geometry, weights: &dyn WeightSource, device: &Device) -> Result<Self> {
        let hidden = geometry.hidden_size;
        let name = if geometry.tie_word_embeddings { names::EMBED_TOKENS } else { names::LM_HEAD };
        Ok(Self {
            norm: RmsNorm::load(weights, names::NORM, hidden, geometry.rms_norm_eps, device)?,
            lm_head: Linear::load(weights, name, geometry.vocab_size, hidden, device)?,
            hidden,
        })
    }

    /// The state after the last layer `[n, H]` to logits `[n, vocab_size]`. The caller bounds n.
    ///
    /// # Errors
    /// When the width is another.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let x = self.norm.forward(&rows_of(hidden, self.hidden)?);
        tensor_of(self.lm_head.forward(&x)?, self.lm_head.out_features())
    }
}

/// Rounds an f32 state `[S, H]` to BF16 and back: what the walk hands from layer to layer.
///
/// # Errors
/// Names the row of a value that BF16 has no finite neighbour of: its range ends a little before that of f32.
pub fn round_bf16(state: &Tensor) -> Result<Tensor> {
    let rounded = state.to_dtype(DType::BF16)?.to_dtype(DType::F32)?;
    let width = state.dims().last().copied().unwrap_or(1).max(1);
    let values = rounded.flatten_all()?.to_vec1::<f32>()?;
    if let Some(at) = values.iter().position(|value| !value.is_finite()) {
        return refuse("a value of the state is beyond the range of BF16")
            .row(at / width)
            .wanted("finite values")
            .err();
    }
    Ok(rounded)
}
