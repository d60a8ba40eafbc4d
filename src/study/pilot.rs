//! Pilots: what the record proposes to try, each judged by its own falsification rule on both halves of the held-out
//! rows. A pilot changes no recipe: it prints accept or reject, and the figures.

use std::path::Path;

use serde::Serialize;

use super::bench::{Bench, BenchOptions};
use super::trial::{Halves, TrialExpert, check_repeats, down_factors, finalize, halves};
use crate::choose::pilots::CLIP;
use crate::codec::PackedMatrix;
use crate::codec::trellis::search::TileSearch;
use crate::config::recipe::Decimal;
use crate::config::{Recipe, ResolvedModel};
use crate::error::{Result, refuse};
use crate::eval::table::{aligned, figure};
use crate::walk::capture::LayerCapture;
use crate::walk::finals::{FinalExpert, read_records};
use crate::walk::layer::{LayerChoices, LayerWork};
use crate::walk::progress::Observer;

/// Largest share of output factors that may be clipped.
pub const CLIPPED_SHARE: f64 = 0.01;
/// The incumbent share of the mean diagonal, and those tried beside it.
pub const SIGMA: f64 = 0.025;
const SIGMAS: [f64; 3] = [0.01, 0.05, 0.10];
/// Least that the worst expert's smallest over largest pivot may be, as a share of the incumbent's.
pub const HEALTH: f64 = 0.5;

/// A pilot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Pilot {
    /// Least-squares output factors folded into svh.
    OutputRescale,
    /// sigma_reg of gate and up, and of down.
    SigmaReg,
    /// A cold expert's input diagonal moved towards the layer's median.
    ColdShrinkage,
}

impl Pilot {
    /// What it is rejected by.
    pub fn rule(self) -> String {
        match self {
            Self::OutputRescale => format!(
                "rejected if the held-out error rises in either half, or if more than {} % of the factors are outside {} to {}",
                100.0 * CLIPPED_SHARE,
                CLIP.0,
                CLIP.1
            ),
            Self::SigmaReg => format!(
                "rejected unless the held-out error falls in both halves against {SIGMA}, and the worst expert's smallest over \
                 largest pivot stays above {HEALTH} of the incumbent's"
            ),
            Self::ColdShrinkage => {
                "rejected unless the held-out error of the cold experts falls in both halves".to_owned()
            }
        }
    }
}

/// What a pilot found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PilotReport {
    /// The pilot.
    pub pilot: Pilot,
    /// What it is rejected by.
    pub rule: String,
    /// Name of the model.
    pub model: String,
    /// Name of the base recipe.
    pub recipe: String,
    /// By layer.
    pub layers: Vec<PilotLayer>,
}

/// One layer of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PilotLayer {
    /// The layer.
    pub layer: usize,
    /// Experts that are judged.
    pub experts: usize,
    /// Held-out error without the pilot, by half.
    pub incumbent: Halves,
    /// What was tried.
    pub arms: Vec<Arm>,
}

/// One thing tried.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Arm {
    /// What.
    pub arm: String,
    /// Held-out error by half.
    pub error: Halves,
    /// Relative change against the incumbent, by half.
    pub change: Halves,
    /// Share of output factors clipped, where there are any.
    pub clipped: Option<f64>,
    /// Worst pivot ratio over that of the incumbent, where it is judged.
    pub health: Option<f64>,
    /// The verdict.
    pub accepted: bool,
    /// It in words.
    pub verdict: String,
}

