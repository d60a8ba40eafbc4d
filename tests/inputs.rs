//! Hostile inputs: one test per refusal, each asserting that the message names the thing.
//!
//! None of these tests reaches the network; the one about the hub talks to a closed port of the loopback interface.

#[path = "inputs/checkpoint_dir.rs"]
mod checkpoint_dir;
#[path = "inputs/corpus.rs"]
mod corpus;
#[path = "inputs/plan.rs"]
mod plan;
#[path = "inputs/recipe.rs"]
mod recipe;
#[path = "inputs/registry.rs"]
mod registry;
#[path = "inputs/roles.rs"]
mod roles;
#[path = "inputs/safetensors.rs"]
mod safetensors;
#[path = "inputs/support.rs"]
mod support;
