//! `walk audit`: the acceptance gates, checked again from what a walk left.

use std::path::PathBuf;

use clap::Args;

use super::common::RunArgs;
use crate::audit::{AuditOptions, audit};
use crate::error::Result;

/// Arguments of `walk audit`.
#[derive(Debug, Args)]
#[command(after_long_help = "\
WHAT IT DOES
  Reads a work directory, finished or not, and runs gates 1 to 8 of the Round 7 record on it, after gate 0: the journal's chain
  and every sealed file's hash. Masses are summed again from the routing, allocations solved again from the probes, every
  module decoded again from its shard, whole and in slices. Nothing is written. A folder of finished layers (v2 or kaiju1) can
  be audited by itself, and so can a complete checkpoint by walk assemble or walk convert: its manifest, every file, index and
  carried payload, and every module decoded from its layer or its slices. What needs the work directory is then not run.
  What could not be checked is listed and never counted as passed. Tolerances are listed with their defaults; one that a recipe
  loosened is flagged.
EXAMPLES
  walk audit walk-work/tiny
  walk audit walk-work/tiny-v2 --carrier models/tiny
  walk audit walk-work/glm52 --sealed-only      without reading source and carrier again
EXIT CODES
  0 nothing failed    1 a gate failed: the first failing item is named    2 bad usage or input    3 interrupted")]
pub struct AuditArgs {
    /// Work directory of a walk, a folder of finished layers, or a complete checkpoint.
    #[arg(value_name = "DIR")]
    dir: PathBuf,

    /// The source, where it is no longer where the walk last read it.
    #[arg(long, value_name = "DIR")]
    source: Option<PathBuf>,

    /// The carrier, where it is no longer where the walk last read it.
    #[arg(long, value_name = "DIR")]
    carrier: Option<PathBuf>,

    /// Do not read source and carrier again: rest on their sealed inventories.
    #[arg(long)]
    sealed_only: bool,

    #[command(flatten)]
    run: RunArgs,
}

/// Audits and reports.
///
/// # Errors
/// What cannot be audited, and the first failing item (exit code 1) after the report is printed.
pub fn run(args: &AuditArgs) -> Result<()> {
    let bars = args.run.begin()?;
    let options = AuditOptions {
        source: args.source.clone(),
        carrier: args.carrier.clone(),
        sealed_only: args.sealed_only,
    };
    let report = audit(&args.dir, &options, &bars)?;
    args.run.print("audit", &report, || report.render_table())?;
    report.failure().map_or(Ok(()), Err)
}
