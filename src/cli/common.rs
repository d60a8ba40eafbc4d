//! What several commands share: which model, by which recipe, on how many threads.

use std::io::stdout;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::output::{emit, print};
use super::progress::Bars;
use crate::codec::trellis::search::{TileSearch, best_search};
use crate::config::{Model, Recipe, ResolvedModel};
use crate::error::{Result, refuse};
use crate::eval::StateType;
use crate::study::bench::{BenchOptions, only_trellis};
use crate::walk::progress::Observer;

/// Threads that can be asked for.
const MAX_THREADS: usize = 1024;

/// State types offered on the command line.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum EvaluationState {
    /// f32: measures the experts alone.
    F32,
    /// BF16: as a BF16 runtime carries it.
    Bf16,
}

impl From<EvaluationState> for StateType {
    fn from(state: EvaluationState) -> Self {
        match state {
            EvaluationState::F32 => Self::F32,
            EvaluationState::Bf16 => Self::Bf16,
        }
    }
}

/// Starts so many threads; all cores where it is none.
///
/// # Errors
/// A number out of range, or threads that cannot be started.
pub fn start_threads(threads: Option<usize>) -> Result<()> {
    let Some(threads) = threads else { return Ok(()) };
    if !(1..=MAX_THREADS).contains(&threads) {
        return refuse(format!("--threads {threads}")).wanted(format!("1 to {MAX_THREADS}")).err();
    }
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().map_err(|error| {
        refuse(format!("{threads} threads cannot be started: {error}")).field("--threads").into()
    })
}

/// How a command that reads and reports runs.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Threads. What is printed does not depend on it, times aside [default: all cores].
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,

    /// Print JSON lines on stdout instead of text.
    #[arg(long)]
    pub json: bool,

    /// No progress on stderr, only notes.
    #[arg(long)]
    pub quiet: bool,
}

impl RunArgs {
    /// Starts the threads.
    ///
    /// # Errors
    /// As [`start_threads`].
    pub fn begin(&self) -> Result<Bars> {
        start_threads(self.threads)?;
        Ok(Bars::new(self.quiet))
    }

    /// Prints a report: as a JSON line of this kind, or as text.
    ///
    /// # Errors
    /// When standard output cannot be written.
    pub fn print(&self, kind: &str, report: &impl Serialize, text: impl FnOnce() -> String) -> Result<()> {
        match self.json {
            true => emit(&mut stdout(), kind, report),
            false => print(&mut stdout(), &text()),
        }
    }
}

/// The recipe of a model that `choice` means. A plain model directory is its own source and carrier unless it is told
/// otherwise (`own_weights`); only a registered model can say so itself.
///
/// # Errors
/// As [`Recipe::choose`].
pub fn recipe_of(model: &Model, choice: &str, own_weights: bool) -> Result<Recipe> {
    let mut recipe = Recipe::choose(choice, model.recipe_path().as_deref())?;
    if model.recipe_path().is_none() && own_weights {
        recipe.allow_same_source_and_carrier = true;
    }
    Ok(recipe)
}

/// Says so where the tile search of this machine is a slow one.
pub fn note_slow_search(bars: &Bars) -> &'static dyn TileSearch {
    let search = best_search();
    if search.name() != "avx512-fp16" {
        bars.note(&format!(
            "no AVX512-FP16 on this machine: the {} tile search runs, which is slow",
            search.name()
        ));
    }
    search
}

/// Arguments of the studies.
#[derive(Debug, Args)]
pub struct StudyArgs {
    /// Model: a name in a `models/` folder (tiny, glm52), or a directory with config.json and weights.
    #[arg(long, value_name = "NAME|DIR")]
    pub model: String,

    /// Corpus plan: which texts calibrate the walk and which evaluate it.
    #[arg(long, value_name = "PLAN.JSON")]
    pub corpus: PathBuf,

    /// MoE layers to study, comma-separated.
    #[arg(long, value_name = "LAYERS", value_delimiter = ',', required = true)]
    pub layers: Vec<usize>,

    /// BF16 checkpoint the routed experts are read from, instead of the model's own.
    #[arg(long, value_name = "DIR")]
    pub source: Option<PathBuf>,

    /// Checkpoint everything else comes from, instead of the model's own.
    #[arg(long, value_name = "DIR")]
    pub carrier: Option<PathBuf>,

    /// Where everything is written: by default `walk-work/<model>-study`. What is finished there is adopted.
    #[arg(long, value_name = "DIR")]
    pub work: Option<PathBuf>,

    /// Base recipe: default (the model's own), fast, or a recipe.json.
    #[arg(long, value_name = "RECIPE", default_value = "default")]
    pub recipe: String,

    /// Threads. The figures do not depend on it [default: all cores].
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,

    /// Type of the state between layers in evaluations.
    #[arg(long, value_name = "TYPE", value_enum, default_value_t = EvaluationState::F32)]
    pub state: EvaluationState,

    /// Print JSON lines on stdout instead of tables.
    #[arg(long)]
    pub json: bool,

    /// No progress on stderr, only notes.
    #[arg(long)]
    pub quiet: bool,
}

/// A study that can begin.
pub struct Begun {
    /// Progress.
    pub bars: Bars,
    /// The model with its weights.
    pub model: ResolvedModel,
    /// The base recipe.
    pub recipe: Recipe,
    /// Work directory, layers, state type.
    pub bench: BenchOptions,
    /// The tile search.
    pub search: &'static dyn TileSearch,
}

impl StudyArgs {
    /// Starts the threads and finds what the arguments name.
    ///
    /// # Errors
    /// What is wrong with any of it.
    pub fn begin(&self) -> Result<Begun> {
        start_threads(self.threads)?;
        let bars = Bars::new(self.quiet);
        let found = Model::find(&self.model)?;
        let own_weights = self.source.is_none() && self.carrier.is_none();
        let recipe = recipe_of(&found, &self.recipe, own_weights)?;
        only_trellis(&recipe)?;
        let resolved = found.with_weights(self.source.as_deref(), self.carrier.as_deref())?;
        let default = || PathBuf::from("walk-work").join(format!("{}-study", resolved.name));
        let work = self.work.clone().unwrap_or_else(default);
        let bench = BenchOptions { work, layers: self.layers.clone(), state: self.state.into() };
        let search = note_slow_search(&bars);
        Ok(Begun { bars, model: resolved, recipe, bench, search })
    }
}
