//! What a layer has to pass before the next begins: the ledger it is allocated from, its finished experts, its install.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};
use walk::checkpoint::WeightSource;
use walk::choose::fixed_point::Contexts;
use walk::config::choices::CodecName;
use walk::config::recipe::Decimal;
use walk::store::canonical_json::float17;
use walk::store::hash::{sha256_file, sha256_hex};
use walk::walk::emit::emit_layer;
use walk::walk::finals::encode_layer;
use walk::walk::install::Installed;
use walk::walk::install_audit::install_audit;
use walk::walk::probing::{ProbeLedger, allocate_layer, probe_layer};
use walk::walk::progress::Silent;
use walk::walk::rates::Allocation;

use crate::support::mini::Mini;
use crate::support::stage::Stage;
use crate::support::{command, cut_journal, files};

fn read(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The mini model with a recipe changed in place.
fn mini_with(change: impl FnOnce(&mut Value)) -> Mini {
    let mini = Mini::new();
    let path = mini.model().join("recipe.json");
    let mut recipe = read(&path);
    change(&mut recipe);
    std::fs::write(&path, recipe.to_string()).unwrap();
    mini
}

/// A change of a ledger, listed with the field it must be refused by.
type Change = fn(&mut ProbeLedger);

fn other() -> String {
    sha256_hex(b"something else")
}

const HEADER: [(&str, Change); 8] = [
    ("layer", |ledger| ledger.layer = 2),
    ("iteration", |ledger| ledger.iteration = 1),
    ("recipe_sha256", |ledger| ledger.recipe_sha256 = other()),
    ("state_sha256", |ledger| ledger.state_sha256 = other()),
    ("capture_sha256", |ledger| ledger.capture_sha256 = other()),
    ("source_inventory_sha256", |ledger| ledger.source_inventory_sha256 = other()),
    ("context_sha256", |ledger| ledger.context_sha256 = other()),
    ("candidates", |ledger| ledger.candidates = vec![3, 4]),
];

const EXPERTS: [(&str, Change); 4] = [
    ("experts", |ledger| drop(ledger.experts.pop())),
    ("experts[0].probe.expert", |ledger| drop(ledger.experts.remove(0))),
    ("experts[1].probe.expert", |ledger| ledger.experts[1] = ledger.experts[0].clone()),
    ("experts", |ledger| ledger.experts.push(ledger.experts[1].clone())),
];

const INPUTS: [(&str, Change); 10] = [
    ("experts[1].inputs.expert", |ledger| ledger.experts[1].inputs.expert = 0),
    ("experts[1].inputs.fit_rows", |ledger| ledger.experts[1].inputs.fit_rows += 1),
    ("experts[0].inputs.holdout_rows", |ledger| ledger.experts[0].inputs.holdout_rows -= 1),
    ("experts[1].inputs.fit_row_ids_sha256", |ledger| ledger.experts[1].inputs.fit_row_ids_sha256 = other()),
    ("experts[0].inputs.holdout_row_ids_sha256", |ledger| {
        ledger.experts[0].inputs.holdout_row_ids_sha256 = other();
    }),
    ("experts[0].inputs.fit_fallback", |ledger| ledger.experts[0].inputs.fit_fallback = None),
    ("experts[0].inputs.fit_fallback.row_ids_sha256", |ledger| {
        ledger.experts[0].inputs.fit_fallback.as_mut().unwrap().row_ids_sha256 = other();
    }),
    ("experts[1].inputs.bf16_sha256.up_proj", |ledger| {
        ledger.experts[1].inputs.bf16_sha256.insert("up_proj".into(), other());
    }),
    ("experts[1].inputs.vector_sha256.down_proj", |ledger| {
        ledger.experts[1].inputs.vector_sha256.insert("down_proj".into(), other());
    }),
    ("experts[0].inputs.vector_sha256.gate_proj", |ledger| {
        ledger.experts[0].inputs.vector_sha256.remove("gate_proj");
    }),
];

const MEASUREMENTS: [(&str, Change); 10] = [
    ("experts[0].probe.context", |ledger| ledger.experts[0].probe.context = [4, 4, 3]),
    ("experts[1].probe.tensors.up_proj", |ledger| {
        ledger.experts[1].probe.tensors.remove("up_proj");
    }),
    ("experts[0].probe.tensors.gate_proj.5", |ledger| {
        ledger.experts[0].probe.tensors.get_mut("gate_proj").unwrap().remove("5");
    }),
    ("experts[0].probe.tensors.gate_proj.6", |ledger| {
        let widths = ledger.experts[0].probe.tensors.get_mut("gate_proj").unwrap();
        widths.insert("6".into(), widths["5"].clone());
    }),
    ("experts[1].probe.tensors.down_proj.3.loss", |ledger| set(ledger, 1, "down_proj", "3", "NaN")),
    ("experts[1].probe.tensors.down_proj.5.loss", |ledger| set(ledger, 1, "down_proj", "5", "inf")),
    ("experts[0].probe.tensors.up_proj.3.loss", |ledger| set(ledger, 0, "up_proj", "3", "-1e-3")),
    ("experts[0].probe.tensors.up_proj.5.loss", |ledger| set(ledger, 0, "up_proj", "5", "much")),
    ("experts[0].probe.tensors.down_proj.4.loss", |ledger| set(ledger, 0, "down_proj", "4", "1e-3")),
    ("experts[1].probe.tensors.down_proj.5.scale", |ledger| {
        let widths = ledger.experts[1].probe.tensors.get_mut("down_proj").unwrap();
        widths.get_mut("5").unwrap().scale = "0".into();
    }),
];

fn set(ledger: &mut ProbeLedger, expert: usize, module: &str, bits: &str, loss: &str) {
    let widths = ledger.experts[expert].probe.tensors.get_mut(module).unwrap();
    widths.get_mut(bits).unwrap().loss = loss.into();
}

#[test]
fn a_ledger_of_other_work_is_refused_by_the_name_of_its_field() {
    let mini = Mini::new();
    let stage = Stage::new(&mini.model(), &mini.plan(), |_| {});
    let (path, capture) = (stage.path(), stage.capture());
    let work = stage.work(&path, &capture);
    let contexts: Contexts = vec![[4; 3]; 2];
    let (ledger, sha256) = probe_layer(&work, 0, &contexts, None, &Silent).unwrap();
    allocate_layer(&work, 0, &contexts, Some((&ledger, &sha256))).unwrap();
    let refused = |ledger: &ProbeLedger, contexts: &Contexts, field: &str| {
        let error = allocate_layer(&work, 0, contexts, Some((ledger, &sha256))).unwrap_err();
        let said = error.to_string();
        assert_eq!(error.exit_code(), 2);
        assert!(said.contains(&format!("field `{field}`, layer 1: ")), "{field}: {said}");
        assert!(said.contains("probe-iter-00.json") && said.contains("; wanted: "), "{said}");
    };
    for (field, change) in HEADER.iter().chain(&EXPERTS).chain(&INPUTS).chain(&MEASUREMENTS) {
        let mut changed = ledger.clone();
        change(&mut changed);
        refused(&changed, &contexts, field);
    }
    // The ledger is whole, but another map of contexts was asked for.
    refused(&ledger, &vec![[4; 3], [3, 4, 5]], "context_sha256");
    let error = allocate_layer(&work, 0, &contexts, None).unwrap_err().to_string();
    assert!(error.contains("probe-iter-00.json") && error.contains("no probe ledger"), "{error}");
}

#[test]
fn a_ledger_read_back_on_resume_is_held_against_the_work() {
    let mini = Mini::new();
    let work = mini.work("walk");
    command(&mini, &work).assert().success();
    // Layer 2 is the last: its input state is still there. The seal is forged too, or the journal's audit would speak.
    let name = "layer-002/probe-iter-00.json";
    let mut ledger = read(&work.join(name));
    ledger["experts"][1]["inputs"]["holdout_row_ids_sha256"] = json!(other());
    std::fs::write(work.join(name), ledger.to_string()).unwrap();
    let forged = sha256_file(work.join(name)).unwrap();
    cut_journal(&work, "layer-002/probe-iter-00", |seal| drop(seal.outputs.insert(name.to_owned(), forged)));
    let output = command(&mini, &work).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(
        said.contains("field `experts[1].inputs.holdout_row_ids_sha256`") && said.contains(name),
        "{said}"
    );
}

#[test]
fn a_walk_publishes_and_seals_its_audits() {
    let mini = Mini::new();
    let work = mini.work("walk");
    command(&mini, &work).assert().success();
    let journal = read(&work.join("JOURNAL.json"));
    let stages: Vec<&str> =
        journal["stages"].as_array().unwrap().iter().map(|seal| seal["stage"].as_str().unwrap()).collect();
    for layer in ["layer-001", "layer-002"] {
        let at = |stage: &str| stages.iter().position(|s| *s == format!("{layer}/{stage}")).unwrap();
        let order = ["final-experts", "interaction-audit", "emit", "install-audit"].map(at);
        assert!(order.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{stages:?}");
        for name in ["interaction-audit", "install-audit"] {
            let path = format!("{layer}/{name}.json");
            let sealed = &journal["stages"][at(name)]["outputs"][&path];
            assert_eq!(sealed.as_str().unwrap(), sha256_file(work.join(&path)).unwrap());
        }

        let audit = read(&work.join(layer).join("interaction-audit.json"));
        assert_eq!((&audit["promises"], &audit["passed"]), (&json!("probes"), &json!(true)));
        let summary = read(&work.join(layer).join("final-experts.json"));
        assert_eq!(audit["final_loss"], summary["heldout_loss"]);
        assert_eq!(audit["final_relative"], summary["heldout_relative"]);
        for name in ["relative_tolerance", "absolute_tolerance"] {
            assert_eq!(audit[name]["loosened"], false);
        }
        let ledger = read(&work.join(layer).join("probe-iter-00.json"));
        for (expert, entry) in
            audit["experts"].as_array().unwrap().iter().zip(ledger["experts"].as_array().unwrap())
        {
            let number = |value: &Value| value.as_str().unwrap().parse::<f64>().unwrap();
            let loss = |module: &str, bits: &Value| {
                number(&entry["probe"]["tensors"][module][bits.to_string()]["loss"])
            };
            let context = json!(4);
            let mut promised = loss("gate_proj", &context);
            for (place, module) in ["gate_proj", "up_proj", "down_proj"].iter().enumerate() {
                promised += loss(module, &expert["bits"][place]) - loss(module, &context);
            }
            assert_eq!(number(&expert["promise"]["loss"]), promised);
            assert!(number(&expert["final_loss"]) <= number(&expert["promise"]["limit"]));
        }

        let audit = read(&work.join(layer).join("install-audit.json"));
        assert_eq!(audit["passed"], true);
        assert_eq!(audit["outputs_sha256"][0], audit["outputs_sha256"][1]);
        assert_eq!(audit["least_hits"], 32);
        let shard = work.join(format!("v2/r7-experts-{layer}.safetensors"));
        assert_eq!(audit["shard_sha256"].as_str().unwrap(), sha256_file(shard).unwrap());
        // f32 against f64: far below the tolerance, but not nothing.
        let error: f64 = audit["relative_l2"].as_str().unwrap().parse().unwrap();
        assert!(error > 0.0 && error < 1e-5, "{error}");
    }
}

#[test]
fn fixed_bits_promise_nothing_and_the_audit_says_so() {
    let mini = Mini::new();
    let work = mini.work("walk");
    command(&mini, &work).args(["--recipe", "uniform-3"]).assert().success();
    let audit = read(&work.join("layer-001/interaction-audit.json"));
    assert_eq!(audit["promises"], "nothing-was-promised");
    for field in ["passed", "promised_loss", "promised_relative", "probe_sha256"] {
        assert!(audit[field].is_null(), "{field}");
    }
    assert!(audit["experts"][0]["promise"].is_null() && audit["experts"][0]["final_loss"].is_string());
    assert_eq!(read(&work.join("layer-001/install-audit.json"))["passed"], true);
}

#[test]
fn bits_that_are_their_context_are_promised_exactly() {
    let mini = mini_with(|recipe| {
        recipe["floor_bits"] = json!(4);
        recipe["candidate_bits"] = json!([4]);
        recipe["target"] = json!({"numerator": 4, "denominator": 1});
        recipe["interaction_tolerance"] = json!({"relative": 1e-15, "absolute": 1e-15});
    });
    let work = mini.work("walk");
    command(&mini, &work).assert().success();
    let audit = read(&work.join("layer-002/interaction-audit.json"));
    assert_eq!(audit["final_loss"], audit["promised_loss"]);
    for expert in audit["experts"].as_array().unwrap() {
        assert_eq!(expert["promise"]["basis"], "measured");
        assert_eq!(expert["promise"]["loss"], expert["final_loss"]);
    }
}

/// Runs a walk that must fail an audit of a layer in this file; returns what it said.
fn failed_audit(mini: &Mini, work: &Path, layer: usize, name: &str) -> String {
    let output = command(mini, work).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    let folder = format!("layer-{layer:03}");
    assert!(said.contains(&format!("{folder}/{name}.json, layer {layer}")), "{said}");
    assert_eq!(read(&work.join(format!("{folder}/{name}.json")))["passed"], false);
    let journal = read(&work.join("JOURNAL.json"));
    let sealed = |seal: &Value| seal["stage"] == format!("{folder}/{name}");
    assert!(!journal["stages"].as_array().unwrap().iter().any(sealed));
    assert!(!work.join(format!("states/{:03}", layer + 1)).exists());
    assert!(!work.join("WALK_COMPLETE.json").exists());
    said
}

#[test]
fn a_broken_promise_stops_the_walk_with_its_values() {
    let mini = Mini::new();
    let work = mini.work("walk");
    command(&mini, &work).assert().success();
    // Probes that promise a thousandth of what they measured: the allocation is the same, and no tolerance helps.
    let name = "layer-002/probe-iter-00.json";
    let mut ledger = read(&work.join(name));
    for entry in ledger["experts"].as_array_mut().unwrap() {
        for widths in entry["probe"]["tensors"].as_object_mut().unwrap().values_mut() {
            for measurement in widths.as_object_mut().unwrap().values_mut() {
                let loss: f64 = measurement["loss"].as_str().unwrap().parse().unwrap();
                measurement["loss"] = json!(float17(loss / 1024.0));
            }
        }
    }
    std::fs::write(work.join(name), ledger.to_string()).unwrap();
    let forged = sha256_file(work.join(name)).unwrap();
    cut_journal(&work, "layer-002/probe-iter-00", |seal| drop(seal.outputs.insert(name.to_owned(), forged)));
    let shard = work.join("v2/r7-experts-layer-002.safetensors");
    for made_after in [&shard, &work.join("WALK_COMPLETE.json")] {
        std::fs::remove_file(made_after).unwrap();
    }

    let said = failed_audit(&mini, &work, 2, "interaction-audit");
    assert!(!shard.exists(), "nothing is emitted");
    assert!(said.contains("2 of 2 experts"), "{said}");
    let audit = read(&work.join("layer-002/interaction-audit.json"));
    let experts = audit["experts"].as_array().unwrap();
    let named =
        experts.iter().find(|e| said.contains(&format!("layer 2, expert {}: ", e["expert"]))).unwrap();
    for value in [&named["final_loss"], &named["promise"]["loss"], &named["promise"]["limit"]] {
        assert!(said.contains(value.as_str().unwrap()), "{value}: {said}");
    }
    // Nothing was sealed, so the same command comes to the same end.
    assert_eq!(failed_audit(&mini, &work, 2, "interaction-audit"), said);
}

#[test]
fn an_install_outside_its_tolerance_stops_the_walk_with_its_values() {
    for tolerance in [
        json!({"max_abs": 1e-12, "relative_l2": 0.001953125}),
        json!({"max_abs": 0.03125, "relative_l2": 1e-12}),
    ] {
        let mini = mini_with(|recipe| recipe["install_tolerance"] = tolerance);
        let work = mini.work("walk");
        let said = failed_audit(&mini, &work, 1, "install-audit");
        let audit = read(&work.join("layer-001/install-audit.json"));
        let worst = &audit["worst"];
        assert!(said.contains(&format!("token {}, channel {}", worst["token"], worst["channel"])), "{said}");
        for value in [&worst["installed"], &worst["reference"], &audit["max_abs"], &audit["relative_l2"]] {
            assert!(said.contains(value.as_str().unwrap()), "{value}: {said}");
        }
        assert_eq!(failed_audit(&mini, &work, 1, "install-audit"), said);
    }
}

#[test]
fn loosened_tolerances_are_flagged() {
    let mini = mini_with(|recipe| {
        recipe["interaction_tolerance"] = json!({"relative": 0.5, "absolute": 1e-5});
        recipe["install_tolerance"] = json!({"max_abs": 0.03125, "relative_l2": 0.5});
    });
    let work = mini.work("walk");
    command(&mini, &work).assert().success();
    let audit = read(&work.join("layer-002/interaction-audit.json"));
    let loosened = json!({"value": float17(0.5), "default": float17(0.25), "loosened": true});
    assert_eq!(audit["relative_tolerance"], loosened);
    assert_eq!(audit["absolute_tolerance"]["loosened"], false);
    let audit = read(&work.join("layer-002/install-audit.json"));
    assert_eq!(audit["max_abs_tolerance"]["loosened"], false);
    assert_eq!(audit["relative_l2_tolerance"]["loosened"], true);
}

#[test]
fn an_audit_that_was_not_sealed_is_made_again_to_the_same_bytes() {
    let mini = Mini::new();
    let work = mini.work("walk");
    command(&mini, &work).assert().success();
    let whole = files(&work);
    for last in ["layer-002/final-experts", "layer-002/interaction-audit", "layer-002/emit"] {
        std::fs::remove_file(work.join("WALK_COMPLETE.json")).unwrap();
        std::fs::remove_file(work.join("layer-002/install-audit.json")).unwrap();
        cut_journal(&work, last, |_| {});
        command(&mini, &work).assert().success();
        assert_eq!(whole, files(&work), "cut after {last}");
    }
}

/// Installed experts with one thing wrong.
struct Wrong<'a> {
    experts: &'a Installed,
    fault: Fault,
}

#[derive(Debug, Clone, Copy)]
enum Fault {
    /// Gate stands for up, and up for gate.
    Swapped,
    /// Down as it is stored, `[K, N]`, square here.
    Transposed,
    /// The other expert's gate.
    Mistaken,
    /// A single value of up not finite.
    NotFinite,
}

impl WeightSource for Wrong<'_> {
    fn contains(&self, name: &str) -> bool {
        self.experts.contains(name)
    }

    fn load(&self, name: &str, shape: &[usize], dtype: DType, device: &Device) -> walk::Result<Tensor> {
        let load = |name: &str| self.experts.load(name, shape, dtype, device);
        match self.fault {
            Fault::Swapped if name.contains("gate_proj") => load(&name.replace("gate_proj", "up_proj")),
            Fault::Swapped if name.contains("up_proj") => load(&name.replace("up_proj", "gate_proj")),
            Fault::Transposed if name.contains("down_proj") => Ok(load(name)?.t()?.contiguous()?),
            Fault::Mistaken if name.contains("experts.0.gate_proj") => {
                load(&name.replace("experts.0", "experts.1"))
            }
            Fault::NotFinite if name.contains("experts.1.up_proj") => {
                let mut values: Vec<f32> = load(name)?.flatten_all()?.to_vec1()?;
                values[200] = f32::NAN;
                Ok(Tensor::from_vec(values, shape, device)?)
            }
            _ => load(name),
        }
    }
}

