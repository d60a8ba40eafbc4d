//! Against what Transformers computes from small random checkpoints (see `tests/golden/README.md`).
//!
//! The bars are those of a correct f32 implementation: plain f32 reaches 1.8e-6 on the logits, a wrong norm epsilon
//! alone costs 1.1e-5.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use candle_core::{Device, Tensor};
use walk::model::{Attended, TopK};

use crate::support::{Model, State, integers, relative_l2, repository, values};

const CASES: [&str; 3] = ["base", "groups", "short"];
const LOGITS_BAR: f64 = 4e-6;

fn expected(case: &str, file: &str) -> HashMap<String, Tensor> {
    let path = repository(&format!("tests/golden/forward/{case}/{file}"));
    candle_core::safetensors::load(path, &Device::Cpu).unwrap()
}

fn model(case: &str) -> Model {
    Model::open(&repository(&format!("tests/golden/forward/{case}")))
}

fn prompts(expected: &HashMap<String, Tensor>) -> Vec<Vec<u32>> {
    let (_, length) = expected["input_ids"].dims2().unwrap();
    integers(&expected["input_ids"])
        .chunks(length)
        .map(|ids| ids.iter().map(|id| *id as u32).collect())
        .collect()
}

/// A golden `[B, S, H]` tensor as one f32 tensor per prompt.
fn split(tensor: &Tensor) -> Vec<Tensor> {
    let tensor = tensor.to_dtype(candle_core::DType::F32).unwrap();
    (0..tensor.dims()[0]).map(|prompt| tensor.get(prompt).unwrap().contiguous().unwrap()).collect()
}

fn joined(tensors: impl IntoIterator<Item = Tensor>) -> Vec<f32> {
    tensors.into_iter().flat_map(|tensor| values(&tensor)).collect()
}

/// The golden top-k lists of a layer, one per prompt.
fn golden_lists(expected: &HashMap<String, Tensor>, layer: usize) -> Vec<TopK> {
    let lists = &expected[&format!("layers.{layer}.topk_indices")];
    let (prompts, _, k) = lists.dims3().unwrap();
    (0..prompts).map(|prompt| TopK { indices: integers(&lists.get(prompt).unwrap()), k }).collect()
}

/// The keys that take part: causal members of each row's list.
fn causal_sets(lists: &[TopK]) -> Vec<BTreeSet<i32>> {
    let rows = lists.iter().flat_map(|list| list.indices.chunks(list.k).enumerate());
    rows.map(|(row, list)| list.iter().copied().filter(|key| *key as usize <= row).collect()).collect()
}

/// Runs one layer from the golden's own input state and carry.
fn layer_from_golden(model: &Model, expected: &HashMap<String, Tensor>, layer: usize) -> Vec<Attended> {
    let hidden = split(&expected[&format!("layers.{layer}.hidden_in")]);
    let positions = vec![(0..hidden[0].dims()[0] as u32).collect(); hidden.len()];
    let carry = if model.geometry.indexer_is_full(layer) {
        vec![None; hidden.len()]
    } else {
        golden_lists(expected, layer - 1).into_iter().map(Some).collect()
    };
    model.layers[layer].attend(&hidden, &positions, &carry).unwrap()
}

#[test]
fn logits_end_to_end() {
    for case in CASES {
        let (model, expected) = (model(case), expected(case, "expected_f32.safetensors"));
        let (hidden, lists) = model.forward(&prompts(&expected), State::F32);
        let logits = joined(hidden.iter().map(|hidden| model.head.logits(hidden).unwrap()));
        let error = relative_l2(&logits, &values(&expected["logits"]));
        println!("{case}: logits {error:.2e}");
        assert!(error <= LOGITS_BAR, "{case}: {error:e}");
        for (layer, lists) in lists.iter().enumerate() {
            assert_eq!(
                causal_sets(lists),
                causal_sets(&golden_lists(&expected, layer)),
                "{case}, layer {layer}"
            );
        }
    }
}

