//! `walk eval`: the figures at the end of a walk, of checkpoints on disk.

use std::path::PathBuf;

use clap::Args;

use super::common::{EvaluationState, RunArgs};
use crate::error::Result;
use crate::eval::contest::{Contest, ContestOptions};

/// Arguments of `walk eval`.
#[derive(Debug, Args)]
#[command(after_long_help = "\
WHAT IT DOES
  Sends the plan's evaluation prompts through a reference and a candidate and compares their logits token by token: the
  evaluation at the end of a walk, digit for digit, of any checkpoint directory. Packed linears are decoded as loaders decode
  them: EXL3 carriers, assembled v2 checkpoints, v1 rank slices, KAIJU1. Without --reference only the candidate's perplexity is told.
  The candidate's config.json gives the geometry and its tokenizer.json the tokens; the reference's have to agree.
  Prompts to which the plan gives no prefix_tokens start with those of --model's model.json, else the candidate's, else the
  reference's.
OUTPUT
  A table on stdout; with --json one line {\"type\":\"eval\",\"data\":{\"inputs\",\"evaluation\",\"perplexity\"}}.
EXAMPLES
  walk eval assembled --reference tiny --corpus corpus/plan.json
  walk eval assembled --reference /data/GLM-5.2-BF16 --corpus plan.json --state bf16 --json
  walk eval /data/GLM-5.2-carrier --corpus plan.json
EXIT CODES
  0 done    1 a check failed    2 bad usage or input    3 interrupted")]
pub struct EvalArgs {
    /// The checkpoint directory to evaluate.
    #[arg(value_name = "CANDIDATE")]
    candidate: PathBuf,

    /// What it is held against: a name in a `models/` folder, or a checkpoint directory.
    #[arg(long, value_name = "NAME|DIR")]
    reference: Option<String>,

    /// Corpus plan; its prompts for evaluation are used.
    #[arg(long, value_name = "PLAN.JSON")]
    corpus: PathBuf,

    /// Model whose model.json says what prompts start with.
    #[arg(long, value_name = "NAME|DIR")]
    model: Option<String>,

    /// Type of the state between layers.
    #[arg(long, value_name = "TYPE", value_enum, default_value_t = EvaluationState::F32)]
    state: EvaluationState,

    #[command(flatten)]
    run: RunArgs,
}

/// Evaluates and prints.
///
/// # Errors
/// Whatever is wrong with the checkpoints, the plan or the arguments.
pub fn run(args: &EvalArgs) -> Result<()> {
    let bars = args.run.begin()?;
    let contest = Contest::open(&ContestOptions {
        candidate: args.candidate.clone(),
        reference: args.reference.clone(),
        plan: args.corpus.clone(),
        model: args.model.clone(),
    })?;
    let report = contest.run(args.state.into(), &bars)?;
    args.run.print("eval", &report, || report.render_table())
}
