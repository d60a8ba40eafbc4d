//! Tensor-parallel slices of routed experts, and the way back.
//!
//! Gate and up are cut along their outputs, down along its inputs: both are the expert's intermediate axis, on 128-element
//! boundaries, where the Hadamard blocks end. A slice takes its tiles and its part of the private vector as they are; the
//! vector of the other side is the same in every slice. Nothing is quantized anew, so the decoded slices side by side are
//! the decoded whole, bit for bit.

use std::ops::Range;

use half::f16;

use super::complete::SLICE_QUANTUM;
use super::names::Projection;
use super::packed::join;
use crate::codec::trellis::linear::TrellisLinear;
use crate::codec::trellis::pack;
use crate::codec::trellis::tile::TILE_DIM;
use crate::error::{Result, refuse};
use crate::linalg::Matrix;

/// Refuses a number of ranks that does not cut `intermediate` channels on 128-element boundaries.
///
/// # Errors
/// Names the sizes and the numbers of ranks that do.
pub fn check_ranks(intermediate: usize, tp_size: usize) -> Result<()> {
    let step = tp_size.checked_mul(SLICE_QUANTUM).filter(|step| *step > 0);
    if step.is_some_and(|step| intermediate.is_multiple_of(step)) {
        return Ok(());
    }
    let blocks = intermediate / SLICE_QUANTUM;
    let right: Vec<String> =
        (1..=blocks).filter(|tp| blocks.is_multiple_of(*tp)).map(|tp| tp.to_string()).collect();
    refuse(format!(
        "{tp_size} ranks cut {intermediate} intermediate channels off the {SLICE_QUANTUM}-element boundaries"
    ))
    .field("--tp")
    .wanted(format!("slices of a multiple of {SLICE_QUANTUM}: {} ranks", right.join(", ")))
    .err()
}

/// The intermediate channels of a rank.
pub fn channels(intermediate: usize, tp_size: usize, rank: usize) -> Range<usize> {
    let width = intermediate / tp_size;
    rank * width..(rank + 1) * width
}

/// The slice of a rank.
///
/// # Panics
/// For a number of ranks that [`check_ranks`] refuses.
pub fn slice(linear: &TrellisLinear, role: Projection, tp_size: usize, rank: usize) -> TrellisLinear {
    match role {
        Projection::Gate | Projection::Up => linear.slice_outputs(channels(linear.n, tp_size, rank)),
        Projection::Down => linear.slice_inputs(channels(linear.k, tp_size, rank)),
    }
}

/// The whole linear of its slices, ranks in order.
///
/// # Errors
/// Names the rank whose size, width, codebook or replicated vector is not that of the first.
pub fn reassemble(slices: &[TrellisLinear], role: Projection) -> Result<TrellisLinear> {
    let Some(first) = slices.first() else {
        return refuse("a linear of no slices").wanted("at least one rank").err();
    };
    let down = role == Projection::Down;
    let replicated = |linear: &TrellisLinear| if down { linear.svh.clone() } else { linear.suh.clone() };
    let wanted = replicated(first);
    for (rank, slice) in slices.iter().enumerate() {
        let same = (slice.k, slice.n, slice.bits, slice.codebook)
            == (first.k, first.n, first.bits, first.codebook)
            && replicated(slice) == wanted;
        if !same {
            return refuse(format!("rank {rank} is no slice of the linear that rank 0 is one of"))
                .wanted("equal sizes, bits and codebook, and the same vector on the side that is not cut")
                .err();
        }
    }
    let across = first.n / TILE_DIM * pack::words(first.bits);
    let (k, n) = if down { (first.k * slices.len(), first.n) } else { (first.k, first.n * slices.len()) };
    let mut trellis = Vec::with_capacity(slices.len() * first.trellis.len());
    if down {
        slices.iter().for_each(|slice| trellis.extend_from_slice(&slice.trellis));
    } else {
        for row in 0..first.k / TILE_DIM {
            slices
                .iter()
                .for_each(|slice| trellis.extend_from_slice(&slice.trellis[row * across..][..across]));
        }
    }
    let private = |vector: fn(&TrellisLinear) -> &[f16]| slices.iter().flat_map(vector).copied().collect();
    let (suh, svh) =
        if down { (private(|slice| &slice.suh), wanted) } else { (wanted, private(|slice| &slice.svh)) };
    TrellisLinear::new((k, n), first.bits, first.codebook, trellis, suh, svh)
}

