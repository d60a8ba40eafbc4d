//! Checkpoints of seeded noise: the same bytes for any number of threads, and what reads them believes them.

use std::path::Path;

use walk::audit::{AuditOptions, audit};
use walk::config::Geometry;
use walk::synthetic::packed_layer;

use crate::support::{files, repository};

fn tiny() -> Geometry {
    Geometry::read(&repository("models/tiny/config.json")).unwrap()
}

/// Runs `f` on so many threads.
fn with_threads<T: Send>(threads: usize, f: impl FnOnce() -> T + Send) -> T {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(f)
}

#[test]
fn a_packed_layer_passes_the_audit_of_finished_layers() {
    let made = |folder: &Path, threads| {
        with_threads(threads, || packed_layer(folder, &tiny(), 2, 3, &[3, 4, 5], 7).unwrap())
    };
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let manifest = made(one.path(), 1);
    assert_eq!(manifest, made(two.path(), 2));
    assert_eq!(files(one.path()), files(two.path()));
    assert_eq!((manifest.bit_map.len(), manifest.allocation_bit_units), (9, 36));
    let report = audit(one.path(), &AuditOptions::default(), &walk::walk::progress::Silent).unwrap();
    assert!(report.failure().is_none(), "{}", report.render_table());
    // Other words for another seed.
    let other = packed_layer(two.path(), &tiny(), 2, 3, &[3, 4, 5], 8).unwrap();
    assert!(manifest.roundtrip_hashes.values().zip(other.roundtrip_hashes.values()).all(|(a, b)| a != b));
}

#[test]
fn a_packed_layer_that_no_reader_would_take_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let layer = |experts, bits: &[u32]| packed_layer(folder.path(), &tiny(), 2, experts, bits, 7);
    for (made, what) in [
        (layer(0, &[3]), "0 experts"),
        (layer(1, &[]), "at bits []"),
        (layer(1, &[3, 9]), "9 bits a weight"),
        (layer(1, &[0]), "0 bits a weight"),
    ] {
        let error = made.unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
    assert_eq!(files(folder.path()).len(), 0);
}
