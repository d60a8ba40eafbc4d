//! What a walk left can be trusted: no sealed byte can change unnoticed, a walk that was interrupted goes on, and nothing
//! outside the inputs shows in the bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};
use walk::Error;
use walk::audit::{AuditOptions, audit};
use walk::codec::trellis::search::best_search;
use walk::config::{Model, Recipe};
use walk::store::atomic::write_json_atomic;
use walk::store::hash::sha256_file;
use walk::store::seed::SplitMix64;
use walk::walk::driver::Walk;
use walk::walk::journal::JournalRecord;
use walk::walk::open::WalkOptions;
use walk::walk::progress::{Observer, Silent};

use crate::support::mini::Mini;
use crate::support::{command, cut_journal, files, forge_journal};

fn read(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Only what is sealed: the mini model's checkpoint is audited once elsewhere.
fn sealed_only() -> AuditOptions {
    AuditOptions { sealed_only: true, ..AuditOptions::default() }
}

/// A finished walk with all its states.
fn kept(mini: &Mini) -> std::path::PathBuf {
    let work = mini.work("walk");
    command(mini, &work).arg("--keep-states").assert().success();
    work
}

/// A kind of file: its path with every run of digits as `N`.
fn kind(name: &str) -> String {
    let mut kind = String::new();
    for c in name.chars() {
        match c.is_ascii_digit() {
            true if kind.ends_with('N') => {}
            true => kind.push('N'),
            false => kind.push(c),
        }
    }
    kind
}

#[test]
fn a_finished_walk_passes_every_gate() {
    let mini = Mini::new();
    let work = mini.work("walk");
    command(&mini, &work).assert().success();
    let before = files(&work);
    let output = command_audit(&work, &[]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}{}", String::from_utf8_lossy(&output.stderr));
    for gate in 0..=8 {
        let line = text.lines().find(|line| line.starts_with(&format!("{gate:>4}  "))).unwrap();
        let part = if gate == 7 { "passed in part" } else { "passed" };
        assert!(line.ends_with(part), "{line}");
    }
    assert!(text.contains("interaction_tolerance.relative") && !text.contains("LOOSENED"), "{text}");
    let report = audit(&work, &AuditOptions::default(), &Silent).unwrap();
    assert!(report.passed && report.complete);
    // 12 modules: packed and dense, slices, vectors and size of each; 4 shards' worth of names; 4 orders.
    assert!(report.gates[6].checks > 4 * 12 && report.gates[4].checks == 8, "{:?}", report.gates);
    // The finished layers by themselves.
    let layers = audit(&work.join("v2"), &AuditOptions::default(), &Silent).unwrap();
    assert!(layers.passed && layers.gates[6].checks >= report.gates[6].checks - 4);
    assert_eq!(before, files(&work), "an audit writes nothing");
    let output = command_audit(mini.path(), &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stderr).unwrap().contains("JOURNAL.json"));
}

fn command_audit(work: &Path, more: &[&str]) -> std::process::Output {
    let mut command = assert_cmd::Command::cargo_bin("walk").unwrap();
    command.args(["audit", "--quiet"]).args(more).arg(work).output().unwrap()
}

#[test]
fn any_byte_of_any_sealed_file_that_changes_is_found_and_its_file_named() {
    let mini = Mini::new();
    let work = kept(&mini);
    let mut by_kind: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in files(&work).into_keys().filter(|name| name != "LOCATIONS.json") {
        by_kind.entry(kind(&name)).or_default().push(name);
    }
    assert!(by_kind.len() >= 24, "{:?}", by_kind.keys());
    let mut random = SplitMix64::new(4);
    let (mut positions, mut resumed) = (0, 0);
    for (kind, names) in &by_kind {
        for round in 0..10 {
            let name = &names[random.below(names.len() as u64) as usize];
            let path = work.join(name);
            let bytes = std::fs::read(&path).unwrap();
            let mut changed = bytes.clone();
            let at = random.below(bytes.len() as u64) as usize;
            changed[at] ^= 1 << random.below(8);
            std::fs::write(&path, &changed).unwrap();
            let report = audit(&work, &sealed_only(), &Silent).unwrap();
            let said = report.failure().expect("a changed byte is found").to_string();
            assert!(said.contains(name.as_str()), "{name}, byte {at}: {said}");
            if round == 0 {
                // The walk itself stops as well.
                let output = command(&mini, &work).output().unwrap();
                let said = String::from_utf8(output.stderr).unwrap();
                assert_eq!(output.status.code(), Some(2), "{kind}: {said}");
                assert!(said.contains(name.as_str()), "{kind}: {said}");
                resumed += 1;
            }
            std::fs::write(&path, &bytes).unwrap();
            positions += 1;
        }
    }
    println!("{positions} positions in {} kinds of file, {resumed} resumes", by_kind.len());
    assert!(positions >= 200 && audit(&work, &sealed_only(), &Silent).unwrap().passed);
}

