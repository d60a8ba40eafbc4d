//! The probe and allocation stages of a KAIJU1 layer: whole experts measured at each rung, and the rung of each.
//!
//! A recipe without rungs has one setting for all, so nothing is probed. Costs are exact: the bits of an expert's payloads
//! follow from its sizes and the setting. One round is enough, for an expert is measured as it will be.

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::kept::{adopt, keep, units_folder};
use super::layer::{ExpertInputs, LayerWork};
use super::probing::{allocation_path, ledger_path};
use super::progress::{Observer, proceed};
use crate::choose::allocation::Measured;
use crate::choose::rung_probes::{RungMeasurement, RungProbe, encodes_of_rungs, probe_rungs};
use crate::choose::rungs::choose_rungs;
use crate::codec::kaiju::payload_bytes;
use crate::codec::weight;
use crate::config::kaiju1::{Kaiju1, Kaiju1Setting};
use crate::config::recipe::{Rational, Recipe};
use crate::error::{Result, refuse};
use crate::store::atomic::{create_dir_durably, write_json_atomic};
use crate::store::canonical_json::{canonical_hash, parse_float17};
use crate::store::hash::Hash;
use crate::store::json_diff::{Difference, first_difference};

/// The only round.
pub const ROUND: u32 = 0;

/// `layer-NNN/probe-iter-00.json` of a KAIJU1 walk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RungLedger {
    /// The layer.
    pub layer: usize,
    /// SHA-256 of the recipe.
    pub recipe_sha256: Hash,
    /// SHA-256 of the input state's manifest.
    pub state_sha256: Hash,
    /// SHA-256 of `capture.json`.
    pub capture_sha256: Hash,
    /// SHA-256 of the source inventory.
    pub source_inventory_sha256: Hash,
    /// The rungs' settings.
    pub settings: Vec<Kaiju1Setting>,
    /// Every expert of the layer, ascending.
    pub experts: Vec<ProbedRungs>,
}

/// One expert's inputs and measurements.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProbedRungs {
    /// What was measured on.
    pub inputs: ExpertInputs,
    /// What was measured.
    pub probe: RungProbe,
}

/// What a ledger has to be of.
#[derive(Debug, Clone, Copy)]
pub struct Bound<'a> {
    /// The layer.
    pub layer: usize,
    /// SHA-256 of the recipe.
    pub recipe_sha256: &'a str,
    /// SHA-256 of the input state's manifest.
    pub state_sha256: &'a str,
    /// SHA-256 of `capture.json`.
    pub capture_sha256: &'a str,
    /// SHA-256 of the source inventory.
    pub source_inventory_sha256: &'a str,
    /// The recipe's knobs.
    pub kaiju1: &'a Kaiju1,
    /// Routed experts.
    pub experts: usize,
}

impl RungLedger {
    /// The first value that is not as the layer has it, or no sound measurement: a finite loss of every expert at every
    /// rung. What the experts' inputs are is left to the caller.
    pub fn fault(&self, bound: &Bound<'_>) -> Option<Difference> {
        let settings = bound.kaiju1.settings();
        let list = |settings: &[Kaiju1Setting]| {
            settings.iter().map(|s| s.to_string()).collect::<Vec<_>>().join(", ")
        };
        let header = [
            ("layer", self.layer.to_string(), bound.layer.to_string()),
            ("recipe_sha256", self.recipe_sha256.clone(), bound.recipe_sha256.to_owned()),
            ("state_sha256", self.state_sha256.clone(), bound.state_sha256.to_owned()),
            ("capture_sha256", self.capture_sha256.clone(), bound.capture_sha256.to_owned()),
            (
                "source_inventory_sha256",
                self.source_inventory_sha256.clone(),
                bound.source_inventory_sha256.to_owned(),
            ),
            ("settings", list(&self.settings), list(&settings)),
            ("experts", self.experts.len().to_string(), bound.experts.to_string()),
        ];
        if let Some((field, found, wanted)) = header.into_iter().find(|(_, found, wanted)| found != wanted) {
            return Some(Difference::new(field, found, wanted));
        }
        self.experts.iter().enumerate().find_map(|(id, ProbedRungs { inputs, probe })| {
            let at = |field: &str| format!("experts[{id}].{field}");
            if (inputs.expert, probe.expert) != (id, id) {
                return Some(Difference::new(at("probe.expert"), probe.expert, id));
            }
            if probe.rungs.len() != settings.len() {
                return Some(Difference::new(at("probe.rungs"), probe.rungs.len(), settings.len()));
            }
            probe.rungs.iter().enumerate().find_map(|(rung, RungMeasurement { loss, .. })| {
                let sound = parse_float17(loss).is_ok_and(|loss| loss >= 0.0);
                let path = || at(&format!("probe.rungs[{rung}].loss"));
                (!sound).then(|| Difference::new(path(), format!("{loss:?}"), "a finite loss"))
            })
        })
    }

