//! Hostile inputs to whole walks, through the built binary: each ends with exit code 2 and one line that names the thing,
//! and leaves nothing that looks finished.

use std::path::Path;

use assert_cmd::Command;
use serde_json::{Value, json};

use crate::support::mini::{self, Mini, noise};
use crate::support::{command, files};

/// Runs a walk that must be refused with all of `parts` in its one line.
#[track_caller]
fn refused_in(mini: &Mini, work: &Path, change: impl FnOnce(&mut Command), parts: &[&str]) {
    let mut command = command(mini, work);
    change(&mut command);
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    for part in parts {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(!said.contains("panicked") && output.stdout.is_empty(), "{said}");
    assert!(!work.join("WALK_COMPLETE.json").exists() && !work.join("v2").exists(), "{said}");
}

#[track_caller]
fn refused(mini: &Mini, parts: &[&str]) {
    refused_in(mini, &mini.work("refused"), |_| {}, parts);
}

/// Changes a JSON file of the model.
fn change_json(mini: &Mini, file: &str, change: impl FnOnce(&mut Value)) {
    let path = mini.model().join(file);
    let mut value: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut value);
    std::fs::write(path, value.to_string()).unwrap();
}

#[test]
fn names_of_paths_do_not_reach_the_bytes() {
    let mini = Mini::new();
    let plain = mini.work("plain");
    let entry = |file: &str| {
        let mut prompts: Vec<Value> = [("a", "calibrate", 1, 200), ("d", "evaluate", 4, 60)]
            .map(|(id, usage, seed, length)| noise(id, usage, seed, length))
            .into();
        prompts.push(json!({"id": "t", "axis": "text", "use": "calibrate", "file": file}));
        json!({"version": 1, "prompts": prompts}).to_string()
    };
    let text = "größer 模型 \u{1f600}\n".repeat(20);
    let elsewhere = mini.path().join("größe 模型 ' \" $x; #");
    std::fs::create_dir(&elsewhere).unwrap();
    for (folder, plan) in [(mini.path(), "plan.json"), (&*elsewhere, "мой план.json")] {
        std::fs::write(folder.join("текст ä b.txt"), &text).unwrap();
        std::fs::write(folder.join(plan), entry("текст ä b.txt")).unwrap();
    }
    command(&mini, &plain).assert().success();
    let (model, work) = (elsewhere.join("mödel \u{301} 1"), elsewhere.join("ärbeit ☃/x y"));
    std::fs::rename(mini.model(), &model).unwrap();
    Command::cargo_bin("walk")
        .unwrap()
        .args(["--quiet", "--model"])
        .arg(&model)
        .arg("--corpus")
        .arg(elsewhere.join("мой план.json"))
        .arg("--work")
        .arg(&work)
        .assert()
        .success();
    // Where the checkpoints lie is told beside the seals, and is all that differs.
    let sealed = |work: &Path| {
        let mut found = files(work);
        assert!(found.remove("LOCATIONS.json").is_some());
        found
    };
    assert_eq!(sealed(&plain), sealed(&work));
}

#[test]
fn prompts_of_one_token_walk_among_others() {
    let mini = Mini::new();
    let one = |id: &str, usage: &str, token: u32| json!({"id": id, "axis": "one", "use": usage, "token_ids": [token], "prefix_tokens": []});
    let plan = json!({"version": 1, "prompts": [
        one("first", "calibrate", 5), noise("a", "calibrate", 1, 200), one("last", "calibrate", 2047),
        one("measured", "evaluate", 7), noise("d", "evaluate", 4, 60),
    ]});
    std::fs::write(mini.plan(), plan.to_string()).unwrap();
    let work = mini.work("walk");
    command(&mini, &work).assert().success();
    let read =
        |path: &str| -> Value { serde_json::from_slice(&std::fs::read(work.join(path)).unwrap()).unwrap() };
    assert_eq!(read("CORPUS_PLAN.json")["calibration_rows"], 203);
    assert!(work.join("WALK_COMPLETE.json").exists());
    assert!(work.join("states/002/first.safetensors").exists());
}

