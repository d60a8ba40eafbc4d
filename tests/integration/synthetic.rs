//! Checkpoints of seeded noise: the same bytes for any number of threads, and what reads them believes them.

use std::path::Path;

use assert_cmd::Command;
use serde_json::Value;
use walk::audit::{AuditOptions, audit};
use walk::config::Geometry;
use walk::store::tensor_dtype::TensorDtype;
use walk::synthetic::{
    SmallModel, Written, audit_source, audit_v2, packed_layer, write_small_model, write_source_headers,
    write_v2_headers,
};

use crate::support::mini::Mini;
use crate::support::{files, repository};

fn tiny() -> Geometry {
    Geometry::read(&repository("models/tiny/config.json")).unwrap()
}

/// Runs `f` on so many threads.
fn with_threads<T: Send>(threads: usize, f: impl FnOnce() -> T + Send) -> T {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(f)
}

#[test]
fn a_packed_layer_passes_the_audit_of_finished_layers() {
    let made = |folder: &Path, threads| {
        with_threads(threads, || packed_layer(folder, &tiny(), 2, 3, &[3, 4, 5], 7).unwrap())
    };
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let manifest = made(one.path(), 1);
    assert_eq!(manifest, made(two.path(), 2));
    assert_eq!(files(one.path()), files(two.path()));
    assert_eq!((manifest.bit_map.len(), manifest.allocation_bit_units), (9, 36));
    let report = audit(one.path(), &AuditOptions::default(), &walk::walk::progress::Silent).unwrap();
    assert!(report.failure().is_none(), "{}", report.render_table());
    // Other words for another seed.
    let other = packed_layer(two.path(), &tiny(), 2, 3, &[3, 4, 5], 8).unwrap();
    assert!(manifest.roundtrip_hashes.values().zip(other.roundtrip_hashes.values()).all(|(a, b)| a != b));
}

#[test]
fn a_packed_layer_that_no_reader_would_take_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let layer = |experts, bits: &[u32]| packed_layer(folder.path(), &tiny(), 2, experts, bits, 7);
    for (made, what) in [
        (layer(0, &[3]), "0 experts"),
        (layer(1, &[]), "at bits []"),
        (layer(1, &[3, 9]), "9 bits a weight"),
        (layer(1, &[0]), "0 bits a weight"),
    ] {
        let error = made.unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
    assert_eq!(files(folder.path()).len(), 0);
}

/// A checkpoint with the tiny model's widths.
fn small(folder: &Path, seed: u64) -> Written {
    let model = SmallModel {
        config: &repository("models/tiny/config.json"),
        tokenizer: &repository("models/tiny"),
        experts: 3,
        shard_bytes: 1_000_000,
        seed,
    };
    write_small_model(folder, &model, &|_| Ok(())).unwrap()
}

#[test]
fn a_small_model_is_the_same_on_any_threads_and_a_source() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let written = with_threads(1, || small(one.path(), 5));
    assert_eq!(written, with_threads(2, || small(two.path(), 5)));
    assert_eq!(files(one.path()), files(two.path()));
    assert!(written.shards > 3, "{}", written.shards);
    audit_source(one.path(), &written).unwrap();
    // One dense layer, one MoE layer, and the block after them.
    let geometry = Geometry::read(&one.path().join("config.json")).unwrap();
    assert_eq!((geometry.num_hidden_layers, geometry.moe_layers()), (2, vec![1]));
    assert_eq!((geometry.n_routed_experts, geometry.num_experts_per_tok), (3, 1));
    assert!(written.specs.iter().any(|spec| spec.name == "model.layers.2.eh_proj.weight"));
    let other = tempfile::tempdir().unwrap();
    small(other.path(), 6);
    let (seeded, reseeded) = (files(one.path()), files(other.path()));
    assert!(seeded.iter().all(|(name, hash)| name.ends_with("json") == (reseeded[name] == *hash)));
}

