//! The final encode of every expert at its allocated bits, sealed as one mini-shard an expert.
//!
//! Down's covariance is built from the packed-and-decoded gate and up. A mini-shard is a layer's shard with one expert
//! (where an ablation gives every tensor vectors of its own, a file that holds them); it is reopened and decoded, and its hashes compared, before its record is published.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::capture::layer_folder;
use super::layer::{ExpertInputs, LayerWork, matrix_sha256};
use super::progress::{Observer, proceed};
use super::rates::{Allocation, Ledger};
use crate::checkpoint::finished::{FinishedExpert, FinishedLayer, write_finished};
use crate::checkpoint::loose::{read_loose, write_loose};
use crate::checkpoint::names::Projection;
use crate::choose::expert::{Decoded, decode};
use crate::choose::permutation::oracle;
use crate::codec::weight::PackedWeight;
use crate::config::choices::{DownTarget, VectorScope};
use crate::error::{Error, Result, refuse};
use crate::store::atomic::{create_dir_durably, write_json_atomic};
use crate::store::canonical_json::{canonical_hash, float17, parse_float17};
use crate::store::hash::{Hash, sha256_file};
use crate::store::strict_json::read_json;

/// `layer-NNN/final-experts/expert-EEE.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FinalExpert {
    /// Hash over everything the result depends on.
    pub job_sha256: Hash,
    /// What it was made from.
    pub inputs: ExpertInputs,
    /// Bits of gate, up, down; with KAIJU1 their rung.
    pub bits: [u32; 3],
    /// By module.
    pub tensors: BTreeMap<String, FinalTensor>,
    /// Damping of down's correction (17 digits); none where the source weight is its target.
    pub down_damping: Option<String>,
    /// SHA-256 of down's corrected target, f32 little-endian `[I, H]`.
    pub down_target_sha256: Option<Hash>,
    /// Derived rows left out of down's covariance because they were not finite.
    pub dropped_rows: usize,
    /// Output factors of gate and up that were clipped, where the recipe rescales outputs.
    pub clipped_outputs: usize,
    /// Mean squared output error a held-out row.
    pub loss: String,
    /// Mean squared output a held-out row.
    pub energy: String,
    /// SHA-256 of the mini-shard.
    pub shard_sha256: Hash,
    /// SHA-256 of this record with this field empty: one that was changed is not adopted.
    pub content_sha256: Hash,
}

impl FinalExpert {
    fn content(&self) -> Result<Hash> {
        canonical_hash(&Self { content_sha256: Hash::new(), ..self.clone() })
    }
}

/// One finished tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FinalTensor {
    /// Relative global scale.
    pub scale: String,
    /// SHA-256 of the covariance it was encoded under.
    pub covariance_sha256: Hash,
    /// SHA-256 of the packed payload.
    pub packed_sha256: Hash,
    /// SHA-256 of the dense values, f16 or with KAIJU1 f32.
    pub reconstruction_sha256: Hash,
}

/// `layer-NNN/final-experts.json`: the layer's experts and their held-out error together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FinalLayer {
    /// The layer.
    pub layer: usize,
    /// SHA-256 of the allocation.
    pub allocation_sha256: Hash,
    /// SHA-256 of each expert's record, by id.
    pub experts: Vec<Hash>,
    /// Mass-weighted mean of the experts' losses.
    pub heldout_loss: String,
    /// `heldout_loss` over the mass-weighted mean energy.
    pub heldout_relative: String,
    /// Derived rows dropped, all experts.
    pub dropped_rows: usize,
    /// Output factors clipped, all experts.
    pub clipped_outputs: usize,
    /// Experts whose fit rows were topped up with rows of others.
    pub cold_experts: usize,
    /// Experts whose loss was measured on rows of others.
    pub unmeasured_experts: usize,
    /// Experts whose down keeps its source weight as target because no correction would carry over to unseen rows.
    pub uncorrected_experts: usize,
    /// Whether the search's choices for the experts lost on held-out rows and were dropped.
    pub own_choices_dropped: bool,
}

