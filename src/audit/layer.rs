//! Gates 2, 3, 5 and 8 of one layer, from its sealed ledgers, proofs and audits.

use std::path::PathBuf;

use serde::de::DeserializeOwned;

use super::findings::Findings;
use super::work::Evidence;
use crate::calibrate::mass::Mass;
use crate::checkpoint::finished::{finished_folder, finished_path};
use crate::checkpoint::manifest_v2::V2Manifest;
use crate::checkpoint::names::{self, Projection};
use crate::choose::allocation::{Measured, allocate};
use crate::choose::fixed_point::Contexts;
use crate::config::choices::{AllocationRule, CodecName};
use crate::error::{Error, Refusal, Result, refuse};
use crate::store::canonical_json::canonical_hash;
use crate::store::hash::Hash;
use crate::store::safetensors_read::SafetensorsFile;
use crate::store::strict_json::read_json;
use crate::store::tensor_dtype::TensorDtype;
use crate::walk::capture::{CaptureRecord, capture_path, routing_path};
use crate::walk::forward::{ForwardAudit, forward_audit_path};
use crate::walk::install_audit::{InstallAudit, install_audit_path};
use crate::walk::interaction::{InteractionAudit, interaction_path};
use crate::walk::probing::{AllocationRecord, ProbeLedger, allocation_path, ledger_path, measurement_fault};
use crate::walk::progress::{Observer, proceed};
use crate::walk::state::{manifest_path, stage_of};

/// One layer's evidence.
pub(super) struct Layer<'a> {
    pub(super) evidence: &'a Evidence<'a>,
    pub(super) layer: usize,
}

impl Layer<'_> {
    pub(super) fn stage(&self, name: &str) -> String {
        format!("layer-{:03}/{name}", self.layer)
    }

    /// A sealed artifact with its hash; none where its stage is not sealed.
    pub(super) fn artifact<T: DeserializeOwned>(
        &self,
        stage: &str,
        path: &PathBuf,
    ) -> Option<Result<(T, Hash)>> {
        let sha256 = self.evidence.sealed(&self.stage(stage), path)?.clone();
        Some(read_json(self.evidence.work.join(path)).map(|artifact| (artifact, sha256)))
    }

    pub(super) fn wrong(&self, path: &PathBuf, what: impl Into<String>) -> Refusal {
        refuse(what).file(self.evidence.work.join(path)).layer(self.layer)
    }
}

/// Audits what a layer's stages left.
///
/// # Errors
/// Interrupted by the user.
pub fn audit_layer(
    evidence: &Evidence<'_>,
    layer: usize,
    findings: &mut Findings,
    observer: &dyn Observer,
) -> Result<()> {
    proceed(observer)?;
    let audited = Layer { evidence, layer };
    let capture = audited.artifact::<CaptureRecord>("capture", &capture_path(layer));
    let Some(capture) = capture.and_then(|read| findings.hold(3, read)) else {
        [2, 3, 5, 8]
            .iter()
            .for_each(|&gate| findings.skip(gate, format!("layer {layer} is not captured yet")));
        return Ok(());
    };
    let wanted = evidence.sealed(&stage_of(layer), &manifest_path(layer)).cloned().unwrap_or_default();
    findings.same(5, &capture.0.state_sha256, &wanted, || {
        audited.wrong(&capture_path(layer), format!("it was captured from state {}", capture.0.state_sha256))
    });
    masses(&audited, &capture.0, findings);
    match evidence.recipe.codec {
        CodecName::Trellis => allocation(&audited, &capture, findings),
        CodecName::Kaiju1 => super::kaiju1::allocation(&audited, &capture, findings),
    }
    installed(&audited, findings);
    Ok(())
}

