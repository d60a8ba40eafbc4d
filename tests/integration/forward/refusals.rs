//! What a layer refuses, by name, and the edges of what it takes.

use candle_core::{DType, Device, Tensor};
use walk::model::{Layer, TopK};

use super::invariance::noise;
use crate::support::{Model, State, bits, repository, values};

fn tiny() -> Model {
    Model::open(&repository("models/tiny"))
}

fn state(rows: usize, seed: u64) -> Tensor {
    Tensor::from_vec(noise(rows * 256, seed), (rows, 256), &Device::Cpu).unwrap()
}

fn positions(rows: u32) -> Vec<u32> {
    (0..rows).collect()
}

/// The refusal's text holds every part, and it is bad input.
fn refused<T>(result: walk::Result<T>, parts: &[&str]) {
    let Err(error) = result else { panic!("not refused: {parts:?}") };
    let text = error.to_string();
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    assert_eq!(error.exit_code(), 2);
}

#[test]
fn a_value_that_is_not_finite_names_layer_prompt_and_row() {
    let model = tiny();
    for value in [f32::NAN, f32::INFINITY] {
        let mut rows = noise(5 * 256, 2);
        rows[3 * 256 + 7] = value;
        let bad = Tensor::from_vec(rows, (5, 256), &Device::Cpu).unwrap();
        let hidden = [state(4, 1), bad];
        let positions = [positions(4), positions(5)];
        // Layer 0 is dense with its own indexer, layer 3 is MoE and shares.
        let result = model.layers[0].attend(&hidden, &positions, &[None, None]);
        refused(result, &["layer 0", "prompt \"#1\"", "row 3"]);
        let carry =
            |rows: usize| Some(TopK { indices: (0..rows).flat_map(|_| 0..rows as i32).collect(), k: rows });
        let result = model.layers[3].attend(&hidden, &positions, &[carry(4), carry(5)]);
        refused(result, &["layer 3", "prompt \"#1\"", "row 3"]);
    }
}

#[test]
fn a_state_beyond_bf16_names_its_row() {
    // f32 goes a little further than BF16: this value is finite and would be rounded to infinity.
    let mut rows = vec![1.0f32; 3 * 4];
    rows[2 * 4 + 1] = f32::MAX;
    let bad = Tensor::from_vec(rows, (3, 4), &Device::Cpu).unwrap();
    refused(walk::model::round_bf16(&bad), &["row 2", "beyond the range of BF16"]);
}

#[test]
fn an_overflow_inside_an_expert_names_layer_prompt_and_row() {
    let model = tiny();
    let hidden = [state(3, 1), state(4, 2)];
    let positions = [positions(3), positions(4)];
    let attended = model.layers[2].attend(&hidden, &positions, &[None, None]).unwrap();
    let ids = &attended[1].capture.as_ref().unwrap().expert_ids;
    let first = attended[0].capture.as_ref().unwrap().expert_ids.clone();
    // An expert that only the second prompt uses, made huge.
    let expert = *ids.iter().find(|id| !first.contains(id)).expect("another seed");
    let row = ids.iter().position(|id| *id == expert).unwrap() / 2;
    let mut weights = model.weights.clone();
    for projection in ["up_proj", "down_proj"] {
        let name = format!("model.layers.2.mlp.experts.{expert}.{projection}.weight");
        weights.0.insert(name, Tensor::full(3e38f32, (256, 256), &Device::Cpu).unwrap());
    }
    let result = model.layers[2].finish(&attended, &weights);
    refused(result, &["layer 2", "prompt \"#1\"", &format!("row {row}")]);
}

#[test]
fn a_shared_layer_needs_a_well_formed_carry() {
    let model = tiny();
    let run = |carry: Option<TopK>| model.layers[3].attend(&[state(3, 1)], &[positions(3)], &[carry]);
    refused(run(None), &["layer 3", "prompt \"#0\"", "shared layer"]);
    refused(run(Some(TopK { indices: vec![0; 6], k: 2 })), &["layer 3", "3 rows of 3"]);
    let list = |indices: &[i32]| Some(TopK { indices: indices.to_vec(), k: 3 });
    refused(run(list(&[0, 1, 2, 0, 1, 2, 0, 1, 3])), &["row 2", "top-k index 3"]);
    refused(run(list(&[0, 1, 2, 0, 1, 1, 0, 1, 2])), &["row 1", "repeats"]);
    run(list(&[2, 0, 1, 1, 2, 0, 0, 1, 2])).unwrap();
}

