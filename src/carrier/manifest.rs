//! `CARRIER_MANIFEST.json`: what a carrier was made of, and what became of every tensor of the model.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::encode::ModuleRecord;
use crate::error::{Result, refuse};
use crate::store::hash::Hash;
use crate::store::strict_json::read_json;

/// File name within the carrier.
pub use crate::checkpoint::complete::CARRIER_MANIFEST_FILE as MANIFEST_FILE;
/// Value of `schema`.
pub const SCHEMA: &str = "walk-carrier-manifest-v1";

/// A packed linear.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PackedEntry {
    /// What it was made of and how.
    pub record: ModuleRecord,
    /// SHA-256 of the payload of each of its tensors, by name.
    pub payload_sha256: BTreeMap<String, Hash>,
}

/// A tensor that is as it was in the model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeptEntry {
    /// Why.
    pub reason: String,
    /// Whether it is a linear of the scope.
    pub linear_of_scope: bool,
    /// SHA-256 of its payload.
    pub payload_sha256: Hash,
}

/// The manifest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Always [`SCHEMA`].
    pub schema: String,
    /// Hashes of model, recipe, corpus and build, and the options.
    pub made_of: Value,
    /// SHA-256 of the canonical JSON of `made_of`.
    pub identity_sha256: Hash,
    /// Bits a packed weight.
    pub bits: u32,
    /// Which linears were offered.
    pub scope: String,
    /// The codebook of the packed ones.
    pub codebook: String,
    /// Packed linears by module.
    pub packed: BTreeMap<String, PackedEntry>,
    /// Kept tensors by name.
    pub kept: BTreeMap<String, KeptEntry>,
    /// Routed experts that were left out.
    pub left_out: BTreeSet<String>,
    /// SHA-256 of every other file of the carrier.
    pub files_sha256: BTreeMap<String, Hash>,
    /// Payload bytes of the model's tensors.
    pub model_bytes: u64,
    /// Payload bytes of the carrier's tensors.
    pub carrier_bytes: u64,
}

impl Manifest {
    /// Reads the manifest of a carrier.
    ///
    /// # Errors
    /// Names the file that is missing or of another form.
    pub fn read(carrier: &Path) -> Result<Self> {
        let path = carrier.join(MANIFEST_FILE);
        let manifest: Self = read_json(&path)?;
        match manifest.schema == SCHEMA {
            true => Ok(manifest),
            false => refuse(format!("schema is {:?}", manifest.schema))
                .file(path)
                .field("schema")
                .wanted(SCHEMA)
                .err(),
        }
    }

    /// Weights in the packed linears.
    pub fn packed_weights(&self) -> u64 {
        self.packed.values().map(|entry| entry.record.k as u64 * entry.record.n as u64).sum()
    }

    /// Bytes of the packed linears, vectors and markers included, times eight, over their weights.
    pub fn stored_bits_per_weight(&self) -> f64 {
        let bytes = |record: &ModuleRecord| {
            (record.k * record.n) as u64 * u64::from(record.bits) / 8 + 2 * (record.k + record.n) as u64 + 4
        };
        let bytes: u64 = self.packed.values().map(|entry| bytes(&entry.record)).sum();
        8.0 * bytes as f64 / self.packed_weights() as f64
    }
}
