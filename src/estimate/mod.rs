//! What a walk will take, before it is begun and without any weights: encodes, bytes, memory, hours.
//!
//! Encodes and bytes follow from geometry and recipe alone. Hours are amounts of work ([`cost`]) times rates that this
//! machine shows in a calibration of about a minute ([`machine`]); they are a projection and say so. A pilot projects
//! from the stage times of layers it has walked instead ([`project`]).

pub mod cost;
pub mod counts;
pub mod machine;
pub mod project;
pub mod record;
pub mod report;
pub mod size;
pub mod tokens;
pub mod work;

/// What every projection calls itself.
pub const UNVERIFIED: &str = "UNVERIFIED projection";
