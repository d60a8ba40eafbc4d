//! The tensors of one packed linear, as every EXL3 layout spells them: `trellis`, `suh`, `svh` and a codebook marker.
//!
//! `trellis` is I16 `[K/16, N/16, 16 * bits]`, `suh` F16 `[K]`, `svh` F16 `[N]`; the marker is an I32 scalar called `mcg` or
//! `mul1`, whose value is fixed; a linear without one is of the codebook 3inst. Layouts differ in what the tensors are
//! called and in which of them are shared; see [`packed`](super::packed).
//!
//! Source: exllamav3 v0.0.43, `exllamav3/modules/quant/exl3.py`.

use std::path::PathBuf;

use half::f16;

use super::CheckpointDir;
use crate::codec::trellis::codebook::Codebook;
use crate::codec::trellis::linear::TrellisLinear;
use crate::codec::trellis::pack;
use crate::codec::trellis::tile::TILE_DIM;
use crate::error::{Error, Result, refuse};
use crate::store::safetensors_read::{SafetensorsFile, TensorInfo};
use crate::store::safetensors_write::TensorData;
use crate::store::tensor_dtype::TensorDtype;

/// A file or a directory that tensors are read from by name.
pub trait TensorReader: Sync {
    /// Dtype, shape and place of a tensor.
    ///
    /// # Errors
    /// Names the tensor when it is missing.
    fn tensor_info(&self, name: &str) -> Result<&TensorInfo>;
    /// Its payload.
    ///
    /// # Errors
    /// Names the tensor when it is missing or its file changed.
    fn tensor_payload(&self, name: &str) -> Result<&[u8]>;
    /// The file it is in, or would be.
    fn file_of(&self, name: &str) -> PathBuf;
}

impl TensorReader for SafetensorsFile {
    fn tensor_info(&self, name: &str) -> Result<&TensorInfo> {
        self.info(name)
    }
    fn tensor_payload(&self, name: &str) -> Result<&[u8]> {
        self.bytes(name)
    }
    fn file_of(&self, _: &str) -> PathBuf {
        self.path().to_path_buf()
    }
}

impl TensorReader for CheckpointDir {
    fn tensor_info(&self, name: &str) -> Result<&TensorInfo> {
        Ok(self.info(name)?.info)
    }
    fn tensor_payload(&self, name: &str) -> Result<&[u8]> {
        self.tensor_bytes(name)
    }
    fn file_of(&self, name: &str) -> PathBuf {
        self.info(name).map_or_else(|_| self.dir().to_path_buf(), |place| self.dir().join(place.file))
    }
}

/// What the tensors of a linear are called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinearNames {
    /// The packed tiles.
    pub trellis: String,
    /// The input side's vector.
    pub suh: String,
    /// The output side's vector.
    pub svh: String,
    /// The marker's tensor, where there has to be one.
    pub marker: Option<String>,
    /// The codebook that the marker, or its absence, says.
    pub codebook: Codebook,
}

impl LinearNames {
    /// Names under a module whose tensors are all its own: `{module}.trellis` and so on.
    pub fn own(module: &str, codebook: Codebook) -> Self {
        let name = |part: &str| format!("{module}.{part}");
        Self {
            trellis: name("trellis"),
            suh: name("suh"),
            svh: name("svh"),
            marker: codebook.marker().map(|_| name(codebook.name())),
            codebook,
        }
    }

    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = &str> {
        [&self.trellis, &self.suh, &self.svh].into_iter().chain(&self.marker).map(String::as_str)
    }

    /// `K`, `N` and bits a weight of the stored trellis.
    ///
    /// # Errors
    /// Names file and tensor of a trellis that is missing or of no such shape, or whose sizes are no multiples of 128.
    pub fn extent(&self, tensors: &dyn TensorReader) -> Result<(usize, usize, u32)> {
        let info = tensors.tensor_info(&self.trellis)?;
        let fits = |tiles: usize| tiles > 0 && tiles.is_multiple_of(128 / TILE_DIM);
        match info.shape[..] {
            [rows, cols, words]
                if info.dtype == TensorDtype::I16
                    && fits(rows)
                    && fits(cols)
                    && words.is_multiple_of(16)
                    && (1..=8).contains(&(words / 16)) =>
            {
                Ok((rows * TILE_DIM, cols * TILE_DIM, (words / 16) as u32))
            }
            _ => refuse(format!("it is {} of shape {:?}", info.dtype, info.shape))
                .file(tensors.file_of(&self.trellis))
                .tensor(&self.trellis)
                .wanted(
                    "I16 of shape [inputs / 16, outputs / 16, 16 * bits], sizes multiples of 128, 1 to 8 bits",
                )
                .err(),
        }
    }

