//! The element types of safetensors files that `walk` reads and writes.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Element type of a stored tensor, spelled as in safetensors headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum TensorDtype {
    BOOL,
    U8,
    I8,
    U16,
    I16,
    F16,
    BF16,
    U32,
    I32,
    F32,
    U64,
    I64,
    F64,
}

impl TensorDtype {
    /// All of them, narrow first.
    pub const ALL: [Self; 13] = [
        Self::BOOL,
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::F16,
        Self::BF16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    /// Bytes an element, which is also its alignment in a file.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::BOOL | Self::U8 | Self::I8 => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::BF16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    /// The header spelling.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::BOOL => "BOOL",
            Self::U8 => "U8",
            Self::I8 => "I8",
            Self::U16 => "U16",
            Self::I16 => "I16",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::U32 => "U32",
            Self::I32 => "I32",
            Self::F32 => "F32",
            Self::U64 => "U64",
            Self::I64 => "I64",
            Self::F64 => "F64",
        }
    }

    /// Reads the header spelling.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Bytes a tensor of `shape` takes, or `None` when that overflows.
    #[must_use]
    pub fn bytes_of(self, shape: &[usize]) -> Option<u64> {
        shape.iter().try_fold(self.size() as u64, |bytes, &n| bytes.checked_mul(u64::try_from(n).ok()?))
    }
}

impl fmt::Display for TensorDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_sizes_multiply_with_care() {
        for dtype in TensorDtype::ALL {
            assert_eq!(TensorDtype::from_name(dtype.name()), Some(dtype));
            assert_eq!(dtype.bytes_of(&[3, 2]), Some(6 * dtype.size() as u64));
        }
        assert_eq!(TensorDtype::from_name("F8_E4M3"), None);
        assert_eq!(TensorDtype::I32.bytes_of(&[]), Some(4));
        assert_eq!(TensorDtype::BOOL.bytes_of(&[1 << 40, 1 << 40]), None);
    }
}
