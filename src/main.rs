//! The `walk` command: parse, call the library, print one error chain, exit.

use std::io::{Write, stderr};
use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let cli = match walk::cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let code = if error.use_stderr() { 2 } else { 0 };
            // Nothing is left to do when even this cannot be printed.
            let _ = error.print();
            return ExitCode::from(code);
        }
    };
    walk::cli::interrupt::listen();
    match walk::cli::run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let code = error.exit_code();
            // A standard error that is gone changes nothing about the exit code.
            let _ = writeln!(stderr(), "error: {:#}", anyhow::Error::from(error));
            ExitCode::from(code)
        }
    }
}
