//! `walk diff`: two checkpoints, weight by weight.

use std::path::PathBuf;

use clap::Args;

use super::common::RunArgs;
use crate::error::{Result, refuse};
use crate::inspect::diff::diff;

/// Arguments of `walk diff`.
#[derive(Debug, Args)]
#[command(after_long_help = "\
WHAT IT DOES
  Compares the tensors of two checkpoint directories, folders of shards or safetensors files, in any of the forms that
  `walk inspect` reads. A packed linear and a plain tensor `{module}.weight` are the same weight.
  Weights are equal when what is stored is: type, shape and bytes, or layout and every packed part. Others are compared by
  value, packed ones decoded: |a-b|/|a| in f64, and the largest difference. With --values, equal values are enough.
  A walk may store the channels of an expert in another order than its source (manifests, `permutations`): where only one side
  says so, its weights are also compared in the source's order, and what is nearer is told.
OUTPUT
  A table by role and one of the weights that differ, by name; with --json one line {\"type\":\"diff\",\"data\":{...}}.
EXAMPLES
  walk diff carrier assembled
  walk diff assembled-v2 assembled-v1 --values
  walk diff models/tiny assembled --limit 100
EXIT CODES
  0 equal    1 different    2 bad usage, or no readable checkpoint    3 interrupted")]
pub struct DiffArgs {
    /// The first checkpoint: errors are relative to it.
    #[arg(value_name = "A")]
    a: PathBuf,

    /// The second.
    #[arg(value_name = "B")]
    b: PathBuf,

    /// Equal values are equal, however they are stored.
    #[arg(long)]
    values: bool,

    /// Weights that differ to list [default: 20; with --json all].
    #[arg(long, value_name = "N")]
    limit: Option<usize>,

    #[command(flatten)]
    run: RunArgs,
}

/// Weights that differ in a table, unless told otherwise.
const LIMIT: usize = 20;

/// Compares and prints.
///
/// # Errors
/// What cannot be read as a checkpoint; a failed check where they differ.
pub fn run(args: &DiffArgs) -> Result<()> {
    let bars = args.run.begin()?;
    let mut report = diff(&args.a, &args.b, args.values, &bars)?;
    let differing = report.differences.len();
    if args.run.json
        && let Some(limit) = args.limit
    {
        report.differences.truncate(limit);
    }
    args.run.print("diff", &report, || report.render_table(args.limit.unwrap_or(LIMIT)))?;
    if differing == 0 {
        return Ok(());
    }
    let compared = differing + report.total.equal;
    Err(refuse(format!("{differing} of {compared} weights differ")).file(&args.b).check())
}
