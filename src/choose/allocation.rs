//! Exact bit allocation within a layer.
//!
//! Tensors in canonical order (expert ascending; gate, up, down) start at the floor and take 0, 1 or 2 one-bit upgrades
//! each; exactly `upgrades` are spent, maximising the mass-weighted gain in measured loss. Losses are f64 and so exact
//! dyadic rationals; masses are integers; gains are compared as big integers, and no float decides anything.
//!
//! Source: the owner's Round 7 record, "Exact rate allocation"; the recurrence is the bounded knapsack by upgrades.

use num_bigint::{BigInt, BigUint};

use crate::error::{Result, refuse};

/// Measured losses of a tensor at the candidate widths, floor first; or of an expert at its rungs.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// Mass of the tensor's expert in units of 2^-149.
    pub mass: BigUint,
    /// Loss at floor, floor + 1, floor + 2 bits.
    pub losses: Vec<f64>,
}

/// A solved layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocation {
    /// Upgrades above the floor, one a tensor, in canonical order.
    pub upgrades: Vec<u32>,
    /// The summed gain in units of 2^-(149 + `loss_exponent`).
    pub gain: BigInt,
    /// Losses were scaled by 2^`loss_exponent` to integers.
    pub loss_exponent: u32,
}

/// Spends exactly `budget` upgrades. Among optima it takes the smallest upgrades, read from the last tensor backwards.
///
/// # Errors
/// A loss that is not finite, or a budget that cannot be spent.
pub fn allocate(tensors: &[Measured], budget: usize) -> Result<Allocation> {
    let most: usize = tensors.iter().map(|t| t.losses.len() - 1).sum();
    if budget > most {
        return refuse(format!("{budget} upgrades to spend on {} tensors", tensors.len()))
            .wanted(format!("at most {most}"))
            .err();
    }
    for (index, tensor) in tensors.iter().enumerate() {
        if let Some(loss) = tensor.losses.iter().find(|loss| !loss.is_finite()) {
            return refuse(format!("tensor {index} in canonical order has a measured loss of {loss}"))
                .wanted("finite losses")
                .err();
        }
    }
    let loss_exponent = loss_exponent_of(tensors);
    // best[s]: the greatest gain of the tensors seen so far with s upgrades spent; choice[t][s]: how tensor t got there.
    let mut best: Vec<Option<BigInt>> = vec![None; budget + 1];
    best[0] = Some(BigInt::ZERO);
    let mut choices = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let gains = gains(tensor, loss_exponent);
        let mut next: Vec<Option<BigInt>> = vec![None; budget + 1];
        let mut choice = vec![0u32; budget + 1];
        for spent in 0..=budget {
            for (upgrades, gain) in gains.iter().enumerate().take(spent + 1) {
                let Some(before) = &best[spent - upgrades] else { continue };
                let value = before + gain;
                if next[spent].as_ref().is_none_or(|known| value > *known) {
                    next[spent] = Some(value);
                    choice[spent] = upgrades as u32;
                }
            }
        }
        best = next;
        choices.push(choice);
    }
    let gain = best[budget].clone().expect("a budget within the total can be spent");
    let mut spent = budget;
    let mut upgrades: Vec<u32> = choices
        .iter()
        .rev()
        .map(|choice| {
            let taken = choice[spent];
            spent -= taken as usize;
            taken
        })
        .collect();
    upgrades.reverse();
    Ok(Allocation { upgrades, gain, loss_exponent })
}

/// The exact gain of given upgrades, and the exponent of its unit: what a rule other than the optimum's came to.
///
/// # Panics
/// When a tensor has more upgrades than losses above the floor.
pub fn gain_of(tensors: &[Measured], upgrades: &[u32]) -> (BigInt, u32) {
    let exponent = loss_exponent_of(tensors);
    let gain = |(tensor, &taken): (&Measured, &u32)| gains(tensor, exponent)[taken as usize].clone();
    (tensors.iter().zip(upgrades).map(gain).sum(), exponent)
}

/// Losses that are assumed instead of measured: the tensor's weight energy times 4^-bits, the noise of a uniform
/// quantizer a bit finer each time. What an allocation without probes would have to go by.
pub fn assumed_losses(energy: f64, candidates: &[u32]) -> Vec<f64> {
    candidates.iter().map(|&bits| energy * 0.25f64.powi(bits as i32)).collect()
}

