//! `walk synthesize`: checkpoints of seeded noise at a model's full width, for measuring. A developer's command.

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use serde::Serialize;

use super::common::RunArgs;
use crate::config::{Geometry, Model};
use crate::error::{IoContext, Result, refuse};
use crate::store::safetensors_read::SafetensorsFile;
use crate::synthetic::headers::Seconds;
use crate::synthetic::{
    SmallModel, Written, audit_source, audit_v2, packed_layer, write_small_model, write_source_headers,
    write_v2_headers,
};
use crate::walk::progress::{Observer, advance};

/// Bits dealt out to packed modules in turn: a mean of 3.5.
const CYCLE: [u32; 2] = [3, 4];
/// Experts where none are asked for, and not all of the model's.
const FEW_EXPERTS: usize = 4;

/// Arguments of `walk synthesize`.
#[derive(Debug, Args)]
#[command(after_long_help = "\
WHAT IT DOES
  Writes files of a model's full width from seeded noise: the same bytes for any number of threads. They mean nothing; they are
  for measuring time and memory, and for tests of what reads them. What was written is opened and audited.
  By default: a checkpoint with one dense layer, one MoE layer and the MTP block of the model, config, index and tokenizer. A
  token takes at most half of the experts. The vocabulary is the tokenizer's, not the model's, and so is vocab_size.
  --sparse    OUT/source and OUT/v2: index and headers of all the model's tensors as a BF16 checkpoint, and of all its routed
              experts packed at 3 and 4 bits in turn. Payloads are holes, so terabytes take megabytes.
  --packed    one finished v2 layer, the model's first MoE layer: shard of random words (any words decode) and manifest.
EXAMPLES
  walk synthesize /data/noise
  walk synthesize --sparse /data/headers
  walk synthesize --packed --experts 8 /data/layer")]
pub struct SynthesizeArgs {
    /// Directory to write, new or empty.
    #[arg(value_name = "OUT")]
    out: PathBuf,

    /// Model whose widths are taken: a name in a `models/` folder, or a directory with config.json.
    #[arg(long, value_name = "NAME|DIR", default_value = "glm52")]
    model: String,

    /// Routed experts [default: 4; with --sparse the model's own].
    #[arg(long, value_name = "N")]
    experts: Option<usize>,

    /// Model whose tokenizer is copied and gives the vocabulary: a name, or a directory with config.json and tokenizer.json.
    #[arg(long, value_name = "NAME|DIR", default_value = "tiny")]
    tokenizer: String,

    /// Most payload bytes a BF16 shard.
    #[arg(long, value_name = "BYTES", default_value_t = 5_000_000_000)]
    max_shard_bytes: u64,

    /// Seed of all values.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Headers and index of the whole model, without payloads.
    #[arg(long)]
    sparse: bool,

    /// One packed v2 layer instead of a checkpoint.
    #[arg(long, conflicts_with = "sparse")]
    packed: bool,

    #[command(flatten)]
    run: RunArgs,
}

/// What was written and how long readers took.
#[derive(Debug, Serialize)]
struct Made {
    kind: &'static str,
    dir: String,
    tensors: usize,
    shards: usize,
    header_bytes: u64,
    index_bytes: u64,
    payload_bytes: u64,
    write_seconds: f64,
    open_seconds: f64,
    audit_seconds: f64,
}

