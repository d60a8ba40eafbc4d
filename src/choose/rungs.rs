//! Exact choice of one setting (a rung) an expert under a budget of bits.
//!
//! All experts of a layer have the same sizes, so that a rung costs every expert the same bits. Gains are the
//! mass-weighted falls of measured loss from rung 0, exact big integers as in [`super::allocation`]. Partial choices are
//! kept as a Pareto list: fewest bits first, each gaining more than all before it. Those that can no longer reach what a
//! greedy choice gains, by the Lagrangian bound at its multiplier, are dropped, which leaves few; every comparison is of
//! integers. (The multiple-choice knapsack: Kellerer, Pferschy, Pisinger, "Knapsack Problems", chapter 11.)

use num_bigint::BigInt;

use super::allocation::{Measured, gains, loss_exponent_of};
use crate::error::{Result, refuse};

/// A solved layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChosenRungs {
    /// The rung of each expert.
    pub rungs: Vec<u32>,
    /// Bits they cost together.
    pub bits: u64,
    /// The summed gain over rung 0 in units of 2^-(149 + `loss_exponent`).
    pub gain: BigInt,
    /// Losses were scaled by 2^`loss_exponent` to integers.
    pub loss_exponent: u32,
}

/// Partial choices up to an expert that none is better than, bits and gains ascending; how each came about.
#[derive(Default)]
struct Pareto {
    bits: Vec<u64>,
    gains: Vec<BigInt>,
    /// Place in the list before, and the expert's rung.
    from: Vec<(u32, u32)>,
}

/// Chooses the rungs of greatest gain within `budget` bits. Among those the ones of fewest bits, and among these the
/// smallest rungs, read from the last expert backwards.
///
/// # Errors
/// A loss that is not finite, losses for other rungs than `costs` has, or a budget that not even the cheapest rungs fit.
pub fn choose_rungs(experts: &[Measured], costs: &[u64], budget: u64) -> Result<ChosenRungs> {
    for (id, expert) in experts.iter().enumerate() {
        if expert.losses.len() != costs.len() {
            return refuse(format!("losses at {} rungs", expert.losses.len()))
                .expert(id)
                .wanted(costs.len().to_string())
                .err();
        }
        if let Some(loss) = expert.losses.iter().find(|loss| !loss.is_finite()) {
            return refuse(format!("a measured loss of {loss}")).expert(id).wanted("finite losses").err();
        }
    }
    let cheapest = costs.iter().copied().min().unwrap_or(0);
    let least = cheapest.checked_mul(experts.len() as u64).filter(|least| *least <= budget);
    if least.is_none() || costs.is_empty() {
        return refuse(format!(
            "the budget is out of reach: {} experts of at least {cheapest} bits, within {budget}",
            experts.len()
        ))
        .field("kaiju1.target")
        .wanted("a target above the bits a weight of the cheapest rung")
        .err();
    }
    let loss_exponent = loss_exponent_of(experts);
    let gains: Vec<Vec<BigInt>> = experts.iter().map(|expert| gains(expert, loss_exponent)).collect();
    let bound = Bound::new(&gains, costs, budget);

    let mut lists = vec![Pareto { bits: vec![0], gains: vec![BigInt::ZERO], from: vec![(0, 0)] }];
    for (id, of_expert) in gains.iter().enumerate() {
        let before = &lists[id];
        let reserved = cheapest * (experts.len() - id - 1) as u64;
        let mut candidates = Vec::with_capacity(before.bits.len() * costs.len());
        for (at, (bits, gain)) in before.bits.iter().zip(&before.gains).enumerate() {
            for (rung, (cost, own)) in costs.iter().zip(of_expert).enumerate() {
                let (bits, gain) = (bits + cost, gain + own);
                if bits + reserved <= budget && bound.can_reach(id + 1, bits, &gain) {
                    candidates.push((bits, gain, rung as u32, at as u32));
                }
            }
        }
        // Fewest bits first; of those the greatest gain, and of these the smallest rung, which has one place before it.
        candidates
            .sort_unstable_by(|a, b| a.0.cmp(&b.0).then_with(|| b.1.cmp(&a.1)).then_with(|| a.2.cmp(&b.2)));
        let mut list = Pareto::default();
        for (bits, gain, rung, at) in candidates {
            if list.gains.last().is_none_or(|last| gain > *last) {
                list.bits.push(bits);
                list.gains.push(gain);
                list.from.push((at, rung));
            }
        }
        lists.push(list);
    }
    let last = &lists[experts.len()];
    let mut at = last.bits.len() - 1;
    let (bits, gain) = (last.bits[at], last.gains[at].clone());
    let mut rungs: Vec<u32> = lists[1..]
        .iter()
        .rev()
        .map(|list| {
            let (before, rung) = list.from[at];
            at = before as usize;
            rung
        })
        .collect();
    rungs.reverse();
    Ok(ChosenRungs { rungs, bits, gain, loss_exponent })
}

