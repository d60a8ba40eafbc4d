//! The search stage: resumable score by score, bound to its inputs, and what it says about itself.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Mutex;

use walk::choose::permutation::{oracle, permuted};
use walk::config::choices::{PermutationPolicy, ScaleFamily};
use walk::store::hash::sha256_file;
use walk::walk::kept::drop_units;
use walk::walk::progress::Observer;
use walk::walk::search::{SearchRecord, search_layer, search_path};

use super::support::mini::Mini;
use super::support::stage::Stage;

/// Counts finished scores and can end the process (by a panic, which is as sudden) once so many are kept.
struct Counter {
    finished: Mutex<BTreeSet<String>>,
    adopted: Mutex<BTreeSet<String>>,
    stop_after: usize,
}

impl Counter {
    fn new(stop_after: usize) -> Self {
        Self { finished: Mutex::default(), adopted: Mutex::default(), stop_after }
    }
}

impl Observer for Counter {
    fn begin(&self, _: &str, _: Option<usize>, _: u64) {}
    fn advance(&self, item: &str) {
        if let Some(name) = item.strip_suffix(" (adopted)") {
            assert!(self.adopted.lock().unwrap().insert(name.to_owned()), "{item} twice");
            return;
        }
        let count = {
            let mut finished = self.finished.lock().unwrap();
            assert!(finished.insert(item.to_owned()), "{item} twice");
            finished.len()
        };
        // A lock may not be held here: a panic would poison it.
        assert!(count < self.stop_after, "stopped after {count} scores");
    }
    fn end(&self) {}
    fn note(&self, _: &str) {}
}

fn stage(mini: &Mini) -> Stage {
    Stage::new(&mini.model(), &mini.plan(), |recipe| {
        recipe.search = true;
        recipe.draws = 2;
        recipe.sketch_tiles = 2;
        recipe.permutations = vec![
            PermutationPolicy::Identity,
            PermutationPolicy::StoredDescendingDiag,
            PermutationPolicy::EnergyBalanced,
        ];
        recipe.scale_families =
            vec![ScaleFamily::Identity, ScaleFamily::QuarterRms, ScaleFamily::Sensitivity];
    })
}

fn artifact(work: &Path, layer: usize) -> String {
    sha256_file(work.join(search_path(layer))).unwrap()
}

#[test]
fn stopped_between_any_two_scores_it_repeats_none_and_ends_in_the_same_bytes() {
    let mini = Mini::new();
    let stage = stage(&mini);
    let (folder, capture) = (stage.path(), stage.capture());
    let work = stage.work(&folder, &capture);
    let whole = Counter::new(usize::MAX);
    let (record, _) = search_layer(&work, &whole).unwrap();
    let all = whole.finished.into_inner().unwrap();
    let wanted = artifact(work.work, work.layer);
    // Baselines, the sample's shared scores, its trips, every expert's own scores.
    assert!(all.len() >= 8, "{all:?}");
    assert_eq!(
        record.encodes,
        3 * all.iter().filter(|n| n.starts_with("baseline") || n.starts_with("trip")).count()
    );
    for stop in 1..all.len() {
        std::fs::remove_file(work.work.join(search_path(work.layer))).unwrap();
        drop_units(work.work, &search_path(work.layer)).unwrap();
        let first = Counter::new(stop);
        assert!(catch_unwind(AssertUnwindSafe(|| search_layer(&work, &first))).is_err());
        let first = first.finished.into_inner().unwrap();
        assert!(first.len() >= stop);
        let second = Counter::new(usize::MAX);
        search_layer(&work, &second).unwrap();
        let (finished, adopted) =
            (second.finished.into_inner().unwrap(), second.adopted.into_inner().unwrap());
        // What the first run finished the second adopts; together they do each score once.
        assert_eq!(adopted, first, "stopped after {stop}");
        assert!(finished.is_disjoint(&first));
        assert_eq!(finished.union(&first).cloned().collect::<BTreeSet<_>>(), all);
        assert_eq!(artifact(work.work, work.layer), wanted, "stopped after {stop}");
    }
}

