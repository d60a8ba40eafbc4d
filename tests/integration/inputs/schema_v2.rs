//! Refusals of schema-v2 shards and loose experts.

use std::collections::BTreeMap;
use std::path::Path;

use half::f16;
use walk::checkpoint::loose::read_loose;
use walk::checkpoint::schema_v2::V2Layer;
use walk::store::TensorDtype;
use walk::store::safetensors_write::{TensorData, write_safetensors};

use super::support::refused;

const P: &str = "model.layers.1.mlp.experts";
const K: usize = 128;

/// The four metadata entries of layer 1.
fn metadata() -> BTreeMap<String, String> {
    [("format", "pt"), ("r7_schema", "2"), ("r7_layer", "1"), ("r7_marker", "CODEX_ROUND7")]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into()
}

fn marker() -> i32 {
    0xCBAC_1FED_u32 as i32
}

/// Name, dtype, shape and bytes.
type Stored = (String, TensorDtype, Vec<usize>, Vec<u8>);

fn halves(name: String, values: &[f16]) -> Stored {
    (name, TensorDtype::F16, vec![values.len()], values.iter().flat_map(|x| x.to_le_bytes()).collect())
}

/// One expert of 3 bits, 128 by 128, every tensor there is.
fn good() -> Vec<Stored> {
    let ones = [f16::ONE; K];
    let mut tensors = vec![
        halves(format!("{P}.r7_shared.gate_up_suh"), &ones),
        halves(format!("{P}.r7_shared.down_svh"), &ones),
    ];
    for (module, part) in [("gate_proj", "svh"), ("up_proj", "svh"), ("down_proj", "suh")] {
        let name = |part: &str| format!("{P}.0.{module}.{part}");
        tensors.push((name("trellis"), TensorDtype::I16, vec![8, 8, 48], vec![0x5a; 8 * 8 * 48 * 2]));
        tensors.push(halves(name(part), &ones));
        tensors.push((name("mcg"), TensorDtype::I32, vec![], marker().to_le_bytes().to_vec()));
    }
    tensors
}

fn write(path: &Path, metadata: &BTreeMap<String, String>, tensors: &[Stored]) {
    let tensors: Vec<TensorData<'_>> = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| TensorData::from_bytes(name.clone(), *dtype, shape, bytes))
        .collect();
    write_safetensors(path, metadata, &tensors).unwrap();
}

/// Writes a shard, opens it as layer 1 of width 128 and reads its expert 0.
fn read(metadata: &BTreeMap<String, String>, tensors: &[Stored]) -> walk::Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("r7-experts-layer-001.safetensors");
    write(&path, metadata, tensors);
    V2Layer::open(&path, 1, K, K)?.expert(0).map(|_| ())
}

/// The good shard with one tensor changed must be refused by the shard's name, this tensor's and `parts`.
#[track_caller]
fn refuse(name: &str, change: impl FnOnce(&mut Stored), parts: &[&str]) {
    let mut tensors = good();
    let name = format!("{P}.{name}");
    change(tensors.iter_mut().find(|(stored, ..)| *stored == name).unwrap());
    let mut parts = parts.to_vec();
    parts.extend(["r7-experts-layer-001.safetensors", &name]);
    refused(read(&metadata(), &tensors), &parts);
}

#[test]
fn the_good_shard_of_this_suite_reads() {
    read(&metadata(), &good()).unwrap();
}

#[test]
fn metadata_of_another_schema_layer_or_lineage() {
    for (key, other) in [("r7_schema", "1"), ("r7_layer", "2"), ("r7_layer", "01"), ("r7_marker", "CODEX")] {
        let mut changed = metadata();
        changed.insert(key.into(), other.into());
        let shown = format!("the header's metadata says {other:?}; wanted: {}", metadata()[key]);
        refused(read(&changed, &good()), &["layer-001.safetensors", &format!("`{key}`"), "layer 1", &shown]);
        changed.remove(key);
        refused(
            read(&changed, &good()),
            &["layer-001.safetensors", &format!("`{key}`"), "the header's metadata lacks it"],
        );
    }
}

