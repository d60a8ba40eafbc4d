//! Everything an estimate says, as data: counts, sizes, rates, stages, and the record it is held against.

use serde::Serialize;

use super::UNVERIFIED;
use super::cost::{End, Model};
use super::counts::LayerCounts;
use super::machine::Machine;
use super::project::{StageProjection, hours};
use super::record::{self, Line, Sizes};
use super::size::{Disk, Memory, Parameters, disk, memory};
use super::tokens::Tokens;
use super::work::Op;
use crate::config::{Geometry, Recipe};
use crate::error::Result;

/// One kind of work in a stage.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Part {
    /// What is done.
    pub op: Op,
    /// On one thread while the others wait.
    pub alone: bool,
    /// How much, each time.
    pub amount: f64,
    /// Of what.
    pub unit: &'static str,
    /// Seconds a unit.
    pub seconds_a_unit: f64,
    /// Amount times rate.
    pub seconds: f64,
}

/// One stage at both ends of the planning range.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Stage {
    /// At the low end.
    pub least: StageProjection,
    /// At the high end.
    pub most: StageProjection,
    /// What is counted, in words.
    pub model: &'static str,
    /// Amounts times rates at the high end, the longest first.
    pub parts: Vec<Part>,
}

/// A whole estimate.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Estimate {
    /// Always [`UNVERIFIED`].
    pub status: &'static str,
    /// The model's name.
    pub model: String,
    /// The recipe's variant.
    pub recipe: String,
    /// MoE layers.
    pub layers: u64,
    /// Tokens of the plan.
    pub tokens: Tokens,
    /// One layer's encodes.
    pub layer: LayerCounts,
    /// All layers' full encodes.
    pub encodes: [u64; 2],
    /// Weights of the model.
    pub parameters: Parameters,
    /// Bytes on disk.
    pub disk: Disk,
    /// Bytes in memory.
    pub memory: Memory,
    /// The machine.
    pub machine: Machine,
    /// The stages.
    pub stages: Vec<Stage>,
    /// Hours in all, low and high end.
    pub hours: [f64; 2],
    /// The record's counts against these; empty for another model or recipe.
    pub record_counts: Vec<Line>,
    /// The record's sizes against these.
    pub record_sizes: Option<Sizes>,
}

/// What an estimate is made from.
pub struct Inputs<'a> {
    /// The model's name.
    pub name: &'a str,
    /// Its geometry.
    pub geometry: &'a Geometry,
    /// `num_nextn_predict_layers` of its config.
    pub mtp_layers: u64,
    /// The recipe.
    pub recipe: &'a Recipe,
    /// Tokens of the plan.
    pub tokens: Tokens,
    /// The machine.
    pub machine: Machine,
}

impl Estimate {
    /// Counts, sizes and hours together.
    ///
    /// # Errors
    /// As [`Recipe::upgrades`].
    pub fn new(inputs: Inputs<'_>) -> Result<Self> {
        let Inputs { name, geometry, mtp_layers, recipe, tokens, machine } = inputs;
        let parameters = Parameters::of(geometry, mtp_layers);
        // A carrier of its own is not known; its tensors in BF16 stand in for it.
        let carrier = match recipe.allow_same_source_and_carrier {
            true => 0,
            false => parameters.carried_bf16_bytes(),
        };
        let checkpoints = [parameters.bf16_bytes(), carrier];
        let stages = stages(geometry, recipe, &tokens, &machine, checkpoints)?;
        let layers = geometry.moe_layers().len() as u64;
        let layer = LayerCounts::of(geometry, recipe);
        let disk = disk(geometry, recipe, &tokens)?;
        let (record_counts, record_sizes) = match record::applies(geometry, recipe)? {
            true => (record::counts(&layer), Some(record::sizes(geometry, recipe, &disk, &parameters))),
            false => (Vec::new(), None),
        };
        let sum = |end: fn(&Stage) -> &StageProjection| {
            hours(&stages.iter().map(|stage| end(stage).clone()).collect::<Vec<_>>())
        };
        Ok(Self {
            status: UNVERIFIED,
            model: name.to_owned(),
            recipe: recipe.variant.clone(),
            layers,
            encodes: [layers * layer.all.least, layers * layer.all.most],
            memory: memory(geometry, recipe, &tokens, machine.threads),
            hours: [sum(|stage| &stage.least), sum(|stage| &stage.most)],
            layer,
            parameters,
            disk,
            stages,
            tokens,
            machine,
            record_counts,
            record_sizes,
        })
    }
}

fn stages(
    geometry: &Geometry,
    recipe: &Recipe,
    tokens: &Tokens,
    machine: &Machine,
    checkpoints: [u64; 2],
) -> Result<Vec<Stage>> {
    let model = Model::new(geometry, recipe, tokens, machine.threads, checkpoints)?;
    let [least, most] = [End::Least, End::Most].map(|end| model.stages(end));
    let made = least.into_iter().zip(most).map(|(least, most)| {
        let projected = |stage: &super::cost::StageWork| {
            StageProjection::new(stage.stage, stage.times, machine.seconds(&stage.shared, &stage.alone))
        };
        let part = |(op, amount): (Op, f64), alone: bool| {
            let seconds_a_unit = if alone { machine.alone_seconds(op) } else { machine.shared_seconds(op) };
            Part { op, alone, amount, unit: op.unit(), seconds_a_unit, seconds: amount * seconds_a_unit }
        };
        let shared = most.shared.amounts().map(|amount| part(amount, false));
        let mut parts: Vec<Part> =
            shared.chain(most.alone.amounts().map(|amount| part(amount, true))).collect();
        parts.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        Stage { least: projected(&least), most: projected(&most), model: most.model, parts }
    });
    Ok(made.collect())
}
