//! The command line: one file a command, progress, machine output.

pub mod output;
pub mod progress;
