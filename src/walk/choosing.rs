//! Everything between a captured layer and its finished experts: rows of cold experts, search, probes and allocation to a fixed
//! point, final encode. The walk and the studies ([`crate::study`]) come through here, so that what a study
//! measures is what a walk does.

use std::path::PathBuf;
use std::time::Instant;

use super::finals::{EncodedExperts, FinalLayer, encode_layer, summary_path};
use super::journal::Journal;
use super::kept::drop_units;
use super::layer::{LayerWork, cold_audit_path};
use super::probing::{ProbeLedger, allocate_layer, allocation_path, ledger_path, probe_layer};
use super::progress::{Observer, Stopwatch};
use super::rates::{Allocation, Ledger};
use super::rungs::{ROUND, RungLedger, allocate_rungs, knobs, probe_layer_rungs};
use super::search::{SearchRecord, search_layer, search_path};
use crate::choose::fixed_point::{Contexts, FixedPoint, Step};
use crate::config::choices::CodecName;
use crate::error::Result;
use crate::store::hash::Hash;
use crate::store::strict_json::read_json;

/// A layer whose experts are finished.
#[derive(Debug, Clone)]
pub struct EncodedLayer {
    /// The last round of probes; none where the recipe fixes bits or setting.
    pub ledger: Option<Ledger>,
    /// The bits or rungs.
    pub allocation: Allocation,
    /// SHA-256 of the allocation's record.
    pub allocation_sha256: Hash,
    /// The finished experts.
    pub summary: FinalLayer,
    /// SHA-256 of `final-experts.json`.
    pub summary_sha256: Hash,
}

/// A layer's bits or rungs and what they were chosen from.
struct Chosen {
    ledger: Option<Ledger>,
    allocation: Allocation,
    allocation_sha256: Hash,
}

/// All choosing and encoding stages of a captured layer, each sealed in `journal` before the next begins; those sealed
/// already are taken as they are. What is chosen about vectors and orders is put into `work`.
///
/// # Errors
/// Whatever a stage refuses; what was sealed before stays sealed.
pub fn encode_captured(
    journal: &mut Journal,
    clock: &mut Stopwatch,
    work: &mut LayerWork<'_>,
    observer: &dyn Observer,
) -> Result<EncodedLayer> {
    let layer = work.layer;
    let stage = |name: &str| format!("layer-{layer:03}/{name}");
    let capture = ("capture", work.capture.sha256.clone());
    if journal.sealed(&stage("cold-experts")).is_none() {
        let output = (cold_audit_path(layer), work.write_cold_audit()?);
        journal.seal(&stage("cold-experts"), [capture], [output])?;
    }

    if work.recipe.search {
        let started = Instant::now();
        let (record, sha256) = search(journal, work, observer)?;
        work.adopt(&record, sha256)?;
        clock.count("search", started);
    }

    let Chosen { ledger, allocation, allocation_sha256 } = match work.recipe.codec {
        CodecName::Trellis => choose_bits(journal, clock, work, observer)?,
        CodecName::Kaiju1 => choose_rungs(journal, clock, work, observer)?,
    };

    let started = Instant::now();
    let sealed = journal.sealed(&stage("final-experts")).is_some();
    let bits = (&allocation, &allocation_sha256);
    let (summary, summary_sha256) = if sealed {
        let path = summary_path(layer);
        (read_json(work.work.join(&path))?, journal.output(&stage("final-experts"), &path)?)
    } else {
        let EncodedExperts { summary, sha256, files } = encode_layer(work, ledger.as_ref(), bits, observer)?;
        let mut inputs = vec![("allocation", allocation_sha256.clone())];
        inputs.extend(work.search_sha256().map(|sha256| ("search", sha256.clone())));
        journal.seal(&stage("final-experts"), inputs, files)?;
        (summary, sha256)
    };
    clock.count("final encode", started);
    Ok(EncodedLayer { ledger, allocation, allocation_sha256, summary, summary_sha256 })
}

/// Probes and allocates until the map of bits repeats (or once, where the recipe says one iteration).
///
/// # Errors
/// A map seen before the last one (a cycle), or none that repeats within the recipe's iterations: fails closed.
fn choose_bits(
    journal: &mut Journal,
    clock: &mut Stopwatch,
    work: &LayerWork<'_>,
    observer: &dyn Observer,
) -> Result<Chosen> {
    let (layer, recipe) = (work.layer, work.recipe);
    let candidates = &recipe.candidate_bits;
    let mut contexts = vec![[candidates[candidates.len() / 2]; 3]; work.geometry.n_routed_experts];
    let cap = if recipe.fixed_bits.is_some() { 1 } else { recipe.fixed_point_iterations };
    let mut fixed_point = FixedPoint::new(layer, cap, contexts.clone());
    let mut ledger: Option<ProbeLedger> = None;
    let mut before: Option<Hash> = None;
    for iteration in 0.. {
        let started = Instant::now();
        let probed = if recipe.fixed_bits.is_some() {
            None
        } else {
            let earlier = (ledger.as_ref(), before.as_ref());
            Some(probe(journal, work, iteration, &contexts, earlier, observer)?)
        };
        clock.count("probe", started);
        let started = Instant::now();
        let ledger_of = probed.as_ref().map(|(ledger, sha256)| (ledger, sha256));
        let stage = format!("layer-{layer:03}/allocation-iter-{iteration:02}");
        let sealed = journal.sealed(&stage).is_some();
        let (allocation, allocation_sha256) = if sealed {
            let path = allocation_path(layer, iteration);
            (read_json(work.work.join(&path))?, journal.output(&stage, &path)?)
        } else {
            allocate_layer(work, iteration, &contexts, ledger_of)?
        };
        if !sealed {
            let mut inputs = vec![("capture", work.capture.sha256.clone())];
            inputs.extend(probed.as_ref().map(|(_, sha256)| ("probe", sha256.clone())));
            let output = (allocation_path(layer, iteration), allocation_sha256.clone());
            journal.seal(&stage, inputs, [output])?;
        }
        clock.count("allocation", started);
        ledger = probed.map(|(ledger, _)| ledger);
        before = Some(allocation_sha256.clone());
        match fixed_point.step(allocation.contexts()?)? {
            Step::Settled => {
                let (ledger, allocation) = (ledger.map(Ledger::Bits), Allocation::Bits(allocation));
                return Ok(Chosen { ledger, allocation, allocation_sha256 });
            }
            Step::Again(chosen) => contexts = chosen,
        }
    }
    unreachable!("the fixed point settles or fails within its cap")
}

