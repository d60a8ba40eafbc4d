//! The plain search: tables of nibbles and octads, then every word. The reference for every other engine.

use super::trio::TRIO;
use super::{Block, Coset, Costs, PointSearch, Region};

/// The engine.
pub struct Scalar;

impl PointSearch for Scalar {
    fn name(&self) -> &'static str {
        "scalar"
    }

    fn coset(&self, region: Region, target: &Block, weight: &Block, bound: f32) -> Option<Coset> {
        let mut best: Option<Coset> = None;
        for odd in [false, true] {
            let octads = octad_costs(region, odd, target, weight);
            for (r, words) in TRIO.word.iter().enumerate() {
                for (i, words) in words.iter().enumerate() {
                    for (t, words) in words.iter().enumerate() {
                        for (j, &word) in words.iter().enumerate() {
                            let [first, second, third] = [(0, i), (1, j), (2, i ^ j ^ (t * TRIO.ones))]
                                .map(|(g, label)| octads[g][r][label]);
                            let cost = first.join(&second).total(&third, usize::from(odd));
                            let known =
                                best.map_or((bound, false, 0), |best| (best.cost, best.odd, best.word));
                            let better = cost < known.0
                                || (best.is_some() && cost == known.0 && (odd, word) < (known.1, known.2));
                            if better {
                                best = Some(Coset { odd, word, cost });
                            }
                        }
                    }
                }
            }
        }
        best
    }
}

/// What every pattern that occurs within an octad costs: by octad, coset and label.
fn octad_costs(region: Region, odd: bool, target: &Block, weight: &Block) -> [[[Costs; 16]; 8]; 3] {
    let coordinate = |position: usize, bit: u32| {
        let i = TRIO.order[position];
        Costs::of(region, odd, bit, target[i], weight[i])
    };
    let nibbles: [[Costs; 16]; 6] = std::array::from_fn(|nibble| {
        std::array::from_fn(|bits| {
            let [a, b, c, d] = [0, 1, 2, 3].map(|q| coordinate(4 * nibble + q, (bits >> q & 1) as u32));
            a.join(&b).join(&c.join(&d))
        })
    });
    std::array::from_fn(|g| {
        TRIO.pattern[g].map(|patterns| {
            patterns.map(|pattern| {
                nibbles[2 * g][usize::from(pattern & 15)].join(&nibbles[2 * g + 1][usize::from(pattern >> 4)])
            })
        })
    })
}
