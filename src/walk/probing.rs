//! The probe and allocation stages of a layer: ledgers and integer proofs.

use std::collections::BTreeMap;
use std::path::PathBuf;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::capture::layer_folder;
use super::kept::{adopt, keep, units_folder};
use super::layer::{ExpertInputs, LayerWork};
use super::progress::{Observer, proceed};
use crate::checkpoint::names::{Projection, expert_module};
use crate::choose::allocation::{Measured, allocate, assumed_losses, by_count, gain_of};
use crate::choose::fixed_point::Contexts;
use crate::choose::probes::{ExpertProbe, Known, Measurement, encodes_of_an_expert, probe_expert};
use crate::config::choices::AllocationRule;
use crate::error::{Result, refuse};
use crate::store::atomic::{create_dir_durably, write_json_atomic};
use crate::store::canonical_json::{canonical_hash, float17, parse_float17};
use crate::store::hash::Hash;
use crate::store::json_diff::{Difference, first_difference};

/// `layer-NNN/probe-iter-NN.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProbeLedger {
    /// The layer.
    pub layer: usize,
    /// Fixed-point iteration.
    pub iteration: u32,
    /// SHA-256 of the recipe.
    pub recipe_sha256: Hash,
    /// SHA-256 of the input state's manifest.
    pub state_sha256: Hash,
    /// SHA-256 of `capture.json`.
    pub capture_sha256: Hash,
    /// SHA-256 of the source inventory.
    pub source_inventory_sha256: Hash,
    /// SHA-256 of the context map.
    pub context_sha256: Hash,
    /// Candidate bits.
    pub candidates: Vec<u32>,
    /// Every expert of the layer, ascending.
    pub experts: Vec<ProbedExpert>,
}

/// One expert's inputs and measurements.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProbedExpert {
    /// What was measured on.
    pub inputs: ExpertInputs,
    /// What was measured.
    pub probe: ExpertProbe,
}

impl ProbeLedger {
    /// Holds the ledger against the work it claims to measure: it must be the complete ledger of this layer, iteration,
    /// recipe, state, capture, source and map of contexts, with a finite loss for every tensor at every candidate width.
    ///
    /// # Errors
    /// Names file and field of the first value that is not what it has to be, such as
    /// `experts[3].inputs.fit_row_ids_sha256`.
    pub fn check(&self, work: &LayerWork<'_>, iteration: u32, contexts: &Contexts) -> Result<()> {
        match self.fault(work, iteration, contexts)? {
            None => Ok(()),
            Some(Difference { path, found, wanted }) => {
                refuse(format!("the probe ledger cannot be allocated from: this is {found}"))
                    .file(work.work.join(ledger_path(work.layer, iteration)))
                    .layer(work.layer)
                    .field(path)
                    .wanted(wanted)
                    .err()
            }
        }
    }

    fn fault(&self, work: &LayerWork<'_>, iteration: u32, contexts: &Contexts) -> Result<Option<Difference>> {
        // Taken apart without `..`: a field added to the ledger has to be bound here too.
        let Self {
            layer,
            iteration: round,
            recipe_sha256,
            state_sha256,
            capture_sha256,
            source_inventory_sha256,
            context_sha256,
            candidates,
            experts,
        } = self;
        let header = [
            ("layer", layer.to_string(), work.layer.to_string()),
            ("iteration", round.to_string(), iteration.to_string()),
            ("recipe_sha256", recipe_sha256.clone(), work.recipe_sha256.clone()),
            ("state_sha256", state_sha256.clone(), work.capture.record.state_sha256.clone()),
            ("capture_sha256", capture_sha256.clone(), work.capture.sha256.clone()),
            ("source_inventory_sha256", source_inventory_sha256.clone(), work.inventory_sha256.clone()),
            ("context_sha256", context_sha256.clone(), canonical_hash(contexts)?),
            ("candidates", format!("{candidates:?}"), format!("{:?}", work.recipe.candidate_bits)),
        ];
        if let Some((field, found, wanted)) = header.into_iter().find(|(_, found, wanted)| found != wanted) {
            return Ok(Some(Difference::new(field, found, wanted)));
        }
        // Order before number: a missing expert shows as the one after it in its place.
        for (id, entry) in experts.iter().enumerate().take(contexts.len()) {
            if let Some(fault) = entry.fault(work, id, contexts[id])? {
                return Ok(Some(fault));
            }
        }
        let (found, wanted) = (experts.len(), contexts.len());
        Ok((found != wanted)
            .then(|| Difference::new("experts", format!("{found} experts"), format!("{wanted} experts"))))
    }
}

