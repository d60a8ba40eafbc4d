//! The walk itself: resolve, open, run, evaluate, report.

use std::io::stdout;
use std::path::PathBuf;
use std::time::Instant;

use clap::Args;

use super::codec::CodecArgs;
use super::common::{EvaluationState, note_slow_search, recipe_of, start_threads};
use super::output::{emit, print, write_report};
use super::progress::Bars;
use crate::codec::kaiju::search as kaiju;
use crate::codec::trellis::search::best_search;
use crate::config::choices::CodecName;
use crate::config::{Model, Recipe};
use crate::error::{Error, Result, refuse};
use crate::eval::report::{LayerReport, WalkReport, bits_per_weight};
use crate::eval::{Evaluation, evaluate};
use crate::walk::driver::{LayerOutcome, LayerRates, Outcome, Walk};
use crate::walk::feasibility::write_feasibility;
use crate::walk::open::WalkOptions;
use crate::walk::progress::Observer;
use crate::walk::sealed_files::REPORT_FILE;

/// Arguments of the walk.
#[derive(Debug, Args)]
pub struct WalkArgs {
    /// Model: a name in a `models/` folder (tiny, glm52), or a directory with config.json and weights.
    #[arg(long, value_name = "NAME|DIR")]
    model: Option<String>,

    /// Corpus plan: which texts calibrate the walk and which evaluate it (corpus/README.md tells how to write one).
    #[arg(long, value_name = "PLAN.JSON")]
    corpus: Option<PathBuf>,

    /// BF16 checkpoint the routed experts are read from, instead of the model's own.
    #[arg(long, value_name = "DIR")]
    source: Option<PathBuf>,

    /// Checkpoint everything else comes from, instead of the model's own.
    #[arg(long, value_name = "DIR")]
    carrier: Option<PathBuf>,

    /// Where everything is written [default: `walk-work/<model>`]. An unfinished walk there is resumed.
    #[arg(long, value_name = "DIR")]
    work: Option<PathBuf>,

    /// Recipe: default (the model's own), fast, uniform-3, uniform-4, uniform-5, or a recipe.json.
    #[arg(long, value_name = "RECIPE", default_value = "default")]
    recipe: String,

    #[command(flatten)]
    codec: CodecArgs,

    /// Threads. The bytes written do not depend on it [default: all cores].
    #[arg(long, value_name = "N")]
    threads: Option<usize>,

    /// Keep the states before finished layers, so that `walk replay` can show the first difference and not only that there
    /// is one. They take what the corpus takes at every layer.
    #[arg(long)]
    keep_states: bool,

    /// Stop once MoE layer N is sealed and write FEASIBILITY_LAYER_NNN.json: what it took, and a projection to all layers.
    /// The same command without this option goes on from there.
    #[arg(long, value_name = "N")]
    pilot_stop_after_layer: Option<usize>,

    /// Inventory of the source, by `walk inventory`: a source that is another one is refused.
    #[arg(long, value_name = "FILE")]
    source_inventory: Option<PathBuf>,

    /// Inventory of the carrier, by `walk inventory`.
    #[arg(long, value_name = "FILE")]
    carrier_inventory: Option<PathBuf>,

    /// Type of the state between layers in the evaluation. The walk itself always carries BF16.
    #[arg(long, value_name = "TYPE", value_enum, default_value_t = EvaluationState::F32)]
    state: EvaluationState,

    /// Print the report as JSON lines on stdout instead of a table.
    #[arg(long)]
    json: bool,

    /// No progress on stderr, only notes.
    #[arg(long)]
    quiet: bool,
}

