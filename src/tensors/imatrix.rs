//! Importance matrices of llama.cpp in GGUF: for every weight that a matrix product used, the sums of x² by input and how
//! many rows they are the sum of.
//!
//! `{name}.in_sum2` F32 of rows of K values, one a matrix, and `{name}.counts` F32, one a matrix; `general.type` is
//! `imatrix`. All experts of a layer are one weight with a matrix each. Names are llama.cpp's (`blk.7.ffn_down.weight`) or
//! the checkpoint's own.
//!
//! Source: `tools/imatrix/README.md` and `imatrix.cpp` of ggml-org/llama.cpp.

use std::path::Path;

use super::importance::{Found, ImportanceSource, checked};
use super::llama_names::llama_name;
use crate::error::{Result, refuse};
use crate::store::gguf::GgufFile;

/// An importance matrix.
#[derive(Debug)]
pub struct Imatrix(GgufFile);

impl Imatrix {
    /// Opens a file.
    ///
    /// # Errors
    /// As [`GgufFile::open`]; names a file that is no importance matrix.
    pub fn open(path: &Path) -> Result<Self> {
        let file = GgufFile::open(path)?;
        match file.text("general.type") {
            Some("imatrix") => Ok(Self(file)),
            found => refuse(match found {
                Some(other) => format!("it says {other:?}"),
                None => "it does not say".to_owned(),
            })
            .file(path)
            .field("general.type")
            .wanted("imatrix")
            .err(),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// The mean of x² of the `cols` inputs of a weight.
    pub(super) fn find(&self, weight: &str, cols: usize) -> Result<Found> {
        let known = llama_name(weight);
        let own = [Some((weight.to_owned(), None)), known.clone()].into_iter().flatten();
        let entry = own.into_iter().find(|(name, _)| self.0.tensor(&format!("{name}.in_sum2")).is_some());
        let Some((name, expert)) = entry else {
            let names = known.map_or(String::new(), |(name, _)| format!(" or {name}"));
            return Ok(Found::Missing(format!("there is no entry {weight}{names}")));
        };
        let (sums_name, counts_name) = (format!("{name}.in_sum2"), format!("{name}.counts"));
        let wrong = |tensor: &str, what: String| refuse(what).file(self.path()).tensor(tensor);
        let (Some(sums), Some(counts)) = (self.0.tensor(&sums_name), self.0.tensor(&counts_name)) else {
            return wrong(&counts_name, "there is no such tensor".into())
                .wanted(format!("one beside {sums_name}"))
                .err();
        };
        if sums.cols != cols as u64 {
            return wrong(&sums_name, format!("{} values for the {cols} inputs of {weight}", sums.cols))
                .wanted(format!("{cols}"))
                .err();
        }
        // One a matrix, whether the writer kept the innermost extent of 1 or not.
        if counts.cols.checked_mul(counts.rows) != Some(sums.rows) {
            return wrong(&counts_name, format!("{} x {} counts", counts.rows, counts.cols))
                .wanted(format!("{}, one for each matrix of {sums_name}", sums.rows))
                .err();
        }
        let matrix = expert.unwrap_or(0);
        if matrix >= sums.rows || (expert.is_none() && sums.rows != 1) {
            return wrong(&sums_name, format!("{} matrices", sums.rows))
                .wanted(expert.map_or("1".to_owned(), |expert| format!("one for expert {expert}")))
                .err();
        }
        let counts = self.0.rows(&counts_name, 0, counts.rows)?;
        let count = f64::from(counts[matrix as usize]);
        if !count.is_finite() || count < 0.0 {
            return wrong(&counts_name, format!("count {matrix} is {count}"))
                .wanted("a finite number from 0")
                .err();
        }
        if count == 0.0 {
            return Ok(Found::Missing(format!(
                "count {matrix} of {counts_name} is 0: no row went through it"
            )));
        }
        let sums = self.0.rows(&sums_name, matrix, 1)?;
        let means = sums.iter().map(|&sum| f64::from(sum) / count).collect();
        checked(means, ImportanceSource::Imatrix)
            .map_err(|error| error.place(|refusal| refusal.file(self.path()).tensor(&sums_name)))
    }
}
