//! Prompts through the whole model, layer by layer.
//!
//! A layer is loaded once and meets all prompts before the next is loaded. Prompts go to it in batches of at most
//! [`BATCH_TOKENS`] tokens: a routed expert is read once a batch. Batching changes no byte of a prompt's state (see
//! [`model`](crate::model)).

use candle_core::{Device, Tensor};

use super::StateType;
use crate::checkpoint::WeightSource;
use crate::config::Geometry;
use crate::corpus::SealedPrompt;
use crate::error::{Error, Result, refuse};
use crate::model::{Embedding, Layer, TopK, round_bf16};
use crate::walk::progress::Observer;

/// Tokens that a layer is given at a time, unless a single prompt is longer.
pub const BATCH_TOKENS: usize = 8192;

/// The state of every prompt after the last layer, `[S, H]`, f32: what the final norm and the head take.
///
/// Routed experts come from `experts`, all else from `weights`. `label` names the stage to the observer, which is told
/// of every layer and, in it, of every prompt.
///
/// # Errors
/// What the sources say; names layer and prompt when a prompt has no tokens, one outside the vocabulary, or gives a
/// value that is not finite.
pub fn final_states(
    geometry: &Geometry,
    weights: &dyn WeightSource,
    experts: &dyn WeightSource,
    prompts: &[&SealedPrompt],
    state: StateType,
    observer: &dyn Observer,
    label: &str,
) -> Result<Vec<Tensor>> {
    final_states_batched(geometry, (weights, experts), prompts, state, observer, label, BATCH_TOKENS)
}

/// [`final_states`] with another bound on the tokens of a batch.
fn final_states_batched(
    geometry: &Geometry,
    (weights, experts): (&dyn WeightSource, &dyn WeightSource),
    prompts: &[&SealedPrompt],
    state: StateType,
    observer: &dyn Observer,
    label: &str,
    batch_tokens: usize,
) -> Result<Vec<Tensor>> {
    let device = Device::Cpu;
    let mut hidden = embed(geometry, weights, prompts, &device)?;
    let mut carry: Vec<Option<TopK>> = vec![None; prompts.len()];
    let lengths: Vec<usize> = prompts.iter().map(|prompt| prompt.token_ids.len()).collect();
    let positions: Vec<Vec<u32>> = lengths.iter().map(|length| (0..*length as u32).collect()).collect();
    let batches = batches(&lengths, batch_tokens);
    for index in 0..geometry.num_hidden_layers {
        observer.begin(label, Some(index), prompts.len() as u64);
        let layer = Layer::load(geometry, index, weights, &device)?;
        for &(start, end) in &batches {
            let out = layer
                .forward(&hidden[start..end], &positions[start..end], &carry[start..end], experts)
                .map_err(|error| with_prompt_id(error, &prompts[start..end]))?;
            let results = out.hidden.into_iter().zip(out.carry).zip(start..end);
            for ((after, list), prompt) in results {
                hidden[prompt] = match state {
                    StateType::F32 => after,
                    StateType::Bf16 => round_bf16(&after)?,
                };
                carry[prompt] = Some(list);
                observer.advance(&prompts[prompt].id);
            }
        }
        observer.end();
    }
    Ok(hidden)
}

fn embed(
    geometry: &Geometry,
    weights: &dyn WeightSource,
    prompts: &[&SealedPrompt],
    device: &Device,
) -> Result<Vec<Tensor>> {
    let embedding = Embedding::load(geometry, weights, device)?;
    let embed = |prompt: &&SealedPrompt| {
        embedding.embed(&prompt.token_ids).map_err(|error| match error {
            Error::Refused(refusal) => refusal.prompt(&prompt.id).into(),
            other => other,
        })
    };
    prompts.iter().map(embed).collect()
}

/// Ranges of prompts of at most `bound` tokens each, or of one prompt.
fn batches(lengths: &[usize], bound: usize) -> Vec<(usize, usize)> {
    let mut batches = Vec::new();
    let (mut start, mut tokens) = (0, 0);
    for (prompt, length) in lengths.iter().enumerate() {
        if prompt > start && tokens + length > bound {
            batches.push((start, prompt));
            (start, tokens) = (prompt, 0);
        }
        tokens += length;
    }
    if start < lengths.len() {
        batches.push((start, lengths.len()));
    }
    batches
}

/// A layer knows a prompt by its place in the call only; the user knows it by its id.
fn with_prompt_id(error: Error, batch: &[&SealedPrompt]) -> Error {
    let Error::Refused(refusal) = error else { return error };
    let text = refusal.to_string();
    let renamed = batch.iter().enumerate().find_map(|(place, prompt)| {
        let by_place = format!("prompt {:?}", format!("#{place}"));
        text.contains(&by_place).then(|| text.replacen(&by_place, &format!("prompt {:?}", prompt.id), 1))
    });
    match renamed {
        Some(text) => refuse(text).into(),
        None => Error::Refused(refusal),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::checkpoint::CheckpointDir;
    use crate::corpus::PromptUse;
    use crate::error::Refusal;
    use crate::walk::progress::Silent;

    fn prompt(id: &str, token_ids: Vec<u32>) -> SealedPrompt {
        SealedPrompt {
            id: id.into(),
            axis: "prose".into(),
            usage: PromptUse::Evaluate,
            prefix_length: 0,
            row_offset: None,
            cut_tokens: 0,
            token_ids,
            token_ids_sha256: String::new(),
        }
    }

    #[test]
    fn batches_hold_at_most_the_bound_or_one_prompt() {
        assert_eq!(batches(&[], 8), []);
        assert_eq!(batches(&[9], 8), [(0, 1)]);
        assert_eq!(batches(&[4, 4, 1, 9, 9, 2], 8), [(0, 2), (2, 3), (3, 4), (4, 5), (5, 6)]);
        assert_eq!(batches(&[1, 1, 1], 8), [(0, 3)]);
    }

    #[test]
    fn a_prompt_known_by_its_place_is_named_by_its_id() {
        let prompts = ["a", "b.001"].map(|id| prompt(id, vec![1]));
        let batch: Vec<&SealedPrompt> = prompts.iter().collect();
        let named = |error: Refusal| with_prompt_id(error.into(), &batch).to_string();
        assert_eq!(
            named(refuse("NaN").layer(3).prompt("#1").row(7)),
            "layer 3, prompt \"b.001\", row 7: NaN"
        );
        assert_eq!(named(refuse("no such tensor").tensor("w")), "tensor w: no such tensor");
    }
    #[test]
    fn batching_changes_no_byte() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/tiny");
        let geometry = Geometry::read(&folder.join("config.json")).unwrap();
        let weights = CheckpointDir::open(&folder).unwrap();
        // Around the 128 rows of a block and the 64 keys of the top-k.
        let prompts = [129, 1, 64, 200].map(|length: u32| {
            prompt(&length.to_string(), (0..length).map(|i| i * 7919 % geometry.vocab_size as u32).collect())
        });
        let prompts: Vec<&SealedPrompt> = prompts.iter().collect();
        let states = |bound| {
            let sources: (&dyn WeightSource, &dyn WeightSource) = (&weights, &weights);
            let states =
                final_states_batched(&geometry, sources, &prompts, StateType::F32, &Silent, "", bound)
                    .unwrap();
            let values =
                states.iter().flat_map(|state| state.flatten_all().unwrap().to_vec1::<f32>().unwrap());
            values.map(f32::to_bits).collect::<Vec<u32>>()
        };
        let alone = states(1);
        for bound in [130, BATCH_TOKENS] {
            assert!(states(bound) == alone, "batches of {bound} tokens");
        }
    }
}