/// Probes whole experts at the recipe's rungs and chooses one each, or takes the recipe's one setting.
fn choose_rungs(
    journal: &mut Journal,
    clock: &mut Stopwatch,
    work: &LayerWork<'_>,
    observer: &dyn Observer,
) -> Result<Chosen> {
    let capture = ("capture", work.capture.sha256.clone());
    let started = Instant::now();
    let probed = match knobs(work.recipe)?.rungs.is_empty() {
        true => None,
        false => {
            let (stage, path) =
                (format!("layer-{:03}/probe-iter-{ROUND:02}", work.layer), ledger_path(work.layer, ROUND));
            if journal.sealed(&stage).is_none() {
                let (_, sha256) = probe_layer_rungs(work, observer)?;
                journal.seal(&stage, [capture.clone()], [(path.clone(), sha256)])?;
            }
            drop_units(work.work, &path)?;
            let ledger: RungLedger = read_json(work.work.join(&path))?;
            Some((ledger, journal.output(&stage, &path)?))
        }
    };
    clock.count("probe", started);
    let started = Instant::now();
    let stage = format!("layer-{:03}/allocation-iter-{ROUND:02}", work.layer);
    let path = allocation_path(work.layer, ROUND);
    let (allocation, allocation_sha256) = match journal.sealed(&stage) {
        Some(_) => {
            let allocation = Allocation::read(work.work, work.recipe.codec, work.layer, ROUND)?;
            (allocation, journal.output(&stage, &path)?)
        }
        None => {
            let ledger = probed.as_ref().map(|(ledger, sha256)| (ledger, sha256));
            let (record, sha256) = allocate_rungs(work, ledger)?;
            let mut inputs = vec![capture];
            inputs.extend(probed.as_ref().map(|(_, sha256)| ("probe", sha256.clone())));
            journal.seal(&stage, inputs, [(path, sha256.clone())])?;
            (Allocation::Rungs(record), sha256)
        }
    };
    clock.count("allocation", started);
    let ledger = probed.map(|(ledger, _)| Ledger::Rungs(ledger));
    Ok(Chosen { ledger, allocation, allocation_sha256 })
}

/// The sealed search of a layer, made now unless it is sealed already.
fn search(
    journal: &mut Journal,
    work: &LayerWork<'_>,
    observer: &dyn Observer,
) -> Result<(SearchRecord, Hash)> {
    let (stage, path) = (format!("layer-{:03}/search", work.layer), search_path(work.layer));
    if journal.sealed(&stage).is_some() {
        drop_units(work.work, &path)?;
        return Ok((read_json(work.work.join(&path))?, journal.output(&stage, &path)?));
    }
    let (record, sha256) = search_layer(work, observer)?;
    let output = (path.clone(), sha256.clone());
    journal.seal(&stage, [("capture", work.capture.sha256.clone())], [output])?;
    drop_units(work.work, &path)?;
    Ok((record, sha256))
}

/// The sealed probe ledger of an iteration, measured now unless it is sealed already; `allocated` is what the round before
/// ended with.
fn probe(
    journal: &mut Journal,
    work: &LayerWork<'_>,
    iteration: u32,
    contexts: &Contexts,
    (previous, allocated): (Option<&ProbeLedger>, Option<&Hash>),
    observer: &dyn Observer,
) -> Result<(ProbeLedger, Hash)> {
    let stage = format!("layer-{:03}/probe-iter-{iteration:02}", work.layer);
    let path: PathBuf = ledger_path(work.layer, iteration);
    if journal.sealed(&stage).is_some() {
        drop_units(work.work, &path)?;
        return Ok((read_json(work.work.join(&path))?, journal.output(&stage, &path)?));
    }
    let (ledger, sha256) = probe_layer(work, iteration, contexts, previous, observer)?;
    let mut inputs = vec![("capture", work.capture.sha256.clone())];
    inputs.extend(work.search_sha256().map(|sha256| ("search", sha256.clone())));
    inputs.extend(allocated.map(|sha256| ("allocation", sha256.clone())));
    journal.seal(&stage, inputs, [(path.clone(), sha256.clone())])?;
    drop_units(work.work, &path)?;
    Ok((ledger, sha256))
}
