//! The emit stage: a layer's v2 shard and manifest, audited after writing.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde_json::{Value, json};

use super::finals::{FinalExpert, FinalLayer, read_layer};
use super::layer::LayerWork;
use super::numeric::NumericEnvironment;
use super::probing::{AllocationRecord, module};
use super::progress::Observer;
use crate::checkpoint::names::Projection;
use crate::checkpoint::schema_v2::{MARKER, PackedExpert, V2Layer, shard_stem, shared_names, write_shard};
use crate::choose::expert::decode;
use crate::codec::trellis::codebook::CODEBOOK_SCALE;
use crate::codec::trellis::hadamard::BLOCK;
use crate::error::{Result, refuse};
use crate::linalg::Matrix;
use crate::store::atomic::{create_dir_durably, write_json_atomic};
use crate::store::canonical_json::{canonical_hash, float17};
use crate::store::hash::Hash;

/// The folder of finished layers, relative to the work directory.
pub const V2_FOLDER: &str = "v2";

/// `layer-NNN/oracle-report.json`, relative to the work directory.
pub fn oracle_path(layer: usize) -> PathBuf {
    super::capture::layer_folder(layer).join("oracle-report.json")
}

/// A layer's v2 shard or manifest, relative to the work directory.
pub fn v2_path(layer: usize, extension: &str) -> PathBuf {
    Path::new(V2_FOLDER).join(format!("{}.{extension}", shard_stem(layer)))
}

/// What an emitted layer consists of: paths relative to the work directory, and hashes.
pub type Emitted = Vec<(PathBuf, Hash)>;

/// Writes shard and manifest, reads them back, and runs the slice oracle.
///
/// # Errors
/// Names the file or module that is not what the final experts say.
pub fn emit_layer(
    work: &LayerWork<'_>,
    summary: &FinalLayer,
    allocation: (&AllocationRecord, &Hash),
    environment: &NumericEnvironment,
    observer: &dyn Observer,
) -> Result<Emitted> {
    let layer = work.layer;
    observer.begin("emit", Some(layer), 1);
    create_dir_durably(work.work.join(V2_FOLDER))?;
    let (records, packed): (Vec<FinalExpert>, Vec<PackedExpert>) =
        read_layer(work, summary)?.into_iter().unzip();
    let shard = work.work.join(v2_path(layer, "safetensors"));
    let numbered: Vec<(usize, PackedExpert)> = packed.into_iter().enumerate().collect();
    let written = write_shard(&shard, layer, &numbered)?;
    let oracle = audit(work, &shard, &records)?;
    let oracle_sha256 = write_json_atomic(work.work.join(oracle_path(layer)), &oracle)?;
    let written_as = (&written.payload_sha256, &written.sha256);
    let manifest = manifest(work, summary, allocation, &records, environment, written_as)?;
    let manifest_sha256 = write_json_atomic(work.work.join(v2_path(layer, "json")), &manifest)?;
    observer.advance(&shard_stem(layer));
    observer.end();
    Ok(vec![
        (v2_path(layer, "safetensors"), written.sha256),
        (v2_path(layer, "json"), manifest_sha256),
        (oracle_path(layer), oracle_sha256),
    ])
}

/// Reopens the shard: every module must decode to its record's hash, and the slices of the finest tensor-parallel split,
/// decoded one by one, must make up the whole.
fn audit(work: &LayerWork<'_>, shard: &Path, records: &[FinalExpert]) -> Result<Value> {
    let (hidden, inner) = (work.geometry.hidden_size, work.geometry.moe_intermediate_size);
    let opened = V2Layer::open(shard, work.layer, hidden, inner)?;
    records.par_iter().enumerate().try_for_each(|(id, record)| {
        for (role, linear) in Projection::ALL.iter().zip(opened.expert(id)?) {
            let wrong = |what: &str| {
                refuse(what).file(shard).layer(work.layer).expert(id).tensor(role.as_str()).check()
            };
            let (decoded, wanted) = (decode(&linear), &record.tensors[role.as_str()]);
            if decoded.packed_sha256 != wanted.packed_sha256
                || decoded.reconstruction_sha256 != wanted.reconstruction_sha256
            {
                return Err(wrong("the shard does not decode to what was encoded"));
            }
            let mut joined = Matrix::zeros(linear.k, linear.n);
            for start in (0..inner).step_by(BLOCK) {
                let slice = start..start + BLOCK;
                if *role == Projection::Down {
                    let part = linear.slice_inputs(slice.clone()).dense_f32();
                    joined.data[start * linear.n..(start + BLOCK) * linear.n].copy_from_slice(&part.data);
                } else {
                    let part = linear.slice_outputs(slice.clone()).dense_f32();
                    for row in 0..linear.k {
                        joined.data[row * linear.n + start..][..BLOCK].copy_from_slice(part.row(row));
                    }
                }
            }
            if joined != decoded.dense {
                return Err(wrong("the decoded slices of the finest split do not make up the whole"));
            }
        }
        Ok(())
    })?;
    Ok(json!({
        "layer": work.layer,
        "modules": records.len() * Projection::ALL.len(),
        "packed_and_reconstruction_hashes": "equal",
        "tp_size": inner / BLOCK,
        "sliced_decode": "equal",
        "permutations": "bijective, inverted to the byte, functionally equal in f64",
    }))
}

