//! Calibration and evaluation text: what the user writes and what the walk seals.
