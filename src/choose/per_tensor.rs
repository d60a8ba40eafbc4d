//! Vectors of the older recipe: every tensor owns both, with the rms of its own channels in them.
//!
//! Schema v2 shares the residual-side vectors of a layer, so only an ablation uses these: they tell what the sharing
//! costs. See [`channel_vectors`] for the scales.

use super::expert::ExpertWeights;
use super::vectors::ExpertVectors;
use crate::checkpoint::names::Projection;
use crate::codec::Vectors;
use crate::codec::trellis::scales::channel_vectors;
use crate::store::seed::draw_seed;

/// The vectors of an expert's three tensors, signs of draw 0 by tensor and side.
pub fn per_tensor_vectors(
    recipe_version: &str,
    layer: usize,
    expert: usize,
    weights: &ExpertWeights,
) -> ExpertVectors {
    let of = |role: Projection| -> Vectors {
        let seed = |side: &str| {
            draw_seed(recipe_version, layer, Some(expert), &format!("{}_{side}", role.as_str()), 0)
        };
        channel_vectors(&weights.matrices[role as usize], seed("own_suh"), seed("own_svh"))
    };
    ExpertVectors { gate: of(Projection::Gate), up: of(Projection::Up), down: of(Projection::Down) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::Matrix;

    #[test]
    fn no_two_tensors_share_a_vector() {
        let weights =
            ExpertWeights { matrices: std::array::from_fn(|_| Matrix::new(128, 128, vec![0.5; 128 * 128])) };
        let of = |expert| per_tensor_vectors("r", 3, expert, &weights);
        let (a, b) = (of(0), of(1));
        assert_eq!(a, of(0));
        let mut all: Vec<&Vec<f32>> = Vec::new();
        for vectors in [&a, &b] {
            for tensor in [&vectors.gate, &vectors.up, &vectors.down] {
                all.extend([&tensor.suh, &tensor.svh]);
            }
        }
        for (i, one) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|other| other != one), "vector {i}");
        }
    }
}
