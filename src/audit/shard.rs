//! Gates 3, 4 and 6 of finished layers, from shard and manifest alone: every module decoded again.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use rayon::prelude::*;

use super::findings::Findings;
use crate::checkpoint::manifest_v2::V2Manifest;
use crate::checkpoint::names::{Projection, expert_module};
use crate::checkpoint::schema_v2::{V2Layer, expert_tensor_names, shared_names};
use crate::choose::expert::decode;
use crate::config::choices::CodecName;
use crate::error::{IoContext, Refusal, Result, refuse};
use crate::store::canonical_json::canonical_hash;
use crate::store::hash::{Hash, sha256_file};
use crate::store::safetensors_read::SafetensorsFile;
use crate::walk::emit::{SLICES_DIFFER, sliced_decode};
use crate::walk::progress::{Observer, proceed};

/// The layers whose manifests or shards lie in a folder, ascending, and their codecs: what lacks the other is found by the
/// audit.
///
/// # Errors
/// Names the folder that cannot be read.
pub fn finished_layers(folder: &Path) -> Result<Vec<(usize, CodecName)>> {
    let mut layers = BTreeSet::new();
    for entry in std::fs::read_dir(folder).at(folder)? {
        let name = entry.at(folder)?.file_name();
        let name = name.to_string_lossy();
        for (prefix, kaiju1) in [("r7-experts-layer-", false), ("kaiju1-experts-layer-", true)] {
            let stem = name.strip_suffix(".json").or_else(|| name.strip_suffix(".safetensors"));
            let number = stem.and_then(|stem| stem.strip_prefix(prefix));
            layers.extend(number.and_then(|number| Some((number.parse::<usize>().ok()?, kaiju1))));
        }
    }
    let codec = |kaiju1| if kaiju1 { CodecName::Kaiju1 } else { CodecName::Trellis };
    Ok(layers.into_iter().map(|(layer, kaiju1)| (layer, codec(kaiju1))).collect())
}

/// Audits a folder of finished layers by itself.
///
/// # Errors
/// Interrupted by the user.
pub fn audit_folder(
    folder: &Path,
    layers: &[(usize, CodecName)],
    findings: &mut Findings,
    observer: &dyn Observer,
) -> Result<()> {
    for gate in [0, 1, 2, 5, 7, 8, 9] {
        findings.skip(gate, "this is in the work directory of a walk, not in its finished layers");
    }
    let numbers: Vec<String> = layers.iter().map(|(layer, _)| layer.to_string()).collect();
    observer.note(&format!("layers {}: whether others are wanted is not known here", numbers.join(", ")));
    for &(layer, codec) in layers {
        audit_layer(folder, (layer, codec), None, findings, observer)?;
    }
    Ok(())
}

/// Audits one finished layer; `wanted` is the number of experts, hidden size and expert width, where they are known.
///
/// # Errors
/// Interrupted by the user.
pub fn audit_layer(
    folder: &Path,
    (layer, codec): (usize, CodecName),
    wanted: Option<(usize, (usize, usize))>,
    findings: &mut Findings,
    observer: &dyn Observer,
) -> Result<()> {
    if codec == CodecName::Kaiju1 {
        return super::kaiju1::audit_shard(folder, layer, wanted, findings, observer);
    }
    proceed(observer)?;
    let Some(manifest) = findings.hold(6, V2Manifest::read(folder, layer)) else { return Ok(()) };
    let path = folder.join(&manifest.shard);
    let wrong = |what: String| refuse(what).file(&path).layer(layer);
    let found = findings.hold(6, sha256_file(&path));
    let Some(found) = found else { return Ok(()) };
    findings.same(6, &found, &manifest.shard_sha256, || wrong(format!("its hash is {found}")));
    let Some(file) = findings.hold(6, SafetensorsFile::open(&path)) else { return Ok(()) };
    let experts = manifest.permutations.len();
    let sizes = match wanted {
        Some((number, sizes)) => {
            findings.same(6, &experts.to_string(), &number.to_string(), || {
                wrong(format!("it has {experts} experts"))
            });
            sizes
        }
        None => {
            let (gate_up_suh, _) = shared_names(layer);
            let gate = format!("{}.svh", expert_module(layer, 0, Projection::Gate));
            let length = |name: &str| file.info(name).map(|info| info.shape.iter().product::<usize>());
            let read = || Ok((length(&gate_up_suh)?, length(&gate)?));
            let Some(sizes) = findings.hold(6, read()) else { return Ok(()) };
            sizes
        }
    };
    findings.hold(6, names(&file, &manifest, experts, &wrong));
    findings.hold(3, bits(&manifest, experts, &wrong));
    let Some(opened) = findings.hold(6, V2Layer::open(&path, layer, sizes.0, sizes.1)) else { return Ok(()) };
    observer.begin("decode", Some(layer), experts as u64);
    let checks: Vec<(usize, Result<()>)> = (0..experts)
        .into_par_iter()
        .flat_map_iter(|expert| {
            let found = audit_expert(&opened, &file, &manifest, (layer, expert), &wrong);
            observer.advance(&format!("expert {expert}"));
            found
        })
        .collect();
    observer.end();
    for (gate, check) in checks {
        findings.hold(gate, check);
    }
    Ok(())
}

