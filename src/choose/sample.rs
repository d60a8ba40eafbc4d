//! The mass-stratified sample of experts that a layer's shared vectors are chosen on.
//!
//! The hottest and the coldest expert, and between them those at the midpoints of equal strata of cumulative routing mass.
//! Source: the owner's Round 7 record.

use num_bigint::BigUint;

/// Up to `count` expert ids, ascending; all of them where there are no more.
pub fn mass_stratified_sample(mass: &[BigUint], count: usize) -> Vec<usize> {
    let mut ranked: Vec<usize> = (0..mass.len()).collect();
    ranked.sort_by(|&a, &b| mass[b].cmp(&mass[a]).then(a.cmp(&b)));
    if count >= ranked.len() {
        ranked.sort_unstable();
        return ranked;
    }
    let mut chosen = vec![ranked[0]];
    if count > 1 {
        chosen.push(ranked[ranked.len() - 1]);
    }
    let strata = count.saturating_sub(2);
    let total: BigUint = mass.iter().sum();
    for stratum in 0..strata {
        // The expert in whose span of cumulative mass the midpoint (2s + 1) / (2·strata) lies, or the next free one.
        let midpoint = &total * (2 * stratum + 1);
        let mut sum = BigUint::ZERO;
        let at = ranked.iter().position(|&id| {
            sum += &mass[id];
            &sum * (2 * strata) >= midpoint
        });
        let at = at.unwrap_or(ranked.len() - 1);
        let free = (at..ranked.len()).chain((0..at).rev()).find(|&i| !chosen.contains(&ranked[i]));
        chosen.extend(free.map(|i| ranked[i]));
    }
    chosen.sort_unstable();
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mass(units: &[u32]) -> Vec<BigUint> {
        units.iter().map(|&x| BigUint::from(x)).collect()
    }

    #[test]
    fn it_has_the_hottest_the_coldest_and_midpoints() {
        // Cumulative from the hottest: 40, 70, 90, 95, 99, 100; midpoints of two strata at 25 and 75.
        let mass = mass(&[1, 40, 4, 30, 5, 20]);
        assert_eq!(mass_stratified_sample(&mass, 4), [0, 1, 3, 5]);
        assert_eq!(mass_stratified_sample(&mass, 1), [1]);
        assert_eq!(mass_stratified_sample(&mass, 2), [0, 1]);
    }

    #[test]
    fn it_is_distinct_whatever_the_masses() {
        for units in [vec![0; 9], vec![7; 9], vec![100, 0, 0, 0, 0, 0, 0, 0, 0]] {
            for count in 1..12 {
                let sample = mass_stratified_sample(&mass(&units), count);
                assert_eq!(sample.len(), count.min(9));
                assert!(sample.windows(2).all(|pair| pair[0] < pair[1]));
            }
        }
    }
}
