//! Walks with the KAIJU1 codec through the built binary: walked, repeated, stopped, broken, replayed, assembled, evaluated,
//! and refused.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use assert_cmd::Command;
use serde_json::{Value, json};
use walk::checkpoint::kaiju1_manifest::Kaiju1Manifest;
use walk::checkpoint::kaiju1_shard::Kaiju1Layer;
use walk::checkpoint::names::Projection;
use walk::codec::kaiju::{CodeWidth, KaijuTensor};
use walk::codec::trellis::search::best_search;
use walk::config::{Model, Recipe};
use walk::error::Error;
use walk::store::atomic::write_json_atomic;
use walk::store::hash::sha256_file;
use walk::walk::driver::Walk;
use walk::walk::open::WalkOptions;
use walk::walk::progress::Observer;

use crate::support::mini::{EXPERTS, Mini, WIDTH};
use crate::support::{command, files, forge_journal};

/// Width of the wide model's experts.
const INNER: usize = 2 * WIDTH;

/// A model with an MTP block, walked at one setting and by expert; what the walks reported.
struct Walked {
    mini: Mini,
    report: Value,
    by_expert: Value,
}

impl Walked {
    fn work(&self) -> PathBuf {
        self.mini.work("v2")
    }

    fn rungs(&self) -> PathBuf {
        self.mini.work("rungs")
    }

    fn copy(&self, from: &Path, name: &str) -> PathBuf {
        let to = self.mini.work(name);
        copy_dir(from, &to);
        to
    }
}

static WALKED: LazyLock<Walked> = LazyLock::new(|| {
    let mini = Mini::wide();
    let report = walk_json(command(&mini, &mini.work("v2")).args(["--codec", "kaiju1", "--keep-states"]));
    let recipe = by_expert(&mini);
    let by_expert = walk_json(command(&mini, &mini.work("rungs")).arg("--recipe").arg(recipe));
    Walked { mini, report, by_expert }
});

/// The mini's recipe with three settings to choose from, and 3.2 bits a weight: room for one expert of two at 64 bits.
fn by_expert(mini: &Mini) -> PathBuf {
    let recipe = Recipe::load(mini.model().join("recipe.json")).unwrap();
    let knobs = serde_json::from_value(json!({
        "rungs": [
            {"code_bits": 56, "hi_frac": 0.025},
            {"code_bits": 64, "hi_frac": 0.025},
            {"code_bits": 64, "hi_frac": 0.25},
        ],
        "target": {"numerator": 16, "denominator": 5},
    }));
    let path = mini.path().join("by-expert.json");
    write_json_atomic(&path, &recipe.with_kaiju1(knobs.unwrap()).unwrap()).unwrap();
    path
}

/// The report of a walk that has to succeed.
fn walk_json(walk: &mut Command) -> Value {
    let output = walk.arg("--json").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    serde_json::from_str::<Value>(text.lines().last().unwrap()).unwrap()["data"].take()
}

/// A command besides the walk; what it prints as JSON.
fn success(arguments: &[&dyn AsRef<std::ffi::OsStr>]) -> Value {
    let output = other(arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    serde_json::from_str::<Value>(text.lines().last().unwrap()).unwrap()["data"].take()
}

fn other(arguments: &[&dyn AsRef<std::ffi::OsStr>]) -> Command {
    let mut command = Command::cargo_bin("walk").unwrap();
    command.args(arguments).env("RAYON_NUM_THREADS", "2");
    command
}

/// What a command that has to fail with this code says.
fn failure(command: &mut Command, code: i32) -> String {
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert!(!said.contains("panicked"), "{said}");
    said
}

fn audit_of(dir: &Path) -> (bool, String) {
    let output = other(&[&"audit", &"--quiet", &"--json", &dir]).output().unwrap();
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(!said.contains("panicked"), "{said}");
    (output.status.code() == Some(0), said)
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        match path.is_dir() {
            true => copy_dir(&path, &target),
            false => drop(std::fs::copy(&path, &target).unwrap()),
        }
    }
}

