//! The command line: one file a command, progress, machine output.
//!
//! With no subcommand, `walk` is the walk. Machine output is JSON lines on stdout; progress and notes go to stderr.

pub mod ablate;
pub mod assemble;
pub mod audit;
pub mod carrier;
pub mod codec;
pub mod common;
pub mod convert;
pub mod decode;
pub mod dequantize;
pub mod diff;
pub mod doctor;
pub mod encode;
pub mod estimate;
mod estimate_table;
pub mod eval;
pub mod inspect;
pub mod interrupt;
pub mod inventory;
pub mod output;
pub mod pilot;
pub mod progress;
mod published;
pub mod recipe;
pub mod replay;
pub mod synthesize;
pub mod walk;

use clap::{Parser, Subcommand};

use crate::error::Result;

/// Arguments of the `walk` command.
#[derive(Debug, Parser)]
#[command(
    name = "walk",
    version,
    about = "Quantize the routed experts of a GLM-MoE-DSA model to EXL3 (TRELLIS) or KAIJU1, layer by layer, each layer \
             calibrated on the output of the layers already quantized before it.",
    after_long_help = "\
EXAMPLES
  A trained miniature, minutes on two cores:
    walk --model tiny --corpus corpus/plan.json
  GLM-5.2, from local checkpoints:
    walk --model glm52 --source /data/GLM-5.2-BF16 --carrier /data/GLM-5.2-carrier --corpus plan.json
  A baseline with every expert tensor at 3 bits:
    walk --model tiny --corpus corpus/plan.json --recipe uniform-3 --work walk-work/tiny-3
  The other codec, at its preset of about 3 bits, and each expert at the setting that a budget is spent on best:
    walk --model tiny --corpus corpus/plan.json --codec kaiju1 --work walk-work/tiny-kaiju1
    walk --model tiny --corpus corpus/plan.json --codec kaiju1 --target-bpw 3.1 --work walk-work/tiny-by-expert
  Which instruction sets this machine's encoder uses:
    walk doctor
  Whether a walk can be trusted: its gates, and its states made again from its shards:
    walk audit walk-work/tiny
    walk replay --work walk-work/tiny
  What a walk will take on this machine, and what a checkpoint holds:
    walk estimate --model glm52 --corpus plan.json --tokens 1000000
    walk inventory --role source /data/GLM-5.2-BF16 --out source.json
  A carrier with its attention, dense MLPs and shared experts at 6 bits, and a walk from it:
    walk carrier --model tiny --corpus corpus/plan.json --out walk-work/tiny-carrier
    walk --model tiny --corpus corpus/plan.json --carrier walk-work/tiny-carrier --work walk-work/tiny-6
  What each ingredient of the recipe is worth on a layer:
    walk ablate --model tiny --corpus corpus/plan.json --layers 2
  What a checkpoint is worth beside another, and a packed one for software that reads plain ones:
    walk eval assembled --reference tiny --corpus corpus/plan.json
    walk dequantize assembled plain
  Single tensors and files of any model, outside of a walk:
    walk encode --codec kaiju1 models/tiny/model-00001-of-00003.safetensors packed.safetensors
    walk decode packed.safetensors plain.safetensors
  What a checkpoint holds, and how two differ:
    walk inspect walk-work/tiny/v2
    walk diff assembled plain

WHAT IT WRITES (under --work)
  v2/r7-experts-layer-NNN.{safetensors,json}  the quantized experts of a layer and their manifest; with --codec kaiju1
                                              kaiju1/kaiju1-experts-layer-NNN.{safetensors,json}
  JOURNAL.json                                what the walk is of, and the seals of its finished stages
  RECIPE, CONFIG, CORPUS_PLAN, *_INVENTORY    what it was begun with: recipe, geometry, exact tokens, checkpoints
  search/layer-NNN.json                       the chosen vectors, channel orders and scales, with their scores
  layer-NNN/                                  routing, probe ledger, allocation proof, final experts, audits
  states/NNN/                                 the state before the layer in hand
  WALK_COMPLETE.json                          written last; without it the walk is not finished
