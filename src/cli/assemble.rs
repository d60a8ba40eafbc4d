//! `walk assemble`: a finished walk and its carrier as one model directory.

use std::path::PathBuf;

use clap::Args;

use super::common::RunArgs;
use super::published::render;
use crate::error::Result;
use crate::publish::{AssembleOptions, assemble};

/// Arguments of `walk assemble`.
#[derive(Debug, Args)]
#[command(after_long_help = "\
WHAT IT DOES
  Puts the layers of a finished walk and everything else of its carrier into one model directory that loaders read: carried
  shards byte for byte (those that hold replaced experts are written anew with the rest of their payloads unchanged), the MTP
  layer carried, tokenizer and other files beside the shards, config.json with what a loader has to know, an index that is a
  bijection with the tensors, and MANIFEST.json with every file's and every carried payload's SHA-256.
  Every sealed file of the walk that goes in is hashed first, and every carried payload is held against the carrier's sealed
  inventory as it is copied. The room on the disk is checked before anything is written.
  The directory is made as .NAME.partial beside its target and published by one rename. The same command again goes on where
  an interrupted one stopped; a partial directory of other inputs is refused and left alone.
EXAMPLES
  walk assemble --work walk-work/tiny --out walk-work/tiny-v2
  walk audit walk-work/tiny-v2 --carrier models/tiny
EXIT CODES
  0 done    1 a check failed    2 bad usage, or inputs that are not the walk's    3 interrupted")]
pub struct AssembleArgs {
    /// Work directory of a finished walk.
    #[arg(long, value_name = "DIR")]
    work: PathBuf,

    /// The directory to make.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,

    /// The carrier, where it is no longer where the walk last read it.
    #[arg(long, value_name = "DIR")]
    carrier: Option<PathBuf>,

    #[command(flatten)]
    run: RunArgs,
}

/// Assembles and reports.
///
/// # Errors
/// As [`assemble`](fn@assemble).
pub fn run(args: &AssembleArgs) -> Result<()> {
    let bars = args.run.begin()?;
    let options = AssembleOptions { carrier: args.carrier.clone() };
    let report = assemble(&args.work, &args.out, &options, &bars)?;
    args.run.print("assemble", &report, || {
        let mut text = render(report.made.as_ref(), &args.out);
        text.push_str(&format!("replaced          {} tensors of the carrier\n", report.replaced_tensors));
        text
    })
}
