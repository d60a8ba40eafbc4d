//! `walk inventory` through the built binary, and inventory files read back.

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use serde_json::{Value, json};
use walk::checkpoint::inventory::{Aspect, Inventory, InventoryFile, Item, Role, open_role};
use walk::checkpoint::names::{self, Projection};
use walk::store::canonical_json::{canonical, canonical_hash};

use super::inputs::support::refused;
use super::support::mini::Mini;
use super::support::repository;

fn inventory(role: &str, dir: &Path) -> Command {
    let mut command = Command::cargo_bin("walk").unwrap();
    command.args(["inventory", "--quiet", "--role", role]).arg(dir);
    command
}

/// The data of the one JSON line on stdout.
fn line(command: &mut Command) -> Value {
    let output = command.arg("--json").assert().success().get_output().clone();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), 1);
    let mut value: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(value["type"], "inventory");
    value["data"].take()
}

fn stderr(command: &mut Command) -> String {
    let output = command.assert().code(2).get_output().clone();
    assert!(output.stdout.is_empty(), "a refusal prints nothing on stdout");
    String::from_utf8(output.stderr).unwrap()
}

/// The mini model's inventory, published by the binary.
fn written(mini: &Mini, name: &str) -> PathBuf {
    let out = mini.path().join(name);
    inventory("source", &mini.model()).arg("--out").arg(&out).assert().success();
    out
}

#[test]
fn of_tiny_it_is_the_same_twice_and_on_one_thread_and_two() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = repository("models/tiny");
    let files = ["1", "1", "2"].map(|threads| {
        let out = folder.path().join(format!("of {threads} threads.json"));
        inventory("source", &tiny).args(["--threads", threads, "--out"]).arg(&out).assert().success();
        std::fs::read(out).unwrap()
    });
    assert!(files[0] == files[1] && files[1] == files[2]);

    let data = line(&mut inventory("source", &tiny));
    let file: Value = serde_json::from_slice(&files[0]).unwrap();
    assert_eq!(data["inventory"], file);
    assert_eq!(file["schema"], "walk-inventory-v1");
    assert_eq!(
        file["inventory_sha256"],
        canonical_hash(&json!({"files": file["files"], "tensors": file["tensors"]})).unwrap()
    );
    for name in ["config.json", "tokenizer.json", "model.safetensors.index.json"] {
        assert!(file["files"][name].is_string(), "{name}");
    }
    for (shard, bytes) in file["shards"].as_object().unwrap() {
        assert_eq!(std::fs::metadata(tiny.join(shard)).unwrap().len(), bytes.as_u64().unwrap(), "{shard}");
    }
    let checkpoint = open_role(Role::Carrier, &tiny).unwrap();
    let taken = Inventory::take(&checkpoint, &|_| Ok(())).unwrap();
    let read = InventoryFile::read_as(folder.path().join("of 2 threads.json"), Role::Source).unwrap();
    // The role is no part of the identity.
    assert_eq!((read.inventory_sha256, &read.inventory), (taken.sha256().unwrap(), &taken));
    assert_eq!(data["summary"]["tensors"], taken.tensors.len());
    assert_eq!(data["summary"]["shards"], 3);
}

#[test]
fn the_table_counts_and_names_the_identity() {
    let mini = Mini::new();
    let out = mini.path().join("mini.json");
    let output = inventory("source", &mini.model()).arg("--out").arg(&out).assert().success();
    let text = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    let identity = InventoryFile::read(&out).unwrap().inventory_sha256;
    for part in ["source", "BF16", "F32", &identity, "written to "] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    let data = line(inventory("carrier", &mini.model()).arg("--out").arg(mini.path().join("c.json")));
    assert_eq!(
        (&data["summary"]["role"], &data["summary"]["inventory_sha256"]),
        (&json!("carrier"), &json!(identity))
    );
    assert_eq!(data.get("inventory"), None);
}

#[test]
fn a_changed_byte_is_named_with_both_hashes() {
    let mini = Mini::new();
    let sealed = InventoryFile::read(written(&mini, "before.json")).unwrap();
    let tensor = names::expert(2, 1, Projection::Up);
    let place = &sealed.inventory.tensors[&tensor];
    let shard = mini.model().join(&place.file);
    let mut bytes = std::fs::read(&shard).unwrap();
    bytes[place.start as usize] ^= 1;
    std::fs::write(&shard, bytes).unwrap();

    let now = InventoryFile::read(written(&mini, "after.json")).unwrap();
    let difference = now.inventory.first_difference(&sealed.inventory).unwrap();
    assert_eq!(difference.item, Item::Tensor { name: tensor.clone(), shard: place.file.clone() });
    assert_eq!(difference.aspect, Aspect::Sha256);
    refused(
        now.inventory.verify_against(&sealed, &mini.model(), Path::new("before.json")),
        &[
            "mini/model.safetensors",
            &tensor,
            "the source is not the one",
            "sha256",
            &place.sha256,
            &now.inventory.tensors[&tensor].sha256,
            "before.json",
        ],
    );
    sealed.inventory.verify_against(&sealed, &mini.model(), Path::new("before.json")).unwrap();

    // A file beside the weights.
    let before = now;
    std::fs::write(mini.model().join("added_tokens.json"), "{}").unwrap();
    let now = InventoryFile::read(written(&mini, "again.json")).unwrap();
    refused(
        now.inventory.verify_against(&before, &mini.model(), Path::new("after.json")),
        &["mini/added_tokens.json", "presence", "absent"],
    );
}

