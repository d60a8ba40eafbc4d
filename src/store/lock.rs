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
        Self::acquire_or(
            work,
            "another walk holds this work directory",
            "one walk at a time: wait for the other or choose another --work directory",
        )
    }

    /// Takes the lock of an existing folder; `held` and `wanted` are what is said where another process has it.
    ///
    /// # Errors
    /// As [`WorkLock::acquire`].
    pub fn acquire_or(folder: impl AsRef<Path>, held: &str, wanted: &str) -> Result<Self> {
        let path = folder.as_ref().join(LOCK_FILE);
        failpoint::hit("create", &path).at(&path)?;
        let file =
            OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path).at(&path)?;
        match file.try_lock() {
            Ok(()) => Ok(Self { _file: file, path }),
            Err(TryLockError::WouldBlock) => refuse(held).file(&path).wanted(wanted).err(),
            Err(TryLockError::Error(error)) => Err(error).at(&path),
        }
    }

    /// Shares the lock of `work` with others that only read, without waiting and without writing anything: where there is
    /// no lock file, no walk has begun, and nothing is held.
    ///
    /// # Errors
    /// Names the lock file when a walk holds it, or when it cannot be opened.
    pub fn share(work: impl AsRef<Path>) -> Result<Option<Self>> {
        let path = work.as_ref().join(LOCK_FILE);
        if !path.exists() {
            return Ok(None);
        }
        let file = File::open(&path).at(&path)?;
        match file.try_lock_shared() {
            Ok(()) => Ok(Some(Self { _file: file, path })),
            Err(TryLockError::WouldBlock) => refuse("a walk is at work in this directory")
                .file(&path)
                .wanted("a work directory at rest: wait for the walk, or stop it")
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
        drop(WorkLock::acquire(dir.path()).unwrap());
        assert!(WorkLock::acquire(dir.path().join("nowhere")).unwrap_err().to_string().contains("nowhere"));
    }

    #[test]
    fn readers_share_and_keep_walks_out() {
        let dir = tempfile::tempdir().unwrap();
        assert!(WorkLock::share(dir.path()).unwrap().is_none());
        assert!(!dir.path().join(LOCK_FILE).exists());
        let walk = WorkLock::acquire(dir.path()).unwrap();
        let error = WorkLock::share(dir.path()).unwrap_err().to_string();
        assert!(error.contains("LOCK: a walk is at work"), "{error}");
        drop(walk);
        let readers = [(); 2].map(|()| WorkLock::share(dir.path()).unwrap().unwrap());
        WorkLock::acquire(dir.path()).unwrap_err();
        drop(readers);
        WorkLock::acquire(dir.path()).unwrap();
    }
}
