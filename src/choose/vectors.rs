//! Rotation vectors of a layer: seeded signs times scale factors, shared where the format shares them.
//!
//! Gate and up of all experts share one `suh[H]`, down of all experts one `svh[H]`; each tensor owns the vector of its
//! intermediate side. Every `suh` carries the codec's input normalisation. Seeds name recipe version, layer, expert or
//! "shared", role and draw, so scheduling cannot change a draw.

use serde::{Deserialize, Serialize};

use super::scales::{Steps, apply};
use crate::codec::trellis::encode::INPUT_NORMALISATION;
use crate::codec::{PrivateSide, Vectors};
use crate::config::choices::{PermutationPolicy, ScaleFamily};
use crate::store::seed::{draw_seed, signs};

/// How one vector is made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VectorChoice {
    /// Which sign draw.
    pub draw: u32,
    /// The family its scale factors are of.
    pub family: ScaleFamily,
    /// The factors, `2^(step/16)` each, spread evenly over the channels.
    pub steps: Steps,
}

impl Default for VectorChoice {
    /// Draw 0, unscaled.
    fn default() -> Self {
        Self { draw: 0, family: ScaleFamily::Identity, steps: vec![0] }
    }
}

/// How a layer's shared vectors are made.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedChoice {
    /// Of gate and up, `[H]`.
    pub gate_up_suh: VectorChoice,
    /// Of down, `[H]`.
    pub down_svh: VectorChoice,
}

/// How an expert's channels are ordered and its own vectors made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertChoice {
    /// The policy the order comes from.
    pub policy: PermutationPolicy,
    /// Entry i is the source channel stored at i.
    pub new_to_old: Vec<usize>,
    /// Of gate, `[I]`.
    pub gate_svh: VectorChoice,
    /// Of up, `[I]`.
    pub up_svh: VectorChoice,
    /// Of down, `[I]`.
    pub down_suh: VectorChoice,
}

impl ExpertChoice {
    /// Source order, draw 0, unscaled.
    pub fn plain(intermediate: usize) -> Self {
        Self {
            policy: PermutationPolicy::Identity,
            new_to_old: (0..intermediate).collect(),
            gate_svh: VectorChoice::default(),
            up_svh: VectorChoice::default(),
            down_suh: VectorChoice::default(),
        }
    }
}

/// The vectors of one expert's three tensors.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertVectors {
    /// Gate projection, `[H, I]`.
    pub gate: Vectors,
    /// Up projection, `[H, I]`.
    pub up: Vectors,
    /// Down projection, `[I, H]`.
    pub down: Vectors,
}

/// The two vectors all experts of a layer share.
#[derive(Debug, Clone, PartialEq)]
pub struct SharedVectors {
    /// `suh` of gate and up, `[H]`, input normalisation included.
    pub gate_up_suh: Vec<f32>,
    /// `svh` of down, `[H]`.
    pub down_svh: Vec<f32>,
}

/// The shared vectors of a choice.
pub fn shared_vectors(
    recipe_version: &str,
    layer: usize,
    hidden: usize,
    choice: &SharedChoice,
) -> SharedVectors {
    let made = |role, choice: &VectorChoice| {
        made(draw_seed(recipe_version, layer, None, role, choice.draw), hidden, choice)
    };
    SharedVectors {
        gate_up_suh: normalised(made("gate_up_suh", &choice.gate_up_suh)),
        down_svh: made("down_svh", &choice.down_svh),
    }
}

/// One expert's vectors of a choice.
pub fn expert_vectors(
    recipe_version: &str,
    layer: usize,
    expert: usize,
    choice: &ExpertChoice,
    shared: &SharedVectors,
) -> ExpertVectors {
    let intermediate = choice.new_to_old.len();
    let made = |role, choice: &VectorChoice| {
        made(draw_seed(recipe_version, layer, Some(expert), role, choice.draw), intermediate, choice)
    };
    let outward = |svh| Vectors { suh: shared.gate_up_suh.clone(), svh, private: PrivateSide::Output };
    ExpertVectors {
        gate: outward(made("gate_svh", &choice.gate_svh)),
        up: outward(made("up_svh", &choice.up_svh)),
        down: Vectors {
            suh: normalised(made("down_suh", &choice.down_suh)),
            svh: shared.down_svh.clone(),
            private: PrivateSide::Input,
        },
    }
}

fn made(seed: u64, n: usize, choice: &VectorChoice) -> Vec<f32> {
    let mut vector = signs(seed, n);
    apply(&mut vector, &choice.steps);
    vector
}

fn normalised(signs: Vec<f32>) -> Vec<f32> {
    signs.into_iter().map(|s| s * INPUT_NORMALISATION as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draw_depends_on_its_name_alone() {
        let plain = SharedChoice::default();
        let shared = shared_vectors("r", 3, 256, &plain);
        assert_eq!(shared, shared_vectors("r", 3, 256, &plain));
        assert_ne!(shared, shared_vectors("r", 4, 256, &plain));
        let choice = ExpertChoice::plain(128);
        let expert = expert_vectors("r", 3, 1, &choice, &shared);
        assert_ne!(expert.gate.svh, expert.up.svh);
        assert_ne!(expert.gate.svh, expert_vectors("r", 3, 2, &choice, &shared).gate.svh);
        assert_eq!(expert.gate.suh, expert.up.suh);
        assert!(expert.down.suh.iter().all(|x| x.abs() == (1.0 / 1.24371088f64) as f32));
    }

    #[test]
    fn a_choice_changes_signs_by_its_draw_and_magnitudes_by_its_steps() {
        let shared = shared_vectors("r", 3, 256, &SharedChoice::default());
        let mut choice = ExpertChoice::plain(256);
        let plain = expert_vectors("r", 3, 1, &choice, &shared);
        choice.down_suh = VectorChoice { draw: 1, family: ScaleFamily::QuarterRms, steps: vec![-16, 16] };
        let changed = expert_vectors("r", 3, 1, &choice, &shared);
        assert_eq!(plain.gate, changed.gate);
        let signs = |v: &[f32]| v.iter().map(|x| x.signum()).collect::<Vec<_>>();
        assert_ne!(signs(&plain.down.suh), signs(&changed.down.suh));
        assert_eq!(changed.down.suh[0].abs() * 4.0, changed.down.suh[255].abs());
    }
}
