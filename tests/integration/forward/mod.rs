//! The forward pass against golden data, its invariances, and the configs it must refuse.
mod config;
mod golden;
mod invariance;
mod refusals;
mod tiny;
