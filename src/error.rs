//! The one error type of the library.
//!
//! Every refusal says three things: what is wrong, where (file, tensor, layer, prompt, row, field; as far as known)
//! and what would be right. Exit codes follow from the kind: bad input is 2, a check that failed is 1, an interrupted
//! walk is 3.
//!
//! Names in a refusal come from files: control characters in them are written as escapes, so that a message stays one
//! line and a terminal takes no orders from a tensor's name.

use std::fmt::{self, Write};
use std::path::{Path, PathBuf};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can stop `walk`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused something on a named path.
    #[error("{}: {error}", path.display())]
    Io {
        /// The path the operation was on.
        path: PathBuf,
        /// What the system said. Not a `source`: the message above holds it already.
        error: std::io::Error,
    },
    /// An input is not what it has to be: a file, a tensor, a value, an argument. Exit code 2.
    #[error("{0}")]
    Refused(Box<Refusal>),
    /// Input was fine, but a result does not meet a check. Exit code 1.
    #[error("check failed: {0}")]
    Check(Box<Refusal>),
    /// The user asked to stop; the work directory can be resumed. Exit code 3.
    #[error("interrupted: {0}")]
    Interrupted(String),
    /// A tensor operation failed inside Candle: a defect of this program, not of the input.
    #[error("tensor operation failed: {0}")]
    Candle(#[from] candle_core::Error),
}

impl Error {
    /// An input/output error on `path`.
    pub fn io(path: impl Into<PathBuf>, error: std::io::Error) -> Self {
        Self::Io { path: path.into(), error }
    }

    /// Names the place in what was refused or failed a check; other errors stay as they are.
    #[must_use]
    pub fn place(self, name: impl FnOnce(Refusal) -> Refusal) -> Self {
        match self {
            Self::Refused(refusal) => Self::Refused(Box::new(name(*refusal))),
            Self::Check(refusal) => Self::Check(Box::new(name(*refusal))),
            other => other,
        }
    }

    /// The process exit code this error stands for: 1 a check failed, 2 usage or bad input, 3 interrupted.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Io { .. } | Self::Refused(_) => 2,
            Self::Check(_) | Self::Candle(_) => 1,
            Self::Interrupted(_) => 3,
        }
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(Box::new(refusal))
    }
}

/// What is wrong, where, and what would be right. Built with [`refuse`] and the methods that name the place.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Refusal {
    what: String,
    wanted: Option<String>,
    file: Option<PathBuf>,
    tensor: Option<String>,
    layer: Option<usize>,
    expert: Option<usize>,
    prompt: Option<String>,
    row: Option<usize>,
    field: Option<String>,
}

/// Starts a refusal: `refuse("dtype is F32").tensor(name).file(path).wanted("BF16")`.
pub fn refuse(what: impl Into<String>) -> Refusal {
    Refusal { what: what.into(), ..Refusal::default() }
}

impl Refusal {
    /// What would be right.
    #[must_use]
    pub fn wanted(mut self, wanted: impl Into<String>) -> Self {
        self.wanted = Some(wanted.into());
        self
    }

    /// Names the file. A place already named is kept: the innermost caller knows best.
    #[must_use]
    pub fn file(mut self, file: impl AsRef<Path>) -> Self {
        self.file.get_or_insert_with(|| file.as_ref().to_path_buf());
        self
    }

    /// Names the tensor.
    #[must_use]
    pub fn tensor(mut self, tensor: impl Into<String>) -> Self {
        self.tensor.get_or_insert_with(|| tensor.into());
        self
    }

    /// Names the decoder layer.
    #[must_use]
    pub fn layer(mut self, layer: usize) -> Self {
        self.layer.get_or_insert(layer);
        self
    }

    /// Names the routed expert.
    #[must_use]
    pub fn expert(mut self, expert: usize) -> Self {
        self.expert.get_or_insert(expert);
        self
    }