/// What a partial choice can still come to at most, against what a greedy choice comes to.
struct Bound {
    /// The multiplier: gain a bit, as a fraction with a positive denominator.
    numerator: BigInt,
    denominator: BigInt,
    /// By number of experts chosen: the others' greatest `denominator · gain - numerator · bits`, summed.
    rest: Vec<BigInt>,
    /// `denominator ·` the gain of the greedy choice `- numerator · budget`.
    reached: BigInt,
}

impl Bound {
    fn new(gains: &[Vec<BigInt>], costs: &[u64], budget: u64) -> Self {
        // Steps up each expert's convex hull, steepest first, as long as they fit.
        let mut steps: Vec<(BigInt, u64, usize, usize)> = Vec::new();
        let (mut spent, mut reached) = (0u64, BigInt::ZERO);
        for (id, own) in gains.iter().enumerate() {
            let hull = hull(own, costs);
            spent += costs[hull[0]];
            reached += &own[hull[0]];
            for pair in hull.windows(2) {
                steps.push((&own[pair[1]] - &own[pair[0]], costs[pair[1]] - costs[pair[0]], id, pair[1]));
            }
        }
        let steeper = |a: &(BigInt, u64, usize, usize), b: &(BigInt, u64, usize, usize)| {
            (&b.0 * BigInt::from(a.1))
                .cmp(&(&a.0 * BigInt::from(b.1)))
                .then_with(|| (a.2, a.3).cmp(&(b.2, b.3)))
        };
        steps.sort_by(steeper);
        let (mut numerator, mut denominator) = (BigInt::ZERO, BigInt::from(1));
        for (gain, bits, ..) in steps {
            if spent + bits > budget {
                (numerator, denominator) = (gain, BigInt::from(bits));
                break;
            }
            spent += bits;
            reached += gain;
        }
        let best = |own: &Vec<BigInt>| {
            let worth = own
                .iter()
                .zip(costs)
                .map(|(gain, &bits)| &denominator * gain - &numerator * BigInt::from(bits));
            worth.max().unwrap_or_default()
        };
        let mut rest = vec![BigInt::ZERO];
        for own in gains.iter().rev() {
            let sum = rest.last().cloned().unwrap_or_default() + best(own);
            rest.push(sum);
        }
        rest.reverse();
        let reached = &denominator * reached - &numerator * BigInt::from(budget);
        Self { numerator, denominator, rest, reached }
    }

    /// Whether so many bits and gain of the first `chosen` experts can still come to the greedy choice's gain.
    fn can_reach(&self, chosen: usize, bits: u64, gain: &BigInt) -> bool {
        &self.denominator * gain - &self.numerator * BigInt::from(bits) + &self.rest[chosen] >= self.reached
    }
}

/// The rungs on the upper convex hull of gain over bits, ascending in both; the cheapest comes first.
fn hull(gains: &[BigInt], costs: &[u64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..costs.len()).collect();
    order.sort_by(|&a, &b| costs[a].cmp(&costs[b]).then_with(|| gains[b].cmp(&gains[a])).then(a.cmp(&b)));
    let mut hull: Vec<usize> = Vec::new();
    for next in order {
        if hull.last().is_some_and(|&last| gains[next] <= gains[last]) {
            continue;
        }
        while let [.., before, last] = hull[..] {
            let rise = |a: usize, b: usize| (&gains[b] - &gains[a], BigInt::from(costs[b] - costs[a]));
            let ((first, first_bits), (second, second_bits)) = (rise(before, last), rise(last, next));
            if first * second_bits > second * first_bits {
                break;
            }
            hull.pop();
        }
        hull.push(next);
    }
    hull
}

#[cfg(test)]
mod tests {
    use super::*;
    use num_bigint::BigUint;
    use proptest::prelude::*;

    fn measured(mass: u64, losses: &[f64]) -> Measured {
        Measured { mass: BigUint::from(mass), losses: losses.to_vec() }
    }

