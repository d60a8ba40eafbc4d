//! `walk estimate` through the built binary, and its counts and sizes against a walk that was made.

use std::collections::BTreeMap;
use std::path::Path;

use assert_cmd::Command;
use serde_json::Value;
use walk::config::{Geometry, Recipe};
use walk::estimate::counts::{LayerCounts, search_encodes};
use walk::estimate::size::{Parameters, shard_bytes};

use super::support::mini::{EXPERTS, Mini, WIDTH};
use super::support::{command, files, repository};

/// An estimate that tries the machine for an instant.
fn estimate(model: &Path, plan: &Path) -> Command {
    let mut command = Command::cargo_bin("walk").unwrap();
    command
        .args(["estimate", "--quiet", "--calibrate", "0.02", "--model"])
        .arg(model)
        .arg("--corpus")
        .arg(plan);
    command
}

fn of(model: &str) -> Command {
    estimate(&repository(&format!("models/{model}")), &repository("corpus/plan.json"))
}

fn data(command: &mut Command) -> Value {
    let output = command.arg("--json").assert().success().get_output().clone();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), 1);
    let mut value: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(value["type"], "estimate");
    value["data"].take()
}

fn text(command: &mut Command) -> String {
    String::from_utf8(command.assert().success().get_output().stdout.clone()).unwrap()
}

