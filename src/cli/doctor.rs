//! `walk doctor`: which kernels this machine runs.

use std::io::stdout;

use clap::Args;
use serde::Serialize;

use super::output::{emit, print};
use crate::codec::kaiju::search as kaiju;
use crate::codec::trellis::search::{available_searches, best_search};
use crate::error::Result;
use crate::linalg::engines;

/// Arguments of `walk doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print one JSON line instead of text.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Doctor {
    version: &'static str,
    tile_search: &'static str,
    tile_searches_available: Vec<&'static str>,
    lattice_search: &'static str,
    lattice_searches_available: Vec<&'static str>,
    matrix_product: &'static str,
    threads: usize,
}

/// Prints the choices.
///
/// # Errors
/// When stdout cannot be written.
pub fn run(args: &DoctorArgs) -> Result<()> {
    let doctor = Doctor {
        version: env!("CARGO_PKG_VERSION"),
        tile_search: best_search().name(),
        tile_searches_available: available_searches().iter().map(|search| search.name()).collect(),
        lattice_search: kaiju::best_search().name(),
        lattice_searches_available: kaiju::available_searches().iter().map(|search| search.name()).collect(),
        matrix_product: engines().last().map_or("portable", |engine| engine.name()),
        threads: rayon::current_num_threads(),
    };
    if args.json {
        return emit(&mut stdout(), "doctor", &doctor);
    }
    print(
        &mut stdout(),
        &format!(
            "walk {}\ntile search     {} (available: {})\nlattice search  {} (available: {})\nmatrix product  {}\nthreads         {}\n",
            doctor.version,
            doctor.tile_search,
            doctor.tile_searches_available.join(", "),
            doctor.lattice_search,
            doctor.lattice_searches_available.join(", "),
            doctor.matrix_product,
            doctor.threads
        ),
    )
}