#[test]
fn a_score_that_was_changed_is_made_again_and_another_search_is_refused_by_its_field() {
    let mini = Mini::new();
    let stage = stage(&mini);
    let (folder, capture) = (stage.path(), stage.capture());
    let mut work = stage.work(&folder, &capture);
    let (record, sha256) = search_layer(&work, &Counter::new(usize::MAX)).unwrap();
    let path = work.work.join(search_path(work.layer));
    std::fs::remove_file(&path).unwrap();
    drop_units(work.work, &search_path(work.layer)).unwrap();
    let stopped = Counter::new(3);
    assert!(catch_unwind(AssertUnwindSafe(|| search_layer(&work, &stopped))).is_err());
    let unit = path.with_extension("").join("baseline-000.json");
    let text = std::fs::read_to_string(&unit).unwrap();
    let at = text.find("\"loss\":\"").unwrap() + 8;
    let digit = if &text[at..=at] == "9" { "8" } else { "9" };
    std::fs::write(&unit, format!("{}{digit}{}", &text[..at], &text[at + 1..])).unwrap();
    let again = Counter::new(usize::MAX);
    assert_eq!(search_layer(&work, &again).unwrap().1, sha256);
    assert!(again.finished.into_inner().unwrap().iter().any(|name| name == "baseline, expert 0"));

    work.adopt(&record, "search".to_owned()).unwrap();
    let refused =
        |change: fn(&mut SearchRecord), field: &str, work: &mut walk::walk::layer::LayerWork<'_>| {
            let mut other = record.clone();
            change(&mut other);
            let said = work.adopt(&other, "search".to_owned()).unwrap_err().to_string();
            assert!(said.contains(field) && said.contains("search/layer-001.json"), "{said}");
        };
    refused(|r| r.layer += 1, "field `layer`", &mut work);
    refused(|r| r.recipe_sha256 = "0".repeat(64), "field `recipe_sha256`", &mut work);
    refused(|r| r.capture_sha256 = "0".repeat(64), "field `capture_sha256`", &mut work);
    refused(|r| r.source_inventory_sha256 = "0".repeat(64), "field `source_inventory_sha256`", &mut work);
    refused(|r| drop(r.experts.pop()), "field `experts`", &mut work);
}

#[test]
fn what_was_chosen_passes_the_permutation_oracle_and_does_not_lose_on_held_out_rows() {
    let mini = Mini::new();
    let stage = stage(&mini);
    let (folder, capture) = (stage.path(), stage.capture());
    let mut work = stage.work(&folder, &capture);
    let (record, _) = search_layer(&work, &Counter::new(usize::MAX)).unwrap();
    work.adopt(&record, "search".to_owned()).unwrap();
    let loss = |bundle: &str| -> f64 {
        record.bundles.iter().find(|b| b.name == bundle).unwrap().loss.parse().unwrap()
    };
    let kept = record.bundles.iter().find(|b| b.shared == record.shared && b.name != "own").unwrap();
    assert!(record.bundles.iter().filter(|b| b.name != "own").all(|b| loss(&b.name) >= loss(&kept.name)));
    assert_eq!(record.own_choices_dropped, loss("own") >= loss(&kept.name));
    assert_eq!(record.sample, [0, 1]);
    for id in 0..2 {
        let (source, expert) = (work.source_weights(id).unwrap(), work.expert(id).unwrap());
        let order = work.choice(id).new_to_old.clone();
        oracle(&source, &expert.weights, &order, &expert.holdout).unwrap();
        let wrong = permuted(&source, &order.iter().rev().copied().collect::<Vec<_>>());
        assert!(oracle(&source, &wrong, &order, &expert.holdout).is_err());
        let chosen = &record.experts[id].search;
        assert_eq!((chosen.policies.len(), chosen.draws[0].len()), (3, 2));
    }
}
