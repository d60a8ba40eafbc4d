//! What a carrier came out as.

use std::path::Path;

use serde::Serialize;

use super::manifest::Manifest;

/// How a run was done.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Run {
    /// Name of the model.
    pub model: String,
    /// Name of the recipe.
    pub recipe: String,
    /// Name of the tile search that ran.
    pub search_engine: String,
    /// Threads at work.
    pub threads: usize,
    /// Wall-clock seconds by stage, in order.
    pub stage_seconds: Vec<(String, f64)>,
}

/// A packed linear.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PackedLine {
    /// Its name.
    pub module: String,
    /// Inputs.
    pub k: usize,
    /// Outputs.
    pub n: usize,
    /// Calibration rows.
    pub rows: usize,
    /// tr(EᵀHE) / tr(WᵀHW).
    pub proxy_error: f64,
}

/// A linear of the scope that stays as it is.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KeptLine {
    /// Its weight.
    pub tensor: String,
    /// Why.
    pub reason: String,
}

/// The report.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CarrierReport {
    /// How this run was done.
    #[serde(flatten)]
    pub run: Run,
    /// Which linears were offered.
    pub scope: String,
    /// Bits of a packed weight.
    pub bits: u32,
    /// The same with vectors and markers.
    pub stored_bits_per_weight: f64,
    /// Weights packed.
    pub packed_weights: u64,
    /// The packed linears by name.
    pub packed: Vec<PackedLine>,
    /// Linears of the scope that stay, by name.
    pub kept_linears: Vec<KeptLine>,
    /// Other tensors that stay.
    pub kept_others: usize,
    /// Routed expert tensors left out.
    pub left_out: usize,
    /// Payload bytes of the model.
    pub model_bytes: u64,
    /// Payload bytes of the carrier.
    pub carrier_bytes: u64,
    /// Where it lies.
    pub output_dir: String,
}

impl CarrierReport {
    /// The report of a carrier in `out`.
    pub fn new(manifest: &Manifest, run: Run, out: &Path) -> Self {
        let packed: Vec<PackedLine> = manifest
            .packed
            .values()
            .map(|entry| PackedLine {
                module: entry.record.module.clone(),
                k: entry.record.k,
                n: entry.record.n,
                rows: entry.record.rows,
                proxy_error: entry.record.proxy_error.0,
            })
            .collect();
        let kept_linears: Vec<KeptLine> = manifest
            .kept
            .iter()
            .filter(|(_, entry)| entry.linear_of_scope)
            .map(|(tensor, entry)| KeptLine { tensor: tensor.clone(), reason: entry.reason.clone() })
            .collect();
        Self {
            run,
            scope: manifest.scope.clone(),
            bits: manifest.bits,
            stored_bits_per_weight: manifest.stored_bits_per_weight(),
            packed_weights: manifest.packed_weights(),
            kept_others: manifest.kept.len() - kept_linears.len(),
            packed,
            kept_linears,
            left_out: manifest.left_out.len(),
            model_bytes: manifest.model_bytes,
            carrier_bytes: manifest.carrier_bytes,
            output_dir: out.display().to_string(),
        }
    }
}
