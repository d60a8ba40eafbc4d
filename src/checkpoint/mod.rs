//! Checkpoints on disk: tensor names, roles (source, carrier), structure, schema-v2 shards.

pub mod directory;
pub mod inventory;
pub mod loose;
pub mod manifest_v2;
pub mod names;
pub mod roles;
pub mod schema_v2;
pub mod structure;
mod weights;

pub use directory::{CheckpointDir, TensorPlace};
pub use roles::{Carrier, ExpertGeometry, Roles, Source};
pub use weights::WeightSource;
