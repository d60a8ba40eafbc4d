//! Which rows fit and which are held out.
//!
//! A row fits iff its seeded hash of (layer, row id) is not a multiple of the recipe's modulus (5: an 80/20 split).
//! Where fewer held-out rows are wanted than there are, those with the lowest hash are taken.

use sha2::{Digest, Sha256};

use crate::store::hash::hex;

/// The rows routed to one expert, split; both lists ascend in row id.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExpertRows {
    /// Rows that enter covariances.
    pub fit: Vec<usize>,
    /// Rows that measure loss.
    pub holdout: Vec<usize>,
}

/// Splits the rows of every expert. `ids[row * k..]` are the experts of a row, `hashes[row]` its seeded hash.
pub fn split_rows(
    experts: usize,
    k: usize,
    ids: &[i32],
    hashes: &[u64],
    modulus: u64,
    holdout_rows: usize,
) -> Vec<ExpertRows> {
    let mut rows = vec![ExpertRows::default(); experts];
    for (row, routed) in ids.chunks_exact(k).enumerate() {
        let fits = !hashes[row].is_multiple_of(modulus);
        for &id in routed {
            let expert = &mut rows[id as usize];
            if fits { expert.fit.push(row) } else { expert.holdout.push(row) }
        }
    }
    for expert in &mut rows {
        if expert.holdout.len() > holdout_rows {
            expert.holdout.sort_by_key(|&row| (hashes[row], row));
            expert.holdout.truncate(holdout_rows);
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

    #[test]
    fn rows_are_split_by_hash_and_capped_by_the_lowest() {
        let ids = [0, 1, 0, 1, 0, 1, 1, 0];
        let hashes = [10, 5, 7, 0];
        let rows = split_rows(2, 2, &ids, &hashes, 5, 2);
        assert_eq!(rows[0], ExpertRows { fit: vec![2], holdout: vec![1, 3] });
        assert_eq!(rows[1], rows[0]);
        assert_eq!(split_rows(2, 2, &ids, &hashes, 5, 9)[1].holdout, vec![0, 1, 3]);
    }
}
