//! `walk inventory`: what a checkpoint directory holds, to the byte.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::common::RunArgs;
use crate::checkpoint::inventory::{Inventory, InventoryFile, Role, open_role};
use crate::error::{IoContext, Result, refuse};
use crate::store::hash::Hash;
use crate::walk::progress::{Observer, advance};

/// Arguments of `walk inventory`.
#[derive(Debug, Args)]
#[command(after_long_help = "\
WHAT IT DOES
  Reads every byte of a checkpoint once, on all cores: of every tensor file, dtype, shape, byte range and SHA-256; of every
  configuration and tokenizer file its SHA-256; of every shard its length. A value that is not finite is refused.
  As a source, the checkpoint must be what a walk's source must be: no sign of quantization in config or files, and every
  routed expert that config.json describes there, BF16, [out, in]. As a carrier it only has to be whole.
OUTPUT
  A table on stdout. Its identity hash is over files and tensors alone: role, folder and threads do not change it, and it is
  the source_inventory_sha256 or carrier_inventory_sha256 of a walk's journal.
  --out   the inventory as canonical JSON (schema walk-inventory-v1), for a walk to hold its checkpoints against
  --json  one line {\"type\":\"inventory\",\"data\":{\"summary\",\"inventory\"}}; with --out the summary alone
EXAMPLES
  walk inventory --role source models/tiny
  walk inventory --role source /data/GLM-5.2-BF16 --out source.json
  walk inventory --role carrier /data/GLM-5.2-carrier --out carrier.json
EXIT CODES
  0 done    2 bad usage, or a checkpoint that cannot have this role    3 interrupted")]
pub struct InventoryArgs {
    /// What the checkpoint is to be in a walk.
    #[arg(long, value_name = "ROLE", value_enum)]
    role: RoleName,

    /// The checkpoint.
    #[arg(value_name = "DIR")]
    dir: PathBuf,

    /// Write the inventory to this file, outside the checkpoint.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,

    #[command(flatten)]
    run: RunArgs,
}

/// Roles on the command line.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum RoleName {
    /// Where routed experts come from: plain BF16.
    Source,
    /// Where everything else comes from.
    Carrier,
}

impl From<RoleName> for Role {
    fn from(role: RoleName) -> Self {
        match role {
            RoleName::Source => Self::Source,
            RoleName::Carrier => Self::Carrier,
        }
    }
}

/// What the table and the JSON line say.
#[derive(Debug, Serialize)]
struct Summary {
    role: Role,
    inventory_sha256: Hash,
    files: usize,
    shards: usize,
    shard_bytes: u64,
    tensors: usize,
    tensor_bytes: u64,
    dtypes: BTreeMap<String, Count>,
    out: Option<String>,
    out_sha256: Option<Hash>,
}

/// Tensors of one dtype.
#[derive(Debug, Default, Serialize)]
struct Count {
    tensors: usize,
    bytes: u64,
}

#[derive(Serialize)]
struct Printed<'a> {
    summary: &'a Summary,
    #[serde(skip_serializing_if = "Option::is_none")]
    inventory: Option<&'a InventoryFile>,
}

/// Takes the inventory and prints or writes it.
///
/// # Errors
/// A checkpoint that is broken or cannot have the role; an output that cannot be written.
pub fn run(args: &InventoryArgs) -> Result<()> {
    let bars = args.run.begin()?;
    if let Some(out) = &args.out {
        refuse_inside(out, &args.dir)?;
    }
    let role = Role::from(args.role);
    let checkpoint = open_role(role, &args.dir)?;
    bars.begin("inventory", None, checkpoint.names().count() as u64);
    let inventory = Inventory::take(&checkpoint, &|name| advance(&bars, name))?;
    bars.end();
    let file = InventoryFile::new(role, inventory)?;
    let out_sha256 = args.out.as_ref().map(|out| file.write(out)).transpose()?;
    let summary = summary(&file, args.out.as_deref(), out_sha256);
    let inventory = args.out.is_none().then_some(&file);
    args.run.print("inventory", &Printed { summary: &summary, inventory }, || table(&summary))
}

/// Refuses an output within the checkpoint: it could replace one of its files.
fn refuse_inside(out: &Path, dir: &Path) -> Result<()> {
    let folder = match out.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    if dir.is_dir() && folder.canonicalize().at(folder)?.starts_with(dir.canonicalize().at(dir)?) {
        return refuse("the output lies in the checkpoint")
            .file(out)
            .field("--out")
            .wanted("a file elsewhere")
            .err();
    }
    Ok(())
}

fn summary(file: &InventoryFile, out: Option<&Path>, out_sha256: Option<Hash>) -> Summary {
    let inventory = &file.inventory;
    let mut dtypes: BTreeMap<String, Count> = BTreeMap::new();
    for tensor in inventory.tensors.values() {
        let count = dtypes.entry(tensor.dtype.clone()).or_default();
        count.tensors += 1;
        count.bytes += tensor.end - tensor.start;
    }
    let shards = inventory.shards();
    Summary {
        role: file.role,
        inventory_sha256: file.inventory_sha256.clone(),
        files: inventory.files.len(),
        shards: shards.len(),
        shard_bytes: shards.values().sum(),
        tensors: inventory.tensors.len(),
        tensor_bytes: dtypes.values().map(|count| count.bytes).sum(),
        dtypes,
        out: out.map(|out| out.display().to_string()),
        out_sha256,
    }
}

fn table(summary: &Summary) -> String {
    let mut text = format!(
        "role      {}\nfiles     {:>8}  configuration and tokenizer\nshards    {:>8}  {} bytes\n\
         tensors   {:>8}  {} bytes\n",
        summary.role.as_str(),
        summary.files,
        summary.shards,
        summary.shard_bytes,
        summary.tensors,
        summary.tensor_bytes
    );
    for (dtype, count) in &summary.dtypes {
        text.push_str(&format!("  {dtype:<8}{:>8}  {} bytes\n", count.tensors, count.bytes));
    }
    text.push_str(&format!("identity  {}\n", summary.inventory_sha256));
    if let Some(out) = &summary.out {
        text.push_str(&format!("written to {out}\n"));
    }
    text
}
