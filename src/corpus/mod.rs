//! Calibration and evaluation text: what the user writes ([`plan`]) and what the walk seals ([`sealed`]).

pub mod batch;
mod documents;
mod encoder;
pub mod plan;
pub mod sealed;

pub use documents::{Content, Document};
pub use encoder::TextEncoder;
pub use plan::{Plan, PromptUse, TokenRef};
pub use sealed::{CorpusPlan, SealContext, SealedPrompt, seal};
