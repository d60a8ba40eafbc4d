//! The work directory held against its journal: which sealed files are gone or changed, which files nothing seals, and
//! links that lead out of it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::journal::{JOURNAL_FILE, JournalRecord, key};
use super::locations::LOCATIONS_FILE;
use super::state::{manifest_path, state_folder};
use crate::error::{IoContext, Refusal, Result, refuse};
use crate::store::hash::{Hash, sha256_file};
use crate::store::lock::LOCK_FILE;

/// The report of a finished walk. It tells of times, so it is not sealed.
pub const REPORT_FILE: &str = "REPORT.json";

/// How the names of feasibility reports begin. They tell of times, so they are not sealed.
pub const FEASIBILITY_PREFIX: &str = "FEASIBILITY_LAYER_";

/// All sealed files that are gone or changed, in the order of the journal; `hashed` is called with the name of each file
/// that was looked at. The state before a layer may be gone, as a whole, once the layer's own forward is sealed.
///
/// # Errors
/// When a file that is there cannot be read.
pub fn faults(
    work: &Path,
    record: &JournalRecord,
    hashed: &(dyn Fn(&str) -> Result<()> + Sync),
) -> Result<Vec<Refusal>> {
    let outputs: Vec<(&String, &Hash)> = record
        .stages
        .iter()
        .flat_map(|seal| &seal.outputs)
        .filter(|(path, _)| !is_deleted_state(work, record, path))
        .collect();
    check(work, &outputs, hashed)
}

/// The same of the outputs of one seal.
///
/// # Errors
/// When a file that is there cannot be read.
pub fn faults_of(
    work: &Path,
    outputs: &BTreeMap<String, Hash>,
    hashed: &(dyn Fn(&str) -> Result<()> + Sync),
) -> Result<Vec<Refusal>> {
    check(work, &outputs.iter().collect::<Vec<_>>(), hashed)
}

/// Files that a resume has to hash.
pub fn count(work: &Path, record: &JournalRecord) -> usize {
    let outputs = record.stages.iter().flat_map(|seal| seal.outputs.keys());
    outputs.filter(|path| !is_deleted_state(work, record, path)).count()
}

fn check(
    work: &Path,
    outputs: &[(&String, &Hash)],
    hashed: &(dyn Fn(&str) -> Result<()> + Sync),
) -> Result<Vec<Refusal>> {
    let found = outputs.par_iter().map(|(path, sealed)| {
        let file = work.join(path);
        let fault = if !file.exists() {
            Some(refuse("the sealed file is gone").file(&file).wanted(format!("sha256 {sealed}")))
        } else {
            let wrong = |what: String| Some(refuse(what).file(&file).wanted(format!("sha256 {sealed}")));
            match sha256_file(&file) {
                Ok(found) if found == **sealed => None,
                Ok(_) => wrong("the file is not the one that was sealed".to_owned()),
                Err(error) => wrong(format!("the sealed file cannot be read: {error}")),
            }
        };
        hashed(path)?;
        Ok(fault)
    });
    Ok(found.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
}

/// The layer whose input state a path belongs to.
fn state_of(path: &str) -> Option<usize> {
    path.strip_prefix("states/")?.split('/').next()?.parse().ok()
}

/// A state is deleted manifest first, and only after its layer's forward is sealed.
fn is_deleted_state(work: &Path, record: &JournalRecord, path: &str) -> bool {
    state_of(path).is_some_and(|layer| {
        record.sealed(&format!("layer-{layer:03}/forward")).is_some()
            && !work.join(manifest_path(layer)).exists()
    })
}

/// Whether the state before a layer is there as a whole.
pub fn has_state(work: &Path, layer: usize) -> bool {
    work.join(manifest_path(layer)).exists()
}

/// Whether this is a pilot's report.
fn is_feasibility(name: &str) -> bool {
    let number = name.strip_prefix(FEASIBILITY_PREFIX).and_then(|rest| rest.strip_suffix(".json"));
    number.is_some_and(|number| number.len() >= 3 && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Files that no seal names, by relative path: of a stage in hand, of a state on its way out, or foreign.
///
/// # Errors
/// Names the folder that cannot be read.
pub fn unsealed(work: &Path, record: &JournalRecord) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let mut sealed: BTreeSet<&str> = BTreeSet::from([JOURNAL_FILE, LOCK_FILE, LOCATIONS_FILE, REPORT_FILE]);
    sealed.extend(record.stages.iter().flat_map(|seal| seal.outputs.keys().map(String::as_str)));
    visit(work, work, &mut |path, kind| {
        let name = key(path);
        let known = sealed.contains(name.as_str()) || is_feasibility(&name);
        if !kind.is_dir() && !known {
            found.push(name);
        }
        Ok(())
    })?;
    found.sort();
    Ok(found)
}

/// Refuses what is neither file nor folder anywhere in the work directory: what is written through a symbolic link would be
/// written elsewhere, and a pipe would be waited for without end.
///
/// # Errors
/// Names it.
pub fn refuse_foreign(work: &Path) -> Result<()> {
    visit(work, work, &mut |path, kind| {
        if kind.is_dir() || kind.is_file() {
            return Ok(());
        }
        let what = match kind.is_symlink() {
            true => "a symbolic link in the work directory leads elsewhere",
            false => "this is neither a file nor a folder",
        };
        refuse(what).file(work.join(path)).wanted("a work directory of plain files and folders").err()
    })
}

fn visit(
    root: &Path,
    folder: &Path,
    then: &mut dyn FnMut(&Path, std::fs::FileType) -> Result<()>,
) -> Result<()> {
    let mut entries: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(folder).at(folder)? {
        entries.push(entry.at(folder)?.path());
    }
    entries.sort();
    for path in entries {
        let kind = std::fs::symlink_metadata(&path).at(&path)?.file_type();
        then(path.strip_prefix(root).unwrap_or(&path), kind)?;
        if kind.is_dir() {
            visit(root, &path, then)?;
        }
    }
    Ok(())
}

/// Whether the state before a layer is on its way out: its files are there, its manifest is not.
pub fn is_half_deleted(work: &Path, layer: usize) -> bool {
    !has_state(work, layer) && work.join(state_folder(layer)).exists()
}
