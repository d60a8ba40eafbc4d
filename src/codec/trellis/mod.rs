//! EXL3 ("TRELLIS"): block Hadamard incoherence, a tail-biting bit-shift trellis with a computed codebook (QTIP, arXiv
//! 2406.11235), LDLQ error feedback.

pub mod search;