/// Runs a pilot on each layer. `min_fit_rows` replaces the base recipe's, so that experts are cold.
///
/// # Errors
/// Whatever a walk or an encode refuses; a pilot on cold experts where none is cold.
pub fn pilot(
    which: Pilot,
    model: &ResolvedModel,
    base: Recipe,
    plan: &Path,
    (options, min_fit_rows): (BenchOptions, Option<usize>),
    search: &'static dyn TileSearch,
    observer: &dyn Observer,
) -> Result<PilotReport> {
    let (incumbent, folder) = incumbent(which, &base, min_fit_rows)?;
    let mut bench = Bench::open(model, base.clone(), plan, options, search, observer)?;
    let mut layers = Vec::new();
    for layer in bench.layers().to_vec() {
        let capture = bench.capture(layer)?;
        let (records, choices) = bench.encode(&capture, &folder, &incumbent, |work, encoded, _| {
            Ok((read_records(work, &encoded.summary)?, work.choices()))
        })?;
        observer.begin("pilot", Some(layer), 1);
        layers.push(judge_layer(which, &bench, (&capture, &choices), &incumbent, &records)?);
        observer.advance("judged");
        observer.end();
    }
    Ok(PilotReport {
        pilot: which,
        rule: which.rule(),
        model: model.name.clone(),
        recipe: base.variant,
        layers,
    })
}

/// The recipe a pilot is held against, and its folder: the base without the pilot.
fn incumbent(which: Pilot, base: &Recipe, min_fit_rows: Option<usize>) -> Result<(Recipe, String)> {
    let mut recipe = base.clone();
    match which {
        Pilot::OutputRescale => recipe.output_rescale = false,
        Pilot::SigmaReg => (recipe.sigma_reg, recipe.sigma_reg_down) = (Decimal(SIGMA), None),
        Pilot::ColdShrinkage => recipe.cold_diagonal_shrinkage = false,
    }
    recipe.min_fit_rows = min_fit_rows.unwrap_or(recipe.min_fit_rows);
    let recipe = recipe.checked()?;
    if recipe == *base {
        return Ok((recipe, super::ablation::BASE.to_owned()));
    }
    // Named by what it is, so that another option finds its own folder.
    let folder = format!("incumbent-{}", &recipe.identity_hash()?[..12]);
    Ok((recipe, folder))
}

