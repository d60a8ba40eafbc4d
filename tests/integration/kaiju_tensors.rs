//! Checkpoints with KAIJU1 linears beside EXL3 and plain ones: what they decode to, what is told of them, what is refused.

use std::path::Path;

use assert_cmd::Command;
use half::{bf16, f16};
use serde_json::{Value, json};
use walk::checkpoint::{CheckpointDir, Reconstruction};
use walk::store::safetensors_read::SafetensorsFile;
use walk::store::tensor_dtype::TensorDtype;

use crate::support::packed::{Stored, kaiju, kaiju_dense, linear, write};

const GOLDEN: [&str; 5] = ["p56.2x72", "p56.4x60", "p64.3x23", "p64.4x60", "p64.5x129"];

fn walk(command: &str, paths: &[&Path], flags: &[&str]) -> Command {
    let mut walk = Command::cargo_bin("walk").unwrap();
    walk.args([command, "--quiet"]).args(paths).args(flags);
    walk
}

/// The data of the one JSON line a command prints with this exit code.
#[track_caller]
fn line(command: &mut Command, code: i32) -> Value {
    let output = command.arg("--json").output().unwrap();
    assert_eq!(output.status.code(), Some(code), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice::<Value>(&output.stdout).unwrap()["data"].take()
}

#[track_caller]
fn refused(command: &mut Command, parts: &[&str]) {
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && said.lines().count() == 1, "{said}");
    for part in parts {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
}

/// Golden KAIJU1 linears, two EXL3 ones and a plain tensor.
fn mixed() -> Vec<Stored> {
    let mut tensors: Vec<Stored> = GOLDEN.iter().map(|name| kaiju(name, &format!("k.{name}"))).collect();
    tensors.extend(linear("mcg.k3", "model.layers.0.mlp.experts.0.up_proj"));
    tensors.extend(linear("mul1.k4", "model.layers.0.mlp.down_proj"));
    tensors.push(kaiju("p64.5x129", "model.layers.0.mlp.experts.0.gate_proj"));
    let bytes = vec![0, 0x3f, 0x80, 0xbf];
    tensors.push(Stored { name: "norm.weight".into(), dtype: TensorDtype::BF16, shape: vec![2], bytes });
    tensors
}

fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes))
}

#[test]
fn golden_payloads_become_their_dense_weights_in_every_type() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(format!("{name}.safetensors"));
    write(&at("packed"), &mixed());
    for dtype in ["f32", "f16", "bf16"] {
        let report = line(&mut walk("dequantize", &[&at("packed"), &at(dtype)], &["--dtype", dtype]), 0);
        assert_eq!((&report["tensors"], &report["modules_decoded"]), (&json!(9), &json!(8)));
        let plain = SafetensorsFile::open(at(dtype)).unwrap();
        let mut largest = 0.0f64;
        for name in GOLDEN {
            let dense = kaiju_dense(name);
            let weight = format!("k.{name}.weight");
            assert_eq!(plain.info(&weight).unwrap().shape, dense.shape);
            let wanted: Vec<u8> = match dtype {
                "f32" => dense.bytes.clone(),
                "f16" => floats(&dense.bytes).flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
                _ => floats(&dense.bytes).flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
            };
            assert!(plain.bytes(&weight).unwrap() == wanted, "{name} {dtype}");
            let rounded = |x: f32| match dtype {
                "f32" => x,
                "f16" => f16::from_f32(x).to_f32(),
                _ => bf16::from_f32(x).to_f32(),
            };
            largest = floats(&dense.bytes).map(|x| f64::from((x - rounded(x)).abs())).fold(largest, f64::max);
        }
        let said = report["rounding"]["max_error"].as_f64().unwrap();
        assert!(said >= largest && (said > 0.0) == (dtype != "f32"), "{dtype}: {said} and {largest}");
    }
    // Packed and plain are the same weights; only F32 has all values.
    for (dtype, code) in [("f32", 0), ("f16", 1), ("bf16", 1)] {
        let data = line(&mut walk("diff", &[&at("packed"), &at(dtype)], &["--values"]), code);
        assert!(data["total"]["relative_error"].as_f64().unwrap() < 0.5f64.powi(8), "{data}");
    }
}

#[test]
fn rates_are_of_the_stored_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mixed.safetensors");
    write(&path, &mixed());
    let data = line(&mut walk("inspect", &[&path], &["--tensors"]), 0);
    let total = &data["total"];
    let stored: usize = mixed().iter().map(|tensor| tensor.bytes.len()).sum();
    assert_eq!((&total["packed_modules"], &total["plain_tensors"]), (&json!(8), &json!(1)));
    assert_eq!(total["bytes"], stored);
    let weights = 2 * 72 + 4 * 60 + 3 * 23 + 4 * 60 + 2 * 5 * 129;
    // mcg.k3 is 256 x 384, mul1.k4 128 x 128.
    let trellis = 256 * 384 + 128 * 128;
    assert_eq!(total["packed_weights"], weights + trellis);
    assert_eq!(
        (&total["trellis_weights"], &total["trellis_bits"]),
        (&json!(trellis), &json!(3 * 256 * 384 + 4 * 128 * 128))
    );
    let kinds = json!([
        {"layout": "exl3", "codebook": "mcg", "bits": 3, "modules": 1},
        {"layout": "exl3", "codebook": "mul1", "bits": 4, "modules": 1},
        {"layout": "kaiju1", "codebook": "p56", "modules": 2},
        {"layout": "kaiju1", "codebook": "p64", "modules": 4},
    ]);
    assert_eq!(total["packed"], kinds);
    let listed = data["weights"].as_array().unwrap();
    let module = listed.iter().find(|weight| weight["name"] == "k.p64.5x129").unwrap();
    assert_eq!((&module["shape"], &module["bytes"]), (&json!([5, 129]), &json!(356)));
    assert_eq!((&module["stored"], &module["bits"]), (&json!("kaiju1"), &Value::Null));
    let table = walk("inspect", &[&path], &["--tensors"]).assert().success().get_output().clone();
    let table = String::from_utf8(table.stdout).unwrap();
    // 356 bytes for 645 weights.
    for part in ["exl3 mcg 3-bit 1; kaiju1 p64 1", "kaiju1 p56 2; kaiju1 p64 3", "4.4155"] {
        assert!(table.contains(part), "{part:?} is not in:\n{table}");
    }
}

