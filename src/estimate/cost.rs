//! What each stage of a walk computes: amounts of work an expert, a layer, the whole walk.
//!
//! The amounts follow the code of the stages: which products, factors, encodes and files each of them consists of, times
//! how often it is called. Rows are taken as spread evenly over the experts. Not counted: JSON, reading (taken to be
//! cached or overlapped), and threads that wait for the last experts of a stage. Work that one thread does while the
//! others wait is kept apart.

mod experts;
mod forward;
mod parts;

use super::counts::LayerCounts;
use super::size::even_bits;
use super::tokens::Tokens;
use super::work::Work;
use crate::config::{Geometry, Recipe};
use crate::error::Result;

/// Rows of an expert, on average.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rows {
    /// Routed to it, on the fit side.
    pub fit: f64,
    /// Of others, that top them up.
    pub fallback: f64,
    /// That its losses are measured on.
    pub holdout: f64,
}

impl Rows {
    /// The rows of an average expert.
    pub fn of(geometry: &Geometry, recipe: &Recipe, tokens: &Tokens) -> Self {
        let all = tokens.calibrate as f64;
        let routed = all * geometry.num_experts_per_tok as f64 / geometry.n_routed_experts as f64;
        let held_out = 1.0 / recipe.fit_modulus as f64;
        let fit = routed * (1.0 - held_out);
        let others = all * (1.0 - held_out) - fit;
        Self {
            fit,
            fallback: (recipe.min_fit_rows as f64 - fit).clamp(0.0, others.max(0.0)),
            holdout: (routed * held_out).clamp(1.0, recipe.holdout_rows as f64),
        }
    }

    /// Rows that enter covariances.
    pub fn calibrating(&self) -> f64 {
        self.fit + self.fallback
    }
}

/// One stage: what all threads share, and what one does while the others wait.
#[derive(Debug, Clone, PartialEq)]
pub struct StageWork {
    /// The stage's name, as the walk's report has it.
    pub stage: &'static str,
    /// What it consists of, in words.
    pub model: &'static str,
    /// How often it happens.
    pub times: u64,
    /// Shared by all threads, each time.
    pub shared: Work,
    /// On one thread, each time.
    pub alone: Work,
}

/// Which end of the planning range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Fewest bundles, half of the experts changed.
    Least,
    /// Most bundles, all experts changed.
    Most,
}

/// What a walk's stages are made of.
pub struct Model<'a> {
    geometry: &'a Geometry,
    recipe: &'a Recipe,
    tokens: &'a Tokens,
    threads: usize,
    counts: LayerCounts,
    rows: Rows,
    bits: Vec<[u32; 3]>,
    checkpoint_bytes: [u64; 2],
}

impl<'a> Model<'a> {
    /// A model of a walk on so many threads; `checkpoint_bytes` are those of source and carrier (0 where they are one).
    ///
    /// # Errors
    /// As [`Recipe::upgrades`].
    pub fn new(
        geometry: &'a Geometry,
        recipe: &'a Recipe,
        tokens: &'a Tokens,
        threads: usize,
        checkpoint_bytes: [u64; 2],
    ) -> Result<Self> {
        Ok(Self {
            geometry,
            recipe,
            tokens,
            threads,
            counts: LayerCounts::of(geometry, recipe),
            rows: Rows::of(geometry, recipe, tokens),
            bits: even_bits(geometry, recipe)?,
            checkpoint_bytes,
        })
    }

    /// All stages, in the walk's order.
    pub fn stages(&self, end: End) -> Vec<StageWork> {
        let layers = self.geometry.moe_layers().len() as u64;
        let mut stages = vec![self.open(), self.prefix()];
        stages.push(self.capture(layers));
        if self.recipe.search {
            stages.push(self.search(layers, end));
        }
        if self.recipe.fixed_bits.is_none() {
            stages.push(self.probe(layers, end));
            stages.push(self.allocation(layers));
        }
        stages.push(self.finals(layers));
        stages.push(self.emit(layers));
        stages.push(self.audit(layers));
        stages.push(self.forward(layers.saturating_sub(1)));
        if self.tokens.evaluate > 0 {
            stages.push(self.evaluate());
        }
        stages
    }

    fn h(&self) -> f64 {
        self.geometry.hidden_size as f64
    }

    fn i(&self) -> f64 {
        self.geometry.moe_intermediate_size as f64
    }

    /// Weights of a tensor.
    fn w(&self) -> f64 {
        self.h() * self.i()
    }

    fn experts(&self) -> f64 {
        self.counts.experts as f64
    }

    fn sample(&self) -> f64 {
        self.counts.sample as f64
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::work::Op;
    use super::*;

    fn amounts(model: &str, choice: &str, tokens: u64) -> Vec<StageWork> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("models").join(model);
        let geometry = Geometry::read(&folder.join("config.json")).unwrap();
        let recipe = Recipe::choose(choice, Some(&folder.join("recipe.json"))).unwrap();
        let tokens = Tokens::assumed(tokens, &[1024]);
        Model::new(&geometry, &recipe, &tokens, 1, [0, 0]).unwrap().stages(End::Most)
    }

    fn searched(stages: &[StageWork], stage: &str) -> f64 {
        let found = stages.iter().find(|found| found.stage == stage).unwrap();
        let widths = found.shared.amounts().filter(|(op, _)| matches!(op, Op::Search(_)));
        widths.map(|(_, amount)| amount).sum()
    }

    #[test]
    fn searched_weights_are_those_of_the_counted_encodes() {
        let stages = amounts("glm52", "default", 1_000_000);
        let w = 6144.0 * 2048.0;
        assert_eq!(searched(&stages, "final encode"), 768.0 * w);
        // Sketches and scale searches come on top; all of them, over search and probe, are the counted equivalents.
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/glm52");
        let geometry = Geometry::read(&folder.join("config.json")).unwrap();
        let counts = LayerCounts::of(&geometry, &Recipe::built_in().unwrap());
        let on_top = searched(&stages, "search") + searched(&stages, "probe") - (1008.0 + 2.0 * 3328.0) * w;
        assert!((on_top / w - counts.test_encode_equivalents[1]).abs() < 1e-6, "{}", on_top / w);
    }

    #[test]
    fn stages_follow_the_recipe() {
        let names = |choice: &str| -> Vec<&str> {
            amounts("tiny", choice, 30_000).iter().map(|stage| stage.stage).collect()
        };
        assert_eq!(
            names("default"),
            [
                "open",
                "prefix",
                "capture",
                "search",
                "probe",
                "allocation",
                "final encode",
                "emit",
                "audit",
                "forward"
            ]
        );
        assert!(!names("fast").contains(&"search"));
        assert!(!names("uniform-3").contains(&"probe"));
    }

    #[test]
    fn cold_experts_are_topped_up_and_holdout_is_capped() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/glm52");
        let geometry = Geometry::read(&folder.join("config.json")).unwrap();
        let recipe = Recipe::built_in().unwrap();
        let rows = |tokens: u64| Rows::of(&geometry, &recipe, &Tokens::assumed(tokens, &[1024]));
        let few = rows(3200);
        assert_eq!((few.fit, few.fallback, few.holdout), (80.0, 944.0, 20.0));
        let many = rows(1_024_000);
        assert_eq!((many.fit, many.fallback, many.holdout), (25_600.0, 0.0, 4096.0));
    }
}
