//! Weight codecs. They know nothing of models: a codec sees matrices, covariances and vectors.

pub mod trellis;
