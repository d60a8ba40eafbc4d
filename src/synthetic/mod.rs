//! Checkpoints made of seeded noise: the sizes of a published model without its weights.
//!
//! Purpose: what a walk, a reader or a conversion takes at full width is measured on files of full width, not
//! extrapolated from a miniature. Every tensor's bytes depend on the seed and its name alone, so two machines, or one
//! with other threads, make the same files.
//!
//! What it does not do: imitate trained weights. Activations stay near unit size and every expert gets its share of the
//! rows; nothing else about them means anything, least of all a quantization error.

pub mod checkpoint;
pub mod headers;
mod noise;
pub mod packed;
pub mod specs;

pub use checkpoint::{SmallModel, Written, write_small_model, write_source_headers, write_v2_headers};
pub use headers::{audit_source, audit_v2};
pub use packed::packed_layer;
