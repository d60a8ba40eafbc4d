//! The gated MLP `down(silu(gate(x)) · up(x))`: dense layers, shared experts and each routed expert.
//!
//! Rows pass in blocks, so the intermediate values exist for one block per thread only.

use candle_core::{DType, Device};
use rayon::prelude::*;

use super::linear::Linear;
use crate::checkpoint::WeightSource;
use crate::checkpoint::names::Projection;
use crate::error::Result;
use crate::linalg::silu;

/// Rows that pass through the MLP together.
const BLOCK_ROWS: usize = 128;

/// `silu(gate) · up`, element by element, into `gate`.
pub(super) fn silu_times(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = silu(*gate) * up;
    }
}

/// A gated MLP.
#[derive(Debug, Clone)]
pub struct Mlp {
    /// `[intermediate, hidden]`.
    pub(super) gate_proj: Linear,
    /// `[intermediate, hidden]`.
    pub(super) up_proj: Linear,
    /// `[hidden, intermediate]`.
    pub(super) down_proj: Linear,
}

impl Mlp {
    /// Loads the three matrices, spelt by `name`.
    ///
    /// # Errors
    /// What the source says.
    pub fn load(
        weights: &dyn WeightSource,
        name: impl Fn(Projection) -> String,
        hidden: usize,
        intermediate: usize,
        device: &Device,
    ) -> Result<Self> {
        let linear = |projection, out: usize, input: usize| {
            Linear::new(&weights.load(&name(projection), &[out, input], DType::F32, device)?, None)
        };
        Ok(Self {
            gate_proj: linear(Projection::Gate, intermediate, hidden)?,
            up_proj: linear(Projection::Up, intermediate, hidden)?,
            down_proj: linear(Projection::Down, hidden, intermediate)?,
        })
    }

    /// `x [n, hidden]` (flat) to `[n, hidden]` (flat).
    ///
    /// # Errors
    /// When `x` is not made of whole rows.
    pub fn forward(&self, x: &[f32]) -> Result<Vec<f32>> {
        let hidden = self.down_proj.out_features();
        let blocks: Vec<Vec<f32>> = x
            .par_chunks(BLOCK_ROWS * hidden)
            .map(|block| self.down_proj.forward(&self.gated_block(block)?))
            .collect::<Result<_>>()?;
        Ok(blocks.concat())
    }

    /// The input of the down projection: `x [n, hidden]` (flat) to `[n, intermediate]` (flat).
    ///
    /// # Errors
    /// When `x` is not made of whole rows.
    pub(super) fn gated(&self, x: &[f32]) -> Result<Vec<f32>> {
        let blocks: Vec<Vec<f32>> = x
            .par_chunks(BLOCK_ROWS * self.down_proj.out_features())
            .map(|block| self.gated_block(block))
            .collect::<Result<_>>()?;
        Ok(blocks.concat())
    }

    fn gated_block(&self, block: &[f32]) -> Result<Vec<f32>> {
        let mut inner = self.gate_proj.forward(block)?;
        silu_times(&mut inner, &self.up_proj.forward(block)?);
        Ok(inner)
    }
}
