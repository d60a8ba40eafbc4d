//! Source against result, token by token.
//!
//! A prompt of S tokens is scored at positions 0 to S-2, each against the token after it: every token but the first.
//! A prompt of one token gives nothing, and is in none of the figures.
//!
//! Memory: logits of at most [`LOGITS_IN_WORK`] values a model at a time (or of one block of rows), whatever the number
//! of threads; per scored token four figures are kept until the end.

use candle_core::{Device, Tensor};
use rayon::prelude::*;
use serde::{Serialize, Serializer};

use super::StateType;
use super::metrics::{Scores, TokenScore, score_token};
use crate::checkpoint::WeightSource;
use crate::config::Geometry;
use crate::corpus::SealedPrompt;
use crate::error::{Result, refuse};
use crate::model::Head;

use crate::walk::progress::{Observer, proceed};

/// Logits of a model that are held at a time.
const LOGITS_IN_WORK: usize = 1 << 23;
/// Rows of logits formed at a time.
const BLOCK_ROWS: usize = 128;

/// What quantization did to the model on a set of prompts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Evaluation {
    /// Type of the state that both models carried between layers, as far as it was said.
    pub state: Option<StateType>,
    /// Over all tokens.
    pub all: Scores,
    /// By axis, in the order of their first prompt. An axis without a scored token is left out.
    #[serde(serialize_with = "by_axis")]
    pub axes: Vec<(String, Scores)>,
    /// By prompt id, in plan order. A prompt without a scored token is left out.
    #[serde(serialize_with = "by_prompt")]
    pub prompts: Vec<(String, Scores)>,
}

fn by_axis<S: Serializer>(rows: &[(String, Scores)], serializer: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Row<'a> {
        axis: &'a str,
        #[serde(flatten)]
        scores: &'a Scores,
    }
    serializer.collect_seq(rows.iter().map(|(axis, scores)| Row { axis, scores }))
}

fn by_prompt<S: Serializer>(rows: &[(String, Scores)], serializer: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Row<'a> {
        prompt: &'a str,
        #[serde(flatten)]
        scores: &'a Scores,
    }
    serializer.collect_seq(rows.iter().map(|(prompt, scores)| Row { prompt, scores }))
}

impl Evaluation {
    /// Says which type of state both models carried.
    #[must_use]
    pub fn with_state(mut self, state: StateType) -> Self {
        self.state = Some(state);
        self
    }
}

/// How many tokens [`compare`] scores: with none it has nothing to say and refuses.
pub fn scored_tokens(prompts: &[&SealedPrompt]) -> u64 {
    prompts.iter().map(|prompt| prompt.token_ids.len().saturating_sub(1) as u64).sum()
}

/// Compares the logits of source and result on the same prompts.
///
/// `source` and `result` are what [`final_states`](super::final_states) gave for `prompts`; norm and head are loaded
/// from the two collections of weights.
///
/// # Errors
/// What the weights say; when there is no token to score, or states, prompts and vocabulary do not fit together; names
/// prompt, row and token id of a logit that is not finite.
pub fn compare(
    geometry: &Geometry,
    source_head_weights: &dyn WeightSource,
    result_head_weights: &dyn WeightSource,
    prompts: &[&SealedPrompt],
    source: &[Tensor],
    result: &[Tensor],
    observer: &dyn Observer,
) -> Result<Evaluation> {
    let heads = (source_head_weights, result_head_weights);
    summarise(prompts, &score(geometry, heads, prompts, (source, result), observer)?)
}

