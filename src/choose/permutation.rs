//! Orders of an expert's intermediate channels, and the oracle that an order changes nothing but the order.
//!
//! With P on the intermediate axis, `gate·Pᵀ`, `up·Pᵀ` and `P·down` make the same expert. Energies are the diagonal of the
//! down-input covariance. Source: the owner's Round 7 record, "Intermediate permutation".

use crate::config::choices::PermutationPolicy;
use crate::error::{Result, refuse};
use crate::linalg::Matrix;

use super::expert::ExpertWeights;

/// Channels of a Hadamard block.
const BLOCK: usize = 128;
/// Channels that stay together under the contiguous policy.
const RUN: usize = 16;
/// Rows of the functional oracle.
const ORACLE_ROWS: usize = 2;
/// Relative error of the permuted expert's output that f64 summation in another order can explain.
const ORACLE_TOLERANCE: f64 = 1e-12;

/// The order a policy gives: entry i is the source channel stored at i. Equal energies keep the source's order.
pub fn order(policy: PermutationPolicy, energies: &[f64]) -> Vec<usize> {
    let descending = || {
        let mut order: Vec<usize> = (0..energies.len()).collect();
        order.sort_by(|&a, &b| energies[b].total_cmp(&energies[a]).then(a.cmp(&b)));
        order
    };
    let blocks = energies.len() / BLOCK;
    match policy {
        PermutationPolicy::Identity => (0..energies.len()).collect(),
        PermutationPolicy::StoredDescendingDiag => descending(),
        PermutationPolicy::LdlqVisitDescendingDiag => {
            let mut order = descending();
            order.reverse();
            order
        }
        PermutationPolicy::EnergyBalanced => {
            let order = descending();
            (0..blocks).flat_map(|block| order.iter().skip(block).step_by(blocks).copied()).collect()
        }
        PermutationPolicy::EnergyBalancedContiguous => contiguous(energies, blocks),
    }
}

/// Runs of 16 channels in descending energy, each to the block of least energy that has room, the first of equals.
fn contiguous(energies: &[f64], blocks: usize) -> Vec<usize> {
    let energy = |run: usize| energies[run * RUN..(run + 1) * RUN].iter().sum::<f64>();
    let mut runs: Vec<usize> = (0..energies.len() / RUN).collect();
    runs.sort_by(|&a, &b| energy(b).total_cmp(&energy(a)).then(a.cmp(&b)));
    let mut filled: Vec<(f64, Vec<usize>)> = vec![(0.0, Vec::new()); blocks];
    for run in runs {
        let open = filled.iter_mut().filter(|(_, held)| held.len() < BLOCK / RUN);
        let (sum, held) = open.min_by(|a, b| a.0.total_cmp(&b.0)).expect("as much room as runs");
        *sum += energy(run);
        held.push(run);
    }
    filled
        .into_iter()
        .flat_map(|(_, mut held)| {
            held.sort_unstable();
            held.into_iter().flat_map(|run| run * RUN..(run + 1) * RUN)
        })
        .collect()
}

/// The expert with its intermediate channels in another order.
pub fn permuted(weights: &ExpertWeights, new_to_old: &[usize]) -> ExpertWeights {
    let [gate, up, down] = &weights.matrices;
    ExpertWeights {
        matrices: [columns(gate, new_to_old), columns(up, new_to_old), down.gather_rows(new_to_old)],
    }
}

/// The covariance of the channels in another order.
pub fn permuted_covariance(covariance: &Matrix<f32>, new_to_old: &[usize]) -> Matrix<f32> {
    columns(&covariance.gather_rows(new_to_old), new_to_old)
}

fn columns(matrix: &Matrix<f32>, new_to_old: &[usize]) -> Matrix<f32> {
    let data = matrix.data.chunks_exact(matrix.cols).flat_map(|row| new_to_old.iter().map(|&old| row[old]));
    Matrix::new(matrix.rows, matrix.cols, data.collect())
}