/// Writes, audits and reports.
///
/// # Errors
/// A model or tokenizer that does not exist; a directory that is not empty or cannot be written; what the audit finds.
pub fn run(args: &SynthesizeArgs) -> Result<()> {
    let bars = args.run.begin()?;
    let model = Model::find(&args.model)?;
    let config = model.config_path();
    let geometry = Geometry::read(&config)?;
    let experts = args.experts.unwrap_or(if args.sparse { geometry.n_routed_experts } else { FEW_EXPERTS });
    if experts == 0 {
        return refuse("no experts").field("--experts").wanted("1 at least").err();
    }
    let made = if args.sparse {
        let (source, v2) = (args.out.join("source"), args.out.join("v2"));
        let made = vec![
            made(
                "source headers",
                &source,
                || write_source_headers(&source, &config, experts, args.max_shard_bytes),
                |written| audit_source(&source, written),
            )?,
            made(
                "v2 headers",
                &v2,
                || write_v2_headers(&v2, &config, experts, &CYCLE),
                |written| {
                    let modules = 3 * experts * geometry.moe_layers().len();
                    let units =
                        (0..modules).map(|at| u64::from(CYCLE[at % (3 * experts) % CYCLE.len()])).sum();
                    audit_v2(&v2, written, units)
                },
            )?,
        ];
        made
    } else if args.packed {
        vec![packed(args, &geometry, experts)?]
    } else {
        let tokenizer = Model::find(&args.tokenizer)?.folder;
        let small = SmallModel {
            config: &config,
            tokenizer: &tokenizer,
            experts,
            shard_bytes: args.max_shard_bytes,
            seed: args.seed,
        };
        bars.begin("synthesize", None, small.tensors()?.len() as u64);
        let write = || write_small_model(&args.out, &small, &|name| advance(&bars, name));
        let made = made("checkpoint", &args.out, write, |written| audit_source(&args.out, written))?;
        bars.end();
        vec![made]
    };
    args.run.print("synthesize", &made, || table(&made))
}

fn made(
    kind: &'static str,
    dir: &Path,
    write: impl FnOnce() -> Result<Written>,
    audit: impl FnOnce(&Written) -> Result<Seconds>,
) -> Result<Made> {
    let started = Instant::now();
    let written = write()?;
    let write_seconds = started.elapsed().as_secs_f64();
    let seconds = audit(&written)?;
    Ok(Made {
        kind,
        dir: dir.display().to_string(),
        tensors: written.specs.len(),
        shards: written.shards,
        header_bytes: written.header_bytes,
        index_bytes: written.index_bytes,
        payload_bytes: written.payload_bytes,
        write_seconds,
        open_seconds: seconds.open,
        audit_seconds: seconds.audit,
    })
}

/// A packed layer has no index: its manifest is what readers go by.
fn packed(args: &SynthesizeArgs, geometry: &Geometry, experts: usize) -> Result<Made> {
    let started = Instant::now();
    let layer = geometry.first_moe_layer();
    let manifest = packed_layer(&args.out, geometry, layer, experts, &CYCLE, args.seed)?;
    let write_seconds = started.elapsed().as_secs_f64();
    let started = Instant::now();
    let path = args.out.join(&manifest.shard);
    let shard = SafetensorsFile::open(&path)?;
    let open_seconds = started.elapsed().as_secs_f64();
    let started = Instant::now();
    for (name, sha256) in &manifest.payload_sha256 {
        if shard.payload_sha256(name)? != *sha256 {
            return Err(refuse("its payload is not what was made").file(&path).tensor(name).check());
        }
    }
    let bytes = std::fs::metadata(&path).at(&path)?.len();
    Ok(Made {
        kind: "v2 layer",
        dir: args.out.display().to_string(),
        tensors: manifest.payload_sha256.len(),
        shards: 1,
        header_bytes: shard.header().data_start,
        index_bytes: 0,
        payload_bytes: bytes - shard.header().data_start,
        write_seconds,
        open_seconds,
        audit_seconds: started.elapsed().as_secs_f64(),
    })
}

fn table(made: &[Made]) -> String {
    let mut text = String::from(
        "kind            tensors  shards  header bytes  index bytes     payload bytes  write s  open s  audit s\n",
    );
    for made in made {
        text.push_str(&format!(
            "{:<14}{:>9}{:>8}{:>14}{:>13}{:>18}{:>9.1}{:>8.2}{:>9.2}\n",
            made.kind,
            made.tensors,
            made.shards,
            made.header_bytes,
            made.index_bytes,
            made.payload_bytes,
            made.write_seconds,
            made.open_seconds,
            made.audit_seconds
        ));
    }
    text
}
