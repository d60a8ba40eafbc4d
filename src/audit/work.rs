//! The audit of a work directory: the journal and its files first, then every gate on what they say.

use std::path::Path;

use super::findings::Findings;
use super::inputs::audit_inputs;
use super::layer::audit_layer;
use super::{AuditOptions, shard};
use crate::checkpoint::finished::{finished_folder, finished_path};
use crate::checkpoint::inventory::{InventoryFile, Role};
use crate::config::{Geometry, Recipe};
use crate::corpus::CorpusPlan;
use crate::error::{Result, refuse};
use crate::store::hash::Hash;
use crate::store::lock::WorkLock;
use crate::store::strict_json::{StrictValue, read_json};
use crate::walk::driver::{COMPLETE_FILE, CORPUS_FILE};
use crate::walk::journal::JournalRecord;
use crate::walk::open::{CONFIG_FILE, RECIPE_FILE, inventory_file};
use crate::walk::progress::{Observer, advance};
use crate::walk::sealed_files;
use crate::walk::state::{manifest_path, state_folder};
use crate::walk::tolerance::{
    INSTALL_MAX_ABS, INSTALL_RELATIVE_L2, INTERACTION_ABSOLUTE, INTERACTION_RELATIVE, Tolerance,
};

/// What a walk sealed of its inputs.
pub struct Evidence<'a> {
    /// The work directory.
    pub work: &'a Path,
    /// Its journal.
    pub journal: &'a JournalRecord,
    /// The model's geometry.
    pub geometry: Geometry,
    /// The recipe.
    pub recipe: Recipe,
    /// The corpus.
    pub corpus: CorpusPlan,
    /// The source's inventory.
    pub source: InventoryFile,
    /// The carrier's.
    pub carrier: InventoryFile,
}

impl Evidence<'_> {
    /// The sealed hash of an output of a stage.
    pub fn sealed(&self, stage: &str, path: &Path) -> Option<&Hash> {
        self.journal.output(stage, path)
    }

    /// A field of the walk's identity.
    pub fn identity(&self, field: &str) -> &str {
        self.journal.identity.get(field).map_or("", String::as_str)
    }
}

/// Audits a work directory; says whether its walk is finished.
///
/// # Errors
/// A directory that a walk is at work in, or that cannot be read at all.
pub fn audit_work(
    work: &Path,
    options: &AuditOptions,
    findings: &mut Findings,
    observer: &dyn Observer,
) -> Result<bool> {
    if findings.hold(0, sealed_files::refuse_foreign(work)).is_none() {
        skip_all(findings, "gate 0 failed: what lies there is not followed");
        return Ok(false);
    }
    let _lock = WorkLock::share(work)?;
    let Some(journal) = findings.hold(0, JournalRecord::read(work)) else {
        skip_all(findings, "the journal does not hold together");
        return Ok(false);
    };
    let hashed = sealed_files::count(work, &journal);
    observer.begin("sealed files", None, hashed as u64);
    let faults = sealed_files::faults(work, &journal, &|file| advance(observer, file))?;
    observer.end();
    let broken = !faults.is_empty();
    findings.passed(0, hashed.saturating_sub(faults.len()));
    faults.into_iter().for_each(|fault| findings.fail(0, fault));
    let complete = journal.sealed("complete").is_some();
    if !complete && work.join(COMPLETE_FILE).exists() {
        findings.hold(0, completion(work, &journal));
    }
    let unsealed = sealed_files::unsealed(work, &journal)?;
    if complete {
        for name in unsealed {
            let foreign = refuse("no seal names this file")
                .file(work.join(name))
                .wanted("nothing but the walk's own files");
            findings.fail(0, foreign);
        }
    } else if !unsealed.is_empty() {
        let shown: Vec<&str> = unsealed.iter().take(3).map(String::as_str).collect();
        let more = if unsealed.len() > shown.len() { ", ..." } else { "" };
        findings.skip(0, format!("not sealed yet: {} files ({}{more})", unsealed.len(), shown.join(", ")));
    }
    if broken {
        skip_all(findings, "gate 0 failed: what follows would rest on changed files");
        return Ok(complete);
    }
    let Some(evidence) = findings.hold(0, evidence(work, &journal)) else {
        skip_all(findings, "the sealed inputs cannot be read");
        return Ok(complete);
    };
    identity(&evidence, findings);
    tolerances(&evidence.recipe, findings);
    audit_inputs(&evidence, options, findings, observer)?;
    states(&evidence, findings);
    for layer in evidence.geometry.moe_layers() {
        audit_layer(&evidence, layer, findings, observer)?;
        let emitted = format!("layer-{layer:03}/emit");
        if journal.sealed(&emitted).is_some() {
            let sizes = (evidence.geometry.hidden_size, evidence.geometry.moe_intermediate_size);
            let experts = evidence.geometry.n_routed_experts;
            let codec = evidence.recipe.codec;
            let folder = work.join(finished_folder(codec));
            shard::audit_layer(&folder, (layer, codec), Some((experts, sizes)), findings, observer)?;
        }
    }
    findings.skip(
        7,
        "nothing is assembled here: carried payloads and the index are audited in the directory that walk assemble makes",
    );
    findings.skip(9, "an audit runs no model: the walk's own report has its evaluation");
    Ok(complete)
}