fn refusal(command: &mut Command) -> String {
    let output = command.assert().code(2).get_output().clone();
    assert!(output.stdout.is_empty(), "a refusal prints nothing on stdout");
    String::from_utf8(output.stderr).unwrap()
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn glm52_is_held_against_the_record_without_weights_or_tokenizer() {
    let text = text(of("glm52").args(["--threads", "1"]));
    for part in [
        "UNVERIFIED projection: model glm52, recipe default, 1 threads",
        "GUESSED from the text at 4 bytes a token",
        "864 to 1008",
        "6624 to 8432",
        "search, at most               1008          1008          equal",
        "first round of probes         3328          3328          equal",
        "follow-up, an expert changed  13            13            equal",
        "final and interaction         1536          768           the interaction audit measures",
        "all                           7536 to 9200  6768 to 8432",
        "the record has 302.6 GiB of routed experts; here 295.55 GiB to the byte, 295.31 of them trellis words",
        "at 6 bits beside them",
        "requirements that it has not verified",
        "durable writing was not tried",
    ] {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
}

#[test]
fn as_json_every_stage_is_amounts_times_rates() {
    let data = data(of("glm52").args(["--tokens", "1000000"]));
    assert_eq!(data["status"], "UNVERIFIED projection");
    assert_eq!((&data["tokens"]["calibrate"], &data["tokens"]["basis"]), (&1_000_000.into(), &"told".into()));
    let stages = data["stages"].as_array().unwrap();
    let names: Vec<&str> = stages.iter().map(|stage| stage["most"]["stage"].as_str().unwrap()).collect();
    let wanted = "open prefix capture search probe allocation final encode emit audit forward evaluate";
    assert_eq!(names.join(" "), wanted);
    let mut hours = 0.0;
    for stage in stages {
        let number = |value: &Value| value.as_f64().unwrap();
        let each = number(&stage["most"]["seconds_each"]);
        let parts: f64 = stage["parts"].as_array().unwrap().iter().map(|p| number(&p["seconds"])).sum();
        assert!(each > 0.0 && (parts / each - 1.0).abs() < 1e-9, "{stage}");
        for part in stage["parts"].as_array().unwrap() {
            let product = number(&part["amount"]) * number(&part["seconds_a_unit"]);
            assert!((product - number(&part["seconds"])).abs() <= 1e-9 * product, "{part}");
        }
        assert!(number(&stage["least"]["hours"]) <= number(&stage["most"]["hours"]));
        hours += number(&stage["most"]["hours"]);
    }
    assert!((hours / data["hours"][1].as_f64().unwrap() - 1.0).abs() < 1e-9);
    let lines = data["record_counts"].as_array().unwrap();
    let unequal: Vec<&str> =
        lines.iter().filter(|l| l["equal"] == false).map(|l| l["what"].as_str().unwrap()).collect();
    assert_eq!(unequal, ["final and interaction", "all"]);
    assert!(lines.iter().all(|line| (line["because"] == "") == (line["equal"] == true)));
}

#[test]
fn the_record_is_left_out_where_it_is_about_something_else() {
    for (model, recipe) in [("tiny", "default"), ("glm52", "fast"), ("glm52", "uniform-3")] {
        let data = data(of(model).args(["--recipe", recipe]));
        assert_eq!((&data["record_counts"], &data["record_sizes"]), (&Value::Array(vec![]), &Value::Null));
    }
    let tiny = text(&mut of("tiny"));
    assert!(tiny.contains("30633 calibration tokens (counted by the model's tokenizer)"), "{tiny}");
}

#[test]
fn a_walk_makes_the_encodes_and_bytes_that_were_counted() {
    let mini = Mini::new();
    let (work, model) = (mini.work("walked"), mini.model());
    let disk = mini.path().join("not yet/there");
    let data = data(estimate(&model, &mini.plan()).arg("--work").arg(&disk));
    assert_eq!(data["machine"]["disk_tried"], true);
    assert!(
        !mini.path().join("not yet").exists()
            && files(mini.path()).keys().all(|f| !f.contains("calibration"))
    );
    command(&mini, &work).assert().success();

    let geometry = Geometry::read(&model.join("config.json")).unwrap();
    let recipe = Recipe::choose("default", Some(&model.join("recipe.json"))).unwrap();
    let counts = LayerCounts::of(&geometry, &recipe);
    let mut shards = 0;
    for layer in geometry.moe_layers() {
        let search = json(&work.join(format!("search/layer-{layer:03}.json")));
        let encodes = search["encodes"].as_u64().unwrap();
        // The baseline and the chosen bundle are always there.
        let bundles = search["bundles"].as_array().unwrap().len() as u64 - 2;
        assert_eq!(encodes, search_encodes(counts.experts, counts.sample, bundles));
        assert!((counts.search.least..=counts.search.most).contains(&encodes), "{encodes}: {counts:?}");

        let folder = work.join(format!("layer-{layer:03}"));
        let probed = json(&folder.join("probe-iter-00.json"));
        let of_an_expert = |expert: &Value| expert["probe"]["encodes"].as_u64().unwrap();
        let probes: u64 = probed["experts"].as_array().unwrap().iter().map(of_an_expert).sum();
        assert_eq!(probes, counts.first_probe);
        // One iteration: no follow-up.
        assert!(!folder.join("probe-iter-01.json").exists() && counts.follow_up.most == 0);

        let stem = work.join(format!("v2/r7-experts-layer-{layer:03}"));
        let map: BTreeMap<String, u32> =
            serde_json::from_value(json(&stem.with_extension("json"))["bit_map"].clone()).unwrap();
        let bits = |expert: usize| {
            ["gate_proj", "up_proj", "down_proj"]
                .map(|role| map[&format!("model.layers.{layer}.mlp.experts.{expert}.{role}")])
        };
        let length = |path: &Path| std::fs::metadata(path).unwrap().len();
        let numbered = || (0..EXPERTS).map(|expert| (expert, bits(expert)));
        let written = length(&stem.with_extension("safetensors"));
        assert_eq!(shard_bytes(layer, (WIDTH, WIDTH), numbered()), written);
        shards += written;
        for expert in numbered() {
            let path = folder.join(format!("final-experts/expert-{:03}.safetensors", expert.0));
            assert_eq!(shard_bytes(layer, (WIDTH, WIDTH), [expert]), length(&path));
        }
    }
    // Which tensors get the upgrades is for the walk to say; a header has some digits more or less.
    let counted = data["disk"]["v2_shards"].as_u64().unwrap();
    assert!(counted.abs_diff(shards) <= 64, "{counted} counted, {shards} written");
    let state = length_of_state(&work);
    let counted = data["disk"]["state"].as_u64().unwrap() as f64;
    assert!((counted / state - 1.0).abs() < 0.15, "{counted} counted, {state} written");
    let whole = std::fs::metadata(model.join("model.safetensors")).unwrap().len();
    let counted = Parameters::of(&geometry, 0).bf16_bytes();
    assert!(counted < whole && whole - counted < 16_384, "{counted} counted, {whole} written");
}

/// Bytes of the state that a finished walk leaves.
fn length_of_state(work: &Path) -> f64 {
    let states = files(&work.join("states"));
    let length = |name: &String| std::fs::metadata(work.join("states").join(name)).unwrap().len();
    states.keys().filter(|name| name.ends_with(".safetensors")).map(length).sum::<u64>() as f64
}

#[test]
fn what_cannot_be_estimated_is_refused() {
    let mini = Mini::new();
    let plan = mini.plan();
    let with = |args: &[&str]| refusal(estimate(&mini.model(), &plan).args(args));
    assert!(with(&["--tokens", "0"]).contains("--tokens 0"));
    assert!(with(&["--recipe", "nonsense"]).contains("there is no recipe"));
    assert!(with(&["--threads", "0"]).contains("--threads 0"));
    let mut command = Command::cargo_bin("walk").unwrap();
    command.args(["estimate", "--model", "tiny", "--corpus", "corpus/plan.json", "--calibrate", "NaN"]);
    assert!(refusal(command.current_dir(repository("."))).contains("--calibrate NaN"));
    assert!(refusal(&mut estimate(Path::new("nowhere"), &plan)).contains("no model \"nowhere\""));
    let nowhere = mini.path().join("nowhere.json");
    assert!(refusal(&mut estimate(&mini.model(), &nowhere)).contains("nowhere.json"));
}
