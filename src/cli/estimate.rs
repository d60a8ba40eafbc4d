//! `walk estimate`: what a walk will take, without any weights.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::Value;

use super::codec::CodecArgs;
use super::common::{RunArgs, note_slow_search, recipe_of};
use super::estimate_table::table;
use crate::config::choices::CodecName;
use crate::config::{Geometry, Model};
use crate::corpus::Plan;
use crate::error::{Result, refuse};
use crate::estimate::machine::Machine;
use crate::estimate::report::{Estimate, Inputs};
use crate::estimate::tokens::{BYTES_A_TOKEN, Basis, Tokens};
use crate::store::strict_json::{StrictValue, read_json};
use crate::walk::preflight::check_sizes;
use crate::walk::progress::Observer;

/// Seconds a calibration may take.
const CALIBRATE: std::ops::RangeInclusive<f64> = 0.01..=3600.0;

/// Calibration tokens that can be asked for.
const MAX_TOKENS: u64 = 1 << 40;

/// Arguments of `walk estimate`.
#[derive(Debug, Args)]
#[command(after_long_help = "\
WHAT IT DOES
  Counts what a walk of this model by this recipe consists of (encodes, products, factors, bytes), tries for about a minute how
  fast this machine does each, and multiplies. No weights are needed: models/glm52 has none.
  Everything in hours is an UNVERIFIED projection: sizes beyond 1024 are extrapolated, and neither memory bandwidth at the
  real sizes nor threads that wait for a layer's last experts are in it. Calibrate on an otherwise idle machine.
  Ranges: a search measures some bundles only if they are new, and the second round of probes is planned for half to all of
  the experts. A fixed point may take more rounds, up to the recipe's cap.
TOKENS
  Counted by the model's tokenizer where its folder has one. Without one they are guessed from the text's bytes (4 bytes a
  token) and the output says so; --tokens N replaces the number of calibration tokens, in prompts as long as the plan's.
OUTPUT
  A table on stdout, or with --json one line {\"type\":\"estimate\",\"data\":{...}}: there every stage lists its parts, what is counted
  times which rate. For GLM-5.2 by the default recipe counts and sizes are held against the Round 7 record's.
EXAMPLES
  walk estimate --model glm52 --corpus plan.json --tokens 1000000
  walk estimate --model tiny --corpus corpus/plan.json --work walk-work/tiny
EXIT CODES
  0 done    2 bad usage or input    3 interrupted")]
pub struct EstimateArgs {
    /// Model: a name in a `models/` folder (tiny, glm52), or a directory with config.json.
    #[arg(long, value_name = "NAME|DIR")]
    model: String,

    /// Corpus plan of the walk.
    #[arg(long, value_name = "PLAN.JSON")]
    corpus: PathBuf,

    /// Recipe: default (the model's own), fast, uniform-3, uniform-4, uniform-5, or a recipe.json.
    #[arg(long, value_name = "RECIPE", default_value = "default")]
    recipe: String,

    #[command(flatten)]
    codec: CodecArgs,

    /// Calibration tokens, instead of those of the plan's texts.
    #[arg(long, value_name = "N")]
    tokens: Option<u64>,

    /// How long to try the machine, about.
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0)]
    calibrate: f64,

    /// Where the walk would write: durable writing is tried there. Without it, it takes no time in the estimate.
    #[arg(long, value_name = "DIR")]
    work: Option<PathBuf>,

    #[command(flatten)]
    run: RunArgs,
}

/// Estimates and prints.
///
/// # Errors
/// What is wrong with the arguments, model, recipe or plan.
pub fn run(args: &EstimateArgs) -> Result<()> {
    let bars = args.run.begin()?;
    if !CALIBRATE.contains(&args.calibrate) {
        let wanted = format!("{} to {} seconds", CALIBRATE.start(), CALIBRATE.end());
        return refuse(format!("--calibrate {}", args.calibrate)).wanted(wanted).err();
    }
    if let Some(tokens) = args.tokens.filter(|tokens| !(1..=MAX_TOKENS).contains(tokens)) {
        return refuse(format!("--tokens {tokens}")).wanted(format!("1 to {MAX_TOKENS}")).err();
    }
    let model = Model::find(&args.model)?;
    let recipe = args.codec.apply(recipe_of(&model, &args.recipe, false)?)?;
    let geometry = Geometry::read(&model.config_path())?;
    if recipe.codec != CodecName::Trellis {
        return refuse("only walks with the trellis codec are estimated")
            .field("codec")
            .wanted("\"trellis\"; of a kaiju1 walk --pilot-stop-after-layer projects from a layer that was walked")
            .err();
    }
    check_sizes(&geometry, &recipe)?;
    let plan = Plan::load(&args.corpus)?;
    let tokens = Tokens::of(&plan, &model, &geometry, args.tokens)?;
    if tokens.basis == Basis::Bytes {
        bars.note(&format!(
            "{} has no tokenizer: tokens are guessed at {BYTES_A_TOKEN} bytes of text each; --tokens N says them",
            model.folder.display()
        ));
    }
    let search = note_slow_search(&bars);
    bars.begin("calibrate", None, Machine::trials(&recipe));
    let time = Duration::from_secs_f64(args.calibrate);
    let machine =
        Machine::calibrate(&geometry, &recipe, search, time, args.work.as_deref(), &|op| bars.advance(op))?;
    bars.end();
    let StrictValue(config) = read_json(model.config_path())?;
    let mtp_layers = config.get("num_nextn_predict_layers").and_then(Value::as_u64).unwrap_or(0);
    let inputs =
        Inputs { name: &model.name, geometry: &geometry, mtp_layers, recipe: &recipe, tokens, machine };
    let estimate = Estimate::new(inputs)?;
    args.run.print("estimate", &estimate, || table(&estimate))
}
