//! A directory that appears whole or not at all.
//!
//! Files are gathered in `.NAME.partial` beside the target and published by one rename. A folder `.NAME.transaction` beside
//! it holds the lock and `RECORD.json`: what the directory is made from (the binding), and the SHA-256 of every file that
//! is finished. The same inputs again go on from there; other inputs, or a partial directory that no record is bound to,
//! are refused, and nothing of them is touched.
//!
//! Killed after the rename, the record is still there: the next run with the same inputs finds the directory published and
//! only clears the record away.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::atomic::{
    TEMP_SUFFIX, create_dir_durably, is_plain, remove_file_durably, remove_tree_durably, sweep_temporaries,
    sync_folder, write_atomic, write_json_atomic,
};
use super::failpoint;
use super::hash::{Hash, sha256_file};
use super::lock::{LOCK_FILE, WorkLock};
use super::strict_json::read_json;
use crate::error::{IoContext, Result, refuse};

/// The record's file name within the transaction's folder.
pub const RECORD_FILE: &str = "RECORD.json";
/// Value of the record's `schema`.
const SCHEMA: &str = "walk-directory-transaction-v1";
/// The folder for pieces of unfinished files.
const SCRATCH: &str = "scratch";
/// Left free beyond what is asked for: manifests, records, the file system's own needs.
const RESERVE: u64 = 16 << 20;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    schema: String,
    binding: Value,
    files: BTreeMap<String, Hash>,
}

/// A directory in the making.
#[derive(Debug)]
pub struct DirTransaction {
    target: PathBuf,
    partial: PathBuf,
    folder: PathBuf,
    record: Mutex<Record>,
    _lock: WorkLock,
}

impl DirTransaction {
    /// Begins to make `target` from what `binding` names (an object; hashes and settings, no paths or times), or goes on
    /// where an earlier run with the same binding stopped. `needed` bytes will be written in all. `None`: such a run had
    /// published the directory and was stopped right after; there is nothing left to do.
    ///
    /// # Errors
    /// Names the directory that is there already, the partial directory of other inputs (and the first that differs) or of
    /// none, the transaction another process is at, or how many bytes the disk lacks.
    pub fn begin(target: &Path, binding: &Value, needed: u64) -> Result<Option<Self>> {
        let (partial, folder) = (beside(target, "partial")?, beside(target, "transaction")?);
        let begun = folder.join(RECORD_FILE).exists();
        if is_there(&partial) && !begun {
            return refuse("a partial directory that no transaction record is bound to")
                .file(&partial)
                .wanted(format!(
                    "none: remove it to begin anew, or choose another name than {}",
                    target.display()
                ))
                .err();
        }
        let left = |name: &String| name == LOCK_FILE || name.ends_with(TEMP_SUFFIX);
        let foreign = names(&folder).unwrap_or_default().into_iter().find(|name| !left(name));
        if let Some(name) = foreign.filter(|_| !begun) {
            return refuse("a transaction folder without a record that holds something")
                .file(folder.join(name))
                .wanted(format!("none: remove {} to begin anew", folder.display()))
                .err();
        }
        if is_there(target) && !begun {
            // What was left of a work that was stopped in its very last act.
            remove_tree_durably(&folder)?;
            return refuse("it is there already")
                .file(target)
                .wanted("the name of a directory to be made")
                .err();
        }
        if !begun {
            check_space(&partial, needed)?;
        }
        create_dir_durably(&folder)?;
        let lock = WorkLock::acquire_or(
            &folder,
            "another process is making this directory",
            "one at a time: wait for the other, or choose another name",
        )?;
        let record = if begun {
            let record: Record = read_json(folder.join(RECORD_FILE))?;
            check_binding(&folder, &record, binding)?;
            if let Some(name) = record.files.keys().find(|name| !is_plain(name)) {
                return refuse(format!("the record names the file {name:?}"))
                    .file(folder.join(RECORD_FILE))
                    .field("files")
                    .wanted("plain file names")
                    .err();
            }
            record
        } else {
            let record = Record { schema: SCHEMA.into(), binding: binding.clone(), files: BTreeMap::new() };
            write_json_atomic(folder.join(RECORD_FILE), &record)?;
            record
        };
        if is_there(target) {
            if is_there(&partial) {
                return refuse("it is there already, and so is a partial directory for it")
                    .file(target)
                    .wanted("only one of them")
                    .err();
            }
            clear(&folder)?;
            return Ok(None);
        }
        create_dir_durably(&partial)?;
        sweep_temporaries(&partial)?;
        sweep_temporaries(&folder)?;
        if begun {
            check_space(&partial, needed.saturating_sub(size_of(&partial)? + size_of(&folder)?))?;
        }
        let target = target.to_path_buf();
        Ok(Some(Self { target, partial, folder, record: Mutex::new(record), _lock: lock }))
    }

