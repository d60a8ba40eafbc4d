//! One recipe on one layer, measured: finished experts, their held-out losses, the divergence token by token, the cost.
//!
//! `layer-NNN/NAME/result.json` and `tokens.safetensors` (`kl` F64 `[tokens]`) hold it. A result of the same identity
//! whose bytes are whole is adopted; one that was changed is measured again from the journal's artifacts.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::bench::{Bench, Spent};
use super::statistics::MeanError;
use crate::config::Recipe;
use crate::config::recipe::Decimal;
use crate::error::Result;
use crate::eval::Scores;
use crate::store::atomic::write_json_atomic;
use crate::store::canonical_json::{canonical_hash, parse_float17};
use crate::store::hash::{Hash, sha256_file};
use crate::store::safetensors_read::SafetensorsFile;
use crate::store::safetensors_write::{TensorData, write_safetensors};
use crate::store::strict_json::read_json;
use crate::store::tensor_dtype::TensorDtype;
use crate::walk::capture::LayerCapture;
use crate::walk::choosing::EncodedLayer;
use crate::walk::finals::read_layer;
use crate::walk::interaction::measure_interaction;
use crate::walk::layer::LayerWork;
use crate::walk::rates::Allocation;

const RESULT: &str = "result.json";
const TOKENS: &str = "tokens.safetensors";
const TENSOR: &str = "kl";

/// `result.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VariantResult {
    /// Hash over everything the result depends on.
    pub identity_sha256: Hash,
    /// SHA-256 of the recipe.
    pub recipe_sha256: Hash,
    /// Every expert of the layer, ascending.
    pub experts: Vec<ExpertResult>,
    /// How many tensors have how many bits.
    pub histogram: BTreeMap<u32, u64>,
    /// Whether every expert kept what its probes promised; none where nothing was promised.
    pub interaction_kept: Option<bool>,
    /// The model with this layer's experts replaced; none where the plan has nothing to score.
    pub divergence: Option<Divergence>,
    /// Wall-clock seconds of the processing, evaluation not counted.
    pub seconds: Decimal,
    /// Matrices encoded.
    pub encodes: u64,
    /// Whether an earlier run had begun it, whose share is in neither figure.
    pub resumed: bool,
    /// SHA-256 of this record with this field empty.
    pub content_sha256: Hash,
}

/// One expert's held-out figures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertResult {
    /// Its share of the layer's routing mass.
    pub share: Decimal,
    /// Mean squared output error a held-out row.
    pub loss: Decimal,
    /// Mean squared output a held-out row.
    pub energy: Decimal,
}

/// Divergence from the source, nats a token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Divergence {
    /// Scored tokens.
    pub tokens: u64,
    /// Mean.
    pub mean: Decimal,
    /// Standard error of the mean.
    pub standard_error: Decimal,
    /// Median.
    pub median: Decimal,
    /// SHA-256 of `tokens.safetensors`.
    pub tokens_sha256: Hash,
}

impl Divergence {
    /// Mean and standard error.
    pub fn mean_error(&self) -> MeanError {
        MeanError { mean: self.mean.0, standard_error: self.standard_error.0 }
    }
}

impl VariantResult {
    /// Mass-weighted relative held-out error of the layer: squared error over squared output.
    pub fn heldout_error(&self) -> f64 {
        let sum = |value: fn(&ExpertResult) -> f64| -> f64 {
            self.experts.iter().map(|expert| expert.share.0 * value(expert)).sum()
        };
        sum(|expert| expert.loss.0) / sum(|expert| expert.energy.0)
    }

    /// Mass-weighted loss by expert: what ratios are paired over.
    pub fn weighted_losses(&self) -> Vec<f64> {
        self.experts.iter().map(|expert| expert.share.0 * expert.loss.0).collect()
    }

    /// Mean bits a weight.
    pub fn bits(&self) -> f64 {
        let (bits, tensors) = self.histogram.iter().fold((0, 0), |(bits, tensors), (&each, &count)| {
            (bits + u64::from(each) * count, tensors + count)
        });
        bits as f64 / tensors as f64
    }

    fn content(&self) -> Result<Hash> {
        canonical_hash(&Self { content_sha256: Hash::new(), ..self.clone() })
    }
}

/// The name of a variant's result: a hash over everything it depends on.
///
/// # Errors
/// None in practice; see [`canonical_hash`].
pub fn identity(bench: &Bench<'_>, layer: usize, recipe: &Recipe) -> Result<Hash> {
    canonical_hash(&serde_json::json!({
        "kind": "study-variant-v1",
        "base_walk": bench.walk.identity(),
        "layer": layer,
        "recipe_sha256": recipe.identity_hash()?,
        "state": bench.state().to_string(),
    }))
}

