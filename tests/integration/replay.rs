//! `walk replay`: whole runs, one layer, one prompt; what it says of a changed expert, and what it refuses.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use assert_cmd::Command;
use candle_core::Device;
use half::bf16;
use serde_json::{Value, json};
use walk::checkpoint::CheckpointDir;
use walk::config::Geometry;
use walk::config::choices::CodecName;
use walk::corpus::{CorpusPlan, SealedPrompt};
use walk::model::Layer;
use walk::store::atomic::write_json_atomic;
use walk::store::hash::sha256_file;
use walk::store::lock::WorkLock;
use walk::store::safetensors_read::SafetensorsFile;
use walk::store::strict_json::read_json;
use walk::walk::forward::forward_states;
use walk::walk::install::Installed;
use walk::walk::journal::JournalRecord;
use walk::walk::progress::{Observer, Silent};
use walk::walk::replay::{Replay, ReplayOptions};
use walk::walk::state::read_prompt;

use crate::support::mini::Mini;
use crate::support::{command, files, forge_journal};

const SHARD: &str = "v2/r7-experts-layer-001.safetensors";

/// A walk of the mini model that keeps its states.
fn kept(mini: &Mini) -> PathBuf {
    let work = mini.work("kept");
    command(mini, &work).arg("--keep-states").assert().success();
    work
}

/// A copy of a work directory, without the states before these layers.
fn copy(work: &Path, name: &str, without: &[usize]) -> PathBuf {
    fn visit(from: &Path, to: &Path) {
        std::fs::create_dir_all(to).unwrap();
        for entry in std::fs::read_dir(from).unwrap() {
            let (path, name) = entry.map(|entry| (entry.path(), entry.file_name())).unwrap();
            match path.is_dir() {
                true => visit(&path, &to.join(name)),
                false => drop(std::fs::copy(&path, to.join(name)).unwrap()),
            }
        }
    }
    let to = work.with_file_name(name);
    visit(work, &to);
    for layer in without {
        std::fs::remove_dir_all(to.join(format!("states/{layer:03}"))).unwrap();
    }
    to
}

fn replay(work: &Path) -> Command {
    let mut command = Command::cargo_bin("walk").unwrap();
    command.args(["replay", "--quiet", "--work"]).arg(work);
    command
}

/// What a replay with `--json` ends with, prints and says.
struct Ran {
    code: Option<i32>,
    layers: Vec<Value>,
    report: Value,
    said: String,
}

fn run(command: &mut Command) -> Ran {
    let output = command.arg("--json").output().unwrap();
    let (mut layers, mut report) = (Vec::new(), Value::Null);
    for line in String::from_utf8(output.stdout).unwrap().lines() {
        let mut line: Value = serde_json::from_str(line).unwrap();
        // Times differ from run to run.
        line["data"].as_object_mut().unwrap().remove("seconds");
        match line["type"].as_str().unwrap() {
            "replay_layer" => layers.push(line["data"].take()),
            "replay" => report = line["data"].take(),
            other => panic!("{other}"),
        }
    }
    for layer in report.get_mut("layers").and_then(Value::as_array_mut).into_iter().flatten() {
        layer.as_object_mut().unwrap().remove("seconds");
    }
    Ran { code: output.status.code(), layers, report, said: String::from_utf8(output.stderr).unwrap() }
}

/// Runs a replay that must be equal.
fn equal(command: &mut Command) -> Ran {
    let ran = run(command);
    assert_eq!(ran.code, Some(0), "{}", ran.said);
    assert!(ran.said.is_empty(), "{}", ran.said);
    assert_eq!(ran.report["equal"], true);
    assert_eq!(json!(ran.layers), ran.report["layers"]);
    ran
}

/// Runs a replay that must be refused; returns what it said.
fn refused(command: &mut Command) -> String {
    let ran = run(command);
    assert_eq!(ran.code, Some(2), "{}", ran.said);
    assert!(ran.layers.is_empty() && ran.report.is_null());
    assert!(!ran.said.contains("panicked"), "{}", ran.said);
    ran.said
}

