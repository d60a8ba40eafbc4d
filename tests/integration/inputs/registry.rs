//! Refusals of `--model`, and the hub that cannot be reached.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use walk::config::Model;
use walk::config::registry::known_names;

use super::support::{refused, root};

#[test]
fn tiny_is_source_and_carrier_in_one_folder() {
    let tiny = Model::resolve("tiny", None, None).unwrap();
    assert_eq!(tiny.name, "tiny");
    assert_eq!(tiny.source_dir, tiny.carrier_dir);
    assert!(
        tiny.config_path.is_file() && tiny.tokenizer_path.is_file() && tiny.recipe_path.unwrap().is_file()
    );
    assert_eq!(tiny.prefix_tokens, Some(vec!["<|endoftext|>".to_owned()]));
}

#[test]
fn a_directory_is_a_model_too() {
    let dir = root().join("models/tiny");
    let model = Model::resolve(dir.to_str().unwrap(), None, None).unwrap();
    assert_eq!((model.name.as_str(), &model.source_dir), ("tiny", &dir));
}

#[test]
fn a_directory_without_card_leaves_the_prefix_to_the_plan() {
    let golden = root().join("tests/golden/forward/base");
    let tiny = root().join("models/tiny");
    let model = Model::resolve(golden.to_str().unwrap(), None, Some(&tiny)).unwrap();
    assert_eq!((model.prefix_tokens, model.recipe_path), (None, None));
    assert_eq!((model.source_dir, model.carrier_dir), (golden, tiny));
}

#[test]
fn an_unknown_name_lists_the_known_ones() {
    assert!(known_names().contains("glm52") && known_names().contains("tiny"));
    refused(Model::find("glm-9000"), &["--model", "\"glm-9000\"", "glm52, ", "tiny", "config.json"]);
    refused(Model::find(""), &["--model", "glm52"]);
}

#[test]
fn a_directory_without_config() {
    let dir = tempfile::tempdir().unwrap();
    refused(
        Model::find(dir.path().to_str().unwrap()),
        &["--model", "no config.json", &dir.path().display().to_string()],
    );
}

#[test]
fn a_card_with_an_unknown_key() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("mine");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("config.json"), "{}").unwrap();
    std::fs::write(folder.join("model.json"), r#"{"prefix": []}"#).unwrap();
    let registries = [PathBuf::from("nowhere"), dir.path().to_path_buf()];
    refused(Model::find_in("mine", &registries), &["model.json", "unknown field `prefix`"]);
}

#[test]
fn overrides_that_are_no_directories() {
    let nowhere = root().join("nowhere");
    refused(
        Model::resolve("tiny", Some(&nowhere), None),
        &["--source", "nowhere", "model.safetensors.index.json"],
    );
    refused(
        Model::resolve("tiny", None, Some(&nowhere)),
        &["--carrier", "nowhere", "model.safetensors.index.json"],
    );
}

#[test]
fn a_carrier_without_tokenizer() {
    let golden = root().join("tests/golden/forward/base");
    refused(Model::resolve("tiny", None, Some(&golden)), &["golden/forward/base/tokenizer.json", "carrier"]);
}

#[test]
fn glm52_without_carrier_says_what_is_wanted_before_any_request() {
    refused(
        Model::resolve("glm52", None, None),
        &[
            "--carrier DIR",
            "config.json, tokenizer.json, model.safetensors.index.json and its shards",
            "zai-org/GLM-5.2",
        ],
    );
}

#[test]
fn a_folder_without_weights_and_hub_ids() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), "{}").unwrap();
    refused(
        Model::resolve(dir.path().to_str().unwrap(), None, None),
        &["no weights", "--source DIR", "its shards"],
    );
}

/// The part of the next test that runs with the hub pointed at a closed port.
#[test]
#[ignore = "run by the_hub_that_cannot_be_reached, with its environment"]
fn hub_child() {
    let endpoint = std::env::var("HF_ENDPOINT").unwrap_or_default();
    assert!(
        endpoint.starts_with("http://127.0.0.1:"),
        "this is half a test; its other half sets HF_ENDPOINT"
    );
    let carrier = root().join("models/tiny");
    let error = Model::resolve("glm52", None, Some(&carrier)).unwrap_err();
    println!("REFUSED {} {error}", error.exit_code());
}

#[test]
fn the_hub_that_cannot_be_reached() {
    // A port that was just free on the loopback interface: nothing listens there.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let home = tempfile::tempdir().unwrap();
    let started = Instant::now();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--nocapture", "inputs::registry::hub_child"])
        .env("HF_ENDPOINT", format!("http://127.0.0.1:{port}"))
        .env("HF_HOME", home.path())
        .env("WALK_MODELS", root().join("models"))
        .output()
        .unwrap();
    let output = String::from_utf8_lossy(&child.stdout);
    for part in [
        "REFUSED 2",
        "config.json, tokenizer.json, model.safetensors.index.json and its shards of zai-org/GLM-5.2 failed",
        "refused",
        "--source DIR --carrier DIR",
    ] {
        assert!(output.contains(part), "{part:?} is not in: {output}");
    }
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
}