/// `layer-NNN/final-experts.json`, relative to the work directory.
pub fn summary_path(layer: usize) -> PathBuf {
    layer_folder(layer).join("final-experts.json")
}

/// `layer-NNN/final-experts/expert-EEE`, relative to the work directory, without extension.
fn stem(layer: usize, expert: usize) -> PathBuf {
    layer_folder(layer).join("final-experts").join(format!("expert-{expert:03}"))
}

/// A layer's finished experts as they were published.
#[derive(Debug, Clone)]
pub struct EncodedExperts {
    /// The summary.
    pub summary: FinalLayer,
    /// SHA-256 of `final-experts.json`.
    pub sha256: Hash,
    /// Every file, by path relative to the work directory.
    pub files: Vec<(PathBuf, Hash)>,
}

/// Encodes every expert of the layer, adopting those an interrupted run finished.
///
/// # Errors
/// Names layer, expert and tensor of what cannot be encoded, or of bytes that do not read back.
pub fn encode_layer(
    work: &LayerWork<'_>,
    ledger: Option<&Ledger>,
    (allocation, allocation_sha256): (&Allocation, &Hash),
    observer: &dyn Observer,
) -> Result<EncodedExperts> {
    let experts = work.geometry.n_routed_experts;
    create_dir_durably(work.work.join(layer_folder(work.layer)).join("final-experts"))?;
    observer.begin("final encode", Some(work.layer), experts as u64);
    let finished = (0..experts)
        .into_par_iter()
        .map(|id| {
            let bits = allocation.bits(id)?;
            let finished = encode_expert(work, ledger, bits, id, observer)?;
            observer.advance(&format!("expert {id} at {}", allocation.label(id)?));
            Ok(finished)
        })
        .collect::<Result<Vec<_>>>()?;
    observer.end();
    let mut files = Vec::with_capacity(2 * experts + 1);
    for (id, (record, sha256)) in finished.iter().enumerate() {
        let stem = stem(work.layer, id);
        files.push((stem.with_extension("json"), sha256.clone()));
        files.push((stem.with_extension("safetensors"), record.shard_sha256.clone()));
    }
    let shares = work.capture.mass.shares();
    let weighted = |value: fn(&FinalExpert) -> &str| -> Result<f64> {
        let terms = finished
            .iter()
            .zip(&shares)
            .map(|((record, _), share)| Ok(parse_float17(value(record))? * share));
        terms.sum()
    };
    let (loss, energy) = (weighted(|r| &r.loss)?, weighted(|r| &r.energy)?);
    let summary = FinalLayer {
        layer: work.layer,
        allocation_sha256: allocation_sha256.clone(),
        heldout_loss: float17(loss),
        heldout_relative: float17(loss / energy),
        dropped_rows: finished.iter().map(|(record, _)| record.dropped_rows).sum(),
        clipped_outputs: finished.iter().map(|(record, _)| record.clipped_outputs).sum(),
        cold_experts: finished.iter().filter(|(record, _)| record.inputs.fit_fallback.is_some()).count(),
        unmeasured_experts: finished
            .iter()
            .filter(|(record, _)| record.inputs.holdout_fallback.is_some())
            .count(),
        uncorrected_experts: match work.recipe.down_target {
            DownTarget::Corrected => finished.iter().filter(|(r, _)| r.down_damping.is_none()).count(),
            DownTarget::Source => 0,
        },
        own_choices_dropped: work.own_choices_dropped(),
        experts: finished.into_iter().map(|(_, sha256)| sha256).collect(),
    };
    let sha256 = write_json_atomic(work.work.join(summary_path(work.layer)), &summary)?;
    files.push((summary_path(work.layer), sha256.clone()));
    Ok(EncodedExperts { summary, sha256, files })
}