/// Layer, source of the input and way of comparison of every layer.
fn ways(ran: &Ran) -> Vec<String> {
    let of = |layer: &Value, field: &str| layer[field].as_str().unwrap().to_owned();
    let way =
        |layer: &Value| format!("{} {} {}", layer["layer"], of(layer, "input"), of(layer, "compared_by"));
    ran.layers.iter().map(way).collect()
}

/// Content of every file, and the time of the last change of every file and folder, the lock too.
fn snapshot(work: &Path) -> (BTreeMap<String, String>, BTreeMap<PathBuf, SystemTime>) {
    fn visit(path: &Path, found: &mut BTreeMap<PathBuf, SystemTime>) {
        found.insert(path.to_path_buf(), path.metadata().unwrap().modified().unwrap());
        if path.is_dir() {
            std::fs::read_dir(path).unwrap().for_each(|entry| visit(&entry.unwrap().path(), found));
        }
    }
    let mut times = BTreeMap::new();
    visit(work, &mut times);
    (files(work), times)
}

/// Changes bytes of a file, and makes the journal agree: `stage` sealed the file as it is now.
fn forge(work: &Path, stage: &str, name: &str, change: impl FnOnce(&mut Vec<u8>)) -> String {
    let mut bytes = std::fs::read(work.join(name)).unwrap();
    change(&mut bytes);
    std::fs::write(work.join(name), bytes).unwrap();
    let sha256 = sha256_file(work.join(name)).unwrap();
    forge_journal(work, |seals| {
        let seal = seals.iter_mut().find(|seal| seal.stage == stage).unwrap();
        assert!(seal.outputs.insert(name.to_owned(), sha256.clone()).is_some());
    });
    sha256
}

/// Flips all bits of a trellis word of expert 0's down of layer 1, sealed as if it had always been so.
fn change_an_expert(work: &Path) {
    let tensor = "model.layers.1.mlp.experts.0.down_proj.trellis";
    let start = SafetensorsFile::open(work.join(SHARD)).unwrap().info(tensor).unwrap().start as usize;
    forge(work, "layer-001/emit", SHARD, |bytes| {
        bytes[start + 40..start + 42].iter_mut().for_each(|b| *b ^= 0xff)
    });
}

#[test]
fn a_whole_run_is_equal_and_nothing_is_written_to_it() {
    let mini = Mini::new();
    let (work, plain) = (kept(&mini), mini.work("plain"));
    command(&mini, &plain).assert().success();
    assert!(!plain.join("states/001").exists());
    let before = [snapshot(&work), snapshot(&plain)];

    let ran = equal(&mut replay(&work));
    assert_eq!(ways(&ran), ["null tokens bytes", "0 sealed bytes", "1 sealed bytes"]);
    // 201, 91 and 2 tokens of 128 BF16 values; lists of at most 32 I32.
    let (hidden, lists) = (294 * 128 * 2, (201 * 32 + 91 * 32 + 2 * 2) * 4);
    let bytes: Vec<&Value> = ran.layers.iter().map(|layer| &layer["bytes"]).collect();
    assert_eq!(bytes, [hidden, hidden + lists, hidden + lists]);
    assert_eq!(ran.report["bytes"], 3 * hidden + 2 * lists);
    assert!(ran.layers.iter().all(|layer| layer["prompts"] == 3 && layer["differing_prompts"] == 0));
    // The last layer is never forwarded: said, not silent.
    assert_eq!(ran.report["not_replayed"], json!([{"layer": 2, "reason": "last_layer"}]));
    assert_eq!(ran.report["environment"], json!([]));

    let without = equal(&mut replay(&plain));
    assert_eq!(ways(&without), ["null tokens hash", "0 replayed hash", "1 replayed bytes"]);
    assert_eq!(without.report["bytes"], ran.report["bytes"]);
    for threads in ["1", "3"] {
        let again = equal(replay(&plain).args(["--threads", threads]));
        assert_eq!((again.layers, again.report), (without.layers.clone(), without.report.clone()));
    }
    let nowhere = copy(&plain, "nowhere", &[2]);
    assert!(equal(&mut replay(&nowhere)).layers.iter().all(|layer| layer["compared_by"] == "hash"));

    let output = replay(&plain).output().unwrap();
    let table = String::from_utf8(output.stdout).unwrap();
    for line in [
        "layer 2 not replayed: the last layer",
        "equal to what was sealed: all 3 calibration prompts, 3 states",
    ] {
        assert!(table.contains(line), "{table}");
    }
    assert_eq!(before, [snapshot(&work), snapshot(&plain)]);
    // Not even a lock, where there is none.
    std::fs::remove_file(plain.join("LOCK")).unwrap();
    equal(&mut replay(&plain));
    assert!(!plain.join("LOCK").exists());

    // A model that was moved is found by its options, and is the one that was sealed.
    let moved = mini.path().join("moved");
    std::fs::rename(mini.model(), &moved).unwrap();
    let said = refused(&mut replay(&plain));
    assert!(said.contains("field `--carrier`"), "{said}");
    equal(replay(&plain).arg("--carrier").arg(&moved));
    std::fs::remove_file(plain.join("LOCATIONS.json")).unwrap();
    assert!(refused(&mut replay(&plain)).contains("LOCATIONS.json"));
    equal(replay(&plain).arg("--carrier").arg(&moved));
}

