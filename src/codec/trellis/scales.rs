//! Rotation vectors with per-channel scales, for tensors that own both of their vectors (dense and carrier linears).
//!
//! Output channels are divided by their rms, input channels by the square root of theirs: with LDLQ on the metric of the
//! stored `suh`, the full rms of exllamav3 costs more on the metric than it gains on the weights. Routed experts share a
//! vector across a layer and do not use this.

use super::encode::INPUT_NORMALISATION;
use crate::codec::{PrivateSide, Vectors};
use crate::linalg::Matrix;
use crate::store::seed::signs;

/// Vectors of a weight `[K, N]` from its own channel rms and two sign seeds.
pub fn channel_vectors(weight: &Matrix<f32>, input_seed: u64, output_seed: u64) -> Vectors {
    let (k, n) = (weight.rows, weight.cols);
    let mut output = vec![0.0f64; n];
    for row in weight.data.chunks_exact(n) {
        output.iter_mut().zip(row).for_each(|(sum, &w)| *sum += f64::from(w).powi(2));
    }
    let output = normalised(output);
    let input = weight
        .data
        .chunks_exact(n)
        .map(|row| row.iter().zip(&output).map(|(&w, scale)| (f64::from(w) / scale).powi(2)).sum::<f64>());
    let input = normalised(input.collect());
    let signed = |seed: u64, scales: &[f64], factor: f64, power: f64| -> Vec<f32> {
        signs(seed, scales.len())
            .iter()
            .zip(scales)
            .map(|(s, x)| s * (x.powf(power) * factor) as f32)
            .collect()
    };
    debug_assert_eq!((input.len(), output.len()), (k, n));
    Vectors {
        suh: signed(input_seed, &input, INPUT_NORMALISATION, 0.5),
        svh: signed(output_seed, &output, 1.0, 1.0),
        private: PrivateSide::Output,
    }
}

/// Square roots of energies over their mean. A channel without energy takes its nearest live neighbours' mean, since a
/// stored vector entry may not be zero; a weight without any takes 1 throughout.
fn normalised(energies: Vec<f64>) -> Vec<f64> {
    let rms: Vec<f64> = energies.into_iter().map(f64::sqrt).collect();
    let live: Vec<usize> = (0..rms.len()).filter(|&i| rms[i] > 0.0).collect();
    if live.is_empty() {
        return vec![1.0; rms.len()];
    }
    let mean = live.iter().map(|&i| rms[i]).sum::<f64>() / live.len() as f64;
    (0..rms.len())
        .map(|i| {
            let after = live.partition_point(|&l| l < i);
            let below = after.checked_sub(1).map(|p| live[p]);
            let neighbours: Vec<f64> = match live.get(after) {
                Some(&l) if l == i => vec![rms[i]],
                above => below.into_iter().chain(above.copied()).map(|l| rms[l]).collect(),
            };
            neighbours.iter().sum::<f64>() / neighbours.len() as f64 / mean
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_channel_takes_its_neighbours_mean() {
        assert_eq!(normalised(vec![0.0, 4.0, 0.0, 0.0, 16.0]), [2.0 / 3.0, 2.0 / 3.0, 1.0, 1.0, 4.0 / 3.0]);
        assert_eq!(normalised(vec![0.0; 3]), [1.0; 3]);
    }
}
