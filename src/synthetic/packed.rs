//! A finished v2 layer of seeded words: shard and manifest as a walk would leave them.
//!
//! Any 16-bit words are valid tiles, so nothing is encoded. The hashes of packed and dense weights are real; what a
//! manifest says of a source, a state or a search are hashes of texts that name the seed, for there are none.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use rayon::prelude::*;

use super::noise::{all_words, vector, write_words};
use super::specs::{bits_of, sizes, v2_tensors};
use crate::checkpoint::manifest_v2::{
    LayerProvenance, Permutation, RoundtripHashes, SCHEMA_VERSION, SharedVectorNames, TensorProvenance,
    V2Manifest, VectorRefs,
};
use crate::checkpoint::names::{self, Projection, expert_module};
use crate::checkpoint::schema_v2::{MARKER, linear_names, shard_metadata, shard_stem, shared_names};
use crate::codec::trellis::codebook::{CODEBOOK_SCALE, Codebook};
use crate::codec::trellis::encode::INPUT_NORMALISATION;
use crate::codec::trellis::linear::{TrellisLinear, reconstruction_sha256};
use crate::codec::trellis::pack;
use crate::codec::trellis::tile::TILE_DIM;
use crate::config::Geometry;
use crate::config::choices::PermutationPolicy;
use crate::error::{IoContext, Result, refuse};
use crate::store::atomic::{create_dir_durably, write_json_atomic};
use crate::store::canonical_json::{canonical_hash, float17};
use crate::store::hash::{Hash, sha256_hex};
use crate::store::safetensors_stream::stream_safetensors;

/// Which tensor's payload is to be made.
enum Part {
    Words { name: String, count: usize },
    Vector { name: String, length: usize, magnitude: f32 },
    Marker,
}

/// Makes the v2 shard and manifest of `layer` in `dir`, which need not exist, with widths of `geometry` and so many
/// experts. `cycle` deals out bits to gate, up and down of expert 0, of expert 1, and so on (`[3, 4]`: a mean of 3.5).
///
/// Returns the manifest. The same arguments give the same bytes.
///
/// # Errors
/// No experts or bits, bits outside 1..=8, widths that are no multiples of 128; what cannot be written.
pub fn packed_layer(
    dir: &Path,
    geometry: &Geometry,
    layer: usize,
    experts: usize,
    cycle: &[u32],
    seed: u64,
) -> Result<V2Manifest> {
    if experts == 0 || cycle.is_empty() {
        return refuse(format!("{experts} experts at bits {cycle:?}"))
            .wanted("one expert and one bit width at least")
            .err();
    }
    create_dir_durably(dir)?;
    let modules: Vec<(usize, Projection)> =
        (0..experts).flat_map(|expert| Projection::ALL.map(|projection| (expert, projection))).collect();
    // Decoded before anything is written: what cannot be decoded is refused.
    let dense: Vec<Hash> = modules
        .par_iter()
        .map(|&(expert, projection)| {
            let linear = linear(geometry, layer, expert, projection, cycle, seed)?;
            Ok(reconstruction_sha256(&linear.dense()))
        })
        .collect::<Result<_>>()?;
    let dense: BTreeMap<String, Hash> = modules
        .iter()
        .zip(dense)
        .map(|(&(expert, projection), hash)| (expert_module(layer, expert, projection), hash))
        .collect();

    let parts = parts(geometry, layer, &modules, cycle);
    let specs = v2_tensors(geometry, layer, experts, cycle);
    let shard = dir.join(format!("{}.safetensors", shard_stem(layer)));
    let written = stream_safetensors(&shard, &shard_metadata(layer), &specs, |spec, sink| {
        write_part(&parts[&spec.name], seed, sink).at(&shard)
    })?;

    let text = |what: &str| sha256_hex(format!("synthetic {seed}: {what}").as_bytes());
    let (gate_up_suh, down_svh) = shared_names(layer);
    let order: Vec<usize> = (0..geometry.moe_intermediate_size).collect();
    let permutation_sha256 = canonical_hash(&order)?;
    let packed = |module: &str| written.payload_sha256[&format!("{module}.trellis")].clone();
    let provenance = |expert: usize, projection: Projection| {
        let (full_k, full_n) = sizes(geometry, projection);
        let through = |projection: Projection| dense[&expert_module(layer, expert, projection)].clone();
        let is_down = projection == Projection::Down;
        let source_name = names::expert(layer, expert, projection);
        TensorProvenance {
            bf16_sha256: text(&source_name),
            source_name,
            source_shard: "model.safetensors".to_owned(),
            source_payload_start: 0,
            source_payload_end: 2 * (full_k * full_n) as u64,
            source_inventory_sha256: text("source inventory"),
            numeric_environment_sha256: text("numeric environment"),
            runtime_inventory_sha256: text("runtime inventory"),
            backend_fingerprint: text("backend"),
            state_sha256: text("state"),
            capture_sha256: text("capture"),
            search_sha256: None,
            allocation_sha256: text("allocation"),
            probe_sha256: None,
            fit_row_ids_sha256: text("fit rows"),
            down_fit_row_ids_sha256: text("fit rows"),
            holdout_row_ids_sha256: text("held-out rows"),
            permutation_sha256: permutation_sha256.clone(),
            permutation_policy: PermutationPolicy::Identity,
            vector_sha256: text("vectors"),
            covariance_sha256: text("covariance"),
            full_k,
            full_n,
            mcg: "0xCBAC1FED".to_owned(),
            codebook_scale: float17(CODEBOOK_SCALE),
            sigma_reg: float17(0.025),
            down_covariance_gate_reconstruction_sha256: is_down.then(|| through(Projection::Gate)),
            down_covariance_up_reconstruction_sha256: is_down.then(|| through(Projection::Up)),
            down_target_damping: None,
            down_target_sha256: None,
        }
    };
    let bit_map: BTreeMap<String, u32> = modules
        .iter()
        .map(|&(expert, projection)| {
            (expert_module(layer, expert, projection), bits_of(cycle, expert, projection))
        })
        .collect();
    let units: u64 = bit_map.values().map(|&bits| u64::from(bits)).sum();
    let manifest = V2Manifest {
        marker: MARKER.to_owned(),
        recipe_version: "synthetic".to_owned(),
        schema_version: SCHEMA_VERSION,
        layer,
        shard: format!("{}.safetensors", shard_stem(layer)),
        shard_sha256: written.sha256.clone(),
        payload_sha256: written.payload_sha256.clone(),
        vector_refs: modules
            .iter()
            .map(|&(expert, projection)| {
                let names = linear_names(layer, expert, projection);
                let refs = VectorRefs { suh: names.suh, svh: names.svh };
                (expert_module(layer, expert, projection), refs)
            })
            .collect(),
        roundtrip_hashes: dense
            .iter()
            .map(|(module, dense)| {
                let packed_sha256 = packed(module);
                (module.clone(), RoundtripHashes { packed_sha256, reconstruction_sha256: dense.clone() })
            })
            .collect(),
        tensor_provenance: modules
            .iter()
            .map(|&(expert, projection)| {
                (expert_module(layer, expert, projection), provenance(expert, projection))
            })
            .collect(),
        allocation_bit_units: units,
        allocation_target_bpw: format!("{}", units as f64 / modules.len() as f64),
        bit_map,
        shared_vectors: SharedVectorNames { gate_up_suh, down_svh },
        provenance: LayerProvenance {
            recipe_sha256: text("recipe"),
            recipe_variant: "synthetic".to_owned(),
            heldout_relative_error: float17(0.0),
        },
        permutations: (0..experts)
            .map(|expert| {
                let policy = PermutationPolicy::Identity;
                (expert.to_string(), Permutation { new_to_old: order.clone(), policy })
            })
            .collect(),
        final_expert_artifact_sha256: (0..experts)
            .map(|expert| (expert.to_string(), text(&format!("expert {expert}"))))
            .collect(),
    };
    write_json_atomic(dir.join(format!("{}.json", shard_stem(layer))), &manifest)?;
    Ok(manifest)
}