    /// The partial directory: where the files are put.
    pub fn path(&self) -> &Path {
        &self.partial
    }

    /// A folder for pieces of unfinished files, made on demand, which goes with the transaction.
    ///
    /// # Errors
    /// Names the folder that cannot be made.
    pub fn scratch(&self) -> Result<PathBuf> {
        let scratch = self.folder.join(SCRATCH);
        create_dir_durably(&scratch)?;
        Ok(scratch)
    }

    /// The hash of a file that an earlier run finished and that is still what it was.
    ///
    /// # Errors
    /// Names a file that changed since.
    pub fn finished(&self, file: &str) -> Result<Option<Hash>> {
        let path = self.place(file)?;
        let sealed = self.known().files.get(file).cloned();
        let Some(sealed) = sealed.filter(|_| is_there(&path)) else { return Ok(None) };
        if !is_regular(&path) {
            return refuse("it is a link or no file").file(path).wanted("the file that was put there").err();
        }
        let found = sha256_file(&path)?;
        if found == sealed {
            return Ok(Some(found));
        }
        refuse(format!("its SHA-256 is {found}"))
            .file(path)
            .wanted(format!(
                "{sealed}, as recorded when it was finished; remove the file to have it made anew"
            ))
            .err()
    }

    /// Records that a file is finished.
    ///
    /// # Errors
    /// Names the record when it cannot be written.
    pub fn record(&self, file: &str, sha256: Hash) -> Result<()> {
        self.place(file)?;
        let mut record = self.known();
        record.files.insert(file.to_owned(), sha256);
        write_json_atomic(self.folder.join(RECORD_FILE), &*record).map(drop)
    }

    fn known(&self) -> MutexGuard<'_, Record> {
        self.record.lock().expect("no panic holds the lock")
    }

    /// The finished files with their hashes.
    pub fn files(&self) -> BTreeMap<String, Hash> {
        self.known().files.clone()
    }

    /// Makes `file` by `make` (which gets its path and gives its hash), unless an earlier run finished it.
    ///
    /// # Errors
    /// What `make` says; names a file that changed since it was finished.
    pub fn file(&self, file: &str, make: impl FnOnce(&Path) -> Result<Hash>) -> Result<Hash> {
        if let Some(sha256) = self.finished(file)? {
            return Ok(sha256);
        }
        let sha256 = make(&self.place(file)?)?;
        self.record(file, sha256.clone())?;
        Ok(sha256)
    }

    /// Puts `bytes` into the directory as `file`, in place of what an earlier run put there.
    ///
    /// # Errors
    /// Names the file that cannot be written.
    pub fn put(&self, file: &str, bytes: &[u8]) -> Result<Hash> {
        let sha256 = write_atomic(self.place(file)?, bytes)?;
        self.record(file, sha256.clone())?;
        Ok(sha256)
    }

    /// Where a file goes: a name from elsewhere must not lead out of the directory.
    fn place(&self, file: &str) -> Result<PathBuf> {
        match is_plain(file) {
            true => Ok(self.partial.join(file)),
            false => refuse(format!("{file:?} is no plain file name"))
                .file(&self.partial)
                .wanted("a name without separators")
                .err(),
        }
    }

    /// Publishes the directory.
    ///
    /// # Errors
    /// Names a file that no one recorded, one that is gone, or what cannot be renamed.
    pub fn publish(self) -> Result<()> {
        let files = self.files();
        for name in names(&self.partial)? {
            if !files.contains_key(&name) {
                return refuse("a file in the partial directory that was not put there by this work")
                    .file(self.partial.join(name))
                    .wanted("recorded files only")
                    .err();
            }
        }
        if let Some(gone) = files.keys().find(|file| !is_regular(&self.partial.join(file))) {
            return refuse("the file is gone, or is none any more")
                .file(self.partial.join(gone))
                .wanted("every recorded file")
                .err();
        }
        if is_there(&self.target) {
            return refuse("it has appeared meanwhile").file(&self.target).wanted("no such directory").err();
        }
        sync_folder(&self.partial)?;
        failpoint::hit("rename", &self.target).at(&self.target)?;
        std::fs::rename(&self.partial, &self.target).at(&self.target)?;
        sync_folder(self.target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")))?;
        clear(&self.folder)
    }
}

