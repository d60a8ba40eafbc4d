//! The manifest of a schema-v2 shard: `r7-experts-layer-NNN.json`.
//!
//! Field names are a contract with existing GLM-5.2 EXL3 tools. A module is a tensor's name without its last part, such as
//! `model.layers.3.mlp.experts.0.gate_proj`. Numbers that are hashed are 17-digit strings.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::schema_v2::{MARKER, shard_stem};
use crate::config::choices::PermutationPolicy;
use crate::error::{Result, refuse};
use crate::store::hash::Hash;
use crate::store::strict_json::{parse_json, read_file};

/// Value of `schema_version`.
pub const SCHEMA_VERSION: u32 = 2;

/// A manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct V2Manifest {
    /// Always [`MARKER`].
    pub marker: String,
    /// Version of the recipe's rules.
    pub recipe_version: String,
    /// Always [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// The layer.
    pub layer: usize,
    /// File name of the shard, beside the manifest.
    pub shard: String,
    /// SHA-256 of the shard.
    pub shard_sha256: Hash,
    /// SHA-256 of each tensor's payload.
    pub payload_sha256: BTreeMap<String, Hash>,
    /// Bits by module.
    pub bit_map: BTreeMap<String, u32>,
    /// Names of the rotation vectors' tensors by module.
    pub vector_refs: BTreeMap<String, VectorRefs>,
    /// Hashes of each module's packed words and dense weight.
    pub roundtrip_hashes: BTreeMap<String, RoundtripHashes>,
    /// What each module was made from.
    pub tensor_provenance: BTreeMap<String, TensorProvenance>,
    /// Sum of all modules' bits.
    pub allocation_bit_units: u64,
    /// Their mean as a decimal number.
    pub allocation_target_bpw: String,
    /// Names of the vectors that all experts share.
    pub shared_vectors: SharedVectorNames,
    /// What the layer was made by.
    pub provenance: LayerProvenance,
    /// Order of the intermediate channels by expert id.
    pub permutations: BTreeMap<String, Permutation>,
    /// SHA-256 of each finished expert's record, by expert id.
    pub final_expert_artifact_sha256: BTreeMap<String, Hash>,
}

/// Tensor names of a module's rotation vectors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VectorRefs {
    /// Input side.
    pub suh: String,
    /// Output side.
    pub svh: String,
}

/// What a module packs and decodes to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RoundtripHashes {
    /// SHA-256 of the packed words.
    pub packed_sha256: Hash,
    /// SHA-256 of the dense f16 bytes `[K, N]`.
    pub reconstruction_sha256: Hash,
}

/// Names of the shared vectors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedVectorNames {
    /// Input side of gate and up.
    pub gate_up_suh: String,
    /// Output side of down.
    pub down_svh: String,
}

/// What a layer was made by.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerProvenance {
    /// SHA-256 of the recipe.
    pub recipe_sha256: Hash,
    /// Its variant.
    pub recipe_variant: String,
    /// Mass-weighted held-out output error over the mass-weighted squared output.
    pub heldout_relative_error: String,
}

/// Order of an expert's intermediate channels.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Permutation {
    /// The source channel at each stored place.
    pub new_to_old: Vec<usize>,
    /// Where the order comes from.
    pub policy: PermutationPolicy,
}

/// What a module was made from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorProvenance {
    /// SHA-256 of the source tensor's payload.
    pub bf16_sha256: Hash,
    /// Name of the source tensor.
    pub source_name: String,
    /// Its shard.
    pub source_shard: String,
    /// First payload byte in it.
    pub source_payload_start: u64,
    /// One past the last.
    pub source_payload_end: u64,
    /// SHA-256 of the source's inventory.
    pub source_inventory_sha256: Hash,
    /// SHA-256 of the numeric environment.
    pub numeric_environment_sha256: Hash,
    /// SHA-256 of the libraries' versions.
    pub runtime_inventory_sha256: Hash,
    /// SHA-256 of a fixed small forward and encode.
    pub backend_fingerprint: Hash,
    /// SHA-256 of the manifest of the state before the layer.
    pub state_sha256: Hash,
    /// SHA-256 of the layer's capture.
    pub capture_sha256: Hash,
    /// SHA-256 of the layer's search; absent where the recipe does not search.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub search_sha256: Option<Hash>,
    /// SHA-256 of the layer's last allocation.
    pub allocation_sha256: Hash,
    /// SHA-256 of the probe ledger it was solved from; absent where the recipe fixes the bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe_sha256: Option<Hash>,
    /// SHA-256 of the ids of the rows that enter the input covariance.
    pub fit_row_ids_sha256: Hash,
    /// SHA-256 of the ids of the rows that enter down's covariance.
    pub down_fit_row_ids_sha256: Hash,
    /// SHA-256 of the ids of the held-out rows.
    pub holdout_row_ids_sha256: Hash,
    /// SHA-256 of the canonical array `new_to_old`.
    pub permutation_sha256: Hash,
    /// Where the order of the intermediate channels comes from.
    pub permutation_policy: PermutationPolicy,
    /// SHA-256 of the rotation vectors before the global scale.
    pub vector_sha256: Hash,
    /// SHA-256 of the covariance, f32 little-endian.
    pub covariance_sha256: Hash,
    /// Inputs.
    pub full_k: usize,
    /// Outputs.
    pub full_n: usize,
    /// The codebook's marker.
    pub mcg: String,
    /// The codebook's scale.
    pub codebook_scale: String,
    /// Regularisation of the covariance.
    pub sigma_reg: String,
    /// Of down: SHA-256 of the dense gate its covariance goes through.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub down_covariance_gate_reconstruction_sha256: Option<Hash>,
    /// Of down: SHA-256 of the dense up its covariance goes through.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub down_covariance_up_reconstruction_sha256: Option<Hash>,
    /// Of down: damping of its target's correction; absent where the source weight is the target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub down_target_damping: Option<String>,
    /// Of down: SHA-256 of its corrected target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub down_target_sha256: Option<Hash>,
}

impl V2Manifest {
    /// Reads the `bytes` of a layer's manifest; `path` is only named in refusals.
    ///
    /// # Errors
    /// Names file and field of what is not as schema v2 has it.
    pub fn parse(path: &Path, layer: usize, bytes: &[u8]) -> Result<Self> {
        let manifest: Self = parse_json(path, bytes)?;
        let stem = shard_stem(layer);
        let fields = [
            ("marker", manifest.marker.clone(), MARKER.to_owned()),
            ("schema_version", manifest.schema_version.to_string(), SCHEMA_VERSION.to_string()),
            ("layer", manifest.layer.to_string(), layer.to_string()),
            ("shard", manifest.shard.clone(), format!("{stem}.safetensors")),
        ];
        match fields.into_iter().find(|(_, found, wanted)| found != wanted) {
            None => Ok(manifest),
            Some((field, found, wanted)) => refuse(format!("{field} is {found:?}"))
                .file(path)
                .layer(layer)
                .field(field)
                .wanted(wanted)
                .err(),
        }
    }

    /// Reads the manifest of a layer in a folder of finished layers.
    ///
    /// # Errors
    /// As [`V2Manifest::parse`], or when it cannot be read.
    pub fn read(folder: &Path, layer: usize) -> Result<Self> {
        let path = folder.join(format!("{}.json", shard_stem(layer)));
        Self::parse(&path, layer, &read_file(&path)?)
    }
}
