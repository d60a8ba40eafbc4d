//! The emit stage: a layer's shard and manifest, audited after writing.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde_json::{Value, json};

use super::emit_kaiju1::kaiju1_manifest;
use super::finals::{FinalExpert, FinalLayer, read_layer};
use super::layer::LayerWork;
use super::numeric::NumericEnvironment;
use super::probing::AllocationRecord;
use super::progress::Observer;
use super::rates::Allocation;
use crate::checkpoint::finished::{
    FinishedExpert, FinishedLayer, finished_folder, finished_path, finished_stem, write_finished,
};
use crate::checkpoint::manifest_v2::{
    LayerProvenance, Permutation, RoundtripHashes, SCHEMA_VERSION, SharedVectorNames, TensorProvenance,
    V2Manifest, VectorRefs,
};
use crate::checkpoint::names::{Projection, expert_module};
use crate::checkpoint::schema_v2::{MARKER, shard_stem, shared_names};
use crate::checkpoint::slices::sliced_dense;
use crate::choose::expert::decode;
use crate::codec::trellis::codebook::CODEBOOK_SCALE;
use crate::codec::trellis::hadamard::BLOCK;
use crate::codec::trellis::linear::TrellisLinear;
use crate::codec::weight::PackedWeight;
use crate::config::choices::CodecName;
use crate::error::{Result, refuse};
use crate::linalg::Matrix;
use crate::store::atomic::{create_dir_durably, write_json_atomic};
use crate::store::canonical_json::{canonical_hash, float17};
use crate::store::hash::Hash;
use crate::store::safetensors_write::WrittenShard;

/// `layer-NNN/oracle-report.json`, relative to the work directory.
pub fn oracle_path(layer: usize) -> PathBuf {
    super::capture::layer_folder(layer).join("oracle-report.json")
}

/// What an emitted layer consists of: paths relative to the work directory, and hashes.
pub type Emitted = Vec<(PathBuf, Hash)>;

/// Writes shard and manifest, reads them back, and runs the slice oracle of the trellis codec.
///
/// # Errors
/// Names the file or module that is not what the final experts say.
pub fn emit_layer(
    work: &LayerWork<'_>,
    summary: &FinalLayer,
    (allocation, allocation_sha256): (&Allocation, &Hash),
    environment: &NumericEnvironment,
    observer: &dyn Observer,
) -> Result<Emitted> {
    let (layer, codec) = (work.layer, work.recipe.codec);
    observer.begin("emit", Some(layer), 1);
    create_dir_durably(work.work.join(finished_folder(codec)))?;
    let (records, packed): (Vec<FinalExpert>, Vec<FinishedExpert>) =
        read_layer(work, summary)?.into_iter().unzip();
    let [shard, manifest] = ["safetensors", "json"].map(|extension| finished_path(codec, layer, extension));
    let shard_path = work.work.join(&shard);
    let written = write_finished(&shard_path, codec, layer, packed.into_iter().enumerate().collect())?;
    let oracle = audit(work, &shard_path, &records)?;
    let oracle_sha256 = write_json_atomic(work.work.join(oracle_path(layer)), &oracle)?;
    let shard_sha256 = written.sha256.clone();
    let made = Emission { work, summary, allocation_sha256, records: &records, environment, written };
    let path = work.work.join(&manifest);
    let manifest_sha256 = match allocation {
        Allocation::Bits(allocation) => write_json_atomic(path, &v2_manifest(made, allocation)?)?,
        Allocation::Rungs(allocation) => write_json_atomic(path, &kaiju1_manifest(made, allocation)?)?,
    };
    observer.advance(&finished_stem(codec, layer));
    observer.end();
    Ok(vec![(shard, shard_sha256), (manifest, manifest_sha256), (oracle_path(layer), oracle_sha256)])
}

/// What a manifest is made from.
pub(super) struct Emission<'a> {
    /// The layer.
    pub(super) work: &'a LayerWork<'a>,
    /// Its finished experts together.
    pub(super) summary: &'a FinalLayer,
    /// SHA-256 of its allocation.
    pub(super) allocation_sha256: &'a Hash,
    /// Its finished experts.
    pub(super) records: &'a [FinalExpert],
    /// What computed them.
    pub(super) environment: &'a NumericEnvironment,
    /// Its shard.
    pub(super) written: WrittenShard,
}

