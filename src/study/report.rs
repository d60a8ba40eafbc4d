//! What an ablation found, for a terminal and as JSON, in plain words.
//!
//! A ratio is a variant's mass-weighted held-out expert-output error over the base's. An ingredient helps where the
//! interval of the ratio without it lies above 1 as a whole (or, for one the base lacks, below 1 with it); all else is
//! reported as not helping. No verdict is known before the measurement.

use std::collections::BTreeMap;

use serde::Serialize;

use super::ingredients::{INGREDIENTS, Skipped, Variant};
use super::statistics::{Interval, MeanError, paired_difference, ratio};
use super::variant::VariantResult;
use crate::eval::StateType;
use crate::eval::table::{aligned, figure};
use crate::store::hash::Hash;

/// An ablation.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AblationReport {
    /// Name of the model.
    pub model: String,
    /// Name of the base recipe.
    pub recipe: String,
    /// SHA-256 of the base recipe.
    pub recipe_sha256: Hash,
    /// Type of the state between layers in evaluations.
    pub state: StateType,
    /// Name of the tile search that ran.
    pub search_engine: String,
    /// By layer.
    pub layers: Vec<LayerAblation>,
}

/// One layer's part.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerAblation {
    /// The layer.
    pub layer: usize,
    /// Experts the ratios are paired over.
    pub experts: usize,
    /// The base recipe.
    pub base: BaseRow,
    /// Each ingredient switched.
    pub variants: Vec<VariantRow>,
    /// Ingredients whose switch would change nothing.
    pub skipped: Vec<Skipped>,
}

/// The base recipe on a layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BaseRow {
    /// Mass-weighted relative held-out expert-output error.
    pub heldout_error: f64,
    /// Mean divergence of the model with this layer's experts replaced.
    pub kl: Option<MeanError>,
    /// Its median.
    pub kl_median: Option<f64>,
    /// Tensors by bits.
    pub bit_counts: BTreeMap<u32, u64>,
    /// Whether every expert kept what its probes promised.
    pub interaction_kept: Option<bool>,
    /// Wall-clock seconds of the processing.
    pub seconds: f64,
    /// Matrices encoded.
    pub encodes: u64,
    /// Whether seconds and encodes lack the share of an earlier run that was stopped.
    pub resumed: bool,
}

impl BaseRow {
    /// The figures of a result by itself.
    pub fn new(result: &VariantResult) -> Self {
        Self {
            heldout_error: result.heldout_error(),
            kl: result.divergence.as_ref().map(|divergence| divergence.mean_error()),
            kl_median: result.divergence.as_ref().map(|divergence| divergence.median.0),
            bit_counts: result.histogram.clone(),
            interaction_kept: result.interaction_kept,
            seconds: result.seconds.0,
            encodes: result.encodes,
            resumed: result.resumed,
        }
    }
}

/// A variant against the base.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VariantRow {
    /// The variant.
    pub variant: String,
    /// The ingredient it switches.
    pub ingredient: &'static str,
    /// Whether it adds the ingredient to a base that lacks it.
    pub added: bool,
    /// What is compared.
    pub question: &'static str,
    /// Its figures by itself.
    #[serde(flatten)]
    pub own: BaseRow,
    /// Held-out error over the base's, with its interval over experts; none where too few experts give one.
    pub ratio: Option<Interval>,
    /// Mean difference of the tokens' divergences, variant less base.
    pub kl_difference: Option<MeanError>,
    /// Whether the ingredient helps on held-out data; none where no interval tells.
    pub helps: Option<bool>,
    /// The same in words.
    pub verdict: String,
}

impl VariantRow {
    /// Holds a variant's result and tokens against those of the base.
    pub fn new(
        variant: &Variant,
        (result, tokens): &(VariantResult, Vec<f64>),
        (base, base_tokens): &(VariantResult, Vec<f64>),
    ) -> Self {
        let ratio = ratio(&result.weighted_losses(), &base.weighted_losses());
        let known = INGREDIENTS.iter().find(|known| known.name == variant.ingredient);
        let (helps, verdict) = judge(ratio, variant.added);
        let paired = !tokens.is_empty() && tokens.len() == base_tokens.len();
        Self {
            variant: variant.name.clone(),
            ingredient: variant.ingredient,
            added: variant.added,
            question: known.map_or("", |known| known.question),
            own: BaseRow::new(result),
            ratio,
            kl_difference: paired.then(|| paired_difference(tokens, base_tokens)),
            helps,
            verdict,
        }
    }
}

