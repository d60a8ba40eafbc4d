//! The stages in order: state, capture, probes, final encode, audits, emit, forward; and the journal that seals them.

pub mod capture;
pub mod choosing;
pub mod driver;
pub mod emit;
pub mod feasibility;
pub mod finals;
pub mod forward;
pub mod install;
pub mod install_audit;
pub mod interaction;
pub mod journal;
pub mod kept;
pub mod layer;
pub mod locations;
pub mod numeric;
pub mod open;
pub mod outcome;
pub mod preflight;
pub mod probing;
pub mod progress;
pub mod replay;
pub mod sealed_files;
pub mod search;
pub mod search_record;
pub mod state;
pub mod tolerance;
