//! `walk inspect` and `walk diff` through the built binary, in every form that checkpoints come in.

use std::path::Path;

use assert_cmd::Command;
use half::bf16;
use serde_json::{Value, json};
use walk::checkpoint::CheckpointDir;
use walk::checkpoint::packed::packed_modules;
use walk::store::safetensors_read::SafetensorsFile;
use walk::store::tensor_dtype::TensorDtype;

use crate::support::mini::{EXPERTS, LAYERS, Mini, WIDTH};
use crate::support::packed::{Stored, all_stored, assemble, index, linear, ranks, walked, write};
use crate::support::repository;

fn inspect(path: &Path) -> Command {
    let mut command = Command::cargo_bin("walk").unwrap();
    command.args(["inspect", "--quiet"]).arg(path);
    command
}

fn diff(a: &Path, b: &Path) -> Command {
    let mut command = Command::cargo_bin("walk").unwrap();
    command.args(["diff", "--quiet"]).arg(a).arg(b);
    command
}

/// What a command prints with this exit code.
#[track_caller]
fn text(command: &mut Command, code: i32) -> String {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{said}");
    String::from_utf8(output.stdout).unwrap()
}

/// The data of its one JSON line.
#[track_caller]
fn line(command: &mut Command, code: i32) -> Value {
    let text = text(command.arg("--json"), code);
    assert_eq!(text.lines().count(), 1, "{text}");
    serde_json::from_str::<Value>(&text).unwrap()["data"].take()
}

fn tensor(name: &str, dtype: TensorDtype, values: &[f32]) -> Stored {
    let bytes = values.iter().flat_map(|&x| match dtype {
        TensorDtype::BF16 => bf16::from_f32(x).to_le_bytes().to_vec(),
        _ => x.to_le_bytes().to_vec(),
    });
    Stored { name: name.into(), dtype, shape: vec![values.len()], bytes: bytes.collect() }
}

#[test]
fn a_plain_checkpoint_is_told_by_role() {
    let data = line(&mut inspect(&repository("models/tiny")), 0);
    let dir = CheckpointDir::open(repository("models/tiny")).unwrap();
    assert_eq!(data["tensors"], dir.names().count());
    assert_eq!((&data["files"], &data["total"]["packed_modules"]), (&json!(3), &json!(0)));
    let bytes: u64 = dir.names().map(|name| dir.tensor_bytes(name).unwrap().len() as u64).sum();
    assert_eq!(data["total"]["bytes"], bytes);
    let roles = data["roles"].as_object().unwrap();
    let count = |field: &str| roles.values().map(|role| role[field].as_u64().unwrap()).sum::<u64>();
    assert_eq!((count("bytes"), count("plain_tensors")), (bytes, dir.names().count() as u64));
    assert!(!roles.contains_key("other"), "every name of the model is known");
    assert_eq!(roles["routed_experts"]["plain_tensors"], 3 * 8 * 3);
    assert_eq!(data["expert_layers"].as_object().unwrap().keys().collect::<Vec<_>>(), ["2", "3", "4"]);
    assert_eq!(roles["router"]["dtypes"], json!({"BF16": 3, "F32": 3}));
    assert_eq!(data["provenance"]["model_type"], "glm_moe_dsa");
    let table = text(&mut inspect(&repository("models/tiny")), 0);
    for part in ["routed experts", "experts of layer", "2 to 4, each", "embeddings, head", "16.0000"] {
        assert!(table.contains(part), "{part:?} is not in:\n{table}");
    }
    assert!(table.lines().count() < 40, "{table}");
}

