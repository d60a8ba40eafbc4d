//! What every stage of one MoE layer needs: rows, vectors, source weights, and the hashes that name them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, OnceLock};

use candle_core::{DType, Device};
use serde::{Deserialize, Serialize};

use super::capture::{LayerCapture, layer_folder};
use super::search::{SearchRecord, search_path};
use crate::calibrate::cold::{Fallback, fallback_share};
use crate::calibrate::rows::{ExpertRows, RowRule, row_ids_sha256, split_rows};
use crate::checkpoint::inventory::{Inventory, InventoryTensor};
use crate::checkpoint::names::{self, Projection};
use crate::checkpoint::{CheckpointDir, WeightSource};
use crate::choose::expert::{Expert, ExpertWeights};
use crate::choose::per_tensor::per_tensor_vectors;
use crate::choose::permutation::permuted;
use crate::choose::pilots::median_diagonal;
use crate::choose::vectors::{ExpertChoice, SharedChoice, SharedVectors, expert_vectors, shared_vectors};
use crate::codec::weight::WeightCodec;
use crate::config::choices::{CodecName, PermutationPolicy, VectorScope};
use crate::config::{Geometry, Recipe};
use crate::error::{Result, refuse};
use crate::linalg::Matrix;
use crate::store::atomic::write_json_atomic;
use crate::store::canonical_json::{canonical_hash, float17};
use crate::store::hash::{Hash, sha256_hex};
use crate::store::seed::draw_seed;

/// One MoE layer at work.
pub struct LayerWork<'a> {
    /// The work directory.
    pub work: &'a Path,
    /// The layer.
    pub layer: usize,
    /// Model geometry.
    pub geometry: &'a Geometry,
    /// Recipe.
    pub recipe: &'a Recipe,
    /// SHA-256 of the recipe.
    pub recipe_sha256: &'a Hash,
    /// BF16 source of the experts.
    pub source: &'a CheckpointDir,
    /// Its inventory.
    pub inventory: &'a Inventory,
    /// SHA-256 of the inventory.
    pub inventory_sha256: &'a Hash,
    /// The encoder.
    pub codec: &'a WeightCodec,
    /// What the layer's rows are.
    pub capture: &'a LayerCapture,
    rows: Vec<ExpertRows>,
    shared: SharedVectors,
    median: OnceLock<Arc<Vec<f64>>>,
    choices: Vec<ExpertChoice>,
    dampings: Vec<Option<Option<f64>>>,
    own_choices_dropped: bool,
    search_sha256: Option<Hash>,
}

/// Vectors, orders and dampings of a layer.
#[derive(Debug, Clone)]
pub struct LayerChoices {
    shared: SharedVectors,
    experts: Vec<ExpertChoice>,
    dampings: Vec<Option<Option<f64>>>,
}

/// The hashes that determine an expert's encodes, besides recipe and bits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertInputs {
    /// The expert's id.
    pub expert: usize,
    /// Rows that enter covariances.
    pub fit_rows: usize,
    /// Rows that measure loss.
    pub holdout_rows: usize,
    /// SHA-256 of the fit rows' ids.
    pub fit_row_ids_sha256: Hash,
    /// SHA-256 of the held-out rows' ids.
    pub holdout_row_ids_sha256: Hash,
    /// What the fit rows were topped up with, where they were too few.
    pub fit_fallback: Option<FallbackRecord>,
    /// What loss was measured on, where the expert has no held-out row.
    pub holdout_fallback: Option<FallbackRecord>,
    /// SHA-256 of the source payloads, by module.
    pub bf16_sha256: BTreeMap<String, Hash>,
    /// Where the order of the intermediate channels comes from.
    pub permutation_policy: PermutationPolicy,
    /// SHA-256 of the canonical array `new_to_old`.
    pub permutation_sha256: Hash,
    /// SHA-256 of the rotation vectors before the global scale, by module; none with KAIJU1.
    pub vector_sha256: BTreeMap<String, Hash>,
}

/// Rows of others that stand in for an expert's own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FallbackRecord {
    /// Rows the expert has itself.
    pub own_rows: usize,
    /// Rows that were wanted from others.
    pub wanted: usize,
    /// Rows there were.
    pub rows: usize,
    /// Rows from each stratum of the expert's router score, coldest first.
    pub strata: Vec<usize>,
    /// Share of the fallback in a covariance: 17 digits.
    pub share: String,
    /// SHA-256 of the rows' ids.
    pub row_ids_sha256: Hash,
    /// Why.
    pub reason: String,
}

