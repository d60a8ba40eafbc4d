//! What is measured at a token, and how tokens are put together.
//!
//! At a position with source logits a and result logits b over the vocabulary, and t the token that follows:
//!
//! - negative log-likelihood: `-ln softmax(a)[t]`, likewise for b; perplexity is `exp(sum / tokens)`;
//! - divergence: `KL = Σ_v p_v (ln p_v - ln q_v)` with `p = softmax(a)`, `q = softmax(b)`, in nats, over the whole
//!   vocabulary. Equal logits give exactly 0; rounding may leave another pair a little below 0, and it stays there;
//! - top-1 agreement: whether both have their largest logit at the same token, ties going to the lowest id.
//!
//! Logits are f32; everything after them is f64, summed in ascending order of token id within a position and in order
//! of positions beyond. Quantiles are nearest-rank: the value at place `ceil(q · n)` of n sorted ones, counted from 1
//! (for an even n the median is the lower of the two in the middle), so that each is the divergence of some token.

use serde::Serialize;

/// Figures over a set of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Scores {
    /// Scored tokens: all of a prompt but its first.
    pub tokens: u64,
    /// Perplexity of the source.
    pub source_perplexity: f64,
    /// Perplexity of the result.
    pub result_perplexity: f64,
    /// Mean divergence, nats a token.
    pub kl_mean: f64,
    /// Standard error of that mean, tokens taken as independent; NaN (in JSON `null`) for a single token.
    pub kl_standard_error: f64,
    /// Median divergence.
    pub kl_median: f64,
    /// 99th percentile of the divergence.
    pub kl_p99: f64,
    /// Share of tokens where source and result have the same most likely token, 0 to 1.
    pub top1_agreement: f64,
}

impl Scores {
    /// Puts tokens together, in the order given. `None` for no tokens, which have no mean.
    pub fn of(tokens: &[TokenScore]) -> Option<Self> {
        if tokens.is_empty() {
            return None;
        }
        let count = tokens.len() as f64;
        let mean = |value: fn(&TokenScore) -> f64| tokens.iter().map(value).sum::<f64>() / count;
        let kl_mean = mean(|token| token.kl);
        let squares: f64 = tokens.iter().map(|token| (token.kl - kl_mean).powi(2)).sum();
        let mut sorted: Vec<f64> = tokens.iter().map(|token| token.kl).collect();
        sorted.sort_unstable_by(f64::total_cmp);
        Some(Self {
            tokens: tokens.len() as u64,
            source_perplexity: mean(|token| token.source_nll).exp(),
            result_perplexity: mean(|token| token.result_nll).exp(),
            kl_mean,
            kl_standard_error: (squares / (count - 1.0) / count).sqrt(),
            kl_median: percentile(&sorted, 50),
            kl_p99: percentile(&sorted, 99),
            top1_agreement: tokens.iter().filter(|token| token.same_top1).count() as f64 / count,
        })
    }
}

/// Nearest-rank percentile of sorted values, of which there is at least one.
fn percentile(sorted: &[f64], percent: usize) -> f64 {
    sorted[(percent * sorted.len()).div_ceil(100) - 1]
}

/// Figures of one token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenScore {
    /// `-ln p(token)` of the source, nats.
    pub source_nll: f64,
    /// The same of the result.
    pub result_nll: f64,
    /// `KL(source || result)` of the distributions the token was drawn from, nats.
    pub kl: f64,
    /// Whether both find the same token most likely.
    pub same_top1: bool,
}

/// A logit that is not finite.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BadLogit {
    /// Whether it is one of the source, not of the result.
    pub of_source: bool,
    /// Token id it belongs to.
    pub id: usize,
    /// The value.
    pub value: f32,
}

/// Scores one position: logits of source and result over the same vocabulary, and the token that follows.
///
/// # Errors
/// When a logit is not finite.
///
/// # Panics
/// When `next` is outside the vocabulary.
pub fn score_token(source: &[f32], result: &[f32], next: usize) -> Result<TokenScore, BadLogit> {
    let bad = |of_source| move |(id, value)| BadLogit { of_source, id, value };
    let (source_top, source_max) = top1(source).map_err(bad(true))?;
    let (result_top, result_max) = top1(result).map_err(bad(false))?;
    // Differences of f32 values: exact in f64 unless they are far apart, where they do not matter.
    let below = |logit: f32, max: f32| f64::from(logit) - f64::from(max);
    let (mut source_sum, mut result_sum, mut gain) = (0f64, 0f64, 0f64);
    for (a, b) in source.iter().zip(result) {
        let (a, b) = (below(*a, source_max), below(*b, result_max));
        let p = a.exp();
        source_sum += p;
        result_sum += b.exp();
        gain += p * (a - b);
    }
    let (source_log, result_log) = (source_sum.ln(), result_sum.ln());
    Ok(TokenScore {
        source_nll: source_log - below(source[next], source_max),
        result_nll: result_log - below(result[next], result_max),
        // Σ p ((a - ln A) - (b - ln B)) with p = exp(a) / A.
        kl: gain / source_sum + (result_log - source_log),
        same_top1: source_top == result_top,
    })
}