#[test]
fn a_walk_s_layers_and_what_is_assembled_of_them() {
    let (mini, work, _) = walked("w");
    let v2 = work.join("v2");
    let modules = EXPERTS * 3 * (LAYERS - 1);
    let shard = v2.join("r7-experts-layer-001.safetensors");
    for (path, modules) in [(&v2, modules), (&shard, modules / 2)] {
        let data = line(&mut inspect(path), 0);
        assert_eq!(data["total"]["packed_modules"], modules);
        assert_eq!(data["total"]["plain_tensors"], 0);
        assert_eq!(
            data["total"]["trellis_bits"],
            7 * (modules * WIDTH * WIDTH) as u64 / 2,
            "3.5 bits a weight"
        );
        let manifests = &data["provenance"]["manifests"]["r7-experts-layer-*.json"];
        assert_eq!(manifests["bits_agree"], modules);
        assert_eq!(manifests["bits_differ"], Value::Null);
        assert_eq!(
            manifests["says"]["marker"],
            json!({"CODEX_ROUND7": manifests["files"].as_array().unwrap().len()})
        );
        assert!(manifests["says"].as_object().unwrap().keys().any(|key| key.starts_with("provenance.")));
    }
    let assembled = mini.path().join("assembled");
    assemble(&mini, &v2, &assembled);
    let data = line(inspect(&assembled).arg("--tensors"), 0);
    assert_eq!(data["total"]["packed_modules"], modules);
    let stored: u64 = std::fs::read_dir(&assembled)
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_name().to_str().unwrap().ends_with(".safetensors"))
        .map(|entry| entry.metadata().unwrap().len())
        .sum();
    assert_eq!(data["file_bytes"], stored);
    // Every stored byte is counted once, shared vectors too.
    let payloads: u64 = CheckpointDir::open(&assembled)
        .map(|dir| dir.names().map(|name| dir.tensor_bytes(name).unwrap().len() as u64).sum())
        .unwrap();
    assert_eq!(data["total"]["bytes"], payloads);
    let listed = data["weights"].as_array().unwrap();
    assert_eq!(listed.iter().map(|weight| weight["bytes"].as_u64().unwrap()).sum::<u64>(), payloads);
    let module = "model.layers.2.mlp.experts.1.down_proj";
    let weight = listed.iter().find(|weight| weight["name"] == module).unwrap();
    assert_eq!((&weight["stored"], &weight["codebook"]), (&json!("r7 v2"), &json!("mcg")));
    assert_eq!(weight["shape"], json!([WIDTH, WIDTH]));
    assert_eq!(weight["file"], "r7-experts-layer-002.safetensors");
    let quantization = &data["provenance"]["quantization"];
    assert_eq!(quantization["config.json quantization_config"], quantization["quantization_config.json"]);
    assert_eq!(data["provenance"]["metadata"]["r7_layer"], json!({"1": 1, "2": 1}));

    // A manifest that says something else, and one that says nothing, are told; neither stops anything.
    let manifest = assembled.join("r7-experts-layer-001.json");
    let said = std::fs::read_to_string(&manifest).unwrap();
    let bits = said.find("\"bit_map\":{").unwrap();
    let digit = bits + said[bits..].find("gate_proj\":").unwrap() + "gate_proj\":".len();
    let other = if &said[digit..=digit] == "3" { "8" } else { "3" };
    std::fs::write(&manifest, format!("{}{other}{}", &said[..digit], &said[digit + 1..])).unwrap();
    std::fs::write(assembled.join("r7-experts-layer-002.json"), "[1").unwrap();
    std::fs::write(assembled.join("CARRIER_MANIFEST.json"), r#"{"schema": "x\u001b[2J", "a": {"b": 1}}"#)
        .unwrap();
    let table = text(&mut inspect(&assembled), 0);
    for part in [
        "bits differ: r7-experts-layer-001.json: model.layers.1.mlp.experts.0.gate_proj is said to have",
        "unreadable: r7-experts-layer-002.json: no JSON",
        "schema: x\\u{1b}[2J",
        "MANIFEST.json\n  schema: r7-complete-v2-checkpoint-v1",
    ] {
        assert!(table.contains(part), "{part:?} is not in:\n{table}");
    }

    // Without its manifest the order of layer 2's channels is not known.
    let as_stored = line(&mut diff(&mini.model(), &assembled), 1);
    assert_eq!(as_stored["reordered"], 0);
    assert!(as_stored["roles"]["routed_experts"]["relative_error"].as_f64().unwrap() > 0.3);
    for layer in 1..LAYERS {
        let file = format!("r7-experts-layer-{layer:03}.json");
        std::fs::copy(v2.join(&file), assembled.join(file)).unwrap();
    }

    // Against the model it came from: only the experts differ, by what quantization did.
    let same = line(&mut diff(&assembled, &assembled), 0);
    assert_eq!((&same["differences"], &same["total"]["relative_error"]), (&json!([]), &json!(0.0)));
    let data = line(&mut diff(&mini.model(), &assembled), 1);
    assert_eq!(data["total"]["different"], modules);
    assert_eq!(data["roles"]["routed_experts"]["different"], modules);
    assert_eq!(data["roles"]["attention"]["different"], 0);
    let error = data["roles"]["routed_experts"]["relative_error"].as_f64().unwrap();
    assert!(error > 0.01 && error < 0.3, "in the source's order of channels: {error}");
    assert_eq!(data["reordered"], modules / 2, "those of layer 2");
    let differences = data["differences"].as_array().unwrap();
    assert!(differences.is_sorted_by_key(|difference| difference["name"].as_str().unwrap().to_owned()));
    assert_eq!(differences[0]["a"], "BF16 [128, 128]");
    assert!(differences[0]["b"].as_str().unwrap().starts_with("r7 v2 mcg "), "{}", differences[0]);
    for threads in ["1", "2"] {
        let again = line(diff(&mini.model(), &assembled).args(["--threads", threads]), 1);
        assert_eq!(again, data);
    }
    let few = text(diff(&mini.model(), &assembled).args(["--limit", "2"]), 1);
    assert!(few.contains(&format!("and {} more: --limit N shows them\n", modules - 2)), "{few}");
    let few = line(diff(&mini.model(), &assembled).args(["--limit", "2"]), 1);
    assert_eq!((few["differences"].as_array().unwrap().len(), &few["total"]), (2, &data["total"]));
}

