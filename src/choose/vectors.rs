//! Rotation vectors of a layer: seeded signs, shared where the format shares them.
//!
//! Gate and up of all experts share one `suh[H]`, down of all experts one `svh[H]`; each tensor owns the vector of its
//! intermediate side. Every `suh` carries the codec's input normalisation. Seeds name recipe version, layer, expert or
//! "shared", role and draw, so scheduling cannot change a draw.

use crate::codec::trellis::encode::INPUT_NORMALISATION;
use crate::codec::{PrivateSide, Vectors};
use crate::store::seed::{draw_seed, signs};

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

/// The shared vectors of a draw.
pub fn shared_vectors(recipe_version: &str, layer: usize, hidden: usize, draw: u32) -> SharedVectors {
    let drawn = |role| signs(draw_seed(recipe_version, layer, None, role, draw), hidden);
    SharedVectors { gate_up_suh: normalised(drawn("gate_up_suh")), down_svh: drawn("down_svh") }
}

/// One expert's vectors of a draw.
pub fn expert_vectors(
    recipe_version: &str,
    layer: usize,
    expert: usize,
    intermediate: usize,
    draw: u32,
    shared: &SharedVectors,
) -> ExpertVectors {
    let drawn = |role| signs(draw_seed(recipe_version, layer, Some(expert), role, draw), intermediate);
    let outward =
        |role| Vectors { suh: shared.gate_up_suh.clone(), svh: drawn(role), private: PrivateSide::Output };
    ExpertVectors {
        gate: outward("gate_svh"),
        up: outward("up_svh"),
        down: Vectors {
            suh: normalised(drawn("down_suh")),
            svh: shared.down_svh.clone(),
            private: PrivateSide::Input,
        },
    }
}

fn normalised(signs: Vec<f32>) -> Vec<f32> {
    signs.into_iter().map(|s| s * INPUT_NORMALISATION as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draw_depends_on_its_name_alone() {
        let shared = shared_vectors("r", 3, 256, 0);
        assert_eq!(shared, shared_vectors("r", 3, 256, 0));
        assert_ne!(shared, shared_vectors("r", 4, 256, 0));
        let expert = expert_vectors("r", 3, 1, 128, 0, &shared);
        assert_ne!(expert.gate.svh, expert.up.svh);
        assert_ne!(expert.gate.svh, expert_vectors("r", 3, 2, 128, 0, &shared).gate.svh);
        assert_eq!(expert.gate.suh, expert.up.suh);
        assert!(expert.down.suh.iter().all(|x| x.abs() == (1.0 / 1.24371088f64) as f32));
    }
}
