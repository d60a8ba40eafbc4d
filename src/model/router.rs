//! The router: which experts a token takes, and with what weight.
//!
//! `logits = x·Wᵀ` and `s = sigmoid(logits)` in f32 whatever the model's type; experts are chosen by `s + bias` (within
//! the best groups, if there are several), weighted by `s` alone, normalised if the config says so, and scaled.
//! A group's score is the sum of its two best choice scores. Ties everywhere: lower id first, -0.0 equal to 0.0.
//!
//! Source: `GlmMoeDsaTopkRouter` and the routing of `GlmMoeDsaMoE` in Transformers 5.24.

use candle_core::{DType, Device};

use super::linear::Linear;
use crate::checkpoint::{WeightSource, names};
use crate::config::Geometry;
use crate::error::{Result, refuse};

/// What the router decided for a prompt of S tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct Routing {
    /// Chosen experts `[S, num_experts_per_tok]`, best choice score first.
    pub ids: Vec<i32>,
    /// Their weights, aligned with `ids`, normalised and scaled.
    pub weights: Vec<f32>,
    /// Unbiased scores `sigmoid(logits)` of all experts, `[S, E]`.
    pub scores: Vec<f32>,
    /// Logits of all experts, `[S, E]`.
    pub logits: Vec<f32>,
}

/// `mlp.gate` of a MoE layer.
#[derive(Debug, Clone)]
pub struct Router {
    weight: Linear,
    e_score_correction_bias: Vec<f32>,
    groups: usize,
    topk_group: usize,
    topk: usize,
    normalise: bool,
    scaling: f32,
}

impl Router {
    /// Loads the router of `layer`; the correction bias stays f32 from file to use.
    ///
    /// # Errors
    /// What the source says.
    pub fn load(
        geometry: &Geometry,
        layer: usize,
        weights: &dyn WeightSource,
        device: &Device,
    ) -> Result<Self> {
        let experts = geometry.n_routed_experts;
        Ok(Self {
            weight: Linear::load(weights, &names::router(layer), experts, geometry.hidden_size, device)?,
            e_score_correction_bias: weights
                .load(&names::router_bias(layer), &[experts], DType::F32, device)?
                .to_vec1()?,
            groups: geometry.n_group,
            topk_group: geometry.topk_group,
            topk: geometry.num_experts_per_tok,
            normalise: geometry.norm_topk_prob,
            scaling: geometry.routed_scaling_factor as f32,
        })
    }

    /// Routes `x [S, hidden]` (flat).
    ///
    /// # Errors
    /// Names the row whose logits are not finite.
    pub fn forward(&self, x: &[f32]) -> Result<Routing> {
        let logits = self.weight.forward(x)?;
        let experts = self.e_score_correction_bias.len();
        let rows = logits.len() / experts;
        let mut routing = Routing {
            ids: Vec::with_capacity(rows * self.topk),
            weights: Vec::with_capacity(rows * self.topk),
            scores: logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect(),
            logits,
        };
        for (row, logits) in routing.logits.chunks_exact(experts).enumerate() {
            if logits.iter().any(|logit| !logit.is_finite()) {
                return refuse("a router logit is not finite").row(row).wanted("finite logits").err();
            }
            let scores = &routing.scores[row * experts..][..experts];
            let chosen = self.choose(scores);
            let first = routing.weights.len();
            routing.ids.extend(chosen.iter().map(|id| *id as i32));
            routing.weights.extend(chosen.iter().map(|id| scores[*id]));
            let weights = &mut routing.weights[first..];
            if self.normalise {
                let total = weights.iter().sum::<f32>() + 1e-20;
                for weight in &mut *weights {
                    *weight /= total;
                }
            }
            for weight in weights {
                *weight *= self.scaling;
            }
        }
        Ok(routing)
    }

    /// The experts of one token, best first.
    fn choose(&self, scores: &[f32]) -> Vec<usize> {
        let choice: Vec<f32> = scores.iter().zip(&self.e_score_correction_bias).map(|(s, b)| s + b).collect();
        let size = choice.len() / self.groups;
        let mut candidates: Vec<usize> = (0..choice.len()).collect();
        if self.groups > 1 {
            let group_scores: Vec<f32> = choice.chunks_exact(size).map(sum_of_two_best).collect();
            let mut kept: Vec<usize> = (0..self.groups).collect();
            best_first(&mut kept, &group_scores);
            kept.truncate(self.topk_group);
            candidates.retain(|expert| kept.contains(&(expert / size)));
        }
        best_first(&mut candidates, &choice);
        candidates.truncate(self.topk);
        candidates
    }
}

/// Sorts ids by score, higher first; a stable sort of ascending ids leaves the lower id first among equals. Scores are
/// finite, so `partial_cmp` always answers; it holds -0.0 and 0.0 to be equal.
fn best_first(ids: &mut [usize], scores: &[f32]) {
    ids.sort_by(|a, b| scores[*b].partial_cmp(&scores[*a]).unwrap_or(std::cmp::Ordering::Equal));
}

fn sum_of_two_best(scores: &[f32]) -> f32 {
    let (mut best, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for score in scores {
        if *score > best {
            (best, second) = (*score, best);
        } else if *score > second {
            second = *score;
        }
    }
    best + second
}

#[cfg(test)]
mod tests {
    use candle_core::Tensor;

    use super::*;

    fn router(bias: &[f32], groups: usize, topk_group: usize, topk: usize) -> Router {
        let experts = bias.len();
        let weight = Tensor::eye(experts, DType::F32, &Device::Cpu).unwrap();
        Router {
            weight: Linear::new(&weight, None).unwrap(),
            e_score_correction_bias: bias.to_vec(),
            groups,
            topk_group,
            topk,
            normalise: true,
            scaling: 2.5,
        }
    }

    #[test]
    fn the_bias_chooses_and_the_unbiased_score_weighs() {
        let routing = router(&[0.0, 0.0, 1.0, 0.0], 1, 1, 2).forward(&[0.0, 2.0, -2.0, 0.0]).unwrap();
        assert_eq!(routing.ids, [2, 1]);
        let (low, high) = (1.0 / (1.0 + 2f32.exp()), 1.0 / (1.0 + (-2f32).exp()));
        assert!((routing.weights[0] - 2.5 * low / (low + high)).abs() < 1e-6);
        assert!((routing.weights.iter().sum::<f32>() - 2.5).abs() < 1e-6);
    }

    #[test]
    fn ties_go_to_the_lower_id() {
        assert_eq!(router(&[0.0; 4], 1, 1, 3).forward(&[0.0; 4]).unwrap().ids, [0, 1, 2]);
        assert_eq!(router(&[0.0; 8], 4, 2, 3).forward(&[0.0; 8]).unwrap().ids, [0, 1, 2]);
    }

    #[test]
    fn groups_are_ranked_by_their_two_best() {
        // Group 0 has the best single expert, group 1 the best pair, group 2 the second best pair.
        let x = [3.0, -9.0, 2.0, 2.1, 1.0, 1.9];
        let routing = router(&[0.0; 6], 3, 2, 2).forward(&x).unwrap();
        assert_eq!(routing.ids, [3, 2]);
    }

    #[test]
    fn a_logit_that_is_not_finite_names_its_row() {
        let error = router(&[0.0; 2], 1, 1, 1).forward(&[0.0, 1.0, f32::NAN, 0.0]).unwrap_err();
        assert!(error.to_string().contains("row 1"), "{error}");
    }
}
