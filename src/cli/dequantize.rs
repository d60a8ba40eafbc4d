//! `walk dequantize`: a packed checkpoint as a plain one.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::common::RunArgs;
use crate::error::{Result, refuse};
use crate::publish::dense::WeightDtype;
use crate::publish::dequantize::{DequantizeOptions, dequantize};

/// Arguments of `walk dequantize`.
#[derive(Debug, Args)]
#[command(after_long_help = "\
WHAT IT DOES
  Writes a checkpoint whose packed linears are plain weights, for software that does not know the packed form. IN is any
  checkpoint directory (EXL3 carrier, assembled v2, v1 rank slices, KAIJU1, a walk's v2 folder) or one safetensors file; a
  directory makes a directory, a file a file.
  An EXL3 linear decodes to f16 values, which is what every loader installs: bf16 rounds them to nearest, ties to even, by 2^-8
  of the value at most; f16 and f32 are exact. A KAIJU1 linear decodes to f32 values: only f32 is exact, and a value that f16
  does not reach is refused. All other tensors keep their type and their bytes.
  The directory gets new shards, an index for them, config.json without quantization metadata (its dtype is left as it is),
  and the tokenizer and other files beside; manifests and subfolders are left out.
  It appears whole or not at all. Stopped, the same command goes on after the last finished shard.
MEMORY
  One decoded linear a thread.
OUTPUT
  A table on stdout; with --json one line {\"type\":\"dequantize\",\"data\":{...}} with the shards' SHA-256.
EXAMPLES
  walk dequantize assembled plain
  walk dequantize assembled plain-f16 --dtype f16 --max-shard-gib 2
  walk dequantize v2/r7-experts-layer-003.safetensors layer-3.safetensors
EXIT CODES
  0 done    2 bad usage or input, or too little disk    3 interrupted")]
pub struct DequantizeArgs {
    /// What is read: a checkpoint directory or a safetensors file.
    #[arg(value_name = "IN")]
    input: PathBuf,

    /// What is made: a directory, or a safetensors file. It must not be there yet.
    #[arg(value_name = "OUT")]
    out: PathBuf,

    /// Type of the weights that packed linears become.
    #[arg(long, value_name = "TYPE", value_enum, default_value_t = DtypeName::Bf16)]
    dtype: DtypeName,

    /// Payload of a shard at most, in GiB; a larger tensor has a shard of its own.
    #[arg(long, value_name = "N", default_value_t = 5.0)]
    max_shard_gib: f64,

    #[command(flatten)]
    run: RunArgs,
}

/// Types on the command line.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum DtypeName {
    /// Rounded to nearest, ties to even.
    Bf16,
    /// Exact of EXL3, rounded of KAIJU1.
    F16,
    /// Exact, twice the room.
    F32,
}

impl From<DtypeName> for WeightDtype {
    fn from(dtype: DtypeName) -> Self {
        match dtype {
            DtypeName::Bf16 => Self::Bf16,
            DtypeName::F16 => Self::F16,
            DtypeName::F32 => Self::F32,
        }
    }
}

/// Writes the plain checkpoint and prints what was made.
///
/// # Errors
/// Whatever is wrong with input, output or arguments.
pub fn run(args: &DequantizeArgs) -> Result<()> {
    let bars = args.run.begin()?;
    let shard_bytes = args.max_shard_gib * f64::from(1 << 30);
    if !(1.0..1e18).contains(&shard_bytes) {
        return refuse(format!("--max-shard-gib {}", args.max_shard_gib)).wanted("a positive number").err();
    }
    let options = DequantizeOptions { dtype: args.dtype.into(), shard_bytes: shard_bytes as u64 };
    let report = dequantize(&args.input, &args.out, options, &bars)?;
    args.run.print("dequantize", &report, || report.render_table())
}