#[test]
fn work_directories_in_the_way_of_a_checkpoint() {
    let mini = Mini::new();
    let model = mini.model();
    let overlap = |work: &Path| {
        refused_in(&mini, work, |_| {}, &[&work.display().to_string(), "overlap", "source", "wanted: "]);
    };
    let before = files(&model);
    overlap(&model);
    overlap(&model.join("work"));
    overlap(&model.join("not/yet/there"));
    overlap(mini.path());
    overlap(&mini.path().join("nowhere/../mini/work"));
    #[cfg(unix)]
    {
        let link = mini.path().join("link");
        std::os::unix::fs::symlink(&model, &link).unwrap();
        overlap(&link);
        overlap(&link.join("work"));
        let around = mini.path().join("around");
        std::os::unix::fs::symlink(mini.path(), &around).unwrap();
        overlap(&around);
    }
    assert_eq!(before, files(&model), "something was written into the model");
}

/// Permissions do not hold everybody back; these do.
#[test]
fn work_directories_that_cannot_be_made() {
    let mini = Mini::new();
    let file = mini.path().join("a file");
    std::fs::write(&file, "kept").unwrap();
    for work in [file.clone(), file.join("work"), file.join("deep/er")] {
        refused_in(&mini, &work, |_| {}, &[&file.display().to_string()]);
    }
    assert_eq!(std::fs::read(&file).unwrap(), b"kept");
    #[cfg(target_os = "linux")]
    for work in ["/proc/walk-work", "/proc/self/walk-work", "/dev/null/walk-work"] {
        refused_in(&mini, Path::new(work), |_| {}, &[work]);
    }
    #[cfg(unix)]
    {
        let dead = mini.path().join("dead link");
        std::os::unix::fs::symlink(mini.path().join("nowhere/at all"), &dead).unwrap();
        refused_in(&mini, &dead, |_| {}, &["dead link"]);
    }
}

#[test]
fn tied_embeddings_walk_and_a_head_of_its_own_beside_them_is_refused() {
    let tie =
        |mini: &Mini| change_json(mini, "config.json", |config| config["tie_word_embeddings"] = json!(true));
    let mini = Mini::with(|tensors| tensors.retain(|(name, ..)| name != "lm_head.weight"));
    refused(&mini, &["lm_head.weight", "no such tensor"]);
    tie(&mini);
    command(&mini, &mini.work("tied")).args(["--recipe", "uniform-3"]).assert().success();
    let mini = Mini::new();
    tie(&mini);
    refused(&mini, &["model.safetensors", "`tie_word_embeddings`", "lm_head.weight", "differs"]);
    let mini = Mini::with(|tensors| {
        let embedding =
            tensors.iter().find(|(name, ..)| name == "model.embed_tokens.weight").unwrap().2.clone();
        tensors.iter_mut().find(|(name, ..)| name == "lm_head.weight").unwrap().2 = embedding;
    });
    tie(&mini);
    command(&mini, &mini.work("equal")).args(["--recipe", "uniform-3"]).assert().success();
}

#[test]
fn the_mtp_block_is_not_walked() {
    let mtp = |layer: usize, name: &str| (format!("model.layers.{layer}.{name}.weight"), vec![1], vec![1.0]);
    for name in ["eh_proj", "enorm", "hnorm", "shared_head.norm"] {
        let mini = Mini::with(|tensors| tensors.push(mtp(2, name)));
        refused(
            &mini,
            &["model.safetensors", "`num_hidden_layers`", "layer 2", name, "MTP block", "at most 2"],
        );
    }
    let mini = Mini::with(|tensors| tensors.push(mtp(3, "input_layernorm")));
    refused(&mini, &["model.safetensors", "`num_hidden_layers`", "layer 3", "input_layernorm"]);
}

#[test]
fn a_hidden_value_that_overflows_stops_the_walk_by_layer_prompt_and_row() {
    for layer in [0, 1] {
        let mini = Mini::with(|tensors| {
            let name = format!("model.layers.{layer}.self_attn.o_proj.weight");
            tensors.iter_mut().find(|(n, ..)| *n == name).unwrap().2.fill(3e38);
        });
        refused(&mini, &[&format!("layer {layer}, prompt \"a\", row "), "after attention", "finite values"]);
        // The state that would have held it is not sealed.
        assert!(!mini.work("refused").join(format!("states/{:03}/manifest.json", layer + 1)).exists());
    }
}

