//! A carrier with packed linears, made from a BF16 model.
//!
//! `walk carrier` packs attention, dense MLPs and shared experts to EXL3 and leaves everything else byte for byte as it is.
//! Layer by layer, as the walk does with experts: each linear is calibrated on inputs that the linears before it, packed and
//! decoded, make of the calibration prompts.
//!
//! In order: [`linears`] says what is packed; [`make`] opens the work and goes through the layers, [`calibrate`] sums the
//! covariances, [`encode`] packs a linear, [`modules`] keeps what is finished; [`directory`] writes the result with its
//! [`manifest`], [`report`] tells of it.
//!
//! Invariants: the bytes of a carrier do not depend on threads, batches or interruptions; what is not packed has the payload
//! hash it had in the model; the directory appears whole or not at all.
//!
//! What it does not do: quantize routed experts or the MTP block, evaluate the result.

pub mod calibrate;
pub mod directory;
pub mod encode;
pub mod linears;
pub mod make;
pub mod manifest;
pub mod modules;
pub mod report;

pub use linears::Scope;
pub use make::{CarrierOptions, make_carrier};
pub use report::CarrierReport;
