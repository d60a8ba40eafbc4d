//! Checkpoints on disk: tensor names, roles (source, carrier), schema-v2 shards.

mod weights;

pub use weights::WeightSource;
