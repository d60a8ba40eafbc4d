//! The install audit: a layer's routed experts as installed against a reference that shares no arithmetic with them.
//!
//! Captured rows are sent along fixed seeded routes that hit every expert at least twice, by the very function the forward
//! pass runs its routed experts with ([`routed`]), over the emitted shard, twice: the bytes must be equal. The reference
//! decodes the shard's packed experts one at a time and computes in f64 by plain loops, weights and sums over experts too.
//! So the audit covers what stands between the sealed bytes and the next state: names, transposition, the order of gate
//! and up, the gathering of rows, the scattering and weighting of outputs, f32 rounding. It does not judge the
//! quantization, and both sides share the decoder, which the final encode and the emit stage hold against hashes.
//!
//! Source: the owner's Round 7 record.

use std::path::PathBuf;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::capture::layer_folder;
use super::journal::Journal;
use super::layer::LayerWork;
use super::progress::Observer;
use super::tolerance::{INSTALL_MAX_ABS, INSTALL_RELATIVE_L2, Tolerance};
use crate::checkpoint::WeightSource;
use crate::checkpoint::finished::{FinishedLayer, finished_path};
use crate::codec::PackedMatrix;
use crate::config::recipe::Decimal;
use crate::error::{Refusal, Result, refuse};
use crate::linalg::Matrix;
use crate::model::routed;
use crate::store::atomic::write_json_atomic;
use crate::store::canonical_json::float17;
use crate::store::hash::{Hash, sha256_hex};
use crate::store::seed::{SplitMix64, draw_seed};

/// Tokens sent along the routes, more only where two hits an expert take more.
const TOKENS: usize = 64;
/// Times every expert is hit at least.
const LEAST_HITS: usize = 2;

/// `layer-NNN/install-audit.json`. Numbers are 17-digit strings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InstallAudit {
    /// The layer.
    pub layer: usize,
    /// Whether both runs gave the same bytes, within the tolerances of the reference.
    pub passed: bool,
    /// SHA-256 of the audited shard.
    pub shard_sha256: Hash,
    /// SHA-256 of `capture.json`: where the rows come from.
    pub capture_sha256: Hash,
    /// Tokens sent.
    pub tokens: usize,
    /// Experts a token.
    pub experts_per_token: usize,
    /// Hits of the expert that is hit least.
    pub least_hits: usize,
    /// SHA-256 of the routes: captured rows (u64), expert ids (i32), weights (f32), little-endian, one after the other.
    pub routes_sha256: Hash,
    /// SHA-256 of the outputs of the first and the second run, f32 little-endian.
    pub outputs_sha256: [Hash; 2],
    /// Largest absolute difference of an output from the reference.
    pub max_abs: Decimal,
    /// What it may be.
    pub max_abs_tolerance: Tolerance,
    /// L2 norm of all differences over that of the reference.
    pub relative_l2: Decimal,
    /// What it may be.
    pub relative_l2_tolerance: Tolerance,
    /// Where the largest difference is.
    pub worst: Worst,
}

/// One output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Worst {
    /// Token along the routes.
    pub token: usize,
    /// The captured row it stands for.
    pub row: usize,
    /// Channel of the hidden state.
    pub channel: usize,
    /// What the installed experts give.
    pub installed: Decimal,
    /// What the reference gives.
    pub reference: Decimal,
}

/// Tokens with the experts they are sent to.
#[derive(Debug, Clone, PartialEq)]
pub struct Routes {
    /// Captured row of every token.
    pub rows: Vec<usize>,
    /// Experts, `[tokens, k]`, distinct within a token.
    pub ids: Vec<i32>,
    /// Positive weights, `[tokens, k]`, that add up to the router's factor for every token.
    pub weights: Vec<f32>,
    /// Experts a token.
    pub k: usize,
}