/// A completion that no seal names was written by a walk that was stopped right then: it names the chain up to here.
fn completion(work: &Path, journal: &JournalRecord) -> Result<()> {
    let path = work.join(COMPLETE_FILE);
    let StrictValue(record) = read_json(&path)?;
    match record["journal_head_sha256"].as_str() == Some(&journal.head_sha256) {
        true => Ok(()),
        false => Err(refuse("it completes another journal: seals were dropped from this one")
            .file(path)
            .wanted(format!("journal_head_sha256 {}", journal.head_sha256))
            .check()),
    }
}

fn skip_all(findings: &mut Findings, why: &str) {
    (1..=9).for_each(|gate| findings.skip(gate, why));
}

fn evidence<'a>(work: &'a Path, journal: &'a JournalRecord) -> Result<Evidence<'a>> {
    let inventory = |role| InventoryFile::read_as(work.join(inventory_file(role)), role);
    Ok(Evidence {
        work,
        journal,
        geometry: Geometry::read(&work.join(CONFIG_FILE))?,
        recipe: Recipe::load(work.join(RECIPE_FILE))?,
        corpus: CorpusPlan::load(work.join(CORPUS_FILE))?,
        source: inventory(Role::Source)?,
        carrier: inventory(Role::Carrier)?,
    })
}

/// The sealed inputs are those the identity names.
fn identity(evidence: &Evidence<'_>, findings: &mut Findings) {
    let files = [
        ("recipe_sha256", RECIPE_FILE, evidence.recipe.identity_hash()),
        ("corpus_plan_sha256", CORPUS_FILE, evidence.corpus.hash()),
        (
            "source_inventory_sha256",
            inventory_file(Role::Source),
            Ok(evidence.source.inventory_sha256.clone()),
        ),
        (
            "carrier_inventory_sha256",
            inventory_file(Role::Carrier),
            Ok(evidence.carrier.inventory_sha256.clone()),
        ),
        ("config_sha256", CONFIG_FILE, crate::store::hash::sha256_file(evidence.work.join(CONFIG_FILE))),
    ];
    for (field, file, found) in files {
        if let Some(found) = findings.hold(0, found) {
            findings.same(0, &found, evidence.identity(field), || {
                refuse(format!("its hash is {found}")).file(evidence.work.join(file)).field(field)
            });
        }
    }
}

fn tolerances(recipe: &Recipe, findings: &mut Findings) {
    let (interaction, install) = (recipe.interaction_tolerance, recipe.install_tolerance);
    for (field, value, default) in [
        ("interaction_tolerance.relative", interaction.relative, INTERACTION_RELATIVE),
        ("interaction_tolerance.absolute", interaction.absolute, INTERACTION_ABSOLUTE),
        ("install_tolerance.max_abs", install.max_abs, INSTALL_MAX_ABS),
        ("install_tolerance.relative_l2", install.relative_l2, INSTALL_RELATIVE_L2),
    ] {
        findings.tolerance(field, Tolerance::new(value, default));
    }
}

/// Gate 5: each forward starts from the state sealed before it and from the experts sealed in it, and none lies beyond the
/// last MoE layer.
fn states(evidence: &Evidence<'_>, findings: &mut Findings) {
    let (journal, geometry) = (evidence.journal, &evidence.geometry);
    let layers = geometry.num_hidden_layers;
    let mut before = evidence.sealed("embed", &manifest_path(0)).cloned();
    for layer in 0..layers {
        let folder = format!("layer-{layer:03}");
        let forward = journal.sealed(&format!("{folder}/forward"));
        if layer + 1 == layers {
            let beyond = forward.is_some() || evidence.work.join(state_folder(layers)).exists();
            let check = match beyond {
                false => Ok(()),
                true => Err(refuse("the last layer was forwarded")
                    .layer(layer)
                    .wanted("a walk that ends before it")
                    .check()),
            };
            findings.hold(5, check);
            break;
        }
        let Some(forward) = forward else {
            findings.skip(5, format!("layer {layer} is not forwarded yet"));
            break;
        };
        let installed = geometry.is_moe(layer).then(|| {
            let path = finished_path(evidence.recipe.codec, layer, "json");
            evidence.sealed(&format!("{folder}/emit"), &path).cloned()
        });
        for (name, wanted) in [("state", before.clone()), ("installed", installed.flatten())] {
            let (found, wanted) = (forward.inputs.get(name).cloned(), wanted);
            if found.is_none() && wanted.is_none() {
                continue;
            }
            let show = |hash: &Option<Hash>| hash.clone().unwrap_or_else(|| "nothing".to_owned());
            findings.same(5, &show(&found), &show(&wanted), || {
                refuse(format!("the forward started from {}", show(&found))).layer(layer).field(name)
            });
        }
        before = evidence.sealed(&format!("{folder}/forward"), &manifest_path(layer + 1)).cloned();
    }
}
