//! Refusals of checkpoint directories, and the tiny model as the good case.

use std::collections::BTreeMap;

use candle_core::{DType, Device};
use half::{bf16, f16};
use walk::checkpoint::{CheckpointDir, WeightSource};
use walk::store::safetensors_write::{TensorData, write_safetensors};

use super::support::{refused, root, write_index, write_ones};

#[test]
fn the_tiny_model_opens_with_all_names_of_its_index() {
    let dir = root().join("models/tiny");
    let checkpoint = CheckpointDir::open(&dir).unwrap();
    let index: serde_json::Value =
        serde_json::from_slice(&std::fs::read(dir.join("model.safetensors.index.json")).unwrap()).unwrap();
    let indexed: Vec<_> = index["weight_map"].as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), indexed);
    assert_eq!(checkpoint.shard_files().count(), 3);
    let mut bytes = 0;
    for name in checkpoint.names() {
        let place = checkpoint.info(name).unwrap();
        assert_eq!(index["weight_map"][name], place.file);
        assert_eq!(place.info.end - place.info.start, checkpoint.tensor_bytes(name).unwrap().len() as u64);
        bytes += checkpoint.tensor_bytes(name).unwrap().len() as u64;
        checkpoint.load(name, &place.info.shape, DType::F32, &Device::Cpu).unwrap();
    }
    assert_eq!(index["metadata"]["total_size"], bytes);
}

#[test]
fn a_single_file_opens_beside_other_files() {
    let checkpoint = CheckpointDir::open(root().join("tests/golden/forward/base")).unwrap();
    assert!(checkpoint.contains("model.norm.weight"));
    assert!(!checkpoint.contains("logits"), "expected_f32.safetensors is no part of the model");
    assert_eq!(checkpoint.payload_sha256("model.norm.weight").unwrap().len(), 64);
}

#[test]
fn no_directory_and_no_weights() {
    let dir = tempfile::tempdir().unwrap();
    refused(CheckpointDir::open(dir.path().join("nowhere")), &["nowhere", "no such directory"]);
    refused(CheckpointDir::open(dir.path()), &["holds no weights", "model.safetensors.index.json"]);
}

#[test]
fn a_missing_shard() {
    let dir = tempfile::tempdir().unwrap();
    write_ones(&dir.path().join("model-1.safetensors"), &[("a", &[2])]);
    write_index(dir.path(), &[("a", "model-1.safetensors"), ("b", "model-2.safetensors")]);
    refused(CheckpointDir::open(dir.path()), &["model-2.safetensors", "tensor b", "missing"]);
}

#[test]
fn an_index_entry_without_tensor() {
    let dir = tempfile::tempdir().unwrap();
    write_ones(&dir.path().join("model-1.safetensors"), &[("a", &[2])]);
    write_index(dir.path(), &[("a", "model-1.safetensors"), ("b", "model-1.safetensors")]);
    refused(
        CheckpointDir::open(dir.path()),
        &["index.json", "tensor b", "model-1.safetensors, which does not hold it"],
    );
}

#[test]
fn a_tensor_without_index_entry() {
    let dir = tempfile::tempdir().unwrap();
    write_ones(&dir.path().join("model-1.safetensors"), &[("a", &[2]), ("b", &[1])]);
    write_index(dir.path(), &[("a", "model-1.safetensors")]);
    refused(CheckpointDir::open(dir.path()), &["model-1.safetensors", "tensor b", "no entry"]);
}

#[test]
fn a_tensor_in_another_shard_than_the_index_says() {
    let dir = tempfile::tempdir().unwrap();
    write_ones(&dir.path().join("model-1.safetensors"), &[("a", &[2]), ("b", &[1])]);
    write_ones(&dir.path().join("model-2.safetensors"), &[("c", &[2])]);
    write_index(
        dir.path(),
        &[("a", "model-1.safetensors"), ("b", "model-2.safetensors"), ("c", "model-2.safetensors")],
    );
    refused(CheckpointDir::open(dir.path()), &["model-1.safetensors", "tensor b", "places it in model-2"]);
}

#[test]
fn a_tensor_in_two_shards() {
    let dir = tempfile::tempdir().unwrap();
    write_ones(&dir.path().join("model-1.safetensors"), &[("a", &[2])]);
    write_ones(&dir.path().join("model-2.safetensors"), &[("a", &[2]), ("c", &[2])]);
    write_index(dir.path(), &[("a", "model-1.safetensors"), ("c", "model-2.safetensors")]);
    refused(
        CheckpointDir::open(dir.path()),
        &["model-2.safetensors", "tensor a", "also in model-1.safetensors"],
    );
}

#[test]
fn a_shard_the_index_does_not_know() {
    let dir = tempfile::tempdir().unwrap();
    write_ones(&dir.path().join("model-1.safetensors"), &[("a", &[2])]);
    write_ones(&dir.path().join("model-2.safetensors"), &[("c", &[2])]);
    write_index(dir.path(), &[("a", "model-1.safetensors")]);
    refused(CheckpointDir::open(dir.path()), &["model-2.safetensors", "places no tensor"]);
}

