//! The codec of a walk and what it packs: TRELLIS or KAIJU1 behind one [`Codec`].

use std::sync::atomic::{AtomicU64, Ordering};

use super::kaiju::{CodeWidth, Importance, KaijuTensor, Settings, encode};
use super::trellis::encode::TrellisCodec;
use super::trellis::linear::TrellisLinear;
use super::{Codec, EncodeJob, PackedMatrix, Vectors};
use crate::config::kaiju1::{Kaiju1, Kaiju1Setting};
use crate::error::{Result, refuse};
use crate::linalg::Matrix;
use crate::store::hash::sha256_hex;

/// The KAIJU1 encoder of a walk. It rotates nothing and fits no scale beforehand; the `bits` of a job count its rungs.
pub struct KaijuCodec {
    /// What a tensor can be encoded as.
    pub rungs: Vec<Settings>,
    encodes: AtomicU64,
}

impl KaijuCodec {
    /// The encoder of a recipe's settings.
    ///
    /// # Errors
    /// A code width that is none.
    pub fn new(knobs: &Kaiju1) -> Result<Self> {
        let rungs = knobs.settings().into_iter().map(|setting| settings(&setting, knobs.feedback));
        Ok(Self { rungs: rungs.collect::<Result<_>>()?, encodes: AtomicU64::new(0) })
    }
}

/// A recipe's setting as the encoder takes it.
///
/// # Errors
/// A code width that is none.
pub fn settings(setting: &Kaiju1Setting, feedback: bool) -> Result<Settings> {
    Ok(Settings { code: CodeWidth::from_bits(setting.code_bits)?, hi_frac: setting.hi_frac.0, feedback })
}

impl Codec for KaijuCodec {
    type Packed = KaijuTensor;

    /// 1: row and block scales are found by each encode.
    fn fit_scale(&self, _: &Matrix<f32>, _: &Vectors, _: u32, _: u64) -> Result<f64> {
        Ok(1.0)
    }

    fn input_score(&self, _: &EncodeJob<'_>) -> Result<f64> {
        no_search()
    }

    fn noise(&self, _: &EncodeJob<'_>, _: usize, _: u64) -> Result<f64> {
        no_search()
    }

    fn encode(&self, job: &EncodeJob<'_>) -> Result<KaijuTensor> {
        let Some(settings) = self.rungs.get(job.bits as usize) else {
            return refuse(format!("rung {}", job.bits))
                .wanted(format!("0 to {}", self.rungs.len() - 1))
                .err();
        };
        let mut covariance = job.covariance.clone();
        let k = covariance.rows;
        let diagonal = |at: usize| at * (k + 1);
        let mean = (0..k).map(|at| f64::from(covariance.data[diagonal(at)])).sum::<f64>() / k as f64;
        for at in 0..k {
            let value = &mut covariance.data[diagonal(at)];
            *value = (f64::from(*value) + job.sigma_reg * mean) as f32;
        }
        let packed = encode(&job.weight.transposed(), Importance::Full(&covariance), settings)?;
        self.encodes.fetch_add(1, Ordering::Relaxed);
        Ok(packed)
    }
}

fn no_search() -> Result<f64> {
    refuse("there is nothing to search before an encode").field("codec").wanted("\"trellis\"").err()
}

impl PackedMatrix for KaijuTensor {
    fn dense(&self) -> Matrix<f32> {
        KaijuTensor::dense(self).transposed()
    }

    fn packed_sha256(&self) -> String {
        KaijuTensor::packed_sha256(self)
    }

    fn reconstruction_sha256(&self, dense: &Matrix<f32>) -> String {
        sha256_hex(&dense.data.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())
    }

    fn scale_outputs(&mut self, _: &[f64]) -> Result<()> {
        refuse("a KAIJU1 tensor has no output vector").field("codec").wanted("\"trellis\"").err()
    }
}

/// The codec of a walk.
pub enum WeightCodec {
    /// EXL3.
    Trellis(TrellisCodec),
    /// KAIJU1.
    Kaiju1(KaijuCodec),
}

impl WeightCodec {
    /// The trellis encoder.
    ///
    /// # Errors
    /// When it is another.
    pub fn trellis(&self) -> Result<&TrellisCodec> {
        match self {
            Self::Trellis(codec) => Ok(codec),
            Self::Kaiju1(_) => other_codec(),
        }
    }

