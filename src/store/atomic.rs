//! Publication by rename: a file is either absent, or old, or new and whole, whatever happens to the machine.
//!
//! The order is: temporary file in the same folder, write, set mode 0644 (independent of the umask), fsync, rename,
//! fsync of the folder. A file left over by a killed process has a name that starts with `.` and ends with
//! [`TEMP_SUFFIX`]; [`sweep_temporaries`] removes such files, which is safe for the holder of the folder's lock.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use tempfile::NamedTempFile;

use super::canonical_json::canonical_file;
use super::failpoint;
use super::hash::{Hash, HashingWriter};
use crate::error::{IoContext, Result, refuse};

/// How the names of temporary files end.
pub const TEMP_SUFFIX: &str = ".walk-tmp";

/// A file being written under a temporary name; [`AtomicFile::commit`] gives it its own. Dropped without a commit, it
/// leaves nothing behind.
#[derive(Debug)]
pub struct AtomicFile {
    writer: HashingWriter<BufWriter<Temporary>>,
    path: PathBuf,
}

/// The file under its temporary name, written through fail-points.
#[derive(Debug)]
struct Temporary {
    file: NamedTempFile,
    path: PathBuf,
}

impl Write for Temporary {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        failpoint::write(&self.path, bytes, |part| self.file.write(part))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl AtomicFile {
    /// Starts a file that will be published as `path`, in an existing folder.
    ///
    /// # Errors
    /// When the folder does not exist or cannot be written.
    pub fn create(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let Some(name) = path.file_name() else {
            return refuse("path names no file").file(path).wanted("a path that ends in a file name").err();
        };
        let mut prefix = std::ffi::OsString::from(".");
        prefix.push(name);
        prefix.push(".");
        failpoint::hit("create", path).at(path)?;
        let file = tempfile::Builder::new()
            .prefix(&prefix)
            .suffix(TEMP_SUFFIX)
            .tempfile_in(folder_of(path))
            .at(path)?;
        let file = Temporary { file, path: path.to_path_buf() };
        let writer = HashingWriter::new(BufWriter::with_capacity(1 << 18, file));
        Ok(Self { writer, path: path.to_path_buf() })
    }

    /// Bytes written so far.
    pub fn written(&self) -> u64 {
        self.writer.written()
    }

    /// Writes all of `bytes`.
    ///
    /// # Errors
    /// Names the final path, for example when the disk is full.
    pub fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.writer.write_all(bytes).at(&self.path)
    }

    /// Makes the file durable under its own name if its SHA-256 is `wanted`.
    ///
    /// # Errors
    /// As [`AtomicFile::commit`]; names the final path when the hash is another, and publishes nothing.
    pub fn commit_as(self, wanted: &str) -> Result<()> {
        let found = self.writer.sha256();
        if found == wanted {
            return self.commit().map(drop);
        }
        refuse(format!("what would be written to it has the SHA-256 {found}"))
            .file(&self.path)
            .wanted(wanted)
            .err()
    }

    /// Makes the file durable under its own name and returns the SHA-256 of its bytes.
    ///
    /// # Errors
    /// Names the final path; the temporary file is gone then and an older file of that name untouched.
    pub fn commit(self) -> Result<Hash> {
        self.publish(None)
    }

    /// As [`AtomicFile::commit`], the file lengthened to `bytes` with a hole, which reads as zeros. No hash is returned:
    /// the bytes of the hole were never seen.
    ///
    /// # Errors
    /// As [`AtomicFile::commit`]; when the file system has no files of that length.
    pub fn commit_with_hole(self, bytes: u64) -> Result<()> {
        self.publish(Some(bytes)).map(|_| ())
    }

