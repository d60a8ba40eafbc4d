//! The search stage of a layer: shared vectors on a sample, then every expert's order and own vectors.
//!
//! Every expert is measured once as it is (draw 0, source order, unscaled) at the middle width: the baseline, which also
//! gives the down-input covariance. Shared signs, then shared scales are ranked on a mass-stratified sample; two bundles
//! each are promoted to full round trips, and the one of least mass-weighted held-out loss wins. Then each expert chooses
//! by the ranking model alone, and the sample is measured with what it chose: where that loses on held-out rows, all
//! experts of the layer keep source order and draw 0, and the report counts it. Every unit's result is kept under
//! `search/layer-NNN/` until `search/layer-NNN.json` is sealed, so a restart repeats no finished score.
//!
//! Source: the owner's Round 7 record, "Rotations, multi-draw, and G-scale" and lever 4.

use std::path::PathBuf;

use rayon::prelude::*;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::kept::{adopt, keep, units_folder};
use super::layer::LayerWork;
use super::progress::{Observer, proceed};
pub use super::search_record::{Bundle, SearchRecord, SearchedExpert, search_path};
use crate::checkpoint::schema_v2::{PackedExpert, V2Layer, write_shard};
use crate::choose::expert::{Expert, ExpertWeights, decode};
use crate::choose::sample::mass_stratified_sample;
use crate::choose::scales::{SideEnergies, Steps, steps};
use crate::choose::search::{
    ExpertSearch, RoundTrip, Settled, SharedScores, Study, Tripped, column_energies, rank_correlation,
    round_trip, row_energies,
};
use crate::choose::vectors::{
    ExpertChoice, SharedChoice, SharedVectors, VectorChoice, expert_vectors, shared_vectors,
};
use crate::codec::trellis::encode::TrellisCodec;
use crate::config::choices::ScaleFamily;
use crate::error::{Result, refuse};
use crate::store::atomic::{create_dir_durably, write_json_atomic};
use crate::store::canonical_json::{float17, parse_float17};
use crate::store::hash::{Hash, sha256_file};

/// Encodes of a full round trip.
const ENCODES: usize = 3;
/// Bundles promoted to full round trips at each of the two shared decisions.
const PROMOTED: usize = 2;

/// The baseline of an expert: its packed tensors lie beside it.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Baseline {
    trip: RoundTrip,
    shard_sha256: Hash,
}

struct Search<'a> {
    work: &'a LayerWork<'a>,
    codec: &'a TrellisCodec,
    folder: PathBuf,
    observer: &'a dyn Observer,
    hidden: usize,
    channels: usize,
    shares: Vec<f64>,
}

