//! Checkpoints that others read: plain ones made of packed ones.
//!
//! Directories are published whole or not at all ([`store::transaction`](crate::store::transaction)); payloads are made
//! one at a time.

pub mod dense;
pub mod dequantize;
