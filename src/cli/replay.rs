//! `walk replay`: sealed states forwarded again and compared.

use std::io::stdout;
use std::path::PathBuf;

use clap::Args;

use super::common::RunArgs;
use super::output::emit;
use crate::error::Result;
use crate::eval::table::aligned;
use crate::walk::replay::report::{ComparedBy, InputFrom, ReplayReport, ReplayedLayer};
use crate::walk::replay::{Replay, ReplayOptions};

/// Arguments of `walk replay`.
#[derive(Debug, Args)]
#[command(after_long_help = "\
WHAT IT DOES
  Makes every sealed state of a walk again, from the sealed tokens and through the sealed packed shards, and compares hidden
  states (BF16) and top-k lists (I32) with what the walk sealed. A state that is on disk (all of them after a walk with
  --keep-states, else the newest) is compared byte by byte, a deleted one by the SHA-256 that the journal has of each
  prompt's file. The last layer is encoded but never forwarded by a walk, so nothing follows it to compare with.
  Corpus plan, shards, manifests, kept states, config, and every tensor of the carrier that is used are held against their
  seals first; what is not as it was sealed is refused by name. Nothing is written to the work directory.
  After a difference, layers whose sealed input is on disk are still compared, the others are not.
OUTPUT
  A table on stdout, and the first difference: layer, prompt, row, channel (or place in the top-k list) and both values; of a
  deleted state layer and prompt alone.
  --json  a line {\"type\":\"replay_layer\",\"data\"} for each layer when it is done, then {\"type\":\"replay\",\"data\"}
EXAMPLES
  walk replay --work walk-work/tiny
  walk replay --work walk-work/tiny --layer 3 --prompt prose.calibrate.000
  walk replay --work glm52-work --carrier /mnt/GLM-5.2-carrier --scratch /mnt/scratch
EXIT CODES
  0 all equal    1 something differs    2 bad usage, or something that enters is not as it was sealed    3 interrupted")]
pub struct ReplayArgs {
    /// Work directory of the walk, finished or not. No walk may be at work in it.
    #[arg(long, value_name = "DIR")]
    work: PathBuf,

    /// Replay this layer alone, from its sealed state, which has to be on disk. Otherwise all, from the embeddings on.
    #[arg(long, value_name = "N")]
    layer: Option<usize>,

    /// Replay this calibration prompt alone.
    #[arg(long, value_name = "ID")]
    prompt: Option<String>,

    /// The walk's carrier, if it is no longer where the walk found it.
    #[arg(long, value_name = "DIR")]
    carrier: Option<PathBuf>,

    /// Folder for states on their way to the next layer where the sealed ones are deleted: two states of the corpus at most
    /// (tokens x hidden size x 2 bytes and the top-k lists), removed at the end [default: the system's temporary folder].
    #[arg(long, value_name = "DIR")]
    scratch: Option<PathBuf>,

    #[command(flatten)]
    run: RunArgs,
}

/// Replays and reports.
///
/// # Errors
/// What [`Replay::open`] and [`Replay::run`] refuse; a failed check where something differs.
pub fn run(args: &ReplayArgs) -> Result<()> {
    let bars = args.run.begin()?;
    let options = ReplayOptions {
        layer: args.layer,
        prompt: args.prompt.clone(),
        carrier: args.carrier.clone(),
        scratch: args.scratch.clone(),
    };
    let replay = Replay::open(&args.work, &options, &bars)?;
    let report = replay.run(&bars, &mut |layer| match args.run.json {
        true => bars.suspend(|| emit(&mut stdout(), "replay_layer", layer)),
        false => Ok(()),
    })?;
    args.run.print("replay", &report, || table(&report))?;
    report.failure().map_or(Ok(()), Err)
}

fn name(layer: Option<usize>) -> String {
    layer.map_or("embeddings".to_owned(), |layer| format!("layer {layer}"))
}

fn table(report: &ReplayReport) -> String {
    let row = |layer: &ReplayedLayer| {
        let input = match layer.input {
            InputFrom::Tokens => "tokens",
            InputFrom::Sealed => "sealed",
            InputFrom::Replayed => "replayed",
        };
        let compared_by = match layer.compared_by {
            ComparedBy::Bytes => "bytes",
            ComparedBy::Hash => "hash",
        };
        vec![
            name(layer.layer),
            input.to_owned(),
            format!("states/{:03}", layer.state),
            compared_by.to_owned(),
            layer.prompts.to_string(),
            layer.differing_prompts.to_string(),
            layer.bytes.to_string(),
            format!("{:.2}", layer.seconds),
        ]
    };
    let header = ["replayed", "from", "against", "by", "prompts", "differ", "bytes", "seconds"];
    let mut text = aligned(&header, &report.layers.iter().map(row).collect::<Vec<_>>());
    text.push('\n');
    for skipped in &report.not_replayed {
        text.push_str(&format!("layer {} not replayed: {}\n", skipped.layer, skipped.reason.as_str()));
    }
    for layer in &report.layers {
        let Some(found) = &layer.first_difference else { continue };
        let row = found.difference.row().map_or_else(String::new, |row| format!(", row {row}"));
        text.push_str(&format!(
            "{} differs first at prompt {}{row}: {}\n",
            name(layer.layer),
            found.prompt,
            found.difference
        ));
    }
    let verdict = if report.equal { "equal to what was sealed" } else { "NOT EQUAL to what was sealed" };
    let prompts = match report.prompts == report.walk_prompts {
        true => format!("all {} calibration prompts", report.prompts),
        false => format!("{} of {} calibration prompts", report.prompts, report.walk_prompts),
    };
    text.push_str(&format!(
        "{verdict}: {prompts}, {} states, {} bytes, {:.1} s\n",
        report.layers.len(),
        report.bytes,
        report.seconds
    ));
    text
}