#[test]
fn every_tensor_is_missed_by_name() {
    for at in 0..good().len() {
        let mut tensors = good();
        let (name, ..) = tensors.remove(at);
        refused(read(&metadata(), &tensors), &["layer-001.safetensors", &name, "no such tensor"]);
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("shard.safetensors");
    write(&path, &metadata(), &good());
    refused(
        V2Layer::open(&path, 1, K, K).unwrap().expert(1),
        &["shard.safetensors", "experts.1.", "no such"],
    );
}

#[test]
fn trellises_of_another_shape_or_width() {
    let resize = |shape: [usize; 3]| {
        move |stored: &mut Stored| {
            stored.2 = shape.to_vec();
            stored.3 = vec![0; shape.iter().product::<usize>() * 2];
        }
    };
    for module in ["gate_proj", "up_proj", "down_proj"] {
        // Tiles that make no 128, words that make no 1 to 8 bits.
        for shape in [
            [8, 8, 47],
            [8, 7, 48],
            [9, 8, 48],
            [4, 16, 48],
            [0, 8, 48],
            [8, 8, 0],
            [8, 8, 144],
            [8, 8, 1600],
        ] {
            let parts = [&*format!("it is I16 of shape {shape:?}"), "1 to 8 bits"];
            refuse(&format!("0.{module}.trellis"), resize(shape), &parts);
        }
        // A linear of its own, but not one of this model.
        for shape in [[16, 8, 48], [8, 16, 48]] {
            refuse(&format!("0.{module}.trellis"), resize(shape), &["its shape is", "[8, 8, 16 * bits]"]);
        }
    }
    refuse("0.gate_proj.trellis", |stored| stored.1 = TensorDtype::F16, &["it is F16", "wanted: I16"]);
    refuse("0.gate_proj.trellis", |stored| stored.2 = vec![64, 48], &["it is I16 of shape [64, 48]"]);
}

#[test]
fn markers_of_another_codebook() {
    let says = |value: u32| move |stored: &mut Stored| stored.3 = value.to_le_bytes().to_vec();
    for module in ["gate_proj", "up_proj", "down_proj"] {
        let name = format!("0.{module}.mcg");
        refuse(&name, says(0x1234_abcd), &["codebook marker 0x1234ABCD", "wanted: 0xCBAC1FED"]);
        refuse(&name, says(0), &["0x00000000"]);
    }
    refuse("0.up_proj.mcg", |stored| stored.2 = vec![1], &["it is I32 of shape [1]", "I32 of shape []"]);
}

#[test]
fn vectors_with_entries_that_scale_nothing() {
    for name in
        ["r7_shared.gate_up_suh", "r7_shared.down_svh", "0.gate_proj.svh", "0.up_proj.svh", "0.down_proj.suh"]
    {
        for (bits, shown) in [(0x7e00u16, "NaN"), (0x7c00, "inf"), (0xfc00, "-inf"), (0, "0"), (0x8000, "-0")]
        {
            let change = |stored: &mut Stored| stored.3[2 * 77..][..2].copy_from_slice(&bits.to_le_bytes());
            refuse(name, change, &[&format!("value {shown} at flat index 77"), "finite, non-zero"]);
        }
        let short = |stored: &mut Stored| {
            stored.2 = vec![K - 1];
            stored.3.truncate(2 * (K - 1));
        };
        refuse(name, short, &["it is F16 of shape [127]", "F16 of shape [128]"]);
    }
}

#[test]
fn a_shard_that_is_cut_anywhere() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("shard.safetensors");
    write(&path, &metadata(), &good());
    let whole = std::fs::read(&path).unwrap();
    for length in (0..whole.len()).step_by(97).chain([whole.len() - 1]) {
        std::fs::write(&path, &whole[..length]).unwrap();
        refused(V2Layer::open(&path, 1, K, K), &["shard.safetensors"]);
    }
    std::fs::write(&path, [&whole[..], &[0]].concat()).unwrap();
    refused(V2Layer::open(&path, 1, K, K), &["shard.safetensors", "1 trailing bytes"]);
}

#[test]
fn a_loose_expert_of_another_place() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("loose.safetensors");
    let mut says = BTreeMap::from([("walk_loose_expert".to_owned(), "1.7".to_owned())]);
    write(&path, &says, &good());
    let parts = ["loose.safetensors", "`walk_loose_expert`", "layer 1", "expert 0"];
    refused(read_loose(&path, 1, 0, (K, K)), &[&parts[..], &["says \"1.7\"; wanted: 1.0"]].concat());
    says.insert("walk_loose_expert".to_owned(), "1.0".to_owned());
    write(&path, &says, &good());
    refused(read_loose(&path, 1, 0, (K, K)), &["loose.safetensors", "0.gate_proj.suh", "no such tensor"]);
    write(&path, &metadata(), &good());
    refused(read_loose(&path, 1, 0, (K, K)), &[&parts[..], &["metadata lacks it"]].concat());
}
