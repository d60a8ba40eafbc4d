//! One decoder layer: from the state before it to the state after it.
//!
//! [`Layer::attend`] does attention, norms and the router; [`Layer::finish`] does the MLP. Between them lies the
//! routed-MoE capture boundary. A call takes a ragged batch of prompts; what it gives for a prompt does not depend on
//! the others.
//!
//! Memory: `attend` works on some prompts at a time, at most [`ROWS_IN_WORK`] rows; `finish` puts the rows of all
//! prompts of the call together, so that each expert is read once: the caller bounds the call.
//!
//! Source: `GlmMoeDsaDecoderLayer` of Transformers 5.24.

use candle_core::{Device, Tensor};
use rayon::prelude::*;

use super::attention::Attention;
use super::experts::routed;
use super::indexer::TopK;
use super::linear::{rows_of, tensor_of};
use super::mlp::Mlp;
use super::norm::RmsNorm;
use super::router::Router;
use crate::checkpoint::{WeightSource, names};
use crate::config::Geometry;
use crate::error::{Error, Result, refuse};

/// Rows that attention works on at a time, unless a single prompt is longer.
pub const ROWS_IN_WORK: usize = 8192;

/// What a MoE layer shows the walk of one prompt of S tokens.
#[derive(Debug, Clone)]
pub struct Capture {
    /// Input of router and experts, after `post_attention_layernorm`: `[S, H]`, f32.
    pub mlp_in: Tensor,
    /// Chosen experts, row-major `[S, num_experts_per_tok]`, best choice score first.
    pub expert_ids: Vec<i32>,
    /// Weights aligned with `expert_ids`, normalised and scaled.
    pub expert_weights: Vec<f32>,
    /// `sigmoid(logits)` of all experts, unbiased, `[S, E]`.
    pub router_scores: Vec<f32>,
    /// Router logits of all experts, `[S, E]`.
    pub router_logits: Vec<f32>,
}

/// One prompt between attention and MLP.
#[derive(Debug, Clone)]
pub struct Attended {
    /// The residual stream after attention was added, `[S, H]`.
    pub residual: Tensor,
    /// Output of `o_proj`, before it was added, `[S, H]`.
    pub attention_out: Tensor,
    /// Input of the MLP, `[S, H]`.
    pub mlp_in: Tensor,
    /// The top-k list this layer used, for the next layer.
    pub carry: TopK,
    /// On MoE layers, what the router decided.
    pub capture: Option<Capture>,
}

/// A layer's results, one entry per prompt.
#[derive(Debug, Clone)]
pub struct LayerOutput {
    /// The state after the layer, `[S_p, H]` each, f32.
    pub hidden: Vec<Tensor>,
    /// The top-k lists for the next layer.
    pub carry: Vec<TopK>,
    /// On MoE layers, what the router decided.
    pub capture: Vec<Option<Capture>>,
}

#[derive(Debug, Clone)]
pub(super) enum Feed {
    Dense(Mlp),
    Moe { gate: Router, shared_experts: Mlp },
}

/// A decoder layer without its routed experts.
#[derive(Debug, Clone)]
pub struct Layer {
    pub(super) geometry: Geometry,
    index: usize,
    input_layernorm: RmsNorm,
    pub(super) self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    pub(super) mlp: Feed,
}

impl Layer {
    /// Loads norms, attention, indexer, and the dense MLP or router and shared experts of decoder layer `layer`.
    ///
    /// # Errors
    /// What the source says; when there is no such decoder layer (the MTP block is not one), or `device` is no CPU.
    pub fn load(
        geometry: &Geometry,
        layer: usize,
        weights: &dyn WeightSource,
        device: &Device,
    ) -> Result<Self> {
        if layer >= geometry.num_hidden_layers {
            return refuse("not a decoder layer")
                .layer(layer)
                .wanted(format!("0 to {}; the MTP block is never run", geometry.num_hidden_layers - 1))
                .err();
        }
        if !device.is_cpu() {
            return refuse("the forward pass was asked to run elsewhere than on the CPU")
                .wanted("the CPU")
                .err();
        }
        let hidden = geometry.hidden_size;
        let norm = |name: String| RmsNorm::load(weights, &name, hidden, geometry.rms_norm_eps, device);
        let mlp = if geometry.is_moe(layer) {
            let name = |projection| names::shared_experts(layer, projection);
            Feed::Moe {
                gate: Router::load(geometry, layer, weights, device)?,
                shared_experts: Mlp::load(
                    weights,
                    name,
                    hidden,
                    geometry.shared_intermediate_size(),
                    device,
                )?,
            }
        } else {
            let name = |projection| names::dense_mlp(layer, projection);
            Feed::Dense(Mlp::load(weights, name, hidden, geometry.intermediate_size, device)?)
        };
        Ok(Self {
            input_layernorm: norm(names::input_layernorm(layer))?,
            self_attn: Attention::load(geometry, layer, weights, device)?,
            post_attention_layernorm: norm(names::post_attention_layernorm(layer))?,
            mlp,
            index: layer,
            geometry: geometry.clone(),
        })
    }