/// The figures of every scored token, prompts in order: what [`compare`] puts together. Heads and states are those of
/// source and result.
///
/// # Errors
/// As [`compare`].
pub fn score(
    geometry: &Geometry,
    (source_head_weights, result_head_weights): (&dyn WeightSource, &dyn WeightSource),
    prompts: &[&SealedPrompt],
    (source, result): (&[Tensor], &[Tensor]),
    observer: &dyn Observer,
) -> Result<Vec<TokenScore>> {
    check(geometry, prompts, source)?;
    check(geometry, prompts, result)?;
    if scored_tokens(prompts) == 0 {
        return refuse("no evaluation prompt has a second token, so there is nothing to score")
            .wanted("at least one prompt of two tokens")
            .err();
    }
    let source_head = Head::load(geometry, source_head_weights, &Device::Cpu)?;
    let result_head = Head::load(geometry, result_head_weights, &Device::Cpu)?;
    let scored = prompts.iter().filter(|prompt| prompt.token_ids.len() > 1);
    observer.begin("compare", None, scored.count() as u64);
    let rows = (LOGITS_IN_WORK / geometry.vocab_size / BLOCK_ROWS * BLOCK_ROWS).max(BLOCK_ROWS);
    let mut tokens = Vec::with_capacity(scored_tokens(prompts) as usize);
    for chunk in chunks(prompts, rows) {
        proceed(observer)?;
        let source = logits(&source_head, source, &chunk)?;
        let result = logits(&result_head, result, &chunk)?;
        score_chunk(geometry.vocab_size, prompts, &chunk, &source, &result, &mut tokens)?;
        for piece in &chunk {
            let prompt = prompts[piece.prompt];
            if piece.end + 1 == prompt.token_ids.len() {
                observer.advance(&prompt.id);
            }
        }
    }
    observer.end();
    Ok(tokens)
}

/// Some rows of one prompt.
struct Piece {
    prompt: usize,
    start: usize,
    end: usize,
}

/// The scored rows of all prompts, in order, at most `bound` at a time.
fn chunks(prompts: &[&SealedPrompt], bound: usize) -> Vec<Vec<Piece>> {
    let mut chunks = Vec::new();
    let (mut chunk, mut room) = (Vec::new(), bound);
    for (prompt, sealed) in prompts.iter().enumerate() {
        let (mut start, rows) = (0, sealed.token_ids.len().saturating_sub(1));
        while start < rows {
            let end = rows.min(start + room);
            chunk.push(Piece { prompt, start, end });
            room -= end - start;
            start = end;
            if room == 0 {
                chunks.push(std::mem::take(&mut chunk));
                room = bound;
            }
        }
    }
    if !chunk.is_empty() {
        chunks.push(chunk);
    }
    chunks
}

/// Flat logits of the chunk's rows.
fn logits(head: &Head, states: &[Tensor], chunk: &[Piece]) -> Result<Vec<f32>> {
    let rows = chunk.iter().map(|piece| states[piece.prompt].narrow(0, piece.start, piece.end - piece.start));
    let rows = Tensor::cat(&rows.collect::<candle_core::Result<Vec<_>>>()?, 0)?;
    Ok(head.logits(&rows)?.flatten_all()?.to_vec1()?)
}

fn score_chunk(
    vocabulary: usize,
    prompts: &[&SealedPrompt],
    chunk: &[Piece],
    source: &[f32],
    result: &[f32],
    tokens: &mut Vec<TokenScore>,
) -> Result<()> {
    let places: Vec<(usize, usize)> =
        chunk.iter().flat_map(|piece| (piece.start..piece.end).map(|row| (piece.prompt, row))).collect();
    let scores: Vec<_> = places
        .par_iter()
        .zip(source.par_chunks_exact(vocabulary))
        .zip(result.par_chunks_exact(vocabulary))
        .map(|((&(prompt, row), source), result)| {
            score_token(source, result, prompts[prompt].token_ids[row + 1] as usize)
        })
        .collect();
    for (score, (prompt, row)) in scores.into_iter().zip(places) {
        tokens.push(score.map_err(|bad| {
            let model = if bad.of_source { "source" } else { "result" };
            refuse(format!("the {model}'s logit of token id {} is {}", bad.id, bad.value))
                .prompt(&prompts[prompt].id)
                .row(row)
                .wanted("finite logits")
        })?);
    }
    Ok(())
}

fn summarise(prompts: &[&SealedPrompt], tokens: &[TokenScore]) -> Result<Evaluation> {
    let mut by_axis: Vec<(String, Vec<TokenScore>)> = Vec::new();
    let mut by_prompt = Vec::with_capacity(prompts.len());
    let mut rest = tokens;
    for prompt in prompts {
        let (own, after) = rest.split_at(prompt.token_ids.len().saturating_sub(1));
        rest = after;
        let Some(scores) = Scores::of(own) else { continue };
        by_prompt.push((prompt.id.clone(), scores));
        match by_axis.iter_mut().find(|(axis, _)| *axis == prompt.axis) {
            Some((_, tokens)) => tokens.extend_from_slice(own),
            None => by_axis.push((prompt.axis.clone(), own.to_vec())),
        }
    }
    let axes = by_axis.into_iter().filter_map(|(axis, tokens)| Some((axis, Scores::of(&tokens)?))).collect();
    match Scores::of(tokens) {
        Some(all) => Ok(Evaluation { state: None, all, axes, prompts: by_prompt }),
        None => refuse("no token was scored").wanted("at least one").err(),
    }
}

