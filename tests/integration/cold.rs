//! Experts that few tokens are routed to: whole walks on texts that are too short, and one expert for every way of having
//! too few rows.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use serde_json::{Value, json};
use walk::calibrate::covariance::covariance;
use walk::calibrate::rows::row_ids_sha256;
use walk::checkpoint::schema_v2::V2Layer;
use walk::checkpoint::{CheckpointDir, names};
use walk::choose::fixed_point::Contexts;
use walk::linalg::Matrix;
use walk::store::canonical_json::float17;
use walk::store::safetensors_write::{TensorData, write_safetensors};
use walk::store::seed::{SplitMix64, draw_seed};
use walk::walk::finals::encode_layer;
use walk::walk::layer::{ColdAudit, FallbackRecord};
use walk::walk::probing::{allocate_layer, probe_layer};
use walk::walk::progress::Silent;
use walk::walk::rates::{Allocation, Ledger};

use crate::support::files;
use crate::support::mini::{self, Mini, noise};
use crate::support::repository;
use crate::support::stage::Stage;

/// The tiny model up to its first MoE layer, which is layer 2: the walk of one layer takes seconds.
const LAYER: usize = 2;
const EXPERTS: usize = 8;
const WIDTH: usize = 256;
/// `min_fit_rows` of the tiny recipe.
const MIN_FIT_ROWS: usize = 256;

struct Tiny(tempfile::TempDir);

impl Tiny {
    fn new(prompts: &[Value]) -> Self {
        let tiny = Self(tempfile::tempdir().unwrap());
        std::fs::create_dir(tiny.model()).unwrap();
        for entry in std::fs::read_dir(repository("models/tiny")).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap();
            if !name.to_str().unwrap().contains(".safetensors") {
                std::fs::copy(&path, tiny.model().join(name)).unwrap();
            }
        }
        // A checkpoint with layers beyond those of its config is refused.
        let whole = CheckpointDir::open(repository("models/tiny")).unwrap();
        let beyond = |name: &str| (LAYER + 1..6).any(|layer| name.starts_with(&names::layer_prefix(layer)));
        let kept: Vec<TensorData<'_>> = whole
            .names()
            .filter(|name| !beyond(name))
            .map(|name| {
                let info = whole.info(name).unwrap().info;
                TensorData::from_bytes(name, info.dtype, &info.shape, whole.tensor_bytes(name).unwrap())
            })
            .collect();
        write_safetensors(tiny.model().join("model.safetensors"), &BTreeMap::new(), &kept).unwrap();
        let edit = |name: &str, change: &dyn Fn(&mut Value)| {
            let mut value = read(&tiny.model().join(name));
            change(&mut value);
            std::fs::write(tiny.model().join(name), value.to_string()).unwrap();
        };
        edit("config.json", &|config| {
            config["num_hidden_layers"] = json!(LAYER + 1);
            for field in ["indexer_types", "layer_types", "mlp_layer_types"] {
                config[field].as_array_mut().unwrap().truncate(LAYER + 1);
            }
        });
        edit("recipe.json", &|recipe| {
            recipe["scale_sample_tiles"] = json!(2);
            // A handful of held-out rows: one of them can make the widths of an expert interact by more than the default.
            recipe["interaction_tolerance"]["relative"] = json!("2");
        });
        let plan = json!({"version": 1, "prompts": prompts});
        std::fs::write(tiny.plan(), plan.to_string()).unwrap();
        tiny
    }

    fn model(&self) -> PathBuf {
        self.0.path().join("tiny")
    }

    fn plan(&self) -> PathBuf {
        self.0.path().join("plan.json")
    }

    /// Walks to the end and returns the work directory.
    fn walk(&self, threads: &str) -> PathBuf {
        let work = self.0.path().join("work").join(threads);
        let mut command = Command::cargo_bin("walk").unwrap();
        command.args(["--quiet", "--json", "--recipe", "fast", "--threads", threads, "--model"]);
        command.arg(self.model()).arg("--corpus").arg(self.plan()).arg("--work").arg(&work);
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(0), "{said}");
        assert!(said.contains("cold experts"), "{said}");
        assert!(work.join("WALK_COMPLETE.json").exists());
        work
    }
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The cold experts' record of a finished walk, held against its own arithmetic and the capture; and the result, 3.5 bits
/// to the unit.
fn audited(work: &Path) -> ColdAudit {
    let audit: ColdAudit =
        serde_json::from_value(read(&work.join("layer-002/cold-fallback-audit.json"))).unwrap();
    let routed = read(&work.join("layer-002/capture.json"))["routed_rows"].clone();
    assert_eq!(audit.min_fit_rows, MIN_FIT_ROWS);
    for cold in &audit.experts {
        // No expert has more than holdout_rows: n is all of the fit side.
        assert_eq!(routed[cold.expert], json!(cold.fit_rows + cold.holdout_rows));
        let fallback = cold.fit_fallback.as_ref().unwrap();
        assert_eq!((fallback.own_rows, fallback.wanted), (cold.fit_rows, MIN_FIT_ROWS - cold.fit_rows));
        assert_eq!(fallback.share, float17(fallback.wanted as f64 / MIN_FIT_ROWS as f64));
        assert_eq!((fallback.strata.len(), fallback.strata.iter().sum()), (4, fallback.rows));
        assert!(fallback.row_ids_sha256.len() == 64 && fallback.reason.contains("min_fit_rows"));
        if cold.holdout_rows == 0 {
            let holdout = cold.holdout_fallback.as_ref().unwrap();
            assert_eq!((holdout.own_rows, holdout.share.as_str()), (0, float17(1.0).as_str()));
            assert!(holdout.rows > 0 && holdout.reason.contains("held-out"));
        } else {
            assert_eq!(cold.holdout_fallback, None);
        }
    }
    let manifest = read(&work.join("v2/r7-experts-layer-002.json"));
    assert_eq!(
        (&manifest["allocation_bit_units"], &manifest["allocation_target_bpw"]),
        (&json!(84), &json!("3.5"))
    );
    let shard =
        V2Layer::open(&work.join("v2/r7-experts-layer-002.safetensors"), LAYER, WIDTH, WIDTH).unwrap();
    let bits: u32 =
        (0..EXPERTS).flat_map(|expert| shard.expert(expert).unwrap()).map(|linear| linear.bits).sum();
    assert_eq!(bits, 84);
    assert_eq!(read(&work.join("layer-002/interaction-audit.json"))["relative_tolerance"]["loosened"], true);
    audit
}

