//! Hostile inputs: one test per refusal, each asserting that the message names the thing.
//!
//! None of these tests reaches the network; the one about the hub talks to a closed port of the loopback interface.

mod checkpoint_dir;
mod corpus;
mod gguf;
mod plan;
mod recipe;
mod registry;
mod roles;
mod safetensors;
mod schema_v2;
pub mod support;
