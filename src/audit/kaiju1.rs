//! KAIJU1 layers: gates 3, 4 and 6 from shard and manifest, gates 2 and 3 from the sealed ledger and proof.

use std::path::Path;

use rayon::prelude::*;

use super::findings::Findings;
use super::layer::Layer;
use super::shard::{holds_payloads, through_finished};
use crate::checkpoint::finished::finished_path;
use crate::checkpoint::kaiju1_manifest::Kaiju1Manifest;
use crate::checkpoint::kaiju1_shard::{Kaiju1Layer, shard_stem, tensor_names};
use crate::checkpoint::names::{self, Projection, expert_module};
use crate::choose::expert::decode;
use crate::codec::kaiju::Header;
use crate::codec::weight;
use crate::config::choices::CodecName;
use crate::error::{Refusal, Result, refuse};
use crate::store::hash::{Hash, sha256_file};
use crate::walk::capture::CaptureRecord;
use crate::walk::probing::{allocation_path, ledger_path};
use crate::walk::progress::{Observer, proceed};
use crate::walk::rungs::{Bound, ROUND, RungAllocation, RungLedger, knobs};

/// Audits one finished layer; `wanted` is the number of experts, hidden size and expert width, where they are known.
///
/// # Errors
/// Interrupted by the user.
pub(super) fn audit_shard(
    folder: &Path,
    layer: usize,
    wanted: Option<(usize, (usize, usize))>,
    findings: &mut Findings,
    observer: &dyn Observer,
) -> Result<()> {
    proceed(observer)?;
    let Some(manifest) = findings.hold(6, Kaiju1Manifest::read(folder, layer)) else { return Ok(()) };
    let path = folder.join(&manifest.shard);
    let wrong = |what: String| refuse(what).file(&path).layer(layer);
    let Some(found) = findings.hold(6, sha256_file(&path)) else { return Ok(()) };
    findings.same(6, &found, &manifest.shard_sha256, || wrong(format!("its hash is {found}")));
    let experts = wanted.map_or(manifest.experts(), |(experts, _)| experts);
    let whole = manifest.check_whole(&folder.join(format!("{}.json", shard_stem(layer))), experts);
    if findings.hold(3, whole).is_none() {
        return Ok(());
    }
    let sizes = match (wanted, manifest.tensor_provenance.get(&expert_module(layer, 0, Projection::Gate))) {
        (Some((_, sizes)), _) => sizes,
        (None, Some(gate)) => (gate.full_k, gate.full_n),
        (None, None) => return Ok(()),
    };
    let Some(opened) = findings.hold(6, Kaiju1Layer::open(&path, layer, sizes.0, sizes.1)) else {
        return Ok(());
    };
    let names = tensor_names(layer, experts);
    findings.hold(6, holds_payloads(opened.file(), &names, &manifest.payload_sha256, &wrong));
    observer.begin("decode", Some(layer), experts as u64);
    let checks: Vec<(usize, Result<()>)> = (0..experts)
        .into_par_iter()
        .flat_map_iter(|expert| {
            let found = Projection::ALL.map(|role| audit_module(&opened, &manifest, (expert, role), &wrong));
            observer.advance(&format!("expert {expert}"));
            found.into_iter().flatten()
        })
        .collect();
    observer.end();
    for (gate, check) in checks {
        findings.hold(gate, check);
    }
    Ok(())
}

/// Gates 3, 4 and 6 of a module that the manifest knows.
fn audit_module(
    opened: &Kaiju1Layer,
    manifest: &Kaiju1Manifest,
    (expert, role): (usize, Projection),
    wrong: &(dyn Fn(String) -> Refusal + Sync),
) -> Vec<(usize, Result<()>)> {
    let name = expert_module(manifest.layer, expert, role);
    let tensor = match opened.tensor(expert, role) {
        Ok(tensor) => tensor,
        Err(error) => return vec![(6, Err(error))],
    };
    let check = |good: bool, what: &str| match good {
        true => Ok(()),
        false => Err(wrong(what.to_owned()).expert(expert).tensor(&name).check()),
    };
    let (hashes, made) = (&manifest.roundtrip_hashes[&name], &manifest.tensor_provenance[&name]);
    let decoded = decode(&tensor);
    let same = decoded.packed_sha256 == hashes.packed_sha256
        && decoded.reconstruction_sha256 == hashes.reconstruction_sha256;
    let setting = weight::settings(&manifest.settings[&name], manifest.feedback);
    let plan = setting.and_then(|s| Header::plan((tensor.rows(), tensor.cols()), s.code, s.hi_frac));
    let rate = plan.is_ok_and(|plan| {
        let (code, hi) = (tensor.code() == plan.code, tensor.hi_count() == plan.hi_count);
        code && hi && manifest.payload_bits[&name] == 8 * tensor.payload().len() as u64
    });
    let sized = (made.full_k, made.full_n) == (tensor.cols(), tensor.rows());
    let mut checks = vec![
        (6, check(same, "it does not decode to what was encoded")),
        (3, check(rate, "its payload is not of the setting that the manifest gives it")),
        (6, check(sized, "its provenance is of another size")),
    ];
    if role == Projection::Down {
        let through = [
            (&made.down_covariance_gate_reconstruction_sha256, Projection::Gate),
            (&made.down_covariance_up_reconstruction_sha256, Projection::Up),
        ];
        for (found, role) in through {
            let hashes = &manifest.roundtrip_hashes[&expert_module(manifest.layer, expert, role)];
            let same = found.as_ref() == Some(&hashes.reconstruction_sha256);
            checks.push((4, check(same, &through_finished(role))));
        }
    }
    checks
}

