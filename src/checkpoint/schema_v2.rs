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
use crate::codec::trellis::pack;
use crate::codec::trellis::tile::TILE_DIM;
use crate::error::{IoContext, Result, refuse};
use crate::store::safetensors_read::SafetensorsFile;
use crate::store::safetensors_stream::{TensorSpec, stream_safetensors};
use crate::store::safetensors_write::{TensorData, WrittenShard, write_safetensors};
use crate::store::tensor_dtype::TensorDtype;

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

/// Writes the shard of a whole layer whose tensors `read` gives one at a time: the same bytes as [`write_shard`].
///
/// # Errors
/// As [`write_shard`], and what `read` says; names the module that has no bits, or other bits than `bit_map` says.
pub fn stream_shard(
    path: &Path,
    layer: usize,
    bit_map: &BTreeMap<String, u32>,
    (hidden, intermediate): (usize, usize),
    read: &dyn Fn(usize, Projection) -> Result<TrellisLinear>,
) -> Result<WrittenShard> {
    let (gate_up_suh, down_svh) = shared_names(layer);
    let vector = |name: &str, len: usize| TensorSpec::new(name, TensorDtype::F16, &[len]);
    let mut specs = vec![vector(&gate_up_suh, hidden), vector(&down_svh, hidden)];
    let mut owners = BTreeMap::from([
        (gate_up_suh.clone(), (0, Projection::Gate)),
        (down_svh.clone(), (0, Projection::Down)),
    ]);
    for expert in 0..bit_map.len() / Projection::ALL.len() {
        for role in Projection::ALL {
            let module = expert_module(layer, expert, role);
            let Some(&bits) = bit_map.get(&module) else {
                return refuse("no bits are given for the module")
                    .file(path)
                    .layer(layer)
                    .tensor(module)
                    .err();
            };
            let names = linear_names(layer, expert, role);
            let (k, n) =
                if role == Projection::Down { (intermediate, hidden) } else { (hidden, intermediate) };
            let own = if role == Projection::Down { &names.suh } else { &names.svh };
            let shape = [k / TILE_DIM, n / TILE_DIM, pack::words(bits)];
            specs.push(TensorSpec::new(&*names.trellis, TensorDtype::I16, &shape));
            specs.push(vector(own, intermediate));
            specs.extend(names.marker.iter().map(|marker| TensorSpec::new(&**marker, TensorDtype::I32, &[])));
            let kept = names.all().filter(|name| *name != gate_up_suh && *name != down_svh);
            owners.extend(kept.map(|name| (name.to_owned(), (expert, role))));
        }
    }
    let (first_gate, first_down) = (read(0, Projection::Gate)?, read(0, Projection::Down)?);
    let half = |vector: &[f16]| vector.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    // The tensors of a linear follow one another in the file, its marker apart: one linear is kept.
    let mut last: Option<(usize, Projection, TrellisLinear)> = None;
    stream_safetensors(path, &shard_metadata(layer), &specs, |spec, sink| {
        let bytes = if spec.dtype == TensorDtype::I32 {
            Codebook::Mcg.marker().unwrap_or_default().to_le_bytes().to_vec()
        } else if spec.name == gate_up_suh {
            half(&first_gate.suh)
        } else if spec.name == down_svh {
            half(&first_down.svh)
        } else {
            let (expert, role) = owners[&spec.name];
            if last.as_ref().is_none_or(|(e, r, _)| (*e, *r) != (expert, role)) {
                last = Some((expert, role, read(expert, role)?));
            }
            let Some((.., linear)) = &last else { return Ok(()) };
            let shared = match role {
                Projection::Down => linear.svh == first_down.svh,
                Projection::Gate | Projection::Up => linear.suh == first_gate.suh,
            };
            if !shared {
                return refuse("the expert's shared vectors are not the layer's")
                    .layer(layer)
                    .expert(expert)
                    .err();
            }
            match spec.name.rsplit_once('.') {
                Some((_, "suh")) => half(&linear.suh),
                Some((_, "svh")) => half(&linear.svh),
                _ => linear.trellis.iter().flat_map(|word| word.to_le_bytes()).collect(),
            }
        };
        sink.write_all(&bytes).at(path)
    })
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
        check_metadata(&file, layer, &shard_metadata(layer), &["r7_schema", "r7_layer", "r7_marker"])?;
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

/// Refuses a layer's shard whose header has other values under `keys`, looked at in that order, than `wanted`.
pub(super) fn check_metadata(
    file: &SafetensorsFile,
    layer: usize,
    wanted: &BTreeMap<String, String>,
    keys: &[&str],
) -> Result<()> {
    match keys.iter().find(|key| file.metadata().get(**key) != wanted.get(**key)) {
        None => Ok(()),
        Some(key) => refuse(metadata_says(file.metadata().get(*key)))
            .file(file.path())
            .field(*key)
            .layer(layer)
            .wanted(&wanted[*key])
            .err(),
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