#[test]
fn a_short_plan_walks_with_cold_experts_to_the_same_bytes_on_any_threads() {
    let tiny = Tiny::new(&[noise("a", "calibrate", 1, 250), noise("b", "calibrate", 2, 200)]);
    let work = tiny.walk("2");
    let audit = audited(&work);
    assert!(audit.experts.len() >= 4, "{} cold experts", audit.experts.len());
    for cold in &audit.experts {
        // 452 rows are enough for every stratum to give a quarter of what is missing, and the hottest the rest.
        let Some(FallbackRecord { wanted, rows, strata, .. }) = &cold.fit_fallback else { unreachable!() };
        let quarter = wanted / 4;
        assert_eq!((rows, &strata[..]), (wanted, &[quarter, quarter, quarter, wanted - 3 * quarter][..]));
    }
    assert!(audit.experts.iter().any(|cold| cold.fit_rows > 0));
    assert_eq!(files(&work), files(&tiny.walk("1")));
}

#[test]
fn a_single_prompt_walks_on_all_the_rows_there_are() {
    let tiny = Tiny::new(&[noise("only", "calibrate", 3, 24)]);
    let audit = audited(&tiny.walk("2"));
    assert_eq!(audit.experts.len(), EXPERTS);
    for cold in &audit.experts {
        let fallback = cold.fit_fallback.as_ref().unwrap();
        assert!(fallback.rows < fallback.wanted, "fewer rows in the whole layer than asked");
        assert!(cold.fit_rows + fallback.rows <= 25);
    }
}

// From here on one expert of the mini model over made-up rows.

const MINI: usize = mini::WIDTH;