    /// Names the prompt by its id.
    #[must_use]
    pub fn prompt(mut self, prompt: impl Into<String>) -> Self {
        self.prompt.get_or_insert_with(|| prompt.into());
        self
    }

    /// Replaces a place in a call (`#3`), all the forward pass knows of a prompt, by the prompt's id.
    #[must_use]
    pub fn resolve_prompt(mut self, id_at: impl FnOnce(usize) -> Option<String>) -> Self {
        let place = self.prompt.as_deref().and_then(|p| p.strip_prefix('#')?.parse().ok());
        if let Some(id) = place.and_then(id_at) {
            self.prompt = Some(id);
        }
        self
    }

    /// Names the row (token position within the prompt, or global row id where no prompt is named).
    #[must_use]
    pub fn row(mut self, row: usize) -> Self {
        self.row.get_or_insert(row);
        self
    }

    /// Names the field of a JSON file, or the command-line option.
    #[must_use]
    pub fn field(mut self, field: impl Into<String>) -> Self {
        self.field.get_or_insert_with(|| field.into());
        self
    }

    /// Makes it a failed check (exit code 1) instead of bad input (exit code 2).
    pub fn check(self) -> Error {
        Error::Check(Box::new(self))
    }

    /// Makes it `Err(..)` of bad input.
    pub fn err<T>(self) -> Result<T> {
        Err(self.into())
    }
}

impl Refusal {
    fn sentence(&self) -> String {
        let mut places = Vec::new();
        if let Some(file) = &self.file {
            places.push(format!("{}", file.display()));
        }
        if let Some(field) = &self.field {
            places.push(format!("field `{field}`"));
        }
        if let Some(layer) = self.layer {
            places.push(format!("layer {layer}"));
        }
        if let Some(expert) = self.expert {
            places.push(format!("expert {expert}"));
        }
        if let Some(tensor) = &self.tensor {
            places.push(format!("tensor {tensor}"));
        }
        if let Some(prompt) = &self.prompt {
            places.push(format!("prompt {prompt:?}"));
        }
        if let Some(row) = self.row {
            places.push(format!("row {row}"));
        }
        let places = if places.is_empty() { String::new() } else { format!("{}: ", places.join(", ")) };
        let wanted = self.wanted.as_ref().map(|wanted| format!("; wanted: {wanted}")).unwrap_or_default();
        format!("{places}{}{wanted}", self.what)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.sentence().chars() {
            if c.is_control() { write!(f, "{}", c.escape_default())? } else { f.write_char(c)? }
        }
        Ok(())
    }
}

/// Adds a path to an [`std::io::Result`].
pub trait IoContext<T> {
    /// Turns an input/output error into [`Error::Io`] on `path`.
    fn at(self, path: impl AsRef<Path>) -> Result<T>;
}

impl<T> IoContext<T> for std::io::Result<T> {
    fn at(self, path: impl AsRef<Path>) -> Result<T> {
        self.map_err(|error| Error::io(path.as_ref(), error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_reads_as_one_sentence_with_its_place() {
        let refusal =
            refuse("value 7 is NaN").file("m.safetensors").layer(3).tensor("w").wanted("finite weights");
        assert_eq!(
            refusal.to_string(),
            "m.safetensors, layer 3, tensor w: value 7 is NaN; wanted: finite weights"
        );
        assert_eq!(Error::from(refusal.clone()).exit_code(), 2);
        assert_eq!(refusal.check().exit_code(), 1);
    }

    #[test]
    fn control_characters_of_a_name_are_escaped() {
        let refusal = refuse("twice\n").file("größe 1.safetensors").tensor("w\u{1b}[2J\r\u{9b}");
        assert_eq!(refusal.to_string(), "größe 1.safetensors, tensor w\\u{1b}[2J\\r\\u{9b}: twice\\n");
    }

    #[test]
    fn the_innermost_place_is_kept() {
        assert!(refuse("x").layer(1).layer(2).to_string().contains("layer 1"));
    }
}