impl Routes {
    /// Draws routes over `rows` captured rows and `experts` experts: a shuffled round of all experts, dealt `k` at a time
    /// over and over, so that each is hit at least twice and no token hits one twice (`k <= experts`).
    pub fn draw(seed: u64, rows: usize, experts: usize, k: usize, factor: f32) -> Self {
        let mut random = SplitMix64::new(seed);
        let mut round: Vec<usize> = (0..experts).collect();
        for last in (1..experts).rev() {
            round.swap(last, random.below(last as u64 + 1) as usize);
        }
        let tokens = TOKENS.max((LEAST_HITS * experts).div_ceil(k));
        let ids = (0..tokens * k).map(|slot| round[slot % experts] as i32).collect();
        let rows = (0..tokens).map(|_| random.below(rows as u64) as usize).collect();
        let mut weights = Vec::with_capacity(tokens * k);
        for _ in 0..tokens {
            // 1 to 2^24 units: positive, and exact in f32.
            let drawn: Vec<f32> = (0..k).map(|_| ((random.next_u64() >> 40) + 1) as f32).collect();
            let sum: f32 = drawn.iter().sum();
            weights.extend(drawn.iter().map(|weight| weight / sum * factor));
        }
        Self { rows, ids, weights, k }
    }

    /// Tokens, ascending, that hit an expert, with their weights.
    fn hits(&self, expert: usize) -> Vec<(usize, f32)> {
        let slots = self.ids.iter().zip(&self.weights).enumerate();
        slots
            .filter(|(_, (id, _))| usize::try_from(**id) == Ok(expert))
            .map(|(slot, (_, weight))| (slot / self.k, *weight))
            .collect()
    }

    fn sha256(&self) -> Hash {
        let rows = self.rows.iter().flat_map(|&row| (row as u64).to_le_bytes());
        let ids = self.ids.iter().flat_map(|id| id.to_le_bytes());
        let weights = self.weights.iter().flat_map(|weight| weight.to_le_bytes());
        sha256_hex(&rows.chain(ids).chain(weights).collect::<Vec<u8>>())
    }
}

/// `layer-NNN/install-audit.json`, relative to the work directory.
pub fn install_audit_path(layer: usize) -> PathBuf {
    layer_folder(layer).join("install-audit.json")
}

/// The stage: audits the emitted shard of a layer as `installed` gives it to the forward pass, publishes the record and
/// seals it. Does nothing where it is sealed.
///
/// # Errors
/// Names the file that cannot be read. Bytes that differ between two runs, or outputs outside the tolerances: a failed
/// check (exit code 1) that names layer, token, channel and values, after the record is published.
pub fn audit_install(
    journal: &mut Journal,
    work: &LayerWork<'_>,
    installed: &dyn WeightSource,
    observer: &dyn Observer,
) -> Result<()> {
    let layer = work.layer;
    let stage = format!("layer-{layer:03}/install-audit");
    if journal.sealed(&stage).is_some() {
        return Ok(());
    }
    let shard = finished_path(work.recipe.codec, layer, "safetensors");
    let shard_sha256 = journal.output(&format!("layer-{layer:03}/emit"), &shard)?;
    let audit = install_audit(work, &shard_sha256, installed, observer)?;
    let path = install_audit_path(layer);
    let sha256 = write_json_atomic(work.work.join(&path), &audit)?;
    if let Some(refusal) = audit.refusal() {
        return Err(refusal.file(work.work.join(&path)).check());
    }
    let inputs = [("shard", shard_sha256), ("capture", work.capture.sha256.clone())];
    journal.seal(&stage, inputs, [(path, sha256)])
}

