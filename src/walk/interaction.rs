//! The interaction audit: the held-out loss of every finished expert against what its probes promised.
//!
//! Probes measure one tensor off its context at a time. Where an expert's final bits are its context, its loss was measured
//! as a whole, and that is the promise. Otherwise the promise is the first-order sum
//! `loss(c) + Σ_p (loss(p, b_p) - loss(p, c_p))` over its three tensors: what the allocation added up. What the final
//! encode loses beyond it is the interaction of the tensors, which no allocation by tensor can see; the audit bounds it
//! by the recipe's `interaction_tolerance`. Losses are means of squared output errors a held-out row, without router weight.
//!
//! Source: the owner's Round 7 record.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::capture::layer_folder;
use super::choosing::EncodedLayer;
use super::finals::{FinalExpert, read_records};
use super::journal::Journal;
use super::layer::LayerWork;

use super::tolerance::{INTERACTION_ABSOLUTE, INTERACTION_RELATIVE, Tolerance};
pub use crate::choose::probes::Basis;
use crate::choose::probes::Probed;
use crate::config::recipe::{Decimal, InteractionTolerance};
use crate::error::{Refusal, Result, refuse};
use crate::store::atomic::write_json_atomic;
use crate::store::canonical_json::{float17, parse_float17};
use crate::store::hash::Hash;

/// `layer-NNN/interaction-audit.json`. Numbers are 17-digit strings; a relative loss is one over the mean squared output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InteractionAudit {
    /// The layer.
    pub layer: usize,
    /// Where promises come from; says so where nothing was promised.
    pub promises: PromiseSource,
    /// Whether every promise was kept within its limit; `null` where nothing was promised.
    pub passed: Option<bool>,
    /// Mass-weighted mean of the promised losses.
    pub promised_loss: Option<Decimal>,
    /// The same over the mass-weighted mean energy.
    pub promised_relative: Option<Decimal>,
    /// Mass-weighted mean of the finished experts' losses.
    pub final_loss: Decimal,
    /// The same over the mass-weighted mean energy.
    pub final_relative: Decimal,
    /// Share of its promise by which a loss may exceed it.
    pub relative_tolerance: Tolerance,
    /// What it may exceed it by beside that, as a relative loss.
    pub absolute_tolerance: Tolerance,
    /// SHA-256 of the probe ledger; absent where bits are fixed by the recipe.
    pub probe_sha256: Option<Hash>,
    /// SHA-256 of the allocation.
    pub allocation_sha256: Hash,
    /// SHA-256 of `final-experts.json`.
    pub final_experts_sha256: Hash,
    /// Every expert of the layer, ascending.
    pub experts: Vec<ExpertInteraction>,
}

/// Where the promises of a layer come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PromiseSource {
    /// The layer's probes.
    Probes,
    /// The recipe fixes the bits, so nothing was probed.
    NothingWasPromised,
}

/// One expert.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertInteraction {
    /// The expert's id.
    pub expert: usize,
    /// Final bits of gate, up, down.
    pub bits: [u32; 3],
    /// Held-out loss of the finished expert.
    pub final_loss: Decimal,
    /// The same over its mean squared output; `NaN` where that is zero.
    pub final_relative: Decimal,
    /// What its probes promised.
    pub promise: Option<Promise>,
}

/// What an expert's probes promised of its final bits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Promise {
    /// How it was made.
    pub basis: Basis,
    /// Bits of gate, up, down that the probes had as context.
    pub context: [u32; 3],
    /// The promised loss.
    pub loss: Decimal,
    /// The same over the expert's mean squared output.
    pub relative: Decimal,
    /// `loss · (1 + relative tolerance) + absolute tolerance · mean squared output`.
    pub limit: Decimal,
    /// Whether the final loss is at most the limit.
    pub kept: bool,
}

/// `layer-NNN/interaction-audit.json`, relative to the work directory.
pub fn interaction_path(layer: usize) -> PathBuf {
    layer_folder(layer).join("interaction-audit.json")
}

