//! One routed expert under study: its weights, its rows, and the losses of its reconstructions.
//!
//! `y = (silu(x·gate) * (x·up)) · down`, weights `[K, N]` (inputs by outputs). The loss of a reconstruction is the mean
//! over held-out rows of the squared error of y, without router weight, summed in f64 in row order.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use crate::checkpoint::names::Projection;
use crate::codec::{Codec, EncodeJob, PackedMatrix, Vectors};
use crate::config::Recipe;
use crate::error::{Error, Result, refuse};
use crate::linalg::{Matrix, silu};
use crate::store::hash::Hash;
use crate::store::seed::draw_seed;

use super::pilots::shrink_diagonal;
use super::vectors::ExpertVectors;

/// Dense weights of an expert, `[K, N]`: gate and up `[H, I]`, down `[I, H]`.
#[derive(Debug, Clone)]
pub struct ExpertWeights {
    /// Gate, up, down.
    pub matrices: [Matrix<f32>; 3],
}

/// Everything a choice about one expert needs.
pub struct Expert<'a> {
    /// Its layer.
    pub layer: usize,
    /// Its id.
    pub id: usize,
    /// The recipe.
    pub recipe: &'a Recipe,
    /// Source weights.
    pub weights: ExpertWeights,
    /// Rotation vectors.
    pub vectors: ExpertVectors,
    /// Rows that enter covariances, `[n, H]`.
    pub fit: Matrix<f32>,
    /// Rows of others that a cold expert's covariances are topped up with, `[m, H]`.
    pub fallback: Matrix<f32>,
    /// The fallback's share in them.
    pub fallback_share: f64,
    /// Rows that measure loss, `[m, H]`.
    pub holdout: Matrix<f32>,
    /// What a cold expert's input diagonal is moved towards, `[H]`; none unless the recipe asks for it.
    pub median_diagonal: Option<Arc<Vec<f64>>>,
    /// Output factors clipped so far, where the recipe rescales outputs.
    pub clipped: AtomicUsize,
}

/// A decoded tensor and the hashes that name it.
#[derive(Debug, Clone)]
pub struct Decoded {
    /// Dense weight `[K, N]`, an f16 one upcast.
    pub dense: Matrix<f32>,
    /// SHA-256 of the packed payload.
    pub packed_sha256: Hash,
    /// SHA-256 of the dense values in their own type.
    pub reconstruction_sha256: Hash,
}

/// A loss and the energy it stands against.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Loss {
    /// Mean squared output error a row.
    pub absolute: f64,
    /// Mean squared output a row.
    pub energy: f64,
}

impl Loss {
    /// The loss over the energy.
    pub fn relative(&self) -> f64 {
        self.absolute / self.energy
    }
}

