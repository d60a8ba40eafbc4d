//! What an encode did, tensor by tensor.

use serde::Serialize;

use super::ImportanceSource;
use crate::eval::table::{aligned, figure};
use crate::inspect::printable;
use crate::store::hash::Hash;

/// What was encoded.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EncodeReport {
    /// What was read.
    pub input: String,
    /// What was written.
    pub output: String,
    /// The codec.
    pub codec: String,
    /// SHA-256 of the file.
    pub sha256: Hash,
    /// Its length.
    pub bytes: u64,
    /// Tensors that were copied, those of `left_plain` among them.
    pub copied: usize,
    /// Tensors encoded as flat because the importance had nothing of them.
    pub flat_fallbacks: usize,
    /// The encoded weights, by name.
    pub tensors: Vec<EncodedTensor>,
    /// 2-D tensors that stayed plain although no tensor was named.
    pub left_plain: Vec<LeftPlain>,
}

/// An encoded weight.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EncodedTensor {
    /// Its name.
    pub name: String,
    /// `[N, K]`.
    pub shape: [usize; 2],
    /// What it is stored as.
    pub stored: String,
    /// Bytes of all its tensors.
    pub bytes: u64,
    /// Bits a weight, of these bytes.
    pub bits_per_weight: f64,
    /// Σ h (w - q)² / Σ h w² of what the stored bytes decode to, h the diagonal of the importance.
    pub weighted_error: f64,
    /// tr(EᵀHE) / tr(WᵀHW), where the importance is a full Hessian.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proxy_error: Option<f64>,
    /// Rows that are not zero and became zero, since they are too small for the f16 scales of the form.
    pub vanished_rows: usize,
    /// Where the importance came from.
    pub importance: ImportanceSource,
}

/// A 2-D tensor that stayed plain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LeftPlain {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Why.
    pub reason: String,
}

impl EncodeReport {
    /// Bits a weight over all encoded weights.
    pub fn bits_per_weight(&self) -> f64 {
        let weights: f64 =
            self.tensors.iter().map(|tensor| tensor.shape[0] as f64 * tensor.shape[1] as f64).sum();
        self.tensors.iter().map(|tensor| tensor.bytes as f64).sum::<f64>() * 8.0 / weights
    }

    /// The report as plain text.
    pub fn render_table(&self) -> String {
        let full = self.tensors.iter().any(|tensor| tensor.proxy_error.is_some());
        let row = |tensor: &EncodedTensor| {
            let mut row = vec![
                printable(&tensor.name),
                format!("{:?}", tensor.shape),
                tensor.stored.clone(),
                figure(tensor.bits_per_weight, 4),
                figure(tensor.weighted_error, 6),
            ];
            if full {
                row.push(tensor.proxy_error.map_or("-".into(), |error| figure(error, 6)));
            }
            row.push(tensor.importance.name().to_owned());
            row
        };
        let mut header = vec!["tensor", "shape", "stored as", "bits a weight", "weighted error"];
        if full {
            header.push("full error");
        }
        header.push("importance");
        let mut text = aligned(&header, &self.tensors.iter().map(row).collect::<Vec<_>>());
        if !self.left_plain.is_empty() {
            let row = |left: &LeftPlain| {
                vec![printable(&left.name), format!("{:?}", left.shape), left.reason.clone()]
            };
            let rows: Vec<Vec<String>> = self.left_plain.iter().map(row).collect();
            text.push_str(&format!("\n{}", aligned(&["left plain", "shape", "because"], &rows)));
        }
        let bits = figure(self.bits_per_weight(), 4);
        text.push_str(&format!("\n{} encoded at {bits} bits a weight", self.tensors.len()));
        if self.flat_fallbacks > 0 {
            text.push_str(&format!(", {} of them as flat for want of importance", self.flat_fallbacks));
        }
        text.push_str(&format!("; {} copied", self.copied));
        if !self.left_plain.is_empty() {
            text.push_str(&format!(", {} of them 2-D", self.left_plain.len()));
        }
        text.push_str(&format!("; {} bytes in {}\n", self.bytes, self.output));
        text
    }
}