/// The masses, summed anew from the routing.
fn masses(layer: &Layer<'_>, capture: &CaptureRecord, findings: &mut Findings) {
    let geometry = &layer.evidence.geometry;
    let path = capture_path(layer.layer);
    let check = || -> Result<()> {
        let mut mass = Mass::new(geometry.n_routed_experts);
        for prompt in layer.evidence.corpus.calibrate() {
            let shape = [prompt.token_ids.len(), geometry.num_experts_per_tok];
            let file =
                SafetensorsFile::open(layer.evidence.work.join(routing_path(layer.layer, &prompt.id)))?;
            let ids = file.bytes_as("ids", TensorDtype::I32, &shape)?.as_chunks().0;
            let weights = file.bytes_as("weights", TensorDtype::F32, &shape)?.as_chunks().0;
            for (id, weight) in ids.iter().zip(weights) {
                let (id, weight) = (i32::from_le_bytes(*id), f32::from_le_bytes(*weight));
                mass.add(id, weight).map_err(|error| match error {
                    Error::Refused(refusal) => refusal.file(file.path()).prompt(&prompt.id).into(),
                    other => other,
                })?;
            }
        }
        if mass.decimal() != capture.mass_units || mass.rows != capture.routed_rows {
            return Err(layer.wrong(&path, "its masses are not the sums of the sealed routing").check());
        }
        Ok(())
    };
    findings.hold(3, check());
}

/// Gates 2 and 3: every round's ledger, and the bits that were chosen from it.
fn allocation(layer: &Layer<'_>, capture: &(CaptureRecord, Hash), findings: &mut Findings) {
    let (recipe, experts) = (&layer.evidence.recipe, layer.evidence.geometry.n_routed_experts);
    let candidates = &recipe.candidate_bits;
    let mut contexts: Contexts = vec![[candidates[candidates.len() / 2]; 3]; experts];
    let mut last = None;
    for round in 0..recipe.fixed_point_iterations {
        let (name, path) = (format!("allocation-iter-{round:02}"), allocation_path(layer.layer, round));
        let Some(read) = layer.artifact::<AllocationRecord>(&name, &path) else { break };
        let Some((record, sha256)) = findings.hold(3, read) else { return };
        let ledger = ledger_path(layer.layer, round);
        let probed = layer.artifact::<ProbeLedger>(&format!("probe-iter-{round:02}"), &ledger);
        let probed = probed.and_then(|read| findings.hold(2, read));
        if let Some((probes, probe_sha256)) = &probed {
            findings.hold(2, bound(layer, capture, probes, round, &contexts));
            let found = record.probe_sha256.clone().unwrap_or_default();
            findings.same(2, &found, probe_sha256, || {
                layer.wrong(&path, format!("it was solved from probes {found}"))
            });
        }
        findings.hold(3, spent(layer, capture, &record, probed.as_ref().map(|(ledger, _)| ledger), &path));
        let Some(chosen) = findings.hold(3, record.contexts()) else { return };
        let settled = chosen == contexts;
        contexts = chosen;
        last = Some((record, sha256, settled, path));
    }
    let Some((record, sha256, settled, path)) = last else {
        [2, 3]
            .iter()
            .for_each(|&gate| findings.skip(gate, format!("layer {} is not allocated yet", layer.layer)));
        return;
    };
    if recipe.fixed_bits.is_some() {
        findings
            .skip(2, format!("layer {}: the recipe fixes the bits, so nothing was measured", layer.layer));
    } else if recipe.allocation != AllocationRule::Measured {
        findings.hold::<()>(
            2,
            Err(layer
                .wrong(&path, "the recipe assumes which tensors are sensitive")
                .wanted("measured losses")
                .check()),
        );
    }
    if layer.evidence.journal.sealed(&layer.stage("final-experts")).is_none() {
        findings.skip(3, format!("layer {} has no finished experts yet", layer.layer));
        return;
    }
    let must_settle = recipe.fixed_bits.is_none() && recipe.fixed_point_iterations > 1;
    let check = if settled || !must_settle {
        Ok(())
    } else {
        Err(layer.wrong(&path, "the last round still changed the bits").check())
    };
    findings.hold(3, check);
    let used = layer.evidence.journal.sealed(&layer.stage("final-experts"));
    let used = used.and_then(|seal| seal.inputs.get("allocation").cloned()).unwrap_or_default();
    findings.same(3, &used, &sha256, || {
        layer.wrong(&path, format!("the experts were encoded by allocation {used}"))
    });
    if layer.evidence.journal.sealed(&layer.stage("emit")).is_some() {
        let folder = layer.evidence.work.join(finished_folder(CodecName::Trellis));
        if let Some(manifest) = findings.hold(3, V2Manifest::read(&folder, layer.layer)) {
            let same =
                manifest.bit_map == record.bit_map && manifest.allocation_bit_units == record.bit_units;
            let wrong = || {
                let path = finished_path(CodecName::Trellis, layer.layer, "json");
                layer.wrong(&path, "its bits are not those of the last allocation")
            };
            findings.hold(3, if same { Ok(()) } else { Err(wrong().check()) });
        }
    }
}

