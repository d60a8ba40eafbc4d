//! The trained miniature against the figures that Transformers gives for it (`models/tiny/expected.json`).

use std::time::Instant;

use serde_json::Value;
use tokenizers::Tokenizer;

use crate::support::{Model, State, repository, values};

/// Tokens of a document, the prefix included.
const LENGTH: usize = 256;

struct Prompt {
    ids: Vec<u32>,
    nll: f64,
}

/// The evaluation documents in the order of `expected.json`, with the figures expected of each.
fn prompts() -> Vec<Prompt> {
    let tokenizer = Tokenizer::from_file(repository("models/tiny/tokenizer.json")).unwrap();
    let text = std::fs::read_to_string(repository("models/tiny/expected.json")).unwrap();
    let expected: Value = serde_json::from_str(&text).unwrap();
    let mut expected = expected["prompts"].as_array().unwrap().iter();
    let mut prompts = Vec::new();
    for axis in ["prose", "definitions", "technical", "code"] {
        let text = std::fs::read_to_string(repository(&format!("corpus/{axis}.evaluate.txt"))).unwrap();
        for (document, text) in text.split("\n%%\n").enumerate() {
            let mut ids = vec![0];
            ids.extend_from_slice(tokenizer.encode(text, false).unwrap().get_ids());
            ids.truncate(LENGTH);
            let expected = expected.next().unwrap();
            assert_eq!(
                (expected["axis"].as_str(), expected["document"].as_u64()),
                (Some(axis), Some(document as u64))
            );
            assert_eq!(expected["tokens"].as_u64(), Some(ids.len() as u64));
            for (id, expected) in ids.iter().zip(expected["first_ids"].as_array().unwrap()) {
                assert_eq!(expected.as_u64(), Some(u64::from(*id)));
            }
            prompts.push(Prompt { ids, nll: expected["nll_sum"].as_f64().unwrap() });
        }
    }
    assert!(expected.next().is_none());
    prompts
}

/// Sum over the prompt's tokens from the second on of `-ln p(token)`, in f64.
fn nll(logits: &[f32], vocabulary: usize, ids: &[u32]) -> f64 {
    let rows = logits.chunks(vocabulary).zip(&ids[1..]);
    rows.map(|(row, next)| {
        let highest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let total: f64 = row.iter().map(|logit| f64::from(logit - highest).exp()).sum();
        total.ln() - f64::from(row[*next as usize] - highest)
    })
    .sum()
}

fn evaluate(model: &Model, prompts: &[Prompt], state: State) -> Vec<f64> {
    let start = Instant::now();
    let ids: Vec<Vec<u32>> = prompts.iter().map(|prompt| prompt.ids.clone()).collect();
    let (hidden, _) = model.forward(&ids, state);
    let layers = start.elapsed();
    let logits: Vec<Vec<f32>> =
        hidden.iter().map(|hidden| values(&model.head.logits(hidden).unwrap())).collect();
    println!("{} prompts: layers {layers:.2?}, with logits {:.2?}", prompts.len(), start.elapsed());
    let vocabulary = model.geometry.vocab_size;
    logits.iter().zip(prompts).map(|(logits, prompt)| nll(logits, vocabulary, &prompt.ids)).collect()
}

#[test]
fn every_prompt_as_expected_with_f32_state_and_perplexity_with_bf16_state() {
    let (model, prompts) = (Model::open(&repository("models/tiny")), prompts());
    let scored = prompts.iter().map(|prompt| prompt.ids.len() - 1).sum::<usize>() as f64;
    assert_eq!((prompts.len(), scored), (160, 40604.0));

    let ours = evaluate(&model, &prompts, State::F32);
    let errors = ours.iter().zip(&prompts).map(|(nll, prompt)| (nll - prompt.nll).abs() / prompt.nll);
    let worst = errors.fold(0f64, f64::max);
    let perplexity = (ours.iter().sum::<f64>() / scored).exp();
    println!("f32 state: worst prompt {worst:.2e} relative, perplexity {perplexity:.7}");
    assert!(worst <= 1e-5, "{worst:e}");
    assert!((perplexity - 29.0578670271017).abs() <= 1e-5 * 29.06, "{perplexity}");

    let rounded = (evaluate(&model, &prompts, State::Bf16).iter().sum::<f64>() / scored).exp();
    println!("bf16 state: perplexity {rounded:.5}, {:+.3} %", 100.0 * (rounded / perplexity - 1.0));
    assert!((rounded / perplexity - 1.0).abs() <= 0.005);
}