#[test]
fn headers_of_a_whole_model_are_audited_without_payloads() {
    let folder = tempfile::tempdir().unwrap();
    let config = repository("models/tiny/config.json");
    let source = folder.path().join("source");
    let written = write_source_headers(&source, &config, 8, 3_000_000).unwrap();
    audit_source(&source, &written).unwrap();
    // As many tensors as the trained model, its MTP block included, and as many bytes.
    let index: Value = serde_json::from_slice(
        &std::fs::read(repository("models/tiny/model.safetensors.index.json")).unwrap(),
    )
    .unwrap();
    let trained = index["weight_map"].as_object().unwrap();
    let names: Vec<&str> = written.specs.iter().map(|spec| spec.name.as_str()).collect();
    assert_eq!(names.len(), trained.len());
    assert!(names.iter().all(|name| trained.contains_key(*name)));
    assert_eq!(written.payload_bytes, index["metadata"]["total_size"].as_u64().unwrap());

    let v2 = folder.path().join("v2");
    let packed = write_v2_headers(&v2, &config, 8, &[3, 4]).unwrap();
    // Three layers of two shared vectors and 8 x 9 tensors.
    assert_eq!((packed.shards, packed.specs.len()), (3, 3 * 74));
    audit_v2(&v2, &packed, 3 * 84).unwrap();
    let error = audit_v2(&v2, &packed, 3 * 84 + 1).unwrap_err().to_string();
    assert!(error.contains("72 packed modules with 252 bits; wanted: 72 with 253"), "{error}");
}

#[test]
fn an_audit_names_what_is_not_as_it_was_meant() {
    let folder = tempfile::tempdir().unwrap();
    let config = repository("models/tiny/config.json");
    let written = write_source_headers(folder.path(), &config, 2, 1 << 30).unwrap();
    let audit_of = |change: &dyn Fn(&mut Written)| {
        let mut meant = written.clone();
        change(&mut meant);
        audit_source(folder.path(), &meant).unwrap_err().to_string()
    };
    let at = written.specs.iter().position(|spec| spec.name.ends_with("o_proj.weight")).unwrap();
    let shape = audit_of(&|meant| meant.specs[at].shape.reverse());
    assert!(shape.contains("o_proj.weight: it is BF16 of shape [256, 192]"), "{shape}");
    let dtype = audit_of(&|meant| meant.specs[at].dtype = TensorDtype::F16);
    assert!(dtype.contains("wanted: F16 of shape [256, 192]"), "{dtype}");
    let name = audit_of(&|meant| meant.specs[at].name.push('x'));
    assert!(name.contains("o_proj.weightx") && name.contains("no such tensor"), "{name}");
    let count = audit_of(&|meant| drop(meant.specs.pop()));
    assert!(count.contains(&format!("wanted: {}", written.specs.len() - 1)), "{count}");
}

#[test]
fn the_command_writes_what_a_walk_takes() {
    let mini = Mini::new();
    let noise = mini.path().join("noise");
    let walk = || Command::cargo_bin("walk").unwrap();
    let synthesize = |out: &Path, more: &[&str]| {
        let mut command = walk();
        command.args(["synthesize", "--json", "--quiet", "--model"]).arg(mini.model());
        command.arg("--tokenizer").arg(mini.model()).args(more).arg(out);
        command
    };
    synthesize(&noise, &[]).assert().success();
    let refused = synthesize(&noise, &[]).assert().code(2).get_output().stderr.clone();
    assert!(String::from_utf8(refused).unwrap().contains("the directory is not empty"));
    synthesize(&mini.path().join("none"), &["--experts", "0"]).assert().code(2);

    let work = mini.work("noise");
    walk()
        .args(["--quiet", "--recipe", "fast", "--model"])
        .arg(&noise)
        .arg("--corpus")
        .arg(mini.plan())
        .arg("--work")
        .arg(&work)
        .assert()
        .success();
    walk().args(["audit", "--quiet"]).arg(&work).assert().success();

    let out = synthesize(&mini.path().join("headers"), &["--sparse"])
        .assert()
        .success()
        .get_output()
        .stdout
        .clone();
    let report: Value = serde_json::from_slice(&out).unwrap();
    assert_eq!(report["type"], "synthesize");
    assert_eq!(report["data"][1]["tensors"], 2 * (2 + 2 * 9));
    synthesize(&mini.path().join("layer"), &["--packed"]).assert().success();
    walk().args(["audit", "--quiet"]).arg(mini.path().join("layer")).assert().success();
    let help = walk().arg("--help").assert().success().get_output().stdout.clone();
    assert!(!String::from_utf8(help).unwrap().contains("synthesize"));
}