impl Expert<'_> {
    /// Refuses an expert whose losses cannot be measured.
    ///
    /// # Errors
    /// No held-out rows.
    pub fn require_holdout(&self) -> Result<()> {
        if self.holdout.rows > 0 {
            return Ok(());
        }
        refuse("no held-out row is routed to the expert, so no loss can be measured")
            .layer(self.layer)
            .expert(self.id)
            .wanted("a larger calibration corpus")
            .err()
    }

    /// Vectors of a tensor.
    pub fn vectors(&self, role: Projection) -> &Vectors {
        match role {
            Projection::Gate => &self.vectors.gate,
            Projection::Up => &self.vectors.up,
            Projection::Down => &self.vectors.down,
        }
    }

    /// Adds layer, expert and projection to an error.
    pub fn name(&self, role: Projection) -> impl Fn(Error) -> Error {
        let (layer, id) = (self.layer, self.id);
        move |error| match error {
            Error::Refused(refusal) => refusal.layer(layer).expert(id).tensor(role.as_str()).into(),
            Error::Check(refusal) => refusal.layer(layer).expert(id).tensor(role.as_str()).check(),
            other => other,
        }
    }

    /// The covariance gate and up are encoded under.
    ///
    /// # Errors
    /// No rows at all, or rows that are all zero.
    pub fn input_covariance(&self) -> Result<Matrix<f32>> {
        let mut covariance = self.blend(&self.fit, &self.fallback).map_err(self.name(Projection::Gate))?;
        if let Some(median) = self.median_diagonal.as_ref().filter(|_| self.fallback_share > 0.0) {
            shrink_diagonal(&mut covariance, median, self.fallback_share);
        }
        Ok(covariance)
    }

    /// The relative global scale of a tensor at a width. `target` is down's where it is corrected.
    ///
    /// # Errors
    /// See [`Codec::fit_scale`].
    pub fn fit_scale<C: Codec>(
        &self,
        codec: &C,
        role: Projection,
        bits: u32,
        target: Option<&Matrix<f32>>,
    ) -> Result<f64> {
        let seed = draw_seed(
            &self.recipe.recipe_version,
            self.layer,
            Some(self.id),
            &format!("{}_scale_sample", role.as_str()),
            0,
        );
        let weight = target.unwrap_or(&self.weights.matrices[role as usize]);
        codec.fit_scale(weight, self.vectors(role), bits, seed).map_err(self.name(role))
    }

    /// Encodes a tensor, down towards its corrected `target` where it has one; the outputs of gate and up are rescaled
    /// where the recipe says so.
    ///
    /// # Errors
    /// See [`Codec::encode`].
    pub fn encode<C: Codec>(
        &self,
        codec: &C,
        role: Projection,
        (bits, scale): (u32, f64),
        covariance: &Matrix<f32>,
        target: Option<&Matrix<f32>>,
    ) -> Result<C::Packed> {
        let job = EncodeJob {
            weight: target.unwrap_or(&self.weights.matrices[role as usize]),
            covariance,
            sigma_reg: self.recipe.sigma(role == Projection::Down),
            vectors: self.vectors(role),
            bits,
            scale,
        };
        let mut packed = codec.encode(&job).map_err(self.name(role))?;
        if self.recipe.output_rescale && role != Projection::Down {
            self.rescale(role, &mut packed).map_err(self.name(role))?;
        }
        Ok(packed)
    }

    /// The output of the source weights on the held-out rows.
    pub fn reference(&self) -> Matrix<f32> {
        let [gate, up, down] = &self.weights.matrices;
        output(&self.holdout, gate, up, down)
    }

    /// The loss of a reconstruction against [`Expert::reference`].
    pub fn loss(
        &self,
        reference: &Matrix<f32>,
        gate: &Matrix<f32>,
        up: &Matrix<f32>,
        down: &Matrix<f32>,
    ) -> Loss {
        let got = output(&self.holdout, gate, up, down);
        let rows = reference.rows as f64;
        let (mut error, mut energy) = (0.0f64, 0.0f64);
        for (want, got) in reference.data.iter().zip(&got.data) {
            let want = f64::from(*want);
            error += (want - f64::from(*got)).powi(2);
            energy += want * want;
        }
        Loss { absolute: error / rows, energy: energy / rows }
    }
}

/// Decodes a packed tensor.
pub fn decode(packed: &impl PackedMatrix) -> Decoded {
    let dense = packed.dense();
    Decoded {
        packed_sha256: packed.packed_sha256(),
        reconstruction_sha256: packed.reconstruction_sha256(&dense),
        dense,
    }
}

/// `silu(x·gate) * (x·up)`, `[n, I]`.
pub fn intermediate(x: &Matrix<f32>, gate: &Matrix<f32>, up: &Matrix<f32>) -> Matrix<f32> {
    let mut gated = x.product(gate);
    gated.data.iter_mut().zip(&x.product(up).data).for_each(|(g, u)| *g = silu(*g) * u);
    gated
}

/// The expert's output, `[n, H]`.
pub fn output(x: &Matrix<f32>, gate: &Matrix<f32>, up: &Matrix<f32>, down: &Matrix<f32>) -> Matrix<f32> {
    intermediate(x, gate, up).product(down)
}
