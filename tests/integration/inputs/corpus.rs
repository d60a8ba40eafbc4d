//! The shipped corpus against the golden token counts of the tiny model.

use serde_json::Value;
use walk::corpus::{CorpusPlan, Plan, SealContext, TextEncoder, seal};

use super::support::root;

fn shipped() -> CorpusPlan {
    let plan = Plan::load(root().join("corpus/plan.json")).unwrap();
    let encoder = TextEncoder::from_file(root().join("models/tiny/tokenizer.json")).unwrap();
    let prefix = ["<|endoftext|>".to_owned()];
    let context = SealContext {
        encoder: &encoder,
        vocab_size: 2048,
        max_position_embeddings: 4096,
        default_prefix: Some(&prefix),
    };
    seal(&plan, &context).unwrap()
}

#[test]
fn the_evaluation_documents_are_those_of_expected_json() {
    let sealed = shipped();
    let expected: Value =
        serde_json::from_slice(&std::fs::read(root().join("models/tiny/expected.json")).unwrap()).unwrap();
    let expected = expected["prompts"].as_array().unwrap();
    let got: Vec<_> = sealed.evaluate().collect();
    assert_eq!(got.len(), 160);
    assert_eq!(got.len(), expected.len());
    let mut scored = 0;
    for (prompt, expected) in got.iter().zip(expected) {
        let id = format!(
            "{}.evaluate.{:03}",
            expected["axis"].as_str().unwrap(),
            expected["document"].as_u64().unwrap()
        );
        assert_eq!(prompt.id, id);
        assert_eq!(prompt.axis, expected["axis"]);
        assert_eq!(prompt.token_ids.len() as u64, expected["tokens"].as_u64().unwrap(), "{id}");
        let first: Vec<u32> = serde_json::from_value(expected["first_ids"].clone()).unwrap();
        assert_eq!(prompt.token_ids[..first.len()], first, "{id}");
        assert_eq!((prompt.prefix_length, prompt.row_offset), (1, None));
        scored += prompt.token_ids.len() - 1;
    }
    assert_eq!(scored, 40604);
}

#[test]
fn the_calibration_documents_are_30_an_axis_and_rows_run_on() {
    let sealed = shipped();
    for axis in ["prose", "definitions", "technical", "code"] {
        assert_eq!(sealed.calibrate().filter(|prompt| prompt.axis == axis).count(), 30, "{axis}");
    }
    let mut rows = 0;
    for prompt in sealed.calibrate() {
        assert_eq!(prompt.row_offset, Some(rows));
        rows += prompt.token_ids.len() as u64;
    }
    assert_eq!(rows, sealed.calibration_rows);
    assert_eq!(sealed.files_sha256.len(), 8);
}

#[test]
fn sealing_twice_gives_the_same_bytes() {
    assert_eq!(shipped().hash().unwrap(), shipped().hash().unwrap());
}
