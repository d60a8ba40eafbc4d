//! Places where a test build can be made to die, or to find the disk full.
//!
//! With the feature `failpoints` off, as it is by default, every function here does nothing and costs nothing. With it on
//! (Unix only), the places obey two environment variables, read once:
//!
//! - `WALK_FAILPOINT_ROOT`: the work directory, spelled as in `--work`. Paths elsewhere are no places.
//! - `WALK_FAILPOINT`: one of `trace=FILE` (append a line a hit: site, path, and where a file is published its SHA-256,
//!   separated by tabs), `kill=SITE@N` (SIGKILL to the own process at the N-th hit of the site, counted from 1) and
//!   `enospc=SITE@N` (that hit fails for want of space, and so does everything after it that takes up space).
//!
//! A site is an operation and a kind of file, such as `rename states/N/prompt-N.safetensors`: the path below the root, each
//! run of digits an `N`, a temporary name as `final-name~`. The operations are `create`, `write`, `fsync`, `rename`,
//! `fsync-folder`, `remove`, `mkdir`, `rmtree` and `seal`; the site `*` is any of them. A hit comes before its operation;
//! a `write` that kills or fails puts half of its bytes first, an `rmtree` that kills removes half of the files first.

#[cfg(feature = "failpoints")]
pub use armed::{hit, published, remove_tree, write};
#[cfg(not(feature = "failpoints"))]
pub use off::{hit, published, remove_tree, write};

#[cfg(not(feature = "failpoints"))]
mod off {
    use std::io;
    use std::path::Path;

    /// Comes before `operation` on `path`.
    ///
    /// # Errors
    /// None in this build.
    #[inline(always)]
    pub fn hit(_operation: &str, _path: &Path) -> io::Result<()> {
        Ok(())
    }

    /// Comes before the file whose bytes have this hash is renamed to `path`.
    ///
    /// # Errors
    /// None in this build.
    #[inline(always)]
    pub fn published(_path: &Path, _sha256: &str) -> io::Result<()> {
        Ok(())
    }

    /// Hands `bytes` of the future file `path` to `put`.
    ///
    /// # Errors
    /// What `put` says.
    #[inline(always)]
    pub fn write(
        _path: &Path,
        bytes: &[u8],
        mut put: impl FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        put(bytes)
    }

    /// Comes before the folder `path` is removed with all it holds.
    ///
    /// # Errors
    /// None in this build.
    #[inline(always)]
    pub fn remove_tree(_path: &Path) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(feature = "failpoints")]
mod armed {
    use std::collections::HashMap;
    use std::io::{self, Write};
    use std::path::{Path, PathBuf};
    use std::sync::{LazyLock, Mutex, PoisonError};

    use crate::store::atomic::TEMP_SUFFIX;

    /// What `WALK_FAILPOINT` asks for.
    #[derive(Debug, Clone, PartialEq, Eq)]
    enum Order {
        Trace(PathBuf),
        Kill(String, u64),
        Enospc(String, u64),
    }

