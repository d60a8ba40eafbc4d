//! Decisions made by measurement: vectors, probes, bits or settings by exact allocation.

pub mod allocation;
pub mod down_input;
pub mod expert;
pub mod fixed_point;
pub mod per_tensor;
pub mod permutation;
pub mod pilots;
pub mod probes;
pub mod rung_probes;
pub mod rungs;
pub mod sample;
pub mod scales;
pub mod search;
pub mod vectors;