/// The audit itself: runs `installed` and the reference, and compares.
///
/// # Errors
/// Names the file or tensor that cannot be read.
pub fn install_audit(
    work: &LayerWork<'_>,
    shard_sha256: &Hash,
    installed: &dyn WeightSource,
    observer: &dyn Observer,
) -> Result<InstallAudit> {
    let (geometry, layer) = (work.geometry, work.layer);
    let experts = geometry.n_routed_experts;
    let seed = draw_seed(&work.recipe.recipe_version, layer, None, "install_audit", 0);
    let factor = geometry.routed_scaling_factor as f32;
    let routes = Routes::draw(seed, work.capture.mlp_in.rows, experts, geometry.num_experts_per_tok, factor);
    let x = work.capture.mlp_in.gather_rows(&routes.rows);
    let run = || routed(geometry, layer, &x.data, &routes.ids, &routes.weights, installed);
    observer.begin("install audit", Some(layer), experts as u64);
    let (first, second) = (run()?, run()?);
    let path = work.work.join(finished_path(work.recipe.codec, layer, "safetensors"));
    let sizes = (geometry.hidden_size, geometry.moe_intermediate_size);
    let shard = FinishedLayer::open(&path, work.recipe.codec, layer, sizes)?;
    let wanted = reference(&shard, experts, &x, &routes, observer)?;
    observer.end();

    let bytes = |y: &[f32]| sha256_hex(&y.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
    let outputs_sha256 = [bytes(&first), bytes(&second)];
    let Compared { max_abs, relative_l2, at } = compare(&first, &wanted);
    let tolerance = work.recipe.install_tolerance;
    let (token, channel) = (at / geometry.hidden_size, at % geometry.hidden_size);
    Ok(InstallAudit {
        layer,
        // Not `>`: what is no number must not pass.
        passed: outputs_sha256[0] == outputs_sha256[1]
            && max_abs <= tolerance.max_abs.0
            && relative_l2 <= tolerance.relative_l2.0,
        shard_sha256: shard_sha256.clone(),
        capture_sha256: work.capture.sha256.clone(),
        tokens: routes.rows.len(),
        experts_per_token: routes.k,
        least_hits: (0..experts).map(|expert| routes.hits(expert).len()).min().unwrap_or(0),
        routes_sha256: routes.sha256(),
        outputs_sha256,
        max_abs: Decimal(max_abs),
        max_abs_tolerance: Tolerance::new(tolerance.max_abs, INSTALL_MAX_ABS),
        relative_l2: Decimal(relative_l2),
        relative_l2_tolerance: Tolerance::new(tolerance.relative_l2, INSTALL_RELATIVE_L2),
        worst: Worst {
            token,
            row: routes.rows[token],
            channel,
            installed: Decimal(f64::from(first[at])),
            reference: Decimal(wanted[at]),
        },
    })
}

/// `out[t] = Σ_e weight[t, e] · down_e(silu(gate_e(x[t])) · up_e(x[t]))` in f64 throughout, experts ascending, one decoded
/// at a time. Tokens of an expert are computed in parallel and added in order.
fn reference(
    shard: &FinishedLayer,
    experts: usize,
    x: &Matrix<f32>,
    routes: &Routes,
    observer: &dyn Observer,
) -> Result<Vec<f64>> {
    let mut out = vec![0.0f64; x.data.len()];
    for expert in 0..experts {
        let [gate, up, down] = shard.expert(expert)?.map(|weight| weight.dense());
        let hits = routes.hits(expert);
        let outputs: Vec<Vec<f64>> = hits
            .par_iter()
            .map(|(token, _)| {
                let row: Vec<f64> = x.row(*token).iter().map(|&v| f64::from(v)).collect();
                let (mut inner, up) = (times(&row, &gate), times(&row, &up));
                for (gate, up) in inner.iter_mut().zip(up) {
                    *gate = *gate / (1.0 + (-*gate).exp()) * up;
                }
                times(&inner, &down)
            })
            .collect();
        for ((token, weight), y) in hits.iter().zip(outputs) {
            for (out, y) in out[token * x.cols..][..x.cols].iter_mut().zip(y) {
                *out += f64::from(*weight) * y;
            }
        }
        observer.advance(&format!("expert {expert}"));
    }
    Ok(out)
}

/// `x · weight` for one row, weight `[K, N]`.
fn times(x: &[f64], weight: &Matrix<f32>) -> Vec<f64> {
    let mut out = vec![0.0f64; weight.cols];
    for (k, x) in x.iter().enumerate() {
        for (out, w) in out.iter_mut().zip(weight.row(k)) {
            *out += x * f64::from(*w);
        }
    }
    out
}

struct Compared {
    max_abs: f64,
    relative_l2: f64,
    /// Place of the largest difference, or of the first that is no number.
    at: usize,
}

fn compare(found: &[f32], wanted: &[f64]) -> Compared {
    let (mut max_abs, mut at) = (0.0f64, 0);
    let (mut error, mut norm) = (0.0f64, 0.0f64);
    for (place, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        let difference = (f64::from(*found) - wanted).abs();
        if difference > max_abs || difference.is_nan() && !max_abs.is_nan() {
            (max_abs, at) = (difference, place);
        }
        error += difference * difference;
        norm += wanted * wanted;
    }
    // Nothing but zeros on both sides is no error, not 0/0.
    let relative_l2 = if error == 0.0 { 0.0 } else { (error / norm).sqrt() };
    Compared { max_abs, relative_l2, at }
}

impl InstallAudit {
    /// Judges the numbers anew, whatever the record says of itself: what failed, with the worst output.
    pub fn judge(&self) -> Option<Refusal> {
        let within = self.max_abs.0 <= self.max_abs_tolerance.value.0
            && self.relative_l2.0 <= self.relative_l2_tolerance.value.0;
        let passed = self.passed && within && self.outputs_sha256[0] == self.outputs_sha256[1];
        Self { passed, ..self.clone() }.refusal()
    }

    /// Where the audit did not pass: what failed, with the worst output.
    pub fn refusal(&self) -> Option<Refusal> {
        if self.passed {
            return None;
        }
        let Worst { token, row, channel, installed, reference } = &self.worst;
        if self.outputs_sha256[0] != self.outputs_sha256[1] {
            let what = "the same routes twice through the installed experts gave different bytes";
            return Some(refuse(what).layer(self.layer).wanted("equal bytes"));
        }
        Some(refuse(format!(
            "the installed experts differ from the reference by up to {} (token {token}, channel {channel}: {} instead \
             of {}), relative L2 error {}",
            float17(self.max_abs.0),
            float17(installed.0),
            float17(reference.0),
            float17(self.relative_l2.0)
        ))
        .layer(self.layer)
        .row(*row)
        .wanted(format!(
            "at most {} and {}",
            float17(self.max_abs_tolerance.value.0),
            float17(self.relative_l2_tolerance.value.0)
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_expert_is_hit_twice_and_no_token_hits_one_twice() {
        for (experts, k) in [(2, 1), (2, 2), (3, 2), (8, 2), (7, 3), (256, 8), (300, 1), (1, 1)] {
            let routes = Routes::draw(5, 11, experts, k, 2.5);
            assert!(routes.rows.len() >= TOKENS && routes.rows.iter().all(|&row| row < 11));
            for expert in 0..experts {
                assert!(routes.hits(expert).len() >= LEAST_HITS, "{experts} experts, {k} a token");
            }
            for (ids, weights) in routes.ids.chunks(k).zip(routes.weights.chunks(k)) {
                assert!(ids.iter().enumerate().all(|(i, id)| !ids[..i].contains(id)));
                assert!(weights.iter().all(|&weight| weight > 0.0));
                assert!((weights.iter().sum::<f32>() - 2.5).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn routes_depend_on_their_seed_alone() {
        let draw = |seed| Routes::draw(seed, 100, 8, 2, 1.0);
        assert_eq!(draw(1).sha256(), draw(1).sha256());
        assert_ne!(draw(1).sha256(), draw(2).sha256());
        let mut other = draw(1);
        other.weights[3] = 0.5;
        assert_ne!(other.sha256(), draw(1).sha256());
    }

    #[test]
    fn the_worst_output_is_found_and_what_is_no_number_is_the_worst() {
        let wanted = [3.0, 4.0, 0.0, 0.0];
        let compared = compare(&[3.0, 4.0, 0.5, 0.0], &wanted);
        assert_eq!((compared.max_abs, compared.relative_l2, compared.at), (0.5, 0.1, 2));
        let exact = compare(&[3.0, 4.0, 0.0, 0.0], &wanted);
        assert_eq!((exact.max_abs, exact.relative_l2), (0.0, 0.0));
        assert_eq!(compare(&[0.0; 2], &[0.0; 2]).relative_l2, 0.0);
        for found in [[3.0, f32::NAN, 9.0, 0.0], [3.0, f32::NAN, f32::NAN, 0.0]] {
            let compared = compare(&found, &wanted);
            assert!(compared.max_abs.is_nan() && compared.relative_l2.is_nan());
            assert_eq!(compared.at, 1);
        }
    }
}