impl ProbedExpert {
    fn fault(&self, work: &LayerWork<'_>, id: usize, context: [u32; 3]) -> Result<Option<Difference>> {
        let at = |field: &str| format!("experts[{id}].{field}");
        if self.probe.expert != id {
            return Ok(Some(Difference::new(at("probe.expert"), self.probe.expert, id)));
        }
        let json = |inputs: &ExpertInputs| -> Result<Value> {
            Ok(serde_json::to_value(inputs).map_err(|error| refuse(format!("inputs as JSON: {error}")))?)
        };
        if let Some(fault) = first_difference(&json(&self.inputs)?, &json(&work.inputs(id)?)?, &at("inputs"))
        {
            return Ok(Some(fault));
        }
        if self.probe.context != context {
            let (found, wanted) = (format!("{:?}", self.probe.context), format!("{context:?}"));
            return Ok(Some(Difference::new(at("probe.context"), found, wanted)));
        }
        Ok(measurement_fault(&self.probe, &work.recipe.candidate_bits, &at("probe.tensors")))
    }
}

/// What is wrong with an expert's measurements, `path` being where they stand: every tensor at every width and no other, losses finite and not negative, scales positive, and one loss of the
/// context: it is measured once and stands with all three tensors.
pub fn measurement_fault(probe: &ExpertProbe, candidates: &[u32], path: &str) -> Option<Difference> {
    let outline = |widths: &mut dyn Iterator<Item = String>| -> Value {
        widths.map(|bits| (bits, Value::from("a measurement"))).collect()
    };
    let found: Value = probe
        .tensors
        .iter()
        .map(|(module, widths)| (module.clone(), outline(&mut widths.keys().cloned())))
        .collect();
    let wanted: Value = Projection::ALL
        .iter()
        .map(|role| (role.as_str().to_owned(), outline(&mut candidates.iter().map(u32::to_string))))
        .collect();
    if let Some(fault) = first_difference(&found, &wanted, path) {
        return Some(fault);
    }
    for (module, widths) in &probe.tensors {
        for (bits, measurement) in widths {
            let Measurement { loss, scale, .. } = measurement;
            for (field, text, least) in [("loss", loss, 0.0), ("scale", scale, f64::MIN_POSITIVE)] {
                if !parse_float17(text).is_ok_and(|value| value >= least) {
                    let path = format!("{path}.{module}.{bits}.{field}");
                    return Some(Difference::new(path, format!("{text:?}"), format!("a finite {field}")));
                }
            }
        }
    }
    let in_context = |role: Projection| {
        let bits = probe.context[role as usize].to_string();
        (&probe.tensors[role.as_str()][&bits].loss, format!("{path}.{}.{bits}.loss", role.as_str()))
    };
    let (loss, _) = in_context(Projection::Gate);
    [Projection::Up, Projection::Down].into_iter().map(in_context).find_map(|(found, path)| {
        (found != loss).then(|| {
            Difference::new(path, found, format!("{loss}, the loss of the context as gate_proj has it"))
        })
    })
}

/// `layer-NNN/allocation-iter-NN.json`: the integer proof of the layer's bits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllocationRecord {
    /// The layer.
    pub layer: usize,
    /// Fixed-point iteration.
    pub iteration: u32,
    /// SHA-256 of the probe ledger; absent where bits are fixed by the recipe.
    pub probe_sha256: Option<Hash>,
    /// Every tensor has at least these bits.
    pub floor_bits: u32,
    /// Tensors of the layer.
    pub tensors: u64,
    /// One-bit upgrades spent.
    pub upgrades: u64,
    /// Sum of all tensors' bits.
    pub bit_units: u64,
    /// Target as a fraction.
    pub target: String,
    /// How many tensors have how many bits.
    pub histogram: BTreeMap<u32, u64>,
    /// Bits by module.
    pub bit_map: BTreeMap<String, u32>,
    /// Routing mass by expert, units of 2^-149.
    pub mass_units: Vec<String>,
    /// SHA-256 of the canonical array of masses.
    pub mass_sha256: Hash,
    /// Gain over the floor in measured loss, an integer in units of 2^-(149 + loss_exponent).
    pub gain: String,
    /// See `gain`.
    pub loss_exponent: u32,
}