#[test]
fn codebooks_layouts_and_ranks_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("d");
    std::fs::create_dir(&dir).unwrap();
    let attention = |layer: usize, module: &str| format!("model.layers.{layer}.self_attn.{module}");
    let mut tensors = linear("mcg.k6", &attention(0, "q_a_proj"));
    tensors.extend(linear("mcg.k6", &attention(1, "q_a_proj")));
    tensors.extend(linear("mul1.k4", &attention(1, "o_proj")));
    tensors.extend(linear("3inst.k4", "model.layers.0.mlp.down_proj"));
    tensors.extend(ranks("mcg.k3", "model.layers.1.mlp.experts.0.up_proj", false));
    tensors.push(tensor("model.layers.2.eh_proj.weight", TensorDtype::BF16, &[1.0]));
    tensors.push(tensor("model.layers.2.mlp.experts.0.up_proj.weight", TensorDtype::BF16, &[1.0, 2.0]));
    write(&dir.join("a.safetensors"), &tensors);
    index(&dir);
    let data = line(&mut inspect(&dir), 0);
    let roles = &data["roles"];
    assert_eq!(
        roles["attention"]["packed"],
        json!([
            {"layout": "exl3", "codebook": "mcg", "bits": 6, "modules": 2},
            {"layout": "exl3", "codebook": "mul1", "bits": 4, "modules": 1}
        ])
    );
    assert_eq!(roles["attention"]["layers"], json!([0, 1]));
    assert_eq!(roles["attention"]["trellis_bits"], (6 + 6 + 4) * 128 * 128);
    // 128 x 128 at 6 bits, two vectors of 128 halves, one marker; twice, and at 4 bits.
    assert_eq!(roles["attention"]["bytes"], 128 * 128 * 16 / 8 + 3 * (2 * 2 * 128 + 4));
    assert_eq!(roles["dense_mlp"]["packed"][0]["codebook"], "3inst");
    assert_eq!(roles["routed_experts"]["packed"][0]["layout"], "tp 3");
    assert_eq!(roles["routed_experts"]["weights"], 256 * 384);
    assert_eq!((&roles["mtp"]["plain_tensors"], &roles["mtp"]["weights"]), (&json!(2), &json!(3)));
    let table = text(inspect(&dir).arg("--tensors"), 0);
    for part in
        ["exl3 mcg 6-bit 2; exl3 mul1 4-bit 1", "tp 3 mcg 3-bit 1", "MTP block", "[384, 256]", "BF16 2"]
    {
        assert!(table.contains(part), "{part:?} is not in:\n{table}");
    }

    std::fs::write(dir.join("a.safetensors"), "x").unwrap();
    text(&mut inspect(&dir), 2);
    std::fs::remove_file(dir.join("model.safetensors.index.json")).unwrap();
    std::fs::remove_file(dir.join("a.safetensors")).unwrap();
    let output = inspect(&dir).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && said.contains("holds no weights"), "{said}");
    // A folder of shards has each name once.
    for file in ["a.safetensors", "b.safetensors"] {
        write(&dir.join(file), &[tensor("w", TensorDtype::F32, &[1.0])]);
    }
    let output = inspect(&dir).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.code() == Some(2) && said.contains("tensor w: the tensor is also in a.safetensors"),
        "{said}"
    );
}

