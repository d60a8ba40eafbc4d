//! The forward pass against golden data, its invariances, and the configs it must refuse.
mod support;

#[path = "forward/config.rs"]
mod config;
#[path = "forward/golden.rs"]
mod golden;
#[path = "forward/invariance.rs"]
mod invariance;
#[path = "forward/refusals.rs"]
mod refusals;
#[path = "forward/tiny.rs"]
mod tiny;
