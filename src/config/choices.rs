//! What a recipe can choose between, by the names its JSON uses.
//!
//! Each list's first member is what the walk does unless an ablation or pilot says otherwise; the others exist to
//! measure what an ingredient is worth.

use serde::{Deserialize, Serialize};

/// The weight codec.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CodecName {
    /// EXL3.
    Trellis,
    /// KAIJU1.
    Kaiju1,
}

/// The computed codebook that weights are encoded with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CodebookName {
    /// Multiplicative congruential generator, multiplier 0xCBAC1FED.
    Mcg,
}

/// How an expert's intermediate channels are ordered before they are encoded (the "Round 7" record's five policies).
/// LDLQ encodes from the last stored channel to the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PermutationPolicy {
    /// As the source stores them.
    Identity,
    /// The channel of greatest down-input energy is encoded first, so it is stored last (act-order).
    LdlqVisitDescendingDiag,
    /// The channel of greatest energy is stored first and encoded last.
    StoredDescendingDiag,
    /// Descending energy dealt out to the 128-channel Hadamard blocks in turn.
    EnergyBalanced,
    /// Runs of consecutive source channels, dealt out so that the blocks' energies are level.
    EnergyBalancedContiguous,
}

/// A family of scale factors along one side of a tensor, folded into the stored vector. Geometric mean 1, each from 1/2
/// to 2. The first three are constant over blocks of 128 channels, so they commute with the block Hadamard transform.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleFamily {
    /// No scaling.
    Identity,
    /// The fourth root of the block's rms.
    QuarterRms,
    /// Its inverse.
    InverseQuarterRms,
    /// For `svh` of gate and up, which each tensor owns: `(w² / c)^(1/4)` a channel, w² the energy of its weights and c
    /// what an error in it costs at the expert's output. Least loss for noise that is even in the rotated domain.
    Sensitivity,
}

/// How the rotated weight is rounded to the trellis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rounding {
    /// LDLQ: each row of tiles makes up for the errors of those before it.
    #[default]
    Ldlq,
    /// Each tile to its nearest sequence, covariance unused.
    Nearest,
}

/// The metric LDLQ works in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// The covariance transformed by the stored `suh`.
    #[default]
    Stored,
    /// The covariance transformed by the signs of `suh` alone, as exllamav3 does.
    Signs,
}

/// Who owns a tensor's rotation vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VectorScope {
    /// The residual-side vectors are the layer's, as schema v2 stores them.
    #[default]
    Shared,
    /// Every tensor has both of its own with per-channel rms scales (the older recipe). Schema v2 cannot store it, so
    /// only an ablation may ask for it.
    PerTensor,
}

/// What the layer's upgrades are spent by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AllocationRule {
    /// Measured loss times routing mass, exact dynamic program.
    #[default]
    Measured,
    /// Mass times an assumed sensitivity: every tensor's loss falls by a factor of 4 a bit from its weight energy.
    Assumed,
    /// Whole experts in the order of their routed rows, one upgrade a tensor until the budget is spent.
    Count,
}

/// What the covariance of down's inputs is built through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DownCovariance {
    /// The expert's packed-and-decoded gate and up.
    #[default]
    Reconstructed,
    /// Its source gate and up.
    Source,
}

/// What down is encoded towards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DownTarget {
    /// The source weight.
    #[default]
    Source,
    /// The source weight corrected by least squares so that, fed by the reconstructed gate and up, it gives the source
    /// expert's output (asymmetric calibration, GPTAQ, arXiv 2504.02692).
    Corrected,
}
