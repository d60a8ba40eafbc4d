//! The manifest of an emitted KAIJU1 layer.

use std::collections::BTreeMap;

use super::emit::Emission;
use super::rungs::{RungAllocation, knobs};
use crate::checkpoint::kaiju1_manifest::{Kaiju1Manifest, Kaiju1Provenance, bits_per_weight};
use crate::checkpoint::kaiju1_shard::{SCHEMA_VERSION, shard_stem};
use crate::checkpoint::manifest_v2::RoundtripHashes;
use crate::checkpoint::names::{Projection, expert_module};
use crate::checkpoint::schema_v2::MARKER;
use crate::codec::kaiju::format::LAYOUT_VERSION;
use crate::codec::kaiju::payload_bytes;
use crate::codec::weight;
use crate::error::Result;
use crate::store::canonical_json::{canonical_hash, float17};

pub(super) fn kaiju1_manifest(emission: Emission<'_>, allocation: &RungAllocation) -> Result<Kaiju1Manifest> {
    let (of_layer, artifacts) = (emission.provenance(), emission.expert_artifacts());
    let Emission { work, allocation_sha256, records, environment, written, .. } = emission;
    let (layer, environment_sha256) = (work.layer, canonical_hash(environment)?);
    let (mut settings, mut payload_bits) = (BTreeMap::new(), BTreeMap::new());
    let (mut hashes, mut provenance) = (BTreeMap::new(), BTreeMap::new());
    for (id, record) in records.iter().enumerate() {
        for role in Projection::ALL {
            let (module, tensor) = (expert_module(layer, id, role), &record.tensors[role.as_str()]);
            let is_down = role == Projection::Down;
            let (hidden, inner) = (work.geometry.hidden_size, work.geometry.moe_intermediate_size);
            let (full_k, full_n) = if is_down { (inner, hidden) } else { (hidden, inner) };
            let setting = allocation.settings[record.bits[role as usize] as usize];
            let encoded = weight::settings(&setting, false)?;
            let bytes = payload_bytes(full_n, full_k, encoded.code, encoded.hi_frac)?;
            payload_bits.insert(module.clone(), 8 * bytes as u64);
            settings.insert(module.clone(), setting);
            let made = RoundtripHashes {
                packed_sha256: tensor.packed_sha256.clone(),
                reconstruction_sha256: tensor.reconstruction_sha256.clone(),
            };
            hashes.insert(module.clone(), made);
            let (source_name, source) = work.source_tensor(id, role)?;
            let reconstruction = |role: Projection| {
                is_down.then(|| record.tensors[role.as_str()].reconstruction_sha256.clone())
            };
            let fields = Kaiju1Provenance {
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
                allocation_sha256: allocation_sha256.clone(),
                probe_sha256: allocation.probe_sha256.clone(),
                fit_row_ids_sha256: record.inputs.fit_row_ids_sha256.clone(),
                holdout_row_ids_sha256: record.inputs.holdout_row_ids_sha256.clone(),
                covariance_sha256: tensor.covariance_sha256.clone(),
                full_k,
                full_n,
                sigma_reg: float17(work.recipe.sigma(is_down)),
                down_covariance_gate_reconstruction_sha256: reconstruction(Projection::Gate),
                down_covariance_up_reconstruction_sha256: reconstruction(Projection::Up),
                down_target_damping: record.down_damping.clone().filter(|_| is_down),
                down_target_sha256: record.down_target_sha256.clone().filter(|_| is_down),
            };
            provenance.insert(module, fields);
        }
    }
    Ok(Kaiju1Manifest {
        marker: MARKER.to_owned(),
        recipe_version: work.recipe.recipe_version.clone(),
        schema_version: SCHEMA_VERSION,
        layout_version: LAYOUT_VERSION,
        layer,
        shard: format!("{}.safetensors", shard_stem(layer)),
        shard_sha256: written.sha256,
        payload_sha256: written.payload_sha256,
        settings,
        payload_bits,
        layer_bits: allocation.bits,
        weights: allocation.weights,
        bits_per_weight: bits_per_weight(allocation.bits, allocation.weights),
        feedback: knobs(work.recipe)?.feedback,
        roundtrip_hashes: hashes,
        tensor_provenance: provenance,
        provenance: of_layer,
        final_expert_artifact_sha256: artifacts,
    })
}
