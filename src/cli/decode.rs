//! `walk decode`: the packed weights of one safetensors file as plain ones.

use std::path::PathBuf;

use clap::Args;

use super::common::RunArgs;
use super::dequantize::DtypeName;
use crate::error::Result;
use crate::tensors::decode;

/// Arguments of `walk decode`.
#[derive(Debug, Args)]
#[command(after_long_help = "\
WHAT IT DOES
  The way back of `walk encode`: every packed weight of one safetensors file, KAIJU1 or EXL3 in any layout, becomes
  {module}.weight again, and everything else is copied byte for byte, metadata too. A payload is checked to its last code first.
  KAIJU1 decodes to f32 values and EXL3 to f16 values: f32 is exact for both.
  For whole checkpoint directories: walk dequantize.
MEMORY
  One weight at a time.
OUTPUT
  A table on stdout; with --json one line {\"type\":\"decode\",\"data\":{...}}.
EXAMPLES
  walk decode packed.safetensors plain.safetensors
  walk decode --dtype bf16 packed.safetensors plain.safetensors
EXIT CODES
  0 done    2 bad usage or input    3 interrupted: nothing was written")]
pub struct DecodeArgs {
    /// What is read: a safetensors file.
    #[arg(value_name = "IN.SAFETENSORS")]
    input: PathBuf,

    /// What is made: a safetensors file. It must not be there yet.
    #[arg(value_name = "OUT.SAFETENSORS")]
    out: PathBuf,

    /// Type of the decoded weights.
    #[arg(long, value_name = "TYPE", value_enum, default_value_t = DtypeName::F32)]
    dtype: DtypeName,

    #[command(flatten)]
    run: RunArgs,
}

/// Decodes and prints what was made.
///
/// # Errors
/// Whatever is wrong with input, output or arguments.
pub fn run(args: &DecodeArgs) -> Result<()> {
    let bars = args.run.begin()?;
    let report = decode(&args.input, &args.out, args.dtype.into(), &bars)?;
    args.run.print("decode", &report, || report.render_table())
}