The same command on the same --work goes on where the last one stopped, also after kill -9 or a full disk: all sealed files are
hashed first, and one that changed is refused by name. Ctrl-C ends after the unit in hand, a second one at once.

EXIT CODES
  0 done    1 a check failed    2 bad usage or input    3 interrupted"
)]
pub struct Cli {
    #[command(flatten)]
    walk: walk::WalkArgs,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Print what this machine's kernels are: tile search, lattice search, matrix product, threads.
    Doctor(doctor::DoctorArgs),
    /// Say what a walk will take: encodes, disk, memory, hours on this machine; needs no weights.
    Estimate(estimate::EstimateArgs),
    /// List what a checkpoint holds, to the byte: every tensor's place and SHA-256, and its config and tokenizer files.
    Inventory(inventory::InventoryArgs),
    /// Print the complete recipe of a model, its identity hash, and what every knob means.
    Recipe(recipe::RecipeArgs),
    /// Put a finished walk and its carrier together as one model directory.
    Assemble(assemble::AssembleArgs),
    /// Cut the experts of an assembled checkpoint for tensor parallelism, or put such slices together again.
    Convert(convert::ConvertArgs),
    /// Check the acceptance gates of a walk again, from what it left.
    Audit(audit::AuditArgs),
    /// Forward the sealed states of a walk again from its sealed shards, and compare them with their successors.
    Replay(replay::ReplayArgs),
    /// Evaluate a checkpoint, plain or packed: perplexity, and divergence from a reference.
    Eval(eval::EvalArgs),
    /// Say what a checkpoint holds: bits by role, layer and tensor, sizes, codebooks, provenance.
    Inspect(inspect::InspectArgs),
    /// Compare two checkpoints, weight by weight.
    Diff(diff::DiffArgs),
    /// Write a packed checkpoint as a plain one.
    Dequantize(dequantize::DequantizeArgs),
    /// Pack weights of one safetensors file to KAIJU1 or EXL3, outside of a walk.
    Encode(Box<encode::EncodeArgs>),
    /// Write the packed weights of one safetensors file as plain ones.
    Decode(decode::DecodeArgs),
    /// Measure what each ingredient of the recipe is worth on a layer.
    Ablate(Box<ablate::AblateArgs>),
    /// Pack the linears that a walk leaves alone (attention, dense MLPs, shared experts) to EXL3: a smaller carrier.
    Carrier(Box<carrier::CarrierArgs>),
    /// Judge a proposed ingredient by its own falsification rule.
    Pilot(Box<pilot::PilotArgs>),
    /// Write checkpoints of seeded noise at a model's full width, for measuring.
    #[command(hide = true)]
    Synthesize(synthesize::SynthesizeArgs),
}

/// Runs the parsed command.
///
/// # Errors
/// Whatever the command refuses; the error knows its exit code.
pub fn run(cli: Cli) -> Result<()> {
    match cli.command {
        Some(Command::Doctor(args)) => doctor::run(&args),
        Some(Command::Estimate(args)) => estimate::run(&args),
        Some(Command::Inventory(args)) => inventory::run(&args),
        Some(Command::Recipe(args)) => recipe::run(&args),
        Some(Command::Replay(args)) => replay::run(&args),
        Some(Command::Carrier(args)) => carrier::run(&args),
        Some(Command::Pilot(args)) => pilot::run(&args),
        Some(Command::Assemble(args)) => assemble::run(&args),
        Some(Command::Convert(args)) => convert::run(&args),
        Some(Command::Audit(args)) => audit::run(&args),
        Some(Command::Ablate(args)) => ablate::run(&args),
        Some(Command::Eval(args)) => eval::run(&args),
        Some(Command::Inspect(args)) => inspect::run(&args),
        Some(Command::Diff(args)) => diff::run(&args),
        Some(Command::Dequantize(args)) => dequantize::run(&args),
        Some(Command::Encode(args)) => encode::run(&args),
        Some(Command::Decode(args)) => decode::run(&args),
        Some(Command::Synthesize(args)) => synthesize::run(&args),
        None => walk::run(&cli.walk),
    }
}
