//! Studies and recipes through the built binary, on the mini model.

use std::path::Path;

use assert_cmd::Command;
use serde_json::Value;
use walk::config::Recipe;

use crate::support::mini::{EXPERTS, Mini};
use crate::support::{command, files};

/// A study of the mini model.
fn study(mini: &Mini, words: &[&str], work: &Path) -> Command {
    let mut command = Command::cargo_bin("walk").unwrap();
    command.args(words).args(["--quiet", "--json", "--model"]).arg(mini.model());
    command.arg("--corpus").arg(mini.plan()).arg("--work").arg(work);
    command
}

/// The JSON lines of a command that succeeds.
fn lines(command: &mut Command) -> Vec<Value> {
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// What a command that is refused (exit code 2) says.
fn refusal(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(output.stdout.is_empty());
    said
}

#[test]
fn an_ablation_compares_each_ingredient_with_the_base_and_is_adopted_when_run_again() {
    let mini = Mini::new();
    let work = mini.work("study");
    // The fast recipe does not search, which is said instead of run.
    let words = ["ablate", "--layers", "1", "--only", "rounding,allocation-count,vectors,search", "--recipe"];
    let with = |recipe| words.into_iter().chain([recipe]).collect::<Vec<&str>>();
    let only = with("fast");
    let printed = lines(&mut study(&mini, &only, &work));
    let kinds: Vec<&str> = printed.iter().map(|line| line["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["layer", "ablation"]);
    let report = &printed[1]["data"];
    let layer = &report["layers"][0];
    assert_eq!((&printed[0]["data"], layer["experts"].as_u64()), (layer, Some(EXPERTS as u64)));
    let names: Vec<&str> =
        layer["variants"].as_array().unwrap().iter().map(|v| v["variant"].as_str().unwrap()).collect();
    assert_eq!(names, ["allocation-count", "rounding", "vectors"]);
    assert_eq!(layer["skipped"][0]["ingredient"], "search");
    let base = &layer["base"];
    for variant in layer["variants"].as_array().unwrap() {
        let figure = |of: &Value, field: &str| of[field].as_f64().unwrap();
        let ratio = &variant["ratio"];
        let quotient = figure(variant, "heldout_error") / figure(base, "heldout_error");
        assert!((figure(ratio, "value") / quotient - 1.0).abs() < 1e-12, "{variant}");
        assert!(figure(ratio, "low") < quotient && quotient < figure(ratio, "high"));
        // The verdict is what the interval says, and nothing else.
        assert_eq!(variant["helps"].as_bool().unwrap(), figure(ratio, "low") > 1.0);
        let helps = variant["verdict"].as_str().unwrap().starts_with("helps");
        assert_eq!(variant["helps"].as_bool().unwrap(), helps);
        let bits = variant["bit_counts"].as_object().unwrap().iter();
        let bits: u64 = bits.map(|(bits, n)| bits.parse::<u64>().unwrap() * n.as_u64().unwrap()).sum();
        assert_eq!(bits, 21);
        assert_eq!(variant["encodes"], base["encodes"]);
        let change = figure(&variant["kl"], "mean") - figure(&base["kl"], "mean");
        assert!((figure(&variant["kl_difference"], "mean") - change).abs() < 1e-12);
        assert!(figure(&variant["kl"], "mean") > 0.0);
    }

    // Finished results are adopted: the same report, and not a byte changes.
    let before = files(&work);
    assert_eq!(lines(&mut study(&mini, &only, &work)), printed);
    assert_eq!(files(&work), before);

    // A result that was changed is measured again, from what the journal has sealed.
    let result = work.join("layer-001/rounding/result.json");
    let text = std::fs::read_to_string(&result).unwrap();
    std::fs::write(&result, text.replace("\"encodes\":", "\"encodes\":1")).unwrap();
    let again = lines(&mut study(&mini, &only, &work));
    let rounding = |report: &[Value]| report[1]["data"]["layers"][0]["variants"][1].clone();
    for field in ["heldout_error", "ratio", "kl", "kl_difference", "bit_counts"] {
        assert_eq!(rounding(&again)[field], rounding(&printed)[field]);
    }
    assert_eq!(
        (rounding(&again)["encodes"].as_u64(), &rounding(&again)["resumed"]),
        (Some(0), &Value::Bool(true))
    );

    // What belongs to another corpus or recipe is refused by name.
    let said = refusal(&mut study(&mini, &with("uniform-3"), &work));
    assert!(said.contains("recipe_variant"), "{said}");
}

#[test]
fn a_later_layer_is_studied_behind_the_quantized_ones_and_an_earlier_one_can_follow() {
    let mini = Mini::new();
    let work = mini.work("study");
    let later = lines(&mut study(&mini, &["ablate", "--layers", "2", "--only", "metric"], &work));
    let walked = mini.work("walk");
    let report = lines(command(&mini, &walked).arg("--json"));
    let walked = report.last().unwrap()["data"]["layers"][1]["heldout_error"].as_f64().unwrap();
    let base = later[0]["data"]["base"]["heldout_error"].as_f64().unwrap();
    // The base variant is what the walk makes of the layer (which sums in another order).
    assert!((base / walked - 1.0).abs() < 1e-9, "{base} {walked}");
    // States before finished layers are kept for this.
    let both = lines(&mut study(&mini, &["ablate", "--layers", "2,1", "--only", "metric"], &work));
    let order: Vec<u64> = both.iter().filter_map(|line| line["data"]["layer"].as_u64()).collect();
    assert_eq!(order, [1, 2]);
    assert_eq!(both[1], later[0]);
}

#[test]
fn a_study_of_nothing_is_refused() {
    let mini = Mini::new();
    let work = mini.work("study");
    let said = refusal(&mut study(&mini, &["ablate", "--layers", "1", "--only", "rotation"], &work));
    assert!(said.contains("\"rotation\"") && said.contains("rounding"), "{said}");
    let said = refusal(&mut study(&mini, &["ablate", "--layers", "0,1"], &work));
    assert!(said.contains("layer 0 has no routed experts") && said.contains("[1, 2]"), "{said}");
}

#[test]
fn a_pilot_prints_its_figures_and_follows_its_rule_in_both_halves() {
    let mini = Mini::new();
    let work = mini.work("study");
    let run = |words: &[&str]| {
        let words: Vec<&str> = ["pilot"].into_iter().chain(words.iter().copied()).collect();
        let printed = lines(study(&mini, &words, &work).args(["--layers", "1"]));
        assert_eq!((printed.len(), printed[0]["type"].as_str()), (1, Some("pilot")));
        let layer = printed[0]["data"]["layers"][0].clone();
        for arm in layer["arms"].as_array().unwrap() {
            let figure = |of: &Value, half: usize| of[half].as_f64().unwrap();
            let mut changes = [0.0; 2];
            for (half, change) in changes.iter_mut().enumerate() {
                *change = figure(&arm["change"], half);
                let quotient = figure(&arm["error"], half) / figure(&layer["incumbent"], half);
                assert!((quotient - 1.0 - *change).abs() < 1e-12 && figure(&arm["error"], half) > 0.0);
            }
            let within = match (arm["clipped"].as_f64(), arm["health"].as_f64()) {
                (Some(clipped), _) => clipped <= 0.01 && changes.iter().all(|&change| change <= 0.0),
                (None, Some(health)) => health >= 0.5 && changes.iter().all(|&change| change < 0.0),
                (None, None) => changes.iter().all(|&change| change < 0.0),
            };
            assert_eq!(arm["accepted"].as_bool().unwrap(), within, "{arm}");
            assert_eq!(arm["verdict"].as_str().unwrap().starts_with("accept"), within);
        }
        layer
    };
    let names = |layer: &Value| -> Vec<String> {
        layer["arms"].as_array().unwrap().iter().map(|arm| arm["arm"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&run(&["output-rescale"])), ["gate and up", "down", "gate, up and down"]);
    let sigma = run(&["sigma-reg"]);
    assert_eq!(names(&sigma).len(), 6);
    // More on the diagonal makes the factor healthier, less makes it worse.
    let health: Vec<f64> =
        sigma["arms"].as_array().unwrap().iter().map(|arm| arm["health"].as_f64().unwrap()).collect();
    for side in health.chunks_exact(3) {
        assert!(side[0] < 1.0 && side[1] > 1.0 && side[2] > side[1], "{health:?}");
    }
    // The mini plan is too short for its experts, so that both are cold; with fewer rows asked for none is.
    assert_eq!(run(&["cold-shrinkage"])["experts"].as_u64(), Some(EXPERTS as u64));
    let mut warm = study(&mini, &["pilot", "cold-shrinkage", "--layers", "1", "--min-fit-rows", "1"], &work);
    let said = refusal(&mut warm);
    assert!(said.contains("--min-fit-rows"), "{said}");
    let said = refusal(&mut study(&mini, &["pilot", "spin", "--layers", "1"], &work));
    assert!(said.contains("spin"), "{said}");
}

#[test]
fn a_walk_with_the_pilots_switched_on_keeps_its_promises() {
    let mini = Mini::new();
    let plain = mini.work("plain");
    command(&mini, &plain).assert().success();
    let path = mini.model().join("recipe.json");
    let mut recipe: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for (field, name) in [("output_rescale", "svh"), ("cold_diagonal_shrinkage", "trellis")] {
        recipe[field] = Value::Bool(true);
        let own = mini.path().join(format!("{field}.json"));
        std::fs::write(&own, recipe.to_string()).unwrap();
        recipe[field] = Value::Bool(false);
        let work = mini.work(field);
        // Probes and final encode agree to the byte, and both audits pass, or the walk would stop.
        command(&mini, &work).arg("--recipe").arg(&own).assert().success();
        let shard = |work: &Path| {
            let path = work.join("v2/r7-experts-layer-001.safetensors");
            candle_core::safetensors::load(path, &candle_core::Device::Cpu).unwrap()
        };
        let name = format!("model.layers.1.mlp.experts.0.gate_proj.{name}");
        let values = |work: &Path| {
            let tensor = shard(work)[&name].to_dtype(candle_core::DType::F32).unwrap();
            tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        assert_ne!(values(&plain), values(&work), "{field}");
    }
}

#[test]
fn a_printed_recipe_loads_again_and_has_the_journals_hash() {
    let mini = Mini::new();
    let recipe = |words: &[&str]| {
        let mut command = Command::cargo_bin("walk").unwrap();
        command.arg("recipe").arg("--model").arg(mini.model()).args(words);
        command
    };
    for choice in ["default", "fast", "uniform-4"] {
        let line = lines(recipe(&["--recipe", choice, "--json"]).arg("--explain")).remove(0);
        assert_eq!(line["type"], "recipe");
        let output = recipe(&["--recipe", choice]).output().unwrap();
        let hash = line["data"]["identity_sha256"].as_str().unwrap();
        assert!(String::from_utf8(output.stderr).unwrap().contains(hash));
        let path = mini.path().join("printed.json");
        std::fs::write(&path, output.stdout).unwrap();
        assert_eq!(Recipe::load(&path).unwrap().identity_hash().unwrap(), hash);
        let printed: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(printed, line["data"]["recipe"]);
        let knobs = line["data"]["knobs"].as_array().unwrap();
        assert_eq!(knobs.len(), printed.as_object().unwrap().len());
        for knob in knobs {
            assert_eq!(knob["value"], printed[knob["field"].as_str().unwrap()]);
        }
        let said =
            String::from_utf8(recipe(&["--recipe", choice, "--explain"]).output().unwrap().stdout).unwrap();
        assert!(said.contains("\nsigma_reg = ") && said.contains("exllamav3"), "{said}");
    }
    let work = mini.work("walk");
    command(&mini, &work).args(["--recipe", "uniform-3"]).assert().success();
    let journal: Value = serde_json::from_slice(&std::fs::read(work.join("JOURNAL.json")).unwrap()).unwrap();
    let line = lines(&mut recipe(&["--recipe", "uniform-3", "--json"])).remove(0);
    assert_eq!(journal["identity"]["recipe_sha256"], line["data"]["identity_sha256"]);
}