    /// What the caller has to do about a hit.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Verdict {
        Pass,
        Kill,
        Full,
    }

    struct Points {
        root: PathBuf,
        order: Order,
        state: Mutex<State>,
    }

    #[derive(Default)]
    struct State {
        hits: HashMap<String, u64>,
        full: bool,
    }

    static POINTS: LazyLock<Option<Points>> = LazyLock::new(|| {
        let order = std::env::var("WALK_FAILPOINT").ok()?;
        let root =
            std::env::var_os("WALK_FAILPOINT_ROOT").expect("WALK_FAILPOINT_ROOT goes with WALK_FAILPOINT");
        let order = parse(&order).unwrap_or_else(|| panic!("WALK_FAILPOINT={order} is no order"));
        Some(Points { root: root.into(), order, state: Mutex::default() })
    });

    fn parse(order: &str) -> Option<Order> {
        let (verb, rest) = order.split_once('=')?;
        let counted = |rest: &str| {
            let (site, n) = rest.rsplit_once('@')?;
            Some((site.to_owned(), n.parse().ok().filter(|n| *n > 0)?))
        };
        match verb {
            "trace" => Some(Order::Trace(rest.into())),
            "kill" => counted(rest).map(|(site, n)| Order::Kill(site, n)),
            "enospc" => counted(rest).map(|(site, n)| Order::Enospc(site, n)),
            _ => None,
        }
    }

    /// The kind of file a path is of, `None` outside `root`.
    fn kind(root: &Path, path: &Path) -> Option<String> {
        let below = path.strip_prefix(root).ok()?;
        let mut kind = String::new();
        for part in below {
            let part = part.to_string_lossy();
            let (name, mark) = match part.strip_suffix(TEMP_SUFFIX).and_then(|stem| stem.rsplit_once('.')) {
                // The letters in between are random.
                Some((name, _)) => (name.trim_start_matches('.'), "~"),
                None => (&*part, ""),
            };
            if !kind.is_empty() {
                kind.push('/');
            }
            let mut digits = false;
            for c in name.chars() {
                if !(c.is_ascii_digit() && digits) {
                    kind.push(if c.is_ascii_digit() { 'N' } else { c });
                }
                digits = c.is_ascii_digit();
            }
            kind.push_str(mark);
        }
        Some(if kind.is_empty() { ".".to_owned() } else { kind })
    }

    impl Points {
        fn judge(&self, operation: &str, path: &Path, sha256: &str) -> io::Result<Verdict> {
            let Some(kind) = kind(&self.root, path) else { return Ok(Verdict::Pass) };
            let site = format!("{operation} {kind}");
            // One hit after the other, also of several threads: the count and the trace have one order.
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            if let Order::Trace(file) = &self.order {
                let below = path.strip_prefix(&self.root).unwrap_or(path);
                let line = format!("{site}\t{}\t{sha256}\n", below.display());
                let mut file = std::fs::OpenOptions::new().create(true).append(true).open(file)?;
                file.write_all(line.as_bytes())?;
                return Ok(Verdict::Pass);
            }
            let takes_space = matches!(operation, "create" | "write" | "mkdir");
            if state.full && takes_space {
                return Ok(Verdict::Full);
            }
            let mut reached = |wanted: &str, n: u64| {
                if wanted != "*" && wanted != site {
                    return false;
                }
                let hits = state.hits.entry(wanted.to_owned()).or_default();
                *hits += 1;
                *hits == n
            };
            match &self.order {
                Order::Kill(wanted, n) if reached(wanted, *n) => Ok(Verdict::Kill),
                Order::Enospc(wanted, n) if reached(wanted, *n) => {
                    state.full = true;
                    Ok(Verdict::Full)
                }
                _ => Ok(Verdict::Pass),
            }
        }
    }

    fn judge(operation: &str, path: &Path, sha256: &str) -> io::Result<Verdict> {
        POINTS.as_ref().map_or(Ok(Verdict::Pass), |points| points.judge(operation, path, sha256))
    }

    fn full() -> io::Error {
        io::Error::from_raw_os_error(libc::ENOSPC)
    }

    fn die() -> ! {
        // SAFETY: both calls take and give plain numbers.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        loop {
            std::thread::park();
        }
    }

    fn obey(verdict: Verdict) -> io::Result<()> {
        match verdict {
            Verdict::Pass => Ok(()),
            Verdict::Full => Err(full()),
            Verdict::Kill => die(),
        }
    }

    /// Comes before `operation` on `path`.
    ///
    /// # Errors
    /// No space, where that was asked for.
    pub fn hit(operation: &str, path: &Path) -> io::Result<()> {
        obey(judge(operation, path, "")?)
    }

    /// Comes before the file whose bytes have this hash is renamed to `path`.
    ///
    /// # Errors
    /// No space, where that was asked for.
    pub fn published(path: &Path, sha256: &str) -> io::Result<()> {
        obey(judge("rename", path, sha256)?)
    }

    /// Hands `bytes` of the future file `path` to `put`: all of them, or half before the process dies or the disk is full.
    ///
    /// # Errors
    /// What `put` says; no space, where that was asked for.
    pub fn write(
        path: &Path,
        bytes: &[u8],
        mut put: impl FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let verdict = judge("write", path, "")?;
        if verdict == Verdict::Pass {
            return put(bytes);
        }
        let half = &bytes[..bytes.len() / 2];
        let mut done = 0;
        while done < half.len() {
            done += put(&half[done..])?;
        }
        obey(verdict).map(|()| done)
    }

    /// Comes before the folder `path` is removed with all it holds; a process that dies here removes half of it first.
    ///
    /// # Errors
    /// No space, where that was asked for.
    pub fn remove_tree(path: &Path) -> io::Result<()> {
        let verdict = judge("rmtree", path, "")?;
        if verdict == Verdict::Kill {
            let entries = std::fs::read_dir(path)?;
            let mut files = entries.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
            files.retain(|file| file.is_file());
            for file in &files[..files.len().div_ceil(2)] {
                std::fs::remove_file(file)?;
            }
        }
        obey(verdict)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_kind_is_the_path_without_what_varies() {
            let kind = |path: &str| kind(Path::new("/w/17"), Path::new(path));
            assert_eq!(
                kind("/w/17/states/003/prompt-12.safetensors").unwrap(),
                "states/N/prompt-N.safetensors"
            );
            assert_eq!(kind("/w/17/.a-01.json.Xy12.walk-tmp").unwrap(), "a-N.json~");
            assert_eq!(kind("/w/17").unwrap(), ".");
            assert_eq!(kind("/w/18/a"), None);
        }

        #[test]
        fn orders_are_read_and_others_are_none() {
            assert_eq!(parse("kill=write a@b@3"), Some(Order::Kill("write a@b".into(), 3)));
            assert_eq!(parse("enospc=*@1"), Some(Order::Enospc("*".into(), 1)));
            assert_eq!(parse("trace=/t=1"), Some(Order::Trace("/t=1".into())));
            for wrong in ["", "kill", "kill=a", "kill=a@0", "kill=a@x", "trip=a@1"] {
                assert_eq!(parse(wrong), None, "{wrong}");
            }
        }

        #[test]
        fn the_disk_stays_full_for_what_takes_space() {
            let points = Points {
                root: "/w".into(),
                order: Order::Enospc("write a".into(), 2),
                state: Mutex::default(),
            };
            let judge = |operation, path: &str| points.judge(operation, Path::new(path), "").unwrap();
            assert_eq!(judge("write", "/w/a"), Verdict::Pass);
            assert_eq!(judge("create", "/w/a"), Verdict::Pass);
            assert_eq!(judge("write", "/w/a"), Verdict::Full);
            assert_eq!(judge("write", "/w/b"), Verdict::Full);
            assert_eq!(judge("create", "/w/c"), Verdict::Full);
            assert_eq!(judge("rename", "/w/c"), Verdict::Pass);
            assert_eq!(judge("write", "/v/a"), Verdict::Pass, "another folder may lie on another disk");
        }
    }
}