impl AllocationRecord {
    /// Bits of every expert: the contexts of the next round of probes.
    ///
    /// # Errors
    /// A module the map lacks.
    pub fn contexts(&self) -> Result<Contexts> {
        (0..self.tensors as usize / Projection::ALL.len()).map(|expert| self.bits(expert)).collect()
    }

    /// Bits of gate, up and down of an expert.
    ///
    /// # Errors
    /// A module the map lacks.
    pub fn bits(&self, expert: usize) -> Result<[u32; 3]> {
        let mut bits = [0; 3];
        for role in Projection::ALL {
            let module = expert_module(self.layer, expert, role);
            match self.bit_map.get(&module) {
                Some(found) => bits[role as usize] = *found,
                None => return refuse("the allocation has no bits for the module").tensor(module).err(),
            }
        }
        Ok(bits)
    }
}

/// `layer-NNN/probe-iter-NN.json`, relative to the work directory.
pub fn ledger_path(layer: usize, iteration: u32) -> PathBuf {
    layer_folder(layer).join(format!("probe-iter-{iteration:02}.json"))
}

/// `layer-NNN/allocation-iter-NN.json`, relative to the work directory.
pub fn allocation_path(layer: usize, iteration: u32) -> PathBuf {
    layer_folder(layer).join(format!("allocation-iter-{iteration:02}.json"))
}

/// Probes every expert in its context and publishes the ledger. Experts whose context is that of the `previous` ledger
/// keep their measurements; those an interrupted run finished are adopted. The units stay until the ledger is sealed.
///
/// # Errors
/// Names layer, expert and tensor of what cannot be measured.
pub fn probe_layer(
    work: &LayerWork<'_>,
    iteration: u32,
    contexts: &Contexts,
    previous: Option<&ProbeLedger>,
    observer: &dyn Observer,
) -> Result<(ProbeLedger, Hash)> {
    let candidates = &work.recipe.candidate_bits;
    let encodes = encodes_of_an_expert(candidates.len());
    let folder = work.work.join(units_folder(&ledger_path(work.layer, iteration)));
    create_dir_durably(&folder)?;
    let known = |id: usize| {
        let entry = previous.and_then(|ledger| ledger.experts.get(id))?;
        (entry.probe.context == contexts[id]).then(|| entry.clone())
    };
    let changed = (0..contexts.len()).filter(|&id| known(id).is_none()).count();
    observer.begin("probe", Some(work.layer), (changed * encodes) as u64);
    let probed = contexts
        .par_iter()
        .enumerate()
        .map(|(id, &context)| {
            if let Some(known) = known(id) {
                return Ok(known);
            }
            let path = folder.join(format!("expert-{id:03}.json"));
            // Settled by the search or in the first round, kept in all others.
            let damping = match previous {
                Some(ledger) => Some(ledger.experts[id].probe.damping()?),
                None => work.damping(id),
            };
            let scales = previous.map(|ledger| &ledger.experts[id].probe);
            let known = damping.map(|damping| damping.map(float17));
            let parameters = serde_json::json!({
                "context": context,
                "candidates": candidates,
                "down_damping": known,
                "earlier_round": scales.map(canonical_hash).transpose()?,
            });
            let inputs = work.inputs(id)?;
            let job = work.job_sha256("probe", &inputs, &parameters)?;
            if let Some(probed) = adopt(&path, &job)? {
                (0..encodes).for_each(|_| observer.advance(&format!("expert {id} (adopted)")));
                return Ok(probed);
            }
            proceed(observer)?;
            let expert = work.expert(id)?;
            let done = || observer.advance(&format!("expert {id}"));
            let probe =
                probe_expert(work.codec, &expert, candidates, context, &Known { damping, scales }, done)?;
            let probed = ProbedExpert { inputs, probe };
            keep(&path, &job, &probed)?;
            Ok(probed)
        })
        .collect::<Result<Vec<_>>>()?;
    observer.end();
    let ledger = ProbeLedger {
        layer: work.layer,
        iteration,
        recipe_sha256: work.recipe_sha256.clone(),
        state_sha256: work.capture.record.state_sha256.clone(),
        capture_sha256: work.capture.sha256.clone(),
        source_inventory_sha256: work.inventory_sha256.clone(),
        context_sha256: canonical_hash(contexts)?,
        candidates: candidates.clone(),
        experts: probed,
    };
    let sha256 = write_json_atomic(work.work.join(ledger_path(work.layer, iteration)), &ledger)?;
    Ok((ledger, sha256))
}

