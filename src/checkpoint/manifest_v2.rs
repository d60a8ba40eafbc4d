//! The manifest of a schema-v2 shard: `r7-experts-layer-NNN.json`.
//!
//! Field names are a contract with existing GLM-5.2 EXL3 tools. A module is a tensor's name without its last part, such as
//! `model.layers.3.mlp.experts.0.gate_proj`. Numbers that are hashed are 17-digit strings.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::names::{Projection, expert_module};
use super::schema_v2::{MARKER, expert_tensor_names, linear_names, shard_stem, shared_names};
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
        manifest.check_layer(path, layer)?;
        Ok(manifest)
    }

    /// It is the manifest of this layer in schema v2; `path` is only named in refusals.
    ///
    /// # Errors
    /// Names file and field of what is not so.
    pub fn check_layer(&self, path: &Path, layer: usize) -> Result<()> {
        let stem = shard_stem(layer);
        let fields = [
            ("marker", self.marker.clone(), MARKER.to_owned()),
            ("schema_version", self.schema_version.to_string(), SCHEMA_VERSION.to_string()),
            ("layer", self.layer.to_string(), layer.to_string()),
            ("shard", self.shard.clone(), format!("{stem}.safetensors")),
        ];
        match fields.into_iter().find(|(_, found, wanted)| found != wanted) {
            None => Ok(()),
            Some((field, found, wanted)) => refuse(format!("{field} is {found:?}"))
                .file(path)
                .layer(layer)
                .field(field)
                .wanted(wanted)
                .err(),
        }
    }

    /// It tells of every tensor of so many experts of `channels` intermediate channels, and of nothing else; `path` is only
    /// named in refusals. What it says of them is held against shards and source by an audit.
    ///
    /// # Errors
    /// Names file and field of what is missing, too much, no bijection, or does not add up.
    pub fn check_whole(&self, path: &Path, experts: usize, channels: usize) -> Result<()> {
        let layer = self.layer;
        let wrong = |field: &str, what: String, wanted: String| {
            refuse(what).file(path).layer(layer).field(field).wanted(wanted).err()
        };
        let modules: BTreeSet<String> = (0..experts)
            .flat_map(|expert| Projection::ALL.map(|role| expert_module(layer, expert, role)))
            .collect();
        let ids: BTreeSet<String> = (0..experts).map(|expert| expert.to_string()).collect();
        let (gate_up_suh, down_svh) = shared_names(layer);
        let mut tensors = BTreeSet::from([gate_up_suh.clone(), down_svh.clone()]);
        (0..experts).for_each(|expert| tensors.extend(expert_tensor_names(layer, expert)));
        let fields: [(&str, &BTreeSet<String>, Vec<&String>); 7] = [
            ("bit_map", &modules, self.bit_map.keys().collect()),
            ("vector_refs", &modules, self.vector_refs.keys().collect()),
            ("roundtrip_hashes", &modules, self.roundtrip_hashes.keys().collect()),
            ("tensor_provenance", &modules, self.tensor_provenance.keys().collect()),
            ("payload_sha256", &tensors, self.payload_sha256.keys().collect()),
            ("permutations", &ids, self.permutations.keys().collect()),
            ("final_expert_artifact_sha256", &ids, self.final_expert_artifact_sha256.keys().collect()),
        ];
        for (field, wanted, found) in fields {
            let found: BTreeSet<String> = found.into_iter().cloned().collect();
            if let Some(name) = found.symmetric_difference(wanted).next() {
                let what = if found.contains(name) { "is too much" } else { "is missing" };
                return wrong(field, format!("{name:?} {what}"), format!("the tensors of {experts} experts"));
            }
        }
        let shared = [&self.shared_vectors.gate_up_suh, &self.shared_vectors.down_svh];
        if shared != [&gate_up_suh, &down_svh] {
            return wrong(
                "shared_vectors",
                format!("they are {shared:?}"),
                format!("{gate_up_suh}, {down_svh}"),
            );
        }
        for (expert, role) in (0..experts).flat_map(|expert| Projection::ALL.map(|role| (expert, role))) {
            let module = expert_module(layer, expert, role);
            let (refs, names) = (&self.vector_refs[&module], linear_names(layer, expert, role));
            if refs.suh != names.suh || refs.svh != names.svh {
                return wrong(
                    "vector_refs",
                    format!("those of {module} are others"),
                    names.all().collect::<Vec<_>>().join(", "),
                );
            }
            if !(1..=8).contains(&self.bit_map[&module]) {
                return wrong(
                    "bit_map",
                    format!("{module} has {} bits", self.bit_map[&module]),
                    "1 to 8".into(),
                );
            }
        }
        for (id, order) in &self.permutations {
            let mut sorted = order.new_to_old.clone();
            sorted.sort_unstable();
            if !sorted.into_iter().eq(0..channels) {
                return wrong(
                    "permutations",
                    format!("that of expert {id} is no bijection"),
                    format!("0 to {}", channels - 1),
                );
            }
        }
        let sum: u64 = self.bit_map.values().map(|&bits| u64::from(bits)).sum();
        let mean = format!("{}", sum as f64 / modules.len().max(1) as f64);
        if sum != self.allocation_bit_units || mean != self.allocation_target_bpw {
            return wrong(
                "allocation_bit_units",
                format!("{} units, {} bits a weight", self.allocation_bit_units, self.allocation_target_bpw),
                format!("{sum} and {mean}, as the bit map adds up"),
            );
        }
        Ok(())
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
