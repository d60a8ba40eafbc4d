//! `walk ablate`: what each ingredient of a recipe is worth on a layer.

use std::io::stdout;

use clap::Args;

use super::common::{Begun, StudyArgs};
use super::output::{emit, print};
use crate::error::Result;
use crate::study::{AblateOptions, ablate};

/// Arguments of `walk ablate`.
#[derive(Debug, Args)]
#[command(after_long_help = "\
WHAT IT DOES
  The model is walked by the base recipe up to each layer, so that all variants see the same rows and the same split of them.
  The layer is then processed by the base recipe and by each variant with one ingredient switched off: all choosing and
  encoding stages of the walk. Where switching would change nothing, that is said instead.
INGREDIENTS (--only)
  search, permutation, scales, draws    the search as a whole, and its parts
  allocation-count, allocation-assumed  measured mass-weighted allocation against bits by count, or by an assumed sensitivity
  rounding, sweeps, metric              LDLQ against plain rounding; refinement; the metric of the stored vector or its signs
  vectors                               vectors the layer shares, or two of its own for every tensor
  down-covariance, down-target          through and towards what down is encoded
  fixed-point                           probes and allocation to a fixed point, or once
FIGURES
  error    mass-weighted squared output error of the experts over their squared output, on rows held out
  ratio    that of the variant over that of the base; 95 % interval: jackknife over the experts, Student's t
  KL       source against the source with this layer's experts alone replaced, on the plan's evaluation prompts; the change
           against the base is paired by token, its standard error takes tokens as independent
  s, encodes   spent on the processing; a + says that an earlier run that was stopped had its share too
An ingredient helps where the interval of the ratio without it lies above 1. Otherwise it is reported as not helping.
COST
  Each variant costs what the walk spends on the layer, on disk and in time. In memory: the layer's packed experts, and the
  source's states of the evaluation prompts before each listed layer and at the end: tokens x hidden size x 4 bytes each (40000
  tokens of tiny: 40 MB; of GLM-5.2: 1 GB). Experts are decoded one at a time, once a batch of 8192 tokens.
EXAMPLE
  walk ablate --model tiny --corpus corpus/plan.json --layers 2
EXIT CODES
  0 measured, whatever the verdicts    1 a check failed    2 bad usage or input    3 interrupted: the same command goes on")]
pub struct AblateArgs {
    #[command(flatten)]
    study: StudyArgs,

    /// Ingredients to switch, comma-separated [default: all].
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    only: Option<Vec<String>>,
}

/// Measures and reports.
///
/// # Errors
/// Whatever is wrong with the arguments, the inputs or a check.
pub fn run(args: &AblateArgs) -> Result<()> {
    let study = &args.study;
    let Begun { bars, model, recipe, bench, search } = study.begin()?;
    let options = AblateOptions { bench, only: args.only.clone() };
    let report = ablate(&model, recipe, &study.corpus, options, search, &bars, |layer| match study.json {
        true => emit(&mut stdout(), "layer", layer),
        false => Ok(()),
    })?;
    match study.json {
        true => emit(&mut stdout(), "ablation", &report),
        false => print(&mut stdout(), &report.render_table()),
    }
}