#[test]
fn experts_installed_wrongly_are_found() {
    let mini = Mini::new();
    let stage =
        Stage::new(&mini.model(), &mini.plan(), |recipe| *recipe = recipe.clone().uniform(3).unwrap());
    let (path, capture) = (stage.path(), stage.capture());
    let work = stage.work(&path, &capture);
    let contexts: Contexts = vec![[3; 3]; 2];
    let (allocation, sha256) = allocate_layer(&work, 0, &contexts, None).unwrap();
    let allocation = Allocation::Bits(allocation);
    let summary = encode_layer(&work, None, (&allocation, &sha256), &Silent).unwrap().summary;
    let emitted = emit_layer(&work, &summary, (&allocation, &sha256), &stage.environment(), &Silent).unwrap();
    let place = (path.as_path(), CodecName::Trellis);
    let experts = Installed::open(stage.source.clone(), place, &[stage.layer], &stage.geometry).unwrap();
    let audit = |experts: &dyn WeightSource| install_audit(&work, &emitted[0].1, experts, &Silent).unwrap();
    let right = audit(&experts);
    assert!(right.passed && right.refusal().is_none());
    for fault in [Fault::Swapped, Fault::Transposed, Fault::Mistaken, Fault::NotFinite] {
        let wrong = audit(&Wrong { experts: &experts, fault });
        assert_eq!(wrong.routes_sha256, right.routes_sha256);
        assert_ne!(wrong.outputs_sha256, right.outputs_sha256);
        let Decimal(found) = wrong.relative_l2;
        assert!(!wrong.passed && (found > 0.05 || found.is_nan()), "{fault:?}: {found}");
        assert!(wrong.refusal().unwrap().to_string().contains("token"), "{fault:?}");
    }
}
