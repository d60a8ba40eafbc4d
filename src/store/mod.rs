//! Files: hashing, canonical JSON, atomic publication, safetensors, locks, seeds.
//!
//! The ground floor: nothing here knows of models or quantization. What leaves this room is reproducible to the byte
//! (sorted keys, fixed permissions, no times, no host names), and what enters it is checked before it is believed.

pub mod atomic;
mod canonical_check;
pub mod canonical_json;
pub mod failpoint;
pub mod gguf;
pub mod hash;
pub mod index;
pub mod json_diff;
pub mod lock;
mod objects;
pub mod safetensors_read;
pub mod safetensors_stream;
pub mod safetensors_write;
pub mod seed;
pub mod strict_json;
pub mod tensor_dtype;
pub mod transaction;

pub use atomic::{AtomicFile, remove_file_durably, write_atomic, write_json_atomic};
pub use canonical_json::{canonical, canonical_hash, float17};
pub use hash::{Hash, sha256_file, sha256_hex};
pub use lock::WorkLock;
pub use safetensors_read::{SafetensorsFile, TensorInfo};
pub use safetensors_stream::{TensorSpec, stream_safetensors};
pub use safetensors_write::{TensorData, WrittenShard, write_safetensors};
pub use seed::{SeedPart, SplitMix64, derive_seed, signs};
pub use tensor_dtype::TensorDtype;
