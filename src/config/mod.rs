//! What a model is (geometry) and how it is to be walked (recipe, registry).

mod agree;
mod fields;
pub mod geometry;
pub mod rope;

pub use geometry::Geometry;
pub mod choices;
pub mod hub;
pub mod kaiju1;
pub mod knobs;
pub mod recipe;
pub mod registry;
mod validate;

pub use recipe::Recipe;
pub use registry::{Model, ResolvedModel};
