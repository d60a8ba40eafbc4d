//! Weight codecs. They know nothing of models: a codec sees matrices, covariances and vectors.

pub mod kaiju;
pub mod trellis;
pub mod weight;

use crate::error::Result;
use crate::linalg::Matrix;

/// The side whose stored vector belongs to one tensor alone and therefore takes its global scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrivateSide {
    /// `suh` is the tensor's own (down projections).
    Input,
    /// `svh` is the tensor's own (gate and up projections).
    Output,
}

/// Rotation vectors of a tensor before its global scale is folded in.
#[derive(Debug, Clone, PartialEq)]
pub struct Vectors {
    /// Input side `[K]`: sign × block factor × input normalisation.
    pub suh: Vec<f32>,
    /// Output side `[N]`: sign × block factor.
    pub svh: Vec<f32>,
    /// Which of the two takes the global scale.
    pub private: PrivateSide,
}

/// One encode: everything that determines its bytes.
#[derive(Debug, Clone, Copy)]
pub struct EncodeJob<'a> {
    /// Weight `[K, N]` (inputs by outputs).
    pub weight: &'a Matrix<f32>,
    /// Mean of xxᵀ over the calibration rows, `[K, K]`.
    pub covariance: &'a Matrix<f32>,
    /// Share of the covariance's mean diagonal added to its diagonal.
    pub sigma_reg: f64,
    /// Rotation vectors.
    pub vectors: &'a Vectors,
    /// Bits a weight.
    pub bits: u32,
    /// Relative global scale found by [`Codec::fit_scale`].
    pub scale: f64,
}

/// A packed matrix as a checkpoint stores it.
pub trait PackedMatrix: Send + Sync {
    /// The dense weight `[K, N]`, bit for bit what every reader installs.
    fn dense(&self) -> Matrix<f32>;
    /// SHA-256 of the packed payload.
    fn packed_sha256(&self) -> String;
    /// SHA-256 of the weight's own `dense` values in the type they have, little-endian row-major: f16 of a trellis, f32 of
    /// KAIJU1.
    fn reconstruction_sha256(&self, dense: &Matrix<f32>) -> String;
    /// Multiplies the stored output vector by a factor for every output.
    ///
    /// # Errors
    /// An entry that vanishes or overflows in its stored type.
    fn scale_outputs(&mut self, factors: &[f64]) -> Result<()>;
}

/// A weight codec.
pub trait Codec: Send + Sync {
    /// What it stores.
    type Packed: PackedMatrix;

    /// The relative global scale of a tensor at a width, from a seeded sample of its tiles.
    ///
    /// # Errors
    /// Weights that are all zero or not finite.
    fn fit_scale(&self, weight: &Matrix<f32>, vectors: &Vectors, bits: u32, seed: u64) -> Result<f64>;

    /// A cheap predictor of the error that candidates of the input side (signs, scales, order of inputs) leave: ranks
    /// them, up to a factor that the output side decides.
    ///
    /// # Errors
    /// As [`Codec::encode`].
    fn input_score(&self, job: &EncodeJob<'_>) -> Result<f64>;

    /// The variance of the rounding noise in the rotated domain, by test-encoding a seeded sample of `tiles` tiles at the
    /// job's width and scale: what candidates of the output side differ in.
    ///
    /// # Errors
    /// As [`Codec::encode`].
    fn noise(&self, job: &EncodeJob<'_>, tiles: usize, seed: u64) -> Result<f64>;

    /// Encodes a matrix. The result is read back and compared before it is returned.
    ///
    /// # Errors
    /// Input that is not finite, a covariance that cannot be factored, a vector entry that vanishes in f16.
    fn encode(&self, job: &EncodeJob<'_>) -> Result<Self::Packed>;
}
