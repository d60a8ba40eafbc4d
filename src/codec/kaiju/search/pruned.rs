//! The search as fast as a core goes: tables in lanes of 16, and only the words that may win.
//!
//! A word costs at least the sum of what its three octads cost with any parity each, and f32 sums in the same order keep
//! that order; so a row of words whose least such sum exceeds the best cost known is passed over. Rows are visited
//! cheapest bound first.

use std::sync::LazyLock;

use super::lanes::{Lanes, Plain};
use super::trio::TRIO;
use super::{Block, Coset, PointSearch, Region};
use crate::codec::kaiju::golay::LENGTH;
use crate::codec::kaiju::leech::coordinate;

/// The engine on plain arrays.
pub struct Pruned;

impl PointSearch for Pruned {
    fn name(&self) -> &'static str {
        "pruned"
    }

    fn coset(&self, region: Region, target: &Block, weight: &Block, bound: f32) -> Option<Coset> {
        search::<Plain>(region, target, weight, bound)
    }
}

/// [`Costs`](super::Costs) of 16 sets of coordinates: inside of the box by parity, then at most one outside by parity.
type Costs16<L> = [L; 4];

/// Where an octad's nibbles are to be found in the tables of nibbles, by octad and coset.
struct Nibbles {
    low: [[[u32; 16]; 8]; 3],
    high: [[[u32; 16]; 8]; 3],
}

static NIBBLES: LazyLock<Nibbles> = LazyLock::new(|| Nibbles {
    low: TRIO.pattern.map(|octad| octad.map(|coset| coset.map(|pattern| u32::from(pattern & 15)))),
    high: TRIO.pattern.map(|octad| octad.map(|coset| coset.map(|pattern| u32::from(pattern >> 4)))),
});

/// Bits of the lanes whose number has bit q set.
const LANES_WITH_BIT: [u16; 4] = [0xAAAA, 0xCCCC, 0xF0F0, 0xFF00];

/// The search on some lanes; inlined into a function that has their instructions.
#[inline(always)]
pub fn search<L: Lanes>(region: Region, target: &Block, weight: &Block, bound: f32) -> Option<Coset> {
    let leaves = leaves::<L>(region, target, weight);
    let mut best = Best { cost: bound, odd: false, word: u16::MAX };
    let octads = [octads::<L>(&leaves[0]), octads::<L>(&leaves[1])];
    let parity = [Parity::new(&octads[0]), Parity::new(&octads[1])];

    // The cheapest row first: its words set the bound for the others.
    let mut first = (f32::INFINITY, 0, 0);
    for (odd, parity) in parity.iter().enumerate() {
        for r in 0..8 {
            let least = parity.bounds(r).least();
            if least < first.0 {
                first = (least, odd, r);
            }
        }
    }
    let (_, odd, r) = first;
    parity[odd].coset(odd == 1, r, &octads[odd], &mut best);
    for other in 0..16 {
        if other != odd * 8 + r {
            parity[other / 8].coset(other >= 8, other % 8, &octads[other / 8], &mut best);
        }
    }
    (best.word != u16::MAX).then_some(Coset { odd: best.odd, word: best.word, cost: best.cost })
}

struct Best {
    cost: f32,
    odd: bool,
    word: u16,
}

/// What single coordinates cost: by bit of the word and kind of [`Costs16`], in the order of the trio.
type Leaves = [[[f32; 32]; 4]; 2];

/// Both parities' leaves.
#[inline(always)]
fn leaves<L: Lanes>(region: Region, target: &Block, weight: &Block) -> [Leaves; 2] {
    let (mut ordered, mut weights) = ([0.0; 32], [0.0; 32]);
    for (p, &i) in TRIO.order.iter().enumerate() {
        (ordered[p], weights[p]) = (target[i], weight[i]);
    }
    let mut leaves = [[[[0.0; 32]; 4]; 2]; 2];
    for half in 0..2 {
        let range = 16 * half..16 * half + 16;
        let y = L::load(ordered[range.clone()].try_into().expect("16 lanes"));
        let w = L::load(weights[range.clone()].try_into().expect("16 lanes"));
        for (odd, leaves) in leaves.iter_mut().enumerate() {
            for (bit, leaves) in leaves.iter_mut().enumerate() {
                let costs = leaf(region, odd == 1, bit as u32, y, w);
                for (leaf, cost) in leaves.iter_mut().zip(costs) {
                    cost.store((&mut leaf[range.clone()]).try_into().expect("16 lanes"));
                }
            }
        }
    }
    leaves
}

#[inline(always)]
fn leaf<L: Lanes>(region: Region, odd: bool, bit: u32, y: L, w: L) -> Costs16<L> {
    let square = |d: L| w.mul(d.mul(d));
    let Some(values) = region.values() else {
        let nearest = |parity: i32| {
            let apart = y.sub(L::splat(coordinate(odd, bit, parity) as f32)).mul(L::splat(0.125));
            square(apart.sub(apart.round()).mul(L::splat(8.0)))
        };
        let (even, odd) = (nearest(0), nearest(1));
        return [even, odd, even, odd];
    };
    let least = |values: &[i32]| {
        let cost = |z: i32| square(y.sub(L::splat(coordinate(odd, bit, z) as f32)));
        values[1..].iter().fold(cost(values[0]), |least, &z| least.min(cost(z)))
    };
    let [even, odd] = values.inside.map(least);
    let [even_outside, odd_outside] = values.outside.map(least);
    [even, odd, even.min(even_outside), odd.min(odd_outside)]
}