fn judge_layer(
    which: Pilot,
    bench: &Bench<'_>,
    (capture, choices): (&LayerCapture, &LayerChoices),
    incumbent: &Recipe,
    records: &[FinalExpert],
) -> Result<PilotLayer> {
    let layer = capture.record.layer;
    let health = which == Pilot::SigmaReg;
    let trial =
        |recipe: &Recipe| bench.with_work(capture, recipe, choices, |work| finalize(work, records, health));
    let all = |_: usize| true;
    let own = trial(incumbent)?;
    bench.with_work(capture, incumbent, choices, |work| check_repeats(work, records, &own))?;
    let measure = |trials: &[TrialExpert]| {
        bench.with_work(capture, incumbent, choices, |work| halves(work, trials, all))
    };
    let mut arms = Vec::new();
    match which {
        Pilot::OutputRescale => {
            let reference = measure(&own)?;
            let rescaled = trial(&Recipe { output_rescale: true, ..incumbent.clone() })?;
            let clipped: usize = rescaled.iter().map(|trial| trial.clipped).sum();
            let outputs = rescaled.iter().map(|trial| trial.packed[0].n + trial.packed[1].n).sum::<usize>();
            let gate_up = clipped as f64 / outputs as f64;
            arms.push(Arm::rescale("gate and up", measure(&rescaled)?, reference, gate_up));
            for (name, mut trials, before) in [("down", own, 0.0), ("gate, up and down", rescaled, gate_up)] {
                let down =
                    bench.with_work(capture, incumbent, choices, |work| down_factors(work, &trials))?;
                for trial in &mut trials {
                    trial.packed[2].scale_outputs(&down.factors)?;
                }
                let clipped = before.max(down.clipped as f64 / down.factors.len() as f64);
                arms.push(Arm::rescale(name, measure(&trials)?, reference, clipped));
            }
            Ok(PilotLayer { layer, experts: records.len(), incumbent: reference, arms })
        }
        Pilot::SigmaReg => {
            let reference = measure(&own)?;
            let worst = |trials: &[TrialExpert], side: usize| {
                trials.iter().map(|trial| trial.health[side]).fold(f64::INFINITY, f64::min)
            };
            for (side, name) in [(0, "gate and up"), (1, "down")] {
                for sigma in SIGMAS.map(Decimal) {
                    let (gate_up, down) =
                        if side == 0 { (sigma, Decimal(SIGMA)) } else { (Decimal(SIGMA), sigma) };
                    let recipe =
                        Recipe { sigma_reg: gate_up, sigma_reg_down: Some(down), ..incumbent.clone() };
                    let trials = trial(&recipe.checked()?)?;
                    let health = worst(&trials, side) / worst(&own, side);
                    arms.push(Arm::sigma(
                        format!("{name} {}", sigma.0),
                        measure(&trials)?,
                        reference,
                        health,
                    ));
                }
            }
            Ok(PilotLayer { layer, experts: records.len(), incumbent: reference, arms })
        }
        Pilot::ColdShrinkage => {
            let cold = bench.with_work(capture, incumbent, choices, |work: &LayerWork<'_>| {
                Ok((0..records.len()).map(|id| work.is_cold(id)).collect::<Vec<bool>>())
            })?;
            let experts = cold.iter().filter(|cold| **cold).count();
            if experts == 0 {
                return refuse(format!("no expert has fewer than {} fit rows", incumbent.min_fit_rows))
                    .layer(layer)
                    .field("min_fit_rows")
                    .wanted("--min-fit-rows N with N above the rows of some expert")
                    .err();
            }
            let measure = |trials: &[TrialExpert]| {
                bench.with_work(capture, incumbent, choices, |work| halves(work, trials, |id| cold[id]))
            };
            let reference = measure(&own)?;
            let trials = trial(&Recipe { cold_diagonal_shrinkage: true, ..incumbent.clone() })?;
            arms.push(Arm::falls("shrunk diagonal".to_owned(), measure(&trials)?, reference));
            Ok(PilotLayer { layer, experts, incumbent: reference, arms })
        }
    }
}

impl Arm {
    fn new(arm: String, error: Halves, incumbent: Halves) -> Self {
        let change = [0, 1].map(|half| error[half] / incumbent[half] - 1.0);
        Self { arm, error, change, clipped: None, health: None, accepted: false, verdict: String::new() }
    }

    /// Judged by not rising in either half, and by what was clipped.
    fn rescale(arm: &str, error: Halves, incumbent: Halves, clipped: f64) -> Self {
        let mut judged = Self::new(arm.to_owned(), error, incumbent);
        judged.clipped = Some(clipped);
        let why = match judged.half_but(|change| change <= 0.0) {
            Some(half) => Some(format!("the error rises in half {}", half + 1)),
            None if clipped > CLIPPED_SHARE => {
                Some(format!("{} % of the factors are clipped", 100.0 * clipped))
            }
            None => None,
        };
        judged.decide(why)
    }

    /// Judged by falling in both halves.
    fn falls(arm: String, error: Halves, incumbent: Halves) -> Self {
        let judged = Self::new(arm, error, incumbent);
        let why = judged.not_falling();
        judged.decide(why)
    }

    /// Judged by falling in both halves, and by the pivots.
    fn sigma(arm: String, error: Halves, incumbent: Halves, health: f64) -> Self {
        let mut judged = Self::new(arm, error, incumbent);
        judged.health = Some(health);
        let unhealthy = || {
            // Written so that a ratio that is no number fails too.
            let healthy = health >= HEALTH;
            (!healthy)
                .then(|| format!("the worst pivot ratio falls to {} of the incumbent's", figure(health, 3)))
        };
        let why = judged.not_falling().or_else(unhealthy);
        judged.decide(why)
    }

    /// The first half whose change is not as it should be; one that is no number never is.
    fn half_but(&self, good: impl Fn(f64) -> bool) -> Option<usize> {
        self.change.iter().position(|&change| !good(change))
    }