/// Id and value of the largest logit, the lowest id among equals; or those of the first that is not finite.
fn top1(logits: &[f32]) -> Result<(usize, f32), (usize, f32)> {
    let mut best = (0, f32::NEG_INFINITY);
    for (id, logit) in logits.iter().enumerate() {
        if !logit.is_finite() {
            return Err((id, *logit));
        }
        if *logit > best.1 {
            best = (id, *logit);
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() <= 1e-7 * b.abs().max(1.0), "{a} is not {b}");
    }

    #[test]
    fn a_token_as_computed_by_hand() {
        // p = (1/4, 3/4), q = (1/2, 1/2), both shifted, which must not matter.
        let score = score_token(&[5.0, 5.0 + 3f32.ln()], &[-70.0, -70.0], 0).unwrap();
        close(score.source_nll, 4f64.ln());
        close(score.result_nll, 2f64.ln());
        close(score.kl, 0.25 * 0.5f64.ln() + 0.75 * 1.5f64.ln());
        assert!(!score.same_top1, "a tie goes to id 0");
        // The other way round the divergence is another: 1/2 ln 2 + 1/2 ln (2/3).
        let score = score_token(&[-70.0, -70.0], &[5.0, 5.0 + 3f32.ln()], 1).unwrap();
        close(score.kl, 0.5 * 2f64.ln() + 0.5 * (2f64 / 3.0).ln());
    }

    #[test]
    fn equal_logits_diverge_by_exactly_nothing() {
        let logits: Vec<f32> = (0..2048).map(|i| ((i * 7919) % 2048) as f32 / 100.0 - 7.0).collect();
        let score = score_token(&logits, &logits, 3).unwrap();
        assert_eq!((score.kl, score.same_top1), (0.0, true));
        assert_eq!(score.source_nll.to_bits(), score.result_nll.to_bits());
    }

    #[test]
    fn far_logits_stay_finite() {
        let score = score_token(&[f32::MAX, f32::MIN], &[f32::MIN, f32::MAX], 0).unwrap();
        assert!(score.kl.is_finite() && score.result_nll.is_finite());
        assert_eq!(score.source_nll, 0.0);
        close(score.kl / (2.0 * f64::from(f32::MAX)), 1.0);
    }

    #[test]
    fn the_first_bad_logit_is_named() {
        let bad = |source: &[f32], result: &[f32]| {
            let bad = score_token(source, result, 0).unwrap_err();
            (bad.of_source, bad.id)
        };
        assert_eq!(bad(&[0.0, f32::INFINITY], &[f32::NAN, 0.0]), (true, 1));
        assert_eq!(bad(&[0.0, 0.0], &[0.0, f32::NEG_INFINITY]), (false, 1));
        assert_eq!(bad(&[0.0, 0.0], &[f32::NAN, f32::NAN]), (false, 0));
    }

    #[test]
    fn tokens_are_put_together_as_by_hand() {
        assert_eq!(Scores::of(&[]), None);
        let token = |kl: f64, same_top1| TokenScore {
            source_nll: 2f64.ln(),
            result_nll: if same_top1 { 0.0 } else { 16f64.ln() },
            kl,
            same_top1,
        };
        let scores =
            Scores::of(&[token(0.5, true), token(0.125, true), token(0.25, false), token(0.125, true)])
                .unwrap();
        assert_eq!(scores.tokens, 4);
        close(scores.source_perplexity, 2.0);
        close(scores.result_perplexity, 2.0);
        assert_eq!(scores.kl_mean, 0.25);
        // Deviations 0.25, 0.125, 0, 0.125: squares sum to 0.09375; / 3 / 4 = 0.0078125.
        close(scores.kl_standard_error, 0.0078125f64.sqrt());
        assert_eq!((scores.kl_median, scores.kl_p99), (0.125, 0.5));
        assert_eq!(scores.top1_agreement, 0.75);
        let one = Scores::of(&[token(0.5, true)]).unwrap();
        assert!(one.kl_standard_error.is_nan());
    }

    #[test]
    fn percentiles_are_nearest_rank() {
        let values: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!(percentile(&values, 99), 198.0);
        assert_eq!(percentile(&values[..101], 99), 100.0);
        assert_eq!(percentile(&values[..101], 50), 51.0);
        assert_eq!(percentile(&values[..1], 99), 1.0);
    }
}
