//! The bars of the whole tiny walk. Minutes, so they run on demand: `cargo test --release -- --ignored tiny_walk`.
//!
//! `FINISHED_TINY_WALK` names the work directory of a finished default walk, whose report is then taken instead of walking
//! again; the bar of its time is held where it was walked (`.ci/run`).

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::files;

/// One finished walk.
pub struct Walked {
    report: Value,
    seconds: f64,
    peak_bytes: Option<u64>,
    files: BTreeMap<String, String>,
}

impl Walked {
    pub fn heldout(&self) -> Vec<f64> {
        let layers = self.report["layers"].as_array().unwrap();
        layers.iter().map(|layer| layer["heldout_error"].as_f64().unwrap()).collect()
    }

    pub fn score(&self, field: &str) -> f64 {
        self.report["evaluation"]["all"][field].as_f64().unwrap()
    }
}

/// Peak resident memory of a running child, where the system tells.
fn peak_bytes(child: &Child) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}

pub fn walk(work: &Path, recipe: &str, threads: &str) -> Walked {
    let started = Instant::now();
    let mut child = Command::new(assert_cmd::cargo::cargo_bin!("walk"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["--model", "tiny", "--corpus", "corpus/plan.json", "--json", "--quiet"])
        .args(["--recipe", recipe, "--threads", threads, "--work"])
        .arg(work)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        stdout.read_to_string(&mut text).unwrap();
        text
    });
    let mut peak = None;
    let status = loop {
        peak = peak.max(peak_bytes(&child));
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    assert_eq!(status.code(), Some(0));
    let text = reader.join().unwrap();
    let report: Value = serde_json::from_str(text.lines().next_back().unwrap()).unwrap();
    let walked = Walked {
        report: report["data"].clone(),
        seconds: started.elapsed().as_secs_f64(),
        peak_bytes: peak,
        files: files(work),
    };
    println!(
        "{recipe}, {threads} threads: {:.0} s, peak {:?} MiB, held-out {:.6?}, perplexity {:.4} -> {:.4}, KL {:.5} ± {:.5}",
        walked.seconds,
        walked.peak_bytes.map(|bytes| bytes >> 20),
        walked.heldout(),
        walked.score("source_perplexity"),
        walked.score("result_perplexity"),
        walked.score("kl_mean"),
        walked.score("kl_standard_error"),
    );
    walked
}

/// The tiny recipe with some fields changed, as a file.
pub fn recipe(folder: &Path, name: &str, changes: Value) -> String {
    let mut recipe: Value =
        serde_json::from_slice(&std::fs::read("models/tiny/recipe.json").unwrap()).unwrap();
    recipe["variant"] = name.into();
    for (field, value) in changes.as_object().unwrap() {
        recipe[field] = value.clone();
    }
    let path = folder.join(format!("{name}.json"));
    std::fs::write(&path, recipe.to_string()).unwrap();
    path.to_str().unwrap().to_owned()
}

/// One allocation, draw 0, source order, down towards its source weight: a layer without all that makes it better.
pub fn plain() -> Value {
    json!({
        "search": false, "draws": 1, "permutations": ["identity"], "scale_families": ["identity"],
        "fixed_point_iterations": 1, "down_target": "source"
    })
}

#[test]
#[ignore = "several minutes"]
fn the_tiny_walk_meets_its_bars() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, recipe: &str, threads: &str| walk(&folder.path().join(name), recipe, threads);
    let whole = match std::env::var_os("FINISHED_TINY_WALK") {
        Some(work) => walk(&std::path::absolute(work).unwrap(), "default", "2"),
        None => run("default", "default", "2"),
    };
    assert!(whole.seconds < 720.0, "{} s", whole.seconds);
    let layers = whole.report["layers"].as_array().unwrap();
    assert_eq!(layers.len(), 3);
    for layer in layers {
        assert_eq!(layer["bits_per_weight"], 3.5);
        let counts = layer["bit_counts"].as_object().unwrap();
        let (tensors, bits) = counts.iter().fold((0, 0), |(tensors, sum), (bits, count)| {
            let count = count.as_u64().unwrap();
            (tensors + count, sum + bits.parse::<u64>().unwrap() * count)
        });
        assert_eq!((tensors, bits), (24, 84));
    }
    let expected: Value =
        serde_json::from_slice(&std::fs::read("models/tiny/expected.json").unwrap()).unwrap();
    let perplexity = expected["perplexity"].as_f64().unwrap();
    assert!((whole.score("source_perplexity") / perplexity - 1.0).abs() < 1e-5);

    let plain = plain();
    let thin = run("thin", &recipe(folder.path(), "thin", plain.clone()), "2");
    let ratios: Vec<f64> = whole.heldout().iter().zip(thin.heldout()).map(|(a, b)| a / b).collect();
    let mean = (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
    println!("held-out error over that of the thin layer: {ratios:.3?}, geometric mean {mean:.3}");
    assert!(mean <= 0.92, "{mean}");

    let uniform = |bits: u32| {
        let mut changes = plain.clone();
        changes["floor_bits"] = bits.into();
        changes["candidate_bits"] = json!([bits]);
        changes["target"] = json!({"numerator": bits, "denominator": 1});
        changes["fixed_bits"] = bits.into();
        let name = format!("thin-{bits}");
        run(&name, &recipe(folder.path(), &name, changes), "2")
    };
    let (three, five) = (uniform(3), uniform(5));
    for ((low, high), error) in five.heldout().into_iter().zip(three.heldout()).zip(whole.heldout()) {
        assert!(low < error && error < high, "{low} {error} {high}");
    }
    assert!(whole.score("kl_mean") <= 0.9 * three.score("kl_mean"));

    let fast = run("fast", "fast", "2");
    assert!(fast.seconds < 240.0, "{} s", fast.seconds);
    if cfg!(target_os = "linux") {
        for walked in [&whole, &thin, &fast] {
            assert!(walked.peak_bytes.unwrap() < 2 << 30, "{:?} bytes", walked.peak_bytes);
        }
    }
    let single = run("single", "fast", "1");
    assert_eq!(fast.files, single.files, "1 and 2 threads");
}
