//! The GLM-MoE-DSA forward pass, a layer at a time.
//!
//! Purpose: from the state of one layer to the state of the next, for a ragged batch of prompts, with what the walk
//! captures on the way ([`Layer::attend`] stops before the experts, [`Layer::finish`] runs them).
//! Source: the `glm_moe_dsa` model of Hugging Face Transformers 5.24 (eager attention and experts); structs mirror the
//! module tree of the checkpoint.
//!
//! Invariants: all arithmetic is f32 on weights that were upcast exactly; the bytes of a prompt's results do not depend
//! on the other prompts of the call, on the number of threads, or on the run (see [`linalg`](crate::linalg)); weights
//! arrive through [`WeightSource`](crate::checkpoint::WeightSource) alone; a MoE layer is never held whole, its routed
//! experts pass one at a time; a value that is not finite ends the call with an error naming layer, prompt and row.
//!
//! What it does not do: run on a device other than the CPU, keep a key/value cache, run the MTP block.

pub mod attention;
pub mod experts;
pub mod head;
pub mod indexer;
pub mod inputs;
pub mod layer;
pub mod linear;
pub mod mlp;
pub mod norm;
pub mod rope;
pub mod router;

pub use experts::{expert_forward, expert_intermediate, routed};
pub use head::{Embedding, Head, round_bf16};
pub use indexer::TopK;
pub use inputs::Site;
pub use layer::{Attended, Capture, Layer, LayerOutput};