/// Solves the layer's bits by the recipe's rule from the ledger of probes in `contexts` (or takes the recipe's fixed bits) and publishes the
/// proof.
///
/// # Errors
/// A ledger that is missing, incomplete or of other work (see [`ProbeLedger::check`]), a target that cannot be met exactly.
pub fn allocate_layer(
    work: &LayerWork<'_>,
    iteration: u32,
    contexts: &Contexts,
    ledger: Option<(&ProbeLedger, &Hash)>,
) -> Result<(AllocationRecord, Hash)> {
    let (layer, recipe) = (work.layer, work.recipe);
    let experts = work.geometry.n_routed_experts;
    let tensors = (experts * Projection::ALL.len()) as u64;
    let budget = recipe.upgrades(tensors)?;
    let (upgrades, gain, loss_exponent) = match (recipe.fixed_bits, ledger) {
        (Some(_), _) => (vec![0; tensors as usize], "0".to_owned(), 0),
        (None, Some((ledger, _))) => {
            ledger.check(work, iteration, contexts)?;
            spend(work, ledger, budget as usize)?
        }
        (None, None) => {
            return refuse("there is no probe ledger to allocate from")
                .file(work.work.join(ledger_path(layer, iteration)))
                .layer(layer)
                .wanted("a probed layer, or bits fixed by the recipe")
                .err();
        }
    };
    let mut bit_map = BTreeMap::new();
    let mut histogram = BTreeMap::new();
    for (index, &extra) in upgrades.iter().enumerate() {
        let bits = recipe.floor_bits + extra;
        bit_map.insert(expert_module(layer, index / 3, Projection::ALL[index % 3]), bits);
        *histogram.entry(bits).or_insert(0) += 1;
    }
    let bit_units: u64 = bit_map.values().map(|&bits| u64::from(bits)).sum();
    if bit_units * recipe.target.denominator != tensors * recipe.target.numerator {
        return Err(refuse(format!("{bit_units} bits over {tensors} tensors are not {}", recipe.target))
            .layer(layer)
            .check());
    }
    let mass_units = work.capture.record.mass_units.clone();
    let record = AllocationRecord {
        layer,
        iteration,
        probe_sha256: ledger.map(|(_, sha256)| sha256.clone()),
        floor_bits: recipe.floor_bits,
        tensors,
        upgrades: budget,
        bit_units,
        target: recipe.target.to_string(),
        histogram,
        bit_map,
        mass_sha256: canonical_hash(&mass_units)?,
        mass_units,
        gain,
        loss_exponent,
    };
    let sha256 = write_json_atomic(work.work.join(allocation_path(layer, iteration)), &record)?;
    Ok((record, sha256))
}

/// Upgrades in canonical order by the recipe's rule, their gain in *measured* loss, and the exponent of its unit.
fn spend(work: &LayerWork<'_>, ledger: &ProbeLedger, budget: usize) -> Result<(Vec<u32>, String, u32)> {
    let candidates = &work.recipe.candidate_bits;
    let mut measured = Vec::with_capacity(ledger.experts.len() * Projection::ALL.len());
    for entry in &ledger.experts {
        let mass = &work.capture.mass.units[entry.probe.expert];
        for role in Projection::ALL {
            let losses = entry.probe.losses(role, candidates)?;
            measured.push(Measured { mass: mass.clone(), losses });
        }
    }
    let upgrades = match work.recipe.allocation {
        AllocationRule::Measured => {
            let solved = allocate(&measured, budget)?;
            return Ok((solved.upgrades, solved.gain.to_string(), solved.loss_exponent));
        }
        AllocationRule::Assumed => {
            let mut assumed = Vec::with_capacity(measured.len());
            for id in 0..ledger.experts.len() {
                for matrix in &work.expert(id)?.weights.matrices {
                    let energy = matrix.data.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>();
                    let mass = work.capture.mass.units[id].clone();
                    assumed.push(Measured { mass, losses: assumed_losses(energy, candidates) });
                }
            }
            allocate(&assumed, budget)?.upgrades
        }
        AllocationRule::Count => by_count(&work.capture.record.routed_rows, budget, candidates.len() - 1)?,
    };
    let (gain, exponent) = gain_of(&measured, &upgrades);
    Ok((upgrades, gain.to_string(), exponent))
}