/// The stage: audits the finished experts of a layer, publishes the record and seals it. Does nothing where it is sealed.
///
/// # Errors
/// An expert whose loss is above its limit: a failed check (exit code 1) that names layer, expert, loss, promise and
/// limit, after the record is published.
pub fn audit_interaction(journal: &mut Journal, work: &LayerWork<'_>, encoded: &EncodedLayer) -> Result<()> {
    let stage = format!("layer-{:03}/interaction-audit", work.layer);
    if journal.sealed(&stage).is_some() {
        return Ok(());
    }
    let (audit, sha256) = measure_interaction(work, encoded)?;
    let path = interaction_path(work.layer);
    if let Some(refusal) = audit.refusal() {
        return Err(refusal.file(work.work.join(&path)).check());
    }
    let mut inputs = vec![
        ("allocation", encoded.allocation_sha256.clone()),
        ("final_experts", encoded.summary_sha256.clone()),
    ];
    inputs.extend(encoded.allocation.probe_sha256().cloned().map(|sha256| ("probe", sha256)));
    journal.seal(&stage, inputs, [(path, sha256)])
}

/// Holds a layer's finished experts against their probes and publishes the record, whatever it says.
///
/// # Errors
/// A record that cannot be read or written, or a number in it that is none.
pub fn measure_interaction(work: &LayerWork<'_>, encoded: &EncodedLayer) -> Result<(InteractionAudit, Hash)> {
    let EncodedLayer { ledger, allocation, allocation_sha256, summary, summary_sha256 } = encoded;
    let ledger = ledger.as_ref();
    let records = read_records(work, summary)?;
    let (mut experts, mut energies) = (Vec::with_capacity(records.len()), Vec::with_capacity(records.len()));
    for (id, record) in records.iter().enumerate() {
        let energy = parse_float17(&record.energy)?;
        let probe = ledger.map(|ledger| ledger.probe(id));
        experts.push(judge(record, energy, probe, work.recipe.interaction_tolerance)?);
        energies.push(energy);
    }
    let shares = work.capture.mass.shares();
    let weighted = |values: &[f64]| -> f64 { values.iter().zip(&shares).map(|(x, share)| x * share).sum() };
    let energy = weighted(&energies);
    let finished = weighted(&experts.iter().map(|expert| expert.final_loss.0).collect::<Vec<_>>());
    // All experts have a promise, or none.
    let promises: Option<Vec<&Promise>> = experts.iter().map(|expert| expert.promise.as_ref()).collect();
    let promised = promises.as_ref().map(|p| weighted(&p.iter().map(|p| p.loss.0).collect::<Vec<_>>()));
    let tolerance = work.recipe.interaction_tolerance;
    let audit = InteractionAudit {
        layer: work.layer,
        promises: if ledger.is_some() { PromiseSource::Probes } else { PromiseSource::NothingWasPromised },
        passed: promises.map(|promises| promises.iter().all(|promise| promise.kept)),
        promised_loss: promised.map(Decimal),
        promised_relative: promised.map(|loss| Decimal(loss / energy)),
        final_loss: Decimal(finished),
        final_relative: Decimal(finished / energy),
        relative_tolerance: Tolerance::new(tolerance.relative, INTERACTION_RELATIVE),
        absolute_tolerance: Tolerance::new(tolerance.absolute, INTERACTION_ABSOLUTE),
        probe_sha256: allocation.probe_sha256().cloned(),
        allocation_sha256: allocation_sha256.clone(),
        final_experts_sha256: summary_sha256.clone(),
        experts,
    };
    let sha256 = write_json_atomic(work.work.join(interaction_path(work.layer)), &audit)?;
    Ok((audit, sha256))
}

/// Holds one finished expert, of this mean squared output, against its probe.
fn judge(
    record: &FinalExpert,
    energy: f64,
    probe: Option<&dyn Probed>,
    tolerance: InteractionTolerance,
) -> Result<ExpertInteraction> {
    let loss = parse_float17(&record.loss)?;
    let promise = |probe: &dyn Probed| -> Result<Promise> {
        let (basis, context, promised) = probe.promise(record.bits)?;
        let limit = promised * (1.0 + tolerance.relative.0) + tolerance.absolute.0 * energy;
        Ok(Promise {
            basis,
            context,
            loss: Decimal(promised),
            relative: Decimal(promised / energy),
            limit: Decimal(limit),
            kept: loss <= limit,
        })
    };
    Ok(ExpertInteraction {
        expert: record.inputs.expert,
        bits: record.bits,
        final_loss: Decimal(loss),
        final_relative: Decimal(loss / energy),
        promise: probe.map(promise).transpose()?,
    })
}