    /// Holds the ledger against the work it claims to measure.
    ///
    /// # Errors
    /// Names file and field of the first value that is not what it has to be.
    fn check(&self, work: &LayerWork<'_>, kaiju1: &Kaiju1) -> Result<()> {
        let bound = Bound {
            layer: work.layer,
            recipe_sha256: work.recipe_sha256,
            state_sha256: &work.capture.record.state_sha256,
            capture_sha256: &work.capture.sha256,
            source_inventory_sha256: work.inventory_sha256,
            kaiju1,
            experts: work.geometry.n_routed_experts,
        };
        let inputs = || -> Result<Option<Difference>> {
            for (id, entry) in self.experts.iter().enumerate() {
                let json = |inputs: &ExpertInputs| -> Result<Value> {
                    let text = |error| refuse(format!("inputs as JSON: {error}"));
                    Ok(serde_json::to_value(inputs).map_err(text)?)
                };
                let (found, wanted) = (json(&entry.inputs)?, json(&work.inputs(id)?)?);
                if let Some(fault) = first_difference(&found, &wanted, &format!("experts[{id}].inputs")) {
                    return Ok(Some(fault));
                }
            }
            Ok(None)
        };
        let Some(Difference { path, found, wanted }) =
            self.fault(&bound).map_or_else(inputs, |f| Ok(Some(f)))?
        else {
            return Ok(());
        };
        refuse(format!("the probe ledger cannot be chosen from: this is {found}"))
            .file(work.work.join(ledger_path(work.layer, ROUND)))
            .layer(work.layer)
            .field(path)
            .wanted(wanted)
            .err()
    }
}

/// `layer-NNN/allocation-iter-00.json` of a KAIJU1 walk: the rung of each expert, and the integer proof of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RungAllocation {
    /// The layer.
    pub layer: usize,
    /// SHA-256 of the probe ledger; absent where the recipe has no rungs.
    pub probe_sha256: Option<Hash>,
    /// The rungs' settings.
    pub settings: Vec<Kaiju1Setting>,
    /// Bits of an expert's payloads by rung.
    pub expert_bits: Vec<u64>,
    /// Weights of the layer's experts.
    pub weights: u64,
    /// Most bits a weight; none where there is nothing to choose.
    pub target: Option<Rational>,
    /// The target times the weights, rounded down.
    pub budget_bits: Option<u64>,
    /// Bits of all payloads.
    pub bits: u64,
    /// The rung of each expert.
    pub rungs: Vec<u32>,
    /// Routing mass by expert, units of 2^-149.
    pub mass_units: Vec<String>,
    /// SHA-256 of the canonical array of masses.
    pub mass_sha256: Hash,
    /// Gain over rung 0 in measured loss, an integer in units of 2^-(149 + loss_exponent).
    pub gain: String,
    /// See `gain`.
    pub loss_exponent: u32,
}

