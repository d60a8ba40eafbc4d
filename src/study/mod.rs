//! Studies: what an ingredient of the recipe is worth, by measurement on one layer.
//!
//! A study takes a layer on the output of the quantized layers before it, processes it under several recipes on the same
//! rows and the same split of them, and compares held-out expert error (paired over experts) and the divergence of the
//! model with that layer's experts alone replaced (paired over tokens). It decides nothing beforehand: what does not
//! help is reported as such. Nothing of it reaches a walk's bytes.

pub mod ablation;
pub mod bench;
pub mod effect;
pub mod ingredients;
pub mod pilot;
pub mod report;
pub mod statistics;
pub mod trial;
pub mod variant;

pub use ablation::{AblateOptions, ablate};
pub use report::AblationReport;