fn encode_expert(
    work: &LayerWork<'_>,
    ledger: Option<&Ledger>,
    bits: [u32; 3],
    id: usize,
    observer: &dyn Observer,
) -> Result<(FinalExpert, Hash)> {
    let stem = work.work.join(stem(work.layer, id));
    let (record_path, shard_path) = (stem.with_extension("json"), stem.with_extension("safetensors"));
    let inputs = work.inputs(id)?;
    let job_sha256 = work.job_sha256("final", &inputs, &serde_json::json!({ "bits": bits }))?;
    if record_path.exists() && shard_path.exists() {
        let known: FinalExpert = read_json(&record_path)?;
        let whole =
            known.content()? == known.content_sha256 && sha256_file(&shard_path)? == known.shard_sha256;
        if known.job_sha256 == job_sha256 && whole {
            // Written anew: the record was read, but its file may say it in other bytes.
            let sha256 = write_json_atomic(&record_path, &known)?;
            return Ok((known, sha256));
        }
    }
    proceed(observer)?;
    let expert = work.expert(id)?;
    if expert.holdout.rows == 0 {
        return refuse("no held-out row is routed to the expert, so its loss cannot be measured")
            .layer(work.layer)
            .expert(id)
            .wanted("a larger calibration corpus")
            .err();
    }
    let order = &work.choice(id).new_to_old;
    oracle(&work.source_weights(id)?, &expert.weights, order, &expert.holdout).map_err(
        |error| match error {
            Error::Check(refusal) => refusal.layer(work.layer).expert(id).check(),
            other => other,
        },
    )?;
    let probed = ledger.map(|ledger| ledger.probe(id));
    let scale = |role: Projection, target: Option<&_>| match probed {
        Some(probe) => probe.scale(role, bits[role as usize]),
        None => expert.fit_scale(work.codec, role, bits[role as usize], target),
    };
    let mut scales = [0.0; 3];
    let mut encode = |role: Projection, covariance: &_, target: Option<&_>| {
        let at = role as usize;
        scales[at] = scale(role, target)?;
        expert.encode(work.codec, role, (bits[at], scales[at]), covariance, target)
    };
    let input = expert.input_covariance()?;
    let gate = encode(Projection::Gate, &input, None)?;
    let up = encode(Projection::Up, &input, None)?;
    let (g, u) = (decode(&gate), decode(&up));
    // What was probed as it is now must come out to the byte.
    let repeats = |role: Projection, decoded: &Decoded| -> Result<()> {
        let promised = probed.map_or(Ok(None), |probe| probe.packed_sha256(role, bits))?;
        if promised.is_none_or(|promised| decoded.packed_sha256 == *promised) {
            return Ok(());
        }
        let refusal = refuse("the final encode differs from the probe of the same job");
        Err(refusal.layer(work.layer).expert(id).tensor(role.as_str()).check())
    };
    repeats(Projection::Gate, &g)?;
    repeats(Projection::Up, &u)?;
    let damping = match (probed, work.damping(id)) {
        (Some(probe), _) => probe.damping(bits)?,
        (None, Some(settled)) => settled,
        (None, None) => expert.choose_damping(&g.dense, &u.dense)?,
    };
    let through = expert.down_input(&g.dense, &u.dense, damping)?;
    let down = encode(Projection::Down, &through.covariance, through.target.as_ref())?;
    let d = decode(&down);
    repeats(Projection::Down, &d)?;
    let loss = expert.loss(&expert.reference(), &g.dense, &u.dense, &d.dense);

    let written = match work.recipe.vectors {
        VectorScope::Shared => {
            let expert = (id, [gate, up, down]);
            write_finished(&shard_path, work.recipe.codec, work.layer, vec![expert])?
        }
        VectorScope::PerTensor => {
            let packed = [gate.into_trellis()?, up.into_trellis()?, down.into_trellis()?];
            write_loose(&shard_path, work.layer, id, &packed)?
        }
    };
    reopen(work, &shard_path, id, [&g, &u, &d])?;
    let shared = matrix_sha256(&input);
    let covariances = [shared.clone(), shared, matrix_sha256(&through.covariance)];
    let tensors = Projection::ALL.iter().zip([g, u, d]).map(|(&role, decoded)| {
        let tensor = FinalTensor {
            scale: float17(scales[role as usize]),
            covariance_sha256: covariances[role as usize].clone(),
            packed_sha256: decoded.packed_sha256,
            reconstruction_sha256: decoded.reconstruction_sha256,
        };
        (role.as_str().to_owned(), tensor)
    });
    let mut record = FinalExpert {
        job_sha256,
        inputs,
        bits,
        tensors: tensors.collect(),
        down_damping: damping.map(float17),
        down_target_sha256: through.target.as_ref().map(matrix_sha256),
        dropped_rows: through.dropped_rows,
        clipped_outputs: expert.clipped.load(Ordering::Relaxed),
        loss: float17(loss.absolute),
        energy: float17(loss.energy),
        shard_sha256: written.sha256,
        content_sha256: Hash::new(),
    };
    record.content_sha256 = record.content()?;
    let sha256 = write_json_atomic(&record_path, &record)?;
    Ok((record, sha256))
}