/// Removes a transaction's folder, the record last: as long as anything is left, it says of what.
fn clear(folder: &Path) -> Result<()> {
    remove_tree_durably(folder.join(SCRATCH))?;
    remove_file_durably(folder.join(LOCK_FILE))?;
    remove_file_durably(folder.join(RECORD_FILE))?;
    remove_tree_durably(folder)
}

/// Whether anything has this name, a link that leads nowhere included.
fn is_there(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

fn is_regular(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|meta| meta.is_file())
}

/// `.NAME.kind` beside `target`.
fn beside(target: &Path, kind: &str) -> Result<PathBuf> {
    match target.file_name() {
        Some(name) => Ok(target.with_file_name(format!(".{}.{kind}", name.to_string_lossy()))),
        None => refuse("the path names no directory").file(target).wanted("a path that ends in a name").err(),
    }
}

/// Files and folders in `folder`, sorted.
fn names(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).at(folder)? {
        names.push(entry.at(folder)?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// Bytes of the files in `folder` and below it.
fn size_of(folder: &Path) -> Result<u64> {
    let mut size = 0;
    for entry in std::fs::read_dir(folder).at(folder)? {
        let path = entry.at(folder)?.path();
        let metadata = std::fs::symlink_metadata(&path).at(&path)?;
        size += if metadata.is_dir() { size_of(&path)? } else { metadata.len() };
    }
    Ok(size)
}

/// Refuses where the disk of `path` (which need not exist yet) has not `needed` bytes left.
///
/// # Errors
/// Names the path and how many bytes there are too few.
pub fn check_space(path: &Path, needed: u64) -> Result<()> {
    let existing = path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("."));
    let free = fs4::available_space(existing).at(existing)?;
    let needed = needed.saturating_add(RESERVE);
    if free >= needed {
        return Ok(());
    }
    refuse(format!("the disk has {free} bytes left, {} too few", needed - free))
        .file(path)
        .wanted(format!("{needed} bytes free"))
        .err()
}

/// Refuses a record that is of another schema or bound to something else, and names the first difference.
fn check_binding(folder: &Path, record: &Record, binding: &Value) -> Result<()> {
    let other = |field: &str, found: &Value, wanted: &Value| {
        refuse(format!("the partial directory was begun with {found}"))
            .file(folder.join(RECORD_FILE))
            .field(field)
            .wanted(format!(
                "{wanted}, as now asked for; remove {} and its partial directory to begin anew",
                folder.display()
            ))
            .err()
    };
    if record.schema != SCHEMA {
        return other("schema", &record.schema.clone().into(), &SCHEMA.into());
    }
    if record.binding == *binding {
        return Ok(());
    }
    let empty = serde_json::Map::new();
    let (before, now) = (record.binding.as_object().unwrap_or(&empty), binding.as_object().unwrap_or(&empty));
    let keys: std::collections::BTreeSet<&String> = before.keys().chain(now.keys()).collect();
    for key in keys {
        let (found, wanted) = (before.get(key).unwrap_or(&Value::Null), now.get(key).unwrap_or(&Value::Null));
        if found != wanted {
            return other(key, found, wanted);
        }
    }
    other("binding", &record.binding, binding)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn begin(target: &Path, binding: &Value) -> Result<Option<DirTransaction>> {
        DirTransaction::begin(target, binding, 1000)
    }

    #[test]
    fn a_directory_appears_whole() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        let work = begin(&target, &json!({"a": 1})).unwrap().unwrap();
        work.put("x", b"x").unwrap();
        work.file("y", |path| write_atomic(path, b"y")).unwrap();
        assert!(!target.exists());
        work.publish().unwrap();
        assert_eq!(names(&target).unwrap(), ["x", "y"]);
        assert_eq!(names(dir.path()).unwrap(), ["out"]);
        let error = begin(&target, &json!({"a": 1})).unwrap_err().to_string();
        assert!(error.contains("there already"), "{error}");
        assert_eq!(names(dir.path()).unwrap(), ["out"], "a refusal leaves nothing");
    }

    #[test]
    fn the_same_inputs_go_on_and_others_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        let binding = json!({"a": 1, "b": "x"});
        let work = begin(&target, &binding).unwrap().unwrap();
        work.put("x", b"x").unwrap();
        let error = begin(&target, &binding).unwrap_err().to_string();
        assert!(error.contains("LOCK"), "{error}");
        drop(work);
        let error = begin(&target, &json!({"a": 1, "b": "y"})).unwrap_err().to_string();
        assert!(error.contains("`b`") && error.contains("begun with \"x\"; wanted: \"y\""), "{error}");
        let work = begin(&target, &binding).unwrap().unwrap();
        work.file("x", |_| panic!("it is finished")).unwrap();
        drop(work);
        // Neither a changed file nor one that came from elsewhere is published.
        std::fs::write(dir.path().join(".out.partial/x"), "z").unwrap();
        let work = begin(&target, &binding).unwrap().unwrap();
        let error = work.file("x", |_| panic!("it is finished")).unwrap_err().to_string();
        assert!(error.contains(".out.partial/x: its SHA-256"), "{error}");
        work.put("x", b"x").unwrap();
        std::fs::write(work.path().join("stranger"), "").unwrap();
        let error = work.publish().unwrap_err().to_string();
        assert!(error.contains("stranger"), "{error}");
    }

    #[test]
    fn a_partial_directory_of_nobody_is_refused_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join(".out.partial")).unwrap();
        std::fs::write(dir.path().join(".out.partial/x"), "mine").unwrap();
        let error = begin(&dir.path().join("out"), &json!({})).unwrap_err().to_string();
        assert!(error.contains(".out.partial: a partial directory that no transaction record"), "{error}");
        assert_eq!(names(dir.path()).unwrap(), [".out.partial"]);
        assert_eq!(std::fs::read(dir.path().join(".out.partial/x")).unwrap(), b"mine");
    }

    #[test]
    fn names_that_lead_out_of_the_directory_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        let work = begin(&target, &json!({})).unwrap().unwrap();
        for name in ["../x", "/tmp/x", "a/b", "", "..", "a\\b", "c:x"] {
            assert!(work.put(name, b"").unwrap_err().to_string().contains("plain"), "{name}");
            assert!(
                work.file(name, |_| panic!("never made")).is_err()
                    && work.record(name, String::new()).is_err()
            );
        }
        drop(work);
        let record = dir.path().join(".out.transaction/RECORD.json");
        let text =
            std::fs::read_to_string(&record).unwrap().replace("\"files\":{}", "\"files\":{\"../x\":\"0\"}");
        std::fs::write(&record, text).unwrap();
        assert!(begin(&target, &json!({})).unwrap_err().to_string().contains("../x"));
    }

    #[test]
    fn a_transaction_folder_of_somebody_else_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join(".out.transaction");
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("mine"), "mine").unwrap();
        assert!(begin(&dir.path().join("out"), &json!({})).unwrap_err().to_string().contains("mine"));
        std::fs::remove_file(folder.join("mine")).unwrap();
        // An empty one, or one with a lock nobody holds, is what a stopped process leaves.
        std::fs::write(folder.join("LOCK"), "").unwrap();
        begin(&dir.path().join("out"), &json!({})).unwrap().unwrap().publish().unwrap();
        assert_eq!(names(dir.path()).unwrap(), ["out"]);
    }

    #[cfg(unix)]
    #[test]
    fn a_target_that_is_a_link_to_nowhere_is_there() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(dir.path().join("nowhere"), dir.path().join("out")).unwrap();
        assert!(
            begin(&dir.path().join("out"), &json!({})).unwrap_err().to_string().contains("there already")
        );
    }

    #[test]
    fn stopped_right_after_the_rename_only_the_record_is_cleared() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        drop(begin(&target, &json!({"a": 1})).unwrap().unwrap());
        std::fs::rename(dir.path().join(".out.partial"), &target).unwrap();
        let error = begin(&target, &json!({"a": 2})).unwrap_err().to_string();
        assert!(error.contains("`a`"), "{error}");
        assert!(begin(&target, &json!({"a": 1})).unwrap().is_none());
        assert_eq!(names(dir.path()).unwrap(), ["out"]);
    }

    #[test]
    fn a_full_disk_is_told_of_before_anything_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let error = DirTransaction::begin(&dir.path().join("out"), &json!({}), u64::MAX / 2).unwrap_err();
        assert!(error.to_string().contains("too few"), "{error}");
        assert!(names(dir.path()).unwrap().is_empty());
    }
}
