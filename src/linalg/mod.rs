//! Dense products of fixed order.
//!
//! Everything that reaches bytes, in the forward pass and outside it (Hadamard-domain feedback, covariances, expert
//! outputs), goes through one kernel. What an element of a product is, bit for bit, is said once, in `kernel`: it
//! depends on its row, its column and the order of the inner index alone. (Candle's own CPU product picks kernels by the
//! number of rows and rounds differently for few; it also reads `/proc/cpuinfo` in each call, to count its threads.)
//!
//! Two ways in: [`matmul_f32`] and its like for operands used once, [`Packed`] for a right operand used often. They give
//! the same bits.

mod block_ldl;
mod cholesky;
mod engine;
mod kernel;
mod matmul;
mod matrix;
mod packed;
mod view;

pub use block_ldl::block_lower;
pub use cholesky::{NotPositive, cholesky, cholesky_solve};
pub use engine::{Engine, engines};
pub use matmul::{matmul_f32, matmul_f32_with, matmul_f64, matmul_reference, syrk_f64};
pub use matrix::Matrix;
pub use packed::Packed;
pub use view::{Layout, View};

/// `x / (1 + e^-x)` in f32.
#[inline]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

#[cfg(test)]
mod tests {
    //! What the tests of the kernel share.

    /// Values in -0.5..0.5.
    pub(super) fn noise(count: usize, mut seed: u64) -> Vec<f32> {
        let next = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        };
        std::iter::repeat_with(next).take(count).collect()
    }

    pub(super) fn with_threads<T: Send>(threads: usize, work: impl FnOnce() -> T + Send) -> T {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(work)
    }

    /// Equality that tells 0.0 from -0.0.
    pub(super) fn assert_bits(found: &[f32], expected: &[f32], what: &str) {
        let same = found.iter().map(|x| x.to_bits()).eq(expected.iter().map(|x| x.to_bits()));
        assert!(same, "{what}");
    }
}