    /// The layer's index.
    pub fn index(&self) -> usize {
        self.index
    }

    /// A ragged batch of prompts through the whole layer.
    ///
    /// `hidden[p]` is `[S_p, H]`, `positions[p]` has S_p entries, `carry[p]` is the previous layer's top-k list (a full
    /// layer ignores it).
    ///
    /// # Errors
    /// Those of [`attend`](Self::attend) and [`finish`](Self::finish).
    pub fn forward(
        &self,
        hidden: &[Tensor],
        positions: &[Vec<u32>],
        carry: &[Option<TopK>],
        experts: &dyn WeightSource,
    ) -> Result<LayerOutput> {
        let attended = self.attend(hidden, positions, carry)?;
        let hidden = self.finish(&attended, experts)?;
        let (carry, capture) = attended.into_iter().map(|prompt| (prompt.carry, prompt.capture)).unzip();
        Ok(LayerOutput { hidden, carry, capture })
    }

    /// Attention, norms and router: everything before the MLP. Experts are not needed.
    ///
    /// # Errors
    /// Names layer and prompt (as `#index` in the call) when the pieces do not fit together, and the row too when a
    /// value is not finite.
    pub fn attend(
        &self,
        hidden: &[Tensor],
        positions: &[Vec<u32>],
        carry: &[Option<TopK>],
    ) -> Result<Vec<Attended>> {
        self.prompt_by_prompt(hidden, positions, carry, |hidden, positions, carry| {
            self.attend_one(hidden, positions, carry)
        })
    }

    /// What `work` makes of each prompt, at most [`ROWS_IN_WORK`] rows at a time.
    ///
    /// # Errors
    /// As [`attend`](Self::attend).
    pub(super) fn prompt_by_prompt<T: Send>(
        &self,
        hidden: &[Tensor],
        positions: &[Vec<u32>],
        carry: &[Option<TopK>],
        work: impl Fn(&Tensor, &[u32], Option<&TopK>) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let count = hidden.len();
        if positions.len() != count || carry.len() != count {
            return refuse(format!(
                "{count} prompts, {} positions, {} carries",
                positions.len(),
                carry.len()
            ))
            .layer(self.index)
            .wanted("one of each per prompt")
            .err();
        }
        let mut out = Vec::with_capacity(count);
        let mut start = 0;
        while start < count {
            let (mut end, mut rows) = (start + 1, positions[start].len());
            while end < count && rows + positions[end].len() <= ROWS_IN_WORK {
                rows += positions[end].len();
                end += 1;
            }
            let part: Vec<Result<T>> = (start..end)
                .into_par_iter()
                .map(|prompt| {
                    work(&hidden[prompt], &positions[prompt], carry[prompt].as_ref())
                        .map_err(|error| self.name(error, prompt))
                })
                .collect();
            // Of several prompts that fail the first is told of, whatever finished first.
            for result in part {
                out.push(result?);
            }
            start = end;
        }
        Ok(out)
    }

    /// A prompt's residual stream and its normed rows, which attention takes.
    pub(super) fn attention_input(&self, hidden: &Tensor, positions: &[u32]) -> Result<(Vec<f32>, Vec<f32>)> {
        let width = self.geometry.hidden_size;
        let residual = rows_of(hidden, width)?;
        let rows = residual.len() / width;
        if rows == 0 || positions.len() != rows {
            return refuse(format!("{rows} rows with {} positions", positions.len()))
                .wanted("at least one row, and a position for each")
                .err();
        }
        let limit = self.geometry.max_position_embeddings;
        if let Some(row) = positions.iter().position(|position| *position as usize >= limit) {
            return refuse(format!("position {}", positions[row]))
                .row(row)
                .wanted(format!("below max_position_embeddings = {limit}"))
                .err();
        }
        // First of all: a masked key that is not finite would spoil the rows before it too (0 · NaN).
        check_finite(&residual, width, "the layer's input")?;
        let x = self.input_layernorm.forward(&residual);
        Ok((residual, x))
    }

