//! How many tensors a layer's walk encodes: from geometry and recipe alone.
//!
//! A search measures every expert once (the baseline), then up to two bundles of shared vectors at each of two decisions
//! and the chosen bundle on a sample; how many of the four are new is for the data to say. A probe measures every tensor
//! at every candidate width, and again where the bits of its expert changed: how many do is for the data to say too, and
//! is planned for as one follow-up round of half to all experts, as the owner's Round 7 record plans it.

use serde::Serialize;

use crate::choose::probes::encodes_of_an_expert;
use crate::config::choices::ScaleFamily;
use crate::config::{Geometry, Recipe};

/// Tensors of an expert.
pub const TENSORS: u64 = 3;
/// Bundles promoted to full round trips at each of the two shared decisions.
const PROMOTED: u64 = 2;
/// Relative scales that a scale search tries on every sampled tile: seven coarse, six fine.
pub const SCALES_TRIED: u64 = 13;

/// Least and most of a count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Span {
    /// At least.
    pub least: u64,
    /// At most.
    pub most: u64,
}

impl Span {
    /// A count that is known.
    pub fn exactly(count: u64) -> Self {
        Self { least: count, most: count }
    }

    fn plus(self, other: Self) -> Self {
        Self { least: self.least + other.least, most: self.most + other.most }
    }
}

/// One MoE layer's encodes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerCounts {
    /// Routed experts.
    pub experts: u64,
    /// Experts of the search's sample; 0 without a search.
    pub sample: u64,
    /// Full round trips of the search, in tensors.
    pub search: Span,
    /// The first round of probes.
    pub first_probe: u64,
    /// A probe of one expert: the factor of C in the follow-up.
    pub probe_of_an_expert: u64,
    /// Experts whose bits change after the first allocation.
    pub changed: Span,
    /// The follow-up round of probes.
    pub follow_up: Span,
    /// Every round of the cap, each with all experts changed: what a layer spends that then fails closed.
    pub probes_at_the_cap: u64,
    /// The final encode.
    pub final_encode: u64,
    /// All full encodes, the follow-up round included.
    pub all: Span,
    /// Scale searches: each tries 13 scales on `scale_sample_tiles` tiles.
    pub scale_searches: Span,
    /// Test encodes of `sketch_tiles` tiles.
    pub sketches: Span,
    /// Scale searches and sketches, in full encodes of a tensor.
    pub test_encode_equivalents: [f64; 2],
}

/// Bundles of shared vectors that a search measures besides the baseline and the chosen one: signs, scales.
pub fn bundles(recipe: &Recipe) -> [Span; 2] {
    let pairs = u64::from(recipe.draws).min(PROMOTED);
    let families = shared_families(recipe);
    // Draw 0 for both sides is the baseline; with one draw there is nothing else.
    let signs = Span { least: pairs - 1, most: if recipe.draws > 1 { pairs } else { 0 } };
    [signs, Span { least: 0, most: (families * families - 1).min(PROMOTED) }]
}

/// Scale families that a shared side may have: those made of weights alone.
pub fn shared_families(recipe: &Recipe) -> u64 {
    recipe.scale_families.iter().filter(|&&family| family != ScaleFamily::Sensitivity).count() as u64
}

/// Full encodes of a search that measured so many bundles besides the baseline and the chosen one.
pub fn search_encodes(experts: u64, sample: u64, bundles: u64) -> u64 {
    TENSORS * (experts + sample * (bundles + 1))
}