    /// Every assignment within the budget, by the rule of [`choose_rungs`].
    fn brute_force(experts: &[Measured], costs: &[u64], budget: u64) -> Option<(BigInt, u64, Vec<u32>)> {
        let exponent = loss_exponent_of(experts);
        let gains: Vec<_> = experts.iter().map(|expert| gains(expert, exponent)).collect();
        let mut best: Option<(BigInt, u64, Vec<u32>)> = None;
        for code in 0..costs.len().pow(experts.len() as u32) {
            let rungs: Vec<u32> = (0..experts.len())
                .map(|at| (code / costs.len().pow(at as u32) % costs.len()) as u32)
                .collect();
            let bits: u64 = rungs.iter().map(|&rung| costs[rung as usize]).sum();
            if bits > budget {
                continue;
            }
            let gain: BigInt = rungs.iter().zip(&gains).map(|(&rung, own)| own[rung as usize].clone()).sum();
            let key = |gain: &BigInt, bits: u64, rungs: &[u32]| {
                (-gain, bits, rungs.iter().rev().copied().collect::<Vec<u32>>())
            };
            if best.as_ref().is_none_or(|(g, b, r)| key(&gain, bits, &rungs) < key(g, *b, r)) {
                best = Some((gain, bits, rungs));
            }
        }
        best
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn it_agrees_with_brute_force(
            // Few distinct values, so that ties are common; losses need not fall with bits, and rungs may cost the same.
            cases in prop::collection::vec((0u64..3, prop::array::uniform4(0u8..4)), 1..6),
            costs in prop::collection::vec(1u64..9, 2..=4),
            share in 0.0f64..=1.2,
        ) {
            let experts: Vec<_> = cases
                .iter()
                .map(|(mass, l)| measured(*mass, &l.map(|x| f64::from(x) * 0.1)[..costs.len()]))
                .collect();
            let most = costs.iter().max().unwrap() * experts.len() as u64;
            let budget = (share * most as f64) as u64;
            match (choose_rungs(&experts, &costs, budget), brute_force(&experts, &costs, budget)) {
                (Ok(solved), Some((gain, bits, rungs))) => {
                    prop_assert_eq!((solved.gain, solved.bits, solved.rungs), (gain, bits, rungs));
                }
                (Err(error), None) => prop_assert!(error.to_string().contains("out of reach")),
                (solved, wanted) => prop_assert!(false, "{:?}, {:?}", solved, wanted),
            }
        }
    }

    #[test]
    fn the_real_geometry_solves_quickly_and_within_its_budget() {
        let mut seed = 1u64;
        let mut next = || {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 11) as f64 / (1u64 << 53) as f64
        };
        // Payload bits of an expert of 3 x 6144 x 2048 weights, about, at five settings.
        let costs = [99_913_728u64, 115_736_576, 112_803_840, 116_457_472, 126_287_872];
        let experts: Vec<_> = (0..256)
            .map(|_| {
                let loss = next() * 1e-3;
                let falls = [1.0, 2.0, 2.2, 2.4, 3.0].map(|fall| loss / (fall + 0.3 * next()));
                Measured { mass: BigUint::from((next() * 1e15) as u64) << 130, losses: falls.to_vec() }
            })
            .collect();
        let start = std::time::Instant::now();
        for per_weight in [2.75, 3.0, 3.1, 3.3] {
            let budget = (per_weight * 256.0 * 37_748_736.0) as u64;
            let solved = choose_rungs(&experts, &costs, budget).unwrap();
            assert!(
                solved.bits <= budget && solved.bits > budget - budget / 1000,
                "{} of {budget}",
                solved.bits
            );
        }
        assert!(start.elapsed().as_secs_f64() < 10.0, "{:?}", start.elapsed());
    }

    #[test]
    fn what_cannot_be_solved_is_refused() {
        let one = [measured(1, &[1.0, 0.5])];
        assert!(choose_rungs(&one, &[3, 4], 2).unwrap_err().to_string().contains("out of reach"));
        assert!(choose_rungs(&one, &[3], 9).unwrap_err().to_string().contains("2 rungs"));
        let bad = [measured(1, &[1.0, f64::NAN])];
        assert!(choose_rungs(&bad, &[3, 4], 9).unwrap_err().to_string().contains("NaN"));
        assert_eq!(choose_rungs(&one, &[3, 4], 3).unwrap().rungs, [0]);
        assert_eq!(choose_rungs(&one, &[3, 4], 4).unwrap().rungs, [1]);
    }
}
