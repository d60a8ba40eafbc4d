//! `walk carrier`: a BF16 model's attention, dense MLPs and shared experts packed to EXL3, everything else as it is.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::common::{RunArgs, note_slow_search, recipe_of};
use crate::carrier::{CarrierOptions, CarrierReport, Scope, make_carrier};
use crate::config::Model;
use crate::error::{Result, refuse};
use crate::eval::table::{aligned, figure};

/// Arguments of `walk carrier`.
#[derive(Debug, Args)]
#[command(after_long_help = "\
WHAT IT DOES
  Packs the linears of a BF16 model that a walk leaves alone, so that a walk can start from a smaller carrier. Scope dense: of
  every decoder layer the attention (the indexer's linears too; `--keep indexer` holds them back), the dense MLP and the
  shared experts, where both sizes are multiples of 128. Router, norms, embeddings, head, biases, the MTP block (never run, so
  that nothing calibrates it) and routed experts stay as they are, byte for byte; every linear that stays is listed with the
  reason. Layer by layer, each linear is calibrated on what the linears before it, packed and decoded, make of the
  calibration prompts, encoded by LDLQ on the covariance of its inputs, and read back.
OUTPUT
  A complete model directory: shards, index, tokenizer and other files, config.json with a quantization_config (exl3), and
  CARRIER_MANIFEST.json: of every packed linear its bits, hashes, proxy error and what it was calibrated on, of every kept
  tensor reason and payload hash. The bytes do not depend on the number of threads.
  It appears by one rename. Until then its files lie in .NAME.partial and .NAME.transaction beside it, and the same command
  goes on where the last one stopped; other inputs are refused. The disk is checked before anything is written.
  --json  one line {\"type\":\"carrier\",\"data\"}
EXAMPLES
  walk carrier --model tiny --corpus corpus/plan.json --out walk-work/tiny-carrier
  walk carrier --model glm52 --source /data/GLM-5.2-BF16 --corpus plan.json --out /data/GLM-5.2-carrier --without-experts
  walk --model tiny --corpus corpus/plan.json --carrier walk-work/tiny-carrier --work walk-work/tiny-from-6-bit
EXIT CODES
  0 done    1 a check failed    2 bad usage or input    3 interrupted: the same command goes on")]
pub struct CarrierArgs {
    /// Model: a name in a `models/` folder (tiny, glm52), or a directory with config.json and BF16 weights.
    #[arg(long, value_name = "NAME|DIR")]
    model: String,

    /// Corpus plan: its calibration prompts calibrate the linears.
    #[arg(long, value_name = "PLAN.JSON")]
    corpus: PathBuf,

    /// BF16 checkpoint, instead of the model's own.
    #[arg(long, value_name = "DIR")]
    source: Option<PathBuf>,

    /// The carrier: a directory that is not there yet.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,

    /// Bits a packed weight, 1 to 8.
    #[arg(long, value_name = "B", default_value_t = 6)]
    bits: u32,

    /// Which linears are packed.
    #[arg(long, value_name = "SCOPE", value_enum, default_value_t = ScopeName::Dense)]
    scope: ScopeName,

    /// Leaves linears as they are whose name contains this, such as `indexer` or `layers.0.`; may be given again.
    #[arg(long, value_name = "SUBSTRING")]
    keep: Vec<String>,

    /// Leaves out the routed experts of the decoder layers: a walk takes them from its source.
    #[arg(long)]
    without_experts: bool,

    /// Recipe: default (the model's own), fast, or a recipe.json. Draws, sweeps, sigma_reg and scale samples are used.
    #[arg(long, value_name = "RECIPE", default_value = "default")]
    recipe: String,

    #[command(flatten)]
    run: RunArgs,
}

/// Scopes on the command line.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum ScopeName {
    /// Attention, dense MLPs and shared experts.
    Dense,
}

impl From<ScopeName> for Scope {
    fn from(ScopeName::Dense: ScopeName) -> Self {
        Self::Dense
    }
}

/// Makes the carrier and reports.
///
/// # Errors
/// Whatever is wrong with the arguments, the inputs or a check.
pub fn run(args: &CarrierArgs) -> Result<()> {
    let bars = args.run.begin()?;
    let found = Model::find(&args.model)?;
    let source = match &args.source {
        Some(source) => source.clone(),
        None if found.has_weights() => found.folder.clone(),
        None => {
            return refuse(format!("model {} has no weights in its folder", found.name))
                .field("--source")
                .wanted("the directory of its BF16 checkpoint")
                .err();
        }
    };
    let recipe = recipe_of(&found, &args.recipe, true)?;
    let resolved = found.with_weights(Some(&source), Some(&source))?;
    let search = note_slow_search(&bars);
    let options = CarrierOptions {
        bits: args.bits,
        scope: args.scope.into(),
        keep: args.keep.clone(),
        without_experts: args.without_experts,
    };
    let report = make_carrier(&resolved, (&recipe, &args.corpus), &args.out, &options, search, &bars)?;
    args.run.print("carrier", &report, || table(&report))
}

fn table(report: &CarrierReport) -> String {
    let run = &report.run;
    let threads = if run.threads == 1 { "1 thread".into() } else { format!("{} threads", run.threads) };
    let mut text = format!(
        "model {}, scope {}, {} bits, recipe {}, search {}, {threads}\n\n",
        run.model, report.scope, report.bits, run.recipe, run.search_engine
    );
    let seconds: Vec<Vec<String>> = run
        .stage_seconds
        .iter()
        .map(|(stage, seconds)| vec![stage.clone(), format!("{seconds:.2}")])
        .collect();
    text.push_str(&aligned(&["stage", "seconds"], &seconds));
    let packed: Vec<Vec<String>> = report
        .packed
        .iter()
        .map(|line| {
            let error = format!("{:.3e}", line.proxy_error);
            vec![line.module.clone(), format!("{} x {}", line.k, line.n), line.rows.to_string(), error]
        })
        .collect();
    text.push('\n');
    text.push_str(&aligned(&["packed", "in x out", "rows", "proxy error"], &packed));
    let kept: Vec<Vec<String>> =
        report.kept_linears.iter().map(|line| vec![line.tensor.clone(), line.reason.clone()]).collect();
    if !kept.is_empty() {
        text.push('\n');
        text.push_str(&aligned(&["kept linear", "reason"], &kept));
    }
    text.push_str(&format!(
        "\n{} linears packed, {} weights at {} bits with their vectors; {} linears and {} other tensors kept, {} left out\n\
         {} bytes of tensors, {} in the model\nwritten to {}\n",
        report.packed.len(),
        report.packed_weights,
        figure(report.stored_bits_per_weight, 4),
        report.kept_linears.len(),
        report.kept_others,
        report.left_out,
        report.carrier_bytes,
        report.model_bytes,
        report.output_dir
    ));
    text
}