/// The shard holds the tensors of all experts and the shared vectors, and nothing else.
fn names(
    file: &SafetensorsFile,
    manifest: &V2Manifest,
    experts: usize,
    wrong: &(dyn Fn(String) -> Refusal + Sync),
) -> Result<()> {
    let (gate_up_suh, down_svh) = shared_names(manifest.layer);
    let mut expected = BTreeSet::from([gate_up_suh, down_svh]);
    (0..experts).for_each(|expert| expected.extend(expert_tensor_names(manifest.layer, expert)));
    holds_payloads(file, &expected, &manifest.payload_sha256, wrong)
}

/// A shard holds the expected tensors and nothing else; their payloads are those its manifest lists.
pub(super) fn holds_payloads(
    file: &SafetensorsFile,
    expected: &BTreeSet<String>,
    listed: &BTreeMap<String, Hash>,
    wrong: &(dyn Fn(String) -> Refusal + Sync),
) -> Result<()> {
    let found: BTreeSet<String> = file.names().map(str::to_owned).collect();
    if let Some(name) = found.symmetric_difference(expected).next() {
        let what = if found.contains(name) { "a tensor that no expert has" } else { "a tensor is missing" };
        return Err(wrong(what.to_owned()).tensor(name).check());
    }
    for name in &found {
        let payload = file.payload_sha256(name)?;
        if listed.get(name) != Some(&payload) {
            return Err(wrong(format!("its payload's hash is {payload}"))
                .tensor(name)
                .wanted("that of the manifest")
                .check());
        }
    }
    if listed.len() != found.len() {
        return Err(wrong("the manifest lists payloads that the shard lacks".to_owned()).check());
    }
    Ok(())
}

/// The map of bits is complete and adds up.
///
/// # Errors
/// Names the layer, and what the map should be.
pub fn bits(manifest: &V2Manifest, experts: usize, wrong: &(dyn Fn(String) -> Refusal + Sync)) -> Result<()> {
    let sum: u64 = manifest.bit_map.values().map(|&bits| u64::from(bits)).sum();
    let tensors = experts * Projection::ALL.len();
    let mean = format!("{}", sum as f64 / tensors as f64);
    let whole = manifest.bit_map.len() == tensors && sum == manifest.allocation_bit_units;
    match whole && mean == manifest.allocation_target_bpw {
        true => Ok(()),
        false => Err(wrong(format!("the manifest's {} modules have {sum} bits", manifest.bit_map.len()))
            .wanted(format!(
                "{tensors} modules, {} bits, {} a weight",
                manifest.allocation_bit_units, manifest.allocation_target_bpw
            ))
            .check()),
    }
}

