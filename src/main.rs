//! The `walk` command.

fn main() {}