#[test]
fn a_quantized_source_is_refused_and_makes_a_carrier() {
    let mini = Mini::new();
    let out = mini.path().join("out.json");
    std::fs::write(mini.model().join("quantization_config.json"), "{}").unwrap();
    let said = stderr(inventory("source", &mini.model()).arg("--out").arg(&out));
    assert!(said.contains("quantization_config.json") && said.contains("quantized"), "{said}");
    assert!(!out.exists());
    let data = line(&mut inventory("carrier", &mini.model()));
    assert!(data["inventory"]["files"]["quantization_config.json"].is_string());
}

#[test]
fn a_source_whose_experts_are_not_bf16_of_their_shape_is_refused() {
    let tensor = names::expert(1, 0, Projection::Down);
    let mini = Mini::with(|tensors| {
        let found = tensors.iter_mut().find(|(name, ..)| *name == tensor).unwrap();
        found.1 = vec![64, 256];
    });
    let said = stderr(&mut inventory("source", &mini.model()));
    for part in [tensor.as_str(), "[64, 256]", "BF16 of shape [128, 128]"] {
        assert!(said.contains(part), "{part:?} is not in {said}");
    }
    inventory("carrier", &mini.model()).assert().success();
}

#[test]
fn outputs_within_the_checkpoint_and_folders_that_are_none_are_refused() {
    let mini = Mini::new();
    let inside = mini.model().join("config.json");
    let before = std::fs::read(&inside).unwrap();
    let said = stderr(inventory("source", &mini.model()).arg("--out").arg(&inside));
    assert!(said.contains("--out") && said.contains("lies in the checkpoint"), "{said}");
    assert_eq!(std::fs::read(&inside).unwrap(), before);
    for role in ["source", "carrier"] {
        let said = stderr(&mut inventory(role, &mini.path().join("nowhere")));
        assert!(said.contains("nowhere") && said.contains("no such directory"), "{said}");
    }
    inventory("neither", &mini.model()).assert().code(2);
}

#[test]
fn hostile_inventory_files_are_refused() {
    let mini = Mini::new();
    let path = written(&mini, "good.json");
    let good = std::fs::read(&path).unwrap();
    let value: Value = serde_json::from_slice(&good).unwrap();
    let changed = |change: fn(&mut Value)| {
        let mut value = value.clone();
        change(&mut value);
        let mut bytes = canonical(&value).unwrap();
        bytes.push(b'\n');
        bytes
    };
    assert_eq!(changed(|_| {}), good);
    let text = std::str::from_utf8(&good).unwrap();
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (Vec::new(), "no inventory"),
        (good[..good.len() / 2].to_vec(), "no inventory"),
        (good[..good.len() - 1].to_vec(), "not canonical"),
        ([&good[..], b" "].concat(), "not canonical"),
        (b"[]\n".to_vec(), "no object"),
        (b"\xff\n".to_vec(), "no inventory"),
        (text.replacen("\"role\"", " \"role\"", 1).into_bytes(), "not canonical"),
        (text.replacen("{", "{\"role\":\"source\",", 1).into_bytes(), "occurs twice"),
        (changed(|v| v["schema"] = json!("walk-inventory-v2")), "the schema is \"walk-inventory-v2\""),
        (changed(|v| v["schema"] = json!(1)), "the schema is 1"),
        (changed(|v| v["role"] = json!("both")), "unknown variant `both`"),
        (changed(|v| v["note"] = json!("x")), "unknown field `note`"),
        (changed(|v| v["inventory_sha256"] = json!("0".repeat(64))), "says its hash is 000"),
        (changed(|v| v["files"]["config.json"] = json!("0".repeat(64))), "says its hash is"),
        (
            changed(|v| drop(v["tensors"].as_object_mut().unwrap().remove("lm_head.weight"))),
            "says its hash is",
        ),
        (changed(|v| v["tensors"]["lm_head.weight"]["layout"] = json!(1)), "unknown field `layout`"),
        (changed(|v| v["tensors"]["lm_head.weight"] = json!([])), "no inventory"),
        (changed(|v| v["shards"]["model.safetensors"] = json!(1)), "the length of model.safetensors is 1"),
        (changed(|v| drop(v.as_object_mut().unwrap().remove("tensors"))), "missing field `tensors`"),
    ];
    for (bytes, wanted) in cases {
        std::fs::write(&path, bytes).unwrap();
        refused(InventoryFile::read(&path), &["good.json", wanted]);
    }
    std::fs::write(&path, &good).unwrap();
    refused(InventoryFile::read_as(&path, Role::Carrier), &["good.json", "`role`", "of a source", "carrier"]);
    refused(InventoryFile::read(mini.path().join("nowhere.json")), &["nowhere.json"]);
}
