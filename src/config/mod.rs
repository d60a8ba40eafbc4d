//! What a model is (geometry) and how it is to be walked (recipe, registry).

mod fields;
pub mod geometry;
pub mod rope;

pub use geometry::Geometry;