#[test]
fn one_layer_and_one_prompt() {
    let mini = Mini::new();
    let work = kept(&mini);
    let ran = equal(replay(&work).args(["--layer", "1"]));
    assert_eq!(ways(&ran), ["1 sealed bytes"]);
    assert_eq!(ran.report["not_replayed"], json!([]));
    let ran = equal(replay(&work).args(["--layer", "1", "--prompt", "c"]));
    assert_eq!((&ran.report["prompts"], &ran.report["walk_prompts"]), (&json!(1), &json!(3)));
    assert_eq!(ran.report["bytes"], 2 * 128 * 2 + 2 * 2 * 4);
    assert_eq!(equal(replay(&work).args(["--prompt", "b"])).layers.len(), 3);

    // A prompt that is not asked for is not looked at.
    let without = copy(&work, "without", &[]);
    std::fs::remove_file(without.join("states/001/a.safetensors")).unwrap();
    equal(replay(&without).args(["--layer", "1", "--prompt", "b"]));
    let said = refused(replay(&without).args(["--layer", "1"]));
    assert!(said.contains("states/001/a.safetensors: the sealed file is gone"), "{said}");

    let without = copy(&work, "deleted", &[1]);
    let said = refused(replay(&without).args(["--layer", "1"]));
    assert!(said.contains("--keep-states") && said.contains("no --layer"), "{said}");
    let ran = equal(replay(&without).args(["--layer", "0"]));
    assert_eq!(ways(&ran), ["0 sealed hash"]);

    for (arguments, parts) in [
        (["--layer", "2"], ["never forwarded", "0 to 1"]),
        (["--layer", "3"], ["no such layer", "0 to 1"]),
        (["--prompt", "d"], ["prompt \"d\"", "for evaluation"]),
        (["--prompt", "bc"], ["no such prompt", "one of b, a, c"]),
    ] {
        let said = refused(replay(&work).args(arguments));
        assert!(parts.iter().all(|part| said.contains(part)), "{arguments:?}: {said}");
    }
}

