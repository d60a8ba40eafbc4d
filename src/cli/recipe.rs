//! `walk recipe`: the complete recipe of a model, its identity, and what every knob means.

use std::io::{Write, stderr, stdout};

use clap::Args;
use serde::Serialize;

use super::codec::CodecArgs;
use super::common::recipe_of;
use super::output::{emit, print};
use crate::config::knobs::ExplainedKnob;
use crate::config::{Model, Recipe};
use crate::error::{Result, refuse};
use crate::store::hash::Hash;

/// Arguments of `walk recipe`.
#[derive(Debug, Args)]
#[command(after_long_help = "\
OUTPUT
  The recipe as JSON with every field, also those a recipe file leaves to their defaults: on stdout alone, so that
      walk recipe --model tiny > my-recipe.json
  makes a file that `--recipe my-recipe.json` loads. Its identity hash goes to stderr; it is the `recipe_sha256` of the journal
  of a walk by this recipe.
  --json     one line {\"type\":\"recipe\",\"data\":{\"identity_sha256\",\"recipe\"}}, with --explain also \"knobs\"
  --explain  instead of the JSON: every knob with its value, its meaning, the values it may have, and where it comes from")]
pub struct RecipeArgs {
    /// Model: a name in a `models/` folder (tiny, glm52), or a directory with config.json.
    #[arg(long, value_name = "NAME|DIR")]
    model: String,

    /// Recipe: default (the model's own), fast, uniform-3, uniform-4, uniform-5, or a recipe.json.
    #[arg(long, value_name = "RECIPE", default_value = "default")]
    recipe: String,

    #[command(flatten)]
    codec: CodecArgs,

    /// Tell of every knob its value, meaning, allowed values and source.
    #[arg(long)]
    explain: bool,

    /// Print one JSON line.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Printed<'a> {
    identity_sha256: Hash,
    recipe: &'a Recipe,
    #[serde(skip_serializing_if = "Option::is_none")]
    knobs: Option<Vec<ExplainedKnob>>,
}

/// Prints the recipe.
///
/// # Errors
/// A model or recipe that does not exist or is out of range.
pub fn run(args: &RecipeArgs) -> Result<()> {
    let recipe = args.codec.apply(recipe_of(&Model::find(&args.model)?, &args.recipe, true)?)?;
    let identity_sha256 = recipe.identity_hash()?;
    let knobs = if args.explain { Some(recipe.explain()?) } else { None };
    if args.json {
        return emit(&mut stdout(), "recipe", &Printed { identity_sha256, recipe: &recipe, knobs });
    }
    if let Some(knobs) = knobs {
        return print(&mut stdout(), &explanation(&knobs, &identity_sha256));
    }
    let json = serde_json::to_string_pretty(&recipe)
        .map_err(|error| refuse(format!("the recipe cannot be put in JSON: {error}")).check())?;
    print(&mut stdout(), &format!("{json}\n"))?;
    // A standard error that is gone takes nothing from the recipe.
    let _ = writeln!(stderr(), "identity {identity_sha256}");
    Ok(())
}

fn explanation(knobs: &[ExplainedKnob], identity: &str) -> String {
    let mut text = format!("identity {identity}\n");
    for knob in knobs {
        text.push_str(&format!(
            "\n{} = {}\n  {}\n  allowed: {}\n  source: {}\n",
            knob.field, knob.value, knob.meaning, knob.allowed, knob.source
        ));
    }
    text
}