/// Whether an ingredient helps, and in words, from the ratio without it (or with it, where it was `added`).
fn judge(ratio: Option<Interval>, added: bool) -> (Option<bool>, String) {
    let Some(Interval { value, low, high }) = ratio else {
        return (None, "cannot be told: the layer's experts give no interval".to_owned());
    };
    let helps = if added { high < 1.0 } else { low > 1.0 };
    // An interval on both sides of 1 shows neither.
    let open = low <= 1.0 && high >= 1.0;
    let word = match (helps, open, added) {
        (true, _, false) => "helps",
        (true, _, true) => "would help",
        (false, true, _) => "not shown to help",
        (false, false, false) => "does not help",
        (false, false, true) => "would not help",
    };
    let which = if added { "with" } else { "without" };
    let percent = |ratio: f64| format!("{:+.1}", 100.0 * (ratio - 1.0));
    let verdict = format!(
        "{word}: {which} it the held-out error changes by {} % (95 %: {} to {} %)",
        percent(value),
        percent(low),
        percent(high)
    );
    (Some(helps), verdict)
}

impl AblationReport {
    /// The report as plain text.
    pub fn render_table(&self) -> String {
        let mut text = format!(
            "ablation of model {}, recipe {} ({}), search {}\n\
             held-out error: squared expert-output error over squared output, experts weighted by mass; ratio to base, 95 % over \
             experts\nKL: source against source with this layer's experts replaced, {} state, nats a token; change against base \
             paired by token\n",
            self.model, self.recipe, self.recipe_sha256, self.search_engine, self.state
        );
        for layer in &self.layers {
            text.push('\n');
            text.push_str(&layer.render_table());
        }
        text
    }
}

impl LayerAblation {
    /// One layer as plain text.
    pub fn render_table(&self) -> String {
        let header =
            ["variant", "error", "ratio", "95 %", "KL ± s.e.", "median KL", "change ± s.e.", "s", "encodes"];
        let title = format!("layer {}, {} experts", self.layer, self.experts);
        let pair = |pair: Option<MeanError>| match pair {
            Some(MeanError { mean, standard_error }) => {
                format!("{} ± {}", figure(mean, 5), figure(standard_error, 5))
            }
            None => "-".to_owned(),
        };
        let row = |name: &str, own: &BaseRow, against: Option<&VariantRow>| {
            let ratio = against.and_then(|row| row.ratio);
            // A plus says that an earlier run's share is missing.
            let more = if own.resumed { "+" } else { "" };
            vec![
                name.to_owned(),
                figure(own.heldout_error, 6),
                ratio.map_or("-".to_owned(), |ratio| figure(ratio.value, 4)),
                ratio.map_or("-".to_owned(), |r| format!("{} to {}", figure(r.low, 4), figure(r.high, 4))),
                pair(own.kl),
                own.kl_median.map_or("-".to_owned(), |median| figure(median, 6)),
                pair(against.and_then(|row| row.kl_difference)),
                format!("{:.1}{more}", own.seconds),
                format!("{}{more}", own.encodes),
            ]
        };
        let mut rows = vec![row("base", &self.base, None)];
        rows.extend(self.variants.iter().map(|variant| row(&variant.variant, &variant.own, Some(variant))));
        let mut text = format!("{title}\n{}", aligned(&header, &rows));
        text.push('\n');
        for variant in &self.variants {
            text.push_str(&format!("{}: {}; {}\n", variant.variant, variant.question, variant.verdict));
            if variant.own.interaction_kept == Some(false) {
                text.push_str(&format!(
                    "{}: an expert did not keep what its probes promised\n",
                    variant.variant
                ));
            }
        }
        for skipped in &self.skipped {
            text.push_str(&format!("{}: not run, {}\n", skipped.ingredient, skipped.why));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_follows_from_the_interval_alone() {
        let of = |low, high, added| judge(Some(Interval { value: (low + high) / 2.0, low, high }), added);
        for (low, high, added, helps, word) in [
            (1.01, 1.2, false, true, "helps: without it"),
            (0.99, 1.2, false, false, "not shown to help: without it"),
            (0.8, 0.9, false, false, "does not help: without it"),
            (0.8, 0.9, true, true, "would help: with it"),
            (0.8, 1.0, true, false, "not shown to help: with it"),
            (1.1, 1.2, true, false, "would not help: with it"),
        ] {
            let (found, said) = of(low, high, added);
            assert_eq!(found, Some(helps), "{low} {high} {added}");
            assert!(said.starts_with(word), "{said}");
        }
        assert_eq!(judge(None, false).0, None);
    }
}