/// Replays layer 1 with library calls; by prompt in plan order: BF16 bits of the hidden state as replayed and as sealed.
fn layer_1(mini: &Mini, work: &Path) -> Vec<(String, Vec<u16>, Vec<u16>)> {
    let geometry = Geometry::read(&mini.model().join("config.json")).unwrap();
    let carrier = std::sync::Arc::new(CheckpointDir::open(mini.model()).unwrap());
    let layer = Layer::load(&geometry, 1, carrier.as_ref(), &Device::Cpu).unwrap();
    let experts = Installed::open(carrier, (work, CodecName::Trellis), &[1], &geometry).unwrap();
    let manifest = |layer: usize| read_json(work.join(format!("states/{layer:03}/manifest.json"))).unwrap();
    let bits = |bytes: Vec<u8>| bytes.chunks(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
    let corpus = CorpusPlan::load(work.join("CORPUS_PLAN.json")).unwrap();
    let one = |prompt: &SealedPrompt| {
        let state = read_prompt(work, &manifest(1), prompt).unwrap();
        let made = forward_states(&layer, &experts, vec![state], &[prompt]).unwrap();
        let sealed = read_prompt(work, &manifest(2), prompt).unwrap();
        (prompt.id.clone(), bits(made[0].hidden_bytes().unwrap()), bits(sealed.hidden_bytes().unwrap()))
    };
    corpus.calibrate().map(one).collect()
}

#[test]
fn a_changed_expert_is_found_at_its_layer() {
    let mini = Mini::new();
    let work = kept(&mini);
    change_an_expert(&work);

    let made = layer_1(&mini, &work);
    let differing = made.iter().filter(|(_, replayed, sealed)| replayed != sealed).count();
    let (prompt, replayed, sealed) = made.iter().find(|(_, replayed, sealed)| replayed != sealed).unwrap();
    let at = replayed.iter().zip(sealed).position(|(a, b)| a != b).unwrap();
    // Through the same decimal digits of an f32 as the report's.
    let value = |bits: u16| {
        let digits: f64 = bf16::from_bits(bits).to_f32().to_string().parse().unwrap();
        json!({"value": digits, "bits": format!("0x{bits:04x}")})
    };
    let wanted = json!({
        "prompt": prompt, "of": "hidden", "row": at / 128, "channel": at % 128,
        "replayed": value(replayed[at]), "sealed": value(sealed[at]),
    });
    let ran = run(&mut replay(&work));
    assert_eq!(ran.code, Some(1), "{}", ran.said);
    assert_eq!(ran.layers[2]["layer"], 1);
    assert_eq!(ran.layers[2]["first_difference"], wanted);
    assert_eq!(ran.layers[2]["differing_prompts"], differing);
    assert!(ran.layers[..2].iter().all(|layer| layer["first_difference"].is_null()));
    assert_eq!(ran.report["equal"], false);
    let place = format!("check failed: layer 1, prompt {prompt:?}, row {}: ", at / 128);
    assert!(ran.said.contains(&place) && ran.said.contains(&format!("channel {}", at % 128)), "{}", ran.said);
    let alone = run(replay(&work).args(["--layer", "1", "--prompt", prompt]));
    assert_eq!((alone.code, &alone.layers[0]["first_difference"]), (Some(1), &wanted));

    // Without states layer and prompt are known, and that more would be with them.
    let without = copy(&work, "without", &[0, 1, 2]);
    let ran = run(&mut replay(&without));
    assert_eq!(ran.code, Some(1), "{}", ran.said);
    let found = &ran.layers[2]["first_difference"];
    assert_eq!((&found["prompt"], &found["of"]), (&json!(prompt), &json!("hash")));
    assert_eq!(
        found["sealed"].as_str().unwrap(),
        sha256_file(work.join(format!("states/002/{prompt}.safetensors"))).unwrap()
    );
    assert_eq!(ran.layers[2]["differing_prompts"], differing);
    assert!(ran.said.contains("layer 1") && ran.said.contains("--keep-states"), "{}", ran.said);

    // The table says the same.
    let output = replay(&work).output().unwrap();
    let table = String::from_utf8(output.stdout).unwrap();
    let line = format!("layer 1 differs first at prompt {prompt}, row {}: ", at / 128);
    assert!(table.contains(&line) && table.contains("NOT EQUAL"), "{table}");
}

#[test]
fn what_is_sealed_but_does_not_follow_is_a_difference() {
    let mini = Mini::new();
    let work = kept(&mini);
    let first = |work: &Path, layer: usize| {
        let ran = run(&mut replay(work));
        assert_eq!(ran.code, Some(1), "{}", ran.said);
        ran.layers[layer]["first_difference"].clone()
    };

    // A sealed state with another key in a list, and another value in the same row.
    let listed = copy(&work, "listed", &[]);
    let state = "states/002/b.safetensors";
    let file = SafetensorsFile::open(listed.join(state)).unwrap();
    let [hidden, list] = ["hidden", "topk_indices"].map(|name| file.info(name).unwrap().start as usize);
    let key = list + (50 * 32 + 3) * 4;
    let known =
        i32::from_le_bytes(std::fs::read(listed.join(state)).unwrap()[key..key + 4].try_into().unwrap());
    forge(&listed, "layer-001/forward", state, |bytes| {
        bytes[key..key + 4].copy_from_slice(&77i32.to_le_bytes());
        bytes[hidden + 50 * 256] ^= 1;
    });
    let wanted =
        json!({"prompt": "b", "of": "topk_indices", "row": 50, "place": 3, "replayed": known, "sealed": 77});
    assert_eq!(first(&listed, 2), wanted);

    // The shard's manifest is another one than the forward was made with: first by its seal, then by the state's file.
    let other = copy(&work, "other", &[]);
    let manifest = forge(&other, "layer-001/emit", "v2/r7-experts-layer-001.json", |bytes| bytes.push(b'\n'));
    let said = refused(&mut replay(&other));
    assert!(
        said.contains("layer-001/forward names another input") && said.contains("field `installed`"),
        "{said}"
    );
    forge_journal(&other, |seals| {
        let seal = seals.iter_mut().find(|seal| seal.stage == "layer-001/forward").unwrap();
        seal.inputs.insert("installed".to_owned(), manifest);
    });
    assert_eq!(first(&other, 2)["of"], "job");

    // Embeddings that are not those sealed: layer 0 has no input to go on from, layer 1 has.
    let embedded = copy(&work, "embedded", &[0]);
    forge_journal(&embedded, |seals| {
        let seal = seals.iter_mut().find(|seal| seal.stage == "embed").unwrap();
        seal.outputs.insert("states/000/b.safetensors".to_owned(), "0".repeat(64));
    });
    let ran = run(&mut replay(&embedded));
    assert_eq!(ran.code, Some(1), "{}", ran.said);
    assert_eq!(ways(&ran), ["null tokens hash", "1 sealed bytes"]);
    let differing: Vec<&Value> = ran.layers.iter().map(|layer| &layer["differing_prompts"]).collect();
    assert_eq!(differing, [1, 0]);
    assert_eq!(
        ran.report["not_replayed"],
        json!([{"layer": 0, "reason": "input_differs"}, {"layer": 2, "reason": "last_layer"}])
    );
    assert!(ran.said.contains("embeddings") && ran.said.contains("prompt \"b\""), "{}", ran.said);
}

#[test]
fn what_is_not_as_it_was_sealed_is_refused_by_name() {
    let mini = Mini::new();
    let work = kept(&mini);
    let shard = mini.model().join("model.safetensors");
    let at = |tensor: &str| SafetensorsFile::open(&shard).unwrap().info(tensor).unwrap().start as usize;
    let (norm, expert) =
        (at("model.layers.1.input_layernorm.weight"), at("model.layers.1.mlp.experts.0.up_proj.weight"));
    let changed = |path: &Path, place: usize| {
        let whole = std::fs::read(path).unwrap();
        let mut bytes = whole.clone();
        bytes[place] ^= 1;
        std::fs::write(path, bytes).unwrap();
        let ran = run(&mut replay(&work));
        std::fs::write(path, whole).unwrap();
        ran
    };
    for name in [
        "states/001/b.safetensors",
        "states/002/manifest.json",
        SHARD,
        "v2/r7-experts-layer-001.json",
        "CORPUS_PLAN.json",
        "CARRIER_INVENTORY.json",
        "JOURNAL.json",
        "CONFIG.json",
    ] {
        let ran = changed(&work.join(name), 100);
        assert_eq!(ran.code, Some(2), "{name}: {}", ran.said);
        assert!(ran.layers.is_empty() && ran.said.contains(name), "{}", ran.said);
    }
    let ran = changed(&shard, norm);
    assert_eq!(ran.code, Some(2));
    assert!(
        ran.said.contains("model.layers.1.input_layernorm.weight") && ran.said.contains("sha256"),
        "{}",
        ran.said
    );
    // Experts come from the shards: nothing of them is read here.
    assert_eq!(changed(&shard, expert).code, Some(0));

    let inside = work.join("states");
    std::fs::remove_dir_all(inside.join("000")).unwrap();
    let said = refused(replay(&work).arg("--scratch").arg(&inside));
    assert!(said.contains("--scratch") && said.contains("writes nothing"), "{said}");
    let scratch = mini.path().join("scratch");
    std::fs::create_dir(&scratch).unwrap();
    equal(replay(&work).arg("--scratch").arg(&scratch));
    assert_eq!(std::fs::read_dir(&scratch).unwrap().count(), 0, "removed at the end");

    let lock = WorkLock::acquire(&work).unwrap();
    let said = refused(&mut replay(&work));
    assert!(said.contains("LOCK: a walk is at work"), "{said}");
    drop(lock);
    let said = refused(&mut replay(mini.path()));
    assert!(said.contains("JOURNAL.json") && said.contains("no walk here"), "{said}");
}

/// Asks to stop once so many prompts are done.
struct Stopping(std::sync::atomic::AtomicUsize, usize);

impl Observer for Stopping {
    fn begin(&self, _: &str, _: Option<usize>, _: u64) {}

    fn advance(&self, item: &str) {
        // Files that are hashed have paths.
        self.0.fetch_add(usize::from(!item.contains('/')), std::sync::atomic::Ordering::Relaxed);
    }

    fn end(&self) {}

    fn note(&self, _: &str) {}

    fn stop_requested(&self) -> bool {
        self.0.load(std::sync::atomic::Ordering::Relaxed) >= self.1
    }
}

#[test]
fn another_machine_is_told_and_an_interruption_ends_it() {
    let mini = Mini::new();
    let work = kept(&mini);
    let options = ReplayOptions::default();
    let mut layers = 0;
    let opened = Replay::open(&work, &options, &Silent).unwrap();
    let stopped = opened.run(&Stopping(0.into(), 4), &mut |_| {
        layers += 1;
        Ok(())
    });
    assert_eq!(stopped.unwrap_err().exit_code(), 3);
    assert_eq!(layers, 2, "the layer in hand is finished, no other is begun");

    let mut record = JournalRecord::read(&work).unwrap();
    record.identity.insert("numeric_fingerprint".to_owned(), "f".repeat(64));
    let mut elsewhere = JournalRecord::new(record.identity).unwrap();
    for seal in record.stages {
        elsewhere.push(&seal.stage, seal.inputs, seal.outputs).unwrap();
    }
    write_json_atomic(work.join("JOURNAL.json"), &elsewhere).unwrap();
    let ran = run(&mut replay(&work));
    assert!(ran.said.starts_with("note: numeric_fingerprint of the walk is fff"), "{}", ran.said);
    assert!(ran.said.contains("THE NUMERIC ENVIRONMENT IS NOT THE WALK'S"), "{}", ran.said);
    let differs = &ran.report["environment"];
    assert_eq!((&differs[0]["field"], differs.as_array().unwrap().len()), (&json!("numeric_fingerprint"), 1));
    // It goes on: the values are equal, and only the identity that the forged journal has is not the files'.
    assert_eq!(ran.code, Some(1));
    assert!(ran.layers.iter().all(|layer| layer["first_difference"]["of"] == "job"));
}
