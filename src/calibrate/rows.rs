//! Which rows fit and which are held out.
//!
//! A row fits iff its seeded hash of (layer, row id) is not a multiple of the recipe's modulus (5: an 80/20 split).
//! Where fewer held-out rows are wanted than there are, those with the lowest hash are taken.

use sha2::{Digest, Sha256};

use super::cold::{Fallback, draw_fallback};
use crate::store::hash::hex;

/// The rows routed to one expert, split; both lists ascend in row id.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExpertRows {
    /// Rows that enter covariances.
    pub fit: Vec<usize>,
    /// Rows that measure loss.
    pub holdout: Vec<usize>,
    /// Rows a cold expert's covariances are topped up with.
    pub fit_fallback: Fallback,
    /// Rows that measure the loss of an expert without held-out rows of its own.
    pub holdout_fallback: Fallback,
}

impl ExpertRows {
    /// The rows that measure loss: the expert's own, or the fallback's.
    pub fn measured(&self) -> &[usize] {
        if self.holdout.is_empty() { &self.holdout_fallback.rows } else { &self.holdout }
    }
}

/// What rows are split by.
#[derive(Debug, Clone, Copy)]
pub struct RowRule {
    /// A row is held out iff its hash is a multiple of this.
    pub modulus: u64,
    /// Most held-out rows of an expert.
    pub holdout_rows: usize,
    /// Experts with fewer fit rows are topped up.
    pub min_fit_rows: usize,
}

/// Splits the rows of every expert and tops up the cold ones. `ids[row * k..]` are the experts of a row,
/// `scores[row * experts..]` the router's scores of all experts for it, `hashes[row]` its seeded hash.
pub fn split_rows(
    experts: usize,
    k: usize,
    ids: &[i32],
    scores: &[f32],
    hashes: &[u64],
    rule: RowRule,
) -> Vec<ExpertRows> {
    let mut rows = vec![ExpertRows::default(); experts];
    let fits = |row: usize| !hashes[row].is_multiple_of(rule.modulus);
    for (row, routed) in ids.chunks_exact(k).enumerate() {
        for &id in routed {
            let expert = &mut rows[id as usize];
            if fits(row) { expert.fit.push(row) } else { expert.holdout.push(row) }
        }
    }
    for (id, expert) in rows.iter_mut().enumerate() {
        let pool = |fit: bool| -> Vec<(usize, f32, u64)> {
            let free = |&row: &usize| fits(row) == fit && !ids[row * k..(row + 1) * k].contains(&(id as i32));
            (0..hashes.len()).filter(free).map(|row| (row, scores[row * experts + id], hashes[row])).collect()
        };
        if expert.fit.len() < rule.min_fit_rows {
            expert.fit_fallback = draw_fallback(&pool(true), rule.min_fit_rows - expert.fit.len());
        }
        if expert.holdout.is_empty() {
            expert.holdout_fallback = draw_fallback(&pool(false), rule.holdout_rows);
        }
        if expert.holdout.len() > rule.holdout_rows {
            expert.holdout.sort_by_key(|&row| (hashes[row], row));
            expert.holdout.truncate(rule.holdout_rows);
            expert.holdout.sort_unstable();
        }
    }
    rows
}

/// SHA-256 over row ids as little-endian u64 in ascending order.
pub fn row_ids_sha256(rows: &[usize]) -> String {
    let bytes: Vec<u8> = rows.iter().flat_map(|&row| (row as u64).to_le_bytes()).collect();
    hex(&Sha256::digest(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: RowRule = RowRule { modulus: 5, holdout_rows: 2, min_fit_rows: 0 };

    #[test]
    fn rows_are_split_by_hash_and_capped_by_the_lowest() {
        let ids = [0, 1, 0, 1, 0, 1, 1, 0];
        let (scores, hashes) = ([0.5; 8], [10, 5, 7, 0]);
        let rows = split_rows(2, 2, &ids, &scores, &hashes, RULE);
        assert_eq!((&rows[0].fit[..], &rows[0].holdout[..]), (&[2][..], &[1, 3][..]));
        assert_eq!(rows[1], rows[0]);
        let all = split_rows(2, 2, &ids, &scores, &hashes, RowRule { holdout_rows: 9, ..RULE });
        assert_eq!(all[1].holdout, [0, 1, 3]);
    }

    #[test]
    fn a_cold_expert_takes_rows_of_others_on_the_same_side_of_the_split() {
        // Expert 1 has one fit row, expert 2 none at all; rows 0 and 5 are held out.
        let (ids, hashes) = ([0, 0, 0, 1, 0, 0, 0], [5, 1, 2, 3, 4, 10, 6]);
        let rows = split_rows(3, 1, &ids, &[0.1; 21], &hashes, RowRule { min_fit_rows: 3, ..RULE });
        assert_eq!((&rows[1].fit[..], &rows[1].holdout[..]), (&[3][..], &[][..]));
        assert_eq!(rows[1].fit_fallback.rows.len(), 2);
        assert!(!rows[1].fit_fallback.rows.contains(&3));
        assert_eq!(rows[1].measured(), [0, 5]);
        assert_eq!(rows[2].fit_fallback.rows.len(), 3);
        assert!(rows[2].fit_fallback.rows.iter().all(|row| ![0, 5].contains(row)));
        assert!(rows[0].fit_fallback.rows.is_empty());
    }
}
