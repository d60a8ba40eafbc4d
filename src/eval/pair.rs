//! A model, or two of them, on the evaluation prompts of a corpus: the one way in which every command evaluates.

use serde::Serialize;

use super::metrics::Scores;
use super::{Evaluation, StateType, compare, final_states, scored_tokens};
use crate::checkpoint::WeightSource;
use crate::config::Geometry;
use crate::corpus::{CorpusPlan, SealedPrompt};
use crate::error::Result;
use crate::walk::progress::Observer;

/// Source against result on the corpus' evaluation prompts; `None`, with a note, when none has a token to score.
///
/// # Errors
/// As [`final_states`] and [`compare`].
pub fn evaluate(
    geometry: &Geometry,
    source: &dyn WeightSource,
    result: &dyn WeightSource,
    corpus: &CorpusPlan,
    state: StateType,
    observer: &dyn Observer,
) -> Result<Option<Evaluation>> {
    let Some(prompts) = prompts(corpus, observer) else { return Ok(None) };
    let before = final_states(geometry, source, source, &prompts, state, observer, "evaluate source")?;
    let after = final_states(geometry, result, result, &prompts, state, observer, "evaluate result")?;
    let evaluation = compare(geometry, source, result, &prompts, &before, &after, observer)?;
    Ok(Some(evaluation.with_state(state)))
}

/// One model's perplexity on the corpus' evaluation prompts; `None`, with a note, when none has a token to score.
///
/// # Errors
/// As [`final_states`] and [`compare`].
pub fn perplexity(
    geometry: &Geometry,
    model: &dyn WeightSource,
    corpus: &CorpusPlan,
    state: StateType,
    observer: &dyn Observer,
) -> Result<Option<Perplexity>> {
    let Some(prompts) = prompts(corpus, observer) else { return Ok(None) };
    let states = final_states(geometry, model, model, &prompts, state, observer, "evaluate")?;
    // Against itself: the same sums in the same order as beside another model.
    let evaluation = compare(geometry, model, model, &prompts, &states, &states, observer)?;
    Ok(Some(Perplexity::of(&evaluation, state)))
}

fn prompts<'a>(corpus: &'a CorpusPlan, observer: &dyn Observer) -> Option<Vec<&'a SealedPrompt>> {
    let prompts: Vec<&SealedPrompt> = corpus.evaluate().collect();
    if scored_tokens(&prompts) > 0 {
        return Some(prompts);
    }
    observer.note("the plan has no evaluation prompt with a token to score: nothing is evaluated");
    None
}

/// Perplexity of a model, by axis and over all.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Perplexity {
    /// Type of the state that the model carried between layers.
    pub state: StateType,
    /// Over all tokens.
    pub all: AxisPerplexity,
    /// By axis, in the order of their first prompt.
    pub axes: Vec<AxisPerplexity>,
}

/// Perplexity over a set of tokens.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AxisPerplexity {
    /// Name of the axis, or `all`.
    pub axis: String,
    /// Scored tokens.
    pub tokens: u64,
    /// Perplexity.
    pub perplexity: f64,
}

impl Perplexity {
    fn of(evaluation: &Evaluation, state: StateType) -> Self {
        let row = |axis: &str, scores: &Scores| AxisPerplexity {
            axis: axis.to_owned(),
            tokens: scores.tokens,
            perplexity: scores.result_perplexity,
        };
        let axes = evaluation.axes.iter().map(|(axis, scores)| row(axis, scores)).collect();
        Self { state, all: row("all", &evaluation.all), axes }
    }
}