impl RungAllocation {
    /// Chooses the rungs of a layer: of so many experts of hidden size and width `sizes`, by their masses and their probes.
    ///
    /// # Errors
    /// A mass or loss that is no number, a budget out of reach, a recipe of another codec.
    pub fn solve(
        recipe: &Recipe,
        (layer, sizes): (usize, (usize, usize)),
        mass_units: &[String],
        ledger: Option<(&RungLedger, &Hash)>,
    ) -> Result<Self> {
        let kaiju1 = knobs(recipe)?;
        let (settings, experts) = (kaiju1.settings(), mass_units.len());
        let expert_bits =
            settings.iter().map(|setting| bits_of_an_expert(setting, sizes)).collect::<Result<Vec<_>>>()?;
        let weights = (experts * 3 * sizes.0 * sizes.1) as u64;
        let mut solved = Self {
            layer,
            probe_sha256: ledger.map(|(_, sha256)| sha256.clone()),
            expert_bits,
            settings,
            weights,
            target: kaiju1.target,
            budget_bits: kaiju1.target.map(|target| budget(target, weights)),
            bits: 0,
            rungs: vec![0; experts],
            mass_sha256: canonical_hash(&mass_units)?,
            mass_units: mass_units.to_vec(),
            gain: "0".to_owned(),
            loss_exponent: 0,
        };
        if let (Some((ledger, _)), Some(budget)) = (ledger, solved.budget_bits) {
            let measured = mass_units.iter().zip(&ledger.experts).map(|(mass, entry)| {
                let number = |error| refuse(format!("a mass of {mass:?}: {error}")).layer(layer);
                Ok(Measured { mass: mass.parse().map_err(number)?, losses: entry.probe.losses()? })
            });
            let measured = measured.collect::<Result<Vec<_>>>()?;
            let chosen = choose_rungs(&measured, &solved.expert_bits, budget)?;
            (solved.rungs, solved.gain) = (chosen.rungs, chosen.gain.to_string());
            solved.loss_exponent = chosen.loss_exponent;
        }
        solved.bits = solved.rungs.iter().map(|&rung| solved.expert_bits[rung as usize]).sum();
        Ok(solved)
    }

    /// How many experts have which setting.
    pub fn counts(&self) -> Vec<(String, usize)> {
        let count = |rung: usize| self.rungs.iter().filter(|&&own| own as usize == rung).count();
        let counted =
            self.settings.iter().enumerate().map(|(rung, setting)| (setting.to_string(), count(rung)));
        counted.filter(|(_, count)| *count > 0).collect()
    }
}

/// The recipe's knobs.
///
/// # Errors
/// A recipe of another codec.
pub fn knobs(recipe: &Recipe) -> Result<&Kaiju1> {
    match &recipe.kaiju1 {
        Some(kaiju1) => Ok(kaiju1),
        None => refuse("the recipe is of another codec")
            .file(&recipe.origin)
            .field("codec")
            .wanted("\"kaiju1\"")
            .err(),
    }
}

/// Bits of the payloads of one expert: gate and up `[I, H]`, down `[H, I]`.
///
/// # Errors
/// Sizes or a setting that no payload can have.
pub fn bits_of_an_expert(setting: &Kaiju1Setting, (hidden, inner): (usize, usize)) -> Result<u64> {
    let settings = weight::settings(setting, false)?;
    let bytes = |rows, cols| payload_bytes(rows, cols, settings.code, settings.hi_frac);
    Ok(8 * (2 * bytes(inner, hidden)? + bytes(hidden, inner)?) as u64)
}

/// The most bits that so many weights may take.
fn budget(target: Rational, weights: u64) -> u64 {
    let bits = u128::from(target.numerator) * u128::from(weights) / u128::from(target.denominator.max(1));
    u64::try_from(bits).unwrap_or(u64::MAX)
}

