//! The manifest of a shard of KAIJU1 experts: `kaiju1-experts-layer-NNN.json`.
//!
//! Made like that of schema v2 ([`super::manifest_v2`]); in place of bits and rotation vectors it has each module's setting
//! and the exact bits of its payload.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::kaiju_tensor::kaiju_name;
use super::kaiju1_shard::{SCHEMA_VERSION, shard_stem, tensor_names};
use super::manifest_v2::{LayerProvenance, RoundtripHashes};
use super::names::{self, Projection, expert_module};
use super::schema_v2::MARKER;
use crate::codec::kaiju::format::LAYOUT_VERSION;
use crate::config::kaiju1::Kaiju1Setting;
use crate::error::{Result, refuse};
use crate::store::hash::Hash;
use crate::store::strict_json::{parse_json, read_file};

/// A manifest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kaiju1Manifest {
    /// Always [`MARKER`].
    pub marker: String,
    /// Version of the recipe's rules.
    pub recipe_version: String,
    /// Always [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Version of the payloads' layout.
    pub layout_version: u32,
    /// The layer.
    pub layer: usize,
    /// File name of the shard, beside the manifest.
    pub shard: String,
    /// SHA-256 of the shard.
    pub shard_sha256: Hash,
    /// SHA-256 of each tensor's payload.
    pub payload_sha256: BTreeMap<String, Hash>,
    /// Code width and side-band by module.
    pub settings: BTreeMap<String, Kaiju1Setting>,
    /// Bits of each module's payload.
    pub payload_bits: BTreeMap<String, u64>,
    /// Their sum.
    pub layer_bits: u64,
    /// Weights of all modules.
    pub weights: u64,
    /// `layer_bits` over `weights` as a decimal number.
    pub bits_per_weight: String,
    /// Whether errors were fed forward between blocks.
    pub feedback: bool,
    /// Hashes of each module's payload and dense f32 weight `[K, N]`.
    pub roundtrip_hashes: BTreeMap<String, RoundtripHashes>,
    /// What each module was made from.
    pub tensor_provenance: BTreeMap<String, Kaiju1Provenance>,
    /// What the layer was made by.
    pub provenance: LayerProvenance,
    /// SHA-256 of each finished expert's record, by expert id.
    pub final_expert_artifact_sha256: BTreeMap<String, Hash>,
}

/// What a module was made from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kaiju1Provenance {
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
    /// SHA-256 of the layer's allocation.
    pub allocation_sha256: Hash,
    /// SHA-256 of the probe ledger it was solved from; absent where all experts have one setting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe_sha256: Option<Hash>,
    /// SHA-256 of the ids of the rows that enter the covariances.
    pub fit_row_ids_sha256: Hash,
    /// SHA-256 of the ids of the held-out rows.
    pub holdout_row_ids_sha256: Hash,
    /// SHA-256 of the covariance, f32 little-endian.
    pub covariance_sha256: Hash,
    /// Inputs.
    pub full_k: usize,
    /// Outputs.
    pub full_n: usize,
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

