//! How a published directory is told of.

use std::path::Path;

use crate::publish::Made;

/// A few lines: what is in the directory, and that it is there.
pub fn render(made: Option<&Made>, out: &Path) -> String {
    let Some(made) = made else {
        return format!("{} had been published before: nothing was left to do\n", out.display());
    };
    let rows = [
        ("directory", made.path.display().to_string()),
        ("files", format!("{}, {} bytes", made.files, made.bytes)),
        ("tensors", format!("{}, {} of them carried", made.tensors, made.carried_tensors)),
        (
            "carried shards",
            format!(
                "{} copied, {} written anew, {} left empty and dropped",
                made.shards_copied, made.shards_rewritten, made.shards_dropped
            ),
        ),
        ("replaced layers", made.layers.to_string()),
        ("MANIFEST.json", format!("sha256 {}", made.manifest_sha256)),
    ];
    rows.iter().map(|(label, value)| format!("{label:<16}  {value}\n")).collect()
}