/// Walks, evaluates and reports.
///
/// # Errors
/// Whatever is wrong with the arguments, the inputs or a check.
pub fn run(args: &WalkArgs) -> Result<()> {
    let missing = |option: &str, wanted: &str| refuse(format!("{option} is missing")).wanted(wanted);
    let model =
        args.model.as_deref().ok_or_else(|| missing("--model", "a name (tiny, glm52) or a directory"))?;
    let corpus = args.corpus.as_deref().ok_or_else(|| missing("--corpus", "the path of a plan.json"))?;
    start_threads(args.threads)?;
    let bars = Bars::new(args.quiet);
    let found = Model::find(model)?;
    let own_weights = args.source.is_none() && args.carrier.is_none();
    let recipe = args.codec.apply(recipe_of(&found, &args.recipe, own_weights)?)?;
    let resolved = found.with_weights(args.source.as_deref(), args.carrier.as_deref())?;
    let work = args.work.clone().unwrap_or_else(|| PathBuf::from("walk-work").join(&resolved.name));
    let mut fallbacks = Vec::new();
    let search = match recipe.codec {
        CodecName::Trellis => note_slow_search(&bars),
        CodecName::Kaiju1 => {
            bars.note("codec kaiju1: bits, search and rotation of the recipe are the trellis codec's and play no part");
            best_search()
        }
    };
    if recipe.codec == CodecName::Trellis && search.name() != "avx512-fp16" {
        fallbacks.push((format!("tile search without AVX512-FP16 ({})", search.name()), 1));
    }

    let options = WalkOptions {
        keep_states: args.keep_states,
        stop_after: args.pilot_stop_after_layer,
        source_inventory: args.source_inventory.clone(),
        carrier_inventory: args.carrier_inventory.clone(),
    };
    let mut walk = Walk::open(&resolved, recipe, corpus, &work, options, &bars)?;
    let codec = walk.codec(search)?;
    let mut outcome = walk.run(&codec, &bars)?;
    if let Some(layer) = args.pilot_stop_after_layer {
        let (feasibility, path) = write_feasibility(&walk, &outcome, layer)?;
        match args.json {
            true => emit(&mut stdout(), "feasibility", &feasibility)?,
            false => {
                let text = format!("{}report: {}\n", feasibility.render(), path.display());
                print(&mut stdout(), &text)?;
            }
        }
        if !outcome.complete {
            return Ok(());
        }
    }
    let started = Instant::now();
    let evaluation = walk.result().and_then(|result| {
        let (geometry, source) = (&walk.geometry, walk.source.as_ref());
        evaluate(geometry, source, &result, &walk.corpus, args.state.into(), &bars)
    });
    let evaluation = evaluation.map_err(|error| match error {
        Error::Interrupted(_) => Error::Interrupted(
            "the walk is complete; its evaluation is made anew by the same command".to_owned(),
        ),
        other => other,
    })?;
    outcome.stage_seconds.push(("evaluate".to_owned(), started.elapsed().as_secs_f64()));
    fallbacks.append(&mut outcome.fallbacks);

    let engine = match walk.recipe.codec {
        CodecName::Trellis => search.name(),
        CodecName::Kaiju1 => kaiju::best_search().name(),
    };
    let report = report(&walk, outcome, fallbacks, evaluation, &resolved.name, engine);
    match args.json {
        false => print(&mut stdout(), &report.render_table())?,
        true => {
            for layer in &report.layers {
                emit(&mut stdout(), "layer", layer)?;
            }
            emit(&mut stdout(), "report", &report)?;
        }
    }
    // Printed first: a disk that is full takes nothing from what the evaluation found.
    write_report(&walk.work().join(REPORT_FILE), &report)
}

fn report(
    walk: &Walk,
    outcome: Outcome,
    fallbacks: Vec<(String, u64)>,
    evaluation: Option<Evaluation>,
    model: &str,
    search: &str,
) -> WalkReport {
    let own = |layer: LayerOutcome| match layer.rates {
        LayerRates::Bits(counts) => LayerReport::new(layer.layer, counts, layer.heldout_error, layer.seconds),
        LayerRates::Settings { counts, bits, weights } => {
            let rates = (counts, bits as f64 / weights as f64);
            LayerReport::of_settings(layer.layer, rates, layer.heldout_error, layer.seconds)
        }
    };
    let layers: Vec<LayerReport> = outcome.layers.into_iter().map(own).collect();
    let bits_per_weight = match walk.recipe.codec {
        CodecName::Trellis => bits_per_weight(layers.iter().map(|layer| &layer.bit_counts)),
        // All layers have the same number of weights.
        CodecName::Kaiju1 => {
            layers.iter().map(|layer| layer.bits_per_weight).sum::<f64>() / layers.len() as f64
        }
    };
    WalkReport {
        model: model.to_owned(),
        recipe: walk.recipe.variant.clone(),
        codec: codec_name(&walk.recipe),
        search_engine: search.to_owned(),
        threads: rayon::current_num_threads(),
        bits_per_weight,
        layers,
        stage_seconds: outcome.stage_seconds,
        fallbacks,
        evaluation,
        output_dir: walk.finished_folder().display().to_string(),
    }
}

/// The codec in the report's words.
fn codec_name(recipe: &Recipe) -> String {
    match &recipe.kaiju1 {
        None => "trellis (mcg)".to_owned(),
        Some(knobs) if knobs.rungs.is_empty() => {
            format!("kaiju1 ({}: {})", knobs.preset.as_str(), knobs.setting())
        }
        Some(knobs) => format!("kaiju1 (by expert, {} settings)", knobs.rungs.len()),
    }
}
