//! The crash tests: walks of a mini model that die, or find the disk full, at every place where something is written, and
//! the same command again. They need a build with fail-points:
//!
//! `cargo test --release --features failpoints --test crash` kills at every site once, in turn, and at a sample of points
//! and moments one by one: about three minutes on two cores. All of it (every site at its first, a middle and its last hit,
//! 50 random moments, 10 of the tiny walk; about an hour) is run by
//! `cargo test --release --features failpoints --test crash -- --include-ignored --nocapture`.
//!
//! What has to hold: at no instant is there a file under its own name that an undisturbed walk would not have written at
//! some time, byte for byte; and the same command again ends in the very files of the undisturbed walk.

#[path = "crash/harness.rs"]
mod harness;
#[path = "crash/publish.rs"]
mod publish;
#[path = "integration/support/mod.rs"]
mod support;

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use harness::{Point, Reference, alone, in_parallel};
use support::files;
use walk::store::seed::{SplitMix64, derive_seed};

/// The same number on every Unix.
const SIGKILL: i32 = 9;

/// Kills a walk at each point and resumes it; every `again`-th resume is killed as well, at a random hit, and resumed.
fn kill_at(reference: &Reference, points: &[Point], again: usize) {
    let second = |number: usize| {
        let mut random = SplitMix64::new(derive_seed(&["double crash".into(), number.into()]));
        // By turns soon after the resume began, while it still sweeps and adopts, and anywhere.
        let within = if number.is_multiple_of(2 * again) { 12 } else { reference.hits / 2 };
        number.is_multiple_of(again).then(|| 1 + random.below(within))
    };
    let outcomes = in_parallel(points, |number, point| {
        let work = reference.work(&format!("kill-{number}"));
        let died = reference.walk(&work, Some(&format!("kill={}@{}", point.site, point.hit)));
        if died.signal() != Some(SIGKILL) {
            return Err(format!("{point}: {died} instead of a death by SIGKILL"));
        }
        reference.check_published(&work).map_err(|what| format!("{point}: after the kill: {what}"))?;
        let mut doubled = false;
        if let Some(hit) = second(number) {
            let died = reference.walk(&work, Some(&format!("kill=*@{hit}")));
            // A resume with fewer hits than that is done.
            doubled = died.signal() == Some(SIGKILL);
            if !doubled && died.code() != Some(0) {
                return Err(format!("{point}, resume to be killed at hit {hit}: {died}"));
            }
            reference
                .check_published(&work)
                .map_err(|what| format!("{point}: after a kill at hit {hit} of the resume: {what}"))?;
        }
        reference.check_resume(&work).map_err(|what| format!("{point}: {what}"))?;
        std::fs::remove_dir_all(&work).unwrap();
        Ok(doubled)
    });
    let (doubled, wrong) = harness::split(outcomes);
    let doubled = doubled.into_iter().filter(|&doubled| doubled).count();
    println!(
        "{} sites, {} hits in a walk: killed at {} points, {doubled} of them a second time during the resume; {} wrong",
        reference.sites.len(),
        reference.hits,
        points.len(),
        wrong.len()
    );
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Every operation that leaves or removes something.
const OPERATIONS: [&str; 9] =
    ["create", "write", "fsync", "rename", "fsync-folder", "remove", "mkdir", "rmtree", "seal"];

#[test]
fn a_walk_killed_at_all_sites_in_turn_ends_in_the_same_bytes() {
    let reference = Reference::new();
    let points = reference.first_hits(&OPERATIONS);
    for operation in OPERATIONS {
        assert!(points.iter().any(|point| point.operation() == operation), "{operation}");
    }
    // Each walk goes on where the one before it died, so all of them together take little longer than one.
    let work = reference.work("chain");
    for point in &points {
        let died = reference.walk(&work, Some(&format!("kill={}@1", point.site)));
        assert_eq!(died.signal(), Some(SIGKILL), "{point}: {died}");
        reference.check_published(&work).unwrap_or_else(|what| panic!("{point}: after the kill: {what}"));
    }
    reference.check_resume(&work).unwrap();
    println!("{} sites: killed at each in turn in one work directory", points.len());
}

#[test]
fn a_walk_killed_at_a_sample_of_points_ends_in_the_same_bytes() {
    let _alone = alone();
    let reference = Reference::new();
    // Coprime to 3: first, middle and last hits take turns.
    let sample: Vec<Point> = reference.points().into_iter().skip(3).step_by(20).collect();
    kill_at(&reference, &sample, 4);
}

#[test]
#[ignore = "all points take half an hour"]
fn a_walk_killed_at_every_site_ends_in_the_same_bytes() {
    let _alone = alone();
    let reference = Reference::new();
    reference.print_sites();
    kill_at(&reference, &reference.points(), 3);
}

/// Kills walks from outside at seeded random moments, and resumes them.
fn kill_at_moments(count: usize) {
    const SEED: u64 = 4;
    let _alone = alone();
    let reference = Reference::new();
    let mut random = SplitMix64::new(SEED);
    let microseconds = reference.time.as_micros() as u64;
    let moments: Vec<Duration> =
        (0..count).map(|_| Duration::from_micros(random.below(microseconds))).collect();
    let outcomes = in_parallel(&moments, |number, moment| {
        let work = reference.work(&format!("moment-{number}"));
        let mut child = reference.command(&work, None).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(*moment);
        child.kill().unwrap();
        let killed = child.wait().unwrap().signal().is_some();
        let place = |what: String| format!("killed after {moment:?}: {what}");
        if work.exists() {
            reference.check_published(&work).map_err(place)?;
        }
        reference.check_resume(&work).map_err(place)?;
        std::fs::remove_dir_all(&work).unwrap();
        Ok(killed)
    });
    let (killed, wrong) = harness::split(outcomes);
    let killed = killed.into_iter().filter(|&killed| killed).count();
    println!(
        "seed {SEED}: {count} random moments within {:?}, {killed} before the walk's end; {} wrong",
        reference.time,
        wrong.len()
    );
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(killed > 0);
}

#[test]
fn a_walk_killed_at_a_few_random_moments_ends_in_the_same_bytes() {
    kill_at_moments(6);
}

#[test]
#[ignore = "50 walks take minutes"]
fn a_walk_killed_at_fifty_random_moments_ends_in_the_same_bytes() {
    kill_at_moments(50);
}

/// Lets a walk find the disk full at a point.
fn fill(reference: &Reference, work: &Path, point: &Point) -> Result<(), String> {
    let ended = reference.walk(work, Some(&format!("enospc={}@{}", point.site, point.hit)));
    let named = if point.path.is_empty() { work.to_path_buf() } else { work.join(&point.path) };
    if ended.code() != Some(2)
        || !ended.said.contains(named.to_str().unwrap())
        || !ended.said.contains("No space left")
        || ended.said.contains("panicked")
    {
        return Err(format!("{point}: {ended} instead of exit code 2 that names {}", named.display()));
    }
    reference.check_published(work).map_err(|what| format!("{point}: {what}"))?;
    match harness::temporaries(work) {
        none if none.is_empty() => Ok(()),
        left => Err(format!("{point}: left {left:?}")),
    }
}

/// What takes up space, or may find out late that there is none.
const TAKING_SPACE: [&str; 5] = ["mkdir", "create", "write", "fsync", "rename"];

#[test]
fn a_full_disk_is_told_and_leaves_nothing_half_written() {
    let reference = Reference::new();
    let points = reference.first_hits(&TAKING_SPACE);
    // The same command goes on each time, and runs into the next full disk.
    let work = reference.work("full");
    for point in &points {
        fill(&reference, &work, point).unwrap();
    }
    reference.check_resume(&work).unwrap();
    println!("disk full at {} sites in turn in one work directory", points.len());
}

#[test]
#[ignore = "a walk for each kind of file takes minutes"]
fn a_walk_goes_on_after_a_full_disk_at_every_kind_of_file() {
    let _alone = alone();
    let reference = Reference::new();
    let points = reference.first_hits(&TAKING_SPACE);
    let outcomes = in_parallel(&points, |number, point| {
        let work = reference.work(&format!("full-{number}"));
        fill(&reference, &work, point)?;
        reference.check_resume(&work).map_err(|what| format!("{point}: {what}"))?;
        std::fs::remove_dir_all(&work).unwrap();
        Ok(())
    });
    let (_, wrong) = harness::split(outcomes);
    println!("disk full at {} points; {} wrong", points.len(), wrong.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A quiet tiny walk by its default recipe.
fn tiny(work: &Path) -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("walk"));
    command
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["--quiet", "--model", "tiny", "--corpus", "corpus/plan.json", "--work"])
        .arg(work)
        .stdout(Stdio::null());
    command
}

#[test]
#[ignore = "two tiny walks take minutes"]
fn the_tiny_walk_killed_at_ten_random_moments_ends_in_the_same_bytes() {
    const SEED: u64 = 10;
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("whole");
    let started = Instant::now();
    assert!(tiny(&whole).status().unwrap().success());
    let time = started.elapsed();
    let mut random = SplitMix64::new(SEED);
    // One chain of kills: what a resume does not repeat costs no time.
    let work = folder.path().join("killed");
    let longest = time.as_millis() as u64 / 6;
    let mut at = Vec::new();
    for _ in 0..10 {
        let mut child = tiny(&work).spawn().unwrap();
        let wait = Duration::from_millis(random.below(longest));
        std::thread::sleep(wait);
        assert!(child.try_wait().unwrap().is_none(), "the walk ended before it had been killed ten times");
        child.kill().unwrap();
        child.wait().unwrap();
        at.push(wait.as_millis());
    }
    assert!(tiny(&work).status().unwrap().success());
    assert_eq!(files(&whole), files(&work), "seed {SEED}, killed after {at:?} ms");
    println!("seed {SEED}: tiny walk of {time:?} killed ten times in a row, after {at:?} ms; equal bytes");
}
