//! Cold experts: rows for an expert that too few tokens are routed to.
//!
//! An expert with n fit rows, fewer than the recipe's `min_fit_rows`, is topped up with other rows of its layer. The rows
//! not routed to it are ranked by its router score for them (computed although it was not chosen) and cut into four
//! strata; a quarter of the missing rows is drawn from each by lowest seeded hash, the remainder from the hottest, no row
//! twice. Its covariance is `(1 - a)·routed + a·fallback` with `a = (min - n) / min`, 1 when n = 0. Where the layer has
//! not enough rows, all are used. Fallback fit rows come from the fit side of the row plan; an expert without held-out
//! rows of its own takes fallback rows of the held-out side in the same way, so no row ever does both.

/// Strata the rows are ranked into.
const STRATA: usize = 4;

/// The rows a cold expert is topped up with.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fallback {
    /// Rows, ascending.
    pub rows: Vec<usize>,
    /// Rows taken from each stratum, coldest first.
    pub strata: [usize; STRATA],
    /// Rows that were wanted.
    pub wanted: usize,
}

/// Draws up to `wanted` rows out of `pool` (row, router score of the expert, seeded hash), none of them the expert's own.
///
/// What the shares leave over is drawn from the hottest stratum, by lowest hash too, then from the next below it.
pub fn draw_fallback(pool: &[(usize, f32, u64)], wanted: usize) -> Fallback {
    let mut ranked = pool.to_vec();
    ranked.sort_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)));
    let share = wanted / STRATA;
    let mut missing = wanted.min(ranked.len());
    let (mut rows, mut strata) = (Vec::with_capacity(missing), [0; STRATA]);
    let mut orders: [Vec<(u64, usize)>; STRATA] = std::array::from_fn(|stratum| {
        let range = ranked.len() * stratum / STRATA..ranked.len() * (stratum + 1) / STRATA;
        let mut order: Vec<_> = ranked[range].iter().map(|&(row, _, hash)| (hash, row)).collect();
        order.sort_unstable();
        order
    });
    let mut take = |stratum: usize, order: &mut Vec<(u64, usize)>, most: usize| {
        let drawn = order.drain(..most.min(order.len()));
        strata[stratum] += drawn.len();
        missing -= drawn.len();
        rows.extend(drawn.map(|(_, row)| row));
        missing
    };
    for (stratum, order) in orders.iter_mut().enumerate() {
        take(stratum, order, share);
    }
    for (stratum, order) in orders.iter_mut().enumerate().rev() {
        let most = take(stratum, order, 0);
        take(stratum, order, most);
    }
    rows.sort_unstable();
    Fallback { rows, strata, wanted }
}

/// The fallback's share in a covariance: `(min - n) / min`, 0 for an expert with rows enough.
pub fn fallback_share(fit_rows: usize, min_fit_rows: usize) -> f64 {
    min_fit_rows.saturating_sub(fit_rows) as f64 / min_fit_rows as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(n: usize) -> Vec<(usize, f32, u64)> {
        (0..n).map(|row| (row, (row * 37 % 101) as f32, (row * 7919 % 1009) as u64)).collect()
    }

    #[test]
    fn every_stratum_gives_its_share_and_the_hottest_the_rest() {
        let pool = pool(100);
        let fallback = draw_fallback(&pool, 22);
        assert_eq!((fallback.rows.len(), fallback.strata), (22, [5, 5, 5, 7]));
        assert!(fallback.rows.windows(2).all(|pair| pair[0] < pair[1]));
        // The two extra rows are of the hottest quarter, the lowest hashes that its share left there.
        let share = draw_fallback(&pool, 20).rows;
        let mut ranked = pool.clone();
        ranked.sort_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)));
        let mut free: Vec<_> = ranked[75..].iter().filter(|(row, ..)| !share.contains(row)).collect();
        free.sort_by_key(|(row, _, hash)| (*hash, *row));
        let extra: Vec<_> = fallback.rows.iter().filter(|row| !share.contains(row)).collect();
        assert_eq!(extra.len(), 2);
        assert!(free[..2].iter().all(|(row, ..)| extra.contains(&row)));
    }

    #[test]
    fn few_rows_are_all_used_and_none_is_drawn_from_none() {
        for (rows, wanted) in [(0, 8), (1, 8), (3, 8), (7, 8), (8, 8), (9, 8)] {
            let fallback = draw_fallback(&pool(rows), wanted);
            assert_eq!(fallback.rows.len(), rows.min(wanted), "{rows} rows, {wanted} wanted");
            assert_eq!(fallback.strata.iter().sum::<usize>(), fallback.rows.len());
        }
        assert_eq!(draw_fallback(&pool(9), 0).rows, Vec::<usize>::new());
    }

    #[test]
    fn the_order_of_the_pool_does_not_matter() {
        let mut reversed = pool(60);
        reversed.reverse();
        assert_eq!(draw_fallback(&pool(60), 17), draw_fallback(&reversed, 17));
    }

    #[test]
    fn the_share_falls_from_one_to_zero() {
        assert_eq!(fallback_share(0, 256), 1.0);
        assert_eq!(fallback_share(64, 256), 0.75);
        assert_eq!(fallback_share(256, 256), 0.0);
        assert_eq!(fallback_share(999, 256), 0.0);
    }
}
