//! The crash tests: walks of a mini model that die, or find the disk full, at every place where something is written, and
//! the same command again. They need a build with fail-points:
//!
//! `cargo test --release --features failpoints --test crash` runs a sample of a few minutes. All of it (every site at its
//! first, a middle and its last hit, 50 random moments, 10 of the tiny walk; about an hour on two cores) is run by
//! `cargo test --release --features failpoints --test crash -- --include-ignored --nocapture`.
//!
//! What has to hold: at no instant is there a file under its own name that an undisturbed walk would not have written at
//! some time, byte for byte; and the same command again ends in the very files of the undisturbed walk.

#[path = "crash/harness.rs"]
mod harness;
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
        number.is_multiple_of(again).then(|| 1 + random.below(reference.hits))
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

#[test]
fn a_walk_killed_at_a_sample_of_sites_ends_in_the_same_bytes() {
    let _alone = alone();
    let reference = Reference::new();
    // Coprime to 3, so that first, middle and last hits take turns; and every operation at least once.
    let points = reference.points();
    let mut operations = std::collections::BTreeSet::new();
    let sample: Vec<Point> = points
        .into_iter()
        .enumerate()
        .filter(|(number, point)| operations.insert(point.operation().to_owned()) || number % 10 == 3)
        .map(|(_, point)| point)
        .collect();
    assert_eq!(operations.len(), 9, "{operations:?}");
    kill_at(&reference, &sample, 4);
}

#[test]
#[ignore = "all points take a quarter of an hour"]
fn a_walk_killed_at_every_site_ends_in_the_same_bytes() {
    let _alone = alone();
    let reference = Reference::new();
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

/// Lets walks find the disk full at each point; the same command goes on once there is space again.
fn fill_at(reference: &Reference, points: &[Point]) {
    let outcomes = in_parallel(points, |number, point| {
        let work = reference.work(&format!("full-{number}"));
        let ended = reference.walk(&work, Some(&format!("enospc={}@{}", point.site, point.hit)));
        let named = if point.path.is_empty() { work.clone() } else { work.join(&point.path) };
        if ended.code() != Some(2)
            || !ended.said.contains(named.to_str().unwrap())
            || !ended.said.contains("No space left")
            || ended.said.contains("panicked")
        {
            return Err(format!("{point}: {ended} instead of exit code 2 that names {}", named.display()));
        }
        if work.exists() {
            reference.check_published(&work).map_err(|what| format!("{point}: {what}"))?;
            let temporaries = harness::temporaries(&work);
            if !temporaries.is_empty() {
                return Err(format!("{point}: left {temporaries:?}"));
            }
        }
        reference.check_resume(&work).map_err(|what| format!("{point}: {what}"))?;
        std::fs::remove_dir_all(&work).unwrap();
        Ok(())
    });
    let (_, wrong) = harness::split(outcomes);
    println!("disk full at {} points; {} wrong", points.len(), wrong.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_full_disk_is_told_and_leaves_nothing_half_written() {
    let _alone = alone();
    let reference = Reference::new();
    let mut points = reference.first_hits(&["write"]);
    // Whatever else takes up space fails by the same few lines: one of each is enough here.
    for operation in ["mkdir", "create", "fsync", "rename"] {
        let of_it = reference.first_hits(&[operation]);
        points.push(of_it[of_it.len() / 2].clone());
    }
    fill_at(&reference, &points);
}

#[test]
#[ignore = "all operations on all kinds of file take minutes"]
fn a_full_disk_is_told_at_every_operation() {
    let _alone = alone();
    let reference = Reference::new();
    fill_at(&reference, &reference.first_hits(&["mkdir", "create", "fsync", "rename"]));
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