impl InteractionAudit {
    /// Judges the numbers anew, whatever the record says of itself: its limits against the promises and `tolerance`, its
    /// losses against the limits.
    ///
    /// # Errors
    /// Names the expert whose limit or verdict does not follow from its numbers (a failed check), and what
    /// [`InteractionAudit::refusal`] names.
    pub fn judge(&self, tolerance: InteractionTolerance) -> Result<()> {
        let wrong = |expert: usize, what: &str| refuse(what).layer(self.layer).expert(expert).check();
        for ExpertInteraction { expert, final_loss, promise, .. } in &self.experts {
            let Some(promise) = promise else { continue };
            // The mean squared output is not in the record; promise and relative promise give it, to rounding.
            let energy = promise.loss.0 / promise.relative.0;
            let limit = promise.loss.0 * (1.0 + tolerance.relative.0) + tolerance.absolute.0 * energy;
            let follows = (limit - promise.limit.0).abs() <= 1e-9 * limit.abs();
            if promise.loss.0 != 0.0 && !follows {
                return Err(wrong(*expert, "the limit does not follow from the promise and the tolerances"));
            }
            if promise.kept != (final_loss.0 <= promise.limit.0) {
                return Err(wrong(*expert, "whether the promise was kept does not follow from its numbers"));
            }
        }
        let promises = self.experts.iter().map(|expert| expert.promise.as_ref().map(|promise| promise.kept));
        let kept = promises.collect::<Option<Vec<bool>>>().map(|kept| kept.into_iter().all(|kept| kept));
        match self.refusal() {
            Some(refusal) => Err(refusal.check()),
            None if self.passed == kept => Ok(()),
            None => {
                Err(refuse("whether it passed does not follow from its experts").layer(self.layer).check())
            }
        }
    }