fn check(geometry: &Geometry, prompts: &[&SealedPrompt], states: &[Tensor]) -> Result<()> {
    if states.len() != prompts.len() {
        return refuse(format!("{} states for {} prompts", states.len(), prompts.len()))
            .wanted("one of each")
            .err();
    }
    for (prompt, state) in prompts.iter().zip(states) {
        let wanted = [prompt.token_ids.len(), geometry.hidden_size];
        if state.dims() != wanted {
            return refuse(format!("a final state of shape {:?}", state.dims()))
                .prompt(&prompt.id)
                .wanted(format!("{wanted:?}"))
                .err();
        }
        if let Some(row) = prompt.token_ids.iter().position(|id| *id as usize >= geometry.vocab_size) {
            return refuse(format!("token id {}", prompt.token_ids[row]))
                .prompt(&prompt.id)
                .row(row)
                .wanted(format!("below vocab_size = {}", geometry.vocab_size))
                .err();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corpus::PromptUse;

    fn prompt(id: &str, axis: &str, tokens: usize) -> SealedPrompt {
        SealedPrompt {
            id: id.into(),
            axis: axis.into(),
            usage: PromptUse::Evaluate,
            prefix_length: 0,
            row_offset: None,
            cut_tokens: 0,
            token_ids: vec![0; tokens],
            token_ids_sha256: String::new(),
        }
    }

    #[test]
    fn chunks_cover_every_scored_row_once_and_in_order() {
        let prompts = [prompt("a", "x", 4), prompt("b", "x", 1), prompt("c", "x", 8), prompt("d", "x", 2)];
        let prompts: Vec<&SealedPrompt> = prompts.iter().collect();
        for bound in 1..13 {
            let chunks = chunks(&prompts, bound);
            let rows = |chunk: &Vec<Piece>| chunk.iter().map(|p| p.end - p.start).sum::<usize>();
            assert!(chunks[..chunks.len() - 1].iter().all(|chunk| rows(chunk) == bound));
            let places: Vec<_> =
                chunks.iter().flatten().flat_map(|p| (p.start..p.end).map(|row| (p.prompt, row))).collect();
            let expected = [(0, 3), (2, 7), (3, 1)].into_iter();
            let expected: Vec<_> =
                expected.flat_map(|(prompt, rows)| (0..rows).map(move |row| (prompt, row))).collect();
            assert_eq!(places, expected, "bound {bound}");
        }
    }

    #[test]
    fn axes_keep_the_order_of_the_plan_and_single_tokens_count_for_nothing() {
        let prompts = [prompt("a", "z", 3), prompt("b", "solo", 1), prompt("c", "a", 2), prompt("d", "z", 2)];
        let prompts: Vec<&SealedPrompt> = prompts.iter().collect();
        let token = |kl| TokenScore { source_nll: 0.0, result_nll: 0.0, kl, same_top1: true };
        let tokens = [1.0, 2.0, 3.0, 6.0].map(token);
        let evaluation = summarise(&prompts, &tokens).unwrap();
        assert_eq!(evaluation.all.kl_mean, 3.0);
        let means = |rows: &[(String, Scores)]| {
            rows.iter().map(|(name, scores)| (name.clone(), scores.kl_mean)).collect::<Vec<_>>()
        };
        assert_eq!(means(&evaluation.axes), [("z".into(), 3.0), ("a".into(), 3.0)]);
        assert_eq!(means(&evaluation.prompts), [("a".into(), 1.5), ("c".into(), 3.0), ("d".into(), 6.0)]);
        let json = serde_json::to_value(evaluation.with_state(StateType::F32)).unwrap();
        assert_eq!(json["state"], "f32");
        assert_eq!(json["axes"][1]["axis"], "a");
        assert_eq!(json["axes"][1]["kl_mean"], 3.0);
        assert_eq!(json["prompts"][1]["prompt"], "c");
        assert!(json["prompts"][1]["kl_standard_error"].is_null());
    }
}