    pub(super) fn attend_one(
        &self,
        hidden: &Tensor,
        positions: &[u32],
        carry: Option<&TopK>,
    ) -> Result<Attended> {
        let width = self.geometry.hidden_size;
        let (mut residual, x) = self.attention_input(hidden, positions)?;
        let (attention_out, carry) = self.self_attn.forward(&x, positions, carry)?;
        for (residual, attention) in residual.iter_mut().zip(&attention_out) {
            *residual += attention;
        }
        check_finite(&residual, width, "the residual stream after attention")?;
        let x = self.post_attention_layernorm.forward(&residual);
        let routing = match &self.mlp {
            Feed::Dense(_) => None,
            Feed::Moe { gate, .. } => Some(gate.forward(&x)?),
        };
        let mlp_in = tensor_of(x, width)?;
        Ok(Attended {
            residual: tensor_of(residual, width)?,
            attention_out: tensor_of(attention_out, width)?,
            capture: routing.map(|routing| Capture {
                mlp_in: mlp_in.clone(),
                expert_ids: routing.ids,
                expert_weights: routing.weights,
                router_scores: routing.scores,
                router_logits: routing.logits,
            }),
            mlp_in,
            carry,
        })
    }

    /// The MLP alone: `[S_p, H]` per prompt, before it is added to the residual stream.
    ///
    /// # Errors
    /// What the source says.
    pub fn mlp(&self, attended: &[Attended], experts: &dyn WeightSource) -> Result<Vec<Tensor>> {
        let width = self.geometry.hidden_size;
        let lengths: Vec<usize> = attended.iter().map(|prompt| prompt.mlp_in.dims()[0]).collect();
        let mut x = Vec::with_capacity(lengths.iter().sum::<usize>() * width);
        for prompt in attended {
            x.extend(rows_of(&prompt.mlp_in, width)?);
        }
        let y = match &self.mlp {
            Feed::Dense(mlp) => mlp.forward(&x)?,
            Feed::Moe { shared_experts, .. } => {
                let (mut ids, mut weights) = (Vec::new(), Vec::new());
                for (index, prompt) in attended.iter().enumerate() {
                    let Some(capture) = &prompt.capture else {
                        return refuse("a MoE layer without routing")
                            .layer(self.index)
                            .prompt(format!("#{index}"))
                            .wanted("what `attend` of this layer gave")
                            .err();
                    };
                    ids.extend_from_slice(&capture.expert_ids);
                    weights.extend_from_slice(&capture.expert_weights);
                }
                let mut y = routed(&self.geometry, self.index, &x, &ids, &weights, experts)?;
                for (y, shared) in y.iter_mut().zip(shared_experts.forward(&x)?) {
                    *y += shared;
                }
                y
            }
        };
        let mut rest = y.as_slice();
        let mut out = Vec::with_capacity(lengths.len());
        for length in lengths {
            let (rows, after) = rest.split_at(length * width);
            out.push(Tensor::from_slice(rows, (length, width), &Device::Cpu)?);
            rest = after;
        }
        Ok(out)
    }

    /// The MLP and the second residual sum: the state after the layer.
    ///
    /// Routed experts are asked from `experts` one at a time, and only those that have rows.
    ///
    /// # Errors
    /// What the source says; names layer, prompt and row when a value is not finite.
    pub fn finish(&self, attended: &[Attended], experts: &dyn WeightSource) -> Result<Vec<Tensor>> {
        let width = self.geometry.hidden_size;
        let mut out = Vec::with_capacity(attended.len());
        for (prompt, (mlp, attended)) in self.mlp(attended, experts)?.iter().zip(attended).enumerate() {
            let mut hidden = rows_of(&attended.residual, width)?;
            for (hidden, mlp) in hidden.iter_mut().zip(rows_of(mlp, width)?) {
                *hidden += mlp;
            }
            check_finite(&hidden, width, "the layer's output").map_err(|error| self.name(error, prompt))?;
            out.push(tensor_of(hidden, width)?);
        }
        Ok(out)
    }

    /// Adds layer and prompt to a refusal from further in.
    fn name(&self, error: Error, prompt: usize) -> Error {
        match error {
            Error::Refused(refusal) => refusal.layer(self.index).prompt(format!("#{prompt}")).into(),
            other => other,
        }
    }
}

pub(super) fn check_finite(rows: &[f32], width: usize, what: &str) -> Result<()> {
    match rows.iter().position(|value| !value.is_finite()) {
        None => Ok(()),
        Some(place) => refuse(format!("{what} holds {} at column {}", rows[place], place % width))
            .row(place / width)
            .wanted("finite values")
            .err(),
    }
}