/// Upgrades by count alone: whole experts in the order of their routed rows, most first and the lower id among equals,
/// each taking one upgrade a tensor in the order gate, up, down, until the budget is spent; then another round over all.
/// Canonical order of tensors.
///
/// # Errors
/// A budget beyond `most` upgrades a tensor.
pub fn by_count(rows: &[u64], budget: usize, most: usize) -> Result<Vec<u32>> {
    let tensors = rows.len() * 3;
    if budget > tensors * most {
        return refuse(format!("{budget} upgrades to spend on {tensors} tensors"))
            .wanted(format!("at most {}", tensors * most))
            .err();
    }
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_by_key(|&expert| (std::cmp::Reverse(rows[expert]), expert));
    let turns = order.iter().flat_map(|expert| (0..3).map(move |role| expert * 3 + role)).cycle();
    let mut upgrades = vec![0; tensors];
    turns.take(budget).for_each(|tensor| upgrades[tensor] += 1);
    Ok(upgrades)
}

/// The least exponent at which all losses are integers.
pub(super) fn loss_exponent_of(tensors: &[Measured]) -> u32 {
    tensors.iter().flat_map(|t| &t.losses).map(|&x| fraction_bits(x)).max().unwrap_or(0)
}

/// Integer gain of 0, 1, 2 .. upgrades of a tensor over its first loss, in units of 2^-(149 + exponent).
pub(super) fn gains(tensor: &Measured, exponent: u32) -> Vec<BigInt> {
    let mass = BigInt::from(tensor.mass.clone());
    let floor = scaled(tensor.losses[0], exponent);
    tensor.losses.iter().map(|&loss| &mass * (&floor - scaled(loss, exponent))).collect()
}

/// How many bits after the binary point an f64 needs.
fn fraction_bits(x: f64) -> u32 {
    if x == 0.0 {
        return 0;
    }
    let (mantissa, exponent) = decode(x);
    u32::try_from(-(exponent + mantissa.trailing_zeros() as i32)).unwrap_or(0)
}

/// `x · 2^exponent` as an integer; exact when `exponent >= fraction_bits(x)`.
fn scaled(x: f64, exponent: u32) -> BigInt {
    let (mantissa, power) = decode(x);
    let shift = power + exponent as i32;
    let magnitude = if shift >= 0 {
        BigInt::from(mantissa) << shift as usize
    } else {
        BigInt::from(mantissa) >> (-shift) as usize
    };
    if x.is_sign_negative() { -magnitude } else { magnitude }
}