#[test]
fn an_index_that_is_wrong_json_or_names_a_tensor_twice() {
    let dir = tempfile::tempdir().unwrap();
    let index = dir.path().join("model.safetensors.index.json");
    std::fs::write(&index, "{\"weight_map\": {").unwrap();
    refused(CheckpointDir::open(dir.path()), &["index.json", "line 1"]);
    std::fs::write(&index, "{}").unwrap();
    refused(CheckpointDir::open(dir.path()), &["index.json", "weight_map"]);
    std::fs::write(&index, "{\"weight_map\": {\"a\": \"x.safetensors\",\n\"a\": \"y.safetensors\"}}")
        .unwrap();
    refused(CheckpointDir::open(dir.path()), &["index.json", "\"a\" occurs twice", "line 2"]);
}

#[test]
fn an_index_of_another_form() {
    let dir = tempfile::tempdir().unwrap();
    let index = dir.path().join("model.safetensors.index.json");
    for text in ["[]", "[{}]", "null", "5", r#"[{"a": "model.safetensors"}]"#] {
        std::fs::write(&index, text).unwrap();
        refused(CheckpointDir::open(dir.path()), &["index.json", "expected an object", "line 1"]);
    }
    for map in ["[]", "null", "5", "\"model.safetensors\"", r#"[["a", "model.safetensors"]]"#] {
        std::fs::write(&index, format!(r#"{{"metadata": {{}}, "weight_map": {map}}}"#)).unwrap();
        refused(CheckpointDir::open(dir.path()), &["index.json", "expected an object"]);
    }
    for shard in ["5", "null", "[]", r#"{"file": "model.safetensors"}"#] {
        std::fs::write(&index, format!(r#"{{"weight_map": {{"a": {shard}}}}}"#)).unwrap();
        refused(CheckpointDir::open(dir.path()), &["index.json", "expected a string"]);
    }
    // An empty index beside a shard is a stale one.
    write_ones(&dir.path().join("model-1.safetensors"), &[("a", &[2])]);
    std::fs::write(&index, r#"{"weight_map": {}}"#).unwrap();
    refused(CheckpointDir::open(dir.path()), &["model-1.safetensors", "places no tensor"]);
    std::fs::write(&index, b"{\"weight_map\": {\"\xff\": \"m.safetensors\"}}").unwrap();
    refused(CheckpointDir::open(dir.path()), &["index.json", "line 1"]);
}

#[test]
fn every_prefix_of_an_index_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    write_ones(&dir.path().join("model-1.safetensors"), &[("a", &[2])]);
    write_index(dir.path(), &[("a", "model-1.safetensors")]);
    let index = dir.path().join("model.safetensors.index.json");
    let whole = std::fs::read(&index).unwrap();
    for length in 0..whole.len() {
        std::fs::write(&index, &whole[..length]).unwrap();
        refused(CheckpointDir::open(dir.path()), &["index.json", "line 1"]);
    }
}

/// What a hub cache looks like: links into a folder of blobs, outside the checkpoint's own folder.
#[cfg(unix)]
#[test]
fn shards_may_be_links_but_not_dead_ones() {
    use std::os::unix::fs::symlink;
    let dir = tempfile::tempdir().unwrap();
    let (blobs, snapshot) = (dir.path().join("blobs"), dir.path().join("snapshot"));
    std::fs::create_dir(&blobs).unwrap();
    std::fs::create_dir(&snapshot).unwrap();
    write_ones(&blobs.join("0123"), &[("a", &[2])]);
    symlink("../blobs/0123", snapshot.join("model-1.safetensors")).unwrap();
    write_index(&snapshot, &[("a", "model-1.safetensors")]);
    assert!(CheckpointDir::open(&snapshot).unwrap().contains("a"));
    std::fs::remove_file(blobs.join("0123")).unwrap();
    refused(CheckpointDir::open(&snapshot), &["model-1.safetensors", "tensor a", "the shard is missing"]);
    std::fs::create_dir(blobs.join("0123")).unwrap();
    refused(CheckpointDir::open(&snapshot), &["model-1.safetensors", "not a regular file"]);
    std::fs::remove_dir(blobs.join("0123")).unwrap();
    symlink("model-1.safetensors", blobs.join("0123")).unwrap();
    symlink("0123", blobs.join("model-1.safetensors")).unwrap();
    refused(CheckpointDir::open(&snapshot), &["model-1.safetensors"]);
}

#[test]
fn a_shard_that_is_cut_while_the_checkpoint_is_open() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    write_ones(&path, &[("a", &[4, 2])]);
    let checkpoint = CheckpointDir::open(dir.path()).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(20).unwrap();
    let parts = ["model.safetensors", "shortened while it was open"];
    refused(checkpoint.load("a", &[4, 2], DType::F32, &Device::Cpu), &parts);
    refused(checkpoint.tensor_bytes("a"), &parts);
    refused(walk::checkpoint::inventory::Inventory::take(&checkpoint, &|_| Ok(())), &parts);
}

#[test]
fn an_index_that_points_out_of_the_directory() {
    let dir = tempfile::tempdir().unwrap();
    for shard in [
        "../model.safetensors",
        "/model.safetensors",
        "..",
        "",
        "model.bin",
        "sub/model.safetensors",
        "./model.safetensors",
        "sub\\model.safetensors",
        "C:model.safetensors",
        "m\0.safetensors",
    ] {
        write_index(dir.path(), &[("a", shard)]);
        refused(CheckpointDir::open(dir.path()), &["index.json", &format!("{shard:?}"), "plain file names"]);
    }
}

fn single(tensors: &[TensorData<'_>]) -> (tempfile::TempDir, CheckpointDir) {
    let dir = tempfile::tempdir().unwrap();
    write_safetensors(dir.path().join("model.safetensors"), &BTreeMap::new(), tensors).unwrap();
    let checkpoint = CheckpointDir::open(dir.path()).unwrap();
    (dir, checkpoint)
}

#[test]
fn every_upcast_is_exact() {
    let values: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).filter(|v| v.is_finite()).collect();
    let halves: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).filter(|v| v.is_finite()).collect();
    let (_dir, checkpoint) = single(&[
        TensorData::bf16("b", &[values.len()], &values),
        TensorData::f16("h", &[halves.len()], &halves),
    ]);
    let load = |name, n, dtype| checkpoint.load(name, &[n], dtype, &Device::Cpu).unwrap();
    let got = load("b", values.len(), DType::F32).to_vec1::<f32>().unwrap();
    assert!(got.iter().zip(&values).all(|(g, v)| g.to_bits() == v.to_f32().to_bits()));
    let got = load("b", values.len(), DType::BF16).to_vec1::<bf16>().unwrap();
    assert!(got.iter().zip(&values).all(|(g, v)| g.to_bits() == v.to_bits()));
    let got = load("h", halves.len(), DType::F32).to_vec1::<f32>().unwrap();
    assert!(got.iter().zip(&halves).all(|(g, v)| g.to_bits() == v.to_f32().to_bits()));
    let got = load("h", halves.len(), DType::F16).to_vec1::<f16>().unwrap();
    assert!(got.iter().zip(&halves).all(|(g, v)| g.to_bits() == v.to_bits()));
}

#[test]
fn a_missing_tensor_a_wrong_shape_and_a_wrong_dtype() {
    let (_dir, checkpoint) =
        single(&[TensorData::f32("w", &[2, 3], &[0.5; 6]), TensorData::i32("ids", &[2], &[1, 2])]);
    let load = |name, shape: &[usize]| checkpoint.load(name, shape, DType::F32, &Device::Cpu);
    refused(load("v", &[2, 3]), &["tensor v", "no such tensor"]);
    refused(load("w", &[3, 2]), &["model.safetensors", "tensor w", "[2, 3]", "[3, 2]"]);
    refused(load("ids", &[2]), &["model.safetensors", "tensor ids", "I32"]);
}

#[test]
fn values_that_are_not_finite_are_named_by_row_and_index() {
    for (bad, text) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
        let mut values = [1.0_f32; 12];
        values[7] = bad;
        let brain: Vec<bf16> = values.iter().map(|&v| bf16::from_f32(v)).collect();
        let (_dir, checkpoint) =
            single(&[TensorData::f32("w", &[4, 3], &values), TensorData::bf16("b", &[4, 3], &brain)]);
        for (name, dtype) in [("w", DType::F32), ("b", DType::F32), ("b", DType::BF16)] {
            let result = checkpoint.load(name, &[4, 3], dtype, &Device::Cpu);
            refused(result, &["model.safetensors", &format!("tensor {name}"), "flat index 7", "row 2", text]);
        }
    }
}

#[test]
fn a_downcast_that_loses_bits_is_refused() {
    let (_dir, checkpoint) = single(&[TensorData::f32("w", &[2], &[1.0, 1.001])]);
    let load = |dtype| checkpoint.load("w", &[2], dtype, &Device::Cpu);
    refused(load(DType::BF16), &["tensor w", "flat index 1", "BF16"]);
    refused(load(DType::F16), &["tensor w", "F16"]);
    refused(load(DType::U8), &["tensor w", "U8"]);
    assert!(load(DType::F64).is_ok());
}

#[test]
fn a_path_with_spaces_and_other_scripts_opens() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("模型 größer");
    std::fs::create_dir(&folder).unwrap();
    write_ones(&folder.join("model.safetensors"), &[("a", &[2])]);
    assert!(CheckpointDir::open(&folder).unwrap().contains("a"));
}
