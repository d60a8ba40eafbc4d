//! Complete checkpoints through the built binary: assembled from a walk, cut into rank slices, put together again, audited,
//! refused and resumed.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use assert_cmd::Command;
use serde_json::{Value, json};
use walk::checkpoint::CheckpointDir;
use walk::checkpoint::names::split_experts;

use walk::checkpoint::schema_v1::{V1Layer, shard_name, write_rank};
use walk::checkpoint::schema_v2::{V2Layer, stream_shard};
use walk::checkpoint::slices::{check_ranks, reassemble};
use walk::config::Geometry;
use walk::publish::convert::check_slices;
use walk::store::atomic::write_json_atomic;
use walk::store::hash::sha256_file;
use walk::synthetic::packed_layer;
use walk::walk::progress::Silent;

use crate::support::mini::{LAYERS, Mini};
use crate::support::{command, files, repository};

/// A model with an MTP block, walked with mixed widths and with one, and the first assembled.
struct Walked {
    mini: Mini,
}

impl Walked {
    fn work(&self) -> PathBuf {
        self.mini.work("mixed")
    }

    fn uniform(&self) -> PathBuf {
        self.mini.work("uniform")
    }

    fn complete(&self) -> PathBuf {
        self.mini.path().join("complete")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.mini.path().join(name)
    }
}

static WALKED: LazyLock<Walked> = LazyLock::new(|| {
    let walked = Walked { mini: Mini::wide() };
    command(&walked.mini, &walked.work()).assert().success();
    command(&walked.mini, &walked.uniform()).args(["--recipe", "uniform-3"]).assert().success();
    success(assemble(&walked.work(), &walked.complete()));
    walked
});

fn walk() -> Command {
    let mut command = Command::cargo_bin("walk").unwrap();
    command.env("RAYON_NUM_THREADS", "2");
    command
}

fn assemble(work: &Path, out: &Path) -> Command {
    let mut command = walk();
    command.args(["assemble", "--quiet", "--json", "--work"]).arg(work).arg("--out").arg(out);
    command
}

fn to_v1(tp: usize, from: &Path, out: &Path) -> Command {
    let mut command = walk();
    command.args(["convert", "--quiet", "--json", "--to", "v1", "--tp", &tp.to_string()]).arg(from).arg(out);
    command
}

fn to_v2(from: &Path, out: &Path) -> Command {
    let mut command = walk();
    command.args(["convert", "--quiet", "--json", "--to", "v2"]).arg(from).arg(out);
    command
}

fn audit(dir: &Path) -> Command {
    let mut command = walk();
    command.args(["audit", "--quiet", "--json"]).arg(dir);
    command
}

/// What a command that has to succeed reports.
fn success(mut command: Command) -> Value {
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice::<Value>(&output.stdout).unwrap()["data"].take()
}

