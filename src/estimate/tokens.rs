//! How many tokens a plan comes to: counted by the model's tokenizer, guessed from the text's bytes where there is none,
//! or told.

use serde::Serialize;

use crate::config::{Geometry, Model};
use crate::corpus::{Content, Document, Plan, PromptUse, SealContext, SealedPrompt, TextEncoder, seal};
use crate::error::Result;

/// Bytes of text a token is taken to stand for where there is no tokenizer: about what byte-level vocabularies of 100,000
/// and more give on English prose.
pub const BYTES_A_TOKEN: f64 = 4.0;

/// Where a number of tokens comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Basis {
    /// The model's tokenizer.
    Tokenizer,
    /// The text's bytes over [`BYTES_A_TOKEN`].
    Bytes,
    /// The command line.
    Told,
}

/// Tokens of a plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Tokens {
    /// Where the calibration tokens come from.
    pub basis: Basis,
    /// Calibration tokens, prefixes included.
    pub calibrate: u64,
    /// Calibration prompts.
    pub prompts: usize,
    /// Sum over calibration prompts of their squared lengths.
    pub squares: f64,
    /// Evaluation tokens.
    pub evaluate: u64,
    /// Sum over evaluation prompts of their squared lengths.
    pub evaluate_squares: f64,
}

impl Tokens {
    /// Counts a plan's tokens; `told` replaces the number of calibration tokens, in prompts as long as the plan's.
    ///
    /// # Errors
    /// What is wrong with plan, texts or tokenizer.
    pub fn of(plan: &Plan, model: &Model, geometry: &Geometry, told: Option<u64>) -> Result<Self> {
        let tokenizer = model.folder.join("tokenizer.json");
        let (basis, lengths) = if tokenizer.is_file() {
            let encoder = TextEncoder::from_file(&tokenizer)?;
            let context = SealContext {
                encoder: &encoder,
                vocab_size: geometry.vocab_size,
                max_position_embeddings: geometry.max_position_embeddings,
                default_prefix: model.card.prefix_tokens.as_deref(),
            };
            let sealed = seal(plan, &context)?;
            let length = |prompt: &SealedPrompt| (prompt.usage, prompt.token_ids.len());
            (Basis::Tokenizer, sealed.prompts.iter().map(length).collect())
        } else {
            (Basis::Bytes, from_bytes(plan, model, geometry)?)
        };
        let of = |usage: PromptUse| -> Vec<usize> {
            lengths.iter().filter(|(found, _)| *found == usage).map(|(_, length)| *length).collect()
        };
        let (calibrate, evaluate) = (of(PromptUse::Calibrate), of(PromptUse::Evaluate));
        let mut tokens = match told {
            Some(told) => Self::assumed(told, &calibrate),
            None => Self { basis, ..Self::assumed(sum(&calibrate), &calibrate) },
        };
        tokens.evaluate = sum(&evaluate);
        tokens.evaluate_squares = squares(&evaluate);
        Ok(tokens)
    }

    /// So many calibration tokens in prompts of these lengths, as often as it takes.
    pub fn assumed(calibrate: u64, lengths: &[usize]) -> Self {
        let share = calibrate as f64 / sum(lengths).max(1) as f64;
        Self {
            basis: Basis::Told,
            calibrate,
            prompts: (lengths.len() as f64 * share).ceil() as usize,
            squares: squares(lengths) * share,
            evaluate: 0,
            evaluate_squares: 0.0,
        }
    }

    /// Tokens of a calibration prompt, long ones counting by their length.
    pub fn mean_length(&self) -> f64 {
        self.squares / (self.calibrate.max(1) as f64)
    }
}

fn sum(lengths: &[usize]) -> u64 {
    lengths.iter().map(|&length| length as u64).sum()
}

fn squares(lengths: &[usize]) -> f64 {
    lengths.iter().map(|&length| (length as f64).powi(2)).sum()
}

/// Lengths by the bytes of the text, cut as the plan says.
fn from_bytes(plan: &Plan, model: &Model, geometry: &Geometry) -> Result<Vec<(PromptUse, usize)>> {
    let own = model.card.prefix_tokens.as_ref().map_or(0, Vec::len);
    let (documents, _) = plan.documents()?;
    let length = |document: Document| {
        let prefix = document.prefix_tokens.as_ref().map_or(own, Vec::len);
        let content = match &document.content {
            Content::Text(text) => (text.len() as f64 / BYTES_A_TOKEN).ceil() as usize,
            Content::Ids(ids) => ids.len(),
        };
        let most = document.max_tokens.unwrap_or(geometry.max_position_embeddings);
        (document.usage, (prefix + content).min(most))
    };
    Ok(documents.into_iter().map(length).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn told_tokens_come_in_prompts_as_long_as_the_plans() {
        let tokens = Tokens::assumed(1000, &[100, 300]);
        assert_eq!((tokens.prompts, tokens.squares), (5, 250_000.0));
        assert_eq!(tokens.mean_length(), 250.0);
    }
}