/// Searches a layer whose experts are as the source has them, and publishes the artifact.
///
/// # Errors
/// Names layer, expert and tensor of what cannot be studied or encoded.
pub fn search_layer(work: &LayerWork<'_>, observer: &dyn Observer) -> Result<(SearchRecord, Hash)> {
    let (recipe, experts) = (work.recipe, work.geometry.n_routed_experts);
    let path = work.work.join(search_path(work.layer));
    let folder = work.work.join(units_folder(&search_path(work.layer)));
    create_dir_durably(&folder)?;
    let search = Search {
        work,
        codec: work.codec.trellis()?,
        folder,
        observer,
        hidden: work.geometry.hidden_size,
        channels: work.geometry.moe_intermediate_size,
        shares: work.capture.mass.shares(),
    };
    let sample = mass_stratified_sample(&work.capture.mass.units, recipe.shared_sample_experts);
    let units = 2 * experts + sample.len() * (2 + 2 * PROMOTED + 1);
    observer.begin("search", Some(work.layer), units as u64);

    let baselines = (0..experts).into_par_iter().map(|id| search.baseline(id)).collect::<Result<Vec<_>>>()?;
    let mut shared = SharedChoice::default();
    let first = sample.iter().map(|&id| baselines[id].trip.clone()).collect();
    let mut bundles = vec![search.bundle("baseline", &shared, &sample, first)?];
    let mut encodes = ENCODES * experts;

    let draws: Vec<VectorChoice> =
        (0..recipe.draws).map(|draw| VectorChoice { draw, ..VectorChoice::default() }).collect();
    let by_draw = search.score_shared("signs", (&sample, &baselines), &shared, [&draws, &draws])?;
    let promoted = best_pairs(&by_draw, PROMOTED)?;
    let chosen = |[suh, svh]: [usize; 2]| SharedChoice {
        gate_up_suh: draws[suh].clone(),
        down_svh: draws[svh].clone(),
    };
    let candidates = promoted.into_iter().map(chosen).collect();
    encodes += search.promote("signs", candidates, &mut shared, (&sample, &baselines), &mut bundles)?;

    let families = search.shared_families(&sample, &shared)?;
    let by_family =
        search.score_shared("scales", (&sample, &baselines), &shared, [&families[0], &families[1]])?;
    let promoted = best_sums(&by_family)?;
    let chosen = |[suh, svh]: [usize; 2]| SharedChoice {
        gate_up_suh: families[0][suh].clone(),
        down_svh: families[1][svh].clone(),
    };
    let current = shared.clone();
    let candidates =
        promoted.into_iter().map(chosen).filter(|choice| *choice != current).take(PROMOTED).collect();
    encodes += search.promote("scales", candidates, &mut shared, (&sample, &baselines), &mut bundles)?;

    let own = (0..experts)
        .into_par_iter()
        .map(|id| search.own(id, &shared, &baselines[id].trip))
        .collect::<Result<Vec<_>>>()?;
    let trips = sample
        .par_iter()
        .map(|&id| search.trip("own", id, &shared, &own[id].choice, &baselines[id].trip))
        .collect::<Result<Vec<_>>>()?;
    encodes += ENCODES * sample.len();
    let own_bundle = search.bundle("own", &shared, &sample, trips)?;
    let before =
        bundles.iter().find(|bundle| bundle.shared == shared).expect("the shared choice was measured");
    let own_choices_dropped = parse_float17(&own_bundle.loss)? >= parse_float17(&before.loss)?;
    bundles.push(own_bundle);
    observer.end();

    let record = SearchRecord {
        layer: work.layer,
        recipe_sha256: work.recipe_sha256.clone(),
        capture_sha256: work.capture.sha256.clone(),
        source_inventory_sha256: work.inventory_sha256.clone(),
        rank_correlation: correlation(&bundles, sample.len())?.map(float17),
        sample,
        shared,
        shared_scores: [by_draw, by_family],
        bundles,
        experts: baselines
            .into_iter()
            .zip(own)
            .enumerate()
            .map(|(expert, (baseline, search))| SearchedExpert { expert, baseline: baseline.trip, search })
            .collect(),
        own_choices_dropped,
        encodes,
    };
    let sha256 = write_json_atomic(&path, &record)?;
    Ok((record, sha256))
}