impl Kaiju1Manifest {
    /// Reads the `bytes` of a layer's manifest; `path` is only named in refusals.
    ///
    /// # Errors
    /// Names file and field of what is not as the schema has it.
    pub fn parse(path: &Path, layer: usize, bytes: &[u8]) -> Result<Self> {
        let manifest: Self = parse_json(path, bytes)?;
        let fields = [
            ("marker", manifest.marker.clone(), MARKER.to_owned()),
            ("schema_version", manifest.schema_version.to_string(), SCHEMA_VERSION.to_string()),
            ("layout_version", manifest.layout_version.to_string(), LAYOUT_VERSION.to_string()),
            ("layer", manifest.layer.to_string(), layer.to_string()),
            ("shard", manifest.shard.clone(), format!("{}.safetensors", shard_stem(layer))),
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
    /// As [`Kaiju1Manifest::parse`], or when it cannot be read.
    pub fn read(folder: &Path, layer: usize) -> Result<Self> {
        let path = folder.join(format!("{}.json", shard_stem(layer)));
        Self::parse(&path, layer, &read_file(&path)?)
    }

    /// Experts that it tells of.
    pub fn experts(&self) -> usize {
        self.final_expert_artifact_sha256.len()
    }

    /// It tells of every tensor of so many experts, and of nothing else, and adds up; `path` is only named in refusals. What
    /// it says of them is held against shard and source by an audit.
    ///
    /// # Errors
    /// Names file and field of what is missing, too much, or does not add up.
    pub fn check_whole(&self, path: &Path, experts: usize) -> Result<()> {
        let wrong = |field: &str, what: String, wanted: String| {
            refuse(what).file(path).layer(self.layer).field(field).wanted(wanted).err()
        };
        let modules: BTreeSet<String> = (0..experts)
            .flat_map(|expert| Projection::ALL.map(|role| expert_module(self.layer, expert, role)))
            .collect();
        let ids: BTreeSet<String> = (0..experts).map(|expert| expert.to_string()).collect();
        let tensors = tensor_names(self.layer, experts);
        let fields: [(&str, &BTreeSet<String>, Vec<&String>); 6] = [
            ("settings", &modules, self.settings.keys().collect()),
            ("payload_bits", &modules, self.payload_bits.keys().collect()),
            ("roundtrip_hashes", &modules, self.roundtrip_hashes.keys().collect()),
            ("tensor_provenance", &modules, self.tensor_provenance.keys().collect()),
            ("payload_sha256", &tensors, self.payload_sha256.keys().collect()),
            ("final_expert_artifact_sha256", &ids, self.final_expert_artifact_sha256.keys().collect()),
        ];
        for (field, wanted, found) in fields {
            let found: BTreeSet<String> = found.into_iter().cloned().collect();
            if let Some(name) = found.symmetric_difference(wanted).next() {
                let what = if found.contains(name) { "is too much" } else { "is missing" };
                return wrong(field, format!("{name:?} {what}"), format!("the tensors of {experts} experts"));
            }
        }
        for expert in 0..experts {
            for role in Projection::ALL {
                let module = expert_module(self.layer, expert, role);
                let (found, source) =
                    (&self.tensor_provenance[&module].source_name, names::expert(self.layer, expert, role));
                if *found != source {
                    let what = format!("{module} has source_name {found:?}");
                    return wrong("tensor_provenance", what, source);
                }
            }
        }
        // The payload is the tensor, so both hash alike.
        for (module, hashes) in &self.roundtrip_hashes {
            let payload = &self.payload_sha256[&kaiju_name(module)];
            if hashes.packed_sha256 != *payload {
                let what = format!("{module} has packed_sha256 {}", hashes.packed_sha256);
                return wrong("roundtrip_hashes", what, format!("{payload}, its tensor's"));
            }
        }
        let bits = sum(self.payload_bits.values().copied());
        let weights = sum(self
            .tensor_provenance
            .values()
            .map(|made| (made.full_k as u64).saturating_mul(made.full_n as u64)));
        let mean = bits_per_weight(bits, weights);
        if (bits, weights, &mean) != (self.layer_bits, self.weights, &self.bits_per_weight) {
            return wrong(
                "layer_bits",
                format!("{} bits, {} weights, {}", self.layer_bits, self.weights, self.bits_per_weight),
                format!("{bits}, {weights} and {mean}, as the modules add up"),
            );
        }
        Ok(())
    }
}

/// A sum of numbers from a file, which may be any.
fn sum(numbers: impl Iterator<Item = u64>) -> u64 {
    numbers.fold(0, u64::saturating_add)
}

/// The mean as a decimal number, the shortest that is it.
pub fn bits_per_weight(bits: u64, weights: u64) -> String {
    format!("{}", bits as f64 / weights as f64)
}
