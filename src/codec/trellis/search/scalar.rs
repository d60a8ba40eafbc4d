//! The reference search: portable, safe, and the definition the kernels are held to.
//!
//! Costs are f16 numbers held in f32. Rounding is done in integers and f32, and is exact:
//!
//! - `c - w` of two f16, rounded to f32 and then to f16, is the correctly rounded difference (24 >= 2 * 11 + 2 bits).
//!   Only its top 11 bits are kept; a difference below 2^-14 is a multiple of 2^-24 and needs no rounding. One from 65520
//!   on is kept finite instead of infinite: its square is infinite as an f16 cost all the same.
//! - `d * d` is exact in f32. The sum with a cost is rounded to f32 (monotone), the least over `k` is taken, and that is
//!   rounded to f16. This equals the least of the f16 costs unless the f32 value is the midpoint of two f16: then the
//!   output is computed again through f64.
//!
//! There are no back-pointers: the cost rows are kept, and the choice is made again along the one path that is traced.
//! Tests hold all this to the definition written with [`super::super::f16`] alone.

use super::super::codebook::{Codebook, STATES};
use super::super::{f16 as exact, pack};
use super::{PASS_ONE_START, States, TILE_LEN, Tile, TileSearch, check};
use crate::error::{Result, refuse};
use half::f16;
use std::cell::RefCell;

/// The portable engine: all codebooks, 1 to 8 bits.
#[derive(Debug, Clone, Copy)]
pub struct Scalar;

impl TileSearch for Scalar {
    fn name(&self) -> &'static str {
        "scalar"
    }

    fn search(&self, codebook: Codebook, bits: u32, targets: &[Tile], states: &mut [States]) -> Result<()> {
        search_with(portable, codebook, bits, targets, states)
    }
}

/// The search with a given step.
pub(super) fn search_with(
    step: fn(u32) -> Step,
    codebook: Codebook,
    bits: u32,
    targets: &[Tile],
    states: &mut [States],
) -> Result<()> {
    check(bits, targets, states.len())?;
    for (target, states) in targets.iter().zip(states) {
        with_trellis(step(bits), codebook, bits, target, |trellis| {
            let boundary = trellis.pass_one();
            trellis.pass_two(boundary, states);
        });
    }
    Ok(())
}

/// Pass two alone: the best sequence whose state at position 255 is `boundary` modulo `2^(16 - bits)`.
///
/// # Errors
/// As [`TileSearch::search`]; refuses a boundary that is not below `2^(16 - bits)`.
pub fn search_given_boundary(
    codebook: Codebook,
    bits: u32,
    target: &Tile,
    boundary: u16,
    states: &mut States,
) -> Result<()> {
    check(bits, std::slice::from_ref(target), 1)?;
    if usize::from(boundary) >= STATES >> bits {
        return refuse(format!("boundary {boundary} at {bits} bits"))
            .wanted(format!("a number below {}", STATES >> bits))
            .err();
    }
    with_trellis(portable(bits), codebook, bits, target, |trellis| trellis.pass_two(boundary, states));
    Ok(())
}

/// One tile at work.
struct Trellis<'a> {
    step: Step,
    values: &'a [f32; STATES],
    bits: u32,
    /// The target, rounded to f16.
    target: [f16; TILE_LEN],
    /// Cost rows of `2^(16 - bits)` out-states each. In pass two, row `i` is the costs before position `i`.
    rows: &'a mut [f32],
}

fn with_trellis<R>(
    step: Step,
    codebook: Codebook,
    bits: u32,
    target: &Tile,
    run: impl FnOnce(&mut Trellis) -> R,
) -> R {
    thread_local!(static ROWS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) });
    ROWS.with_borrow_mut(|rows| {
        let needed = TILE_LEN * (STATES >> bits);
        if rows.len() < needed {
            rows.resize(needed, 0.0);
        }
        let target = target.map(f16::from_f32);
        run(&mut Trellis { step, values: codebook.values(), bits, target, rows: &mut rows[..needed] })
    })
}

