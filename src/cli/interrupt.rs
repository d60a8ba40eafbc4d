//! Ctrl-C: the first asks the work in hand to end after its unit, the second ends the process.
//!
//! Nothing is lost either way: artifacts are published by rename and stages are sealed, so a process may end at any instant.

use std::io::{Write, stderr};
use std::sync::atomic::{AtomicBool, Ordering};

/// Exit code of an interrupted command.
pub const INTERRUPTED: i32 = 3;

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// Whether the user asked to stop.
pub fn requested() -> bool {
    REQUESTED.load(Ordering::Relaxed)
}

/// Listens for Ctrl-C. A request to terminate ends the process at once, which loses nothing either, and a hang-up that is
/// ignored (`nohup`) stays ignored.
pub fn listen() {
    let installed = ctrlc::set_handler(|| {
        // A standard error that is gone changes nothing.
        if REQUESTED.swap(true, Ordering::Relaxed) {
            let _ =
                writeln!(stderr(), "\nstopped at once: the same command goes on from the last finished unit");
            std::process::exit(INTERRUPTED);
        }
        let _ = writeln!(stderr(), "\nstopping after the unit in hand; Ctrl-C again stops at once");
    });
    if let Err(error) = installed {
        let _ = writeln!(stderr(), "note: Ctrl-C will end the command without a word ({error})");
    }
}