/// Refuses a budget that cannot be met, before anything is measured.
///
/// # Errors
/// Names the target and the rate of the cheapest rung.
pub fn check_budget(recipe: &Recipe, sizes: (usize, usize)) -> Result<()> {
    let kaiju1 = knobs(recipe)?;
    let bits = kaiju1.settings().iter().map(|s| bits_of_an_expert(s, sizes)).collect::<Result<Vec<_>>>()?;
    let (least, weights) = (bits.into_iter().min().unwrap_or(0), (3 * sizes.0 * sizes.1) as u64);
    match kaiju1.target {
        Some(target) if budget(target, weights) < least => {
            refuse(format!("the target is out of reach: {target} bits a weight"))
                .file(&recipe.origin)
                .field("kaiju1.target")
                .wanted(format!(
                    "at least {} bits a weight, the rate of the cheapest rung",
                    least as f64 / weights as f64
                ))
                .err()
        }
        _ => Ok(()),
    }
}

/// Probes every expert at every rung and publishes the ledger; those an interrupted run finished are adopted.
///
/// # Errors
/// Names layer, expert and tensor of what cannot be measured.
pub fn probe_layer_rungs(work: &LayerWork<'_>, observer: &dyn Observer) -> Result<(RungLedger, Hash)> {
    let settings = knobs(work.recipe)?.settings();
    let (experts, encodes) = (work.geometry.n_routed_experts, encodes_of_rungs(settings.len()));
    let path = ledger_path(work.layer, ROUND);
    let folder = work.work.join(units_folder(&path));
    create_dir_durably(&folder)?;
    observer.begin("probe", Some(work.layer), (experts * encodes) as u64);
    let probed = (0..experts)
        .into_par_iter()
        .map(|id| {
            let unit = folder.join(format!("expert-{id:03}.json"));
            let inputs = work.inputs(id)?;
            let job = work.job_sha256("probe-rungs", &inputs, &Value::Null)?;
            if let Some(probed) = adopt(&unit, &job)? {
                (0..encodes).for_each(|_| observer.advance(&format!("expert {id} (adopted)")));
                return Ok(probed);
            }
            proceed(observer)?;
            let expert = work.expert(id)?;
            let done = || observer.advance(&format!("expert {id}"));
            let probe = probe_rungs(work.codec, &expert, settings.len(), done)?;
            let probed = ProbedRungs { inputs, probe };
            keep(&unit, &job, &probed)?;
            Ok(probed)
        })
        .collect::<Result<Vec<_>>>()?;
    observer.end();
    let ledger = RungLedger {
        layer: work.layer,
        recipe_sha256: work.recipe_sha256.clone(),
        state_sha256: work.capture.record.state_sha256.clone(),
        capture_sha256: work.capture.sha256.clone(),
        source_inventory_sha256: work.inventory_sha256.clone(),
        settings,
        experts: probed,
    };
    let sha256 = write_json_atomic(work.work.join(path), &ledger)?;
    Ok((ledger, sha256))
}

/// Chooses the layer's rungs from its ledger (or takes the recipe's one setting) and publishes the proof.
///
/// # Errors
/// A ledger that is missing, incomplete or of other work; a target out of reach.
pub fn allocate_rungs(
    work: &LayerWork<'_>,
    ledger: Option<(&RungLedger, &Hash)>,
) -> Result<(RungAllocation, Hash)> {
    let kaiju1 = knobs(work.recipe)?;
    match ledger {
        Some((ledger, _)) => ledger.check(work, kaiju1)?,
        None if kaiju1.rungs.is_empty() => {}
        None => {
            return refuse("there is no probe ledger to choose from")
                .file(work.work.join(ledger_path(work.layer, ROUND)))
                .layer(work.layer)
                .wanted("a probed layer, or a recipe without rungs")
                .err();
        }
    }
    let sizes = (work.geometry.hidden_size, work.geometry.moe_intermediate_size);
    let record =
        RungAllocation::solve(work.recipe, (work.layer, sizes), &work.capture.record.mass_units, ledger)?;
    let sha256 = write_json_atomic(work.work.join(allocation_path(work.layer, ROUND)), &record)?;
    Ok((record, sha256))
}
