//! What goes into the linears of a layer: the rows that a carrier's covariances are taken of.
//!
//! The forward pass itself, stopped early: a site's rows are made by the very functions that [`Layer::forward`] is made
//! of, from the weights the layer was loaded with, and are exactly what the linears of the site are given there. A layer
//! that is not asked does nothing for it.

use candle_core::Tensor;

use super::indexer::TopK;
use super::layer::{Feed, Layer, check_finite};
use super::linear::rows_of;
use super::mlp::Mlp;
use crate::error::{Error, Result};
use crate::linalg::Matrix;

/// Places in a layer where linears take their input, in the order the forward pass reaches them. Linears of one site share
/// their input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Site {
    /// After `input_layernorm`, `[S, hidden_size]`: `q_a_proj`, `kv_a_proj_with_mqa`, the indexer's `wk`, `weights_proj`.
    AttentionIn,
    /// After `q_a_layernorm`, `[S, q_lora_rank]`: `q_b_proj`, the indexer's `wq_b`.
    QueryLatent,
    /// After `kv_a_layernorm`, `[S, kv_lora_rank]`: `kv_b_proj`.
    KeyValueLatent,
    /// The heads side by side, `[S, num_attention_heads * v_head_dim]`: `o_proj`.
    Heads,
    /// After `post_attention_layernorm`, `[S, hidden_size]`: `gate_proj` and `up_proj` of the dense MLP or the shared experts.
    MlpIn,
    /// `silu(gate) * up`, `[S, intermediate]`: their `down_proj`.
    Gated,
}

impl Site {
    /// All of them, in order.
    pub const ALL: [Self; 6] =
        [Self::AttentionIn, Self::QueryLatent, Self::KeyValueLatent, Self::Heads, Self::MlpIn, Self::Gated];

    /// Its name in files.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AttentionIn => "attention_in",
            Self::QueryLatent => "query_latent",
            Self::KeyValueLatent => "key_value_latent",
            Self::Heads => "heads",
            Self::MlpIn => "mlp_in",
            Self::Gated => "gated",
        }
    }
}

impl Layer {
    /// The rows `[S_p, width]` that the linears of a site are given, for each prompt of a ragged batch; arguments as of
    /// [`attend`](Self::attend). Routed experts are not needed.
    ///
    /// # Errors
    /// As [`attend`](Self::attend); names the row that is not finite.
    pub fn inputs(
        &self,
        site: Site,
        hidden: &[Tensor],
        positions: &[Vec<u32>],
        carry: &[Option<TopK>],
    ) -> Result<Vec<Matrix<f32>>> {
        self.prompt_by_prompt(hidden, positions, carry, |hidden, positions, carry| {
            let attention_in = || self.attention_input(hidden, positions).map(|(_, x)| x);
            let mlp_in =
                || rows_of(&self.attend_one(hidden, positions, carry)?.mlp_in, self.geometry.hidden_size);
            let rows = match site {
                Site::AttentionIn => attention_in()?,
                Site::QueryLatent => self.self_attn.query_latent(&attention_in()?)?,
                Site::KeyValueLatent => self.self_attn.key_value_latent(&attention_in()?)?.0,
                Site::Heads => self.self_attn.joined_heads(&attention_in()?, positions, carry)?.0,
                Site::MlpIn => mlp_in()?,
                Site::Gated => self.mlp_of_all_rows().gated(&mlp_in()?)?,
            };
            finite(positions.len(), rows, site)
        })
    }

    /// The rows of [`Site::Gated`] from those of [`Site::MlpIn`], for callers that kept these.
    ///
    /// # Errors
    /// Names layer and row of a value that is not finite.
    pub fn gated(&self, mlp_in: &Matrix<f32>) -> Result<Matrix<f32>> {
        let rows = self.mlp_of_all_rows().gated(&mlp_in.data)?;
        finite(mlp_in.rows, rows, Site::Gated).map_err(|error| match error {
            Error::Refused(refusal) => refusal.layer(self.index()).into(),
            other => other,
        })
    }

    /// The MLP that sees every row: the dense one, or the shared experts.
    fn mlp_of_all_rows(&self) -> &Mlp {
        match &self.mlp {
            Feed::Dense(mlp) => mlp,
            Feed::Moe { shared_experts, .. } => shared_experts,
        }
    }
}

fn finite(rows: usize, data: Vec<f32>, site: Site) -> Result<Matrix<f32>> {
    let width = data.len() / rows;
    check_finite(&data, width, site.as_str())?;
    Ok(Matrix::new(rows, width, data))
}
