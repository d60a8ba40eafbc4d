//! Matrix products of the forward pass, all behind one function.
//!
//! Purpose: `y = x Wᵀ (+ b)` in f32, for weights, attention scores and probabilities alike.
//!
//! Invariant: the bytes of a row of the result depend on that row of `x` and on `W` alone, not on how many rows share
//! the call, on its place among them, on the number of threads, or on the run. Candle's CPU product (the `gemm` crate)
//! does not give that by itself: it picks kernels and the depth of its blocks by the number of rows. Every product
//! therefore runs on exactly [`BLOCK_ROWS`] rows, the last block padded with zeros, so that one weight matrix always
//! meets one and the same kernel. That a row's place in the block does not matter is tested over the shapes in use.
//!
//! What it does not do: promise the same bytes on another kind of CPU (the kernel and the cache sizes differ).

use candle_core::{DType, Device, Storage, Tensor};
use rayon::prelude::*;

use crate::checkpoint::WeightSource;
use crate::error::{Result, refuse};

/// Rows of every matrix product.
pub const BLOCK_ROWS: usize = 128;

/// Multiplies at most [`BLOCK_ROWS`] rows: `x [n, k]` (flat) times `rhs [k, m]` gives `[n, m]` (flat).
///
/// # Errors
/// When `rhs` is no f32 matrix on the CPU or the sizes do not fit together.
pub fn multiply_block(x: &[f32], rhs: &Tensor) -> Result<Vec<f32>> {
    let (k, m) = rhs.dims2()?;
    let rows = x.len() / k.max(1);
    if rows * k != x.len() || rows > BLOCK_ROWS {
        return refuse(format!("a block of {} values for a matrix of {k} rows", x.len()))
            .wanted(format!("whole rows, at most {BLOCK_ROWS}"))
            .err();
    }
    let block = if rows == BLOCK_ROWS {
        Tensor::from_slice(x, (BLOCK_ROWS, k), &Device::Cpu)?
    } else {
        let mut padded = vec![0f32; BLOCK_ROWS * k];
        padded[..x.len()].copy_from_slice(x);
        Tensor::from_vec(padded, (BLOCK_ROWS, k), &Device::Cpu)?
    };
    let product = block.matmul(rhs)?;
    let (storage, layout) = product.storage_and_layout();
    match &*storage {
        Storage::Cpu(cpu) => {
            let start = layout.start_offset();
            Ok(cpu.as_slice::<f32>()?[start..start + rows * m].to_vec())
        }
        _ => refuse("a matrix product left the CPU").wanted("CPU tensors").err(),
    }
}

/// Multiplies any number of rows, block by block and in parallel: `x [n, k]` times `rhs [k, m]`, both flat, `[n, m]`.
///
/// # Errors
/// As [`multiply_block`].
pub fn multiply(x: &[f32], rhs: &Tensor) -> Result<Vec<f32>> {
    let (k, m) = rhs.dims2()?;
    if x.len() <= BLOCK_ROWS * k {
        return multiply_block(x, rhs);
    }
    let blocks: Vec<Vec<f32>> =
        x.par_chunks(BLOCK_ROWS * k).map(|block| multiply_block(block, rhs)).collect::<Result<_>>()?;
    let mut out = Vec::with_capacity(x.len() / k * m);
    for block in blocks {
        out.extend_from_slice(&block);
    }
    Ok(out)
}

/// A linear module of the checkpoint: weight `[out, in]` and, where the config says so, a bias `[out]`.
#[derive(Debug, Clone)]
pub struct Linear {
    /// `[out, in]` as the checkpoint has it; the product reads its transposed view.
    weight: Tensor,
    bias: Option<Vec<f32>>,
}

impl Linear {
    /// Wraps a weight `[out, in]` of type f32 on the CPU.
    ///
    /// # Errors
    /// When the tensor is no f32 CPU matrix, or the bias has not one value per output.
    pub fn new(weight: &Tensor, bias: Option<Vec<f32>>) -> Result<Self> {
        let (out, _) = weight.dims2()?;
        if weight.dtype() != DType::F32 || !weight.device().is_cpu() {
            return refuse(format!("a weight of type {:?}", weight.dtype())).wanted("f32 on the CPU").err();
        }
        if let Some(bias) = &bias
            && bias.len() != out
        {
            return refuse(format!("a bias of {} values", bias.len())).wanted(format!("{out} values")).err();
        }
        Ok(Self { weight: weight.contiguous()?, bias })
    }

