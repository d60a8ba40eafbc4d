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
use crate::corpus::batch::{BATCH_TOKENS, batches, name_prompt};
use crate::error::{Error, Result};
use crate::model::{Embedding, Layer, TopK, round_bf16};
use crate::walk::progress::{Observer, proceed};

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
    sources: (&dyn WeightSource, &dyn WeightSource),
    prompts: &[&SealedPrompt],
    state: StateType,
    observer: &dyn Observer,
    label: &str,
    batch_tokens: usize,
) -> Result<Vec<Tensor>> {
    let mut midway = Midway::embed(geometry, sources.0, prompts, state)?;
    midway.batch_tokens = batch_tokens;
    midway.advance(geometry, sources, prompts, geometry.num_hidden_layers, observer, label)?;
    Ok(midway.hidden)
}

/// Prompts between two layers of a forward pass. A copy shares the states it was made from until one of them moves on,
/// so that passes that differ from some layer on need not repeat what they have in common.
#[derive(Debug, Clone)]
pub struct Midway {
    hidden: Vec<Tensor>,
    carry: Vec<Option<TopK>>,
    layer: usize,
    state: StateType,
    batch_tokens: usize,
}

impl Midway {
    /// Prompts before the first layer.
    ///
    /// # Errors
    /// As [`final_states`].
    pub fn embed(
        geometry: &Geometry,
        weights: &dyn WeightSource,
        prompts: &[&SealedPrompt],
        state: StateType,
    ) -> Result<Self> {
        let hidden = embed(geometry, weights, prompts, &Device::Cpu)?;
        let carry = vec![None; prompts.len()];
        Ok(Self { hidden, carry, layer: 0, state, batch_tokens: BATCH_TOKENS })
    }

    /// Sends the same prompts on through the layers before `until`. Routed experts come from the second of the sources,
    /// all else from the first.
    ///
    /// # Errors
    /// As [`final_states`].
    pub fn advance(
        &mut self,
        geometry: &Geometry,
        (weights, experts): (&dyn WeightSource, &dyn WeightSource),
        prompts: &[&SealedPrompt],
        until: usize,
        observer: &dyn Observer,
        label: &str,
    ) -> Result<()> {
        let (hidden, carry) = (&mut self.hidden, &mut self.carry);
        let positions: Vec<Vec<u32>> =
            prompts.iter().map(|prompt| (0..prompt.token_ids.len() as u32).collect()).collect();
        let batches = batches(prompts, self.batch_tokens);
        for index in self.layer..until {
            observer.begin(label, Some(index), prompts.len() as u64);
            let layer = Layer::load(geometry, index, weights, &Device::Cpu)?;
            for range in batches.iter().cloned() {
                proceed(observer)?;
                let out = layer
                    .forward(
                        &hidden[range.clone()],
                        &positions[range.clone()],
                        &carry[range.clone()],
                        experts,
                    )
                    .map_err(name_prompt(&prompts[range.clone()]))?;
                let results = out.hidden.into_iter().zip(out.carry).zip(range);
                for ((after, list), prompt) in results {
                    hidden[prompt] = match self.state {
                        StateType::F32 => after,
                        StateType::Bf16 => round_bf16(&after)?,
                    };
                    carry[prompt] = Some(list);
                    observer.advance(&prompts[prompt].id);
                }
            }
            observer.end();
        }
        self.layer = self.layer.max(until);
        Ok(())
    }

    /// The state of every prompt, `[S, H]`.
    pub fn hidden(&self) -> &[Tensor] {
        &self.hidden
    }
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::checkpoint::CheckpointDir;
    use crate::corpus::PromptUse;
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