    fn not_falling(&self) -> Option<String> {
        let half = self.half_but(|change| change < 0.0)?;
        Some(format!("the error does not fall in half {}", half + 1))
    }

    fn decide(mut self, why: Option<String>) -> Self {
        self.accepted = why.is_none();
        self.verdict = why.map_or("accept".to_owned(), |why| format!("reject: {why}"));
        self
    }
}

impl PilotReport {
    /// The report as plain text.
    pub fn render_table(&self) -> String {
        let name = serde_json::to_value(self.pilot).ok().and_then(|name| name.as_str().map(str::to_owned));
        let mut text = format!(
            "pilot {} on model {}, recipe {}\n{}\n",
            name.unwrap_or_default(),
            self.model,
            self.recipe,
            self.rule
        );
        for layer in &self.layers {
            text.push_str(&format!("\nlayer {}, {} experts judged\n", layer.layer, layer.experts));
            let percent = |change: f64| format!("{:+.2} %", 100.0 * change);
            let mut rows = vec![vec![
                "incumbent".to_owned(),
                figure(layer.incumbent[0], 6),
                figure(layer.incumbent[1], 6),
            ]];
            rows.extend(layer.arms.iter().map(|arm| {
                vec![
                    arm.arm.clone(),
                    figure(arm.error[0], 6),
                    figure(arm.error[1], 6),
                    percent(arm.change[0]),
                    percent(arm.change[1]),
                    arm.clipped.map_or("-".to_owned(), |share| format!("{:.2} %", 100.0 * share)),
                    arm.health.map_or("-".to_owned(), |health| figure(health, 3)),
                ]
            }));
            let header = ["arm", "half 1", "half 2", "change 1", "change 2", "clipped", "pivots"];
            text.push_str(&aligned(&header, &rows));
            text.push('\n');
            for arm in &layer.arms {
                text.push_str(&format!("{}: {}\n", arm.arm, arm.verdict));
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rescale_may_not_rise_in_either_half_nor_clip_much() {
        let of = |error, clipped| Arm::rescale("x", error, [1.0, 2.0], clipped);
        assert!(of([1.0, 1.9], 0.01).accepted);
        assert!(!of([1.001, 1.0], 0.0).accepted);
        assert!(!of([0.5, 2.001], 0.0).accepted);
        assert!(!of([f64::NAN, 1.0], 0.0).accepted);
        let clipped = of([0.5, 0.5], 0.011);
        assert!(!clipped.accepted && clipped.verdict.contains("clipped"), "{}", clipped.verdict);
    }

    #[test]
    fn a_sigma_has_to_fall_in_both_halves_and_stay_healthy() {
        let of = |error, health| Arm::sigma("x".into(), error, [1.0, 1.0], health);
        assert!(of([0.99, 0.98], 0.5).accepted);
        assert!(!of([0.99, 1.0], 1.0).accepted);
        assert!(!of([0.9, 0.9], 0.49).accepted);
        assert!(!of([0.9, 0.9], f64::NAN).accepted);
        assert!(of([0.9, 0.9], 0.4).verdict.contains("0.400"));
    }

    #[test]
    fn a_pilot_is_held_against_the_base_without_it() {
        let base = Recipe { output_rescale: true, ..Recipe::built_in().unwrap() };
        let (recipe, folder) = incumbent(Pilot::OutputRescale, &base, None).unwrap();
        assert!(!recipe.output_rescale && folder.starts_with("incumbent-"), "{folder}");
        let plain = Recipe::built_in().unwrap();
        assert_eq!(incumbent(Pilot::SigmaReg, &plain, None).unwrap(), (plain.clone(), "base".to_owned()));
        let (cold, folder) = incumbent(Pilot::ColdShrinkage, &plain, Some(9)).unwrap();
        assert_eq!((cold.min_fit_rows, folder == "base"), (9, false));
    }
}