impl Trellis<'_> {
    fn row_len(&self) -> usize {
        STATES >> self.bits
    }

    fn row(&mut self, row: usize) -> &mut [f32] {
        let length = self.row_len();
        &mut self.rows[row * length..][..length]
    }

    /// Row `to` from row `from`, over the weight at `position`.
    fn step(&mut self, position: usize, from: usize, to: usize) {
        let length = self.row_len();
        let [before, after] = self
            .rows
            .get_disjoint_mut([from * length..(from + 1) * length, to * length..(to + 1) * length])
            .expect("two different rows");
        (self.step)(self.values, self.target[position].to_f32(), before, after);
    }

    /// The out-state at the boundary between positions 255 and 0.
    fn pass_one(&mut self) -> u16 {
        // Rows before the boundary are not traced: two take turns. Row 2 is the one before position 0.
        self.row(0).fill(0.0);
        for i in 0..PASS_ONE_START {
            let to = if i + 1 == PASS_ONE_START { 2 } else { (i + 1) % 2 };
            self.step(PASS_ONE_START + i, i % 2, to);
        }
        for position in 0..PASS_ONE_START {
            self.step(position, position + 2, position + 3);
        }
        let ends = self.row(PASS_ONE_START + 2);
        let mut end = 0;
        for (e, cost) in ends.iter().enumerate() {
            if *cost < ends[end] {
                end = e;
            }
        }
        (0..PASS_ONE_START)
            .rev()
            .fold(end as u16, |end, position| self.best(position, position + 2, end) >> self.bits)
    }

    fn pass_two(&mut self, boundary: u16, states: &mut States) {
        self.row(0).fill(f32::INFINITY);
        self.row(0)[usize::from(boundary)] = 0.0;
        for position in 0..TILE_LEN - 1 {
            self.step(position, position, position + 1);
        }
        let mut end = boundary;
        for position in (0..TILE_LEN).rev() {
            states[position] = self.best(position, position, end);
            end = states[position] >> self.bits;
        }
        if end != boundary {
            pack::close(states, self.bits);
        }
    }

    /// The cheapest state at `position` into out-state `end`, given the row of costs before it.
    fn best(&self, position: usize, row: usize, end: u16) -> u16 {
        let costs = &self.rows[row * self.row_len()..][..self.row_len()];
        let target = self.target[position].to_f32();
        let mut best = (end, f32::INFINITY);
        for k in 0..1u32 << self.bits {
            let state = (k << (16 - self.bits)) as u16 | end;
            let square = squared_difference(self.values[usize::from(state)], target);
            let before = costs[usize::from(state >> self.bits)];
            let cost = match round_cost(square + before) {
                (_, true) => exact::round(f64::from(square) + f64::from(before)).to_f32(),
                (cost, false) => cost,
            };
            if cost < best.1 {
                best = (state, cost);
            }
        }
        best.0
    }
}

/// One position at a bit width: `after[e]` = the least of `fma_f16(d, d, before[s >> bits])` over the states `s` into `e`.
pub(super) type Step = fn(values: &[f32; STATES], target: f32, before: &[f32], after: &mut [f32]);

/// The portable step of a bit width.
fn portable(bits: u32) -> Step {
    match bits {
        1 => step::<1, 8>,
        2 => step::<2, 4>,
        3 => step::<3, 2>,
        4 => step::<4, 1>,
        5 => step::<5, 1>,
        6 => step::<6, 1>,
        7 => step::<7, 1>,
        _ => step::<8, 1>,
    }
}

/// Out-states at a time: enough for vectors of any machine, few enough for registers; their values fill a cache line.
const LANES: usize = 16;

/// [`Step`] at `B` bits, where `G` groups make up the lanes. Out-states that differ only in the last symbol are a group:
/// they come from the same `2^B` costs. Inlined into the engines that compile it for larger vectors.
#[inline(always)]
pub(super) fn step<const B: u32, const G: usize>(
    values: &[f32; STATES],
    target: f32,
    before: &[f32],
    after: &mut [f32],
) {
    const { assert!(G == if B < 4 { LANES >> B } else { 1 }) };
    let length = STATES >> B;
    let (before, after) = (&before[..length], &mut after[..length]);
    for (i, after) in after.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
        let mut least = [f32::INFINITY; LANES];
        for first in (i * LANES..STATES).step_by(length) {
            let values = lanes::<LANES>(values, first);
            let costs = lanes::<G>(before, first >> B);
            let cost: [f32; LANES] = std::array::from_fn(|lane| costs[lane * G / LANES]);
            for lane in 0..LANES {
                let sum = squared_difference(values[lane], target) + cost[lane];
                least[lane] = if sum < least[lane] { sum } else { least[lane] };
            }
        }
        let mut ties = false;
        for lane in 0..LANES {
            let (rounded, tie) = round_cost(least[lane]);
            after[lane] = rounded;
            ties |= tie;
        }
        if ties {
            for lane in 0..LANES {
                if round_cost(least[lane]).1 {
                    after[lane] = least_cost(B, values, target, before, i * LANES + lane);
                }
            }
        }
    }
}

#[inline(always)]
fn lanes<const N: usize>(slice: &[f32], first: usize) -> &[f32; N] {
    slice[first..].first_chunk().expect("rows are a multiple of the lanes")
}

