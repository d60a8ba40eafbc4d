//! One walk per work directory.
//!
//! The lock is the operating system's advisory lock on an empty file `LOCK`: it vanishes with its process, also after
//! SIGKILL, so there are no stale locks to clear. The file itself stays.

use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};

use super::failpoint;
use crate::error::{IoContext, Result, refuse};

/// Name of the lock file within a work directory.
pub const LOCK_FILE: &str = "LOCK";

/// Held while a walk works in a directory; released when dropped or when the process ends.
#[derive(Debug)]
pub struct WorkLock {
    _file: File,
    path: PathBuf,
}

impl WorkLock {
    /// Takes the lock of the existing directory `work`, without waiting.
    ///
    /// # Errors
    /// Names the lock file when another walk holds it, or when it cannot be opened.
    pub fn acquire(work: impl AsRef<Path>) -> Result<Self> {
        let path = work.as_ref().join(LOCK_FILE);
        failpoint::hit("create", &path).at(&path)?;
        let file =
            OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path).at(&path)?;
        match file.try_lock() {
            Ok(()) => Ok(Self { _file: file, path }),
            Err(TryLockError::WouldBlock) => refuse("another walk holds this work directory")
                .file(&path)
                .wanted("one walk at a time: wait for the other or choose another --work directory")
                .err(),
            Err(TryLockError::Error(error)) => Err(error).at(&path),
        }
    }

    /// The lock file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_walk_is_refused_until_the_first_ends() {
        let dir = tempfile::tempdir().unwrap();
        let first = WorkLock::acquire(dir.path()).unwrap();
        let error = WorkLock::acquire(dir.path()).unwrap_err();
        assert!(error.to_string().contains("LOCK: another walk holds"), "{error}");
        assert_eq!(error.exit_code(), 2);
        drop(first);
        WorkLock::acquire(dir.path()).unwrap();
        assert!(WorkLock::acquire(dir.path().join("nowhere")).unwrap_err().to_string().contains("nowhere"));
    }
}