/// Every payload of a layer's shard.
fn payloads(work: &Path, layer: usize) -> Vec<KaijuTensor> {
    let path = work.join(format!("kaiju1/kaiju1-experts-layer-{layer:03}.safetensors"));
    let opened = Kaiju1Layer::open(&path, layer, WIDTH, INNER).unwrap();
    let expert = |id| Projection::ALL.map(|role| opened.tensor(id, role).unwrap());
    (0..EXPERTS).flat_map(expert).collect()
}

fn bits_of(tensors: &[KaijuTensor]) -> u64 {
    tensors.iter().map(|tensor| 8 * tensor.payload().len() as u64).sum()
}

const WEIGHTS: u64 = (EXPERTS * 3 * WIDTH * INNER) as u64;

#[test]
fn a_walk_reports_bits_counted_from_bytes_and_its_divergence() {
    let (work, report) = (WALKED.work(), &WALKED.report);
    assert_eq!(report["codec"], "kaiju1 (v2: p64 hi 0.025)");
    let mut bits = 0;
    for (layer, row) in [1, 2].into_iter().zip(report["layers"].as_array().unwrap()) {
        let tensors = payloads(&work, layer);
        assert!(tensors.iter().all(|tensor| tensor.code() == CodeWidth::P64));
        let found = bits_of(&tensors);
        assert_eq!(row["bits_per_weight"].as_f64().unwrap(), found as f64 / WEIGHTS as f64);
        assert_eq!(row["setting_counts"], json!({"p64 hi 0.025": EXPERTS}));
        let error = row["heldout_error"].as_f64().unwrap();
        assert!(error > 1e-4 && error < 0.1, "{error}");
        let manifest = Kaiju1Manifest::read(&work.join("kaiju1"), layer).unwrap();
        assert_eq!((manifest.layer_bits, manifest.weights), (found, WEIGHTS));
        bits += found;
    }
    assert_eq!(report["bits_per_weight"].as_f64().unwrap(), bits as f64 / (2 * WEIGHTS) as f64);
    assert!(report["evaluation"]["all"]["kl_mean"].as_f64().unwrap() > 0.0);
    assert!(work.join("WALK_COMPLETE.json").exists() && !work.join("v2").exists());
    assert!(!work.join("search").exists(), "nothing is searched");
    let (passed, said) = audit_of(&work);
    assert!(passed, "{said}");
    let (passed, said) = audit_of(&work.join("kaiju1"));
    assert!(passed, "{said}");
    // A shard alone is no layer that may be passed over.
    let folder = WALKED.mini.path().join("without-manifest");
    copy_dir(&work.join("kaiju1"), &folder);
    std::fs::remove_file(folder.join("kaiju1-experts-layer-001.json")).unwrap();
    let (passed, said) = audit_of(&folder);
    assert!(!passed && said.contains("kaiju1-experts-layer-001.json"), "{said}");
}

#[test]
fn the_number_of_threads_changes_no_byte() {
    let work = WALKED.mini.work("threads");
    let mut again = command(&WALKED.mini, &work);
    again.args(["--codec", "kaiju1", "--keep-states", "--threads", "1"]).assert().success();
    assert_eq!(files(&work), files(&WALKED.work()));
}

/// Asks to stop once so many units are done.
struct StopAfter(usize, AtomicUsize);