#[test]
fn checkpoints_of_another_model() {
    let (mini, other) = (Mini::new(), Mini::new());
    change_json(&other, "config.json", |config| config["routed_scaling_factor"] = json!(2.5));
    let path = other.model().join("config.json").display().to_string();
    let parts = [&*path, "`routed_scaling_factor`", "is 2.5; wanted: 1.5, as "];
    for role in ["--source", "--carrier"] {
        refused_in(
            &mini,
            &mini.work("refused"),
            |command| {
                command.arg(role).arg(other.model());
            },
            &parts,
        );
    }
}

#[test]
fn small_files_that_are_no_objects() {
    for (file, wanted) in [
        ("config.json", "not a JSON object"),
        ("model.json", "expected an object"),
        ("recipe.json", "expected an object"),
        ("tokenizer.json", "not a tokenizer"),
        ("model.safetensors.index.json", "expected an object"),
    ] {
        for text in ["[]", "null"] {
            let mini = Mini::new();
            std::fs::write(mini.model().join(file), text).unwrap();
            refused(&mini, &[file, wanted]);
        }
    }
}

/// The tokenizers library panics on these, found by fuzzing: nothing of that is seen.
#[test]
fn a_tokenizer_that_is_cut_within_its_decoder() {
    let mini = Mini::new();
    let path = mini.model().join("tokenizer.json");
    let whole = std::fs::read_to_string(&path).unwrap();
    let decoder = whole.find("\"decoder\": {").or(whole.find("\"decoder\":{")).unwrap();
    for text in
        [&whole[..decoder + 20], r#"{"version":"1.0","decoder":{"#, "{\"decoder\":{\"type\":\"\u{1}\"}}"]
    {
        std::fs::write(&path, text).unwrap();
        refused(&mini, &["tokenizer.json", "not a tokenizer", "line "]);
    }
}

#[test]
fn a_target_the_layer_cannot_meet_names_the_recipe() {
    let mini = Mini::new();
    change_json(&mini, "recipe.json", |recipe| recipe["target"] = json!({"numerator": 17, "denominator": 5}));
    refused(&mini, &["recipe.json, field `target`", "6 tensors x 17/5 = 102/5 bits"]);
    change_json(&mini, "recipe.json", |recipe| recipe["codec"] = json!("kaiju1"));
    refused(&mini, &["recipe.json, field `search`", "kaiju1 has no use for it"]);
}

#[test]
fn an_empty_calibration_set_and_prompts_beyond_the_positions() {
    let mini = Mini::new();
    let with = |prompts: Value| {
        std::fs::write(mini.plan(), json!({"version": 1, "prompts": prompts}).to_string()).unwrap();
    };
    with(json!([]));
    refused(&mini, &["plan.json", "`prompts`", "there are no prompts"]);
    with(json!([noise("d", "evaluate", 4, 60)]));
    refused(&mini, &["plan.json", "`prompts`", "no entry has use \"calibrate\""]);
    // The prefix counts: 511 tokens and it fill the 512 positions, one more does not fit.
    with(json!([noise("long", "calibrate", 4, 512)]));
    refused(&mini, &["plan.json", "`max_tokens`", "\"long\"", "513 tokens", "max_position_embeddings, 512"]);
    with(json!([noise("long", "calibrate", 4, 511)]));
    command(&mini, &mini.work("full")).args(["--recipe", "uniform-3"]).assert().success();
}

#[test]
fn weights_that_are_not_finite_are_named_whatever_they_are_of() {
    for name in
        ["model.embed_tokens.weight", "model.layers.1.mlp.gate.e_score_correction_bias", "model.norm.weight"]
    {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mini = Mini::with(|tensors| {
                tensors.iter_mut().find(|(n, ..)| n == name).unwrap().2[mini::EXPERTS - 1] = value;
            });
            refused(&mini, &["model.safetensors", name, "flat index 1", "row 0", "not finite"]);
        }
    }
}
