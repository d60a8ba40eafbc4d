//! The inputs of a layer's linears, from the rolling state: their covariances, site by site.
//!
//! Prompts pass in batches, which bounds memory; a site's sum takes them one by one in plan order, so that it does not hang
//! on batches or threads. A site is asked of the layer as it is then, the linears of earlier sites packed and decoded: a
//! linear is calibrated on what it will be given. The MLP's input rows, which cost the layer's attention, are kept on disk
//! between its two sites.

use std::path::{Path, PathBuf};

use super::encode::SiteCovariance;
use crate::calibrate::covariance::Covariance;
use crate::corpus::SealedPrompt;
use crate::corpus::batch::{BATCH_TOKENS, batches, name_prompt};
use crate::error::{Error, Result};
use crate::linalg::Matrix;
use crate::model::{Layer, Site};
use crate::store::atomic::{create_dir_durably, remove_tree_durably};
use crate::store::safetensors_read::SafetensorsFile;
use crate::store::safetensors_write::{TensorData, write_safetensors};
use crate::store::tensor_dtype::TensorDtype;
use crate::walk::capture::layer_input;
use crate::walk::progress::{Observer, proceed};
use crate::walk::state::{StateManifest, read_prompt};

/// Folder of the kept rows within the scratch folder.
const ROWS_FOLDER: &str = "mlp-in";
/// The one tensor of their files.
const ROWS: &str = "rows";

/// What a layer is calibrated on.
pub struct Calibration<'a> {
    /// Scratch folder with the states.
    pub scratch: &'a Path,
    /// The state before the layer.
    pub state: &'a StateManifest,
    /// The calibration prompts in plan order.
    pub prompts: &'a [&'a SealedPrompt],
}

impl Calibration<'_> {
    /// The covariance of a site of `layer` as it is loaded. [`Site::MlpIn`] keeps its rows, [`Site::Gated`] takes them from
    /// there.
    ///
    /// # Errors
    /// Names layer, prompt and row of a value that is not finite; a covariance of nothing but zeros.
    pub fn covariance(&self, layer: &Layer, site: Site, observer: &dyn Observer) -> Result<SiteCovariance> {
        if site == Site::MlpIn {
            create_dir_durably(self.scratch.join(ROWS_FOLDER))?;
        }
        let mut sum: Option<Covariance> = None;
        observer.begin(
            &format!("calibrate {}", site.as_str()),
            Some(layer.index()),
            self.prompts.len() as u64,
        );
        for range in batches(self.prompts, BATCH_TOKENS) {
            proceed(observer)?;
            let batch = &self.prompts[range];
            for (prompt, rows) in batch.iter().zip(self.rows(layer, site, batch)?) {
                if site == Site::MlpIn {
                    self.keep(prompt, &rows)?;
                }
                sum.get_or_insert_with(|| Covariance::new(rows.cols)).add(&rows);
                observer.advance(&prompt.id);
            }
        }
        observer.end();
        let sum = sum.unwrap_or_else(|| Covariance::new(1));
        let rows = sum.rows();
        let matrix = sum.finish().map_err(|error| match error {
            Error::Refused(refusal) => refusal.layer(layer.index()).tensor(site.as_str()).into(),
            other => other,
        })?;
        Ok(SiteCovariance::new(site, matrix, rows))
    }

    fn rows(&self, layer: &Layer, site: Site, batch: &[&SealedPrompt]) -> Result<Vec<Matrix<f32>>> {
        if site == Site::Gated {
            return batch.iter().map(|prompt| layer.gated(&self.kept(prompt)?)).collect();
        }
        let read = |prompt: &&SealedPrompt| read_prompt(self.scratch, self.state, prompt);
        let (hidden, positions, carry) = layer_input(batch.iter().map(read).collect::<Result<_>>()?);
        layer.inputs(site, &hidden, &positions, &carry).map_err(name_prompt(batch))
    }

    fn rows_path(&self, prompt: &SealedPrompt) -> PathBuf {
        self.scratch.join(ROWS_FOLDER).join(format!("{}.safetensors", prompt.id))
    }

    fn keep(&self, prompt: &SealedPrompt, rows: &Matrix<f32>) -> Result<()> {
        let tensor = TensorData::f32(ROWS, &[rows.rows, rows.cols], &rows.data);
        write_safetensors(self.rows_path(prompt), &Default::default(), &[tensor])?;
        Ok(())
    }

    fn kept(&self, prompt: &SealedPrompt) -> Result<Matrix<f32>> {
        let file = SafetensorsFile::open(self.rows_path(prompt))?;
        let rows = prompt.token_ids.len();
        let width = file.info(ROWS)?.shape.last().copied().unwrap_or(0);
        let bytes = file.bytes_as(ROWS, TensorDtype::F32, &[rows, width])?;
        Ok(Matrix::new(rows, width, bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()))
    }

    /// Removes the kept rows.
    ///
    /// # Errors
    /// Names the folder.
    pub fn forget_rows(&self) -> Result<()> {
        remove_tree_durably(self.scratch.join(ROWS_FOLDER))
    }
}