/// `layer-NNN/cold-fallback-audit.json`: every expert that was topped up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ColdAudit {
    /// The layer.
    pub layer: usize,
    /// SHA-256 of `capture.json`.
    pub capture_sha256: Hash,
    /// Fit rows below which an expert is cold.
    pub min_fit_rows: usize,
    /// Experts with a fallback, ascending.
    pub experts: Vec<ExpertInputs>,
}

/// `layer-NNN/cold-fallback-audit.json`, relative to the work directory.
pub fn cold_audit_path(layer: usize) -> PathBuf {
    layer_folder(layer).join("cold-fallback-audit.json")
}

impl<'a> LayerWork<'a> {
    /// Plans the rows and draws the shared vectors of a captured layer.
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        work: &'a Path,
        layer: usize,
        geometry: &'a Geometry,
        (recipe, recipe_sha256): (&'a Recipe, &'a Hash),
        source: &'a CheckpointDir,
        (inventory, inventory_sha256): (&'a Inventory, &'a Hash),
        codec: &'a WeightCodec,
        capture: &'a LayerCapture,
    ) -> Self {
        let version = &recipe.recipe_version;
        let hashes: Vec<u64> = (0..capture.mlp_in.rows)
            .map(|row| draw_seed(version, layer, None, "row_split", row as u32))
            .collect();
        let rows = split_rows(
            geometry.n_routed_experts,
            capture.k,
            &capture.ids,
            &capture.scores,
            &hashes,
            RowRule {
                modulus: recipe.fit_modulus,
                holdout_rows: recipe.holdout_rows,
                min_fit_rows: recipe.min_fit_rows,
            },
        );
        let shared = shared_vectors(version, layer, geometry.hidden_size, &SharedChoice::default());
        let experts = geometry.n_routed_experts;
        Self {
            work,
            layer,
            geometry,
            recipe,
            recipe_sha256,
            source,
            inventory,
            inventory_sha256,
            codec,
            capture,
            rows,
            shared,
            median: OnceLock::new(),
            choices: vec![ExpertChoice::plain(geometry.moe_intermediate_size); experts],
            dampings: vec![None; experts],
            own_choices_dropped: false,
            search_sha256: None,
        }
    }

    /// Goes on with what a search chose, instead of draw 0 and source order; `sha256` is that of its artifact.
    ///
    /// # Errors
    /// Names the artifact and the field when it is of another layer, recipe, capture or source.
    pub fn adopt(&mut self, record: &SearchRecord, sha256: Hash) -> Result<()> {
        let bound = [
            ("layer", record.layer.to_string(), self.layer.to_string()),
            ("recipe_sha256", record.recipe_sha256.clone(), self.recipe_sha256.clone()),
            ("capture_sha256", record.capture_sha256.clone(), self.capture.sha256.clone()),
            (
                "source_inventory_sha256",
                record.source_inventory_sha256.clone(),
                self.inventory_sha256.clone(),
            ),
            ("experts", record.experts.len().to_string(), self.choices.len().to_string()),
        ];
        if let Some((field, found, wanted)) = bound.into_iter().find(|(_, found, wanted)| found != wanted) {
            return refuse(format!("the search was made for something else: this is {found}"))
                .file(self.work.join(search_path(self.layer)))
                .layer(self.layer)
                .field(field)
                .wanted(wanted)
                .err();
        }
        let (version, hidden) = (&self.recipe.recipe_version, self.geometry.hidden_size);
        self.shared = shared_vectors(version, self.layer, hidden, &record.shared);
        for id in 0..self.choices.len() {
            self.choices[id] = record.choice(id, self.geometry.moe_intermediate_size);
            self.dampings[id] = Some(record.damping(id)?);
        }
        self.own_choices_dropped = record.own_choices_dropped;
        self.search_sha256 = Some(sha256);
        Ok(())
    }

    /// SHA-256 of the adopted search's artifact.
    pub fn search_sha256(&self) -> Option<&Hash> {
        self.search_sha256.as_ref()
    }

    /// Whether the search's choices for the experts lost on held-out rows and were dropped.
    pub fn own_choices_dropped(&self) -> bool {
        self.own_choices_dropped
    }

    /// Everything a search chose, for [`LayerWork::choose_as`].
    pub fn choices(&self) -> LayerChoices {
        let (shared, experts, dampings) = (self.shared.clone(), self.choices.clone(), self.dampings.clone());
        LayerChoices { shared, experts, dampings }
    }

    /// Takes over what a search chose for the same layer under another recipe: what a pilot holds fixed.
    pub fn choose_as(&mut self, choices: &LayerChoices) {
        let LayerChoices { shared, experts, dampings } = choices.clone();
        (self.shared, self.choices, self.dampings) = (shared, experts, dampings);
    }

    /// How an expert's channels are ordered and its vectors made.
    pub fn choice(&self, id: usize) -> &ExpertChoice {
        &self.choices[id]
    }

    /// The damping of down's correction, where a search has settled it.
    pub fn damping(&self, id: usize) -> Option<Option<f64>> {
        self.dampings[id]
    }

    /// The source tensor behind an expert's projection.
    ///
    /// # Errors
    /// Names the tensor when the inventory lacks it.
    pub fn source_tensor(&self, expert: usize, role: Projection) -> Result<(String, &'a InventoryTensor)> {
        let name = names::expert(self.layer, expert, role);
        match self.inventory.tensors.get(&name) {
            Some(tensor) => Ok((name, tensor)),
            None => refuse("the source has no such tensor").layer(self.layer).tensor(name).err(),
        }
    }

    /// The source weights of an expert, `[K, N]` each, channels in source order.
    ///
    /// # Errors
    /// Names the tensor that cannot be read.
    pub fn source_weights(&self, id: usize) -> Result<ExpertWeights> {
        let (hidden, inner) = (self.geometry.hidden_size, self.geometry.moe_intermediate_size);
        let load = |role: Projection| -> Result<Matrix<f32>> {
            let shape = if role == Projection::Down { [hidden, inner] } else { [inner, hidden] };
            let name = names::expert(self.layer, id, role);
            let weight = self.source.load(&name, &shape, DType::F32, &Device::Cpu)?;
            // [out, in] in the checkpoint, [K, N] for the codec.
            Ok(Matrix::new(shape[0], shape[1], weight.flatten_all()?.to_vec1()?).transposed())
        };
        Ok(ExpertWeights {
            matrices: [load(Projection::Gate)?, load(Projection::Up)?, load(Projection::Down)?],
        })
    }

    /// Loads an expert: weights in stored order, vectors, rows.
    ///
    /// # Errors
    /// Names the tensor that cannot be read.
    pub fn expert(&self, id: usize) -> Result<Expert<'a>> {
        self.expert_with(id, &self.choices[id], &self.shared)
    }

    /// The same under other choices.
    ///
    /// # Errors
    /// As [`LayerWork::expert`].
    pub fn expert_with(
        &self,
        id: usize,
        choice: &ExpertChoice,
        shared: &SharedVectors,
    ) -> Result<Expert<'a>> {
        let (rows, source) = (&self.rows[id], self.source_weights(id)?);
        let weights = match choice.policy {
            PermutationPolicy::Identity => source,
            _ => permuted(&source, &choice.new_to_old),
        };
        let version = &self.recipe.recipe_version;
        let vectors = match self.recipe.vectors {
            VectorScope::Shared => expert_vectors(version, self.layer, id, choice, shared),
            VectorScope::PerTensor => per_tensor_vectors(version, self.layer, id, &weights),
        };
        Ok(Expert {
            layer: self.layer,
            id,
            recipe: self.recipe,
            weights,
            vectors,
            fit: self.capture.mlp_in.gather_rows(&rows.fit),
            fallback: self.capture.mlp_in.gather_rows(&rows.fit_fallback.rows),
            fallback_share: fallback_share(rows.fit.len(), self.recipe.min_fit_rows),
            holdout: self.capture.mlp_in.gather_rows(rows.measured()),
            median_diagonal: self.recipe.cold_diagonal_shrinkage.then(|| self.median_diagonal()),
            clipped: AtomicUsize::new(0),
        })
    }

    /// The rows an expert's losses are measured on, ascending.
    pub fn measured_rows(&self, id: usize) -> &[usize] {
        self.rows[id].measured()
    }

    /// Whether an expert's covariances are topped up with rows of others.
    pub fn is_cold(&self, id: usize) -> bool {
        fallback_share(self.rows[id].fit.len(), self.recipe.min_fit_rows) > 0.0
    }

    /// The median over the layer's experts of the mean square of each input channel, over their own fit rows; over all
    /// rows where no expert has any.
    fn median_diagonal(&self) -> Arc<Vec<f64>> {
        let diagonal = |rows: &mut dyn Iterator<Item = usize>| {
            let (mut sum, mut count) = (vec![0.0; self.geometry.hidden_size], 0.0);
            for row in rows {
                let values = self.capture.mlp_in.row(row);
                sum.iter_mut().zip(values).for_each(|(sum, &x)| *sum += f64::from(x).powi(2));
                count += 1.0;
            }
            sum.iter_mut().for_each(|sum| *sum /= count);
            sum
        };
        let made = self.median.get_or_init(|| {
            let own = self.rows.iter().filter(|rows| !rows.fit.is_empty());
            let mut diagonals: Vec<Vec<f64>> =
                own.map(|rows| diagonal(&mut rows.fit.iter().copied())).collect();
            if diagonals.is_empty() {
                diagonals.push(diagonal(&mut (0..self.capture.mlp_in.rows)));
            }
            Arc::new(median_diagonal(&diagonals))
        });
        made.clone()
    }

    /// The hashes of what [`LayerWork::expert`] gives.
    ///
    /// # Errors
    /// Names the tensor when the inventory lacks it.
    pub fn inputs(&self, id: usize) -> Result<ExpertInputs> {
        let rows = &self.rows[id];
        let choice = &self.choices[id];
        let vectors = match self.recipe.vectors {
            VectorScope::Shared => {
                expert_vectors(&self.recipe.recipe_version, self.layer, id, choice, &self.shared)
            }
            // They follow from the weights, which have to be read for them.
            VectorScope::PerTensor => self.expert(id)?.vectors,
        };
        let hash = |vectors: &crate::codec::Vectors| {
            let bytes = vectors.suh.iter().chain(&vectors.svh).flat_map(|x| x.to_le_bytes());
            sha256_hex(&bytes.collect::<Vec<u8>>())
        };
        let by_module = [&vectors.gate, &vectors.up, &vectors.down];
        let module = |role: Projection| role.as_str().to_owned();
        let source = Projection::ALL.iter().map(|&role| {
            let (_, tensor) = self.source_tensor(id, role)?;
            Ok((module(role), tensor.sha256.clone()))
        });
        Ok(ExpertInputs {
            expert: id,
            fit_rows: rows.fit.len(),
            holdout_rows: rows.holdout.len(),
            fit_row_ids_sha256: row_ids_sha256(&rows.fit),
            holdout_row_ids_sha256: row_ids_sha256(&rows.holdout),
            fit_fallback: fallback_record(
                &rows.fit_fallback,
                rows.fit.len(),
                fallback_share(rows.fit.len(), self.recipe.min_fit_rows),
                "fewer fit rows than min_fit_rows",
            ),
            holdout_fallback: fallback_record(
                &rows.holdout_fallback,
                rows.holdout.len(),
                1.0,
                "no held-out row is routed to the expert",
            ),
            bf16_sha256: source.collect::<Result<_>>()?,
            permutation_policy: choice.policy,
            permutation_sha256: canonical_hash(&choice.new_to_old)?,
            vector_sha256: match self.recipe.codec {
                CodecName::Trellis => {
                    Projection::ALL.iter().map(|&r| (module(r), hash(by_module[r as usize]))).collect()
                }
                // Nothing is rotated.
                CodecName::Kaiju1 => BTreeMap::new(),
            },
        })
    }

    /// Publishes the record of all cold experts, empty where there are none.
    ///
    /// # Errors
    /// Names the path.
    pub fn write_cold_audit(&self) -> Result<Hash> {
        let inputs = (0..self.rows.len()).map(|id| self.inputs(id)).collect::<Result<Vec<_>>>()?;
        let audit = ColdAudit {
            layer: self.layer,
            capture_sha256: self.capture.sha256.clone(),
            min_fit_rows: self.recipe.min_fit_rows,
            experts: inputs
                .into_iter()
                .filter(|inputs| inputs.fit_fallback.is_some() || inputs.holdout_fallback.is_some())
                .collect(),
        };
        write_json_atomic(self.work.join(cold_audit_path(self.layer)), &audit)
    }

    /// The name of a job on an expert: a hash over everything its result depends on.
    ///
    /// # Errors
    /// None in practice; see [`canonical_hash`].
    pub fn job_sha256(&self, kind: &str, inputs: &ExpertInputs, parameters: &impl Serialize) -> Result<Hash> {
        canonical_hash(&serde_json::json!({
            "kind": kind,
            "layer": self.layer,
            "recipe_sha256": self.recipe_sha256,
            "capture_sha256": self.capture.sha256,
            "inputs": inputs,
            "parameters": parameters,
        }))
    }
}

fn fallback_record(fallback: &Fallback, own_rows: usize, share: f64, reason: &str) -> Option<FallbackRecord> {
    (fallback.wanted > 0).then(|| FallbackRecord {
        own_rows,
        wanted: fallback.wanted,
        rows: fallback.rows.len(),
        strata: fallback.strata.to_vec(),
        share: float17(share),
        row_ids_sha256: row_ids_sha256(&fallback.rows),
        reason: reason.to_owned(),
    })
}

/// SHA-256 of a matrix, f32 little-endian row-major.
pub fn matrix_sha256(matrix: &Matrix<f32>) -> Hash {
    sha256_hex(&matrix.data.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())
}