fn manifest(
    work: &LayerWork<'_>,
    summary: &FinalLayer,
    (allocation, allocation_sha256): (&AllocationRecord, &Hash),
    records: &[FinalExpert],
    environment: &NumericEnvironment,
    (payload_sha256, shard_sha256): (&BTreeMap<String, Hash>, &Hash),
) -> Result<Value> {
    let layer = work.layer;
    let environment_sha256 = canonical_hash(environment)?;
    let (gate_up_suh, down_svh) = shared_names(layer);
    let (mut vector_refs, mut hashes, mut provenance) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    let (mut permutations, mut artifacts) = (BTreeMap::new(), BTreeMap::new());
    for (id, record) in records.iter().enumerate() {
        for role in Projection::ALL {
            let module = module(layer, id, role);
            let tensor = &record.tensors[role.as_str()];
            let refs = match role {
                Projection::Down => json!({"suh": format!("{module}.suh"), "svh": down_svh}),
                _ => json!({"suh": gate_up_suh, "svh": format!("{module}.svh")}),
            };
            let (k, n) = match role {
                Projection::Down => (work.geometry.moe_intermediate_size, work.geometry.hidden_size),
                _ => (work.geometry.hidden_size, work.geometry.moe_intermediate_size),
            };
            let (source_name, source) = work.source_tensor(id, role)?;
            vector_refs.insert(module.clone(), refs);
            hashes.insert(
                module.clone(),
                json!({
                    "packed_sha256": tensor.packed_sha256,
                    "reconstruction_sha256": tensor.reconstruction_sha256,
                }),
            );
            let mut fields = json!({
                "bf16_sha256": source.sha256,
                "source_name": source_name,
                "source_shard": source.file,
                "source_payload_start": source.start,
                "source_payload_end": source.end,
                "source_inventory_sha256": work.inventory_sha256,
                "numeric_environment_sha256": environment_sha256,
                "runtime_inventory_sha256": environment.dependencies_sha256,
                "backend_fingerprint": environment.numeric_fingerprint,
                "search_sha256": work.search_sha256(),
                "state_sha256": work.capture.record.state_sha256,
                "capture_sha256": work.capture.sha256,
                "allocation_sha256": allocation_sha256,
                "probe_sha256": allocation.probe_sha256,
                "fit_row_ids_sha256": record.inputs.fit_row_ids_sha256,
                "down_fit_row_ids_sha256": record.inputs.fit_row_ids_sha256,
                "holdout_row_ids_sha256": record.inputs.holdout_row_ids_sha256,
                "permutation_sha256": record.inputs.permutation_sha256,
                "permutation_policy": record.inputs.permutation_policy,
                "vector_sha256": record.inputs.vector_sha256[role.as_str()],
                "covariance_sha256": tensor.covariance_sha256,
                "full_k": k,
                "full_n": n,
                "mcg": "0xCBAC1FED",
                "codebook_scale": float17(CODEBOOK_SCALE),
                "sigma_reg": float17(work.recipe.sigma(role == Projection::Down)),
            });
            if role == Projection::Down {
                // Down's covariance goes through these two reconstructions.
                fields["down_covariance_gate_reconstruction_sha256"] =
                    json!(record.tensors[Projection::Gate.as_str()].reconstruction_sha256);
                fields["down_covariance_up_reconstruction_sha256"] =
                    json!(record.tensors[Projection::Up.as_str()].reconstruction_sha256);
                // What it was encoded towards: the source weight, or its least-squares correction.
                fields["down_target_damping"] = json!(record.down_damping);
                fields["down_target_sha256"] = json!(record.down_target_sha256);
            }
            provenance.insert(module, fields);
        }
        let choice = work.choice(id);
        let order = json!({"new_to_old": choice.new_to_old, "policy": choice.policy});
        permutations.insert(id.to_string(), order);
        artifacts.insert(id.to_string(), summary.experts[id].clone());
    }
    Ok(json!({
        "marker": MARKER,
        "recipe_version": work.recipe.recipe_version,
        "schema_version": 2,
        "layer": layer,
        "shard": format!("{}.safetensors", shard_stem(layer)),
        "shard_sha256": shard_sha256,
        "payload_sha256": payload_sha256,
        "bit_map": allocation.bit_map,
        "vector_refs": vector_refs,
        "roundtrip_hashes": hashes,
        "tensor_provenance": provenance,
        "allocation_bit_units": allocation.bit_units,
        "allocation_target_bpw": bits_a_weight(allocation),
        "shared_vectors": {"gate_up_suh": gate_up_suh, "down_svh": down_svh},
        "provenance": {
            "recipe_sha256": work.recipe_sha256,
            "recipe_variant": work.recipe.variant,
            "heldout_relative_error": summary.heldout_relative,
        },
        "permutations": permutations,
        "final_expert_artifact_sha256": artifacts,
    }))
}

/// The exact mean as a decimal string ("3.5"): bit units over tensors.
fn bits_a_weight(allocation: &AllocationRecord) -> String {
    format!("{}", allocation.bit_units as f64 / allocation.tensors as f64)
}
