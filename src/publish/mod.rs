//! Complete checkpoints: what loaders are given.
//!
//! [`assemble`](fn@assemble) puts the finished layers of a walk and everything else of its carrier into one model directory;
//! [`convert`] slices the experts of such a directory for tensor parallelism (schema v1), and puts slices together again.
//! [`dequantize`] makes a plain checkpoint of a packed one, for software that reads no EXL3.
//! Every directory is made beside its target and published by one rename, bound to its inputs: an interrupted command goes
//! on where it stopped, and what it reads from is never written to.

pub mod assemble;
mod blocks;
mod carry;
mod complete;
pub mod convert;
pub mod dense;
pub mod dequantize;
mod directory;

pub use assemble::{AssembleOptions, AssembleReport, assemble};
pub use carry::{copy_file, side_files};
pub use convert::{ConvertReport, to_v1, to_v2};
pub use directory::{Made, check_apart};
