//! The stages in order: state, journal, install, forward.

pub mod capture;
pub mod driver;
pub mod emit;
pub mod finals;
pub mod forward;
pub mod install;
pub mod journal;
pub mod layer;
pub mod preflight;
pub mod probing;
pub mod progress;
pub mod state;
