//! What a model is (geometry) and how it is to be walked (recipe, registry).

pub mod hub;
pub mod recipe;
pub mod registry;

pub use recipe::Recipe;
pub use registry::{Model, ResolvedModel};
