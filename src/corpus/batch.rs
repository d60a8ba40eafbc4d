//! Prompts in batches, for calls that take several, and their names in errors from such calls.

use std::ops::Range;

use super::SealedPrompt;
use crate::error::Error;

/// Tokens a layer is given in one call, unless a single prompt is longer.
pub const BATCH_TOKENS: usize = 8192;

/// Ranges of prompts of at most `bound` tokens each, or of one prompt.
pub fn batches(prompts: &[&SealedPrompt], bound: usize) -> Vec<Range<usize>> {
    let mut out = Vec::new();
    let (mut start, mut tokens) = (0, 0);
    for (index, prompt) in prompts.iter().enumerate() {
        let length = prompt.token_ids.len();
        if index > start && tokens + length > bound {
            out.push(start..index);
            (start, tokens) = (index, 0);
        }
        tokens += length;
    }
    if start < prompts.len() {
        out.push(start..prompts.len());
    }
    out
}

/// Puts a prompt's id where a call over `batch` could only give its place in the call.
pub fn name_prompt(batch: &[&SealedPrompt]) -> impl Fn(Error) -> Error {
    move |error| match error {
        Error::Refused(refusal) => {
            refusal.resolve_prompt(|place| batch.get(place).map(|prompt| prompt.id.clone())).into()
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corpus::PromptUse;
    use crate::error::{Refusal, refuse};

    fn prompt(id: &str, length: usize) -> SealedPrompt {
        SealedPrompt {
            id: id.into(),
            axis: "prose".into(),
            usage: PromptUse::Evaluate,
            prefix_length: 0,
            row_offset: None,
            cut_tokens: 0,
            token_ids: vec![0; length],
            token_ids_sha256: String::new(),
        }
    }

    #[test]
    fn batches_hold_at_most_the_bound_or_one_prompt() {
        let ranges = |lengths: &[usize]| {
            let prompts: Vec<SealedPrompt> = lengths.iter().map(|&length| prompt("p", length)).collect();
            batches(&prompts.iter().collect::<Vec<_>>(), 8)
        };
        assert!(ranges(&[]).is_empty());
        assert_eq!(ranges(&[9, 9]), [0..1, 1..2]);
        assert_eq!(ranges(&[4, 4, 1, 9, 9, 2]), [0..2, 2..3, 3..4, 4..5, 5..6]);
        assert_eq!(ranges(&[1, 1, 1, 8]), [0..3, 3..4]);
    }

    #[test]
    fn a_prompt_known_by_its_place_is_named_by_its_id() {
        let prompts = ["a", "b.001"].map(|id| prompt(id, 1));
        let batch: Vec<&SealedPrompt> = prompts.iter().collect();
        let named = |error: Refusal| name_prompt(&batch)(error.into()).to_string();
        assert_eq!(
            named(refuse("NaN").layer(3).prompt("#1").row(7)),
            "layer 3, prompt \"b.001\", row 7: NaN"
        );
        assert_eq!(named(refuse("no such tensor").tensor("w")), "tensor w: no such tensor");
    }
}