    /// Where a promise was broken: the expert that exceeds its limit by most, as a share of the limit.
    pub fn refusal(&self) -> Option<Refusal> {
        let broken = self.experts.iter().filter_map(|expert| {
            let promise = expert.promise.as_ref().filter(|promise| !promise.kept)?;
            Some((expert.final_loss.0 / promise.limit.0, expert, promise))
        });
        let broken: Vec<_> = broken.collect();
        let (_, expert, promise) = broken.iter().max_by(|a, b| a.0.total_cmp(&b.0))?;
        let how = match promise.basis {
            Basis::Measured => "measured as a whole",
            Basis::FirstOrder => "the first-order sum of its probes",
        };
        Some(refuse(format!(
            "the finished expert's held-out loss is {}, promised was {} ({how}); {} of {} experts exceed their limits",
            float17(expert.final_loss.0),
            float17(promise.loss.0),
            broken.len(),
            self.experts.len()
        ))
        .layer(self.layer)
        .expert(expert.expert)
        .wanted(format!(
            "at most {}; more calibration text, more fixed_point_iterations (bits that are their own context are \
             promised as a whole), or another interaction_tolerance in the recipe",
            float17(promise.limit.0)
        )))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::checkpoint::names::Projection;
    use crate::choose::probes::{ExpertProbe, Measurement};
    use crate::walk::layer::ExpertInputs;

    /// Losses by tensor at 3, 4, 5 bits; context 4/4/4.
    fn probe(losses: [[f64; 3]; 3]) -> ExpertProbe {
        let measurement = |loss: f64| Measurement {
            loss: float17(loss),
            relative_loss: float17(loss),
            scale: float17(1.0),
            packed_sha256: Hash::new(),
            reconstruction_sha256: [Hash::new(), Hash::new(), Hash::new()],
        };
        let widths = |losses: [f64; 3]| -> BTreeMap<String, Measurement> {
            losses.iter().zip(3..).map(|(&loss, bits)| (u32::to_string(&bits), measurement(loss))).collect()
        };
        let tensors = Projection::ALL.iter().map(|&p| (p.as_str().to_owned(), widths(losses[p as usize])));
        ExpertProbe {
            expert: 0,
            context: [4; 3],
            encodes: 13,
            dropped_rows: 0,
            down_damping: None,
            tensors: tensors.collect(),
        }
    }

    fn finished(bits: [u32; 3], loss: f64) -> FinalExpert {
        FinalExpert {
            job_sha256: Hash::new(),
            inputs: ExpertInputs {
                expert: 0,
                fit_rows: 1,
                holdout_rows: 1,
                fit_row_ids_sha256: Hash::new(),
                holdout_row_ids_sha256: Hash::new(),
                fit_fallback: None,
                holdout_fallback: None,
                bf16_sha256: BTreeMap::new(),
                permutation_policy: crate::config::choices::PermutationPolicy::Identity,
                permutation_sha256: Hash::new(),
                vector_sha256: BTreeMap::new(),
            },
            bits,
            tensors: BTreeMap::new(),
            down_damping: None,
            down_target_sha256: None,
            dropped_rows: 0,
            clipped_outputs: 0,
            loss: float17(loss),
            energy: float17(1000.0),
            shard_sha256: Hash::new(),
            content_sha256: Hash::new(),
        }
    }

    const LOSSES: [[f64; 3]; 3] = [[20.0, 8.0, 5.0], [16.0, 8.0, 6.0], [18.0, 8.0, 3.0]];
    const TOLERANCE: InteractionTolerance =
        InteractionTolerance { relative: Decimal(0.25), absolute: Decimal(0.001) };

    fn kept(bits: [u32; 3], loss: f64) -> Promise {
        judge(&finished(bits, loss), 1000.0, Some(&probe(LOSSES)), TOLERANCE).unwrap().promise.unwrap()
    }

    #[test]
    fn a_promise_is_the_measured_loss_or_the_first_order_sum() {
        let whole = kept([4; 3], 8.0);
        assert_eq!((whole.basis, whole.loss.0, whole.relative.0), (Basis::Measured, 8.0, 0.008));
        let sum = kept([3, 4, 5], 8.0);
        assert_eq!((sum.basis, sum.loss.0), (Basis::FirstOrder, 8.0 + 12.0 - 5.0));
        // 15 · 1.25 + 0.001 · 1000.
        assert_eq!(sum.limit.0, 19.75);
    }

    #[test]
    fn a_promise_is_kept_up_to_its_limit() {
        assert!(kept([3, 4, 5], 19.75).kept);
        assert!(!kept([3, 4, 5], 19.750_001).kept);
        let nothing = judge(&finished([3; 3], 1e9), 1000.0, None, TOLERANCE).unwrap();
        assert_eq!(nothing.promise, None);
    }

    #[test]
    fn the_verdict_names_the_worst_expert_with_its_values() {
        let expert = |id: usize, loss: f64| {
            let mut record = finished([3, 4, 5], loss);
            record.inputs.expert = id;
            judge(&record, 1000.0, Some(&probe(LOSSES)), TOLERANCE).unwrap()
        };
        let audit = |experts: Vec<ExpertInteraction>| InteractionAudit {
            layer: 7,
            promises: PromiseSource::Probes,
            passed: None,
            promised_loss: None,
            promised_relative: None,
            final_loss: Decimal(0.0),
            final_relative: Decimal(0.0),
            relative_tolerance: Tolerance::new(TOLERANCE.relative, INTERACTION_RELATIVE),
            absolute_tolerance: Tolerance::new(TOLERANCE.absolute, INTERACTION_ABSOLUTE),
            probe_sha256: None,
            allocation_sha256: Hash::new(),
            final_experts_sha256: Hash::new(),
            experts,
        };
        assert!(audit(vec![expert(0, 19.0), expert(1, 15.0)]).refusal().is_none());
        let said = audit(vec![expert(0, 20.0), expert(1, 24.0), expert(2, 1.0)]).refusal().unwrap();
        let said = said.to_string();
        assert!(said.contains("layer 7, expert 1") && said.contains("2 of 3"), "{said}");
        for value in [24.0, 15.0, 19.75] {
            assert!(said.contains(&float17(value)), "{said}");
        }
    }
}
