//! `walk pilot`: a proposed ingredient, judged by its own falsification rule.

use std::io::stdout;

use clap::Args;

use super::common::{Begun, StudyArgs};
use super::output::{emit, print};
use crate::error::Result;
use crate::study::pilot::{Pilot, pilot};

/// Arguments of `walk pilot`.
#[derive(Debug, Args)]
#[command(after_long_help = "\
WHAT IT DOES
  The model is walked by the base recipe up to each layer, the layer is processed without the pilot, and its experts are then
  encoded once more with it, at the same bits and scales. Held-out error: squared output error of the experts over their
  squared output, weighted by mass, in each half of the held-out rows; a row's half is the parity of a seeded hash of its id.
PILOTS
  output-rescale   every output coordinate times its least-squares factor on the calibration rows, folded into svh: of gate and
                   up by expert, before down's covariance is built; of down one vector a layer; and both.
                   Rejected if the error rises in either half, or if more than 1 % of the factors lie outside 0.9 to 1.1.
                   The recipe's `output_rescale` does gate and up in the walk; down's vector exists in this pilot only.
  sigma-reg        0.01, 0.05 and 0.10 against 0.025, for gate and up and for down.
                   Rejected unless the error falls in both halves, and the worst expert's smallest over largest pivot stays
                   above 0.5 of the incumbent's.
  cold-shrinkage   the diagonal of a cold expert's input covariance moved towards the median over the layer's experts by its
                   fallback share, correlations kept. Down's is left: its channels have no counterpart in other experts.
                   Rejected unless the error of the cold experts falls in both halves. Where no expert is cold,
                   --min-fit-rows makes some.
EXAMPLE
  walk pilot cold-shrinkage --model tiny --corpus corpus/plan.json --layers 2 --min-fit-rows 8192
EXIT CODES
  0 judged, accepted or rejected    1 a check failed    2 bad usage or input    3 interrupted: the same command goes on")]
pub struct PilotArgs {
    /// The pilot.
    #[arg(value_name = "NAME", value_enum, hide_possible_values = true)]
    name: Pilot,

    #[command(flatten)]
    study: StudyArgs,

    /// Fit rows below which an expert is cold, instead of the base recipe's.
    #[arg(long, value_name = "N")]
    min_fit_rows: Option<usize>,
}

/// Judges and reports.
///
/// # Errors
/// Whatever is wrong with the arguments, the inputs or a check.
pub fn run(args: &PilotArgs) -> Result<()> {
    let study = &args.study;
    let Begun { bars, model, recipe, bench, search } = study.begin()?;
    let options = (bench, args.min_fit_rows);
    let report = pilot(args.name, &model, recipe, &study.corpus, options, search, &bars)?;
    match study.json {
        true => emit(&mut stdout(), "pilot", &report),
        false => print(&mut stdout(), &report.render_table()),
    }
}
