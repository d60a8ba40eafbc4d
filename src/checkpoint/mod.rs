//! Checkpoints on disk: tensor names, roles (source, carrier), schema-v2 shards.

pub mod names;
mod weights;

pub use weights::WeightSource;
