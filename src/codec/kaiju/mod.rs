//! KAIJU1: the Leech lattice for most columns, 8 bits for those that matter most.
//!
//! Columns (inputs) with the largest second moment go to a side-band of int8. The others are cut into blocks of 24, each a
//! point of the Leech lattice in 56 or 64 bits times a block scale of 4 bits times a row scale in f16. No rotation, no
//! tables beyond the Golay words, random access by 24 weights.
//!
//! Source: the public document `distributed-inference/KAIJU1_FORMAT.md` of forkjoin-ai/gnosis; `docs/formats/kaiju1.md` is
//! the format as it is read and written here.

pub mod blocks;
pub mod code;
pub mod decode;
pub mod encode;
pub mod feedback;
pub mod format;
pub mod golay;
pub mod leech;
pub mod region;
pub mod search;

pub use code::CodeWidth;
pub use encode::{Importance, encode};
pub use format::{Header, KaijuTensor, payload_bytes};

/// What an encode is to be like.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// Width of a block's code.
    pub code: CodeWidth,
    /// Share of the columns that goes to the side-band, before the bulk is rounded to blocks: 0 to 1.
    pub hi_frac: f64,
    /// Whether errors are fed forward through the off-diagonal of a full covariance, where there is one.
    pub feedback: bool,
}

impl Settings {
    /// Preset v1, the document's: 56 bits, a tenth of the columns in the side-band; about 3.05 bits a weight.
    pub fn v1() -> Self {
        Self { code: CodeWidth::P56, hi_frac: 0.1, feedback: true }
    }

    /// Preset v2: 64 bits, a fortieth of the columns; about 3.0 bits a weight.
    pub fn v2() -> Self {
        Self { code: CodeWidth::P64, hi_frac: 0.025, feedback: true }
    }
}
