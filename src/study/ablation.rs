//! The ablation: the base recipe, then each of its ingredients switched off alone, on the same captured layer.

use super::bench::{Bench, BenchOptions};
use super::ingredients::{Skipped, Variant, variants};
use super::report::{AblationReport, BaseRow, LayerAblation, VariantRow};
use super::variant::{VariantResult, adopt, measure};
use crate::codec::trellis::search::TileSearch;
use crate::config::{Recipe, ResolvedModel};
use crate::error::Result;
use crate::walk::progress::Observer;

use std::path::Path;

/// Name of the base recipe's folder and row.
pub const BASE: &str = "base";

/// What an ablation is asked for.
#[derive(Debug, Clone)]
pub struct AblateOptions {
    /// Where and on what.
    pub bench: BenchOptions,
    /// Ingredients to switch; all where it is none.
    pub only: Option<Vec<String>>,
}

/// Processes each layer under the base recipe and every variant, adopting what an earlier run finished. `done` is given
/// each layer's part of the report as soon as it is whole.
///
/// # Errors
/// Whatever a walk or a variant refuses; nothing is reported for a variant that could not be measured.
pub fn ablate(
    model: &ResolvedModel,
    base: Recipe,
    plan: &Path,
    options: AblateOptions,
    search: &'static dyn TileSearch,
    observer: &dyn Observer,
    mut done: impl FnMut(&LayerAblation) -> Result<()>,
) -> Result<AblationReport> {
    // Before anything is computed: an ingredient that is misspelt, a variant out of range.
    let (variants, skipped) = variants(&base, options.only.as_deref())?;
    let (recipe, recipe_sha256) = (base.variant.clone(), base.identity_hash()?);
    let mut bench = Bench::open(model, base.clone(), plan, options.bench, search, observer)?;
    let mut layers = Vec::new();
    for layer in bench.layers().to_vec() {
        let report = ablate_layer(&mut bench, layer, &base, &variants, &skipped)?;
        done(&report)?;
        layers.push(report);
    }
    Ok(AblationReport {
        model: model.name.clone(),
        recipe,
        recipe_sha256,
        state: bench.state(),
        search_engine: search.name().to_owned(),
        layers,
    })
}

fn ablate_layer(
    bench: &mut Bench<'_>,
    layer: usize,
    base: &Recipe,
    variants: &[Variant],
    skipped: &[Skipped],
) -> Result<LayerAblation> {
    let observer = bench.observer;
    let recipes = std::iter::once((BASE, base)).chain(variants.iter().map(|v| (v.name.as_str(), &v.recipe)));
    let recipes: Vec<(&str, &Recipe)> = recipes.collect();
    observer.begin("ablate", Some(layer), recipes.len() as u64);
    let mut capture = None;
    let mut results: Vec<(VariantResult, Vec<f64>)> = Vec::with_capacity(recipes.len());
    for (name, recipe) in recipes {
        let result = match adopt(bench, layer, name, recipe)? {
            Some(known) => known,
            None => {
                if capture.is_none() {
                    capture = Some(bench.capture(layer)?);
                }
                let capture = capture.as_ref().expect("captured above");
                measure(bench, capture, name, recipe)?
            }
        };
        observer.advance(name);
        results.push(result);
    }
    observer.end();
    let (base, rest) = results.split_first().expect("the base is always measured");
    let rows = variants.iter().zip(rest).map(|(variant, result)| VariantRow::new(variant, result, base));
    Ok(LayerAblation {
        layer,
        experts: base.0.experts.len(),
        base: BaseRow::new(&base.0),
        variants: rows.collect(),
        skipped: skipped.to_vec(),
    })
}