#[test]
fn differences_of_payloads_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(format!("{name}.safetensors"));
    write(&at("a"), &[kaiju("p64.4x60", "m")]);
    assert_eq!(line(&mut walk("diff", &[&at("a"), &at("a")], &[]), 0)["total"]["equal"], 1);
    let mut other = kaiju("p64.4x60", "m");
    // The last block scale of the last row.
    *other.bytes.last_mut().unwrap() ^= 1;
    write(&at("b"), &[other]);
    let found = line(&mut walk("diff", &[&at("a"), &at("b")], &[]), 1)["differences"][0].take();
    assert_eq!((&found["parts"], &found["a"]), (&json!(["kaiju1"]), &json!("kaiju1 p64 [4, 60]")));
    assert!(found["values_differing"].as_u64().unwrap() <= 24, "{found}");
    write(&at("c"), &[kaiju("p56.4x60", "m")]);
    let found = line(&mut walk("diff", &[&at("a"), &at("c")], &[]), 1)["differences"][0].take();
    assert_eq!((&found["b"], &found["parts"]), (&json!("kaiju1 p56 [4, 60]"), &json!(["kaiju1"])));
    write(&at("d"), &linear("mcg.k3", "m"));
    let found = line(&mut walk("diff", &[&at("a"), &at("d")], &["--values"]), 1)["differences"][0].take();
    assert_eq!((&found["b"], &found["parts"]), (&json!("exl3 mcg 3-bit [384, 256]"), &Value::Null));
}

#[test]
fn what_is_no_kaiju_linear_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let good = || kaiju("p64.4x60", "m");
    let plain =
        Stored { name: "m.weight".into(), dtype: TensorDtype::F32, shape: vec![1], bytes: vec![0; 4] };
    let cut = |count: usize| {
        let mut tensor = good();
        tensor.bytes.truncate(count);
        tensor.shape = vec![tensor.bytes.len()];
        tensor
    };
    let with = |change: fn(&mut Stored)| {
        let mut tensor = good();
        change(&mut tensor);
        tensor
    };
    let both = || -> Vec<Stored> { linear("mcg.k3", "m").into_iter().chain([good()]).collect() };
    let cases: [(Vec<Stored>, &str); 10] = [
        (vec![good(), plain], "the module also has m.weight"),
        (both(), "the module also has m.trellis"),
        (vec![cut(227)], "the payload has 227 bytes; wanted: 228, by its header"),
        (vec![cut(31)], "31 bytes"),
        (vec![cut(0)], "0 bytes"),
        (vec![with(|tensor| tensor.dtype = TensorDtype::I8)], "it is I8 of shape [228]"),
        (vec![with(|tensor| tensor.shape = vec![4, 57])], "it is U8 of shape [4, 57]"),
        (vec![with(|tensor| tensor.bytes[0] = b'k')], "magic"),
        (vec![with(|tensor| tensor.name = "m.rank0.kaiju1".into())], "a rank of a KAIJU1 linear"),
        (vec![with(|tensor| tensor.name = "kaiju1".into())], "the module has no name"),
    ];
    for (tensors, what) in cases {
        write(&path, &tensors);
        let name = tensors.iter().find(|tensor| tensor.name.ends_with("kaiju1")).unwrap().name.clone();
        refused(&mut walk("inspect", &[&path], &[]), &["x.safetensors", &format!("tensor {name}"), what]);
    }
    // What only the whole payload shows is refused where it is read, and leaves nothing behind.
    let damaged = with(|tensor| tensor.bytes[32..36].copy_from_slice(&60u32.to_le_bytes()));
    write(&path, &[damaged]);
    let out = folder.path().join("out.safetensors");
    walk("inspect", &[&path], &[]).assert().success();
    refused(&mut walk("dequantize", &[&path, &out], &[]), &["tensor m.kaiju1", "HiIndex[0]", "below 60"]);
    assert!(!out.exists());
}

#[test]
fn a_value_beyond_the_type_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    // No bulk: every column is i8 times a scale of f16. The first becomes 127 times the largest one.
    let mut tensor = kaiju("p64.3x23", "m");
    let band = 32 + 4 * 23;
    tensor.bytes[band..band + 3].copy_from_slice(&[0xff, 0x7b, 127]);
    write(&at("x"), &[tensor]);
    let run = |dtype: &str| walk("dequantize", &[&at("x"), &at(dtype)], &["--dtype", dtype]);
    run("f32").assert().success();
    run("bf16").assert().success();
    refused(&mut run("f16"), &["tensor m.weight", "8319008", "finite weights that F16 holds"]);
    let weights = Reconstruction::new(CheckpointDir::open_any(at("x")).unwrap().into()).unwrap();
    assert_eq!(weights.shape("m.weight").unwrap(), [3, 23]);
    assert_eq!(weights.weights(), ["m.weight"]);
}
