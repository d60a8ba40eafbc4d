//! `walk convert`: rank slices of a complete checkpoint, and back.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::common::RunArgs;
use super::published::render;
use crate::error::{Result, refuse};
use crate::publish::{to_v1, to_v2};

/// Arguments of `walk convert`.
#[derive(Debug, Args)]
#[command(after_long_help = "\
WHAT IT DOES
  --to v1 --tp N   cuts the routed experts of an assembled checkpoint into one shard a rank: gate and up along their outputs,
                   down along its inputs, on 128-element boundaries; N has to divide the expert width that way. Nothing is
                   quantized anew. Every slice is read again: put together they are the v2 tensors word for word, and decoded
                   side by side they are the decoded whole, bit for bit.
  --to v2          puts such slices together again: the directory they were cut from, to the byte.
  Maps of one width get the block hybrid_tr3_tail, which unmodified r13 loaders read; mixed ones keep r7_routed_experts, which
  needs a loader with r7-asymmetric-two-stack. --assert-unmodified-r13 fails, with the reason, where the first is not possible.
  Carried shards are copied byte for byte, every payload held against MANIFEST.json. The directory is made beside its target
  and published by one rename; an interrupted command goes on where it stopped.
EXAMPLES
  walk convert --to v1 --tp 2 walk-work/tiny-v2 walk-work/tiny-tp2
  walk convert --to v2 walk-work/tiny-tp2 walk-work/tiny-again
EXIT CODES
  0 done    1 a check failed    2 bad usage or input    3 interrupted")]
pub struct ConvertArgs {
    /// Schema of the new directory's layers.
    #[arg(long, value_name = "SCHEMA", value_enum)]
    to: Schema,

    /// Ranks of the slices (--to v1).
    #[arg(long, value_name = "N")]
    tp: Option<usize>,

    /// Fail unless loaders without r7-asymmetric-two-stack can read the slices (--to v1).
    #[arg(long)]
    assert_unmodified_r13: bool,

    /// A complete checkpoint, by `walk assemble` or `walk convert`.
    #[arg(value_name = "FROM")]
    from: PathBuf,

    /// The directory to make.
    #[arg(value_name = "OUT")]
    out: PathBuf,

    #[command(flatten)]
    run: RunArgs,
}

/// Schemas on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Schema {
    /// Rank slices.
    V1,
    /// Whole layers.
    V2,
}

/// Converts and reports.
///
/// # Errors
/// As [`to_v1`] and [`to_v2`]; options that go with the other direction.
pub fn run(args: &ConvertArgs) -> Result<()> {
    let bars = args.run.begin()?;
    let report = match (args.to, args.tp) {
        (Schema::V1, Some(tp)) => to_v1(&args.from, &args.out, tp, args.assert_unmodified_r13, &bars)?,
        (Schema::V1, None) => {
            return refuse("--to v1 without a number of ranks").field("--tp").wanted("--tp N").err();
        }
        (Schema::V2, None) if !args.assert_unmodified_r13 => to_v2(&args.from, &args.out, &bars)?,
        (Schema::V2, _) => {
            return refuse("--tp and --assert-unmodified-r13 go with --to v1")
                .field("--to")
                .wanted("--to v2 alone: the slices say how many ranks there are")
                .err();
        }
    };
    args.run.print("convert", &report, || {
        let mut text = render(report.made.as_ref(), &args.out);
        text.push_str(&format!("{:<16}  {}\n", "ranks", report.tp_size));
        text.push_str(&format!("{:<16}  {}\n", "config block", report.config_block));
        if let Some(reason) = &report.not_for_unmodified_r13 {
            text.push_str(&format!("{:<16}  no: {reason}\n", "unmodified r13"));
        }
        text
    })
}
