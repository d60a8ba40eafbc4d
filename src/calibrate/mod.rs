//! What a layer's captured rows say: routing mass, row plans, covariances.
//!
//! Rows are tokens of the calibration prompts. A row id is the token's offset over all calibration prompts in plan
//! order; every sum here runs in ascending row id, so no figure depends on how prompts were batched.

pub mod cold;
pub mod covariance;
pub mod mass;
pub mod rows;
