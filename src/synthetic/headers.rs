//! What a directory's headers say, held against what was meant.

use std::path::Path;
use std::time::Instant;

use super::checkpoint::Written;
use crate::checkpoint::packed::packed_modules;
use crate::checkpoint::roles::check_experts;
use crate::checkpoint::schema_v2::{shard_metadata, shard_stem};
use crate::checkpoint::structure::check_layers;
use crate::checkpoint::{CheckpointDir, ExpertGeometry};
use crate::config::Geometry;
use crate::error::{Result, refuse};
use crate::store::safetensors_stream::TensorSpec;

/// Wall-clock seconds that readers took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Seconds {
    /// To open the directory: index, all headers, and that they agree.
    pub open: f64,
    /// To check every tensor's name, type, shape and place in its layout.
    pub audit: f64,
}

/// Opens a BF16 checkpoint and checks every tensor: as a source of its experts, against its config's layers, and against
/// what was written.
///
/// # Errors
/// Names what differs.
pub fn audit_source(dir: &Path, written: &Written) -> Result<Seconds> {
    let started = Instant::now();
    let checkpoint = CheckpointDir::open(dir)?;
    let open = started.elapsed().as_secs_f64();
    let started = Instant::now();
    let geometry = Geometry::read(&dir.join("config.json"))?;
    let experts = ExpertGeometry {
        moe_layers: geometry.moe_layers(),
        experts: geometry.n_routed_experts,
        hidden: geometry.hidden_size,
        intermediate: geometry.moe_intermediate_size,
    };
    check_experts(&checkpoint, &experts)?;
    check_layers(&geometry, &checkpoint)?;
    check_specs(&checkpoint, &written.specs)?;
    Ok(Seconds { open, audit: started.elapsed().as_secs_f64() })
}

/// Opens a directory of packed v2 shards and checks every tensor: metadata of the shards, all modules' layout, bits and
/// marker, and what was written. `units` is the sum of all modules' bits.
///
/// # Errors
/// Names what differs.
pub fn audit_v2(dir: &Path, written: &Written, units: u64) -> Result<Seconds> {
    let started = Instant::now();
    let checkpoint = CheckpointDir::open(dir)?;
    let open = started.elapsed().as_secs_f64();
    let started = Instant::now();
    let geometry = Geometry::read(&dir.join("config.json"))?;
    for layer in geometry.moe_layers() {
        let file = format!("{}.safetensors", shard_stem(layer));
        let metadata = checkpoint.shards().find(|(name, _)| *name == file).map(|(_, shard)| shard.metadata());
        if metadata != Some(&shard_metadata(layer)) {
            return Err(refuse("the header's metadata is not that of a v2 shard of the layer")
                .file(dir.join(file))
                .layer(layer)
                .check());
        }
    }
    check_specs(&checkpoint, &written.specs)?;
    let modules = packed_modules(&checkpoint)?;
    let bits = modules.values().filter_map(|module| module.bits()).map(u64::from);
    let (count, found) = (modules.len(), bits.sum::<u64>());
    let wanted = 3 * geometry.n_routed_experts * geometry.moe_layers().len();
    if (count, found) != (wanted, units) {
        return Err(refuse(format!("{count} packed modules with {found} bits"))
            .file(dir)
            .wanted(format!("{wanted} with {units}"))
            .check());
    }
    Ok(Seconds { open, audit: started.elapsed().as_secs_f64() })
}

/// Every tensor is there as it was meant, and none besides.
fn check_specs(checkpoint: &CheckpointDir, specs: &[TensorSpec]) -> Result<()> {
    for spec in specs {
        let place = checkpoint.info(&spec.name)?;
        if place.info.dtype != spec.dtype || place.info.shape != spec.shape {
            return Err(refuse(format!("it is {} of shape {:?}", place.info.dtype, place.info.shape))
                .file(checkpoint.dir().join(place.file))
                .tensor(&spec.name)
                .wanted(format!("{} of shape {:?}", spec.dtype, spec.shape))
                .check());
        }
    }
    let found = checkpoint.names().count();
    if found != specs.len() {
        return Err(refuse(format!("{found} tensors"))
            .file(checkpoint.dir())
            .wanted(format!("{}", specs.len()))
            .check());
    }
    Ok(())
}