/// Magnitudes of `suh` and `svh`. The input normalisation is in every `suh`; the private vector brings the decoded weight to
/// `1 / sqrt(inputs)`.
fn magnitudes(geometry: &Geometry, projection: Projection) -> (f32, f32) {
    let normalisation = INPUT_NORMALISATION.abs() as f32;
    let deviation = 1.0 / (sizes(geometry, projection).0 as f32).sqrt();
    if projection == Projection::Down { (normalisation * deviation, 1.0) } else { (normalisation, deviation) }
}

/// Words of a module's trellis.
fn word_count(geometry: &Geometry, projection: Projection, bits: u32) -> usize {
    let (k, n) = sizes(geometry, projection);
    k / TILE_DIM * (n / TILE_DIM) * pack::words(bits)
}

/// The module as a reader will find it.
fn linear(
    geometry: &Geometry,
    layer: usize,
    expert: usize,
    projection: Projection,
    cycle: &[u32],
    seed: u64,
) -> Result<TrellisLinear> {
    let bits = bits_of(cycle, expert, projection);
    if !(1..=8).contains(&bits) {
        return refuse(format!("{bits} bits a weight")).wanted("1 to 8").err();
    }
    let names = linear_names(layer, expert, projection);
    let (k, n) = sizes(geometry, projection);
    let (suh, svh) = magnitudes(geometry, projection);
    let words = all_words((seed, &names.trellis), word_count(geometry, projection, bits));
    TrellisLinear::new(
        (k, n),
        bits,
        Codebook::Mcg,
        words,
        vector((seed, &names.suh), k, suh),
        vector((seed, &names.svh), n, svh),
    )
}

/// What every tensor of the shard is made of, by name.
fn parts(
    geometry: &Geometry,
    layer: usize,
    modules: &[(usize, Projection)],
    cycle: &[u32],
) -> BTreeMap<String, Part> {
    let mut parts = BTreeMap::new();
    for &(expert, projection) in modules {
        let names = linear_names(layer, expert, projection);
        let (k, n) = sizes(geometry, projection);
        let (suh, svh) = magnitudes(geometry, projection);
        for (name, length, magnitude) in [(names.suh, k, suh), (names.svh, n, svh)] {
            parts.insert(name.clone(), Part::Vector { name, length, magnitude });
        }
        let count = word_count(geometry, projection, bits_of(cycle, expert, projection));
        parts.insert(names.trellis.clone(), Part::Words { name: names.trellis, count });
        parts.extend(names.marker.map(|name| (name, Part::Marker)));
    }
    parts
}

fn write_part(part: &Part, seed: u64, sink: &mut dyn Write) -> std::io::Result<()> {
    match part {
        Part::Words { name, count } => write_words((seed, name), *count, sink),
        Part::Vector { name, length, magnitude } => {
            let vector = vector((seed, name), *length, *magnitude);
            sink.write_all(&vector.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())
        }
        Part::Marker => sink.write_all(&Codebook::Mcg.marker().unwrap_or_default().to_le_bytes()),
    }
}