/// `rows` seeded random rows.
fn noise_rows(rows: usize) -> Matrix<f32> {
    let mut random = SplitMix64::new(17);
    let mut value = || (random.next_u64() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
    Matrix::new(rows, MINI, (0..rows * MINI).map(|_| value()).collect())
}

/// The mini model over made-up rows, with so many rows asked of an expert.
fn stage(min_fit_rows: usize) -> (Mini, Stage) {
    let mini = Mini::new();
    let stage = Stage::new(&mini.model(), &mini.plan(), |recipe| recipe.min_fit_rows = min_fit_rows);
    (mini, stage)
}

/// Whether a row is on the fit side.
fn fits(stage: &Stage, row: usize) -> bool {
    let version = &stage.recipe.recipe_version;
    !draw_seed(version, stage.layer, None, "row_split", row as u32).is_multiple_of(stage.recipe.fit_modulus)
}

/// Routes the rows that `chosen` picks by their place among those of their side to expert 0, all others to expert 1.
fn routes(stage: &Stage, rows: usize, chosen: impl Fn(bool, usize) -> bool) -> Vec<i32> {
    let mut seen = [0, 0];
    (0..rows)
        .map(|row| {
            let fit = fits(stage, row);
            let place = seen[usize::from(fit)];
            seen[usize::from(fit)] += 1;
            i32::from(!chosen(fit, place))
        })
        .collect()
}

/// Probes, allocates and encodes the layer; every loss is finite and the bits come out.
fn quantizes(stage: &Stage, rows: Matrix<f32>, ids: Vec<i32>) {
    let (path, capture) = (stage.path(), stage.made_up(rows, ids));
    let work = stage.work(&path, &capture);
    let contexts: Contexts = vec![[4; 3]; mini::EXPERTS];
    let (ledger, sha256) = probe_layer(&work, 0, &contexts, None, &Silent).unwrap();
    let (allocation, sha256) = allocate_layer(&work, 0, &contexts, Some((&ledger, &sha256))).unwrap();
    assert_eq!(allocation.bit_units, 21);
    let (ledger, allocation) = (Ledger::Bits(ledger), Allocation::Bits(allocation));
    let summary = encode_layer(&work, Some(&ledger), (&allocation, &sha256), &Silent).unwrap().summary;
    assert_eq!(summary.experts.len(), mini::EXPERTS);
}

/// What stops the layer when it is probed.
fn stops(stage: &Stage, rows: Matrix<f32>, ids: Vec<i32>) -> String {
    let (path, capture) = (stage.path(), stage.made_up(rows, ids));
    let work = stage.work(&path, &capture);
    let error = probe_layer(&work, 0, &vec![[4; 3]; mini::EXPERTS], None, &Silent).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    error.to_string()
}

#[test]
fn no_rows_at_all_are_replaced_by_the_fallback() {
    let (_mini, stage) = stage(40);
    let (rows, ids) = (noise_rows(300), vec![1; 300]);
    let (path, capture) = (stage.path(), stage.made_up(rows.clone(), ids.clone()));
    let work = stage.work(&path, &capture);
    let (inputs, expert) = (work.inputs(0).unwrap(), work.expert(0).unwrap());
    let (fit, holdout) = (inputs.fit_fallback.unwrap(), inputs.holdout_fallback.unwrap());
    assert_eq!((inputs.fit_rows, inputs.holdout_rows), (0, 0));
    assert_eq!((fit.rows, fit.strata, fit.share), (40, vec![10; 4], float17(1.0)));
    assert_eq!(expert.input_covariance().unwrap(), covariance(&expert.fallback).unwrap());
    // All held-out rows of the layer measure it, and none of them calibrates it.
    let held: Vec<usize> = (0..300).filter(|&row| !fits(&stage, row)).collect();
    assert_eq!((holdout.rows, holdout.row_ids_sha256), (held.len(), row_ids_sha256(&held)));
    quantizes(&stage, rows, ids);
}

#[test]
fn one_row_has_its_share_and_no_more() {
    let (_mini, stage) = stage(40);
    let rows = noise_rows(300);
    let ids = routes(&stage, 300, |fit, place| fit && place == 5);
    let (path, capture) = (stage.path(), stage.made_up(rows.clone(), ids.clone()));
    let work = stage.work(&path, &capture);
    let (inputs, expert) = (work.inputs(0).unwrap(), work.expert(0).unwrap());
    let fallback = inputs.fit_fallback.unwrap();
    assert_eq!((inputs.fit_rows, fallback.wanted, fallback.rows), (1, 39, 39));
    // Nine a stratum, the three left over from the hottest.
    assert_eq!((fallback.strata, fallback.share), (vec![9, 9, 9, 12], float17(39.0 / 40.0)));
    let (own, other) = (covariance(&expert.fit).unwrap(), covariance(&expert.fallback).unwrap());
    let mixed = expert.input_covariance().unwrap();
    for ((mixed, own), other) in mixed.data.iter().zip(&own.data).zip(&other.data) {
        assert!((mixed - (own / 40.0 + other * 39.0 / 40.0)).abs() < 1e-5);
    }
    quantizes(&stage, rows, ids);
}

#[test]
fn fewer_rows_than_the_matrix_is_wide_are_enough_where_no_more_are_asked() {
    let (_mini, stage) = stage(1);
    let rows = noise_rows(400);
    let ids = routes(&stage, 400, |fit, place| if fit { place < 20 } else { place < 30 });
    let (path, capture) = (stage.path(), stage.made_up(rows.clone(), ids.clone()));
    let inputs = stage.work(&path, &capture).inputs(0).unwrap();
    assert!(inputs.fit_rows == 20 && inputs.fit_rows < MINI);
    assert_eq!((inputs.fit_fallback, inputs.holdout_fallback), (None, None));
    quantizes(&stage, rows, ids);
}

#[test]
fn rows_that_are_all_zero_are_mended_by_the_fallback_and_refused_without_it() {
    let zeroed = |ids: &[i32]| {
        let mut rows = noise_rows(ids.len());
        for (row, _) in ids.iter().enumerate().filter(|(_, id)| **id == 0) {
            rows.data[row * MINI..(row + 1) * MINI].fill(0.0);
        }
        rows
    };
    let (_mini, asks) = stage(100);
    let ids = routes(&asks, 400, |_, place| place < 30);
    quantizes(&asks, zeroed(&ids), ids.clone());

    let (_mini, content) = stage(30);
    let said = stops(&content, zeroed(&ids), ids.clone());
    assert!(
        said.contains("layer 1, expert 0, tensor gate_proj: the covariance of 30 rows is zero"),
        "{said}"
    );
    // A fallback of nothing but zeros mends nothing.
    let said = stops(&asks, Matrix::zeros(400, MINI), ids);
    assert!(said.contains("layer 1, expert") && said.contains("is zero"), "{said}");
}

#[test]
fn a_layer_with_fewer_rows_than_asked_gives_all_it_has() {
    let (_mini, stage) = stage(1000);
    let rows = noise_rows(200);
    let ids = routes(&stage, 200, |_, place| place < 10);
    let (path, capture) = (stage.path(), stage.made_up(rows.clone(), ids.clone()));
    let inputs = stage.work(&path, &capture).inputs(0).unwrap();
    let fallback = inputs.fit_fallback.unwrap();
    let others: Vec<usize> = (0..200).filter(|&row| fits(&stage, row) && ids[row] != 0).collect();
    assert_eq!((inputs.fit_rows, fallback.wanted, fallback.rows), (10, 990, others.len()));
    assert_eq!(fallback.row_ids_sha256, row_ids_sha256(&others));
    assert_eq!(fallback.share, float17(0.99));
    quantizes(&stage, rows, ids);
}

#[test]
fn an_expert_without_a_row_to_measure_on_is_refused() {
    let (_mini, mut stage) = stage(40);
    // A split that holds none of the first forty rows out.
    let none_held = |modulus: &u64| {
        stage.recipe.fit_modulus = *modulus;
        (0..40).all(|row| fits(&stage, row))
    };
    stage.recipe.fit_modulus = (900..=1000).find(none_held).unwrap();
    let said = stops(&stage, noise_rows(40), vec![1; 40]);
    assert!(said.contains("layer 1, expert") && said.contains("calibration corpus"), "{said}");
}