/// What a command that has to fail with this code says.
fn failure(mut command: Command, code: i32) -> String {
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert!(!said.contains("panicked"), "{said}");
    said
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn names(folder: &Path) -> BTreeSet<String> {
    std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for name in names(from) {
        let (from, to) = (from.join(&name), to.join(&name));
        if from.is_dir() {
            copy_dir(&from, &to);
        } else {
            std::fs::copy(from, to).unwrap();
        }
    }
}

fn flip(path: &Path, at: usize) {
    let mut bytes = std::fs::read(path).unwrap();
    let at = at.min(bytes.len() - 1);
    bytes[at] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn an_assembled_checkpoint_has_everything_once() {
    let complete = WALKED.complete();
    let expected = [
        "MANIFEST.json",
        "MANIFEST.sha256",
        "config.json",
        "model-00001-of-00001.safetensors",
        "model.json",
        "model.safetensors.index.json",
        "quantization_config.json",
        "r7-experts-layer-001.json",
        "r7-experts-layer-001.safetensors",
        "r7-experts-layer-002.json",
        "r7-experts-layer-002.safetensors",
        "recipe.json",
        "tokenizer.json",
    ];
    assert_eq!(names(&complete), expected.map(str::to_owned).into());
    let (carrier, made) =
        (CheckpointDir::open(WALKED.mini.model()).unwrap(), CheckpointDir::open(&complete).unwrap());
    let replaced = |name: &str| split_experts(name).is_some_and(|(layer, _)| layer < LAYERS);
    let mut carried = 0;
    for name in carrier.names().filter(|name| !replaced(name)) {
        assert_eq!(made.payload_sha256(name).unwrap(), carrier.payload_sha256(name).unwrap(), "{name}");
        carried += 1;
    }
    assert!(carrier.contains("model.layers.3.mlp.experts.0.gate_proj.weight"), "the MTP block has an expert");
    assert!(made.names().all(|name| !(replaced(name) && name.ends_with(".weight"))));
    let manifest = read(&complete.join("MANIFEST.json"));
    assert_eq!(manifest["carried_tensor_count"], carried);
    assert_eq!(manifest["tensor_count"], made.names().count());
    // Two layers of two experts: three linears of trellis, vector and marker each, and two shared vectors.
    assert_eq!(manifest["r7_tensor_count"], 2 * (2 * 9 + 2));
    assert_eq!(manifest["mtp3_carried_tensor_payload_sha256"].as_object().unwrap().len(), 2);
    let config = read(&complete.join("config.json"));
    assert_eq!(config["quantization_config"], read(&complete.join("quantization_config.json")));
    let block = &config["quantization_config"]["r7_routed_experts"];
    for (key, value) in [
        ("marker", json!("CODEX_ROUND7")),
        ("schema", json!("r7-complete-v2-checkpoint-v1")),
        ("requires_loader_feature", json!("r7-asymmetric-two-stack")),
        ("moe_layers", json!([1, 2])),
        ("mtp_layer_3", json!("carried")),
        ("bits", json!("mixed_tensor")),
        ("k_values", json!([3, 4, 5])),
        ("target_bpw", json!("3.5")),
        ("tp_slice_quantum", json!(128)),
        ("bit_map_manifests", json!(["r7-experts-layer-001.json", "r7-experts-layer-002.json"])),
    ] {
        assert_eq!(block[key], value, "{key}");
    }
    assert_eq!(config["hidden_size"], 128, "the rest of the config is the carrier's");

    let mut command = audit(&complete);
    command.arg("--carrier").arg(WALKED.mini.model());
    let report = success(command);
    assert_eq!(report["subject"], "complete checkpoint");
    for (gate, verdict) in [(3, "passed"), (4, "passed"), (6, "passed"), (7, "passed"), (5, "not-run")] {
        assert_eq!(report["gates"][gate]["verdict"], verdict, "{}", report["gates"][gate]);
    }
    // Again, elsewhere and on one thread: the same bytes.
    let again = WALKED.path("again");
    let mut command = assemble(&WALKED.work(), &again);
    command.args(["--threads", "1"]).env_remove("RAYON_NUM_THREADS");
    success(command);
    assert_eq!(files(&again), files(&complete));
    let said = failure(assemble(&WALKED.work(), &again), 2);
    assert!(said.contains("again: it is there already"), "{said}");
}

#[test]
fn slices_are_cut_and_put_together_to_the_byte() {
    let complete = WALKED.complete();
    let whole = files(&complete);
    for tp in [1, 2] {
        let (sliced, back) = (WALKED.path(&format!("tp{tp}")), WALKED.path(&format!("tp{tp}-back")));
        let report = success(to_v1(tp, &complete, &sliced));
        assert_eq!(report["tp_size"], tp);
        assert_eq!(report["config_block"], "r7_routed_experts");
        let shard = |layer: usize, rank: usize| format!("r7-v1-layer-00{layer}-rank-0{rank}.safetensors");
        let found = names(&sliced);
        for rank in 0..tp {
            assert!(found.contains(&shard(1, rank)) && found.contains(&shard(2, rank)));
        }
        assert!(!found.contains(&shard(1, tp)) && !found.contains("r7-experts-layer-001.safetensors"));
        let opened = CheckpointDir::open(&sliced).unwrap();
        let last = tp - 1;
        let place =
            opened.info(&format!("model.layers.1.mlp.experts.1.down_proj.rank{last}.trellis")).unwrap();
        assert_eq!(place.info.shape[..2], [256 / tp / 16, 128 / 16]);
        let suh = opened.info(&format!("model.layers.1.mlp.experts.1.up_proj.rank{last}.suh")).unwrap();
        assert_eq!(suh.info.shape, [128], "the shared vector is repeated");
        let manifest = read(&sliced.join("r7-v1-layer-001.json"));
        assert_eq!(manifest["requires_loader_feature"], "r7-asymmetric-two-stack");
        assert_eq!(manifest["tp_size"], tp);
        let report = success(audit(&sliced));
        assert_eq!(report["gates"][6]["verdict"], "passed");
        let report = success(to_v2(&sliced, &back));
        assert_eq!(report["tp_size"], tp);
        assert_eq!(files(&back), whole, "tp {tp}");
    }
    for tp in [0, 3, 4, 32] {
        let out = WALKED.path("refused");
        let said = failure(to_v1(tp, &complete, &out), 2);
        assert!(said.contains("128-element boundaries") && said.contains("1, 2 ranks"), "{said}");
        assert!(!out.exists());
    }
    let mut command = to_v1(2, &complete, &WALKED.path("asserted"));
    command.arg("--assert-unmodified-r13");
    let said = failure(command, 1);
    assert!(said.contains("3.5 bits a weight, which no single integer width can average to"), "{said}");
    let said = failure(to_v1(2, &WALKED.path("tp2-back-none"), &WALKED.path("x")), 2);
    assert!(said.contains("MANIFEST.json"), "{said}");
}

#[test]
fn slices_of_one_width_are_for_unmodified_loaders() {
    let (complete, sliced, back) =
        (WALKED.path("uniform-v2"), WALKED.path("uniform-tp2"), WALKED.path("uniform-back"));
    success(assemble(&WALKED.uniform(), &complete));
    let mut command = to_v1(2, &complete, &sliced);
    command.arg("--assert-unmodified-r13");
    let report = success(command);
    assert_eq!(report["config_block"], "hybrid_tr3_tail");
    assert_eq!(report["not_for_unmodified_r13"], Value::Null);
    let quantization = read(&sliced.join("quantization_config.json"));
    assert_eq!(quantization["r7_routed_experts"], Value::Null);
    assert_eq!(
        quantization["hybrid_tr3_tail"],
        json!({
            "format": "exl3-trellis", "codebook": "mcg", "tp": 2, "bits": 3, "experts_per_layer": 2, "moe_layers": [1, 2],
            "tensor_schema": "model.layers.{L}.mlp.experts.{E}.{proj}.rank{r}.{trellis|suh|svh|mcg}",
        })
    );
    assert_eq!(success(audit(&sliced))["passed"], true);
    success(to_v2(&sliced, &back));
    assert_eq!(files(&back), files(&complete));
}

#[test]
fn what_is_not_the_walk_s_is_not_assembled() {
    // Another carrier: a tensor's payload, and a tensor more.
    let changed = WALKED.path("carrier-changed");
    copy_dir(&WALKED.mini.model(), &changed);
    flip(&changed.join("model.safetensors"), usize::MAX);
    let out = WALKED.path("never");
    let with = |carrier: &Path| {
        let mut command = assemble(&WALKED.work(), &out);
        command.arg("--carrier").arg(carrier);
        failure(command, 2)
    };
    let said = with(&changed);
    assert!(said.contains("tensor ") && said.contains("as sealed"), "{said}");
    assert!(!out.exists());
    // What was begun with it goes on with the right one: its inputs are the same.
    success(assemble(&WALKED.work(), &out));
    assert_eq!(files(&out), files(&WALKED.complete()));

    let out = WALKED.path("never-2");
    let other = Mini::with(|tensors| tensors.push(("model.layers.0.stranger".into(), vec![1], vec![1.0])));
    let mut command = assemble(&WALKED.work(), &out);
    command.arg("--carrier").arg(other.model());
    let said = failure(command, 2);
    assert!(said.contains("model.layers.0.stranger") && said.contains("not in it"), "{said}");

    // A work directory that is unfinished, or whose layer changed.
    let work = WALKED.path("broken");
    copy_dir(&WALKED.work(), &work);
    flip(&work.join("v2/r7-experts-layer-002.safetensors"), usize::MAX);
    let said = failure(assemble(&work, &out), 2);
    assert!(
        said.contains("r7-experts-layer-002.safetensors: the file is not the one that was sealed"),
        "{said}"
    );
    let unfinished = WALKED.path("unfinished");
    stopped_walk(&unfinished);
    let said = failure(assemble(&unfinished, &out), 2);
    assert!(said.contains("the walk is not finished"), "{said}");

    // Targets that would write into what is read.
    for inside in [WALKED.work().join("v2/out"), WALKED.mini.model().join("out"), WALKED.work()] {
        let said = failure(assemble(&WALKED.work(), &inside), 2);
        assert!(said.contains("overlaps"), "{said}");
    }
    assert!(!out.exists());
    let left: Vec<String> =
        names(WALKED.mini.path()).into_iter().filter(|name| name.contains("never-2")).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// A walk stopped after its first MoE layer.
fn stopped_walk(work: &Path) {
    command(&WALKED.mini, work).args(["--pilot-stop-after-layer", "1"]).assert().success();
}

#[test]
fn a_foreign_partial_directory_is_refused_and_left_alone() {
    let partial = WALKED.path(".foreign.partial");
    std::fs::create_dir(&partial).unwrap();
    std::fs::write(partial.join("mine"), "mine").unwrap();
    let said = failure(assemble(&WALKED.work(), &WALKED.path("foreign")), 2);
    assert!(said.contains(".foreign.partial: a partial directory that no transaction record"), "{said}");
    assert_eq!(std::fs::read(partial.join("mine")).unwrap(), b"mine");

    // Begun as an assembly, it is not gone on with as a conversion, nor as an assembly of another walk.
    let transaction = WALKED.path(".begun.transaction");
    std::fs::create_dir_all(&transaction).unwrap();
    let record =
        json!({"schema": "walk-directory-transaction-v1", "binding": {"command": "assemble"}, "files": {}});
    std::fs::write(transaction.join("RECORD.json"), record.to_string()).unwrap();
    let said = failure(to_v1(2, &WALKED.complete(), &WALKED.path("begun")), 2);
    assert!(said.contains("RECORD.json") && said.contains("begun with"), "{said}");
    let said = failure(assemble(&WALKED.uniform(), &WALKED.path("begun")), 2);
    assert!(said.contains("carrier_inventory_sha256"), "{said}");
}

#[test]
fn a_changed_byte_of_a_complete_checkpoint_is_found() {
    for (dir, file) in [
        ("complete", "model-00001-of-00001.safetensors"),
        ("complete", "r7-experts-layer-001.safetensors"),
        ("complete", "r7-experts-layer-002.json"),
        ("complete", "config.json"),
        ("complete", "quantization_config.json"),
        ("complete", "tokenizer.json"),
        ("complete", "MANIFEST.json"),
        ("complete", "MANIFEST.sha256"),
    ] {
        let copy = WALKED.path(&format!("changed-{file}"));
        copy_dir(&WALKED.path(dir), &copy);
        flip(&copy.join(file), 100_000);
        let said = failure(audit(&copy), 1);
        assert!(said.contains("gate 7") || said.contains("gate 6"), "{file}: {said}");
        // A conversion does not carry it on either.
        if !file.starts_with("quantization") {
            let out = WALKED.path(&format!("changed-{file}-out"));
            let said = failure(to_v1(2, &copy, &out), 2);
            assert!(said.contains(file) || file.starts_with("MANIFEST"), "{file}: {said}");
            assert!(!out.exists());
        }
        std::fs::remove_dir_all(&copy).unwrap();
    }
    // A file too many, and a tensor that only the index has.
    let copy = WALKED.path("changed-more");
    copy_dir(&WALKED.complete(), &copy);
    std::fs::write(copy.join("stranger.txt"), "x").unwrap();
    let said = failure(audit(&copy), 1);
    assert!(said.contains("stranger.txt"), "{said}");

    // A slice's vector, with every hash above it made anew: it is no slice of one linear any more, or decodes otherwise.
    let sliced = WALKED.path("tampered-tp2");
    success(to_v1(2, &WALKED.complete(), &sliced));
    flip(&sliced.join("r7-v1-layer-001-rank-01.safetensors"), usize::MAX);
    let said = failure(audit(&sliced), 1);
    assert!(said.contains("r7-v1-layer-001"), "{said}");
    let said = failure(to_v2(&sliced, &WALKED.path("tampered-back")), 2);
    assert!(said.contains("r7-v1-layer-001-rank-01.safetensors") && said.contains("its SHA-256"), "{said}");
}

/// Makes the hashes of changed files good again, as a forger would.
pub fn sign(dir: &Path, changed: &[&str]) {
    let mut manifest = read(&dir.join("MANIFEST.json"));
    for file in changed {
        manifest["files_sha256"][*file] = json!(sha256_file(dir.join(file)).unwrap());
    }
    let sha256 = write_json_atomic(dir.join("MANIFEST.json"), &manifest).unwrap();
    std::fs::write(dir.join("MANIFEST.sha256"), format!("{sha256}  MANIFEST.json\n")).unwrap();
}

/// Changes a JSON file of a directory.
fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = read(path);
    change(&mut value);
    write_json_atomic(path, &value).unwrap();
}

#[test]
fn a_forged_manifest_leads_nowhere() {
    let sliced = WALKED.path("forged-tp2");
    success(to_v1(2, &WALKED.complete(), &sliced));
    let layer = sliced.join("r7-v1-layer-001.json");
    let good = std::fs::read(&layer).unwrap();
    let outside = WALKED.path("precious.safetensors");
    std::fs::write(&outside, "precious").unwrap();
    let changes: [(&str, Value); 9] = [
        ("/source_manifest/shard", json!(outside.to_str().unwrap())),
        ("/source_manifest/shard", json!("../precious.safetensors")),
        ("/source_manifest/permutations", json!({})),
        ("/source_manifest/permutations/0/new_to_old/0", json!(7)),
        ("/source_manifest/tensor_provenance", json!({})),
        ("/source_manifest/payload_sha256", json!({})),
        ("/k_values", json!([9])),
        ("/requires_loader_feature", json!(null)),
        ("/recipe_version", json!("q")),
    ];
    for (pointer, value) in changes {
        edit(&layer, |manifest| *manifest.pointer_mut(pointer).unwrap() = value.clone());
        sign(&sliced, &["r7-v1-layer-001.json"]);
        let out = WALKED.path("forged-out");
        let said = failure(to_v2(&sliced, &out), 2);
        assert!(said.contains("r7-v1-layer-001.json"), "{pointer}: {said}");
        assert!(!out.exists());
        failure(audit(&sliced), 1);
        std::fs::write(&layer, &good).unwrap();
    }
    assert_eq!(std::fs::read(&outside).unwrap(), b"precious");
    sign(&sliced, &["r7-v1-layer-001.json"]);
    success(audit(&sliced));
    success(to_v2(&sliced, &WALKED.path("forged-out")));
}

#[test]
fn what_a_config_says_follows_from_the_layers() {
    let copy = WALKED.path("config");
    copy_dir(&WALKED.complete(), &copy);
    let both = ["config.json", "quantization_config.json"];
    let good = both.map(|file| std::fs::read(copy.join(file)).unwrap());
    let changes: [(&str, Value); 9] = [
        ("/r7_routed_experts/requires_loader_feature", json!(null)),
        ("/r7_routed_experts/bits", json!(3)),
        ("/r7_routed_experts/codebook", json!("mul1")),
        ("/r7_routed_experts/k_values", json!([7])),
        ("/r7_routed_experts/schema_version", json!(1)),
        ("/r7_routed_experts/tp_slice_quantum", json!(64)),
        ("/r7_routed_experts/moe_layers", json!([1, 3])),
        ("/r7_routed_experts", json!(3)),
        ("/quant_method", json!("gptq")),
    ];
    for (pointer, value) in changes {
        edit(&copy.join(both[0]), |config| {
            *config.pointer_mut(&format!("/quantization_config{pointer}")).unwrap() = value.clone();
        });
        edit(&copy.join(both[1]), |config| *config.pointer_mut(pointer).unwrap() = value.clone());
        sign(&copy, &both);
        let said = failure(audit(&copy), 1);
        assert!(said.contains("config.json") && said.contains("quantization_config"), "{pointer}: {said}");
        for (file, bytes) in both.iter().zip(&good) {
            std::fs::write(copy.join(file), bytes).unwrap();
        }
    }
    // Beside quantization it is the carrier's.
    edit(&copy.join(both[0]), |config| config["rms_norm_eps"] = json!(0.5));
    sign(&copy, &both);
    let mut command = audit(&copy);
    command.arg("--carrier").arg(WALKED.mini.model());
    let said = failure(command, 1);
    assert!(said.contains("rms_norm_eps"), "{said}");
}

#[test]
fn files_that_are_gone_or_were_not_listed_are_not_carried_on() {
    let carrier = WALKED.path("carrier-config");
    copy_dir(&WALKED.mini.model(), &carrier);
    edit(&carrier.join("config.json"), |config| config["rms_norm_eps"] = json!(0.5));
    let assembled = |carrier: &Path| {
        let mut command = assemble(&WALKED.work(), &WALKED.path("carried-on"));
        command.arg("--carrier").arg(carrier);
        failure(command, 2)
    };
    let said = assembled(&carrier);
    assert!(said.contains("config.json") && said.contains("as sealed"), "{said}");
    std::fs::copy(WALKED.mini.model().join("config.json"), carrier.join("config.json")).unwrap();
    std::fs::remove_file(carrier.join("tokenizer.json")).unwrap();
    let said = assembled(&carrier);
    assert!(said.contains("tokenizer.json") && said.contains("gone"), "{said}");

    let copy = WALKED.path("unlisted");
    copy_dir(&WALKED.complete(), &copy);
    std::fs::write(copy.join("chat_template.jinja"), "x").unwrap();
    let said = failure(to_v1(2, &copy, &WALKED.path("carried-on")), 2);
    assert!(said.contains("chat_template.jinja") && said.contains("does not list"), "{said}");
    std::fs::remove_file(copy.join("chat_template.jinja")).unwrap();
    std::fs::remove_file(copy.join("tokenizer.json")).unwrap();
    let said = failure(to_v1(2, &copy, &WALKED.path("carried-on")), 2);
    assert!(said.contains("tokenizer.json"), "{said}");
    assert!(!WALKED.path("carried-on").exists());
}

/// At the width of GLM-5.2: every number of ranks that the boundaries allow.
#[test]
fn slices_of_full_width_experts_make_up_the_bytes_of_the_layer() {
    let geometry = Geometry::read(&repository("models/glm52/config.json")).unwrap();
    let sizes = (geometry.hidden_size, geometry.moe_intermediate_size);
    assert_eq!(sizes, (6144, 2048));
    let folder = tempfile::tempdir().unwrap();
    let manifest = packed_layer(folder.path(), &geometry, 3, 1, &[3, 4, 5], 11).unwrap();
    let whole = V2Layer::open(&folder.path().join(&manifest.shard), 3, sizes.0, sizes.1).unwrap();
    for tp in [1, 2, 4, 8, 16] {
        check_ranks(sizes.1, tp).unwrap();
        for rank in 0..tp {
            let path = folder.path().join(shard_name(3, rank));
            write_rank(&path, &whole, &manifest, sizes, (tp, rank)).unwrap();
        }
        check_slices(folder.path(), &whole, &manifest, tp, &Silent).unwrap();
        let ranks = V1Layer::open(folder.path(), 3, tp).unwrap();
        let back = folder.path().join("back.safetensors");
        let read = |expert, role| reassemble(&ranks.slices(expert, role)?, role);
        stream_shard(&back, 3, &manifest.bit_map, sizes, &read).unwrap();
        assert_eq!(sha256_file(&back).unwrap(), manifest.shard_sha256, "tp {tp}");
        // Ranks of another split are not taken for these.
        assert!(V1Layer::open(folder.path(), 3, tp + 1).is_err());
    }
    for tp in [3, 32] {
        let said = check_ranks(sizes.1, tp).unwrap_err().to_string();
        assert!(said.contains("128-element boundaries") && said.contains("1, 2, 4, 8, 16 ranks"), "{said}");
    }
}