/// A ledger measures this layer: right state, capture, recipe and contexts, every tensor of every expert at every width.
fn bound(
    layer: &Layer<'_>,
    capture: &(CaptureRecord, Hash),
    ledger: &ProbeLedger,
    round: u32,
    contexts: &Contexts,
) -> Result<()> {
    let (evidence, path) = (layer.evidence, ledger_path(layer.layer, round));
    let fields = [
        ("layer", ledger.layer.to_string(), layer.layer.to_string()),
        ("iteration", ledger.iteration.to_string(), round.to_string()),
        ("recipe_sha256", ledger.recipe_sha256.clone(), evidence.identity("recipe_sha256").to_owned()),
        ("state_sha256", ledger.state_sha256.clone(), capture.0.state_sha256.clone()),
        ("capture_sha256", ledger.capture_sha256.clone(), capture.1.clone()),
        (
            "source_inventory_sha256",
            ledger.source_inventory_sha256.clone(),
            evidence.source.inventory_sha256.clone(),
        ),
        ("context_sha256", ledger.context_sha256.clone(), canonical_hash(contexts)?),
        ("candidates", canonical_hash(&ledger.candidates)?, canonical_hash(&evidence.recipe.candidate_bits)?),
        ("experts", ledger.experts.len().to_string(), contexts.len().to_string()),
    ];
    for (field, found, wanted) in fields {
        if found != wanted {
            return Err(layer.wrong(&path, format!("this is {found}")).field(field).wanted(wanted).check());
        }
    }
    for (id, entry) in ledger.experts.iter().enumerate() {
        let place = |field: String| {
            layer.wrong(&path, "the probes are not those of the expert").expert(id).field(field)
        };
        let at = format!("experts[{id}]");
        if entry.probe.expert != id || entry.inputs.expert != id || entry.probe.context != contexts[id] {
            return Err(place(format!("{at}.probe")).check());
        }
        if let Some(fault) = measurement_fault(&entry.probe, &evidence.recipe.candidate_bits, &at) {
            return Err(place(fault.path).wanted(fault.wanted).check());
        }
        for role in Projection::ALL {
            let tensor = evidence.source.inventory.tensors.get(&names::expert(layer.layer, id, role));
            let sealed = tensor.map(|tensor| &tensor.sha256);
            if entry.inputs.bf16_sha256.get(role.as_str()) != sealed {
                return Err(place(format!("{at}.inputs.bf16_sha256.{}", role.as_str())).check());
            }
        }
    }
    Ok(())
}

