//! Multi-head latent attention in its expanded form, over the keys the indexer allows.
//!
//! `q = q_b(norm(q_a(x)))` is `[nope | rope]` per head; `kv_a(x)` is `[latent | rope]` with one rotary key for all
//! heads; `kv_b(norm(latent))` is `[k_nope | v]` per head. Scores are scaled by `(nope + rope)^-0.5` (times YaRN's
//! mscale², where the config has it), the softmax runs in f32 over the allowed keys only: causal AND in the top-k list.
//! `o_proj` joins the heads.
//!
//! Memory: queries, keys and values exist for the heads in work only; scores for one block of queries of one head.
//! Source: `GlmMoeDsaAttention` of Transformers 5.24, eager. What it does not do: cache keys, absorb `kv_b`.

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use super::indexer::{Indexer, TopK};
use super::linear::Linear;
use super::norm::{LATENT_NORM_EPS, RmsNorm};
use super::rope::{Angles, RotaryEmbedding};
use crate::checkpoint::{WeightSource, names};
use crate::config::Geometry;
use crate::error::{Result, refuse};
use crate::linalg::Packed;

/// Queries that attend together.
const BLOCK_ROWS: usize = 128;

/// One head's rows of the two latent-to-head projections.
#[derive(Debug, Clone)]
struct Head {
    /// `[nope + rope, q_lora_rank]`.
    q_b: Linear,
    /// `[nope, kv_lora_rank]`.
    k_b: Linear,
    /// `[v_head_dim, kv_lora_rank]`.
    v_b: Linear,
}

/// The attention module of a layer with, on full layers, its indexer.
#[derive(Debug, Clone)]
pub struct Attention {
    q_a_proj: Linear,
    q_a_layernorm: RmsNorm,
    kv_a_proj_with_mqa: Linear,
    kv_a_layernorm: RmsNorm,
    heads: Vec<Head>,
    o_proj: Linear,
    indexer: Option<Indexer>,
    rotary: RotaryEmbedding,
    scale: f32,
    nope: usize,
    rope: usize,
    v_head_dim: usize,
    kv_lora_rank: usize,
    index_topk: usize,
}

impl Attention {
    /// Loads the attention of `layer`.
    ///
    /// # Errors
    /// What the source says.
    pub fn load(
        geometry: &Geometry,
        layer: usize,
        weights: &dyn WeightSource,
        device: &Device,
    ) -> Result<Self> {
        let (nope, rope, v) = (geometry.qk_nope_head_dim, geometry.qk_rope_head_dim, geometry.v_head_dim);
        let (hidden, count) = (geometry.hidden_size, geometry.num_attention_heads);
        let (q_rank, kv_rank) = (geometry.q_lora_rank, geometry.kv_lora_rank);
        let biased = |module: &str, out, input| {
            let linear = Linear::load(weights, &names::attention(layer, module), out, input, device)?;
            if geometry.attention_bias {
                linear.with_bias(weights, &names::attention_bias(layer, module), device)
            } else {
                Ok(linear)
            }
        };
        let norm = |module: &str, width| {
            RmsNorm::load(weights, &names::attention(layer, module), width, LATENT_NORM_EPS, device)
        };
        let whole = |module: &str, out: usize, input: usize| {
            weights.load(&names::attention(layer, module), &[out, input], DType::F32, device)
        };
        let q_b = whole("q_b_proj", count * (nope + rope), q_rank)?;
        let kv_b = whole("kv_b_proj", count * (nope + v), kv_rank)?;
        let part = |matrix: &Tensor, start, length| Linear::new(&matrix.narrow(0, start, length)?, None);
        let head = |head: usize| {
            Ok(Head {
                q_b: part(&q_b, head * (nope + rope), nope + rope)?,
                k_b: part(&kv_b, head * (nope + v), nope)?,
                v_b: part(&kv_b, head * (nope + v) + nope, v)?,
            })
        };
        let full = geometry.indexer_is_full(layer);
        let mscale = geometry.rope.yarn.as_ref().map_or(1.0, |yarn| yarn.get_mscale(yarn.mscale_all_dim));
        Ok(Self {
            q_a_proj: biased("q_a_proj", q_rank, hidden)?,
            q_a_layernorm: norm("q_a_layernorm", q_rank)?,
            kv_a_proj_with_mqa: biased("kv_a_proj_with_mqa", kv_rank + rope, hidden)?,
            kv_a_layernorm: norm("kv_a_layernorm", kv_rank)?,
            heads: (0..count).map(head).collect::<Result<_>>()?,
            o_proj: biased("o_proj", hidden, count * v)?,
            indexer: if full { Some(Indexer::load(geometry, layer, weights, device)?) } else { None },
            rotary: RotaryEmbedding::new(geometry),
            scale: ((geometry.qk_head_dim() as f64).powf(-0.5) * mscale * mscale) as f32,
            nope,
            rope,
            v_head_dim: v,
            kv_lora_rank: kv_rank,
            index_topk: geometry.index_topk,
        })
    }

    /// Attention of one prompt: normed input `x [S, hidden]` (flat) to `[S, hidden]` (flat) and the top-k list used.
    ///
    /// A full layer computes the list, a shared layer takes `carry`.
    ///
    /// # Errors
    /// When a shared layer gets no carry or a malformed one, or names the row where an indexer score is not finite.
    pub fn forward(&self, x: &[f32], positions: &[u32], carry: Option<&TopK>) -> Result<(Vec<f32>, TopK)> {
        let (joined, topk) = self.joined_heads(x, positions, carry)?;
        Ok((self.o_proj.forward(&joined)?, topk))
    }

