//! Dense products of fixed order.
//!
//! Everything that reaches bytes outside the Candle forward pass (Hadamard-domain feedback, covariances, expert outputs)
//! goes through these kernels. Each output element is one chain of fused multiply-adds in ascending inner index, so its
//! bits do not depend on the instruction set, the number of threads, the blocking, or which other rows share the call.

mod cholesky;
mod matmul;
mod matrix;

pub use cholesky::{NotPositive, cholesky};
pub use matmul::{Engine, Layout, View, engines, matmul_f32, matmul_f32_with, matmul_f64, syrk_f64};
pub use matrix::Matrix;

/// `x / (1 + e^-x)` in f32.
#[inline]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}
