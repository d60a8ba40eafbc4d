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

/// The search on some lanes; inlined into a function that has their instructions. For that to come about, lanes are held
/// in plain loops throughout: a library function that takes a closure would be compiled without those instructions.
#[inline(always)]
pub fn search<L: Lanes>(region: Region, target: &Block, weight: &Block, bound: f32) -> Option<Coset> {
    let leaves = leaves::<L>(region, target, weight);
    let mut best = Best { cost: bound, odd: false, word: u16::MAX };
    // The parity that promises less goes first: what it finds may spare the other.
    let least = [least_sum::<L>(&leaves[0]), least_sum::<L>(&leaves[1])];
    let first = usize::from(least[1] < least[0]);
    for odd in [first, 1 - first] {
        if least[odd] <= best.cost {
            parity::<L>(odd == 1, &leaves[odd], &mut best);
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
    let (mut ordered, mut weights) = ([[0.0; 16]; 2], [[0.0; 16]; 2]);
    for (p, &i) in TRIO.order.iter().enumerate() {
        (ordered[p / 16][p % 16], weights[p / 16][p % 16]) = (target[i], weight[i]);
    }
    let mut leaves = [[[[0.0; 32]; 4]; 2]; 2];
    for half in 0..2 {
        let (y, w) = (L::load(&ordered[half]), L::load(&weights[half]));
        for (odd, leaves) in leaves.iter_mut().enumerate() {
            for (bit, leaves) in leaves.iter_mut().enumerate() {
                let costs = leaf(region, odd == 1, bit as u32, y, w);
                for kind in 0..4 {
                    costs[kind].store(&mut leaves[kind].as_chunks_mut().0[half]);
                }
            }
        }
    }
    leaves
}

/// w (y - x)² of one x.
#[inline(always)]
fn square<L: Lanes>(y: L, w: L, x: i32) -> L {
    let d = y.sub(L::splat(x as f32));
    w.mul(d.mul(d))
}

/// The least of some z.
#[inline(always)]
fn least_of<L: Lanes>(values: &[i32], (odd, bit): (bool, u32), y: L, w: L) -> L {
    let mut least = square(y, w, coordinate(odd, bit, values[0]));
    for &z in &values[1..] {
        least = least.min(square(y, w, coordinate(odd, bit, z)));
    }
    least
}

/// The nearest x of a class and a parity of z in the whole lattice.
#[inline(always)]
fn nearest<L: Lanes>((odd, bit): (bool, u32), parity: i32, y: L, w: L) -> L {
    let apart = y.sub(L::splat(coordinate(odd, bit, parity) as f32)).mul(L::splat(0.125));
    let d = apart.sub(apart.round()).mul(L::splat(8.0));
    w.mul(d.mul(d))
}

#[inline(always)]
fn leaf<L: Lanes>(region: Region, odd: bool, bit: u32, y: L, w: L) -> Costs16<L> {
    let class = (odd, bit);
    let Some(values) = region.values() else {
        let (even, odd) = (nearest(class, 0, y, w), nearest(class, 1, y, w));
        return [even, odd, even, odd];
    };
    let even = least_of(values.inside[0], class, y, w);
    let odd = least_of(values.inside[1], class, y, w);
    let even_outside = least_of(values.outside[0], class, y, w);
    let odd_outside = least_of(values.outside[1], class, y, w);
    [even, odd, even.min(even_outside), odd.min(odd_outside)]
}

/// No point of a parity costs less: every coordinate at its best. Summed in another order than the costs are, and so made
/// smaller by more than rounding can come to.
#[inline(always)]
fn least_sum<L: Lanes>(leaves: &Leaves) -> f32 {
    let mut sum = L::splat(0.0);
    for half in 0..2 {
        let mut least = L::splat(f32::INFINITY);
        for bit in leaves {
            least = least.min(L::load(&bit[2].as_chunks().0[half]));
            least = least.min(L::load(&bit[3].as_chunks().0[half]));
        }
        sum = sum.add(least);
    }
    let mut lanes = [0.0; 16];
    sum.store(&mut lanes);
    lanes.iter().sum::<f32>() * (1.0 - 1e-5)
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

/// One coordinate in 16 patterns of a nibble, of which it is bit q.
#[inline(always)]
fn spread<L: Lanes>(leaves: &Leaves, position: usize, q: usize) -> Costs16<L> {
    let mut costs = [L::splat(0.0); 4];
    for kind in 0..4 {
        let (zero, one) = (L::splat(leaves[0][kind][position]), L::splat(leaves[1][kind][position]));
        costs[kind] = L::choose(LANES_WITH_BIT[q], zero, one);
    }
    costs
}

/// A nibble's 16 patterns.
#[inline(always)]
fn nibble<L: Lanes>(leaves: &Leaves, nibble: usize) -> Costs16<L> {
    let at = 4 * nibble;
    let low = join(&spread::<L>(leaves, at, 0), &spread(leaves, at + 1, 1));
    let high = join(&spread::<L>(leaves, at + 2, 2), &spread(leaves, at + 3, 3));
    join(&low, &high)
}

/// The patterns of an octad: 16 labels by coset.
#[inline(always)]
fn octad<L: Lanes>(leaves: &Leaves, g: usize) -> [Costs16<L>; 8] {
    let (low, high) = (nibble::<L>(leaves, 2 * g), nibble::<L>(leaves, 2 * g + 1));
    let mut octad = [[L::splat(0.0); 4]; 8];
    for (r, coset) in octad.iter_mut().enumerate() {
        let (mut a, mut b) = (low, high);
        for kind in 0..4 {
            a[kind] = low[kind].permute(&NIBBLES.low[g][r]);
            b[kind] = high[kind].permute(&NIBBLES.high[g][r]);
        }
        *coset = join(&a, &b);
    }
    octad
}

/// All words of a parity that may cost as little as the best.
#[inline(always)]
fn parity<L: Lanes>(odd: bool, leaves: &Leaves, best: &mut Best) {
    let octads = [octad::<L>(leaves, 0), octad::<L>(leaves, 1), octad::<L>(leaves, 2)];
    // No word of row i (the lane) of a coset costs less than this.
    let mut bounds = [[0.0; 16]; 8];
    let mut least = [0.0; 8];
    let mut first = 0;
    for r in 0..8 {
        let mut sum = octads[0][r][2].min(octads[0][r][3]);
        for octad in &octads[1..] {
            sum = sum.add(L::splat(octad[r][2].min(octad[r][3]).least()));
        }
        sum.store(&mut bounds[r]);
        least[r] = sum.least();
        if least[r] < least[first] {
            first = r;
        }
    }
    // The cheapest coset first: its words set the bound for the others. A loop over 0..8 here would have LLVM 22 look for a
    // checksum in it for minutes (HashRecognize).
    let mut left = 0xFFu32;
    let mut next = first;
    while left != 0 {
        let r = next;
        left &= !(1 << r);
        next = left.trailing_zeros() as usize;
        if least[r] > best.cost {
            continue;
        }
        let mut rows = L::load(&bounds[r]).at_most(L::splat(best.cost));
        let mut first = [[0.0; 16]; 4];
        for kind in 0..4 {
            octads[0][r][kind].store(&mut first[kind]);
        }
        while rows != 0 {
            let i = rows.trailing_zeros() as usize;
            rows &= rows - 1;
            if bounds[r][i] <= best.cost {
                let [a, b, c, d] = first;
                let first = [L::splat(a[i]), L::splat(b[i]), L::splat(c[i]), L::splat(d[i])];
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
        let mut other = *third;
        for costs in &mut other {
            *costs = costs.exchange(i ^ (t * TRIO.ones));
        }
        let costs = total(&two, &other, usize::from(odd));
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
