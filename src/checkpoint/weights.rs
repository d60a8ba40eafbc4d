//! How weights reach the forward pass.

use candle_core::{DType, Device, Tensor};

use crate::error::Result;

/// A named collection of dense weights: a BF16 source, a carrier, or packed-and-decoded experts over either.
///
/// The forward pass knows nothing else of where weights come from.
pub trait WeightSource: Send + Sync {
    /// Whether a tensor of this name exists.
    fn contains(&self, name: &str) -> bool;

    /// Loads `name` converted to `dtype` on `device`. Upcasts are exact.
    ///
    /// # Errors
    /// Names file and tensor when it is missing, when its shape is not `shape`, or when a value is not finite.
    fn load(&self, name: &str, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor>;
}