    /// The SHA-256 of the bytes that were put.
    fn publish(self, length: Option<u64>) -> Result<Hash> {
        let Self { writer, path } = self;
        let (buffered, hash) = writer.finish();
        let Temporary { file, .. } =
            buffered.into_inner().map_err(io::IntoInnerError::into_error).at(&path)?;
        if let Some(length) = length {
            file.as_file().set_len(length).at(&path)?;
        }
        set_mode_0644(file.as_file()).at(&path)?;
        failpoint::hit("fsync", &path).at(&path)?;
        file.as_file().sync_all().at(&path)?;
        failpoint::published(&path, &hash).at(&path)?;
        file.persist(&path).map_err(|error| error.error).at(&path)?;
        sync_folder(folder_of(&path))?;
        Ok(hash)
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.writer.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

/// Publishes `bytes` as `path` and returns their SHA-256.
///
/// # Errors
/// Names the path.
pub fn write_atomic(path: impl AsRef<Path>, bytes: &[u8]) -> Result<Hash> {
    let mut file = AtomicFile::create(path)?;
    file.put(bytes)?;
    file.commit()
}

/// Publishes `value` as canonical JSON and a newline, and returns the SHA-256 of the file (newline included).
///
/// # Errors
/// When the value has no canonical form (see [`canonical`](super::canonical_json::canonical)) or the file cannot be written.
pub fn write_json_atomic(path: impl AsRef<Path>, value: &(impl Serialize + ?Sized)) -> Result<Hash> {
    write_atomic(path, &canonical_file(value)?)
}

/// Removes a file and makes the removal durable. A file that is not there is no error: a resumed walk removes again.
///
/// # Errors
/// Names the path.
pub fn remove_file_durably(path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    failpoint::hit("remove", path).at(path)?;
    match std::fs::remove_file(path) {
        Ok(()) => sync_folder(folder_of(path)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).at(path),
    }
}

/// Removes a folder with all it holds and makes the removal durable. One that is not there is no error.
///
/// # Errors
/// Names the folder.
pub fn remove_tree_durably(path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    if !path.exists() {
        return Ok(());
    }
    failpoint::remove_tree(path).at(path)?;
    std::fs::remove_dir_all(path).at(path)?;
    sync_folder(folder_of(path))
}

/// Creates `path` and its missing parents, each made durable in its own parent.
///
/// # Errors
/// Names the folder that could not be made.
pub fn create_dir_durably(path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    if path.as_os_str().is_empty() || path.is_dir() {
        return Ok(());
    }
    let parent = folder_of(path);
    create_dir_durably(parent)?;
    failpoint::hit("mkdir", path).at(path)?;
    match std::fs::create_dir(path) {
        Ok(()) => sync_folder(parent),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        Err(error) => Err(error).at(path),
    }
}

/// Removes what killed writers left in `folder` and in all folders below it, links aside, and returns how many files that
/// were.
///
/// # Errors
/// Names what could not be read or removed.
pub fn sweep_temporaries(folder: impl AsRef<Path>) -> Result<usize> {
    let folder = folder.as_ref();
    let (mut swept, mut below) = (0, 0);
    for entry in std::fs::read_dir(folder).at(folder)? {
        let entry = entry.at(folder)?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let kind = entry.file_type().at(entry.path())?;
        if kind.is_dir() {
            below += sweep_temporaries(entry.path())?;
        } else if kind.is_file() && name.starts_with('.') && name.ends_with(TEMP_SUFFIX) {
            failpoint::hit("remove", &entry.path()).at(entry.path())?;
            std::fs::remove_file(entry.path()).at(entry.path())?;
            swept += 1;
        }
    }
    if swept > 0 {
        sync_folder(folder)?;
    }
    Ok(swept + below)
}

/// Makes the entries of `folder` durable.
///
/// # Errors
/// Names the folder.
pub fn sync_folder(folder: impl AsRef<Path>) -> Result<()> {
    let folder = folder.as_ref();
    failpoint::hit("fsync-folder", folder).at(folder)?;
    // Only Unix lets a folder be opened for this; elsewhere the rename itself has to do.
    if cfg!(unix) { File::open(folder).and_then(|file| file.sync_all()).at(folder) } else { Ok(()) }
}

/// Whether it names a file in a folder and nothing else, on every system.
#[must_use]
pub fn is_plain(name: &str) -> bool {
    let special = |c: char| c.is_control() || matches!(c, '/' | '\\' | ':');
    !name.is_empty() && name != "." && name != ".." && !name.contains(special)
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

#[cfg(unix)]
fn set_mode_0644(file: &File) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    file.set_permissions(std::fs::Permissions::from_mode(0o644))
}

#[cfg(not(unix))]
fn set_mode_0644(_file: &File) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::hash::sha256_hex;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_appears_whole_and_replaces_the_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ä file.bin");
        assert_eq!(write_atomic(&path, b"old").unwrap(), sha256_hex(b"old"));
        write_atomic(&path, b"new").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(names(dir.path()), ["ä file.bin"]);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o644);
        }
    }

    #[test]
    fn an_abandoned_file_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let mut file = AtomicFile::create(dir.path().join("x")).unwrap();
        file.put(b"half").unwrap();
        drop(file);
        assert!(names(dir.path()).is_empty());
    }

    #[test]
    fn json_is_canonical_with_a_newline() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.json");
        let hash = write_json_atomic(&path, &serde_json::json!({"b": 1, "a": [true, null]})).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"{\"a\":[true,null],\"b\":1}\n");
        assert_eq!(hash, sha256_hex(&std::fs::read(&path).unwrap()));
    }

    #[test]
    fn removing_twice_is_no_error_and_a_missing_folder_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        write_atomic(&path, b"").unwrap();
        remove_file_durably(&path).unwrap();
        remove_file_durably(&path).unwrap();
        let nowhere = dir.path().join("nowhere/x");
        assert!(write_atomic(&nowhere, b"").unwrap_err().to_string().contains("nowhere"));
    }

    #[test]
    fn leftovers_are_swept_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        for name in [".a.json.Xy12.walk-tmp", "a.json", ".hidden", "b.walk-tmp"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        std::fs::create_dir_all(dir.path().join("states/003")).unwrap();
        std::fs::write(dir.path().join("states/003/.p.safetensors.Xy12.walk-tmp"), "").unwrap();
        assert_eq!(sweep_temporaries(dir.path()).unwrap(), 2);
        assert_eq!(names(dir.path()), [".hidden", "a.json", "b.walk-tmp", "states"]);
        assert_eq!(names(&dir.path().join("states/003")), [""; 0]);
    }

    #[test]
    fn a_folder_goes_with_all_it_holds() {
        let dir = tempfile::tempdir().unwrap();
        create_dir_durably(dir.path().join("a/b")).unwrap();
        write_atomic(dir.path().join("a/b/x"), b"").unwrap();
        remove_tree_durably(dir.path().join("a")).unwrap();
        remove_tree_durably(dir.path().join("a")).unwrap();
        assert!(names(dir.path()).is_empty());
        write_atomic(dir.path().join("file"), b"").unwrap();
        assert!(remove_tree_durably(dir.path().join("file")).unwrap_err().to_string().contains("file"));
    }

    #[test]
    fn folders_are_made_with_their_parents() {
        let dir = tempfile::tempdir().unwrap();
        create_dir_durably(dir.path().join("a/b/c")).unwrap();
        create_dir_durably(dir.path().join("a/b/c")).unwrap();
        assert!(dir.path().join("a/b/c").is_dir());
        std::fs::write(dir.path().join("a/file"), "").unwrap();
        assert!(create_dir_durably(dir.path().join("a/file/d")).is_err());
    }
}