/// Gates 2 and 3: the layer's ledger, the rungs that were chosen from it, and the settings it was emitted with.
pub(super) fn allocation(layer: &Layer<'_>, capture: &(CaptureRecord, Hash), findings: &mut Findings) {
    let path = allocation_path(layer.layer, ROUND);
    let name = format!("allocation-iter-{ROUND:02}");
    let Some(read) = layer.artifact::<RungAllocation>(&name, &path) else {
        [2, 3]
            .iter()
            .for_each(|&gate| findings.skip(gate, format!("layer {} is not allocated yet", layer.layer)));
        return;
    };
    let Some((record, sha256)) = findings.hold(3, read) else { return };
    let ledger =
        layer.artifact::<RungLedger>(&format!("probe-iter-{ROUND:02}"), &ledger_path(layer.layer, ROUND));
    let ledger = match ledger {
        None => {
            let why = "the recipe has one setting for all experts, so nothing was measured";
            findings.skip(2, format!("layer {}: {why}", layer.layer));
            None
        }
        Some(read) => {
            let Some(ledger) = findings.hold(2, read) else { return };
            if findings.hold(2, bound(layer, capture, &ledger.0)).is_none() {
                return;
            }
            Some(ledger)
        }
    };
    let geometry = &layer.evidence.geometry;
    let sizes = (geometry.hidden_size, geometry.moe_intermediate_size);
    let solved = RungAllocation::solve(
        &layer.evidence.recipe,
        (layer.layer, sizes),
        &capture.0.mass_units,
        ledger.as_ref().map(|(ledger, sha256)| (ledger, sha256)),
    );
    let same = solved.and_then(|solved| match solved == record {
        true => Ok(()),
        false => {
            let differs = solved.rungs.iter().zip(&record.rungs).position(|(wanted, found)| wanted != found);
            let place = layer.wrong(&path, "it is not what its masses and probes come to");
            Err(differs.into_iter().fold(place, |place, expert| place.expert(expert)).check())
        }
    });
    findings.hold(3, same);
    let Some(used) = layer.evidence.journal.sealed(&layer.stage("final-experts")) else {
        findings.skip(3, format!("layer {} has no finished experts yet", layer.layer));
        return;
    };
    let used = used.inputs.get("allocation").cloned().unwrap_or_default();
    findings.same(3, &used, &sha256, || {
        layer.wrong(&path, format!("the experts were encoded by allocation {used}"))
    });
    if layer.evidence.journal.sealed(&layer.stage("emit")).is_some() {
        findings.hold(3, emitted(layer, &record));
    }
}

/// The manifest gives every module its expert's setting, and as many bits in all.
fn emitted(layer: &Layer<'_>, record: &RungAllocation) -> Result<()> {
    let path = finished_path(CodecName::Kaiju1, layer.layer, "json");
    let folder = layer.evidence.work.join(path.parent().unwrap_or(Path::new("")));
    let manifest = Kaiju1Manifest::read(&folder, layer.layer)?;
    let own = |(expert, &rung): (usize, &u32)| {
        let setting = record.settings.get(rung as usize);
        Projection::ALL
            .iter()
            .all(|&role| manifest.settings.get(&expert_module(layer.layer, expert, role)) == setting)
    };
    match manifest.layer_bits == record.bits && record.rungs.iter().enumerate().all(own) {
        true => Ok(()),
        false => Err(layer.wrong(&path, "its settings are not those of the allocation").check()),
    }
}

/// A ledger measures this layer, from the experts of the sealed source.
fn bound(layer: &Layer<'_>, capture: &(CaptureRecord, Hash), ledger: &RungLedger) -> Result<()> {
    let (evidence, path) = (layer.evidence, ledger_path(layer.layer, ROUND));
    let wanted = Bound {
        layer: layer.layer,
        recipe_sha256: evidence.identity("recipe_sha256"),
        state_sha256: &capture.0.state_sha256,
        capture_sha256: &capture.1,
        source_inventory_sha256: &evidence.source.inventory_sha256,
        kaiju1: knobs(&evidence.recipe)?,
        experts: evidence.geometry.n_routed_experts,
    };
    if let Some(fault) = ledger.fault(&wanted) {
        let place = layer.wrong(&path, format!("this is {}", fault.found));
        return Err(place.field(fault.path).wanted(fault.wanted).check());
    }
    for (id, entry) in ledger.experts.iter().enumerate() {
        for role in Projection::ALL {
            let tensor = evidence.source.inventory.tensors.get(&names::expert(layer.layer, id, role));
            if entry.inputs.bf16_sha256.get(role.as_str()) != tensor.map(|tensor| &tensor.sha256) {
                let place = layer.wrong(&path, "the expert is not the source's").expert(id);
                return Err(place
                    .field(format!("experts[{id}].inputs.bf16_sha256.{}", role.as_str()))
                    .check());
            }
        }
    }
    Ok(())
}