/// Reads a mini-shard back: packed and decoded bytes must be those of the encode.
fn reopen(work: &LayerWork<'_>, path: &Path, id: usize, wanted: [&Decoded; 3]) -> Result<()> {
    let packed = read_packed(work, path, id)?;
    for (role, (packed, wanted)) in Projection::ALL.iter().zip(packed.iter().zip(wanted)) {
        let found = decode(packed);
        let same = found.packed_sha256 == wanted.packed_sha256
            && found.reconstruction_sha256 == wanted.reconstruction_sha256;
        if !same {
            return Err(refuse("the written shard does not decode to what was encoded")
                .file(path)
                .layer(work.layer)
                .expert(id)
                .tensor(role.as_str())
                .check());
        }
    }
    Ok(())
}

/// The records of a layer's finished experts, by id.
///
/// # Errors
/// Names the file that cannot be read or is not the one its layer's summary names.
pub fn read_records(work: &LayerWork<'_>, summary: &FinalLayer) -> Result<Vec<FinalExpert>> {
    (0..summary.experts.len()).map(|id| read_record(work, summary, id)).collect()
}

/// The finished experts of a layer: records and packed tensors, by id.
///
/// # Errors
/// Names the file that cannot be read or is not the one its layer's summary or its record names.
pub fn read_layer(work: &LayerWork<'_>, summary: &FinalLayer) -> Result<Vec<(FinalExpert, FinishedExpert)>> {
    (0..summary.experts.len())
        .into_par_iter()
        .map(|id| {
            let record = read_record(work, summary, id)?;
            let shard = work.work.join(stem(work.layer, id)).with_extension("safetensors");
            sealed(work, id, &shard, &record.shard_sha256)?;
            Ok((record, read_packed(work, &shard, id)?))
        })
        .collect()
}

/// The packed tensors of a finished expert's file.
fn read_packed(work: &LayerWork<'_>, path: &Path, id: usize) -> Result<FinishedExpert> {
    let sizes = (work.geometry.hidden_size, work.geometry.moe_intermediate_size);
    match work.recipe.vectors {
        VectorScope::Shared => FinishedLayer::open(path, work.recipe.codec, work.layer, sizes)?.expert(id),
        VectorScope::PerTensor => Ok(read_loose(path, work.layer, id, sizes)?.map(PackedWeight::Trellis)),
    }
}

fn read_record(work: &LayerWork<'_>, summary: &FinalLayer, id: usize) -> Result<FinalExpert> {
    let path = work.work.join(stem(work.layer, id)).with_extension("json");
    sealed(work, id, &path, &summary.experts[id])?;
    read_json(&path)
}

/// Refuses a file of another hash.
fn sealed(work: &LayerWork<'_>, id: usize, path: &Path, wanted: &Hash) -> Result<()> {
    if sha256_file(path)? == *wanted {
        return Ok(());
    }
    refuse("the file is not the one that was sealed")
        .file(path)
        .layer(work.layer)
        .expert(id)
        .wanted(format!("sha256 {wanted}"))
        .err()
}
