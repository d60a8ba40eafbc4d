//! Schema v2: the topology-neutral shard of one MoE layer.
//!
//! Names and metadata are a contract with existing GLM-5.2 EXL3 loaders. Gate and up share `gate_up_suh`, down shares
//! `down_svh`; every tensor stores the vector of its own side beside its trellis and codebook marker.

use std::collections::BTreeMap;
use std::path::Path;

use half::f16;

use super::names::Projection;
use crate::codec::trellis::codebook::Codebook;
use crate::codec::trellis::linear::TrellisLinear;
use crate::codec::trellis::pack;
use crate::error::{Result, refuse};
use crate::store::safetensors_read::SafetensorsFile;
use crate::store::safetensors_write::{TensorData, WrittenShard, write_safetensors};
use crate::store::tensor_dtype::TensorDtype;

pub use crate::config::recipe::MARKER;

/// `r7-experts-layer-NNN`, without extension.
pub fn shard_stem(layer: usize) -> String {
    format!("r7-experts-layer-{layer:03}")
}

/// `model.layers.{layer}.mlp.experts`.
pub fn experts_prefix(layer: usize) -> String {
    format!("model.layers.{layer}.mlp.experts")
}

/// The shared vectors' tensor names: (`gate_up_suh`, `down_svh`).
pub fn shared_names(layer: usize) -> (String, String) {
    let prefix = experts_prefix(layer);
    (format!("{prefix}.r7_shared.gate_up_suh"), format!("{prefix}.r7_shared.down_svh"))
}

/// The three projections in canonical order, and whether their private vector is `suh`.
const PROJECTIONS: [(Projection, bool); 3] =
    [(Projection::Gate, false), (Projection::Up, false), (Projection::Down, true)];

/// One expert's packed tensors: gate, up, down.
pub type PackedExpert = [TrellisLinear; 3];

/// The tensors of one expert under `prefix` (which ends in the expert's id), shared vectors left out.
fn expert_tensors(prefix: &str, expert: &PackedExpert) -> Vec<TensorData<'static>> {
    let mut tensors = Vec::with_capacity(9);
    for ((module, private_suh), linear) in PROJECTIONS.iter().zip(expert) {
        let name = |part: &str| format!("{prefix}.{}.{part}", module.as_str());
        let shape = [linear.k / 16, linear.n / 16, pack::words(linear.bits)];
        let words: Vec<i16> = linear.trellis.iter().map(|&word| word as i16).collect();
        tensors.push(TensorData::i16(name("trellis"), &shape, &words));
        let (part, vector) = if *private_suh { ("suh", &linear.suh) } else { ("svh", &linear.svh) };
        tensors.push(vector_tensor(name(part), vector));
        if let Some(marker) = linear.codebook.marker() {
            tensors.push(TensorData::i32(name(linear.codebook.name()), &[], &[marker as i32]));
        }
    }
    tensors
}

/// Names of an expert's own tensors.
pub fn expert_tensor_names(layer: usize, expert: usize) -> Vec<String> {
    let parts = |&(module, private_suh): &(Projection, bool)| {
        let vector = if private_suh { "suh" } else { "svh" };
        let prefix = format!("{}.{expert}.{}", experts_prefix(layer), module.as_str());
        ["trellis", vector, Codebook::Mcg.name()].map(|part| format!("{prefix}.{part}"))
    };
    PROJECTIONS.iter().flat_map(parts).collect()
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
        tensors.extend(expert_tensors(&format!("{}.{id}", experts_prefix(layer)), expert));
    }
    let metadata =
        [("format", "pt"), ("r7_schema", "2"), ("r7_layer", &layer.to_string()), ("r7_marker", MARKER)]
            .map(|(key, value)| (key.to_owned(), value.to_owned()));
    write_safetensors(path, &BTreeMap::from(metadata), &tensors)
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
        let prefix = format!("{}.{expert}", experts_prefix(self.layer));
        let (gate_up_suh, down_svh) = shared_names(self.layer);
        let read = |(module, private_suh): (Projection, bool)| -> Result<TrellisLinear> {
            let name = |part: &str| format!("{prefix}.{}.{part}", module.as_str());
            let (k, n) =
                if private_suh { (self.intermediate, self.hidden) } else { (self.hidden, self.intermediate) };
            let (suh, svh) = if private_suh {
                (name("suh"), down_svh.clone())
            } else {
                (gate_up_suh.clone(), name("svh"))
            };
            read_linear(&self.file, &name("trellis"), &suh, &svh, &name("mcg"), (k, n))
        };
        Ok([read(PROJECTIONS[0])?, read(PROJECTIONS[1])?, read(PROJECTIONS[2])?])
    }
}

/// What a header's metadata entry says, for a refusal of it.
pub(super) fn metadata_says(value: Option<&String>) -> String {
    value.map_or("the header's metadata lacks it".to_owned(), |value| {
        format!("the header's metadata says {value:?}")
    })
}

/// Reads one mcg linear of `k` inputs and `n` outputs from its four tensors.
///
/// # Errors
/// Names file and tensor of what is missing, of another type or shape, of another codebook, outside 1 to 8 bits, or a
/// vector entry that is zero or not finite.
pub fn read_linear(
    file: &SafetensorsFile,
    trellis: &str,
    suh: &str,
    svh: &str,
    marker: &str,
    (k, n): (usize, usize),
) -> Result<TrellisLinear> {
    let shape = file.info(trellis)?.shape.clone();
    let fits = |tiles: usize, size: usize| size.is_multiple_of(16) && tiles == size / 16;
    let bits = match shape[..] {
        [rows, cols, words] if fits(rows, k) && fits(cols, n) && words.is_multiple_of(16) => words / 16,
        _ => {
            return refuse(format!("its shape is {shape:?}"))
                .file(file.path())
                .tensor(trellis)
                .wanted(format!("[{}, {}, 16 * bits]", k / 16, n / 16))
                .err();
        }
    };
    let half = |name: &str, len: usize| -> Result<Vec<f16>> {
        let bytes = file.bytes_as(name, TensorDtype::F16, &[len])?;
        let vector: Vec<f16> = bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b)).collect();
        match vector.iter().position(|x| !x.is_finite() || x.to_f32() == 0.0) {
            None => Ok(vector),
            Some(at) => refuse(format!("value {} at flat index {at}", vector[at]))
                .file(file.path())
                .tensor(name)
                .wanted("finite, non-zero f16 values")
                .err(),
        }
    };
    let found = file.bytes_as(marker, TensorDtype::I32, &[])?;
    let wanted = Codebook::Mcg.marker().unwrap_or_default();
    if found != wanted.to_le_bytes() {
        let found = found.iter().rev().fold(String::new(), |hex, byte| format!("{hex}{byte:02X}"));
        return refuse(format!("codebook marker 0x{found}"))
            .file(file.path())
            .tensor(marker)
            .wanted(format!("0x{wanted:08X}"))
            .err();
    }
    let words = file.bytes_as(trellis, TensorDtype::I16, &shape)?;
    let words = words.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b)).collect();
    let bits = u32::try_from(bits).unwrap_or(u32::MAX);
    TrellisLinear::new((k, n), bits, Codebook::Mcg, words, half(suh, k)?, half(svh, n)?).map_err(|error| {
        match error {
            crate::Error::Refused(refusal) => refusal.file(file.path()).tensor(trellis).into(),
            other => other,
        }
    })
}