/// |x| = mantissa · 2^exponent.
fn decode(x: f64) -> (u64, i32) {
    let bits = x.abs().to_bits();
    let (exponent, fraction) = ((bits >> 52) as i32, bits & ((1 << 52) - 1));
    if exponent == 0 { (fraction, -1074) } else { (fraction | 1 << 52, exponent - 1075) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tensor(mass: u64, losses: &[f64]) -> Measured {
        Measured { mass: BigUint::from(mass), losses: losses.to_vec() }
    }

    /// All assignments, the greatest gain; among equals the smallest bits read from the last tensor backwards.
    fn brute_force(tensors: &[Measured], budget: usize) -> (BigInt, Vec<u32>) {
        let exponent = tensors.iter().flat_map(|t| &t.losses).map(|&x| fraction_bits(x)).max().unwrap();
        let gains: Vec<_> = tensors.iter().map(|t| gains(t, exponent)).collect();
        let mut best: Option<(BigInt, Vec<u32>)> = None;
        for code in 0..3usize.pow(tensors.len() as u32) {
            let bits: Vec<u32> =
                (0..tensors.len()).map(|t| (code / 3usize.pow(t as u32) % 3) as u32).collect();
            if bits.iter().sum::<u32>() as usize != budget {
                continue;
            }
            let gain: BigInt = bits.iter().zip(&gains).map(|(&b, g)| g[b as usize].clone()).sum();
            let backwards = |bits: &[u32]| bits.iter().rev().copied().collect::<Vec<_>>();
            let better = best.as_ref().is_none_or(|(known, held)| {
                gain > *known || (gain == *known && backwards(&bits) < backwards(held))
            });
            if better {
                best = Some((gain, bits));
            }
        }
        best.unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        #[test]
        fn it_agrees_with_brute_force(
            // Few distinct values, so that ties are common; losses need not fall with bits.
            cases in prop::collection::vec((0u64..3, prop::array::uniform3(0u8..4)), 1..7),
            share in 0.0f64..=1.0,
        ) {
            let tensors: Vec<_> =
                cases.iter().map(|(mass, l)| tensor(*mass, &l.map(|x| f64::from(x) * 0.1))).collect();
            let budget = (share * 2.0 * tensors.len() as f64) as usize;
            let solved = allocate(&tensors, budget).unwrap();
            let (gain, bits) = brute_force(&tensors, budget);
            prop_assert_eq!(solved.gain, gain);
            prop_assert_eq!(solved.upgrades, bits);
        }
    }

    #[test]
    fn losses_are_exact_dyadic_rationals() {
        for x in [0.1, 1.0, 3.5e-300, f64::from_bits(1), 1e300, 0.0, -0.75] {
            let bits = fraction_bits(x);
            assert_eq!(scaled(x, bits + 3), scaled(x, bits) * 8);
        }
        assert_eq!(scaled(0.75, 2), BigInt::from(3));
    }

    #[test]
    fn the_real_geometry_solves_quickly() {
        let mut seed = 1u64;
        let mut next = || {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 11) as f64 / (1u64 << 53) as f64
        };
        let tensors: Vec<_> = (0..768)
            .map(|_| {
                let loss = next() * 1e-3;
                Measured {
                    mass: BigUint::from((next() * 1e15) as u64) << 130,
                    losses: vec![loss, loss / (3.0 + next()), loss / (12.0 + next())],
                }
            })
            .collect();
        let start = std::time::Instant::now();
        let solved = allocate(&tensors, 384).unwrap();
        assert_eq!(solved.upgrades.iter().sum::<u32>(), 384);
        assert!(start.elapsed().as_secs_f64() < 1.0, "{:?}", start.elapsed());
    }

    #[test]
    fn the_gain_of_the_optimum_is_that_of_its_upgrades() {
        let tensors =
            [tensor(3, &[0.9, 0.3, 0.1]), tensor(5, &[0.7, 0.6, 0.2]), tensor(1, &[1.0, 0.0, 0.25])];
        for budget in 0..=6 {
            let solved = allocate(&tensors, budget).unwrap();
            assert_eq!(gain_of(&tensors, &solved.upgrades), (solved.gain, solved.loss_exponent));
        }
    }

    #[test]
    fn assumed_losses_fall_by_four_a_bit() {
        assert_eq!(assumed_losses(64.0, &[2, 3, 4]), [4.0, 1.0, 0.25]);
        // Of equal masses and energies every tensor gets its first upgrade before any its second.
        let tensors: Vec<_> = (0..4).map(|_| tensor(1, &assumed_losses(1.0, &[3, 4, 5]))).collect();
        assert_eq!(allocate(&tensors, 4).unwrap().upgrades, [1; 4]);
        // An energy, or a mass, of sixteen times as much draws both upgrades to one tensor.
        let tensors =
            [tensor(1, &assumed_losses(1.0, &[3, 4, 5])), tensor(16, &assumed_losses(1.0, &[3, 4, 5]))];
        assert_eq!(allocate(&tensors, 2).unwrap().upgrades, [0, 2]);
    }

    #[test]
    fn counting_serves_whole_experts_by_their_rows() {
        // Most rows first: expert 2, then 0 and 3 by id, then 1.
        let rows = [5, 1, 9, 5];
        assert_eq!(by_count(&rows, 0, 2).unwrap(), [0; 12]);
        assert_eq!(by_count(&rows, 5, 2).unwrap(), [1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0]);
        assert_eq!(by_count(&rows, 12, 2).unwrap(), [1; 12]);
        assert_eq!(by_count(&rows, 14, 2).unwrap(), [1, 1, 1, 1, 1, 1, 2, 2, 1, 1, 1, 1]);
        assert_eq!(by_count(&rows, 24, 2).unwrap(), [2; 12]);
        assert!(by_count(&rows, 25, 2).unwrap_err().to_string().contains("at most 24"));
    }

    #[test]
    fn what_cannot_be_solved_is_refused() {
        assert!(allocate(&[tensor(1, &[1.0, 0.5, 0.2])], 3).unwrap_err().to_string().contains("at most 2"));
        assert!(allocate(&[tensor(1, &[1.0, f64::NAN, 0.2])], 1).unwrap_err().to_string().contains("NaN"));
    }
}
