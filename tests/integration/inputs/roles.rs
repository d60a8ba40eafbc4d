//! Refusals of source, carrier and work directories.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::json;
use walk::checkpoint::{ExpertGeometry, Roles, Source};
use walk::store::safetensors_write::{TensorData, write_safetensors};

use super::support::{refused, root, write_ones};

const GEOMETRY: fn() -> ExpertGeometry =
    || ExpertGeometry { moe_layers: vec![1], experts: 1, hidden: 4, intermediate: 2 };

const P: &str = "model.layers.1.mlp.experts.0";

/// A source of one layer with one expert, with other tensors besides and one replaced or left out.
fn source(dir: &Path, tensors: &[(&str, &[usize])]) {
    std::fs::create_dir_all(dir).unwrap();
    std::fs::write(dir.join("config.json"), r#"{"model_type": "glm_moe_dsa"}"#).unwrap();
    write_ones(&dir.join("model.safetensors"), tensors);
}

fn good() -> Vec<(&'static str, &'static [usize])> {
    vec![
        ("model.layers.1.mlp.experts.0.gate_proj.weight", &[2, 4]),
        ("model.layers.1.mlp.experts.0.up_proj.weight", &[2, 4]),
        ("model.layers.1.mlp.experts.0.down_proj.weight", &[4, 2]),
        ("model.layers.2.mlp.experts.0.gate_proj.trellis", &[1]),
    ]
}

#[test]
fn the_tiny_model_is_both_roles_when_allowed() {
    let tiny = root().join("models/tiny");
    let geometry = ExpertGeometry { moe_layers: vec![2, 3, 4], experts: 8, hidden: 256, intermediate: 256 };
    let work = tempfile::tempdir().unwrap();
    let roles = Roles::open(&tiny, &tiny, work.path(), &geometry, true).unwrap();
    assert!(std::sync::Arc::ptr_eq(roles.source.checkpoint(), roles.carrier.checkpoint()));
    refused(
        Roles::open(&tiny, &tiny, work.path(), &geometry, false),
        &["models/tiny", "same directory", "allow_same_source_and_carrier"],
    );
}

#[test]
fn a_good_source_opens() {
    let dir = tempfile::tempdir().unwrap();
    source(dir.path(), &good());
    Source::open(dir.path(), &GEOMETRY()).unwrap();
}

#[test]
fn a_missing_expert_tensor() {
    for i in 0..3 {
        let dir = tempfile::tempdir().unwrap();
        let mut tensors = good();
        let (name, _) = tensors.remove(i);
        source(dir.path(), &tensors);
        refused(Source::open(dir.path(), &GEOMETRY()), &[name, "layer 1", "expert 0", "lacks", "BF16"]);
    }
}

#[test]
fn an_expert_tensor_of_the_wrong_shape() {
    let dir = tempfile::tempdir().unwrap();
    let mut tensors = good();
    tensors[2].1 = &[2, 4];
    source(dir.path(), &tensors);
    refused(
        Source::open(dir.path(), &GEOMETRY()),
        &["down_proj", "layer 1", "[2, 4]", "BF16 of shape [4, 2]"],
    );
}

#[test]
fn an_expert_tensor_that_is_not_bf16() {
    let dir = tempfile::tempdir().unwrap();
    source(dir.path(), &good());
    let ones = [1.0_f32; 8];
    let tensors: Vec<_> = [("gate", [2, 4]), ("up", [2, 4]), ("down", [4, 2])]
        .map(|(name, shape)| TensorData::f32(format!("{P}.{name}_proj.weight"), &shape, &ones))
        .into();
    write_safetensors(dir.path().join("model.safetensors"), &BTreeMap::new(), &tensors).unwrap();
    refused(Source::open(dir.path(), &GEOMETRY()), &["model.safetensors", "gate_proj", "F32", "BF16"]);
}

#[test]
fn packed_scaled_fused_or_surplus_expert_tensors() {
    for extra in [
        "model.layers.1.mlp.experts.0.gate_proj.trellis",
        "model.layers.1.mlp.experts.0.gate_proj.weight_scale_inv",
        "model.layers.1.mlp.experts.gate_up_proj",
        "model.layers.1.mlp.experts.1.gate_proj.weight",
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut tensors = good();
        tensors.push((extra, &[1]));
        source(dir.path(), &tensors);
        refused(Source::open(dir.path(), &GEOMETRY()), &[extra, "layer 1", "no BF16 checkpoint has"]);
    }
}

#[test]
fn quantization_metadata() {
    let dir = tempfile::tempdir().unwrap();
    source(dir.path(), &good());
    for config in [
        json!({"quantization_config": {"quant_method": "fp8"}}),
        json!({"text_config": {"quantization_config": {}}}),
        json!({"compression_config": {"x": 1}}),
        json!({"hybrid_tr3_tail": {}}),
    ] {
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        refused(Source::open(dir.path(), &GEOMETRY()), &["config.json", "field `", "quantization metadata"]);
    }
    std::fs::write(
        dir.path().join("config.json"),
        r#"{"quantization_config": {"a": 1}, "quantization_config": null}"#,
    )
    .unwrap();
    refused(Source::open(dir.path(), &GEOMETRY()), &["config.json", "occurs twice"]);
}

#[test]
fn a_quantization_file_beside_the_config() {
    let dir = tempfile::tempdir().unwrap();
    source(dir.path(), &good());
    std::fs::write(dir.path().join("quantization_config.json"), "{}").unwrap();
    refused(Source::open(dir.path(), &GEOMETRY()), &["quantization_config.json", "quantized"]);
}

#[test]
fn a_source_without_config() {
    let dir = tempfile::tempdir().unwrap();
    source(dir.path(), &good());
    std::fs::remove_file(dir.path().join("config.json")).unwrap();
    refused(Source::open(dir.path(), &GEOMETRY()), &["config.json", "no config.json"]);
}

#[test]
fn work_directories_that_overlap_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let (src, car) = (dir.path().join("src"), dir.path().join("car"));
    source(&src, &good());
    source(&car, &good());
    let open = |work: &Path| Roles::open(&src, &car, work, &GEOMETRY(), false);
    open(&dir.path().join("work")).unwrap();
    open(&dir.path().join("src-work/deep/er")).unwrap();
    for (work, role) in [
        (src.clone(), "source"),
        (src.join("not/yet/there"), "source"),
        (car.join("w"), "carrier"),
        (dir.path().to_path_buf(), "source"),
        (dir.path().join("nowhere/../car/w"), "carrier"),
    ] {
        refused(open(&work), &["overlap", role, &work.display().to_string()]);
    }
    #[cfg(unix)]
    {
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&car, &link).unwrap();
        refused(open(&link.join("w")), &["overlap", "carrier"]);
        refused(Roles::open(&car, &link, &dir.path().join("w"), &GEOMETRY(), false), &["same directory"]);
    }
}

#[test]
fn roles_that_are_no_directories() {
    let dir = tempfile::tempdir().unwrap();
    source(dir.path(), &good());
    let nowhere = dir.path().join("nowhere");
    let work = Path::new("walk-work-never-made");
    refused(
        Roles::open(&nowhere, dir.path(), work, &GEOMETRY(), false),
        &["nowhere", "source is no directory"],
    );
    refused(
        Roles::open(dir.path(), &nowhere, work, &GEOMETRY(), false),
        &["nowhere", "carrier is no directory"],
    );
}
