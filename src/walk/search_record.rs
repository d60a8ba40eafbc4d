//! `search/layer-NNN.json`: what a layer's search chose, and from what.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::choose::search::{ExpertSearch, RoundTrip, SharedScores};
use crate::choose::vectors::{ExpertChoice, SharedChoice};
use crate::error::Result;
use crate::store::hash::Hash;

/// `search/layer-NNN.json`. Losses and scores are 17-digit strings, lower is better.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SearchRecord {
    /// The layer.
    pub layer: usize,
    /// SHA-256 of the recipe.
    pub recipe_sha256: Hash,
    /// SHA-256 of `capture.json`.
    pub capture_sha256: Hash,
    /// SHA-256 of the source inventory.
    pub source_inventory_sha256: Hash,
    /// The mass-stratified sample.
    pub sample: Vec<usize>,
    /// The layer's shared vectors.
    pub shared: SharedChoice,
    /// What they were chosen from: sign draws, then scale families.
    pub shared_scores: [SharedScores; 2],
    /// Bundles measured by full round trips, in order; the first is the baseline.
    pub bundles: Vec<Bundle>,
    /// Every expert, ascending.
    pub experts: Vec<SearchedExpert>,
    /// Whether the experts' own choices lost on the sample's held-out rows and were dropped.
    pub own_choices_dropped: bool,
    /// Mean over the sample of Spearman's correlation between predicted and measured loss of its bundles; none where
    /// there were too few.
    pub rank_correlation: Option<String>,
    /// Full encodes the layer's search consists of.
    pub encodes: usize,
}

/// A bundle of choices and what it loses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bundle {
    /// `baseline`, `signs-N`, `scales-N` or `own`.
    pub name: String,
    /// The shared vectors; those of `own` are what the sample's experts chose their own on.
    pub shared: SharedChoice,
    /// Mass-weighted mean loss of the sample.
    pub loss: String,
    /// By expert of the sample.
    pub trips: Vec<RoundTrip>,
}

/// One expert's choice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SearchedExpert {
    /// The expert's id.
    pub expert: usize,
    /// Its baseline.
    pub baseline: RoundTrip,
    /// What it chose, and from what. Where `own_choices_dropped`, the walk goes on with source order and draw 0.
    pub search: ExpertSearch,
}

impl SearchRecord {
    /// What the walk goes on with for an expert.
    pub fn choice(&self, expert: usize, intermediate: usize) -> ExpertChoice {
        match self.own_choices_dropped {
            true => ExpertChoice::plain(intermediate),
            false => self.experts[expert].search.choice.clone(),
        }
    }

    /// The damping of an expert's correction of down, chosen behind its baseline.
    ///
    /// # Errors
    /// A damping that is no number.
    pub fn damping(&self, expert: usize) -> Result<Option<f64>> {
        Ok(self.experts[expert].baseline.settled()?.damping)
    }
}

/// `search/layer-NNN.json`, relative to the work directory.
pub fn search_path(layer: usize) -> PathBuf {
    PathBuf::from("search").join(format!("layer-{layer:03}.json"))
}