/// The cost of one out-state, where [`step`] cannot tell.
#[cold]
#[inline(never)]
fn least_cost(bits: u32, values: &[f32; STATES], target: f32, before: &[f32], end: usize) -> f32 {
    let sums = (end..STATES)
        .step_by(STATES >> bits)
        .map(|state| f64::from(squared_difference(values[state], target)) + f64::from(before[state >> bits]));
    exact::round(sums.fold(f64::INFINITY, f64::min)).to_f32()
}

/// The square of `f16(value - target)`, exact; see the module on differences from 65520 on.
#[inline(always)]
fn squared_difference(value: f32, target: f32) -> f32 {
    let bits = (value - target).to_bits();
    let d = f32::from_bits((bits + 0xfff + (bits >> 13 & 1)) & !0x1fff);
    d * d
}

/// A cost in f32 rounded to f16, and whether it was the midpoint of two.
#[inline(always)]
fn round_cost(cost: f32) -> (f32, bool) {
    let bits = cost.to_bits();
    let normal = f32::from_bits((bits + 0xfff + (bits >> 13 & 1)) & !0x1fff);
    let normal = if cost >= 65520.0 { f32::INFINITY } else { normal };
    // Below 2^-14 f16 numbers are multiples of 2^-24, the spacing of f32 just above one half.
    let small = (cost + 0.5) - 0.5;
    if cost < 6.103_515_6e-5 {
        (small, (cost - small).abs() == 2.980_232_2e-8)
    } else {
        (normal, bits & 0x1fff == 0x1000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(seed: &mut u64) -> u64 {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *seed >> 11
    }

    #[test]
    fn constants_are_the_powers_of_two_they_stand_for() {
        assert_eq!(6.103_515_6e-5f32, 2f32.powi(-14));
        assert_eq!(2.980_232_2e-8f32, 2f32.powi(-25));
    }

    #[test]
    fn differences_are_those_of_f16() {
        // Every codebook value against every target would be 4 billion; every target against one value in 1021 is not.
        for codebook in Codebook::ALL {
            for value in codebook.values().iter().step_by(1021).copied() {
                for bits in 0..=u16::MAX {
                    let target = f16::from_bits(bits);
                    if target.is_nan() {
                        continue;
                    }
                    let d = exact::sub(f16::from_f32(value), target).to_f32();
                    let shortcut = squared_difference(value, target.to_f32());
                    assert!(
                        shortcut == d * d || (shortcut >= 65520.0 && d * d >= 65520.0),
                        "{value} - {target}: {shortcut} for {}",
                        d * d
                    );
                }
            }
        }
    }

    #[test]
    fn costs_round_as_f16_unless_they_say_they_are_ties() {
        // Every f16, every midpoint, and the f32 numbers next to them.
        let check = |cost: f32| assert_eq!(round_cost(cost).0, f16::from_f32(cost).to_f32(), "{cost:e}");
        for bits in 0..0x7c00u16 {
            let low = f16::from_bits(bits).to_f32();
            let high = if bits == 0x7bff { 65536.0 } else { f16::from_bits(bits + 1).to_f32() };
            let mid = (low + high) / 2.0;
            [low, mid, mid.next_down(), mid.next_up()].into_iter().for_each(check);
            assert!(round_cost(mid).1 || bits == 0x7bff, "{mid:e} is a midpoint");
        }
        check(f32::INFINITY);
    }

    #[test]
    fn a_step_is_that_of_the_f64_oracle() {
        // Cost rows of many sizes, so that squares and costs meet at every distance of their exponents.
        let mut seed = 1;
        let (mut before, mut after) = (vec![0.0; STATES >> 3], vec![0.0; STATES >> 3]);
        for (round, target) in [0.0, 0.7, -3.25, 1.0e-6, 40.0, -254.0, 256.0, 60000.0].into_iter().enumerate()
        {
            for cost in &mut before {
                let bits = (next(&mut seed) % 0x7c01) as u16;
                *cost = match round % 2 {
                    0 => f16::from_bits(bits).to_f32(),
                    _ => f16::from_bits(0x3000 | bits & 0xfff).to_f32(),
                };
            }
            let target = f16::from_f32(target);
            let values = Codebook::Mcg.values();
            portable(3)(values, target.to_f32(), &before, &mut after);
            for (e, after) in after.iter().enumerate() {
                let costs = (0..8).map(|k| {
                    let s = k << 13 | e;
                    let d = exact::sub(f16::from_f32(values[s]), target);
                    exact::fma(d, d, f16::from_f32(before[s >> 3]))
                });
                let least = costs.fold(f16::INFINITY, |least, cost| if cost < least { cost } else { least });
                assert_eq!(*after, least.to_f32(), "target {target}, out-state {e}");
            }
        }
    }
}