#[test]
fn every_layer_from_the_golden_state() {
    for case in CASES {
        let (model, expected) = (model(case), expected(case, "expected_f32.safetensors"));
        let mut worst = BTreeMap::<&str, f64>::new();
        for layer in 0..model.geometry.num_hidden_layers {
            let attended = layer_from_golden(&model, &expected, layer);
            let lists: Vec<TopK> = attended.iter().map(|prompt| prompt.carry.clone()).collect();
            assert_eq!(
                causal_sets(&lists),
                causal_sets(&golden_lists(&expected, layer)),
                "{case}, layer {layer}"
            );
            let mlp = model.layers[layer].mlp(&attended, &model.weights).unwrap();
            let hidden = model.layers[layer].finish(&attended, &model.weights).unwrap();
            let mut ours = vec![
                ("attention_out", joined(attended.iter().map(|prompt| prompt.attention_out.clone()))),
                ("mlp_in", joined(attended.iter().map(|prompt| prompt.mlp_in.clone()))),
                ("mlp_out", joined(mlp)),
                ("hidden_out", joined(hidden)),
            ];
            if model.geometry.is_moe(layer) {
                let captures = attended.iter().map(|prompt| prompt.capture.as_ref().unwrap());
                ours.push(("router_logits", captures.flat_map(|c| c.router_logits.clone()).collect()));
                check_routes(&attended, &expected, layer);
            } else {
                assert!(attended.iter().all(|prompt| prompt.capture.is_none()));
            }
            for (name, ours) in ours {
                let error = relative_l2(&ours, &values(&expected[&format!("layers.{layer}.{name}")]));
                let worst = worst.entry(name).or_default();
                *worst = worst.max(error);
            }
        }
        println!("{case}: worst layer {worst:?}");
        for (name, error) in worst {
            assert!(error <= 2e-6, "{case}, {name}: {error:e}");
        }
    }
}

/// Router ids equal as sets, and the weight of each id within a few ulp.
fn check_routes(attended: &[Attended], expected: &HashMap<String, Tensor>, layer: usize) {
    let k = expected[&format!("layers.{layer}.router_ids")].dims()[1];
    let golden_ids = integers(&expected[&format!("layers.{layer}.router_ids")]);
    let golden_weights = values(&expected[&format!("layers.{layer}.router_weights")]);
    let captures = || attended.iter().map(|prompt| prompt.capture.as_ref().unwrap());
    let ids: Vec<i32> = captures().flat_map(|capture| capture.expert_ids.clone()).collect();
    let weights: Vec<f32> = captures().flat_map(|capture| capture.expert_weights.clone()).collect();
    assert_eq!(ids.len(), golden_ids.len());
    for row in 0..ids.len() / k {
        let pairs = |ids: &[i32], weights: &[f32]| -> BTreeMap<i32, f32> {
            (row * k..(row + 1) * k).map(|slot| (ids[slot], weights[slot])).collect()
        };
        let (ours, golden) = (pairs(&ids, &weights), pairs(&golden_ids, &golden_weights));
        assert!(ours.keys().eq(golden.keys()), "layer {layer}, row {row}: {ours:?} {golden:?}");
        for (ours, golden) in ours.values().zip(golden.values()) {
            assert!(
                (ours - golden).abs() <= 2e-6 * golden.abs(),
                "layer {layer}, row {row}: {ours} {golden}"
            );
        }
    }
}

/// One layer at a time: the random model amplifies any rounding through its top-k choices.
#[test]
fn bf16_golden_one_layer_at_a_time() {
    let (model, expected) = (model("base"), expected("base", "expected_bf16.safetensors"));
    for layer in 0..model.geometry.num_hidden_layers {
        let attended = layer_from_golden(&model, &expected, layer);
        let hidden = joined(model.layers[layer].finish(&attended, &model.weights).unwrap());
        let lists: Vec<TopK> = attended.iter().map(|prompt| prompt.carry.clone()).collect();
        let (ours, golden) = (causal_sets(&lists), causal_sets(&golden_lists(&expected, layer)));
        let golden_hidden = values(&expected[&format!("layers.{layer}.hidden_out")]);
        let width = model.geometry.hidden_size;
        let experts = |ids: Vec<i32>| -> Vec<BTreeSet<i32>> {
            let k = model.geometry.num_experts_per_tok;
            ids.chunks(k).map(|ids| ids.iter().copied().collect()).collect()
        };
        let routes = model.geometry.is_moe(layer).then(|| {
            let ours = attended.iter().flat_map(|prompt| prompt.capture.as_ref().unwrap().expert_ids.clone());
            (experts(ours.collect()), experts(integers(&expected[&format!("layers.{layer}.router_ids")])))
        });
        let (mut same, mut worst) = (0, 0f64);
        for row in 0..ours.len() {
            if ours[row] == golden[row]
                && routes.as_ref().is_none_or(|(ours, golden)| ours[row] == golden[row])
            {
                same += 1;
                let row = row * width..(row + 1) * width;
                worst = worst.max(relative_l2(&hidden[row.clone()], &golden_hidden[row]));
            }
        }
        let share = same as f64 / ours.len() as f64;
        println!("layer {layer}: {:.1} % of rows choose alike, worst of them {worst:.1e}", 100.0 * share);
        assert!(share >= 0.95, "layer {layer}: {share}");
        assert!(worst <= 2e-2, "layer {layer}: {worst:e}");
    }
}