impl Emission<'_> {
    /// What the layer was made by.
    pub(super) fn provenance(&self) -> LayerProvenance {
        LayerProvenance {
            recipe_sha256: self.work.recipe_sha256.clone(),
            recipe_variant: self.work.recipe.variant.clone(),
            heldout_relative_error: self.summary.heldout_relative.clone(),
        }
    }

    /// SHA-256 of each finished expert's record, by id.
    pub(super) fn expert_artifacts(&self) -> BTreeMap<String, Hash> {
        let experts = self.summary.experts.iter().enumerate();
        experts.map(|(id, sha256)| (id.to_string(), sha256.clone())).collect()
    }
}

/// Reopens the shard: every module must decode to its record's hash; and of a trellis the slices of the finest
/// tensor-parallel split, decoded one by one, must make up the whole.
fn audit(work: &LayerWork<'_>, shard: &Path, records: &[FinalExpert]) -> Result<Value> {
    let (hidden, inner) = (work.geometry.hidden_size, work.geometry.moe_intermediate_size);
    let opened = FinishedLayer::open(shard, work.recipe.codec, work.layer, (hidden, inner))?;
    records.par_iter().enumerate().try_for_each(|(id, record)| {
        for (role, weight) in Projection::ALL.iter().zip(opened.expert(id)?) {
            let wrong = |what: &str| {
                refuse(what).file(shard).layer(work.layer).expert(id).tensor(role.as_str()).check()
            };
            let (decoded, wanted) = (decode(&weight), &record.tensors[role.as_str()]);
            if decoded.packed_sha256 != wanted.packed_sha256
                || decoded.reconstruction_sha256 != wanted.reconstruction_sha256
            {
                return Err(wrong("the shard does not decode to what was encoded"));
            }
            if let PackedWeight::Trellis(linear) = &weight
                && sliced_decode(linear, *role) != decoded.dense
            {
                return Err(wrong(SLICES_DIFFER));
            }
        }
        Ok(())
    })?;
    let mut report = json!({
        "layer": work.layer,
        "modules": records.len() * Projection::ALL.len(),
        "packed_and_reconstruction_hashes": "equal",
    });
    if work.recipe.codec == CodecName::Trellis {
        report["tp_size"] = json!(inner / BLOCK);
        report["sliced_decode"] = json!("equal");
        report["permutations"] = json!("bijective, inverted to the byte, functionally equal in f64");
    }
    Ok(report)
}

/// What is wrong where a tensor-parallel loader would decode something else.
pub const SLICES_DIFFER: &str = "the decoded slices of the finest split do not make up the whole";

/// The dense weight put together from the slices of the finest tensor-parallel split, each decoded by itself.
pub fn sliced_decode(linear: &TrellisLinear, role: Projection) -> Matrix<f32> {
    let inner = if role == Projection::Down { linear.k } else { linear.n };
    let joined = sliced_dense(linear, role, inner / BLOCK);
    Matrix::new(joined.rows, joined.cols, joined.data.iter().map(|x| x.to_f32()).collect())
}