impl LayerCounts {
    /// Counts a layer.
    pub fn of(geometry: &Geometry, recipe: &Recipe) -> Self {
        let experts = geometry.n_routed_experts as u64;
        let sample = if recipe.search { experts.min(recipe.shared_sample_experts as u64) } else { 0 };
        let [signs, scales] = bundles(recipe);
        let both = signs.plus(scales);
        let search = if recipe.search {
            Span {
                least: search_encodes(experts, sample, both.least),
                most: search_encodes(experts, sample, both.most),
            }
        } else {
            Span::default()
        };

        let probed = recipe.fixed_bits.is_none();
        let probe_of_an_expert =
            if probed { encodes_of_an_expert(recipe.candidate_bits.len()) as u64 } else { 0 };
        let first_probe = probe_of_an_expert * experts;
        let again = probed && recipe.fixed_point_iterations > 1;
        let changed =
            if again { Span { least: experts.div_ceil(2), most: experts } } else { Span::default() };
        let follow_up =
            Span { least: probe_of_an_expert * changed.least, most: probe_of_an_expert * changed.most };
        let final_encode = TENSORS * experts;

        // Widths of every tensor in the first round; later rounds keep the scales.
        let mut scale_searches =
            if probed { TENSORS * recipe.candidate_bits.len() as u64 * experts } else { TENSORS * experts };
        let sketches =
            |bundles: u64| if recipe.search { sketches(recipe, experts, sample, bundles) } else { 0 };
        if recipe.search {
            scale_searches += TENSORS * experts;
        }
        let sketches = Span { least: sketches(both.least), most: sketches(both.most) };
        let weights = (geometry.hidden_size * geometry.moe_intermediate_size) as f64;
        let tile = crate::codec::trellis::search::TILE_LEN as f64;
        let equivalents = |sketches: u64| {
            let scales = scale_searches * SCALES_TRIED * recipe.scale_sample_tiles as u64;
            (scales + sketches * recipe.sketch_tiles as u64) as f64 * tile / weights
        };
        let probes = Span::exactly(first_probe).plus(follow_up);
        Self {
            experts,
            sample,
            search,
            first_probe,
            probe_of_an_expert,
            changed,
            follow_up,
            probes_at_the_cap: first_probe * u64::from(recipe.fixed_point_iterations),
            final_encode,
            all: search.plus(probes).plus(Span::exactly(final_encode)),
            scale_searches: Span::exactly(scale_searches),
            sketches,
            test_encode_equivalents: [equivalents(sketches.least), equivalents(sketches.most)],
        }
    }
}

/// Test encodes of a sketch in a search with so many promoted bundles.
fn sketches(recipe: &Recipe, experts: u64, sample: u64, bundles: u64) -> u64 {
    let (draws, families) = (u64::from(recipe.draws), recipe.scale_families.len() as u64);
    let shared = shared_families(recipe);
    // A round trip is held against its prediction, one sketch a tensor.
    let predictions = TENSORS * (experts + sample * (bundles + 1));
    // A candidate of the gate and up side is tried on both.
    let of_the_sample = sample * TENSORS * (draws + shared);
    // Draws of gate and up; families of all three, down's made of weights alone.
    let own = experts * (2 * (draws + families) + shared);
    predictions + of_the_sample + own
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn of(model: &str, choice: &str) -> LayerCounts {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("models").join(model);
        let geometry = Geometry::read(&folder.join("config.json")).unwrap();
        let recipe = Recipe::choose(choice, Some(&folder.join("recipe.json"))).unwrap();
        LayerCounts::of(&geometry, &recipe)
    }

    #[test]
    fn glm52_has_the_counts_of_the_record_and_half_its_final_encodes() {
        let counts = of("glm52", "default");
        assert_eq!(counts.search.most, 1008);
        assert_eq!(counts.first_probe, 3328);
        assert_eq!(counts.probe_of_an_expert, 13);
        assert_eq!(counts.changed, Span { least: 128, most: 256 });
        assert_eq!(counts.final_encode, 768);
        let whole =
            |follow_up: u64, finals: u64| counts.search.most + counts.first_probe + follow_up + finals;
        assert_eq!((whole(counts.follow_up.least, 1536), whole(counts.follow_up.most, 1536)), (7536, 9200));
        assert_eq!(counts.all.most, whole(counts.follow_up.most, 768));
        // 24 tiles of 49152: the samples weigh little on a large tensor, and much on a small one.
        assert!(counts.test_encode_equivalents[1] < 30.0, "{counts:?}");
        assert!(of("tiny", "default").test_encode_equivalents[1] > 100.0);
    }

    #[test]
    fn tiny_has_thirteen_a_expert_and_round_and_its_search_a_span() {
        let counts = of("tiny", "default");
        assert_eq!((counts.first_probe, counts.sample), (13 * 8, 8));
        assert_eq!(counts.search, Span { least: 24 + 24 + 24, most: 24 + 4 * 24 + 24 });
        assert_eq!(counts.probes_at_the_cap, 8 * 13 * 8);
    }

    #[test]
    fn what_a_recipe_leaves_out_is_not_counted() {
        let fast = of("glm52", "fast");
        assert_eq!((fast.search, fast.follow_up, fast.sketches), Default::default());
        assert_eq!((fast.first_probe, fast.all.most), (3328, 3328 + 768));
        let uniform = of("glm52", "uniform-4");
        assert_eq!((uniform.first_probe, uniform.follow_up), (0, Span::default()));
        assert_eq!(uniform.all.most, 1008 + 768);
    }
}