/// Checks that `new_to_old` is a bijection, that its inverse gives the source weights back to the byte, and that the
/// permuted expert's output on the first rows of `x` is the source's within 1e-12 in f64.
///
/// # Errors
/// Says which of the three does not hold; the caller adds layer and expert.
pub fn oracle(
    source: &ExpertWeights,
    stored: &ExpertWeights,
    new_to_old: &[usize],
    x: &Matrix<f32>,
) -> Result<()> {
    let channels = source.matrices[2].rows;
    let mut old_to_new = vec![usize::MAX; channels];
    for (new, &old) in new_to_old.iter().enumerate() {
        if old >= channels || old_to_new[old] != usize::MAX {
            return Err(refuse(format!(
                "stored channel {new} is source channel {old}, which is taken or unknown"
            ))
            .wanted(format!("a permutation of 0..{channels}"))
            .check());
        }
        old_to_new[old] = new;
    }
    if new_to_old.len() != channels {
        let found = new_to_old.len();
        return Err(refuse(format!("an order of {found} channels")).wanted(channels.to_string()).check());
    }
    let back = permuted(stored, &old_to_new);
    let bits = |m: &Matrix<f32>| m.data.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
    if back.matrices.iter().zip(&source.matrices).any(|(a, b)| bits(a) != bits(b)) {
        return Err(refuse("the inverse permutation does not give the source weights back").check());
    }
    let rows = x.rows.min(ORACLE_ROWS);
    let (mut error, mut energy) = (0.0f64, 0.0f64);
    for row in 0..rows {
        let (want, got) = (output(source, x.row(row)), output(stored, x.row(row)));
        for (want, got) in want.iter().zip(&got) {
            error += (want - got).powi(2);
            energy += want * want;
        }
    }
    if error.sqrt() > ORACLE_TOLERANCE * energy.sqrt() {
        return Err(refuse(format!("the permuted expert's output differs by {:e}", (error / energy).sqrt()))
            .wanted(format!("at most {ORACLE_TOLERANCE:e} relative"))
            .check());
    }
    Ok(())
}

/// One row through an expert, in f64.
fn output(weights: &ExpertWeights, x: &[f32]) -> Vec<f64> {
    let [gate, up, down] = &weights.matrices;
    let through = |w: &Matrix<f32>, x: &[f64]| -> Vec<f64> {
        let mut out = vec![0.0f64; w.cols];
        for (&x, row) in x.iter().zip(w.data.chunks_exact(w.cols)) {
            out.iter_mut().zip(row).for_each(|(o, &w)| *o += x * f64::from(w));
        }
        out
    };
    let x: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
    let inner: Vec<f64> =
        through(gate, &x).iter().zip(&through(up, &x)).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
    through(down, &inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [PermutationPolicy; 5] = [
        PermutationPolicy::Identity,
        PermutationPolicy::LdlqVisitDescendingDiag,
        PermutationPolicy::StoredDescendingDiag,
        PermutationPolicy::EnergyBalanced,
        PermutationPolicy::EnergyBalancedContiguous,
    ];

    fn energies(n: usize) -> Vec<f64> {
        (0..n).map(|i| ((i * 7919) % 1009) as f64 + 1.0).collect()
    }

    #[test]
    fn policies_do_what_their_names_say() {
        let e = energies(384);
        let sorted = order(PermutationPolicy::StoredDescendingDiag, &e);
        assert!(sorted.windows(2).all(|w| e[w[0]] >= e[w[1]]));
        let mut reversed = order(PermutationPolicy::LdlqVisitDescendingDiag, &e);
        reversed.reverse();
        assert_eq!(reversed, sorted);
        let spread = |order: &[usize]| {
            let sums: Vec<f64> =
                order.chunks(BLOCK).map(|block| block.iter().map(|&c| e[c]).sum::<f64>()).collect();
            sums.iter().fold(0.0f64, |m, x| m.max(*x)) / sums.iter().fold(f64::MAX, |m, x| m.min(*x))
        };
        // Ranks 0, 3, 6, .. go to the first block.
        assert_eq!(order(PermutationPolicy::EnergyBalanced, &e)[..3], [sorted[0], sorted[3], sorted[6]]);
        assert!(spread(&order(PermutationPolicy::EnergyBalanced, &e)) < 1.02);
        let runs = order(PermutationPolicy::EnergyBalancedContiguous, &e);
        assert!(spread(&runs) < 1.1);
        assert!(runs.chunks(RUN).all(|run| run.windows(2).all(|w| w[1] == w[0] + 1)));
    }

    #[test]
    fn the_oracle_passes_every_policy_and_fails_what_is_no_permutation() {
        let noise = |rows: usize, cols: usize, seed: usize| {
            let value = |i: usize| ((i * 7919 + seed) % 1013) as f32 / 500.0 - 1.0;
            Matrix::new(rows, cols, (0..rows * cols).map(value).collect())
        };
        let source = ExpertWeights { matrices: [noise(64, 256, 1), noise(64, 256, 2), noise(256, 64, 3)] };
        let x = noise(4, 64, 5);
        for policy in ALL {
            let new_to_old = order(policy, &energies(256));
            let stored = permuted(&source, &new_to_old);
            oracle(&source, &stored, &new_to_old, &x).unwrap();
            let mut twice = new_to_old.clone();
            twice[7] = twice[8];
            assert!(oracle(&source, &stored, &twice, &x).unwrap_err().to_string().contains("taken"));
            let mut changed = stored.clone();
            changed.matrices[1].data[77] += 1e-3;
            assert!(oracle(&source, &changed, &new_to_old, &x).unwrap_err().to_string().contains("inverse"));
        }
    }
}