impl Observer for StopAfter {
    fn begin(&self, _: &str, _: Option<usize>, _: u64) {}
    fn advance(&self, item: &str) {
        if item.starts_with("expert") && !item.contains("adopted") {
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }
    fn end(&self) {}
    fn note(&self, _: &str) {}
    fn stop_requested(&self) -> bool {
        self.1.load(Ordering::Relaxed) >= self.0
    }
}

#[test]
fn a_stopped_walk_goes_on_and_ends_in_the_same_bytes() {
    let (mini, work) = (&WALKED.mini, WALKED.mini.work("stopped"));
    let model = Model::resolve(mini.model().to_str().unwrap(), None, None).unwrap();
    let recipe = Recipe::load(by_expert(mini)).unwrap();
    let mut stops = 0;
    loop {
        let observer = StopAfter(1, AtomicUsize::new(0));
        let options = WalkOptions::default();
        let mut walk = Walk::open(&model, recipe.clone(), &mini.plan(), &work, options, &observer).unwrap();
        let codec = walk.codec(best_search()).unwrap();
        match walk.run(&codec, &observer) {
            Ok(outcome) => break assert!(outcome.complete),
            Err(Error::Interrupted(_)) => stops += 1,
            Err(other) => panic!("{other}"),
        }
        assert!(stops < 50, "it goes on each time");
    }
    assert!(stops >= 4, "{stops} stops");
    assert_eq!(files(&work), files(&WALKED.rungs()));
}

#[test]
fn experts_get_their_rungs_by_measured_loss_within_the_budget() {
    let work = WALKED.rungs();
    let report = &WALKED.by_expert;
    assert_eq!(report["codec"], "kaiju1 (by expert, 3 settings)");
    for layer in [1, 2] {
        let folder = work.join(format!("layer-{layer:03}"));
        let (allocation, ledger) =
            (read(&folder.join("allocation-iter-00.json")), read(&folder.join("probe-iter-00.json")));
        let found = bits_of(&payloads(&work, layer));
        assert_eq!(allocation["bits"], found);
        assert_eq!(allocation["budget_bits"], 16 * WEIGHTS / 5);
        assert!(found <= 16 * WEIGHTS / 5);
        // By hand: of all pairs within the budget the one that loses least by mass.
        let mass = |id: usize| allocation["mass_units"][id].as_str().unwrap().parse::<f64>().unwrap();
        let loss = |id: usize, rung: usize| -> f64 {
            let loss = ledger["experts"][id]["probe"]["rungs"][rung]["loss"].as_str().unwrap();
            mass(id) * loss.parse::<f64>().unwrap()
        };
        let cost = |rung: usize| allocation["expert_bits"][rung].as_u64().unwrap();
        let best = (0..9)
            .map(|pair| [pair / 3, pair % 3])
            .filter(|pair| pair.iter().map(|&rung| cost(rung)).sum::<u64>() <= 16 * WEIGHTS / 5)
            .min_by(|a, b| {
                let sum = |pair: &[usize; 2]| loss(0, pair[0]) + loss(1, pair[1]);
                sum(a).total_cmp(&sum(b))
            });
        assert_eq!(allocation["rungs"], json!(best.unwrap()));
        // What was promised of the whole expert is what it has.
        let audit = read(&folder.join("interaction-audit.json"));
        for expert in audit["experts"].as_array().unwrap() {
            assert_eq!(expert["promise"]["basis"], "measured");
            assert_eq!(expert["promise"]["loss"], expert["final_loss"]);
        }
    }
    assert!(report["bits_per_weight"].as_f64().unwrap() <= 3.2);
    let (passed, said) = audit_of(&work);
    assert!(passed, "{said}");
}

#[test]
fn a_changed_byte_of_a_payload_is_found_and_never_walked_on_from() {
    let work = WALKED.copy(&WALKED.work(), "tampered");
    let shard = work.join("kaiju1/kaiju1-experts-layer-001.safetensors");
    let mut bytes = std::fs::read(&shard).unwrap();
    let at = bytes.len() - 7;
    bytes[at] ^= 1;
    std::fs::write(&shard, &bytes).unwrap();
    let (passed, said) = audit_of(&work);
    assert!(!passed && said.contains("kaiju1-experts-layer-001.safetensors"), "{said}");
    let said = failure(command(&WALKED.mini, &work).args(["--codec", "kaiju1", "--keep-states"]), 2);
    assert!(said.contains("kaiju1-experts-layer-001.safetensors"), "{said}");
    let said = failure(&mut other(&[&"replay", &"--quiet", &"--work", &work]), 2);
    assert!(said.contains("kaiju1-experts-layer-001.safetensors"), "{said}");

    // Sealed anew, manifest and all, the payload still is not what was encoded.
    let manifest = work.join("kaiju1/kaiju1-experts-layer-001.json");
    let mut forged = read(&manifest);
    let sha256 = sha256_file(&shard).unwrap();
    forged["shard_sha256"] = json!(sha256);
    write_json_atomic(&manifest, &forged).unwrap();
    let manifest_sha256 = sha256_file(&manifest).unwrap();
    forge_journal(&work, |seals| {
        for seal in seals {
            for (name, hash) in [("safetensors", &sha256), ("json", &manifest_sha256)] {
                if let Some(sealed) = seal.outputs.get_mut(&format!("kaiju1/kaiju1-experts-layer-001.{name}"))
                {
                    sealed.clone_from(hash);
                }
            }
        }
    });
    let (passed, said) = audit_of(&work);
    assert!(!passed && said.contains("it does not decode to what was encoded"), "{said}");
    let (passed, said) = audit_of(&work.join("kaiju1"));
    assert!(!passed && said.contains("its payload's hash is"), "{said}");
}

#[test]
fn a_forged_allocation_is_found() {
    let work = WALKED.copy(&WALKED.rungs(), "forged");
    let path = work.join("layer-001/allocation-iter-00.json");
    let mut record = read(&path);
    let rung = record["rungs"][0].as_u64().unwrap();
    record["rungs"][0] = json!((rung + 1) % 3);
    write_json_atomic(&path, &record).unwrap();
    let sha256 = sha256_file(&path).unwrap();
    forge_journal(&work, |seals| {
        for sealed in
            seals.iter_mut().filter_map(|seal| seal.outputs.get_mut("layer-001/allocation-iter-00.json"))
        {
            sealed.clone_from(&sha256);
        }
    });
    let (passed, said) = audit_of(&work);
    assert!(!passed && said.contains("it is not what its masses and probes come to"), "{said}");
    assert!(said.contains("its settings are not those of the allocation"), "{said}");
}

#[test]
fn a_replay_makes_the_same_states() {
    let report = success(&[&"replay", &"--quiet", &"--json", &"--work", &WALKED.work()]);
    assert_eq!(report["equal"], true, "{report}");
    // Without the states before finished layers as well, from shard to shard.
    let report = success(&[&"replay", &"--quiet", &"--json", &"--work", &WALKED.rungs()]);
    assert_eq!(report["equal"], true, "{report}");
}

#[test]
fn an_assembled_walk_says_what_it_is_and_evaluates_as_the_walk_did() {
    let out = WALKED.mini.path().join("assembled");
    let assemble = |work: &Path, out: &Path| {
        success(&[&"assemble", &"--quiet", &"--json", &"--work", &work, &"--out", &out])
    };
    assemble(&WALKED.work(), &out);
    let config = read(&out.join("config.json"));
    let quantization = &config["quantization_config"];
    assert_eq!(*quantization, read(&out.join("quantization_config.json")));
    assert_eq!(quantization["quant_method"], "kaiju1");
    let block = &quantization["kaiju1_routed_experts"];
    let bits: u64 = [1, 2].iter().map(|&layer| bits_of(&payloads(&WALKED.work(), layer))).sum();
    for (key, value) in [
        ("schema", json!("kaiju1-complete-checkpoint-v1")),
        ("preset", json!("v2")),
        ("settings", json!("one")),
        ("code_bits", json!(64)),
        ("hi_frac", json!(0.025)),
        ("layout_version", json!(1)),
        ("moe_layers", json!([1, 2])),
        ("mtp_layer_3", json!("carried")),
        ("payload_bits", json!(bits.to_string())),
    ] {
        assert_eq!(block[key], value, "{key}");
    }
    assert!(quantization["r7_routed_experts"].is_null());
    let report = success(&[&"audit", &"--quiet", &"--json", &out, &"--carrier", &WALKED.mini.model()]);
    assert_eq!(report["subject"], "complete checkpoint of KAIJU1 experts");

    let (model, plan) = (WALKED.mini.model(), WALKED.mini.plan());
    let evaluated =
        success(&[&"eval", &"--quiet", &"--json", &out, &"--reference", &model, &"--corpus", &plan]);
    assert_eq!(evaluated["evaluation"], WALKED.report["evaluation"], "digit for digit");

    // A method that no carried tensor is of, with the manifest's hashes made good.
    let forged = WALKED.mini.path().join("forged-method");
    copy_dir(&out, &forged);
    for name in ["config.json", "quantization_config.json"] {
        let path = forged.join(name);
        let text = std::fs::read_to_string(&path).unwrap();
        let changed = text.replace("\"quant_method\": \"kaiju1\"", "\"quant_method\": \"exl3\"");
        assert_ne!(text, changed);
        std::fs::write(&path, changed).unwrap();
    }
    crate::publish::sign(&forged, &["config.json", "quantization_config.json"]);
    let (passed, said) = audit_of(&forged);
    assert!(!passed && said.contains("quant_method"), "{said}");

    let rungs = WALKED.mini.path().join("assembled-rungs");
    assemble(&WALKED.rungs(), &rungs);
    let block = &read(&rungs.join("config.json"))["quantization_config"]["kaiju1_routed_experts"];
    let manifest = |layer| Kaiju1Manifest::read(&rungs, layer).unwrap();
    let mixed = [1, 2].iter().any(|&layer| {
        let manifest = manifest(layer);
        let first = manifest.settings.values().next().copied();
        manifest.settings.values().any(|setting| Some(*setting) != first)
    });
    assert!(mixed, "the budget has room for one expert at 64 bits only");
    assert_eq!((&block["settings"], &block["code_bits"]), (&json!("by_expert"), &Value::Null));
    assert!(block["rungs"].as_array().unwrap().len() > 1);
    let (passed, said) = audit_of(&rungs);
    assert!(passed, "{said}");

    let said = failure(&mut other(&[&"convert", &"--quiet", &"--to", &"v1", &"--tp", &"2", &out, &rungs]), 2);
    assert!(said.contains("KAIJU1: rank slices are of the trellis codec only"), "{said}");
}

#[test]
fn what_kaiju1_has_no_use_for_is_refused_before_anything_is_written() {
    let mini = &WALKED.mini;
    let work = mini.work("refused");
    let by_expert = by_expert(mini);
    let low = mini.path().join("low.json");
    let mut recipe = read(&by_expert);
    recipe["kaiju1"]["target"] = json!({"numerator": 5, "denominator": 2});
    std::fs::write(&low, recipe.to_string()).unwrap();
    let low = low.to_str().unwrap();
    for (arguments, parts) in [
        (vec!["--preset", "v1"], ["--preset", "--codec kaiju1"]),
        (vec!["--hi-frac", "0.1"], ["--hi-frac", "--codec kaiju1"]),
        (vec!["--codec", "kaiju1", "--hi-frac", "1.5"], ["kaiju1.hi_frac", "0 to below 1"]),
        (vec!["--codec", "kaiju1", "--code-bits", "57"], ["kaiju1.code_bits", "56 or 64"]),
        (vec!["--codec", "kaiju1", "--recipe", "uniform-3"], ["fixed_bits", "kaiju1 has no use for it"]),
        (vec!["--codec", "kaiju1", "--target-bpw", "x"], ["--target-bpw", "3.1"]),
        (vec!["--codec", "kaiju1", "--target-bpw", "2.5"], ["kaiju1.target", "cheapest rung"]),
        (vec!["--recipe", low], ["kaiju1.target", "cheapest rung"]),
    ] {
        let said = failure(command(mini, &work).args(&arguments), 2);
        assert!(parts.iter().all(|part| said.contains(part)), "{arguments:?}: {said}");
        assert!(!work.exists(), "{arguments:?}");
    }
    // A work directory is one codec's.
    let copy = WALKED.copy(&WALKED.work(), "other-codec");
    let said = failure(&mut command(mini, &copy), 2);
    assert!(said.contains("recipe") || said.contains("numeric_fingerprint"), "{said}");
    let (model, plan) = (mini.model(), mini.plan());
    let study = mini.path().join("study");
    for name in ["ablate", "pilot"] {
        let mut command = other(&[&name]);
        command.args(["sigma-reg"].iter().filter(|_| name == "pilot"));
        command.arg("--model").arg(&model).arg("--corpus").arg(&plan).args(["--layers", "1", "--quiet"]);
        command.arg("--recipe").arg(&by_expert).arg("--work").arg(&study);
        let said = failure(&mut command, 2);
        assert!(said.contains("studies are of the trellis codec's ingredients"), "{name}: {said}");
        assert!(!study.exists());
    }
    let estimate: [&dyn AsRef<std::ffi::OsStr>; 8] =
        [&"estimate", &"--quiet", &"--model", &model, &"--corpus", &plan, &"--recipe", &by_expert];
    let said = failure(&mut other(&estimate), 2);
    assert!(said.contains("trellis"), "{said}");
}

#[test]
fn a_manifest_or_shard_of_another_form_is_refused_by_name() {
    let folder = WALKED.work().join("kaiju1");
    let path = folder.join("kaiju1-experts-layer-001.json");
    let whole = read(&path);
    let check = |value: &Value| {
        let parsed = Kaiju1Manifest::parse(&path, 1, value.to_string().as_bytes());
        parsed.and_then(|manifest| manifest.check_whole(&path, EXPERTS)).map_err(|error| error.to_string())
    };
    check(&whole).unwrap();
    let module = "model.layers.1.mlp.experts.0.gate_proj";
    for (pointer, value, part) in [
        ("/marker", json!("X"), "marker"),
        ("/schema_version", json!(2), "schema_version"),
        ("/layout_version", json!(2), "layout_version"),
        ("/layer", json!(2), "layer"),
        ("/shard", json!("../x"), "shard"),
        ("/layer_bits", json!(1), "layer_bits"),
        ("/bits_per_weight", json!("3"), "layer_bits"),
        ("/settings", json!({}), "settings"),
        ("/payload_bits/model.layers.1.mlp.experts.0.gate_proj", json!(8), "layer_bits"),
        ("/final_expert_artifact_sha256", json!({}), "final_expert_artifact_sha256"),
        ("/roundtrip_hashes/model.layers.1.mlp.experts.0.gate_proj/packed_sha256", json!("0"), module),
        ("/tensor_provenance", json!([]), "invalid"),
    ] {
        let mut changed = whole.clone();
        *changed.pointer_mut(pointer).unwrap() = value;
        let said = check(&changed).unwrap_err();
        assert!(said.contains(part), "{pointer}: {said}");
    }
    let mut changed = whole.clone();
    changed["more"] = json!(1);
    assert!(check(&changed).unwrap_err().contains("more"));
    changed = whole;
    changed["tensor_provenance"][module]["full_k"] = json!(u64::MAX);
    check(&changed).unwrap_err();

    let shard = folder.join("kaiju1-experts-layer-001.safetensors");
    let open = |layer, hidden, inner| {
        let opened = Kaiju1Layer::open(&shard, layer, hidden, inner);
        opened.and_then(|opened| opened.tensor(0, Projection::Gate)).map_err(|error| error.to_string())
    };
    assert!(open(2, WIDTH, INNER).unwrap_err().contains("kaiju1_layer"));
    assert!(open(1, INNER, WIDTH).unwrap_err().contains("gate_proj.kaiju1"));
    let opened = Kaiju1Layer::open(&shard, 1, WIDTH, INNER).unwrap();
    assert!(
        opened.tensor(EXPERTS, Projection::Gate).unwrap_err().to_string().contains("experts.2.gate_proj")
    );
}
