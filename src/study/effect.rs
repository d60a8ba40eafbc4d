//! What one layer's quantized experts do to the model: divergence token by token, all else as in the source.
//!
//! The source runs once; its states before every layer of interest are kept (f32, tokens x hidden size a layer), so that
//! a variant costs the layers from its own on.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};

use crate::checkpoint::finished::FinishedExpert;
use crate::checkpoint::names;
use crate::checkpoint::names::Projection;
use crate::checkpoint::{CheckpointDir, WeightSource};
use crate::codec::PackedMatrix;
use crate::config::Geometry;
use crate::corpus::{CorpusPlan, SealedPrompt};
use crate::error::{Result, refuse};
use crate::eval::{Midway, StateType, TokenScore, score, scored_tokens};
use crate::walk::progress::Observer;

/// The source's side of all comparisons.
pub struct Evaluator {
    prompts: Vec<SealedPrompt>,
    before: BTreeMap<usize, Midway>,
    finished: Midway,
}

impl Evaluator {
    /// Runs the source on the plan's evaluation prompts, keeping its states before `layers`. `None` when the plan has
    /// nothing to score.
    ///
    /// # Errors
    /// As [`final_states`](crate::eval::final_states).
    pub fn new(
        geometry: &Geometry,
        source: &CheckpointDir,
        corpus: &CorpusPlan,
        layers: &[usize],
        state: StateType,
        observer: &dyn Observer,
    ) -> Result<Option<Self>> {
        let prompts: Vec<&SealedPrompt> = corpus.evaluate().collect();
        if scored_tokens(&prompts) == 0 {
            return Ok(None);
        }
        let mut midway = Midway::embed(geometry, source, &prompts, state)?;
        let mut before = BTreeMap::new();
        let label = "evaluate source";
        for &layer in layers {
            midway.advance(geometry, (source, source), &prompts, layer, observer, label)?;
            before.insert(layer, midway.clone());
        }
        midway.advance(geometry, (source, source), &prompts, geometry.num_hidden_layers, observer, label)?;
        let prompts = prompts.into_iter().cloned().collect();
        Ok(Some(Self { prompts, before, finished: midway }))
    }

    /// Every scored token of the source with this layer's experts replaced.
    ///
    /// # Errors
    /// As [`score`]; a layer that was not named to [`Evaluator::new`].
    pub fn with_layer(
        &self,
        geometry: &Geometry,
        source: &CheckpointDir,
        layer: usize,
        experts: &[FinishedExpert],
        observer: &dyn Observer,
    ) -> Result<Vec<TokenScore>> {
        let Some(before) = self.before.get(&layer) else {
            return refuse("the source's state before the layer was not kept").layer(layer).err();
        };
        let prompts: Vec<&SealedPrompt> = self.prompts.iter().collect();
        let replaced = Replaced { source, layer, experts };
        let mut midway = before.clone();
        let until = geometry.num_hidden_layers;
        midway.advance(geometry, (source, &replaced), &prompts, until, observer, "evaluate variant")?;
        let states = (self.finished.hidden(), midway.hidden());
        score(geometry, (source, source), &prompts, states, observer)
    }
}

/// The source with the experts of one layer decoded from their packed form, one at a time as they are asked for.
struct Replaced<'a> {
    source: &'a CheckpointDir,
    layer: usize,
    experts: &'a [FinishedExpert],
}

impl WeightSource for Replaced<'_> {
    fn contains(&self, name: &str) -> bool {
        self.source.contains(name)
    }

    fn load(&self, name: &str, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
        let prefix = names::layer_prefix(self.layer);
        let place = name.strip_prefix(&prefix).and_then(|rest| rest.strip_prefix("mlp.experts."));
        let Some(place) = place else { return self.source.load(name, shape, dtype, device) };
        let found = place.split_once('.').and_then(|(id, rest)| {
            let role =
                Projection::ALL.iter().find(|role| rest.strip_suffix(".weight") == Some(role.as_str()))?;
            self.experts.get(id.parse::<usize>().ok()?).map(|expert| &expert[*role as usize])
        });
        let Some(linear) = found else { return refuse("no such expert was quantized").tensor(name).err() };
        // Stored as [K, N]; a checkpoint's weight is [out, in].
        let weight = linear.dense().transposed();
        if shape != [weight.rows, weight.cols] {
            return refuse(format!("the quantized weight is [{}, {}]", weight.rows, weight.cols))
                .tensor(name)
                .wanted(format!("{shape:?}"))
                .err();
        }
        Ok(Tensor::from_vec(weight.data, (weight.rows, weight.cols), device)?.to_dtype(dtype)?)
    }
}
