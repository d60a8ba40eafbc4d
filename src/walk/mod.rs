//! The stages in order: state, journal, install, forward.

pub mod capture;
pub mod install;
pub mod journal;
pub mod progress;
pub mod state;