impl Search<'_> {
    /// The kept result of a unit, or what `compute` finds, kept before it is told of.
    fn unit<T: Serialize + DeserializeOwned>(
        &self,
        name: &str,
        id: usize,
        parameters: &impl Serialize,
        compute: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let path = self.folder.join(format!("{name}-{id:03}.json"));
        let job = self.work.job_sha256(&format!("search/{name}"), &self.work.inputs(id)?, parameters)?;
        if let Some(content) = adopt(&path, &job)? {
            self.observer.advance(&format!("{name}, expert {id} (adopted)"));
            return Ok(content);
        }
        proceed(self.observer)?;
        let content = compute()?;
        keep(&path, &job, &content)?;
        self.observer.advance(&format!("{name}, expert {id}"));
        Ok(content)
    }

    fn vectors(&self, choice: &SharedChoice) -> SharedVectors {
        shared_vectors(&self.work.recipe.recipe_version, self.work.layer, self.hidden, choice)
    }

    fn shard(&self, id: usize) -> PathBuf {
        self.folder.join(format!("baseline-{id:03}.safetensors"))
    }

    fn baseline(&self, id: usize) -> Result<Baseline> {
        let shard = self.shard(id);
        let compute = || {
            let (trip, packed) = self.measure(&self.work.expert(id)?, None)?;
            let written = write_shard(&shard, self.work.layer, &[(id, packed)])?;
            Ok(Baseline { trip, shard_sha256: written.sha256 })
        };
        let found: Baseline = self.unit("baseline", id, &(), compute)?;
        if shard.exists() && sha256_file(&shard)? == found.shard_sha256 {
            return Ok(found);
        }
        refuse("the baseline's packed tensors are not those its record names")
            .file(&shard)
            .layer(self.work.layer)
            .expert(id)
            .wanted(format!("sha256 {}; remove the folder to search the layer anew", found.shard_sha256))
            .err()
    }

    /// A full round trip with what the ranking model says of it, and the packed tensors.
    fn measure(&self, expert: &Expert<'_>, settled: Option<Settled>) -> Result<(RoundTrip, PackedExpert)> {
        let Tripped { packed, covariances, scales, damping, loss } = round_trip(self.codec, expert, settled)?;
        let study = Study::new(self.codec, expert, covariances, scales);
        let trip = RoundTrip {
            loss: float17(loss.absolute),
            relative_loss: float17(loss.relative()),
            predicted: float17(study.predicted(&expert.vectors)?),
            down_damping: damping.map(float17),
            scales: scales.map(float17),
            packed_sha256: [0, 1, 2].map(|at| packed[at].packed_sha256()),
        };
        Ok((trip, packed))
    }

    /// Calls `study` with an expert in source order behind its baseline's gate and up.
    fn with_study<T>(
        &self,
        id: usize,
        baseline: &RoundTrip,
        study: impl FnOnce(&Expert<'_>, &Study<'_, TrellisCodec>) -> Result<T>,
    ) -> Result<T> {
        let expert = self.work.expert(id)?;
        let packed =
            V2Layer::open(&self.shard(id), self.work.layer, self.hidden, self.channels)?.expert(id)?;
        let [gate, up] = [0, 1].map(|at| decode(&packed[at]).dense);
        let covariances = [expert.input_covariance()?, expert.down_input(&gate, &up, None)?.covariance];
        let studied = Study::new(self.codec, &expert, covariances, baseline.settled()?.scales);
        study(&expert, &studied)
    }

    /// The sample's scores of candidates for the two shared vectors, summed by mass.
    fn score_shared(
        &self,
        name: &str,
        (sample, baselines): (&[usize], &[Baseline]),
        current: &SharedChoice,
        [suh, svh]: [&[VectorChoice]; 2],
    ) -> Result<SharedScores> {
        let scores = sample
            .par_iter()
            .map(|&id| {
                let compute = || {
                    self.with_study(id, &baselines[id].trip, |expert, study| {
                        let plain = ExpertChoice::plain(self.channels);
                        let version = &self.work.recipe.recipe_version;
                        let own = expert_vectors(version, expert.layer, id, &plain, &self.vectors(current));
                        let made = |choice: SharedChoice| self.vectors(&choice);
                        let suh: Vec<Vec<f32>> = suh
                            .iter()
                            .map(|c| {
                                made(SharedChoice { gate_up_suh: c.clone(), ..current.clone() }).gate_up_suh
                            })
                            .collect();
                        let svh: Vec<Vec<f32>> = svh
                            .iter()
                            .map(|c| made(SharedChoice { down_svh: c.clone(), ..current.clone() }).down_svh)
                            .collect();
                        study.shared_scores(&suh, &svh, &own)
                    })
                };
                self.unit(&format!("shared-{name}"), id, &(current, suh, svh), compute)
            })
            .collect::<Result<Vec<SharedScores>>>()?;
        let sum = |list: fn(&SharedScores) -> &Vec<String>, count: usize| -> Result<Vec<String>> {
            (0..count)
                .map(|at| {
                    let terms = scores
                        .iter()
                        .zip(sample)
                        .map(|(scores, &id)| Ok(parse_float17(&list(scores)[at])? * self.shares[id]));
                    Ok(float17(terms.sum::<Result<f64>>()?))
                })
                .collect()
        };
        Ok(SharedScores {
            gate_up_suh: sum(|s| &s.gate_up_suh, suh.len())?,
            down_svh: sum(|s| &s.down_svh, svh.len())?,
        })
    }

    /// Candidates for the shared vectors' scales: the recipe's families of the sample's energies, by mass.
    fn shared_families(&self, sample: &[usize], shared: &SharedChoice) -> Result<[Vec<VectorChoice>; 2]> {
        let mut sides = [vec![0.0f64; self.hidden], vec![0.0f64; self.hidden]];
        for &id in sample {
            let ExpertWeights { matrices } = self.work.source_weights(id)?;
            let [gate, up, down] = &matrices;
            let add = |side: &mut Vec<f64>, energies: Vec<f64>| {
                side.iter_mut().zip(energies).for_each(|(sum, energy)| *sum += self.shares[id] * energy);
            };
            add(&mut sides[0], row_energies(gate));
            add(&mut sides[0], row_energies(up));
            add(&mut sides[1], column_energies(down));
        }
        let draws = [shared.gate_up_suh.draw, shared.down_svh.draw];
        let mut candidates = sides.into_iter().zip(draws).map(|(weights, draw)| {
            let side = SideEnergies { weights, costs: None };
            let made = |&family: &ScaleFamily| -> Option<VectorChoice> {
                let steps: Steps = steps(family, &side)?;
                Some(VectorChoice { draw, family, steps })
            };
            self.work.recipe.scale_families.iter().filter_map(made).collect()
        });
        Ok([candidates.next().unwrap_or_default(), candidates.next().unwrap_or_default()])
    }

    /// Measures promoted bundles that were not measured yet and keeps the best of them and the current one. Returns the
    /// encodes it consists of.
    fn promote(
        &self,
        name: &str,
        candidates: Vec<SharedChoice>,
        shared: &mut SharedChoice,
        (sample, baselines): (&[usize], &[Baseline]),
        bundles: &mut Vec<Bundle>,
    ) -> Result<usize> {
        let mut encodes = 0;
        let mut least = parse_float17(&bundles.iter().find(|b| b.shared == *shared).expect("measured").loss)?;
        for (number, choice) in candidates.into_iter().enumerate() {
            if bundles.iter().any(|bundle| bundle.shared == choice) {
                sample.iter().for_each(|id| self.observer.advance(&format!("{name}, expert {id} (known)")));
                continue;
            }
            let bundle_name = format!("{name}-{number}");
            let plain = ExpertChoice::plain(self.channels);
            let trips = sample
                .par_iter()
                .map(|&id| self.trip(&bundle_name, id, &choice, &plain, &baselines[id].trip))
                .collect::<Result<Vec<_>>>()?;
            encodes += ENCODES * sample.len();
            let bundle = self.bundle(&bundle_name, &choice, sample, trips)?;
            let loss = parse_float17(&bundle.loss)?;
            bundles.push(bundle);
            if loss < least {
                (least, *shared) = (loss, choice);
            }
        }
        Ok(encodes)
    }

    /// A full round trip of an expert under a bundle.
    fn trip(
        &self,
        bundle: &str,
        id: usize,
        shared: &SharedChoice,
        own: &ExpertChoice,
        baseline: &RoundTrip,
    ) -> Result<RoundTrip> {
        self.unit(&format!("trip-{bundle}"), id, &(shared, own, baseline), || {
            let expert = self.work.expert_with(id, own, &self.vectors(shared))?;
            Ok(self.measure(&expert, Some(baseline.settled()?))?.0)
        })
    }

    fn own(&self, id: usize, shared: &SharedChoice, baseline: &RoundTrip) -> Result<ExpertSearch> {
        self.unit("own", id, shared, || {
            self.with_study(id, baseline, |_, study| study.search(&self.vectors(shared)))
        })
    }

    fn bundle(
        &self,
        name: &str,
        shared: &SharedChoice,
        sample: &[usize],
        trips: Vec<RoundTrip>,
    ) -> Result<Bundle> {
        let mass: f64 = sample.iter().map(|&id| self.shares[id]).sum();
        let terms = trips.iter().zip(sample).map(|(trip, &id)| Ok(trip.loss()? * self.shares[id]));
        let loss = terms.sum::<Result<f64>>()? / mass.max(f64::MIN_POSITIVE);
        Ok(Bundle { name: name.to_owned(), shared: shared.clone(), loss: float17(loss), trips })
    }
}

