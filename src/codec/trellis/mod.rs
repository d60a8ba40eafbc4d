//! EXL3 ("TRELLIS"): block Hadamard incoherence, a tail-biting bit-shift trellis with a computed codebook (QTIP, arXiv
//! 2406.11235), LDLQ error feedback.

pub mod codebook;
pub mod encode;
pub mod f16;
pub mod factor;
pub mod hadamard;
pub mod ldlq;
pub mod linear;
pub mod own;
pub mod pack;
pub mod scales;
pub mod search;
pub mod tile;
