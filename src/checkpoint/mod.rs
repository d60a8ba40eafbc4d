//! Checkpoints on disk: tensor names, roles (source, carrier), schema-v2 shards.

pub mod directory;
pub mod inventory;
pub mod names;
pub mod schema_v2;
mod weights;

pub use directory::{CheckpointDir, TensorPlace};
pub use weights::WeightSource;
