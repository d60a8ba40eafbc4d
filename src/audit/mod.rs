//! The acceptance gates of a walk, checked again from what it left behind.
//!
//! Nothing is taken from a walk's word where the evidence is at hand: files are hashed against the journal, masses summed
//! again from the routing, allocations solved again from the probes, every module decoded again from its shard. Gates 1 to
//! 9 are those of the owner's Round 7 record ("Acceptance gates for the eventual owner run"); gate 0 is the journal itself.
//! A check that cannot be made, because a layer is not finished or a checkpoint is not at hand, is counted as not run and
//! never as passed.

mod complete;
pub mod findings;
mod inputs;
mod kaiju1;
mod layer;
mod shard;
mod work;

use std::path::{Path, PathBuf};

pub use findings::{AuditReport, GateReport, ToleranceLine, Verdict};

use crate::checkpoint::complete::MANIFEST_FILE;
use crate::error::{Result, refuse};
use crate::walk::journal::JOURNAL_FILE;
use crate::walk::progress::Observer;
use findings::Findings;

/// What is audited beside the directory.
#[derive(Debug, Clone, Default)]
pub struct AuditOptions {
    /// The source, where it is not where the walk last found it.
    pub source: Option<PathBuf>,
    /// The carrier, where it is not where the walk last found it.
    pub carrier: Option<PathBuf>,
    /// Leaves source and carrier alone: gates 1 and 7 rest on their sealed inventories.
    pub sealed_only: bool,
}

/// Audits the work directory of a walk, a folder of finished layers (`v2/`, `kaiju1/`) by itself, or a complete checkpoint.
///
/// # Errors
/// A directory that is none of these; one that a walk is at work in. What an audit finds is in the report, not an error.
pub fn audit(dir: &Path, options: &AuditOptions, observer: &dyn Observer) -> Result<AuditReport> {
    let mut findings = Findings::default();
    if dir.join(JOURNAL_FILE).exists() {
        let complete = work::audit_work(dir, options, &mut findings, observer)?;
        return Ok(findings.report("work directory", complete));
    }
    if dir.join(MANIFEST_FILE).exists() {
        let subject = complete::audit_complete(dir, options, &mut findings, observer)?;
        return Ok(findings.report(subject, true));
    }
    let layers = shard::finished_layers(dir)?;
    if layers.is_empty() {
        return refuse(format!(
            "no {JOURNAL_FILE}, {MANIFEST_FILE}, r7-experts-layer-NNN.json or kaiju1-experts-layer-NNN.json is in it"
        ))
        .file(dir)
        .wanted("the work directory of a walk, its v2 or kaiju1 folder, or a complete checkpoint")
        .err();
    }
    shard::audit_folder(dir, &layers, &mut findings, observer)?;
    Ok(findings.report("finished layers", true))
}
