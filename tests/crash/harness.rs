//! An undisturbed walk, what it wrote on the way, and the comparison of others with it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use walk::store::atomic::TEMP_SUFFIX;

use crate::support::files;
use crate::support::mini::{Mini, noise};

/// Walks of two tests side by side would only make each other's times uncertain.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A hit of a site.
#[derive(Debug, Clone)]
pub struct Point {
    pub site: String,
    /// Counted from 1.
    pub hit: u64,
    /// The file of that hit, below the work directory.
    pub path: String,
}

impl Point {
    /// The site's operation.
    pub fn operation(&self) -> &str {
        self.site.split(' ').next().unwrap()
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}@{}` ({})", self.site, self.hit, self.path)
    }
}

/// How a walk ended.
pub struct Ended {
    status: ExitStatus,
    pub said: String,
}

impl Ended {
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    pub fn signal(&self) -> Option<i32> {
        self.status.signal()
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:?})", self.status, self.said.trim())
    }
}

/// An undisturbed walk of a mini model.
pub struct Reference {
    mini: Mini,
    /// SHA-256 of every file it ended with.
    files: BTreeMap<String, String>,
    /// Path and SHA-256 of every file it ever published.
    published: BTreeSet<(String, String)>,
    /// Sites in order of their first hits, each with the paths of all its hits.
    pub sites: Vec<(String, Vec<String>)>,
    /// Hits of all sites.
    pub hits: u64,
    /// How long it took.
    pub time: Duration,
}

impl Reference {
    /// Makes the model, walks it, and once more with a trace of all sites.
    pub fn new() -> Self {
        let mini = short_mini();
        let mut reference = Self {
            mini,
            files: BTreeMap::new(),
            published: BTreeSet::new(),
            sites: Vec::new(),
            hits: 0,
            time: Duration::ZERO,
        };
        let (work, traced) = (reference.work("whole"), reference.work("traced"));
        let started = Instant::now();
        let ended = reference.walk(&work, None);
        reference.time = started.elapsed();
        assert_eq!(ended.code(), Some(0), "{ended}");
        reference.files = files(&work);
        reference.check_stages(&work);
        let trace = reference.mini.path().join("trace.txt");
        let ended = reference.walk(&traced, Some(&format!("trace={}", trace.display())));
        assert_eq!(ended.code(), Some(0), "{ended}");
        assert_eq!(reference.files, files(&traced));
        let mut places = BTreeMap::new();
        for line in std::fs::read_to_string(&trace).unwrap().lines() {
            let [site, path, sha256] = line.split('\t').collect::<Vec<_>>()[..] else { panic!("{line}") };
            let place = *places.entry(site.to_owned()).or_insert_with(|| {
                reference.sites.push((site.to_owned(), Vec::new()));
                reference.sites.len() - 1
            });
            reference.sites[place].1.push(path.to_owned());
            reference.hits += 1;
            if !sha256.is_empty() {
                reference.published.insert((path.to_owned(), sha256.to_owned()));
            }
        }
        for file in &reference.files {
            let file = (file.0.clone(), file.1.clone());
            assert!(reference.published.contains(&file), "{file:?} was written past the fail-points");
        }
        reference
    }

    /// The walk has to go through all that can be interrupted.
    fn check_stages(&self, work: &Path) {
        let has = |path: &str| assert!(work.join(path).exists(), "{path}");
        has("search/layer-001.json");
        has("layer-001/allocation-iter-01.json");
        has("layer-002/install-audit.json");
        has("WALK_COMPLETE.json");
        let audit = std::fs::read(work.join("layer-001/cold-fallback-audit.json")).unwrap();
        let audit: Value = serde_json::from_slice(&audit).unwrap();
        assert!(!audit["experts"].as_array().unwrap().is_empty(), "an expert is cold");
    }

    /// A work directory of this name.
    pub fn work(&self, name: &str) -> PathBuf {
        self.mini.work(name)
    }

    /// Prints how often each site is hit.
    pub fn print_sites(&self) {
        for (site, paths) in &self.sites {
            println!("{:4} x {site}", paths.len());
        }
    }

    /// Every site at its first, middle and last hit.
    pub fn points(&self) -> Vec<Point> {
        let mut points = Vec::new();
        for (site, paths) in &self.sites {
            for at in BTreeSet::from([0, paths.len() / 2, paths.len() - 1]) {
                points.push(Point { site: site.clone(), hit: at as u64 + 1, path: paths[at].clone() });
            }
        }
        points
    }

    /// The first hits of all sites of some operations, in the order of the walk.
    pub fn first_hits(&self, operations: &[&str]) -> Vec<Point> {
        let mut points = self.points();
        points.retain(|point| point.hit == 1 && operations.contains(&point.operation()));
        points
    }

    /// A walk on one thread; so hits are the same each time.
    pub fn command(&self, work: &Path, failpoint: Option<&str>) -> Command {
        let mut command = Command::new(assert_cmd::cargo::cargo_bin!("walk"));
        command.args(["--quiet", "--threads", "1", "--model"]).arg(self.mini.model());
        command.arg("--corpus").arg(self.mini.plan()).arg("--work").arg(work).stdout(Stdio::null());
        if let Some(failpoint) = failpoint {
            command.env("WALK_FAILPOINT", failpoint).env("WALK_FAILPOINT_ROOT", work);
        }
        command
    }

    /// Runs [`Reference::command`] to its end.
    pub fn walk(&self, work: &Path, failpoint: Option<&str>) -> Ended {
        let output = self.command(work, failpoint).output().unwrap();
        Ended { status: output.status, said: String::from_utf8_lossy(&output.stderr).into_owned() }
    }

    /// Temporary files aside, only what the undisturbed walk wrote at some time may lie in `work`.
    pub fn check_published(&self, work: &Path) -> Result<(), String> {
        let temporaries = temporaries(work);
        if !work.exists() {
            return Ok(());
        }
        for file in files(work).into_iter().filter(|(path, _)| !temporaries.contains(path)) {
            if !self.published.contains(&file) {
                return Err(format!("{} is not a file of the undisturbed walk", file.0));
            }
        }
        Ok(())
    }

    /// The same command again must end in the files of the undisturbed walk and no others.
    pub fn check_resume(&self, work: &Path) -> Result<(), String> {
        let ended = self.walk(work, None);
        if ended.code() != Some(0) {
            return Err(format!("the resume ended with {ended}"));
        }
        let found = files(work);
        if found == self.files {
            return Ok(());
        }
        let missing: Vec<_> = self.files.keys().filter(|path| !found.contains_key(*path)).collect();
        let extra: Vec<_> = found.keys().filter(|path| !self.files.contains_key(*path)).collect();
        let differ: Vec<_> =
            found.iter().filter(|(path, hash)| self.files.get(*path).is_some_and(|h| h != *hash)).collect();
        Err(format!("after the resume: missing {missing:?}, too many {extra:?}, other bytes {differ:?}"))
    }
}

/// Relative paths of the temporary files below a folder.
pub fn temporaries(work: &Path) -> BTreeSet<String> {
    if !work.exists() {
        return BTreeSet::new();
    }
    files(work).into_keys().filter(|path| path.ends_with(TEMP_SUFFIX)).collect()
}

/// A mini model whose walk takes about a second, through all stages. Fewer rows than the recipe asks make experts cold;
/// prompts have digits for names, so that their files are one kind.
fn short_mini() -> Mini {
    let mini = Mini::new();
    let path = mini.model().join("recipe.json");
    let mut recipe: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for (field, value) in [
        // Five of six tensors at 4 bits, as all are in the first round: only one expert is probed again.
        ("candidate_bits", json!([3, 4])),
        ("target", json!({"numerator": 23, "denominator": 6})),
        ("fixed_point_iterations", json!(8)),
        // A seed whose fixed point is one, and no cycle.
        ("recipe_version", json!("d")),
        ("draws", json!(2)),
        ("sketch_tiles", json!(1)),
        ("scale_sample_tiles", json!(1)),
        ("shared_sample_experts", json!(1)),
        ("permutations", json!(["identity", "stored_descending_diag"])),
        ("scale_families", json!(["identity", "quarter_rms"])),
    ] {
        recipe[field] = value;
    }
    std::fs::write(&path, recipe.to_string()).unwrap();
    let plan = json!({"version": 1, "prompts": [
        noise("prompt-1", "calibrate", 1, 120),
        noise("prompt-2", "calibrate", 2, 60),
        noise("prompt-3", "calibrate", 3, 1),
        noise("prompt-4", "evaluate", 4, 8),
    ]});
    std::fs::write(mini.plan(), plan.to_string()).unwrap();
    mini
}

/// Does `work` for every item, as many at a time as there are cores, and returns the results in the order of the items.
pub fn in_parallel<T: Sync, R: Send>(items: &[T], work: impl Fn(usize, &T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<(usize, R)>> = Mutex::default();
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(number) else { return };
                    let result = work(number, item);
                    results.lock().unwrap().push((number, result));
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap();
    results.sort_by_key(|(number, _)| *number);
    results.into_iter().map(|(_, result)| result).collect()
}

/// What went well, and what went wrong.
pub fn split<T>(outcomes: Vec<Result<T, String>>) -> (Vec<T>, Vec<String>) {
    let (mut well, mut wrong) = (Vec::new(), Vec::new());
    for outcome in outcomes {
        match outcome {
            Ok(value) => well.push(value),
            Err(what) => wrong.push(what),
        }
    }
    (well, wrong)
}