fn v2_manifest(emission: Emission<'_>, allocation: &AllocationRecord) -> Result<V2Manifest> {
    let (of_layer, artifacts) = (emission.provenance(), emission.expert_artifacts());
    let Emission { work, allocation_sha256, records, environment, written, .. } = emission;
    let layer = work.layer;
    let environment_sha256 = canonical_hash(environment)?;
    let (gate_up_suh, down_svh) = shared_names(layer);
    let (mut vector_refs, mut hashes, mut provenance) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    for (id, record) in records.iter().enumerate() {
        for role in Projection::ALL {
            let module = expert_module(layer, id, role);
            let tensor = &record.tensors[role.as_str()];
            let is_down = role == Projection::Down;
            let refs = match role {
                Projection::Down => VectorRefs { suh: format!("{module}.suh"), svh: down_svh.clone() },
                _ => VectorRefs { suh: gate_up_suh.clone(), svh: format!("{module}.svh") },
            };
            let (hidden, inner) = (work.geometry.hidden_size, work.geometry.moe_intermediate_size);
            let (full_k, full_n) = if is_down { (inner, hidden) } else { (hidden, inner) };
            let (source_name, source) = work.source_tensor(id, role)?;
            let reconstruction = |role: Projection| {
                is_down.then(|| record.tensors[role.as_str()].reconstruction_sha256.clone())
            };
            vector_refs.insert(module.clone(), refs);
            hashes.insert(
                module.clone(),
                RoundtripHashes {
                    packed_sha256: tensor.packed_sha256.clone(),
                    reconstruction_sha256: tensor.reconstruction_sha256.clone(),
                },
            );
            let fields = TensorProvenance {
                bf16_sha256: source.sha256.clone(),
                source_name,
                source_shard: source.file.clone(),
                source_payload_start: source.start,
                source_payload_end: source.end,
                source_inventory_sha256: work.inventory_sha256.clone(),
                numeric_environment_sha256: environment_sha256.clone(),
                runtime_inventory_sha256: environment.dependencies_sha256.clone(),
                backend_fingerprint: environment.numeric_fingerprint.clone(),
                state_sha256: work.capture.record.state_sha256.clone(),
                capture_sha256: work.capture.sha256.clone(),
                search_sha256: work.search_sha256().cloned(),
                allocation_sha256: allocation_sha256.clone(),
                probe_sha256: allocation.probe_sha256.clone(),
                fit_row_ids_sha256: record.inputs.fit_row_ids_sha256.clone(),
                down_fit_row_ids_sha256: record.inputs.fit_row_ids_sha256.clone(),
                holdout_row_ids_sha256: record.inputs.holdout_row_ids_sha256.clone(),
                permutation_sha256: record.inputs.permutation_sha256.clone(),
                permutation_policy: record.inputs.permutation_policy,
                vector_sha256: record.inputs.vector_sha256[role.as_str()].clone(),
                covariance_sha256: tensor.covariance_sha256.clone(),
                full_k,
                full_n,
                mcg: "0xCBAC1FED".to_owned(),
                codebook_scale: float17(CODEBOOK_SCALE),
                sigma_reg: float17(work.recipe.sigma(is_down)),
                // Down's covariance goes through these two reconstructions.
                down_covariance_gate_reconstruction_sha256: reconstruction(Projection::Gate),
                down_covariance_up_reconstruction_sha256: reconstruction(Projection::Up),
                // What it was encoded towards: the source weight, or its least-squares correction.
                down_target_damping: record.down_damping.clone().filter(|_| is_down),
                down_target_sha256: record.down_target_sha256.clone().filter(|_| is_down),
            };
            provenance.insert(module, fields);
        }
    }
    let order = |id: usize| {
        let choice = work.choice(id);
        Permutation { new_to_old: choice.new_to_old.clone(), policy: choice.policy }
    };
    Ok(V2Manifest {
        marker: MARKER.to_owned(),
        recipe_version: work.recipe.recipe_version.clone(),
        schema_version: SCHEMA_VERSION,
        layer,
        shard: format!("{}.safetensors", shard_stem(layer)),
        shard_sha256: written.sha256,
        payload_sha256: written.payload_sha256,
        bit_map: allocation.bit_map.clone(),
        vector_refs,
        roundtrip_hashes: hashes,
        tensor_provenance: provenance,
        allocation_bit_units: allocation.bit_units,
        allocation_target_bpw: bits_a_weight(allocation),
        shared_vectors: SharedVectorNames { gate_up_suh, down_svh },
        provenance: of_layer,
        permutations: (0..records.len()).map(|id| (id.to_string(), order(id))).collect(),
        final_expert_artifact_sha256: artifacts,
    })
}

/// The exact mean as a decimal string ("3.5"): bit units over tensors.
fn bits_a_weight(allocation: &AllocationRecord) -> String {
    format!("{}", allocation.bit_units as f64 / allocation.tensors as f64)
}