/// The dense weight `[K, N]` of slices decoded one by one.
pub fn dense_of(slices: &[TrellisLinear], role: Projection) -> Matrix<f16> {
    let parts: Vec<Matrix<f16>> = slices.iter().map(TrellisLinear::dense).collect();
    let down = role == Projection::Down;
    let k = if down {
        slices.iter().map(|slice| slice.k).sum()
    } else {
        slices.first().map_or(0, |slice| slice.k)
    };
    let n = if down {
        slices.first().map_or(0, |slice| slice.n)
    } else {
        slices.iter().map(|slice| slice.n).sum()
    };
    join(&parts, down, (k, n))
}

/// The dense weight `[K, N]` of a linear cut for so many ranks, each slice decoded by itself.
///
/// # Panics
/// For a number of ranks that [`check_ranks`] refuses.
pub fn sliced_dense(linear: &TrellisLinear, role: Projection, tp_size: usize) -> Matrix<f16> {
    let slices: Vec<TrellisLinear> = (0..tp_size).map(|rank| slice(linear, role, tp_size, rank)).collect();
    dense_of(&slices, role)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::trellis::codebook::Codebook;
    use crate::store::seed::SplitMix64;

    fn linear((k, n): (usize, usize), bits: u32, seed: u64) -> TrellisLinear {
        let mut random = SplitMix64::new(seed);
        let words = k / TILE_DIM * (n / TILE_DIM) * pack::words(bits);
        let trellis = (0..words).map(|_| random.next_u64() as u16).collect();
        let mut vector =
            |len: usize| (0..len).map(|_| f16::from_f32(0.5 + random.below(100) as f32 / 100.0)).collect();
        let (suh, svh) = (vector(k), vector(n));
        TrellisLinear::new((k, n), bits, Codebook::Mcg, trellis, suh, svh).unwrap()
    }

    #[test]
    fn slices_make_up_the_whole_and_decode_to_it() {
        for (role, size) in
            [(Projection::Gate, (128, 512)), (Projection::Up, (256, 512)), (Projection::Down, (512, 256))]
        {
            for bits in [3, 5] {
                let whole = linear(size, bits, 7);
                for tp in [1, 2, 4] {
                    let slices: Vec<_> = (0..tp).map(|rank| slice(&whole, role, tp, rank)).collect();
                    assert!(reassemble(&slices, role).unwrap() == whole, "{role:?} {bits} {tp}");
                    assert!(sliced_dense(&whole, role, tp) == whole.dense(), "{role:?} {bits} {tp}");
                }
            }
        }
    }

    #[test]
    fn slices_of_different_linears_are_refused() {
        let mut slices: Vec<_> =
            (0..2).map(|rank| slice(&linear((128, 256), 3, 1), Projection::Up, 2, rank)).collect();
        slices[1].suh[5] = f16::from_f32(9.0);
        assert!(reassemble(&slices, Projection::Up).unwrap_err().to_string().contains("rank 1"));
        slices[1] = linear((128, 128), 4, 1);
        assert!(reassemble(&slices, Projection::Up).is_err());
        assert!(reassemble(&[], Projection::Up).is_err());
    }

    #[test]
    fn ranks_off_the_boundaries_are_refused_with_those_that_are_right() {
        for tp in [1, 2, 4, 8, 16] {
            check_ranks(2048, tp).unwrap();
        }
        for tp in [0, 3, 32, usize::MAX / 64] {
            let error = check_ranks(2048, tp).unwrap_err().to_string();
            assert!(
                error.contains("128-element boundaries") && error.contains("1, 2, 4, 8, 16 ranks"),
                "{error}"
            );
        }
        check_ranks(384, 3).unwrap();
    }
}