fn numbers(texts: &[String]) -> Result<Vec<f64>> {
    texts.iter().map(|text| parse_float17(text)).collect()
}

/// Candidates by ascending score, the first of equals first.
fn ranked(scores: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[a].total_cmp(&scores[b]).then(a.cmp(&b)));
    order
}

/// The sides do not interact in the model, so the best of one goes with the best of the other, and so on.
fn best_pairs(scores: &SharedScores, count: usize) -> Result<Vec<[usize; 2]>> {
    let (suh, svh) = (ranked(&numbers(&scores.gate_up_suh)?), ranked(&numbers(&scores.down_svh)?));
    Ok(suh.into_iter().zip(svh).take(count).map(|(suh, svh)| [suh, svh]).collect())
}

/// All pairs by ascending sum of scores.
fn best_sums(scores: &SharedScores) -> Result<Vec<[usize; 2]>> {
    let (suh, svh) = (numbers(&scores.gate_up_suh)?, numbers(&scores.down_svh)?);
    let mut all: Vec<[usize; 2]> = (0..suh.len()).flat_map(|a| (0..svh.len()).map(move |b| [a, b])).collect();
    let sum = |pair: &[usize; 2]| suh[pair[0]] + svh[pair[1]];
    all.sort_by(|a, b| sum(a).total_cmp(&sum(b)).then(a.cmp(b)));
    Ok(all)
}

/// Mean over the sample of the rank correlation between predicted and measured losses of its bundles.
fn correlation(bundles: &[Bundle], experts: usize) -> Result<Option<f64>> {
    let mut found = Vec::new();
    for at in 0..experts {
        let list = |text: fn(&RoundTrip) -> &String| -> Result<Vec<f64>> {
            bundles.iter().map(|bundle| parse_float17(text(&bundle.trips[at]))).collect()
        };
        found.extend(rank_correlation(&list(|trip| &trip.predicted)?, &list(|trip| &trip.loss)?));
    }
    Ok((!found.is_empty()).then(|| found.iter().sum::<f64>() / found.len() as f64))
}