#[test]
fn differences_are_named_with_their_kind_and_size() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(format!("{name}.safetensors"));
    let base = || {
        let mut tensors = linear("mcg.k3", "a.up_proj");
        tensors.push(tensor("f", TensorDtype::F32, &[3.0, 4.0]));
        tensors.push(tensor("g", TensorDtype::F32, &[1.0, 2.0]));
        tensors.push(Stored { name: "i".into(), dtype: TensorDtype::I16, shape: vec![1], bytes: vec![1, 0] });
        tensors
    };
    write(&at("a"), &base());
    let against = |name: &str, tensors: Vec<Stored>, flags: &[&str], code: i32| {
        write(&at(name), &tensors);
        line(diff(&at("a"), &at(name)).args(flags), code)
    };
    let change = |name: &str, with: Stored| {
        let mut tensors = base();
        tensors.retain(|tensor| tensor.name != name);
        tensors.push(with);
        tensors
    };
    let only = |data: &Value| {
        let differences = data["differences"].as_array().unwrap();
        assert_eq!(differences.len(), 1, "{data}");
        differences[0].clone()
    };

    // ||(0, 1)|| / ||(3, 4)||.
    let found = only(&against("b", change("f", tensor("f", TensorDtype::F32, &[3.0, 5.0])), &[], 1));
    assert_eq!((&found["relative_error"], &found["max_error"]), (&json!(0.2), &json!(1.0)));
    assert_eq!(found["values_differing"], 1);
    let found =
        only(&against("b", change("f", tensor("f", TensorDtype::F32, &[3.0, f32::NAN])), &["--values"], 1));
    assert_eq!((&found["relative_error"], &found["max_error"]), (&Value::Null, &Value::Null));
    // Equal values of another type: different, unless only values count.
    let narrow = || change("f", tensor("f", TensorDtype::BF16, &[3.0, 4.0]));
    let found = only(&against("b", narrow(), &[], 1));
    assert_eq!((&found["b"], &found["values_differing"]), (&json!("BF16 [2]"), &json!(0)));
    assert_eq!(against("b", narrow(), &["--values"], 0)["total"]["equal"], 4);
    // Another shape or bytes that are no floats have no error.
    let found = only(&against("b", change("f", tensor("f", TensorDtype::F32, &[3.0])), &["--values"], 1));
    assert_eq!((&found["b"], &found["relative_error"]), (&json!("F32 [1]"), &Value::Null));
    let integer = Stored { name: "i".into(), dtype: TensorDtype::I16, shape: vec![1], bytes: vec![2, 0] };
    let found = only(&against("b", change("i", integer), &[], 1));
    assert_eq!((&found["a"], &found["values_differing"]), (&json!("I16 [1]"), &Value::Null));
    // Only in one.
    let data = against("b", change("g", tensor("h", TensorDtype::F32, &[1.0])), &[], 1);
    assert_eq!((&data["total"]["only_a"], &data["total"]["only_b"]), (&json!(1), &json!(1)));
    assert_eq!((&data["differences"][0]["b"], &data["differences"][1]["a"]), (&Value::Null, &Value::Null));

    // Packed: a part that differs is named and the decoded weights compared.
    let mut tensors = base();
    for tensor in tensors.iter_mut().filter(|tensor| tensor.name == "a.up_proj.svh") {
        tensor.bytes[1] ^= 0x80;
    }
    let found = only(&against("b", tensors, &[], 1));
    assert_eq!((&found["name"], &found["parts"]), (&json!("a.up_proj.weight"), &json!(["svh"])));
    assert!(found["values_differing"].as_u64().unwrap() <= 256, "one of 384 outputs");
    assert!(found["relative_error"].as_f64().unwrap() > 0.0);
    // Ranks cut from it decode to the same.
    let cut = || {
        let mut tensors = base();
        tensors.retain(|tensor| !tensor.name.starts_with("a."));
        tensors.extend(ranks("mcg.k3", "a.up_proj", false));
        tensors
    };
    let found = only(&against("b", cut(), &[], 1));
    assert_eq!((&found["parts"], &found["values_differing"]), (&json!(["ranks"]), &json!(0)));
    assert_eq!(against("b", cut(), &["--values"], 0)["total"]["different"], 0);
    // And so does its plain form, exactly in f16.
    for (dtype, code) in [("f16", 0), ("bf16", 1)] {
        let mut command = Command::cargo_bin("walk").unwrap();
        command.args(["dequantize", "--quiet", "--dtype", dtype]).arg(at("a")).arg(at(dtype));
        command.assert().success();
        let data = line(diff(&at("a"), &at(dtype)).arg("--values"), code);
        assert!(data["total"]["relative_error"].as_f64().unwrap() < 0.5f64.powi(8), "{data}");
    }
}

#[test]
fn a_walk_s_folder_opens_as_what_it_is() {
    let mini = Mini::new();
    let folder = mini.path().join("shards");
    std::fs::create_dir(&folder).unwrap();
    let stored = all_stored(&mini.model().join("model.safetensors"));
    let (first, second) = stored.split_at(stored.len() / 2);
    write(&folder.join("x.safetensors"), first);
    write(&folder.join("y.safetensors"), second);
    let opened = CheckpointDir::open_any(&folder).unwrap();
    assert!(
        opened.names().eq(SafetensorsFile::open(mini.model().join("model.safetensors")).unwrap().names())
    );
    assert!(packed_modules(&opened).unwrap().is_empty());
    assert_eq!(line(&mut diff(&mini.model(), &folder), 0)["total"]["different"], 0);
}