/// The bits of a round: complete, within the candidates, the exact mean, the sealed masses, and the optimum of its ledger.
fn spent(
    layer: &Layer<'_>,
    capture: &(CaptureRecord, Hash),
    record: &AllocationRecord,
    ledger: Option<&ProbeLedger>,
    path: &PathBuf,
) -> Result<()> {
    let (recipe, experts) = (&layer.evidence.recipe, layer.evidence.geometry.n_routed_experts);
    let wrong = |what: String| layer.wrong(path, what);
    let tensors = (experts * Projection::ALL.len()) as u64;
    if record.tensors != tensors || record.bit_map.len() as u64 != tensors {
        return Err(wrong(format!("it has bits for {} tensors", record.bit_map.len()))
            .wanted(format!("{tensors}"))
            .check());
    }
    let mut sum = 0;
    for (name, bits) in &record.bit_map {
        if !recipe.candidate_bits.contains(bits) {
            return Err(wrong(format!("{bits} bits are no candidate")).tensor(name).check());
        }
        sum += u64::from(*bits);
    }
    let exact = u128::from(sum) * u128::from(recipe.target.denominator)
        == u128::from(tensors) * u128::from(recipe.target.numerator);
    if !exact || record.bit_units != sum {
        return Err(wrong(format!("{sum} bits over {tensors} tensors"))
            .wanted(format!("a mean of {}", recipe.target))
            .check());
    }
    if record.mass_units != capture.0.mass_units
        || record.mass_sha256 != canonical_hash(&capture.0.mass_units)?
    {
        return Err(wrong("its masses are not the captured ones".to_owned()).field("mass_units").check());
    }
    let Some(ledger) = ledger.filter(|_| recipe.allocation == AllocationRule::Measured) else {
        return Ok(());
    };
    let mut measured = Vec::with_capacity(tensors as usize);
    for (id, entry) in ledger.experts.iter().enumerate() {
        let mass = capture.0.mass_units[id]
            .parse()
            .map_err(|error| wrong(format!("mass of expert {id}: {error}")))?;
        for role in Projection::ALL {
            let losses = entry.probe.losses(role, &recipe.candidate_bits)?;
            measured.push(Measured { mass: Clone::clone(&mass), losses });
        }
    }
    let solved = allocate(&measured, recipe.upgrades(tensors)? as usize)?;
    for (index, extra) in solved.upgrades.iter().enumerate() {
        let name = names::expert_module(layer.layer, index / 3, Projection::ALL[index % 3]);
        let (found, wanted) = (record.bit_map.get(&name), recipe.floor_bits + extra);
        if found != Some(&wanted) {
            let found = found.map_or("nothing".to_owned(), u32::to_string);
            return Err(wrong(format!("it has {found} bits"))
                .tensor(name)
                .wanted(format!("{wanted}, by its probes"))
                .check());
        }
    }
    Ok(())
}

/// Gate 8: promises kept, experts installed as the reference computes them, and a prompt forwarded twice to equal bytes.
fn installed(layer: &Layer<'_>, findings: &mut Findings) {
    let path = interaction_path(layer.layer);
    match layer.artifact::<InteractionAudit>("interaction-audit", &path) {
        None => findings.skip(8, format!("layer {} has no interaction audit yet", layer.layer)),
        Some(read) => {
            let judged = read.and_then(|(audit, _)| {
                audit.judge(layer.evidence.recipe.interaction_tolerance).map_err(|error| match error {
                    Error::Check(refusal) => refusal.file(layer.evidence.work.join(&path)).check(),
                    other => other,
                })?;
                Ok(audit)
            });
            if let Some(audit) = findings.hold(8, judged)
                && audit.passed.is_none()
            {
                findings.skip(
                    8,
                    format!("layer {}: the recipe fixes the bits, so nothing was promised", layer.layer),
                );
            }
        }
    }
    let path = install_audit_path(layer.layer);
    let shard = finished_path(layer.evidence.recipe.codec, layer.layer, "safetensors");
    let shard = layer.evidence.sealed(&layer.stage("emit"), &shard).cloned();
    match layer.artifact::<InstallAudit>("install-audit", &path) {
        None => findings.skip(8, format!("layer {} has no install audit yet", layer.layer)),
        Some(read) => {
            let judged = read.and_then(|(audit, _)| match audit.judge() {
                Some(wrong) => Err(wrong.file(layer.evidence.work.join(&path)).check()),
                None => Ok(audit),
            });
            if let Some(audit) = findings.hold(8, judged) {
                findings.same(8, &audit.shard_sha256, &shard.unwrap_or_default(), || {
                    layer.wrong(&path, format!("it audited shard {}", audit.shard_sha256))
                });
            }
        }
    }
    let path = forward_audit_path(layer.layer);
    match layer.artifact::<ForwardAudit>("forward", &path) {
        None if layer.layer + 1 == layer.evidence.geometry.num_hidden_layers => {}
        None => findings.skip(8, format!("layer {} is not forwarded yet", layer.layer)),
        Some(read) => {
            let judged = read.and_then(|(audit, _)| audit.fault().map_or(Ok(()), |wrong| Err(wrong.check())));
            findings.hold(8, judged);
        }
    }
}
