//! Everything between a captured layer and its finished experts: rows of cold experts, search, probes and allocation to a fixed
//! point, final encode. The walk and the studies ([`crate::study`]) come through here, so that what a study
//! measures is what a walk does.

use std::path::PathBuf;
use std::time::Instant;

use super::finals::{FinalLayer, encode_layer, summary_path};
use super::journal::Journal;
use super::layer::{LayerWork, cold_audit_path};
use super::probing::{
    AllocationRecord, Contexts, ProbeLedger, allocate_layer, allocation_path, ledger_path, probe_layer,
};
use super::progress::{Observer, Stopwatch};
use super::search::{SearchRecord, search_layer, search_path};
use crate::error::{Result, refuse};
use crate::store::hash::Hash;
use crate::store::strict_json::read_json;

/// A layer whose experts are finished.
#[derive(Debug, Clone)]
pub struct EncodedLayer {
    /// The last round of probes; none where the recipe fixes the bits.
    pub ledger: Option<ProbeLedger>,
    /// The bits.
    pub allocation: AllocationRecord,
    /// SHA-256 of the allocation's record.
    pub allocation_sha256: Hash,
    /// The finished experts.
    pub summary: FinalLayer,
    /// SHA-256 of `final-experts.json`.
    pub summary_sha256: Hash,
}

/// A layer's bits and what they were chosen from.
struct Chosen {
    ledger: Option<ProbeLedger>,
    allocation: AllocationRecord,
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
    let cold_sha256 = work.write_cold_audit()?;
    if journal.sealed(&stage("cold-experts")).is_none() {
        let inputs = [("capture", work.capture.sha256.clone())];
        journal.seal(&stage("cold-experts"), inputs, [(cold_audit_path(layer), cold_sha256)])?;
    }

    if work.recipe.search {
        let started = Instant::now();
        let record = search(journal, work, observer)?;
        work.adopt(&record)?;
        clock.count("search", started);
    }

    let Chosen { ledger, allocation, allocation_sha256 } = choose_bits(journal, clock, work, observer)?;

    let started = Instant::now();
    let bits = (&allocation, &allocation_sha256);
    let (summary, summary_sha256) = encode_layer(work, ledger.as_ref(), bits, observer)?;
    if journal.sealed(&stage("final-experts")).is_none() {
        let inputs = [("allocation", allocation_sha256.clone())];
        let output = (summary_path(layer), summary_sha256.clone());
        journal.seal(&stage("final-experts"), inputs, [output])?;
    }
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
    let (mut ledger, mut seen) = (None, Vec::<Contexts>::new());
    let candidates = &recipe.candidate_bits;
    let mut contexts = vec![[candidates[candidates.len() / 2]; 3]; work.geometry.n_routed_experts];
    for iteration in 0..recipe.fixed_point_iterations {
        let started = Instant::now();
        let probed = if recipe.fixed_bits.is_some() {
            None
        } else {
            Some(probe(journal, work, iteration, &contexts, ledger.as_ref(), observer)?)
        };
        clock.count("probe", started);
        let started = Instant::now();
        let ledger_of = probed.as_ref().map(|(ledger, sha256)| (ledger, sha256));
        let (allocation, allocation_sha256) = allocate_layer(work, iteration, &contexts, ledger_of)?;
        let stage = format!("layer-{layer:03}/allocation-iter-{iteration:02}");
        if journal.sealed(&stage).is_none() {
            let mut inputs = vec![("capture", work.capture.sha256.clone())];
            inputs.extend(probed.as_ref().map(|(_, sha256)| ("probe", sha256.clone())));
            let output = (allocation_path(layer, iteration), allocation_sha256.clone());
            journal.seal(&stage, inputs, [output])?;
        }
        clock.count("allocation", started);
        let chosen = allocation.contexts()?;
        let once = recipe.fixed_bits.is_some() || recipe.fixed_point_iterations == 1;
        if once || chosen == contexts {
            let ledger = probed.map(|(ledger, _)| ledger);
            return Ok(Chosen { ledger, allocation, allocation_sha256 });
        }
        if seen.contains(&chosen) {
            return Err(refuse(format!(
                "the fixed point cycles: iteration {iteration} chose a map seen before"
            ))
            .layer(layer)
            .field("fixed_point_iterations")
            .wanted("a map of bits that repeats")
            .check());
        }
        seen.push(std::mem::replace(&mut contexts, chosen));
        ledger = probed.map(|(ledger, _)| ledger);
    }
    Err(refuse(format!("no fixed point within {} iterations", recipe.fixed_point_iterations))
        .layer(layer)
        .field("fixed_point_iterations")
        .wanted("more iterations, or 1 to allocate once")
        .check())
}

/// The sealed search of a layer, made now unless it is sealed already.
fn search(journal: &mut Journal, work: &LayerWork<'_>, observer: &dyn Observer) -> Result<SearchRecord> {
    let (stage, path) = (format!("layer-{:03}/search", work.layer), search_path(work.layer));
    if journal.sealed(&stage).is_some() {
        return read_json(work.work.join(&path));
    }
    let (record, sha256) = search_layer(work, observer)?;
    journal.seal(&stage, [("capture", work.capture.sha256.clone())], [(path, sha256)])?;
    Ok(record)
}

/// The sealed probe ledger of an iteration, measured now unless it is sealed already.
fn probe(
    journal: &mut Journal,
    work: &LayerWork<'_>,
    iteration: u32,
    contexts: &Contexts,
    previous: Option<&ProbeLedger>,
    observer: &dyn Observer,
) -> Result<(ProbeLedger, Hash)> {
    let stage = format!("layer-{:03}/probe-iter-{iteration:02}", work.layer);
    let path: PathBuf = ledger_path(work.layer, iteration);
    if journal.sealed(&stage).is_some() {
        return Ok((read_json(work.work.join(&path))?, journal.output(&stage, &path)?));
    }
    let (ledger, sha256) = probe_layer(work, iteration, contexts, previous, observer)?;
    let inputs = [("capture", work.capture.sha256.clone())];
    journal.seal(&stage, inputs, [(path, sha256.clone())])?;
    Ok((ledger, sha256))
}
