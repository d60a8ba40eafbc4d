//! `walk inspect`: what a checkpoint holds and says of itself.

use std::path::PathBuf;

use clap::Args;

use super::common::RunArgs;
use crate::error::Result;
use crate::inspect::Inspection;

/// Arguments of `walk inspect`.
#[derive(Debug, Args)]
#[command(after_long_help = "\
WHAT IT DOES
  Reads headers, codebook markers and manifests of a checkpoint directory (plain, EXL3 carrier, assembled v2, v1 rank slices,
  KAIJU1), of a folder of shards such as a walk's v2, or of one safetensors file. No payload is read: any size takes seconds.
OUTPUT
  Totals by role, routed experts by layer, and what config, shard metadata and manifests say. Bits a weight count everything
  that is stored (trellis, rotation vectors, markers, KAIJU1 payloads); \"trellis alone\" is what an allocation counts.
  --tensors  every plain tensor and packed module besides
  --json     one line {\"type\":\"inspect\",\"data\":{...}}
EXAMPLES
  walk inspect assembled
  walk inspect walk-work/tiny/v2
  walk inspect walk-work/tiny/v2/r7-experts-layer-002.safetensors --tensors
EXIT CODES
  0 done    2 bad usage, or no readable checkpoint")]
pub struct InspectArgs {
    /// A checkpoint directory, a folder of shards, or a safetensors file.
    #[arg(value_name = "FILE|DIR")]
    path: PathBuf,

    /// List every plain tensor and packed module.
    #[arg(long)]
    tensors: bool,

    #[command(flatten)]
    run: RunArgs,
}

/// Inspects and prints.
///
/// # Errors
/// What cannot be read as a checkpoint.
pub fn run(args: &InspectArgs) -> Result<()> {
    args.run.begin()?;
    let inspection = Inspection::take(&args.path, args.tensors)?;
    args.run.print("inspect", &inspection, || inspection.render_table())
}
