//! Directories that are published whole: every command that makes one is killed, and finds the disk full, at every place
//! where it writes.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::SIGKILL;
use crate::harness::in_parallel;
use crate::support::files;
use crate::support::mini::Mini;

/// A command that makes a directory, and what it reads.
struct Maker {
    name: &'static str,
    args: Vec<String>,
    /// Whether the target is named by `--out` or comes last.
    option: bool,
    reads: Vec<PathBuf>,
}

impl Maker {
    fn run(&self, out: &Path, failpoint: Option<&str>) -> Output {
        let mut command = Command::new(assert_cmd::cargo::cargo_bin!("walk"));
        command.args(&self.args).args(["--quiet", "--threads", "1"]);
        if self.option {
            command.arg("--out");
        }
        command.arg(out);
        if let Some(failpoint) = failpoint {
            command.env("WALK_FAILPOINT", failpoint).env("WALK_FAILPOINT_ROOT", out.parent().unwrap());
        }
        command.output().unwrap()
    }
}

fn said(output: &Output) -> String {
    format!("{} ({:?})", output.status, String::from_utf8_lossy(&output.stderr).trim())
}

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

/// Kills a maker, or fills its disk, at the first and the last hit of every site; the same command again has to end in the
/// same directory and nothing beside it, and what is read has to stay as it was. Gives the number of points.
fn stop_everywhere(mini: &Mini, maker: &Maker) -> usize {
    let folder = mini.path().join(format!("{}-reference", maker.name));
    std::fs::create_dir(&folder).unwrap();
    let (out, trace) = (folder.join("out"), mini.path().join(format!("{}.trace", maker.name)));
    let output = maker.run(&out, Some(&format!("trace={}", trace.display())));
    assert!(output.status.success(), "{}: {}", maker.name, said(&output));
    let whole = files(&folder);
    assert!(whole.keys().all(|file| file.starts_with("out/")), "{:?}", whole.keys());
    let sources: Vec<_> = maker.reads.iter().map(|dir| files(dir)).collect();
    let mut sites: BTreeMap<String, u64> = BTreeMap::new();
    for line in std::fs::read_to_string(&trace).unwrap().lines() {
        *sites.entry(line.split('\t').next().unwrap().to_owned()).or_default() += 1;
    }
    let mut points = Vec::new();
    for (site, &hits) in &sites {
        for hit in std::collections::BTreeSet::from([1, hits]) {
            points.push(("kill", site, hit));
            if ["mkdir", "create", "write", "fsync ", "rename"].iter().any(|takes| site.starts_with(takes)) {
                points.push(("enospc", site, hit));
            }
        }
    }
    let outcomes = in_parallel(&points, |number, (how, site, hit)| {
        let folder = mini.path().join(format!("{}-{number}", maker.name));
        std::fs::create_dir(&folder).unwrap();
        let out = folder.join("out");
        let ended = maker.run(&out, Some(&format!("{how}={site}@{hit}")));
        let place = |what: &str, output: &Output| {
            format!("{} {how} {site}@{hit}: {what}: {}", maker.name, said(output))
        };
        let as_expected = match *how {
            "kill" => ended.status.signal() == Some(SIGKILL),
            _ => ended.status.code() == Some(2) && said(&ended).contains("No space left"),
        };
        if !as_expected {
            return Err(place("another end", &ended));
        }
        if out.exists()
            && files(&folder)
                .iter()
                .any(|(file, hash)| file.starts_with("out/") && whole.get(file) != Some(hash))
        {
            return Err(place("the target is there and is not whole", &ended));
        }
        // Stopped while the record was cleared away, the work is done, and the same command is told so as after any other.
        let published = out.exists() && !folder.join(".out.transaction/RECORD.json").exists();
        let again = maker.run(&out, None);
        let told =
            published && again.status.code() == Some(2) && said(&again).contains("out: it is there already");
        if !again.status.success() && !told {
            return Err(place("the same command again", &again));
        }
        if files(&folder) != whole {
            return Err(place("another directory, or something left beside it", &again));
        }
        std::fs::remove_dir_all(&folder).unwrap();
        Ok(())
    });
    let wrong: Vec<String> = outcomes.into_iter().filter_map(Result::err).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(maker.reads.iter().map(|dir| files(dir)).eq(sources), "{}: a source changed", maker.name);
    println!("{}: stopped at {} points of {} sites; all whole again", maker.name, points.len(), sites.len());
    points.len()
}

#[test]
fn directories_that_are_published_whole_are_whole_whenever_their_making_is_stopped() {
    let mini = Mini::wide();
    let work = mini.work("walk");
    let walk = Command::new(assert_cmd::cargo::cargo_bin!("walk"))
        .args([
            "--quiet",
            "--model",
            &text(&mini.model()),
            "--corpus",
            &text(&mini.plan()),
            "--work",
            &text(&work),
        ])
        .output()
        .unwrap();
    assert!(walk.status.success(), "{}", said(&walk));
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let assemble = Maker {
        name: "assemble",
        args: words(&["assemble", "--work", &text(&work)]),
        option: true,
        reads: vec![work.clone(), mini.model()],
    };
    let complete = mini.path().join("complete");
    assert!(assemble.run(&complete, None).status.success());
    let sliced = mini.path().join("sliced");
    let slice = Maker {
        name: "to-v1",
        args: words(&["convert", "--to", "v1", "--tp", "2", &text(&complete)]),
        option: false,
        reads: vec![complete.clone()],
    };
    assert!(slice.run(&sliced, None).status.success());
    let join = Maker {
        name: "to-v2",
        args: words(&["convert", "--to", "v2", &text(&sliced)]),
        option: false,
        reads: vec![sliced.clone()],
    };
    let points: usize = [&assemble, &slice, &join].map(|maker| stop_everywhere(&mini, maker)).iter().sum();
    assert!(points > 100, "{points}");
}
