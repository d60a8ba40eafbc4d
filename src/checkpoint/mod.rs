//! Checkpoints on disk: tensor names, roles (source, carrier), structure, schema-v2 shards.

pub mod complete;
pub mod directory;
pub mod finished;
pub mod inventory;
pub mod kaiju1_block;
pub mod kaiju1_manifest;
pub mod kaiju1_shard;
pub mod kaiju_tensor;
pub mod loose;
pub mod manifest_v2;
pub mod names;
pub mod packed;
pub mod reconstruction;
pub mod roles;
pub mod schema_v1;
pub mod schema_v2;
pub mod slices;
pub mod structure;
pub mod trellis_tensors;
mod weights;

pub use directory::{CheckpointDir, TensorPlace};
pub use reconstruction::Reconstruction;
pub use roles::{Carrier, ExpertGeometry, Roles, Source};
pub use weights::WeightSource;
