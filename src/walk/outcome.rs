//! What a walk tells of itself when it is done.

use std::collections::BTreeMap;

/// What a walk did to one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerOutcome {
    /// The layer.
    pub layer: usize,
    /// What its experts are encoded at.
    pub rates: LayerRates,
    /// Mass-weighted relative error of expert outputs on held-out rows.
    pub heldout_error: f64,
    /// Seconds this run spent on it.
    pub seconds: f64,
    /// The same by stage.
    pub stage_seconds: Vec<(String, f64)>,
    /// Its stages that an earlier run had sealed.
    pub resumed: Vec<String>,
}

/// What a layer's experts are encoded at.
#[derive(Debug, Clone, PartialEq)]
pub enum LayerRates {
    /// Tensors by bits.
    Bits(BTreeMap<u32, usize>),
    /// Experts by setting.
    Settings {
        /// How many have which.
        counts: BTreeMap<String, usize>,
        /// Bits of all payloads.
        bits: u64,
        /// Weights.
        weights: u64,
    },
}

/// What a walk did.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outcome {
    /// Whether every layer is finished.
    pub complete: bool,
    /// Layers in order.
    pub layers: Vec<LayerOutcome>,
    /// Seconds this run spent by stage, in order of first use.
    pub stage_seconds: Vec<(String, f64)>,
    /// What was done otherwise than the recipe wants, counted.
    pub fallbacks: Vec<(String, u64)>,
}