    /// The input of `q_b_proj` and of the indexer's `wq_b`: `[S, q_lora_rank]`.
    ///
    /// # Errors
    /// When `x` is not made of whole rows.
    pub(super) fn query_latent(&self, x: &[f32]) -> Result<Vec<f32>> {
        Ok(self.q_a_layernorm.forward(&self.q_a_proj.forward(x)?))
    }

    /// The input of `kv_b_proj`, `[S, kv_lora_rank]`, and the rotary key of every row before its rotation, `[S, rope]`.
    ///
    /// # Errors
    /// When `x` is not made of whole rows.
    pub(super) fn key_value_latent(&self, x: &[f32]) -> Result<(Vec<f32>, Vec<f32>)> {
        let compressed = self.kv_a_proj_with_mqa.forward(x)?;
        let rows = compressed.chunks_exact(self.kv_lora_rank + self.rope);
        let mut latent = Vec::with_capacity(rows.len() * self.kv_lora_rank);
        let mut rotary_keys = Vec::with_capacity(rows.len() * self.rope);
        for compressed in rows {
            let (values, key) = compressed.split_at(self.kv_lora_rank);
            latent.extend_from_slice(values);
            rotary_keys.extend_from_slice(key);
        }
        Ok((self.kv_a_layernorm.forward(&latent), rotary_keys))
    }

    /// The input of `o_proj`, `[S, heads * v_head_dim]`, and the top-k list used; otherwise as [`forward`](Self::forward).
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub(super) fn joined_heads(
        &self,
        x: &[f32],
        positions: &[u32],
        carry: Option<&TopK>,
    ) -> Result<(Vec<f32>, TopK)> {
        let rows = positions.len();
        let angles = self.rotary.angles(positions);
        let q_resid = self.query_latent(x)?;
        let topk = match (&self.indexer, carry) {
            (Some(indexer), _) => indexer.forward(x, &q_resid, &angles)?,
            (None, Some(carry)) => carry.clone(),
            (None, None) => {
                return refuse("a shared layer without the top-k list of the layer before")
                    .wanted("the carry of the previous layer")
                    .err();
            }
        };
        let allowed = topk.allowed(rows, self.index_topk)?;
        let (latent, mut rotary_keys) = self.key_value_latent(x)?;
        for (row, key) in rotary_keys.chunks_exact_mut(self.rope).enumerate() {
            angles.rotate(row, key);
        }
        let heads: Vec<Vec<f32>> = self
            .heads
            .par_iter()
            .map(|head| self.head(head, &q_resid, &latent, &rotary_keys, &angles, &allowed))
            .collect::<Result<_>>()?;
        let mut joined = Vec::with_capacity(rows * heads.len() * self.v_head_dim);
        for row in 0..rows {
            for head in &heads {
                joined.extend_from_slice(&head[row * self.v_head_dim..][..self.v_head_dim]);
            }
        }
        Ok((joined, topk))
    }

    /// One head: `[S, v_head_dim]`.
    fn head(
        &self,
        head: &Head,
        q_resid: &[f32],
        latent: &[f32],
        rotary_keys: &[f32],
        angles: &Angles,
        allowed: &[Vec<u32>],
    ) -> Result<Vec<f32>> {
        let (rows, width) = (allowed.len(), self.nope + self.rope);
        let mut queries = head.q_b.forward(q_resid)?;
        for (row, query) in queries.chunks_exact_mut(width).enumerate() {
            angles.rotate(row, &mut query[self.nope..]);
        }
        let mut keys = Vec::with_capacity(rows * width);
        let parts = head.k_b.forward(latent)?;
        for (part, rotary) in parts.chunks_exact(self.nope).zip(rotary_keys.chunks_exact(self.rope)) {
            keys.extend_from_slice(part);
            keys.extend_from_slice(rotary);
        }
        let keys = Packed::transposed(&keys, rows, width);
        let values = Packed::plain(&head.v_b.forward(latent)?, rows, self.v_head_dim);
        let blocks: Vec<Vec<f32>> = queries
            .par_chunks(BLOCK_ROWS * width)
            .zip(allowed.par_chunks(BLOCK_ROWS))
            .enumerate()
            .map(|(block, (queries, allowed))| {
                // No query of this block sees beyond its last row.
                let end = block * BLOCK_ROWS + allowed.len();
                let mut scores = keys.part(queries, width, end)?;
                for (scores, allowed) in scores.chunks_exact_mut(end).zip(allowed) {
                    softmax_over(scores, allowed, self.scale);
                }
                values.part(&scores, end, self.v_head_dim)
            })
            .collect::<Result<_>>()?;
        Ok(blocks.concat())
    }
}

/// Replaces a row of raw scores by probabilities over the keys in `allowed` (ascending), 0 elsewhere.
fn softmax_over(scores: &mut [f32], allowed: &[u32], scale: f32) {
    let mut weights: Vec<f32> = allowed.iter().map(|key| scores[*key as usize] * scale).collect();
    let highest = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut total = 0f64;
    for weight in &mut weights {
        *weight = (*weight - highest).exp();
        total += f64::from(*weight);
    }
    let total = total as f32;
    scores.fill(0.0);
    for (key, weight) in allowed.iter().zip(weights) {
        scores[*key as usize] = weight / total;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn softmax_sees_the_allowed_keys_only() {
        let mut scores = [1e30, 2.0, f32::NAN, 2.0, f32::INFINITY];
        softmax_over(&mut scores, &[1, 3], 0.5);
        assert_eq!(scores, [0.0, 0.5, 0.0, 0.5, 0.0]);
    }
}
