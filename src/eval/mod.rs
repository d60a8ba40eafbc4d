//! Perplexity, divergence and the final report.
//!
//! Purpose: what quantization did to the model, in figures that another run can be held to. Source and result are sent
//! over the same prompts ([`final_states`]), their logits compared token by token ([`compare`]) and the figures put
//! together with those of the walk ([`WalkReport`]); checkpoints on disk ([`contest`]) go the same way ([`evaluate`]).
//!
//! Invariants: log-softmax and all sums are f64, in prompt order, then token order; the figures do not depend on the
//! number of threads, on how prompts are batched, or on the run. Logits are formed some rows at a time, never all at
//! once. Source and result carry the same type of state between layers ([`StateType`]).
//!
//! What it does not do: generate text, or score tasks.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use crate::error::{Error, refuse};

mod compare;
pub mod contest;
mod forward;
pub mod metrics;
mod pair;
pub mod report;
pub(crate) mod table;

pub use compare::{Evaluation, compare, score, scored_tokens};
pub use forward::{Midway, final_states};
pub use metrics::{Scores, TokenScore};
pub use pair::{AxisPerplexity, Perplexity, evaluate, perplexity};
pub use report::{LayerReport, WalkReport, bits_per_weight};

/// Type of the state between layers.
///
/// Rounding the state alone costs over half as much divergence as 3.5-bit experts, so that f32 is what tells codecs
/// apart; bf16 is what a serving engine does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum StateType {
    /// As the layers compute it.
    #[default]
    F32,
    /// Rounded to BF16 after every layer.
    Bf16,
}

impl fmt::Display for StateType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        })
    }
}

impl FromStr for StateType {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "f32" => Ok(Self::F32),
            "bf16" => Ok(Self::Bf16),
            other => refuse(format!("no type of state is called {other:?}")).wanted("f32 or bf16").err(),
        }
    }
}