/// Rewrites a sealed JSON file and forges the journal so that the change carries its seal.
fn forge(work: &Path, name: &str, change: impl FnOnce(&mut Value)) {
    let path = work.join(name);
    let mut value = read(&path);
    change(&mut value);
    write_json_atomic(&path, &value).unwrap();
    let sha256 = sha256_file(&path).unwrap();
    forge_journal(work, |seals| {
        let seal = seals.iter_mut().find(|seal| seal.outputs.contains_key(name)).unwrap();
        seal.outputs.insert(name.to_owned(), sha256);
    });
}

#[test]
fn every_gate_finds_what_it_is_for() {
    let mini = Mini::new();
    let whole = kept(&mini);
    let first_key = |value: &Value| value.as_object().unwrap().keys().next().unwrap().clone();
    type Change<'a> = Box<dyn FnOnce(&mut Value) + 'a>;
    let other = || json!("0".repeat(64));
    let down = "model.layers.1.mlp.experts.0.down_proj";
    let changes: Vec<(usize, &str, &str, Change<'_>)> = vec![
        (
            2,
            "layer-001/probe-iter-00.json",
            "experts[1]",
            Box::new(|ledger| {
                ledger["experts"][1]["probe"]["tensors"]["up_proj"].as_object_mut().unwrap().remove("5");
            }),
        ),
        (
            2,
            "layer-002/probe-iter-00.json",
            "capture_sha256",
            Box::new(|ledger| ledger["capture_sha256"] = other()),
        ),
        (
            3,
            "layer-001/allocation-iter-00.json",
            "bits",
            Box::new(|record| {
                // Two tensors trade a bit: the sum still holds, the optimum does not.
                let map = record["bit_map"].as_object_mut().unwrap();
                let low = map.iter().find(|(_, bits)| **bits == json!(3)).unwrap().0.clone();
                let high = map.iter().find(|(_, bits)| **bits != json!(3)).unwrap().0.clone();
                map[&high] = json!(map[&high].as_u64().unwrap() - 1);
                map[&low] = json!(4);
            }),
        ),
        (
            3,
            "layer-002/capture.json",
            "masses",
            Box::new(|record| {
                let mass = record["mass_units"][0].as_str().unwrap().to_owned();
                record["mass_units"][0] = json!(format!("{mass}0"));
            }),
        ),
        (
            4,
            "v2/r7-experts-layer-001.json",
            "down",
            Box::new(|manifest| {
                manifest["tensor_provenance"][down]["down_covariance_up_reconstruction_sha256"] = other();
            }),
        ),
        (
            6,
            "v2/r7-experts-layer-001.json",
            down,
            Box::new(|manifest| {
                manifest["roundtrip_hashes"][down]["reconstruction_sha256"] = other();
            }),
        ),
        (
            6,
            "v2/r7-experts-layer-002.json",
            "bijection",
            Box::new(|manifest| {
                let order = &mut manifest["permutations"]["1"]["new_to_old"];
                order[0] = order[1].clone();
            }),
        ),
        (
            6,
            "v2/r7-experts-layer-002.json",
            "payload",
            Box::new(|manifest| {
                let payloads = &mut manifest["payload_sha256"];
                let name = first_key(payloads);
                payloads[name] = other();
            }),
        ),
        (8, "layer-001/install-audit.json", "differ", Box::new(|audit| audit["max_abs"] = json!("9.0"))),
        (8, "layer-002/interaction-audit.json", "expert", Box::new(|audit| audit["passed"] = json!(false))),
        (
            8,
            "layer-001/forward-audit.json",
            "different bytes",
            Box::new(|audit| audit["hidden_sha256"][1] = other()),
        ),
    ];
    for (gate, name, word, change) in changes {
        let work = mini.work("forged");
        copy(&whole, &work);
        forge(&work, name, change);
        let report = audit(&work, &sealed_only(), &Silent).unwrap();
        let failures = &report.gates[gate].failures;
        assert!(
            failures.iter().any(|said| said.contains(word)),
            "gate {gate}, {name}: {failures:?}\n{report:?}"
        );
        assert!(report.gates[0].failures.is_empty(), "{:?}", report.gates[0]);
        std::fs::remove_dir_all(&work).unwrap();
    }
    // Seals that do not follow from each other.
    let work = mini.work("forged");
    copy(&whole, &work);
    forge_journal(&work, |seals| {
        let seal = seals.iter_mut().find(|seal| seal.stage == "layer-001/forward").unwrap();
        seal.inputs.insert("installed".to_owned(), "0".repeat(64));
    });
    let report = audit(&work, &sealed_only(), &Silent).unwrap();
    assert!(report.gates[5].failures[0].contains("layer 1"), "{:?}", report.gates[5]);
    // A source that is another one, and a file nobody wrote.
    std::fs::remove_dir_all(&work).unwrap();
    copy(&whole, &work);
    std::fs::write(work.join("layer-001/notes.txt"), "mine").unwrap();
    let moved = Mini::with(|tensors| tensors.last_mut().unwrap().2[0] += 1.0);
    let options = AuditOptions { source: Some(moved.model()), ..AuditOptions::default() };
    let report = audit(&work, &options, &Silent).unwrap();
    assert!(report.gates[1].failures[0].contains("experts.1"), "{:?}", report.gates[1]);
    assert!(report.gates[0].failures[0].contains("notes.txt"), "{:?}", report.gates[0]);
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        match path.is_dir() {
            true => copy(&path, &target),
            false => assert!(std::fs::copy(&path, &target).is_ok()),
        }
    }
}