/// Gates 3, 4 and 6 of an expert.
fn audit_expert(
    opened: &V2Layer,
    file: &SafetensorsFile,
    manifest: &V2Manifest,
    (layer, expert): (usize, usize),
    wrong: &(dyn Fn(String) -> Refusal + Sync),
) -> Vec<(usize, Result<()>)> {
    let mut checks = Vec::new();
    let packed = match opened.expert(expert) {
        Ok(packed) => packed,
        Err(error) => return vec![(6, Err(error))],
    };
    let fail = |what: String, module: &str| Err(wrong(what).expert(expert).tensor(module).check());
    let (gate_up_suh, down_svh) = shared_names(layer);
    let hash_of = |role| manifest.roundtrip_hashes.get(&expert_module(layer, expert, role));
    for (role, linear) in Projection::ALL.into_iter().zip(&packed) {
        let name = expert_module(layer, expert, role);
        let listed = (hash_of(role), manifest.tensor_provenance.get(&name), manifest.vector_refs.get(&name));
        let (Some(hashes), Some(made), Some(refs)) = listed else {
            checks.push((6, fail("the manifest does not know the module".to_owned(), &name)));
            continue;
        };
        let decoded = decode(linear);
        let same = decoded.packed_sha256 == hashes.packed_sha256
            && decoded.reconstruction_sha256 == hashes.reconstruction_sha256;
        checks.push((
            6,
            if same { Ok(()) } else { fail("it does not decode to what was encoded".to_owned(), &name) },
        ));
        let sliced = sliced_decode(linear, role) == decoded.dense;
        checks.push((6, if sliced { Ok(()) } else { fail(SLICES_DIFFER.to_owned(), &name) }));
        let wanted = match role {
            Projection::Down => (format!("{name}.suh"), down_svh.clone()),
            _ => (gate_up_suh.clone(), format!("{name}.svh")),
        };
        let refer = (refs.suh == wanted.0 && refs.svh == wanted.1)
            && file.contains(&refs.suh)
            && file.contains(&refs.svh);
        checks.push((
            6,
            if refer { Ok(()) } else { fail("its vectors are not the layer's".to_owned(), &name) },
        ));
        let bits = manifest.bit_map.get(&name) == Some(&linear.bits);
        checks.push((
            3,
            if bits { Ok(()) } else { fail(format!("it is packed at {} bits", linear.bits), &name) },
        ));
        let sized = made.full_k == linear.k && made.full_n == linear.n;
        checks.push((
            6,
            if sized { Ok(()) } else { fail("its provenance is of another size".to_owned(), &name) },
        ));
        if role == Projection::Down {
            let through = [
                (&made.down_covariance_gate_reconstruction_sha256, Projection::Gate),
                (&made.down_covariance_up_reconstruction_sha256, Projection::Up),
            ];
            for (found, role) in through {
                let wanted = hash_of(role).map(|hashes| &hashes.reconstruction_sha256);
                let same = found.is_some() && found.as_ref() == wanted;
                checks.push((4, if same { Ok(()) } else { fail(through_finished(role), &name) }));
            }
        }
    }
    checks.push((6, permutation(manifest, (layer, expert), packed[0].n, wrong)));
    checks
}

/// What is wrong where down was encoded behind another gate or up.
pub(super) fn through_finished(role: Projection) -> String {
    format!("down's covariance does not go through the finished {}", role.as_str())
}

/// An order of the intermediate channels that is a bijection and the one the modules were made with.
fn permutation(
    manifest: &V2Manifest,
    (layer, expert): (usize, usize),
    channels: usize,
    wrong: &(dyn Fn(String) -> Refusal + Sync),
) -> Result<()> {
    let place = |what: &str| wrong(what.to_owned()).expert(expert).field(format!("permutations.{expert}"));
    let Some(order) = manifest.permutations.get(&expert.to_string()) else {
        return Err(place("the manifest has no order of its channels").check());
    };
    let distinct: BTreeSet<usize> = order.new_to_old.iter().copied().collect();
    let bijection = order.new_to_old.len() == channels
        && distinct.len() == channels
        && distinct.last().is_some_and(|&last| last + 1 == channels);
    if !bijection {
        return Err(place("the order of its channels is no bijection").check());
    }
    let sha256 = canonical_hash(&order.new_to_old)?;
    for role in Projection::ALL {
        let made = manifest.tensor_provenance.get(&expert_module(layer, expert, role));
        if made.is_none_or(|made| made.permutation_sha256 != sha256) {
            return Err(place("the order is not the one the modules were made with").check());
        }
    }
    Ok(())
}