    /// Reads the linear.
    ///
    /// # Errors
    /// Names file and tensor of what is missing, of another type or shape, a marker of another value, or a vector entry
    /// that is zero or not finite.
    pub fn read(&self, tensors: &dyn TensorReader) -> Result<TrellisLinear> {
        let (k, n, bits) = self.extent(tensors)?;
        let half = |name: &str, len: usize| -> Result<Vec<f16>> {
            let bytes = payload_as(tensors, name, TensorDtype::F16, &[len])?;
            let vector: Vec<f16> = bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b)).collect();
            match vector.iter().position(|x| !x.is_finite() || x.to_f32() == 0.0) {
                None => Ok(vector),
                Some(at) => refuse(format!("value {} at flat index {at}", vector[at]))
                    .file(tensors.file_of(name))
                    .tensor(name)
                    .wanted("finite, non-zero f16 values")
                    .err(),
            }
        };
        self.check_marker(tensors)?;
        let words = tensors.tensor_payload(&self.trellis)?;
        let words = words.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b)).collect();
        let (suh, svh) = (half(&self.suh, k)?, half(&self.svh, n)?);
        TrellisLinear::new((k, n), bits, self.codebook, words, suh, svh).map_err(|error| match error {
            Error::Refused(refusal) => {
                refusal.file(tensors.file_of(&self.trellis)).tensor(&self.trellis).into()
            }
            other => other,
        })
    }

    /// The marker is there and says what its name says.
    ///
    /// # Errors
    /// Names file and marker.
    pub fn check_marker(&self, tensors: &dyn TensorReader) -> Result<()> {
        let (Some(marker), Some(wanted)) = (&self.marker, self.codebook.marker()) else { return Ok(()) };
        let found = payload_as(tensors, marker, TensorDtype::I32, &[])?;
        if found == wanted.to_le_bytes() {
            return Ok(());
        }
        let found = found.iter().rev().fold(String::new(), |hex, byte| format!("{hex}{byte:02X}"));
        refuse(format!("codebook marker 0x{found}"))
            .file(tensors.file_of(marker))
            .tensor(marker)
            .wanted(format!("0x{wanted:08X}"))
            .err()
    }

    /// The linear as tensors of these names; the vectors that `shared` names are left out.
    pub fn tensors(&self, linear: &TrellisLinear, shared: impl Fn(&str) -> bool) -> Vec<TensorData<'static>> {
        let shape = [linear.k / TILE_DIM, linear.n / TILE_DIM, pack::words(linear.bits)];
        let words: Vec<i16> = linear.trellis.iter().map(|&word| word as i16).collect();
        let mut tensors = vec![TensorData::i16(&*self.trellis, &shape, &words)];
        for (name, vector) in [(&self.suh, &linear.suh), (&self.svh, &linear.svh)] {
            if !shared(name) {
                tensors.push(TensorData::f16(&**name, &[vector.len()], vector));
            }
        }
        if let (Some(name), Some(marker)) = (&self.marker, linear.codebook.marker()) {
            tensors.push(TensorData::i32(&**name, &[], &[marker as i32]));
        }
        tensors
    }
}

/// The payload of a tensor of this type and shape.
fn payload_as<'a>(
    tensors: &'a dyn TensorReader,
    name: &str,
    dtype: TensorDtype,
    shape: &[usize],
) -> Result<&'a [u8]> {
    let info = tensors.tensor_info(name)?;
    if info.dtype == dtype && info.shape == shape {
        return tensors.tensor_payload(name);
    }
    refuse(format!("it is {} of shape {:?}", info.dtype, info.shape))
        .file(tensors.file_of(name))
        .tensor(name)
        .wanted(format!("{dtype} of shape {shape:?}"))
        .err()
}