/// The finished result of a variant and its tokens' divergences, where there is a whole one of this identity.
///
/// # Errors
/// A file that is there and cannot be read.
pub fn adopt(
    bench: &Bench<'_>,
    layer: usize,
    name: &str,
    recipe: &Recipe,
) -> Result<Option<(VariantResult, Vec<f64>)>> {
    let folder = bench.folder(layer, name);
    let path = folder.join(RESULT);
    if !path.exists() {
        return Ok(None);
    }
    let known: VariantResult = read_json(&path)?;
    if known.identity_sha256 != identity(bench, layer, recipe)? || known.content()? != known.content_sha256 {
        return Ok(None);
    }
    let Some(divergence) = &known.divergence else { return Ok(Some((known, Vec::new()))) };
    let tokens = folder.join(TOKENS);
    if !tokens.exists() || sha256_file(&tokens)? != divergence.tokens_sha256 {
        return Ok(None);
    }
    let values = read_tokens(&tokens, divergence.tokens as usize)?;
    Ok(Some((known, values)))
}

fn read_tokens(path: &Path, count: usize) -> Result<Vec<f64>> {
    let file = SafetensorsFile::open(path)?;
    let bytes = file.bytes_as(TENSOR, TensorDtype::F64, &[count])?;
    Ok(bytes.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect())
}

/// Processes the captured layer under `recipe`, evaluates, and publishes the result.
///
/// # Errors
/// Whatever a stage refuses.
pub fn measure(
    bench: &mut Bench<'_>,
    capture: &LayerCapture,
    name: &str,
    recipe: &Recipe,
) -> Result<(VariantResult, Vec<f64>)> {
    // Made before the recipe's work begins, so that its cost is no variant's.
    bench.evaluator()?;
    let layer = capture.record.layer;
    let identity_sha256 = identity(bench, layer, recipe)?;
    let (mut result, packed) = bench.encode(capture, name, recipe, |work, encoded, spent| {
        let (records, packed): (Vec<_>, Vec<_>) = read_layer(work, &encoded.summary)?.into_iter().unzip();
        let losses =
            records.iter().map(|record| Ok((parse_float17(&record.loss)?, parse_float17(&record.energy)?)));
        let losses = losses.collect::<Result<Vec<_>>>()?;
        Ok((record_of(work, encoded, &losses, spent, &identity_sha256)?, packed))
    })?;
    let folder = bench.folder(layer, name);
    let observer = bench.observer;
    let (geometry, source) = (bench.walk.geometry.clone(), bench.walk.source.clone());
    let mut tokens = Vec::new();
    if let Some(evaluator) = bench.evaluator()? {
        let scores = evaluator.with_layer(&geometry, &source, layer, &packed, observer)?;
        tokens = scores.iter().map(|score| score.kl).collect();
        let data = [TensorData::f64(TENSOR, &[tokens.len()], &tokens)];
        let tokens_sha256 = write_safetensors(folder.join(TOKENS), &BTreeMap::new(), &data)?.sha256;
        result.divergence = Scores::of(&scores).map(|all| Divergence {
            tokens: all.tokens,
            mean: Decimal(all.kl_mean),
            standard_error: Decimal(all.kl_standard_error),
            median: Decimal(all.kl_median),
            tokens_sha256,
        });
    }
    result.content_sha256 = result.content()?;
    write_json_atomic(folder.join(RESULT), &result)?;
    Ok((result, tokens))
}

fn record_of(
    work: &LayerWork<'_>,
    encoded: &EncodedLayer,
    losses: &[(f64, f64)],
    spent: Spent,
    identity_sha256: &Hash,
) -> Result<VariantResult> {
    let (audit, _) = measure_interaction(work, encoded)?;
    let experts = losses.iter().zip(work.capture.mass.shares()).map(|(&(loss, energy), share)| {
        ExpertResult { share: Decimal(share), loss: Decimal(loss), energy: Decimal(energy) }
    });
    Ok(VariantResult {
        identity_sha256: identity_sha256.clone(),
        recipe_sha256: work.recipe_sha256.clone(),
        experts: experts.collect(),
        histogram: match &encoded.allocation {
            Allocation::Bits(record) => record.histogram.clone(),
            Allocation::Rungs(_) => BTreeMap::new(),
        },
        interaction_kept: audit.passed,
        divergence: None,
        seconds: Decimal(spent.seconds),
        encodes: spent.encodes,
        resumed: spent.resumed,
        content_sha256: Hash::new(),
    })
}