/// [`Costs::join`](super::Costs::join), 16 times.
#[inline(always)]
fn join<L: Lanes>(a: &Costs16<L>, b: &Costs16<L>) -> Costs16<L> {
    let even = a[0].add(b[0]).min(a[1].add(b[1]));
    let odd = a[0].add(b[1]).min(a[1].add(b[0]));
    [even, odd, total(a, b, 0), total(a, b, 1)]
}

/// [`Costs::total`](super::Costs::total), 16 times.
#[inline(always)]
fn total<L: Lanes>(a: &Costs16<L>, b: &Costs16<L>, parity: usize) -> L {
    let even = a[0].add(b[2 + parity]).min(a[2].add(b[parity]));
    let odd = a[1].add(b[3 - parity]).min(a[3].add(b[1 - parity]));
    even.min(odd)
}

/// A parity's octads: by octad and coset, 16 labels.
type Octads<L> = [[Costs16<L>; 8]; 3];

#[inline(always)]
fn octads<L: Lanes>(leaves: &Leaves) -> Octads<L> {
    let nibble = |nibble: usize| {
        let coordinate = |q: usize| -> Costs16<L> {
            std::array::from_fn(|kind| {
                let [zero, one] = [0, 1].map(|bit| L::splat(leaves[bit][kind][4 * nibble + q]));
                L::choose(LANES_WITH_BIT[q], zero, one)
            })
        };
        join(&join(&coordinate(0), &coordinate(1)), &join(&coordinate(2), &coordinate(3)))
    };
    std::array::from_fn(|g| {
        let (low, high) = (nibble(2 * g), nibble(2 * g + 1));
        std::array::from_fn(|r| {
            let low = low.map(|costs| costs.permute(&NIBBLES.low[g][r]));
            let high = high.map(|costs| costs.permute(&NIBBLES.high[g][r]));
            join(&low, &high)
        })
    })
}

/// Bounds of a parity's rows.
struct Parity<L> {
    /// The least of octad 0 by label, with any parity, by coset.
    first: [L; 8],
    /// The least of octads 1 and 2 over all labels, by coset.
    others: [[f32; 2]; 8],
}

impl<L: Lanes> Parity<L> {
    #[inline(always)]
    fn new(octads: &Octads<L>) -> Self {
        let least = |costs: &Costs16<L>| costs[2].min(costs[3]);
        Self {
            first: std::array::from_fn(|r| least(&octads[0][r])),
            others: std::array::from_fn(|r| [1, 2].map(|g: usize| least(&octads[g][r]).least())),
        }
    }

    /// No word of row i (the lane) of a coset costs less.
    #[inline(always)]
    fn bounds(&self, r: usize) -> L {
        let [second, third] = self.others[r];
        self.first[r].add(L::splat(second)).add(L::splat(third))
    }

    /// All words of a coset that may cost as little as the best.
    #[inline(always)]
    fn coset(&self, odd: bool, r: usize, octads: &Octads<L>, best: &mut Best) {
        let bounds = self.bounds(r);
        let mut rows = bounds.at_most(L::splat(best.cost));
        if rows == 0 {
            return;
        }
        let mut bound_of = [0.0; 16];
        bounds.store(&mut bound_of);
        let mut first = [[0.0; 16]; 4];
        for (values, costs) in first.iter_mut().zip(&octads[0][r]) {
            costs.store(values);
        }
        while rows != 0 {
            let i = rows.trailing_zeros() as usize;
            rows &= rows - 1;
            if bound_of[i] <= best.cost {
                let first = [0, 1, 2, 3].map(|kind: usize| L::splat(first[kind][i]));
                row(odd, (r, i), &first, (&octads[1][r], &octads[2][r]), best);
            }
        }
    }
}

/// The 32 words of a row.
#[inline(always)]
fn row<L: Lanes>(
    odd: bool,
    (r, i): (usize, usize),
    first: &Costs16<L>,
    (second, third): (&Costs16<L>, &Costs16<L>),
    best: &mut Best,
) {
    let two = join(first, second);
    for t in 0..2 {
        let third = third.map(|costs| costs.exchange(i ^ (t * TRIO.ones)));
        let costs = total(&two, &third, usize::from(odd));
        let mut found = costs.at_most(L::splat(best.cost));
        if found == 0 {
            continue;
        }
        let mut cost_of = [0.0; 16];
        costs.store(&mut cost_of);
        while found != 0 {
            let j = found.trailing_zeros() as usize;
            found &= found - 1;
            let (cost, word) = (cost_of[j], TRIO.word[r][i][t][j]);
            let ties = best.word != u16::MAX && cost == best.cost && (odd, word) < (best.odd, best.word);
            if cost < best.cost || ties {
                *best = Best { cost, odd, word };
            }
        }
    }
}

/// Coordinates padded to whole lanes.
const _: () = assert!(LENGTH <= 32);
