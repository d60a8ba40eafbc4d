//! A checkpoint as the forward pass sees it: every packed linear decoded to the dense weight that a reader installs.
//!
//! Plain tensors load as they are. A packed module answers to the name of its weight, `{module}.weight` `[N, K]`, decoded
//! anew at every load: [`PackedModule::weight`].

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::packed::{PackedModule, packed_modules};
use super::trellis_tensors::TensorReader;
use super::{CheckpointDir, WeightSource};
use crate::error::{Result, refuse};
use crate::linalg::Matrix;

/// A checkpoint and its packed linears.
#[derive(Debug, Clone)]
pub struct Reconstruction {
    checkpoint: Arc<CheckpointDir>,
    packed: Arc<BTreeMap<String, PackedModule>>,
}

impl Reconstruction {
    /// Finds the packed linears of a checkpoint.
    ///
    /// # Errors
    /// As [`packed_modules`].
    pub fn new(checkpoint: Arc<CheckpointDir>) -> Result<Self> {
        let packed = Arc::new(packed_modules(&checkpoint)?);
        Ok(Self { checkpoint, packed })
    }

    /// Opens a checkpoint directory.
    ///
    /// # Errors
    /// As [`CheckpointDir::open`] and [`packed_modules`].
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        Self::new(Arc::new(CheckpointDir::open(dir)?))
    }

    /// The checkpoint.
    pub fn checkpoint(&self) -> &Arc<CheckpointDir> {
        &self.checkpoint
    }

    /// The packed linears by module.
    pub fn packed(&self) -> &BTreeMap<String, PackedModule> {
        &self.packed
    }

    /// The packed linear behind the name of a weight.
    pub fn packed_weight(&self, name: &str) -> Option<&PackedModule> {
        name.strip_suffix(".weight").and_then(|module| self.packed.get(module))
    }

    /// Names of the tensors the forward pass may ask for: plain ones, and the weights of packed modules; sorted.
    pub fn weights(&self) -> Vec<String> {
        let parts: BTreeSet<&str> = self.packed.values().flat_map(|module| module.form.tensors()).collect();
        let plain = self.checkpoint.names().filter(|name| !parts.contains(name)).map(str::to_owned);
        let mut names: Vec<String> =
            plain.chain(self.packed.values().map(PackedModule::weight_name)).collect();
        names.sort();
        names
    }

    /// The shape a tensor loads in.
    ///
    /// # Errors
    /// Names directory and tensor when it is missing.
    pub fn shape(&self, name: &str) -> Result<Vec<usize>> {
        match self.packed_weight(name) {
            Some(module) => Ok(vec![module.n, module.k]),
            None => Ok(self.checkpoint.info(name)?.info.shape.clone()),
        }
    }

    /// Refuses a tensor of another shape.
    ///
    /// # Errors
    /// Names file and tensor.
    pub fn check_shape(&self, name: &str, shape: &[usize]) -> Result<()> {
        let found = self.shape(name)?;
        if found == shape {
            return Ok(());
        }
        let file = match self.packed_weight(name) {
            Some(module) => self.checkpoint.file_of(module.form.main_tensor()),
            None => self.checkpoint.file_of(name),
        };
        refuse(format!("its shape is {found:?}")).file(file).tensor(name).wanted(format!("{shape:?}")).err()
    }
}

impl WeightSource for Reconstruction {
    fn contains(&self, name: &str) -> bool {
        self.checkpoint.contains(name) || self.packed_weight(name).is_some()
    }

    fn load(&self, name: &str, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
        let Some(module) = self.packed_weight(name) else {
            return self.checkpoint.load(name, shape, dtype, device);
        };
        self.check_shape(name, shape)?;
        on_device(module.weight(self.checkpoint.as_ref())?, dtype, device)
    }
}

/// A dense weight `[K, N]` as the tensor `[N, K]` that the forward pass installs.
///
/// # Errors
/// What Candle says.
pub fn install(dense: &Matrix<f32>, dtype: DType, device: &Device) -> Result<Tensor> {
    on_device(dense.transposed(), dtype, device)
}

fn on_device(weight: Matrix, dtype: DType, device: &Device) -> Result<Tensor> {
    Ok(Tensor::from_vec(weight.data, (weight.rows, weight.cols), device)?.to_dtype(dtype)?)
}
