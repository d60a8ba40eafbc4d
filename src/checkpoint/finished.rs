//! Finished layers of either codec: where they lie, and their packed experts.

use std::path::{Path, PathBuf};

use super::complete::LayerEntry;
use super::kaiju1_manifest::Kaiju1Manifest;
use super::kaiju1_shard::{self, Kaiju1Layer};
use super::manifest_v2::V2Manifest;
use super::names::Projection;
use super::schema_v2::{self, V2Layer};
use crate::codec::weight::PackedWeight;
use crate::config::choices::CodecName;
use crate::error::Result;
use crate::store::safetensors_read::SafetensorsFile;
use crate::store::safetensors_write::WrittenShard;

/// One expert's packed tensors: gate, up, down.
pub type FinishedExpert = [PackedWeight; 3];

/// The folder of finished layers, relative to a work directory.
pub fn finished_folder(codec: CodecName) -> &'static str {
    match codec {
        CodecName::Trellis => "v2",
        CodecName::Kaiju1 => "kaiju1",
    }
}

/// What a layer's shard and manifest are called, without extension.
pub fn finished_stem(codec: CodecName, layer: usize) -> String {
    match codec {
        CodecName::Trellis => schema_v2::shard_stem(layer),
        CodecName::Kaiju1 => kaiju1_shard::shard_stem(layer),
    }
}

/// A layer's shard (`safetensors`) or manifest (`json`), relative to a work directory.
pub fn finished_path(codec: CodecName, layer: usize, extension: &str) -> PathBuf {
    Path::new(finished_folder(codec)).join(format!("{}.{extension}", finished_stem(codec, layer)))
}

/// Writes a shard of some experts of a layer: all of them, or one as a mini-shard.
///
/// # Errors
/// Weights of another codec; see [`schema_v2::write_shard`] and [`kaiju1_shard::write_shard`].
pub fn write_finished(
    path: &Path,
    codec: CodecName,
    layer: usize,
    experts: Vec<(usize, FinishedExpert)>,
) -> Result<WrittenShard> {
    fn each<T: std::fmt::Debug>(
        experts: Vec<(usize, FinishedExpert)>,
        into: impl Fn(PackedWeight) -> Result<T>,
    ) -> Result<Vec<(usize, [T; 3])>> {
        let expert =
            |(id, [gate, up, down]): (usize, FinishedExpert)| Ok((id, [into(gate)?, into(up)?, into(down)?]));
        experts.into_iter().map(expert).collect()
    }
    match codec {
        CodecName::Trellis => {
            schema_v2::write_shard(path, layer, &each(experts, PackedWeight::into_trellis)?)
        }
        CodecName::Kaiju1 => {
            kaiju1_shard::write_shard(path, layer, &each(experts, PackedWeight::into_kaiju1)?)
        }
    }
}

/// An open shard of either codec.
#[derive(Debug)]
pub enum FinishedLayer {
    /// Schema v2.
    V2(V2Layer),
    /// KAIJU1.
    Kaiju1(Kaiju1Layer),
}

impl FinishedLayer {
    /// Opens a layer's shard and checks its marker.
    ///
    /// # Errors
    /// Names the file and the metadata key that is not as the codec's schema has it.
    pub fn open(
        path: &Path,
        codec: CodecName,
        layer: usize,
        (hidden, intermediate): (usize, usize),
    ) -> Result<Self> {
        Ok(match codec {
            CodecName::Trellis => Self::V2(V2Layer::open(path, layer, hidden, intermediate)?),
            CodecName::Kaiju1 => Self::Kaiju1(Kaiju1Layer::open(path, layer, hidden, intermediate)?),
        })
    }

    /// One packed tensor of an expert.
    ///
    /// # Errors
    /// Names file and tensor of what is missing, of another shape, or unsound.
    pub fn weight(&self, expert: usize, projection: Projection) -> Result<PackedWeight> {
        match self {
            Self::V2(layer) => layer.linear(expert, projection).map(PackedWeight::Trellis),
            Self::Kaiju1(layer) => layer.tensor(expert, projection).map(PackedWeight::Kaiju1),
        }
    }

    /// The packed tensors of an expert: gate, up, down.
    ///
    /// # Errors
    /// As [`FinishedLayer::weight`].
    pub fn expert(&self, expert: usize) -> Result<FinishedExpert> {
        let [gate, up, down] = Projection::ALL;
        Ok([self.weight(expert, gate)?, self.weight(expert, up)?, self.weight(expert, down)?])
    }

    /// The open file.
    pub fn file(&self) -> &SafetensorsFile {
        match self {
            Self::V2(layer) => layer.file(),
            Self::Kaiju1(layer) => layer.file(),
        }
    }
}

/// The manifest of a finished layer.
#[derive(Debug, Clone, PartialEq)]
pub enum FinishedManifest {
    /// Schema v2.
    V2(V2Manifest),
    /// KAIJU1.
    Kaiju1(Kaiju1Manifest),
}

impl FinishedManifest {
    /// Reads the manifest of a layer in a folder of finished layers.
    ///
    /// # Errors
    /// Names file and field of what is not as the codec's schema has it.
    pub fn read(folder: &Path, codec: CodecName, layer: usize) -> Result<Self> {
        Ok(match codec {
            CodecName::Trellis => Self::V2(V2Manifest::read(folder, layer)?),
            CodecName::Kaiju1 => Self::Kaiju1(Kaiju1Manifest::read(folder, layer)?),
        })
    }

    /// File name of the shard.
    pub fn shard(&self) -> &str {
        match self {
            Self::V2(manifest) => &manifest.shard,
            Self::Kaiju1(manifest) => &manifest.shard,
        }
    }

    /// Tensors of the shard.
    pub fn tensors(&self) -> usize {
        match self {
            Self::V2(manifest) => manifest.payload_sha256.len(),
            Self::Kaiju1(manifest) => manifest.payload_sha256.len(),
        }
    }

    /// What a complete checkpoint's manifest says of the layer.
    pub fn entry(&self) -> LayerEntry {
        match self {
            Self::V2(manifest) => LayerEntry::named(manifest.layer, None, manifest.allocation_bit_units),
            Self::Kaiju1(manifest) => LayerEntry::kaiju1(manifest.layer, manifest.layer_bits),
        }
    }
}