    /// Loads the weight `name` of shape `[out, in]`, without bias.
    ///
    /// # Errors
    /// What the source says.
    pub fn load(
        weights: &dyn WeightSource,
        name: &str,
        out: usize,
        input: usize,
        device: &Device,
    ) -> Result<Self> {
        Self::new(&weights.load(name, &[out, input], DType::F32, device)?, None)
    }

    /// Adds the bias `name`.
    ///
    /// # Errors
    /// What the source says.
    pub fn with_bias(mut self, weights: &dyn WeightSource, name: &str, device: &Device) -> Result<Self> {
        let out = self.out_features();
        self.bias = Some(weights.load(name, &[out], DType::F32, device)?.to_vec1()?);
        Ok(self)
    }

    /// Width of the result.
    pub fn out_features(&self) -> usize {
        self.weight.dims()[0]
    }

    /// `x [n, in]` (flat) to `[n, out]` (flat).
    ///
    /// # Errors
    /// When `x` is not made of whole rows.
    pub fn forward(&self, x: &[f32]) -> Result<Vec<f32>> {
        self.add_bias(multiply(x, &self.weight.t()?)?)
    }

    /// The same for at most [`BLOCK_ROWS`] rows, on the calling thread.
    ///
    /// # Errors
    /// As [`multiply_block`].
    pub fn forward_block(&self, x: &[f32]) -> Result<Vec<f32>> {
        self.add_bias(multiply_block(x, &self.weight.t()?)?)
    }

    fn add_bias(&self, mut y: Vec<f32>) -> Result<Vec<f32>> {
        if let Some(bias) = &self.bias {
            for row in y.chunks_exact_mut(bias.len()) {
                for (y, b) in row.iter_mut().zip(bias) {
                    *y += b;
                }
            }
        }
        Ok(y)
    }
}

/// Copies a tensor `[n, width]` into flat f32 rows.
///
/// # Errors
/// When it is no matrix of that width.
pub(super) fn rows_of(tensor: &Tensor, width: usize) -> Result<Vec<f32>> {
    match tensor.dims() {
        [_, w] if *w == width => Ok(tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?),
        dims => refuse(format!("a tensor of shape {dims:?}")).wanted(format!("[rows, {width}]")).err(),
    }
}

/// Wraps flat rows as a tensor `[n, width]` on the CPU.
///
/// # Errors
/// When they are not whole rows.
pub(super) fn tensor_of(rows: Vec<f32>, width: usize) -> Result<Tensor> {
    let count = rows.len() / width.max(1);
    Ok(Tensor::from_vec(rows, (count, width), &Device::Cpu)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(count: usize, mut seed: u64) -> Vec<f32> {
        (0..count)
            .map(|_| {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                ((seed >> 40) as f32 / (1u64 << 24) as f32) - 0.5
            })
            .collect()
    }

    #[test]
    #[ignore = "a measurement, not a check"]
    fn speed() {
        for (k, m) in [(256, 768), (768, 256), (256, 256), (128, 48), (64, 80), (256, 2048), (6144, 2048)] {
            let x = noise(8192 * k / if k > 1000 { 8 } else { 1 }, 1);
            let w = Tensor::from_vec(noise(k * m, 2), (m, k), &Device::Cpu).unwrap();
            let wt = w.t().unwrap().contiguous().unwrap();
            let flops = 2.0 * (x.len() * m) as f64;
            for (label, rhs) in [("t view", w.t().unwrap()), ("contiguous", wt)] {
                let start = std::time::Instant::now();
                let mut n = 0;
                while start.elapsed().as_secs_f64() < 0.5 {
                    multiply(&x, &rhs).unwrap();
                    n += 1;
                }
                println!(
                    "{k}x{m} {label}: {:.1} GFLOP/s",
                    flops * n as f64 / start.elapsed().as_secs_f64() / 1e9
                );
            }
        }
    }
}