/// Asks to stop once so many units are done.
struct StopAfter(usize, AtomicUsize);

impl Observer for StopAfter {
    fn begin(&self, _: &str, _: Option<usize>, _: u64) {}
    fn advance(&self, item: &str) {
        // What is only hashed or adopted is no work.
        if !item.contains("adopted") && !item.contains('.') && !item.contains('/') {
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }
    fn end(&self) {}
    fn note(&self, _: &str) {}
    fn stop_requested(&self) -> bool {
        self.1.load(Ordering::Relaxed) >= self.0
    }
}

#[test]
fn a_walk_stopped_after_every_few_units_ends_in_the_same_bytes() {
    let mini = Mini::new();
    let whole = mini.work("whole");
    command(&mini, &whole).assert().success();
    let work = mini.work("stopped");
    let model = Model::resolve(mini.model().to_str().unwrap(), None, None).unwrap();
    let recipe = Recipe::load(mini.model().join("recipe.json")).unwrap();
    let mut stops = 0;
    loop {
        let observer = StopAfter(7, AtomicUsize::new(0));
        let options = WalkOptions::default();
        let mut walk = Walk::open(&model, recipe.clone(), &mini.plan(), &work, options, &observer).unwrap();
        let codec = walk.codec(best_search()).unwrap();
        match walk.run(&codec, &observer) {
            Ok(outcome) => {
                assert!(outcome.complete);
                break;
            }
            Err(Error::Interrupted(said)) => {
                assert!(said.contains("same command"), "{said}");
                stops += 1;
            }
            Err(other) => panic!("{other}"),
        }
        assert!(stops < 500, "it goes on each time");
    }
    assert!(stops >= 5, "{stops} stops");
    assert_eq!(files(&whole), files(&work), "{stops} stops");
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_after_the_unit_in_hand_and_a_second_one_at_once() {
    let mini = Mini::new();
    let whole = mini.work("whole");
    let started = std::time::Instant::now();
    command(&mini, &whole).assert().success();
    let time = started.elapsed();
    for (name, signals) in [("once", 1), ("twice", 2)] {
        let work = mini.work(name);
        let mut stopped = 0;
        for share in [0.3, 0.2, 0.2] {
            let child = std::process::Command::new(assert_cmd::cargo::cargo_bin!("walk"))
                .args(["--quiet", "--model"])
                .arg(mini.model())
                .arg("--corpus")
                .arg(mini.plan())
                .arg("--work")
                .arg(&work)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            std::thread::sleep(time.mul_f64(share));
            for _ in 0..signals {
                let kill = format!("kill -INT {}", child.id());
                std::process::Command::new("sh").args(["-c", &kill]).status().unwrap();
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
            let output = child.wait_with_output().unwrap();
            let said = String::from_utf8(output.stderr).unwrap();
            if output.status.code() == Some(3) {
                stopped += 1;
                assert!(said.contains("stopping after the unit in hand"), "{said}");
                assert!(output.stdout.is_empty() && !work.join("WALK_COMPLETE.json").exists());
            } else {
                assert_eq!(output.status.code(), Some(0), "{said}");
            }
        }
        assert!(stopped >= 1, "{name}: no signal came in time");
        command(&mini, &work).assert().success();
        assert_eq!(files(&whole), files(&work), "{name}");
    }
}

#[cfg(unix)]
#[test]
fn nothing_around_a_walk_shows_in_its_bytes() {
    let mini = Mini::new();
    let whole = mini.work("whole");
    command(&mini, &whole).args(["--recipe", "fast"]).assert().success();
    let here = std::env::current_dir().unwrap();
    type Change<'a> = Box<dyn Fn(&mut assert_cmd::Command) + 'a>;
    let changes: Vec<(&str, Change<'_>)> = vec![
        (
            "threads",
            Box::new(|c| {
                c.env("RAYON_NUM_THREADS", "1");
            }),
        ),
        (
            "locale",
            Box::new(|c| {
                c.env("LC_ALL", "tr_TR.UTF-8").env("LANG", "de_DE.UTF-8");
            }),
        ),
        (
            "time-zone",
            Box::new(|c| {
                c.env("TZ", "Asia/Kathmandu");
            }),
        ),
        (
            "home",
            Box::new(|c| {
                c.env_remove("HOME").env("USER", "someone");
            }),
        ),
        (
            "cwd",
            Box::new(|c| {
                c.current_dir("/").env("WALK_MODELS", &here);
            }),
        ),
    ];
    for (name, change) in &changes {
        let work = mini.work(name);
        let mut command = command(&mini, &work);
        change(command.args(["--recipe", "fast"]));
        command.assert().success();
        assert_eq!(files(&whole), files(&work), "{name}");
    }
    let work = mini.work("umask");
    let line = "umask 077; exec \"$0\" \"$@\"";
    let walk = assert_cmd::cargo::cargo_bin!("walk");
    let status = std::process::Command::new("sh")
        .args(["-c", line])
        .arg(walk)
        .args(["--quiet", "--recipe", "fast", "--model"])
        .arg(mini.model())
        .arg("--corpus")
        .arg(mini.plan())
        .arg("--work")
        .arg(&work)
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    assert_eq!(files(&whole), files(&work), "umask");
}

#[test]
fn a_machine_that_computes_other_bytes_is_refused_by_the_fingerprint() {
    let mini = Mini::new();
    let work = mini.work("walk");
    command(&mini, &work).args(["--recipe", "fast"]).assert().success();
    for field in ["numeric_fingerprint", "dependencies_sha256", "build_version"] {
        let known = JournalRecord::read(&work).unwrap();
        let mut identity = known.identity.clone();
        assert!(identity.insert(field.to_owned(), "other".to_owned()).is_some());
        let mut forged = JournalRecord::new(identity).unwrap();
        for seal in &known.stages {
            forged.push(&seal.stage, seal.inputs.clone(), seal.outputs.clone()).unwrap();
        }
        write_json_atomic(work.join("JOURNAL.json"), &forged).unwrap();
        let output = command(&mini, &work).args(["--recipe", "fast"]).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(
            said.contains(&format!("field `{field}`")) && said.contains("compute the same bytes"),
            "{said}"
        );
        write_json_atomic(work.join("JOURNAL.json"), &known).unwrap();
    }
}

#[cfg(unix)]
#[test]
fn a_link_in_the_work_directory_is_not_followed() {
    let mini = Mini::new();
    let outside = mini.path().join("outside");
    std::fs::create_dir_all(&outside).unwrap();
    for name in ["v2", "states", "JOURNAL.json"] {
        let work = mini.work(&format!("linked-{name}"));
        std::fs::create_dir_all(&work).unwrap();
        std::os::unix::fs::symlink(&outside, work.join(name)).unwrap();
        let output = command(&mini, &work).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(name) && said.contains("symbolic link"), "{said}");
        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);
    }
}

#[test]
fn states_are_kept_only_when_asked_and_kept_states_are_audited() {
    let mini = Mini::new();
    let (plain, kept) = (mini.work("plain"), kept(&mini));
    command(&mini, &plain).assert().success();
    let (fewer, more) = (files(&plain), files(&kept));
    let extra: BTreeSet<&str> =
        more.keys().filter(|name| !fewer.contains_key(*name)).map(|name| &name[..10]).collect();
    assert_eq!(extra, BTreeSet::from(["states/000", "states/001"]));
    let settings = |name: &str| name == "LOCATIONS.json";
    assert!(fewer.iter().all(|(name, hash)| settings(name) || more.get(name) == Some(hash)));
    // A later run that does not ask for them leaves them.
    let output = command(&mini, &kept).output().unwrap();
    assert!(String::from_utf8(output.stderr).unwrap().contains("are kept, as an earlier run"));
    assert_eq!(files(&kept), more);
    let report = read(&kept.join("REPORT.json"));
    assert_eq!(report["bits_per_weight"], 3.5);
}

#[test]
fn a_pilot_stops_after_its_layer_reports_and_goes_on_to_the_same_bytes() {
    let mini = Mini::new();
    let (whole, work) = (mini.work("whole"), mini.work("pilot"));
    command(&mini, &whole).assert().success();
    let pilot = |more: &[&str]| {
        let output =
            command(&mini, &work).args(["--pilot-stop-after-layer", "1"]).args(more).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let said = pilot(&[]);
    assert!(said.contains("layer 1 is sealed") && said.contains("UNVERIFIED"), "{said}");
    assert!(said.contains("not in these hours: the evaluation"), "{said}");
    let path = work.join("FEASIBILITY_LAYER_001.json");
    let report = read(&path);
    let layer = &report["layers"][0];
    assert_eq!((layer["layer"].as_u64(), layer["resumed"].as_array().unwrap().len()), (Some(1), 0));
    for stage in ["capture", "search", "probe", "final encode", "forward"] {
        assert!(layer["counted"].as_array().unwrap().contains(&json!(stage)), "{stage}");
        let times = if stage == "forward" { 1 } else { 2 };
        let projected = report["projection"]["stages"].as_array().unwrap();
        assert_eq!(projected.iter().find(|s| s["stage"] == stage).unwrap()["times"], times);
    }
    let shard = std::fs::metadata(work.join("v2/r7-experts-layer-001.safetensors")).unwrap().len();
    assert!(layer["bytes"]["v2"].as_u64().unwrap() > shard);
    assert!(work.join("states/002").exists() && !work.join("WALK_COMPLETE.json").exists());
    assert_eq!(report["journal_head_sha256"], read(&work.join("JOURNAL.json"))["head_sha256"]);
    // Once more: all of it was there before, so there is nothing to project from.
    assert!(pilot(&[]).contains("nothing to project from"));
    assert_eq!(report, read(&path), "the first one says more, and stays");
    let refused = command(&mini, &work).args(["--pilot-stop-after-layer", "0"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8(refused.stderr).unwrap().contains("--pilot-stop-after-layer"));
    command(&mini, &work).assert().success();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(files(&whole), files(&work));
    let report = audit(&work, &sealed_only(), &Silent).unwrap();
    assert!(report.passed, "{report:?}");
}

#[test]
fn an_unfinished_unit_that_was_changed_is_made_again() {
    let mini = Mini::new();
    let work = kept(&mini);
    let whole = files(&work);
    let swap = |name: &str, from: &str, to: &str| {
        let path = work.join(name);
        let bytes = std::fs::read(&path).unwrap();
        let at = bytes.windows(from.len()).rposition(|window| window == from.as_bytes()).unwrap();
        let mut changed = bytes.clone();
        changed[at..at + to.len()].copy_from_slice(to.as_bytes());
        std::fs::write(&path, changed).unwrap();
    };
    // Files of stages that are cut off the journal are as if the walk had been stopped in them.
    let changes: [(&str, &str, [&str; 2]); 4] = [
        ("layer-001/install-audit", "states/002/b.safetensors", ["\"pt\"", "\"pT\""]),
        ("layer-001/install-audit", "states/002/b.safetensors", ["\"I32\"", "\"U32\""]),
        ("layer-002/allocation-iter-00", "layer-002/final-experts/expert-000.json", ["}\n", "} "]),
        (
            "layer-002/allocation-iter-00",
            "layer-002/final-experts/expert-001.safetensors",
            ["\"2\"", "\"3\""],
        ),
    ];
    for (last, name, [from, to]) in changes {
        cut_journal(&work, last, |_| {});
        std::fs::remove_file(work.join("WALK_COMPLETE.json")).unwrap();
        swap(name, from, to);
        command(&mini, &work).assert().success();
        assert_eq!(whole, files(&work), "{name}: {from:?} to {to:?}");
    }
}

#[test]
fn seals_that_were_dropped_are_missed_by_the_completion_beside_them() {
    let mini = Mini::new();
    let work = mini.work("walk");
    command(&mini, &work).args(["--recipe", "fast"]).assert().success();
    let whole = files(&work);
    forge_journal(&work, |seals| seals.truncate(seals.len() - 3));
    let report = audit(&work, &sealed_only(), &Silent).unwrap();
    assert!(report.gates[0].failures.iter().any(|said| said.contains("seals were dropped")), "{report:?}");
    command(&mini, &work).args(["--recipe", "fast"]).assert().success();
    assert_eq!(whole, files(&work));
}

#[cfg(unix)]
#[test]
fn a_pipe_in_place_of_a_file_is_refused_and_not_waited_for() {
    let mini = Mini::new();
    let work = mini.work("walk");
    command(&mini, &work).args(["--recipe", "fast"]).assert().success();
    let pipe = |path: &Path| {
        std::fs::remove_file(path).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    };
    let limit = std::time::Duration::from_secs(60);
    for name in ["JOURNAL.json", "SOURCE_INVENTORY.json", "LOCK", "v2/r7-experts-layer-001.json"] {
        let bytes = std::fs::read(work.join(name)).unwrap();
        pipe(&work.join(name));
        for tool in ["walk", "audit", "replay"] {
            let mut run = match tool {
                "walk" => command(&mini, &work),
                _ => assert_cmd::Command::cargo_bin("walk").unwrap(),
            };
            match tool {
                "walk" => run.args(["--recipe", "fast"]),
                "audit" => run.arg("audit").arg("--quiet").arg(&work),
                _ => run.args(["replay", "--quiet", "--work"]).arg(&work),
            };
            let output = run.timeout(limit).output().unwrap();
            let said = String::from_utf8(output.stderr).unwrap();
            let code = if tool == "audit" { 1 } else { 2 };
            assert_eq!(output.status.code(), Some(code), "{tool}, {name}: {said}");
            assert!(said.contains(name) && said.contains("neither a file nor a folder"), "{tool}: {said}");
        }
        std::fs::remove_file(work.join(name)).unwrap();
        std::fs::write(work.join(name), bytes).unwrap();
    }
    pipe(&mini.model().join("model.safetensors"));
    let output = command(&mini, &mini.work("other")).timeout(limit).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("no weights"), "{said}");
}
