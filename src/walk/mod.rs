//! The stages in order: state, journal, install, forward.

pub mod progress;
