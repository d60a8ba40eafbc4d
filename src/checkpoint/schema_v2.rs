//! Schema v2: the topology-neutral shard of one MoE layer.
//!
//! Names and metadata are a contract with existing GLM-5.2 EXL3 loaders. Gate and up share `gate_up_suh`, down shares
//! `down_svh`; every tensor stores the vector of its own side beside its trellis and codebook marker.

use std::collections::BTreeMap;
use std::path::Path;

use half::f16;

use super::names::{Projection, expert_module, experts_prefix};
use super::trellis_tensors::LinearNames;
use crate::codec::trellis::codebook::Codebook;
use crate::codec::trellis::linear::TrellisLinear;
use crate::error::{Result, refuse};
use crate::store::safetensors_read::SafetensorsFile;
use crate::store::safetensors_write::{TensorData, WrittenShard, write_safetensors};

pub use crate::config::recipe::MARKER;

/// `r7-experts-layer-NNN`, without extension.
pub fn shard_stem(layer: usize) -> String {
    format!("r7-experts-layer-{layer:03}")
}

/// The shared vectors' tensor names: (`gate_up_suh`, `down_svh`).
pub fn shared_names(layer: usize) -> (String, String) {
    let prefix = experts_prefix(layer);
    (format!("{prefix}.r7_shared.gate_up_suh"), format!("{prefix}.r7_shared.down_svh"))
}

/// One expert's packed tensors: gate, up, down.
pub type PackedExpert = [TrellisLinear; 3];

/// What the tensors of a projection of an expert are called: gate and up share their `suh`, down shares its `svh`.
pub fn linear_names(layer: usize, expert: usize, projection: Projection) -> LinearNames {
    let mut names = LinearNames::own(&expert_module(layer, expert, projection), Codebook::Mcg);
    let (gate_up_suh, down_svh) = shared_names(layer);
    match projection {
        Projection::Gate | Projection::Up => names.suh = gate_up_suh,
        Projection::Down => names.svh = down_svh,
    }
    names
}

/// The tensors of one expert, shared vectors left out.
fn expert_tensors(layer: usize, id: usize, expert: &PackedExpert) -> Vec<TensorData<'static>> {
    let (gate_up_suh, down_svh) = shared_names(layer);
    let shared = |name: &str| name == gate_up_suh || name == down_svh;
    let roles = Projection::ALL.iter().zip(expert);
    roles.flat_map(|(&role, linear)| linear_names(layer, id, role).tensors(linear, shared)).collect()
}

/// Names of an expert's own tensors.
pub fn expert_tensor_names(layer: usize, expert: usize) -> Vec<String> {
    let (gate_up_suh, down_svh) = shared_names(layer);
    let own = |name: &String| *name != gate_up_suh && *name != down_svh;
    let names =
        |&role: &Projection| linear_names(layer, expert, role).all().map(str::to_owned).collect::<Vec<_>>();
    Projection::ALL.iter().flat_map(names).filter(own).collect()
}

fn vector_tensor(name: String, vector: &[f16]) -> TensorData<'static> {
    TensorData::f16(name, &[vector.len()], vector)
}

/// Writes a shard of some experts (id and tensors) of a layer: all of them, or one as a mini-shard. They must agree on
/// the shared vectors.
///
/// # Errors
/// Names expert and vector where they do not; names the path when it cannot be written.
pub fn write_shard(path: &Path, layer: usize, experts: &[(usize, PackedExpert)]) -> Result<WrittenShard> {
    let Some((_, [gate, _, down])) = experts.first() else {
        return refuse("a shard without experts").file(path).layer(layer).err();
    };
    let (gate_up_suh, down_svh) = shared_names(layer);
    let mut tensors = vec![vector_tensor(gate_up_suh, &gate.suh), vector_tensor(down_svh, &down.svh)];
    for (id, expert) in experts {
        let [g, u, d] = expert;
        if g.suh != gate.suh || u.suh != gate.suh || d.svh != down.svh {
            return refuse("the expert's shared vectors are not the layer's").layer(layer).expert(*id).err();
        }
        tensors.extend(expert_tensors(layer, *id, expert));
    }
    write_safetensors(path, &shard_metadata(layer), &tensors)
}

/// The header metadata of a layer's shard.
pub fn shard_metadata(layer: usize) -> BTreeMap<String, String> {
    [("format", "pt"), ("r7_schema", "2"), ("r7_layer", &layer.to_string()), ("r7_marker", MARKER)]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into()
}

/// An open shard.
#[derive(Debug)]
pub struct V2Layer {
    file: SafetensorsFile,
    layer: usize,
    hidden: usize,
    intermediate: usize,
}

impl V2Layer {
    /// Opens a layer's shard and checks its marker.
    ///
    /// # Errors
    /// Names the file and the metadata key that is not as schema v2 has it.
    pub fn open(path: &Path, layer: usize, hidden: usize, intermediate: usize) -> Result<Self> {
        let file = SafetensorsFile::open(path)?;
        for (key, value) in [("r7_schema", "2"), ("r7_layer", &layer.to_string()), ("r7_marker", MARKER)] {
            if file.metadata().get(key).map(String::as_str) != Some(value) {
                return refuse(metadata_says(file.metadata().get(key)))
                    .file(path)
                    .field(key)
                    .layer(layer)
                    .wanted(value)
                    .err();
            }
        }
        Ok(Self { file, layer, hidden, intermediate })
    }

    /// The packed tensors of an expert: gate, up, down.
    ///
    /// # Errors
    /// Names file and tensor of what is missing, of another shape, or not mcg.
    pub fn expert(&self, expert: usize) -> Result<PackedExpert> {
        let [gate, up, down] = Projection::ALL;
        Ok([self.linear(expert, gate)?, self.linear(expert, up)?, self.linear(expert, down)?])
    }

    /// One packed tensor of an expert.
    ///
    /// # Errors
    /// As [`V2Layer::expert`].
    pub fn linear(&self, expert: usize, projection: Projection) -> Result<TrellisLinear> {
        let sizes = match projection {
            Projection::Gate | Projection::Up => (self.hidden, self.intermediate),
            Projection::Down => (self.intermediate, self.hidden),
        };
        read_linear(&self.file, &linear_names(self.layer, expert, projection), sizes)
    }

    /// The open file.
    pub fn file(&self) -> &SafetensorsFile {
        &self.file
    }
}

/// What a header's metadata entry says, for a refusal of it.
pub(super) fn metadata_says(value: Option<&String>) -> String {
    value.map_or("the header's metadata lacks it".to_owned(), |value| {
        format!("the header's metadata says {value:?}")
    })
}

/// Reads a linear of `k` inputs and `n` outputs.
///
/// # Errors
/// As [`LinearNames::read`], and names file and tensor of a linear of other sizes.
pub(super) fn read_linear(
    file: &SafetensorsFile,
    names: &LinearNames,
    (k, n): (usize, usize),
) -> Result<TrellisLinear> {
    let (rows, cols, _) = names.extent(file)?;
    if (rows, cols) != (k, n) {
        return refuse(format!("its shape is {:?}", file.info(&names.trellis)?.shape))
            .file(file.path())
            .tensor(&names.trellis)
            .wanted(format!("[{}, {}, 16 * bits]", k / 16, n / 16))
            .err();
    }
    names.read(file)
}
