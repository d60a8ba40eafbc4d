//! Refusals of `--model`, and the hub that cannot be reached.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
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
    let carrier = carrier_of(&golden);
    let model = Model::resolve(golden.to_str().unwrap(), None, Some(carrier.path())).unwrap();
    assert_eq!((model.prefix_tokens, model.recipe_path), (None, None));
    assert_eq!((model.source_dir, &*model.carrier_dir), (golden, carrier.path()));
}

/// A folder with the config of a model and a tokenizer.
fn carrier_of(model: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(model.join("config.json"), dir.path().join("config.json")).unwrap();
    std::fs::copy(root().join("models/tiny/tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    dir
}

#[test]
fn a_checkpoint_whose_config_contradicts_the_model() {
    let tiny = root().join("models/tiny");
    let other = carrier_of(&tiny);
    let path = other.path().join("config.json");
    let config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let write = |field: &str, value: Value| {
        let mut config = config.clone();
        config[field] = value;
        std::fs::write(&path, config.to_string()).unwrap();
    };
    let dir = other.path().display().to_string();
    for (field, value, shown) in [
        ("hidden_size", json!(512), "hidden_size is 512; wanted: 256, as "),
        ("num_hidden_layers", json!(4), "`mlp_layer_types`"),
        ("vocab_size", json!(4096), "vocab_size is 4096; wanted: 2048"),
        ("n_routed_experts", json!(16), "n_routed_experts is 16; wanted: 8"),
        ("rms_norm_eps", json!(1e-6), "rms_norm_eps is 0.000001; wanted: 0.00001"),
        ("tie_word_embeddings", json!(true), "tie_word_embeddings is true; wanted: false"),
        (
            "rope_parameters",
            json!({"rope_theta": 20000.0, "rope_type": "default"}),
            "field `rope_parameters`: rope_parameters is theta 20000; wanted: theta 10000",
        ),
        (
            "mlp_layer_types",
            json!(["dense", "sparse", "sparse", "sparse", "sparse"]),
            "mlp_layer_types is \"sparse\" for layer 1; wanted: \"dense\" for layer 1",
        ),
        (
            "indexer_types",
            json!(["full", "full", "full", "full", "full"]),
            "indexer_types is \"full\" for layer 3; wanted: \"shared\" for layer 3",
        ),
        ("model_type", json!("deepseek_v3"), "`model_type`"),
    ] {
        write(field, value);
        for (source, carrier) in [(Some(other.path()), None), (None, Some(other.path()))] {
            refused(Model::resolve("tiny", source, carrier), &[&dir, "config.json", shown]);
        }
    }
    std::fs::write(&path, "[]").unwrap();
    refused(Model::resolve("tiny", Some(other.path()), None), &[&dir, "config.json", "not a JSON object"]);
    // Other spellings of the same, and fields that no forward pass reads, are no contradiction.
    write("rope_parameters", Value::Null);
    let text =
        std::fs::read_to_string(&path).unwrap().replacen('{', "{\"rope_theta\": 1e4, \"head_dim\": 64,", 1);
    std::fs::write(&path, text.replacen("\"head_dim\":48,", "", 1)).unwrap();
    Model::resolve("tiny", Some(other.path()), Some(other.path())).unwrap();
}

#[test]
fn a_card_that_is_no_object() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), "{}").unwrap();
    for text in ["[]", "null", "[\"mini\", []]", r#"{"hub": []}"#, r#"{"prefix_tokens": {}}"#] {
        std::fs::write(dir.path().join("model.json"), text).unwrap();
        refused(Model::find(dir.path().to_str().unwrap()), &["model.json", "invalid type", "line 1"]);
    }
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
    let carrier = carrier_of(&root().join("models/glm52"));
    let error = Model::resolve("glm52", None, Some(carrier.path())).unwrap_err();
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
