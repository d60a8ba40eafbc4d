//! `walk` quantizes GLM-MoE-DSA checkpoints to EXL3 ("TRELLIS") or KAIJU1 layer by layer, each layer calibrated on the
//! output of the layers already quantized before it.
//!
//! Data passes through the rooms in this order: tokens ([`corpus`]) -> state and capture ([`model`]) -> covariance
//! ([`calibrate`]) -> choice of vectors and bits ([`choose`]) -> packed bytes ([`codec`]) -> decoded weights -> the next
//! state ([`walk`](mod@walk)) -> figures ([`eval`]).
//!
//! A module imports only from the floors below its own:
//!
//! | floor | rooms |
//! |---|---|
//! | 9 | [`cli`] |
//! | 8 | [`study`], [`carrier`], [`inspect`], [`tensors`] |
//! | 7 | [`eval`], [`audit`], [`publish`] |
//! | 6 | [`walk`](mod@walk) |
//! | 5 | [`estimate`] |
//! | 4 | [`choose`] |
//! | 3 | [`model`], [`calibrate`], [`synthetic`] |
//! | 2 | [`checkpoint`], [`corpus`], [`codec`] |
//! | 1 | [`config`] |
//! | 0 | [`store`], [`linalg`], [`error`] |
//!
//! [`codec`] knows nothing of models and [`model`] nothing of codecs: weights reach the forward pass through the
//! [`checkpoint::WeightSource`] trait alone.
#![deny(missing_docs)]
#![warn(unsafe_op_in_unsafe_fn)]

pub mod audit;
pub mod calibrate;
pub mod carrier;
pub mod checkpoint;
pub mod choose;
pub mod cli;
pub mod codec;
pub mod config;
pub mod corpus;
pub mod error;
pub mod estimate;
pub mod eval;
pub mod inspect;
pub mod linalg;
pub mod model;
pub mod publish;
pub mod store;
pub mod study;
pub mod synthetic;
pub mod tensors;
pub mod walk;

pub use error::{Error, Result};
