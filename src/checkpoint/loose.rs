//! One expert whose tensors own both of their vectors, as a file of its own.
//!
//! Schema v2 stores a layer's residual-side vectors once, so it cannot hold such an expert; an ablation of the shared
//! vectors has to keep it somewhere. No loader reads these files: they are no checkpoint.

use std::collections::BTreeMap;
use std::path::Path;

use super::names::{Projection, expert_module};
use super::schema_v2::{PackedExpert, metadata_says, read_linear};
use super::trellis_tensors::LinearNames;
use crate::codec::trellis::codebook::Codebook;
use crate::error::{Result, refuse};
use crate::store::safetensors_read::SafetensorsFile;
use crate::store::safetensors_write::{TensorData, WrittenShard, write_safetensors};

/// Metadata key that tells these files from a shard of schema v2.
const KEY: &str = "walk_loose_expert";

fn names(layer: usize, expert: usize, role: Projection) -> LinearNames {
    LinearNames::own(&expert_module(layer, expert, role), Codebook::Mcg)
}

/// Writes an expert of a layer: `trellis`, `suh`, `svh` and marker a tensor.
///
/// # Errors
/// Names the path when it cannot be written.
pub fn write_loose(path: &Path, layer: usize, expert: usize, packed: &PackedExpert) -> Result<WrittenShard> {
    let roles = Projection::ALL.iter().zip(packed);
    let tensors: Vec<TensorData<'_>> =
        roles.flat_map(|(&role, linear)| names(layer, expert, role).tensors(linear, |_| false)).collect();
    let metadata = BTreeMap::from([(KEY.to_owned(), format!("{layer}.{expert}"))]);
    write_safetensors(path, &metadata, &tensors)
}

/// Reads it back.
///
/// # Errors
/// Names file and tensor of what is missing or of another shape, and a file that is of another expert.
pub fn read_loose(
    path: &Path,
    layer: usize,
    expert: usize,
    (hidden, intermediate): (usize, usize),
) -> Result<PackedExpert> {
    let file = SafetensorsFile::open(path)?;
    let wanted = format!("{layer}.{expert}");
    if file.metadata().get(KEY) != Some(&wanted) {
        return refuse(metadata_says(file.metadata().get(KEY)))
            .file(path)
            .field(KEY)
            .layer(layer)
            .expert(expert)
            .wanted(wanted)
            .err();
    }
    let read = |role: Projection| {
        let shape = if role == Projection::Down { (intermediate, hidden) } else { (hidden, intermediate) };
        read_linear(&file, &names(layer, expert, role), shape)
    };
    Ok([read(Projection::Gate)?, read(Projection::Up)?, read(Projection::Down)?])
}