    /// Matrices encoded so far.
    pub fn encodes(&self) -> u64 {
        match self {
            Self::Trellis(codec) => codec.encodes(),
            Self::Kaiju1(codec) => codec.encodes.load(Ordering::Relaxed),
        }
    }
}

fn other_codec<T>() -> Result<T> {
    refuse("this is done for the trellis codec only").field("codec").wanted("\"trellis\"").err()
}

impl Codec for WeightCodec {
    type Packed = PackedWeight;

    fn fit_scale(&self, weight: &Matrix<f32>, vectors: &Vectors, bits: u32, seed: u64) -> Result<f64> {
        match self {
            Self::Trellis(codec) => codec.fit_scale(weight, vectors, bits, seed),
            Self::Kaiju1(codec) => codec.fit_scale(weight, vectors, bits, seed),
        }
    }

    fn input_score(&self, job: &EncodeJob<'_>) -> Result<f64> {
        match self {
            Self::Trellis(codec) => codec.input_score(job),
            Self::Kaiju1(codec) => codec.input_score(job),
        }
    }

    fn noise(&self, job: &EncodeJob<'_>, tiles: usize, seed: u64) -> Result<f64> {
        match self {
            Self::Trellis(codec) => codec.noise(job, tiles, seed),
            Self::Kaiju1(codec) => codec.noise(job, tiles, seed),
        }
    }

    fn encode(&self, job: &EncodeJob<'_>) -> Result<PackedWeight> {
        match self {
            Self::Trellis(codec) => codec.encode(job).map(PackedWeight::Trellis),
            Self::Kaiju1(codec) => codec.encode(job).map(PackedWeight::Kaiju1),
        }
    }
}

/// A packed matrix of either codec.
#[derive(Debug, Clone, PartialEq)]
pub enum PackedWeight {
    /// EXL3.
    Trellis(TrellisLinear),
    /// KAIJU1.
    Kaiju1(KaijuTensor),
}

impl PackedWeight {
    /// The trellis linear.
    ///
    /// # Errors
    /// When it is of another codec.
    pub fn into_trellis(self) -> Result<TrellisLinear> {
        match self {
            Self::Trellis(linear) => Ok(linear),
            Self::Kaiju1(_) => other_codec(),
        }
    }

    /// The KAIJU1 tensor.
    ///
    /// # Errors
    /// When it is of another codec.
    pub fn into_kaiju1(self) -> Result<KaijuTensor> {
        match self {
            Self::Trellis(_) => {
                refuse("a weight of the trellis codec").field("codec").wanted("\"kaiju1\"").err()
            }
            Self::Kaiju1(tensor) => Ok(tensor),
        }
    }

    /// Inputs and outputs.
    pub fn sizes(&self) -> (usize, usize) {
        match self {
            Self::Trellis(linear) => (linear.k, linear.n),
            Self::Kaiju1(tensor) => (tensor.cols(), tensor.rows()),
        }
    }
}

impl PackedMatrix for PackedWeight {
    fn dense(&self) -> Matrix<f32> {
        match self {
            Self::Trellis(linear) => PackedMatrix::dense(linear),
            Self::Kaiju1(tensor) => PackedMatrix::dense(tensor),
        }
    }

    fn packed_sha256(&self) -> String {
        match self {
            Self::Trellis(linear) => linear.packed_sha256(),
            Self::Kaiju1(tensor) => PackedMatrix::packed_sha256(tensor),
        }
    }

    fn reconstruction_sha256(&self, dense: &Matrix<f32>) -> String {
        match self {
            Self::Trellis(linear) => linear.reconstruction_sha256(dense),
            Self::Kaiju1(tensor) => tensor.reconstruction_sha256(dense),
        }
    }

    fn scale_outputs(&mut self, factors: &[f64]) -> Result<()> {
        match self {
            Self::Trellis(linear) => linear.scale_outputs(factors),
            Self::Kaiju1(tensor) => tensor.scale_outputs(factors),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::kaiju1::Kaiju1Preset;

    #[test]
    fn a_recipes_presets_are_the_encoders() {
        for (preset, wanted) in [(Kaiju1Preset::V1, Settings::v1()), (Kaiju1Preset::V2, Settings::v2())] {
            assert_eq!(KaijuCodec::new(&Kaiju1::of(preset)).unwrap().rungs, [wanted]);
        }
    }
}
