//! The command line: one file a command, progress, machine output.