#[test]
fn pieces_that_do_not_fit_together_are_refused() {
    let model = tiny();
    let layer = &model.layers[0];
    refused(layer.attend(&[state(3, 1)], &[], &[None]), &["layer 0", "one of each per prompt"]);
    refused(
        layer.attend(&[state(3, 1)], &[positions(2)], &[None]),
        &["prompt \"#0\"", "a position for each"],
    );
    let narrow = state(3, 1).narrow(1, 0, 255).unwrap();
    refused(layer.attend(&[narrow], &[positions(3)], &[None]), &["layer 0", "[rows, 256]"]);
    let late = vec![4094, 4095, 4096];
    refused(layer.attend(&[state(3, 1)], &[late], &[None]), &["row 2", "max_position_embeddings"]);
    assert!(layer.attend(&[], &[], &[]).unwrap().is_empty());
    refused(model.embedding.embed(&[0, 2048]), &["row 1", "vocab_size"]);
    refused(Layer::load(&model.geometry, 5, &model.weights, &Device::Cpu), &["layer 5", "MTP"]);
    // What a dense layer gave is no input for a MoE layer's second half.
    let attended = layer.attend(&[state(3, 1)], &[positions(3)], &[None]).unwrap();
    refused(model.layers[2].finish(&attended, &model.weights), &["layer 2", "without routing"]);
}

#[test]
fn a_missing_or_misshapen_tensor_is_named() {
    let model = tiny();
    let mut weights = model.weights.clone();
    weights.0.remove("model.layers.2.mlp.gate.e_score_correction_bias").unwrap();
    let result = Layer::load(&model.geometry, 2, &weights, &Device::Cpu);
    refused(result, &["model.layers.2.mlp.gate.e_score_correction_bias"]);
    let name = "model.layers.1.self_attn.kv_b_proj.weight";
    weights.0.insert(name.into(), Tensor::zeros((64, 320), DType::BF16, &Device::Cpu).unwrap());
    refused(Layer::load(&model.geometry, 1, &weights, &Device::Cpu), &[name]);
}

#[test]
fn one_token_attends_to_itself() {
    let model = tiny();
    let (hidden, lists) = model.forward(&[vec![7]], State::F32);
    assert_eq!(hidden[0].dims(), [1, 256]);
    assert!(lists.iter().all(|lists| lists[0] == TopK { indices: vec![0], k: 1 }));
}

/// While S <= index_topk the indexer chooses all keys, so a mistake in its RoPE shows only beyond.
#[test]
fn positions_reach_the_indexer_on_the_sparse_side_only() {
    let model = tiny();
    let run = |rows: u32, shift: u32, stretch: u32| {
        let positions: Vec<u32> = (0..rows).map(|row| shift + row * stretch).collect();
        let attended = model.layers[0].attend(&[state(rows as usize, 9)], &[positions], &[None]).unwrap();
        let sets: Vec<std::collections::BTreeSet<i32>> = attended[0]
            .carry
            .indices
            .chunks(attended[0].carry.k)
            .map(|keys| keys.iter().copied().collect())
            .collect();
        (sets, values(&attended[0].attention_out))
    };
    let topk = model.geometry.index_topk as u32;
    assert_eq!(run(topk, 0, 1).0, run(topk, 0, 5).0, "dense side: every key, whatever its position");
    let (sets, out) = run(3 * topk, 0, 1);
    let (stretched, _) = run(3 * topk, 0, 5);
    assert_ne!(sets, stretched, "sparse side: distances matter");
    // RoPE is relative: the same distances elsewhere choose (nearly) the same keys and give nearly the same output.
    let (shifted, shifted_out) = run(3 * topk, 500, 1);
    let same = sets.iter().zip(&shifted).filter(|(a, b)| a == b).count();
    assert!(same >= sets.len() * 9 / 10, "{same} of {}", sets.len());
    assert!(bits(&out) != bits(&shifted_out));
    assert!(crate::support::relative_l2(&shifted_out, &out) < 2e-2);
}
