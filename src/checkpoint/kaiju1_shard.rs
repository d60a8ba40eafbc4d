//! The shard of one MoE layer of KAIJU1 experts: `kaiju1-experts-layer-NNN.safetensors`.
//!
//! A weight is one U8 tensor, `{module}.kaiju1`: the payload as [`crate::codec::kaiju`] defines it, in place of
//! `{module}.weight`. A mini-shard holds one expert in the same form.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::kaiju_tensor::{kaiju_data, kaiju_name, read_kaiju};
use super::names::{Projection, expert_module};
use super::schema_v2::{MARKER, check_metadata};
use crate::codec::kaiju::KaijuTensor;
use crate::error::{Result, refuse};
use crate::store::safetensors_read::SafetensorsFile;
use crate::store::safetensors_write::{TensorData, WrittenShard, write_safetensors};

/// Value of `schema_version` and of the metadata's `kaiju1_schema`.
pub const SCHEMA_VERSION: u32 = 1;

/// `kaiju1-experts-layer-NNN`, without extension.
pub fn shard_stem(layer: usize) -> String {
    format!("kaiju1-experts-layer-{layer:03}")
}

/// The tensors of so many experts of a layer.
pub fn tensor_names(layer: usize, experts: usize) -> BTreeSet<String> {
    let modules =
        (0..experts).flat_map(|expert| Projection::ALL.map(|role| expert_module(layer, expert, role)));
    modules.map(|module| kaiju_name(&module)).collect()
}

/// The header metadata of a layer's shard.
pub fn shard_metadata(layer: usize) -> BTreeMap<String, String> {
    [
        ("format", "pt".to_owned()),
        ("kaiju1_schema", SCHEMA_VERSION.to_string()),
        ("kaiju1_layer", layer.to_string()),
        ("kaiju1_marker", MARKER.to_owned()),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into()
}

/// Writes a shard of some experts (id; gate, up, down) of a layer: all of them, or one as a mini-shard.
///
/// # Errors
/// Names the path when it cannot be written.
pub fn write_shard(path: &Path, layer: usize, experts: &[(usize, [KaijuTensor; 3])]) -> Result<WrittenShard> {
    let tensors: Vec<TensorData<'_>> = experts
        .iter()
        .flat_map(|(id, expert)| {
            Projection::ALL.iter().zip(expert).map(move |(&role, tensor)| (*id, role, tensor))
        })
        .map(|(id, role, tensor)| kaiju_data(&expert_module(layer, id, role), tensor))
        .collect();
    write_safetensors(path, &shard_metadata(layer), &tensors)
}

/// An open shard.
#[derive(Debug)]
pub struct Kaiju1Layer {
    file: SafetensorsFile,
    layer: usize,
    hidden: usize,
    intermediate: usize,
}

impl Kaiju1Layer {
    /// Opens a layer's shard and checks its marker.
    ///
    /// # Errors
    /// Names the file and the metadata key that is not as [`shard_metadata`] has it.
    pub fn open(path: &Path, layer: usize, hidden: usize, intermediate: usize) -> Result<Self> {
        let file = SafetensorsFile::open(path)?;
        let keys = ["kaiju1_schema", "kaiju1_layer", "kaiju1_marker"];
        check_metadata(&file, layer, &shard_metadata(layer), &keys)?;
        Ok(Self { file, layer, hidden, intermediate })
    }

    /// One tensor of an expert.
    ///
    /// # Errors
    /// Names file and tensor of what is missing, of other sizes, or no sound payload.
    pub fn tensor(&self, expert: usize, projection: Projection) -> Result<KaijuTensor> {
        let wanted = match projection {
            Projection::Gate | Projection::Up => (self.intermediate, self.hidden),
            Projection::Down => (self.hidden, self.intermediate),
        };
        let name = kaiju_name(&expert_module(self.layer, expert, projection));
        let tensor = read_kaiju(&self.file, &name)?;
        if (tensor.rows(), tensor.cols()) != wanted {
            return refuse(format!("it is of a weight [{}, {}]", tensor.rows(), tensor.cols()))
                .file(self.file.path())
                .tensor(name)
                .wanted(format!("[{}, {}]", wanted.0, wanted.1))
                .err();
        }
        Ok(tensor)
    }

    /// The open file.
    pub fn file(&self) -> &SafetensorsFile {
        &self.file
    }
}
