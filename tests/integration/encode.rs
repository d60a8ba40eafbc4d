//! `walk encode` and `walk decode` through the built binary: round trips, importance, refusals, damage.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use half::{bf16, f16};
use serde_json::{Value, json};
use walk::codec::kaiju::{CodeWidth, Importance, KaijuTensor, Settings, encode, payload_bytes};
use walk::linalg::Matrix;
use walk::store::safetensors_read::SafetensorsFile;
use walk::store::safetensors_write::{TensorData, write_safetensors};
use walk::store::seed::SplitMix64;

use crate::support::gguf::Gguf;
use crate::support::mini::Mini;
use crate::support::packed::{Stored, kaiju, linear, write};

/// A folder to work in.
struct Bench(tempfile::TempDir);

impl Bench {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// `walk encode` of `in.safetensors` with these options.
    fn encode(&self, out: &str, options: &[&str]) -> Command {
        let mut command = Command::cargo_bin("walk").unwrap();
        command.arg("encode").args(options).arg(self.at("in.safetensors")).arg(self.at(out));
        command.arg("--quiet");
        command
    }

    fn decode(&self, input: &str, out: &str, options: &[&str]) -> Command {
        let mut command = Command::cargo_bin("walk").unwrap();
        command.arg("decode").args(options).arg(self.at(input)).arg(self.at(out)).arg("--quiet");
        command
    }

    fn open(&self, name: &str) -> SafetensorsFile {
        SafetensorsFile::open(self.at(name)).unwrap()
    }

    /// A tensor of a file as KAIJU1.
    fn payload(&self, file: &str, name: &str) -> KaijuTensor {
        KaijuTensor::parse(self.open(file).bytes(name).unwrap().to_vec()).unwrap()
    }

    fn path(&self, name: &str) -> String {
        self.at(name).to_str().unwrap().to_owned()
    }
}

/// The data of the one JSON line of a command that succeeds.
#[track_caller]
fn line(command: &mut Command) -> Value {
    let output = command.arg("--json").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice::<Value>(&output.stdout).unwrap()["data"].take()
}

/// Runs a command that must be refused with all of `parts` in its last line, and make nothing.
#[track_caller]
fn refused(command: &mut Command, out: &Path, parts: &[&str]) {
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    let last = said.lines().last().unwrap();
    for part in parts {
        assert!(last.contains(part), "{part:?} is not in: {last}");
    }
    assert!(output.stdout.is_empty() && !out.exists());
}

/// Seeded numbers around 0.
fn noise(seed: u64, count: usize) -> Vec<f32> {
    let mut random = SplitMix64::new(seed);
    (0..count)
        .map(|_| (0..4).map(|_| (random.next_u64() >> 40) as f32).sum::<f32>() / (1 << 24) as f32 - 2.0)
        .collect()
}

fn bf16s(seed: u64, count: usize) -> Vec<bf16> {
    noise(seed, count).into_iter().map(bf16::from_f32).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// A file of a model with one of everything.
fn write_model(path: &Path) {
    let halves: Vec<f16> = noise(3, 5 * 129).into_iter().map(f16::from_f32).collect();
    let tensors = [
        TensorData::bf16("model.layers.0.mlp.up_proj.weight", &[40, 72], &bf16s(1, 40 * 72)),
        TensorData::f32("model.layers.0.mlp.experts.1.down_proj.weight", &[7, 48], &noise(2, 7 * 48)),
        TensorData::f16("own.weight", &[5, 129], &halves),
        TensorData::bf16("model.norm.weight", &[72], &bf16s(4, 72)),
        TensorData::f64("wide.weight", &[2, 24], &[0.5; 48]),
        TensorData::f32("table", &[2, 3], &noise(5, 6)),
        TensorData::f32("conv.weight", &[2, 3, 4], &noise(6, 24)),
        TensorData::u8("bytes", &[3], &[1, 2, 3]),
    ];
    let metadata =
        BTreeMap::from([("format".to_owned(), "pt".to_owned()), ("made by".to_owned(), "hand".to_owned())]);
    write_safetensors(path, &metadata, &tensors).unwrap();
}

const WEIGHTS: [&str; 3] =
    ["model.layers.0.mlp.experts.1.down_proj.weight", "model.layers.0.mlp.up_proj.weight", "own.weight"];

/// Σ h (w - q)² / Σ h w².
fn weighted(weight: &[f32], decoded: &[f32], h: &[f64]) -> f64 {
    let pairs = weight.iter().zip(decoded).zip(h.iter().cycle());
    let (error, norm) = pairs.fold((0.0, 0.0), |(error, norm), ((&w, &q), h)| {
        let (w, q) = (f64::from(w), f64::from(q));
        (error + h * (w - q).powi(2), norm + h * w * w)
    });
    error / norm
}

/// The values of a plain float tensor.
fn values(file: &SafetensorsFile, name: &str) -> Vec<f32> {
    let bytes = file.bytes(name).unwrap();
    match file.info(name).unwrap().dtype.name() {
        "BF16" => bytes.as_chunks().0.iter().map(|x| bf16::from_le_bytes(*x).to_f32()).collect(),
        "F16" => bytes.as_chunks().0.iter().map(|x| f16::from_le_bytes(*x).to_f32()).collect(),
        _ => floats(bytes),
    }
}

#[test]
fn kaiju_there_and_back() {
    let bench = Bench::new();
    write_model(&bench.at("in.safetensors"));
    let report = line(&mut bench.encode("out", &["--codec", "kaiju1"]));
    let (before, packed) = (bench.open("in.safetensors"), bench.open("out"));
    let named: Vec<&str> =
        report["tensors"].as_array().unwrap().iter().map(|t| t["name"].as_str().unwrap()).collect();
    assert_eq!(named, WEIGHTS);
    assert_eq!((&report["copied"], &report["flat_fallbacks"]), (&json!(5), &json!(0)));
    let left: Vec<(&str, &str)> = report["left_plain"]
        .as_array()
        .unwrap()
        .iter()
        .map(|left| (left["name"].as_str().unwrap(), left["reason"].as_str().unwrap()))
        .collect();
    assert_eq!(left, [("table", "its name does not end in .weight"), ("wide.weight", "it is F64")]);
    for name in ["model.norm.weight", "wide.weight", "table", "conv.weight", "bytes"] {
        assert_eq!(before.info(name).unwrap().shape, packed.info(name).unwrap().shape);
        assert!(before.bytes(name).unwrap() == packed.bytes(name).unwrap(), "{name}");
    }
    let metadata = packed.metadata();
    assert_eq!((&metadata["format"][..], &metadata["made by"][..]), ("pt", "hand"));
    let done: Value = serde_json::from_str(&metadata["walk_encode"]).unwrap();
    assert_eq!(
        (&done["codec"], &done["code_bits"], &done["tensors"]),
        (&json!("kaiju1"), &json!(64), &json!(3))
    );

    let told = line(&mut bench.decode("out", "back", &[]));
    assert_eq!((&told["dtype"], &told["copied"]), (&json!("f32"), &json!(5)));
    let back = bench.open("back");
    assert!(back.names().eq(before.names()));
    assert_eq!(back.metadata()["walk_encode"], metadata["walk_encode"]);
    for (name, told) in WEIGHTS.into_iter().zip(report["tensors"].as_array().unwrap()) {
        let shape = &before.info(name).unwrap().shape;
        let (rows, cols) = (shape[0], shape[1]);
        let module = name.strip_suffix(".weight").unwrap();
        let tensor = bench.payload("out", &format!("{module}.kaiju1"));
        let decoded = values(&back, name);
        assert_eq!((&back.info(name).unwrap().shape, &tensor.dense().data), (shape, &decoded));
        let bytes = payload_bytes(rows, cols, CodeWidth::P64, 0.025).unwrap();
        assert_eq!((&told["bytes"], tensor.payload().len()), (&json!(bytes), bytes));
        assert_eq!(told["bits_per_weight"], json!(bytes as f64 * 8.0 / (rows * cols) as f64));
        // What is told was measured by rows; the order of a sum changes its last digits.
        let error = weighted(&values(&before, name), &decoded, &[1.0]);
        assert!((told["weighted_error"].as_f64().unwrap() / error - 1.0).abs() < 1e-9, "{name}: {error}");
        assert!(error < 0.05, "{name}: {error}");
    }

    // Another encode of what is packed finds nothing; the same one gives the same bytes on any threads.
    for threads in ["1", "2"] {
        bench.encode(threads, &["--codec", "kaiju1", "--threads", threads]).assert().success();
        assert!(std::fs::read(bench.at(threads)).unwrap() == std::fs::read(bench.at("out")).unwrap());
    }
    let mut table = bench.encode("table", &["--codec", "kaiju1", "--preset", "v1", "--tensor", "own.weight"]);
    let table = table.assert().success().get_output().clone();
    let table = String::from_utf8(table.stdout).unwrap();
    for part in ["kaiju1 p56", "own.weight", "[5, 129]", "flat", "1 encoded at ", "; 7 copied; "] {
        assert!(table.contains(part), "{part:?} is not in:\n{table}");
    }
    assert_eq!(bench.payload("table", "own.kaiju1").code(), CodeWidth::P56);
    assert!(!table.contains("left plain"), "only what was asked for is told of:\n{table}");
}

#[test]
fn trellis_there_and_back() {
    let bench = Bench::new();
    let tensors = [
        TensorData::bf16("a.weight", &[256, 128], &bf16s(1, 256 * 128)),
        TensorData::f32("b.weight", &[128, 384], &noise(2, 128 * 384)),
        TensorData::bf16("c.weight", &[128, 100], &bf16s(3, 12800)),
        // Between the parts of a.weight in the file's order of payloads.
        TensorData::bf16("a.t", &[2], &bf16s(4, 2)),
    ];
    write_safetensors(bench.at("in.safetensors"), &BTreeMap::new(), &tensors).unwrap();
    let mut errors = Vec::new();
    for bits in ["2", "3", "6"] {
        let report = line(&mut bench.encode(bits, &["--codec", "trellis", "--bits", bits]));
        assert_eq!(report["left_plain"][0]["reason"], "sizes [128, 100] are not multiples of 128");
        let told = &report["tensors"][1];
        assert_eq!(
            (&told["name"], &told["stored"]),
            (&json!("b.weight"), &json!(format!("exl3 mcg {bits}-bit")))
        );
        let bytes = 128 * 384 * bits.parse::<usize>().unwrap() / 8 + 2 * (128 + 384) + 4;
        assert_eq!(told["bytes"], bytes);
        errors.push(told["weighted_error"].as_f64().unwrap());
        let back = format!("{bits}.back");
        line(&mut bench.decode(bits, &back, &["--dtype", "f16"]));
        let decoded = values(&bench.open(&back), "b.weight");
        let error = weighted(&noise(2, 128 * 384), &decoded, &[1.0]);
        assert!((errors.last().unwrap() / error - 1.0).abs() < 1e-9, "f16 is exact: {error}");
    }
    // An ideal coder of normal numbers leaves 4^-bits.
    assert!(errors[0] < 0.09 && errors[1] < 0.025 && errors[2] < 1e-3, "{errors:?}");
    bench.encode("again", &["--codec", "trellis", "--bits", "3", "--threads", "1"]).assert().success();
    assert!(std::fs::read(bench.at("again")).unwrap() == std::fs::read(bench.at("3")).unwrap());
    let asked = ["--codec", "trellis", "--bits", "3", "--tensor", "c.weight"];
    refused(
        &mut bench.encode("no", &asked),
        &bench.at("no"),
        &["tensor c.weight", "sizes [128, 100] are not multiples of 128"],
    );
}

/// Sums of x² of a weight's inputs over so many rows, and their means.
fn sums(seed: u64, inputs: usize, count: f32) -> (Vec<f32>, Vec<f64>) {
    let sums: Vec<f32> = noise(seed, inputs).into_iter().map(|x| x * x * count).collect();
    let means = sums.iter().map(|&sum| f64::from(sum) / f64::from(count)).collect();
    (sums, means)
}

#[test]
fn an_importance_matrix_is_found_by_either_name() {
    let bench = Bench::new();
    write_model(&bench.at("in.safetensors"));
    let (up, up_means) = sums(1, 72, 512.0);
    let (own, own_means) = sums(2, 129, 7.0);
    let (expert, expert_means) = sums(3, 48, 3.0);
    let experts = [vec![1.0; 48], expert].concat();
    Gguf::imatrix()
        .entry("blk.0.ffn_up.weight", &up, 512.0)
        .experts("blk.0.ffn_down_exps.weight", &experts, &[9.0, 3.0])
        .entry("own.weight", &own, 7.0)
        .write(&bench.at("imatrix.gguf"));
    let imatrix = bench.path("imatrix.gguf");
    let report =
        line(&mut bench.encode("out", &["--codec", "kaiju1", "--hi-frac", "0.1", "--imatrix", &imatrix]));
    let model = bench.open("in.safetensors");
    let all = [&expert_means, &up_means, &own_means];
    for ((name, means), told) in WEIGHTS.into_iter().zip(all).zip(report["tensors"].as_array().unwrap()) {
        let shape = &model.info(name).unwrap().shape;
        let weight = Matrix::new(shape[0], shape[1], values(&model, name));
        let settings = Settings { hi_frac: 0.1, ..Settings::v2() };
        let wanted = encode(&weight, Importance::Diagonal(means), &settings).unwrap();
        let found = bench.payload("out", &name.replace(".weight", ".kaiju1"));
        assert!(found.payload() == wanted.payload(), "{name}");
        let error = weighted(&weight.data, &wanted.dense().data, means);
        assert!((told["weighted_error"].as_f64().unwrap() / error - 1.0).abs() < 1e-9, "{name}");
        assert_eq!(told["importance"], "imatrix");
    }
    let done: Value = serde_json::from_str(&bench.open("out").metadata()["walk_encode"]).unwrap();
    assert_eq!(done["importance"], "imatrix");
    assert_eq!(done["importance_sha256"], walk::store::hash::sha256_file(bench.at("imatrix.gguf")).unwrap());
    // The trellis takes the same importance.
    let tensors = [TensorData::bf16("own.weight", &[128, 128], &bf16s(9, 128 * 128))];
    write_safetensors(bench.at("in.safetensors"), &BTreeMap::new(), &tensors).unwrap();
    let (square, _) = sums(4, 128, 7.0);
    Gguf::imatrix().entry("own.weight", &square, 7.0).write(&bench.at("imatrix.gguf"));
    let trellis =
        line(&mut bench.encode("trellis", &["--codec", "trellis", "--bits", "2", "--imatrix", &imatrix]));
    let flat = line(&mut bench.encode("flat", &["--codec", "trellis", "--bits", "2"]));
    assert_eq!(
        (&trellis["tensors"][0]["importance"], &flat["tensors"][0]["importance"]),
        (&json!("imatrix"), &json!("flat"))
    );
    assert!(std::fs::read(bench.at("trellis")).unwrap() != std::fs::read(bench.at("flat")).unwrap());
}

#[test]
fn what_an_importance_matrix_lacks_is_refused_or_told() {
    let bench = Bench::new();
    write_model(&bench.at("in.safetensors"));
    let imatrix = bench.path("i.gguf");
    let run = |gguf: &Gguf, flags: &[&str]| {
        gguf.write(&bench.at("i.gguf"));
        bench.encode("out", &[&["--codec", "kaiju1", "--imatrix", &imatrix][..], flags].concat())
    };
    let (up, own) = (sums(1, 72, 4.0).0, sums(2, 129, 4.0).0);
    let experts = |counts: &[f32]| {
        Gguf::imatrix().entry("blk.0.ffn_up.weight", &up, 4.0).entry("own.weight", &own, 4.0).experts(
            "blk.0.ffn_down_exps.weight",
            &vec![1.0; 48 * counts.len()],
            counts,
        )
    };
    let out = bench.at("out");
    let says =
        |gguf: Gguf, parts: &[&str]| refused(&mut run(&gguf, &[]), &out, &[&["i.gguf"], parts].concat());
    let expert = "model.layers.0.mlp.experts.1.down_proj.weight";
    let flat = "--flat-missing";
    says(
        Gguf::imatrix().entry("blk.0.ffn_up.weight", &up, 4.0),
        &[expert, "there is no entry", "or blk.0.ffn_down_exps.weight", flat],
    );
    says(experts(&[4.0, 0.0]), &[expert, "count 1 of blk.0.ffn_down_exps.weight.counts is 0", flat]);
    says(experts(&[4.0]), &["tensor blk.0.ffn_down_exps.weight.in_sum2", "1 matrices", "one for expert 1"]);
    says(experts(&[4.0, -1.0]), &["tensor blk.0.ffn_down_exps.weight.counts", "count 1 is -1"]);
    says(experts(&[4.0, f32::NAN]), &["count 1 is NaN"]);
    let with = |name: &str, extents: &[u64], values: &[f32]| {
        let mut gguf = experts(&[4.0, 4.0]);
        gguf.tensors.retain(|tensor| tensor.name != name);
        gguf.tensor(name, extents, values)
    };
    let counts = "blk.0.ffn_down_exps.weight.counts";
    says(with(counts, &[1, 3], &[1.0; 3]), &[&format!("tensor {counts}"), "3 x 1 counts", "wanted: 2"]);
    let mut gone = experts(&[4.0, 4.0]);
    gone.tensors.retain(|tensor| tensor.name != counts);
    says(gone, &[&format!("tensor {counts}"), "there is no such tensor"]);
    let sum = "blk.0.ffn_up.weight.in_sum2";
    says(with(sum, &[71], &up[..71]), &[&format!("tensor {sum}"), "71 values for the 72 inputs"]);
    says(
        with(sum, &[72, 2], &[up.clone(), up.clone()].concat()),
        &["blk.0.ffn_up.weight.counts", "wanted: 2"],
    );
    for (bad, told) in [(f32::NAN, "NaN"), (-0.5, "-0.125"), (f32::INFINITY, "inf")] {
        let mut values = up.clone();
        values[5] = bad;
        says(with(sum, &[72], &values), &[&format!("tensor {sum}"), "input 5", told]);
    }
    says(with(sum, &[72], &[0.0; 72]), &["the importance of all its inputs is 0", flat]);
    let mut other = experts(&[4.0, 4.0]);
    other.tensors[0].kind = 1;
    says(other, &[&format!("tensor {sum}"), "type is number 1", "F32"]);
    let mut model = experts(&[4.0, 4.0]);
    model.keys[0].2 = crate::support::gguf::text("model");
    says(model.clone(), &["general.type", "it says \"model\"", "imatrix"]);
    model.keys.remove(0);
    says(model, &["general.type", "it does not say"]);

    // Allowed, counted, and each told.
    let few = Gguf::imatrix().entry("own.weight", &own, 4.0).experts(
        "blk.0.ffn_down_exps.weight",
        &[1.0; 96],
        &[1.0, 0.0],
    );
    let output = run(&few, &["--flat-missing", "--json"]).assert().success().get_output().clone();
    let report = serde_json::from_slice::<Value>(&output.stdout).unwrap();
    assert_eq!(report["data"]["flat_fallbacks"], 2);
    let sources: Vec<&str> = report["data"]["tensors"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| t["importance"].as_str().unwrap())
        .collect();
    assert_eq!(sources, ["flat_fallback", "flat_fallback", "imatrix"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.contains("note: 2 tensors have no importance in the file and were encoded as flat"),
        "{said}"
    );
}

#[test]
fn a_file_of_hessians_is_taken_as_it_is() {
    let bench = Bench::new();
    write_model(&bench.at("in.safetensors"));
    let hessian = bench.path("h.safetensors");
    let name = WEIGHTS[1];
    let (_, diagonal) = sums(1, 72, 1.0);
    // X Xᵀ of 200 rows, in exact symmetry.
    let rows = Matrix::new(200, 72, noise(2, 200 * 72));
    let full = rows.transposed().product(&rows);
    let narrow: Vec<f32> = diagonal.iter().map(|&h| h as f32).collect();
    let write = |tensor: TensorData<'_>| write_safetensors(&hessian, &BTreeMap::new(), &[tensor]).unwrap();
    let run = |out: &str, flags: &[&str]| {
        let fixed = ["--codec", "kaiju1", "--tensor", name, "--hessian", &hessian];
        bench.encode(out, &[&fixed[..], flags].concat())
    };
    let model = bench.open("in.safetensors");
    let weight = Matrix::new(40, 72, values(&model, name));
    let wanted = |importance: Importance<'_>, feedback: bool| {
        encode(&weight, importance, &Settings { feedback, ..Settings::v2() }).unwrap()
    };
    let found = |out: &str| bench.payload(out, &name.replace(".weight", ".kaiju1"));
    write(TensorData::f64(name, &[72], &diagonal));
    assert_eq!(line(&mut run("f64", &[]))["tensors"][0]["importance"], "hessian_diagonal");
    assert_eq!(found("f64"), wanted(Importance::Diagonal(&diagonal), true));
    write(TensorData::f32(name, &[72], &narrow));
    line(&mut run("f32", &[]));
    let narrow: Vec<f64> = narrow.iter().map(|&h| f64::from(h)).collect();
    assert_eq!(found("f32"), wanted(Importance::Diagonal(&narrow), true));
    write(TensorData::f32(name, &[72, 72], &full.data));
    let told = line(&mut run("full", &[]));
    assert_eq!(told["tensors"][0]["importance"], "hessian_full");
    assert_eq!(found("full"), wanted(Importance::Full(&full), true));
    let fed = told["tensors"][0]["proxy_error"].as_f64().unwrap();
    let told = line(&mut run("unfed", &["--no-feedback"]));
    assert_eq!(found("unfed"), wanted(Importance::Full(&full), false));
    let unfed = told["tensors"][0]["proxy_error"].as_f64().unwrap();
    assert!(fed <= unfed && unfed < 0.05, "{fed} {unfed}");
    let table = run("table", &[]).assert().success().get_output().clone();
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(table.contains("full error") && table.contains("Hessian"), "{table}");

    let out = bench.at("no");
    let says = |tensor: TensorData<'_>, parts: &[&str]| {
        write(tensor);
        refused(
            &mut run("no", &[]),
            &out,
            &[&["h.safetensors", "tensor model.layers.0.mlp.up_proj"], parts].concat(),
        );
    };
    let changed = |at: usize, value: f32| {
        let mut data = full.data.clone();
        data[at] = value;
        TensorData::f32(name, &[72, 72], &data)
    };
    says(TensorData::f32(name, &[71], &[1.0; 71]), &["its shape is [71]", "[72] or [72, 72]"]);
    says(TensorData::f32(name, &[72, 71], &[1.0; 72 * 71]), &["its shape is [72, 71]"]);
    says(TensorData::bf16(name, &[72], &bf16s(1, 72)), &["it is BF16", "F32 or F64"]);
    says(changed(72 + 3, full.data[72 + 3] + 50.0), &["entries [3, 1] and [1, 3]", "symmetric"]);
    says(changed(5, f32::NAN), &["entry [0, 5] is NaN"]);
    says(changed(73, -1.0), &["input 1 is -1"]);
    says(TensorData::f32(name, &[72], &[0.0; 72]), &["all its inputs is 0", "--flat-missing"]);
    write(TensorData::f32("other", &[72], &[1.0; 72]));
    refused(&mut run("no", &[]), &out, &["there is no Hessian of this name", "--flat-missing"]);
    assert_eq!(line(&mut run("flat", &["--flat-missing"]))["flat_fallbacks"], 1);
}

#[test]
fn files_and_options_that_do_not_fit_are_refused() {
    let bench = Bench::new();
    let (input, out) = (bench.at("in.safetensors"), bench.at("out"));
    write_model(&input);
    let kaiju1 = |flags: &[&str]| bench.encode("out", &[&["--codec", "kaiju1"][..], flags].concat());
    let trellis = |flags: &[&str]| bench.encode("out", &[&["--codec", "trellis"][..], flags].concat());
    refused(
        &mut kaiju1(&["--tensor", "gone.weight"]),
        &out,
        &["in.safetensors", "tensor gone.weight", "no such tensor"],
    );
    refused(&mut kaiju1(&["--tensor", "model.norm.weight"]), &out, &["its shape is [72]", "2-D"]);
    refused(&mut kaiju1(&["--tensor", "table"]), &out, &["does not end in .weight"]);
    refused(&mut kaiju1(&["--tensor", "wide.weight"]), &out, &["it is F64"]);
    refused(&mut kaiju1(&["--bits", "3"]), &out, &["--bits", "--codec trellis"]);
    refused(&mut kaiju1(&["--code-bits", "57"]), &out, &["--code-bits", "56 or 64"]);
    refused(&mut kaiju1(&["--hi-frac", "1.5"]), &out, &["--hi-frac", "0 to 1"]);
    refused(&mut kaiju1(&["--hi-frac", "NaN"]), &out, &["--hi-frac"]);
    refused(&mut kaiju1(&["--flat-missing"]), &out, &["--flat-missing", "--imatrix or --hessian"]);
    refused(&mut trellis(&[]), &out, &["--bits", "1 to 8"]);
    refused(&mut trellis(&["--bits", "9"]), &out, &["--bits", "9 bits"]);
    refused(&mut trellis(&["--bits", "3", "--preset", "v1"]), &out, &["--preset", "--codec kaiju1"]);
    refused(&mut trellis(&["--bits", "3", "--no-feedback"]), &out, &["--no-feedback", "--codec kaiju1"]);
    refused(&mut trellis(&["--bits", "3"]), &out, &["no tensor of it can be encoded"]);

    // A weight that is not finite is found when its turn comes; nothing is left of the file.
    let mut bad = noise(1, 48);
    bad[30] = f32::NAN;
    let tensors =
        [TensorData::f32("a.weight", &[1, 48], &noise(2, 48)), TensorData::f32("b.weight", &[2, 24], &bad)];
    write_safetensors(&input, &BTreeMap::new(), &tensors).unwrap();
    refused(&mut kaiju1(&[]), &out, &["in.safetensors", "tensor b.weight", "row 1", "NaN"]);
    assert_eq!(std::fs::read_dir(bench.0.path()).unwrap().count(), 1);

    write_model(&input);
    let again = |out: &Path| {
        let mut command = Command::cargo_bin("walk").unwrap();
        command.args(["encode", "--quiet", "--codec", "kaiju1"]).arg(&input).arg(out);
        command
    };
    let nothing = bench.at("nothing");
    refused(&mut again(&input), &nothing, &["input and output are the same file"]);
    std::fs::write(&out, "x").unwrap();
    refused(&mut again(&out), &nothing, &["it is there already"]);
    assert_eq!(std::fs::read(&out).unwrap(), b"x");
    refused(&mut bench.encode("no/out", &["--codec", "kaiju1"]), &bench.at("no/out"), &["no"]);
    std::fs::remove_file(&out).unwrap();

    // Packed weights are carried, and not packed again.
    let mut mixed = linear("mcg.k3", "a");
    mixed.push(kaiju("p64.4x60", "b"));
    let bytes = noise(1, 48).iter().flat_map(|x| x.to_le_bytes()).collect();
    let dtype = walk::store::tensor_dtype::TensorDtype::F32;
    mixed.push(Stored { name: "c.weight".into(), dtype, shape: vec![2, 24], bytes });
    write(&input, &mixed);
    for name in ["a.weight", "b.weight"] {
        refused(&mut kaiju1(&["--tensor", name]), &out, &["it is packed already"]);
    }
    let report = line(&mut kaiju1(&[]));
    assert_eq!((&report["copied"], &report["tensors"][0]["name"]), (&json!(5), &json!("c.weight")));
    let told = line(&mut bench.decode("out", "back", &[]));
    assert_eq!(told["tensors"].as_array().unwrap().len(), 3);
    assert_eq!(bench.open("back").names().collect::<Vec<_>>(), ["a.weight", "b.weight", "c.weight"]);
    refused(&mut bench.decode("back", "no", &[]), &bench.at("no"), &["back", "it has no packed weight"]);
}

#[test]
fn damaged_payloads_are_refused_by_name() {
    let bench = Bench::new();
    let good = kaiju("p64.4x60", "m");
    let damaged = |at: usize, byte: u8| {
        let mut tensor = kaiju("p64.4x60", "m");
        tensor.bytes[at] = byte;
        write(&bench.at("x"), &[tensor]);
        bench.decode("x", "out", &[])
    };
    let out = bench.at("out");
    let says = |command: &mut Command, parts: &[&str]| {
        refused(command, &out, &[&["x", "tensor m.kaiju1"], parts].concat())
    };
    says(&mut damaged(0, b'X'), &["magic"]);
    says(&mut damaged(12, 255), &["hi_count, bulk_cols"]);
    says(&mut damaged(28, 57), &["code bits", "56 or 64"]);
    says(&mut damaged(29, 2), &["layout version"]);
    says(&mut damaged(30, 1), &["extension"]);
    // hi_count of 4 x 60 at v2 is 12: the index is 48 bytes, the band 12 x (2 + 4), then rows of 2 + 2 x 8 + 1.
    let header: [usize; 2] =
        [12, 16].map(|at| u32::from_le_bytes(good.bytes[at..at + 4].try_into().unwrap()) as usize);
    assert_eq!(header, [12, 48]);
    says(&mut damaged(32, 59), &["HiIndex"]);
    says(&mut damaged(32 + 48 + 1, 0x7c), &["HiBand[0] scale"]);
    let rows = 32 + 48 + 12 * 6;
    says(&mut damaged(rows + 19 + 1, 0x7c), &["row 1", "row scale"]);
    says(&mut damaged(rows + 2 + 7, 0xff), &["row 0", "code of block 0", "out of range"]);
    // What is as it was decodes.
    let byte = good.bytes[rows];
    line(&mut damaged(rows, byte));

    // EXL3 that does not hold together is found before anything is written.
    let mut tensors = linear("mcg.k3", "t");
    tensors.iter_mut().find(|tensor| tensor.name == "t.svh").unwrap().bytes[..2].fill(0);
    write(&bench.at("x"), &tensors);
    refused(&mut bench.decode("x", "no", &[]), &bench.at("no"), &["tensor t.svh", "flat index 0"]);
}

#[test]
fn a_packed_model_evaluates_as_its_plain_form() {
    let mini = Mini::new();
    let bench = Bench::new();
    let dir = |name: &str| {
        let dir = bench.at(name);
        std::fs::create_dir(&dir).unwrap();
        for file in ["config.json", "tokenizer.json", "model.json"] {
            std::fs::copy(mini.model().join(file), dir.join(file)).unwrap();
        }
        dir
    };
    let (packed, plain) = (dir("packed"), dir("plain"));
    let walk = |arguments: &[&str], paths: &[&Path]| {
        let mut command = Command::cargo_bin("walk").unwrap();
        command.args(arguments).arg("--quiet").args(paths);
        command
    };
    let file = "model.safetensors";
    let chosen = [
        "--tensor",
        "model.layers.1.mlp.experts.0.down_proj.weight",
        "--tensor",
        "model.layers.1.mlp.experts.1.up_proj.weight",
        "--tensor",
        "model.layers.2.self_attn.o_proj.weight",
    ];
    let arguments = [&["encode", "--codec", "kaiju1"][..], &chosen].concat();
    line(&mut walk(&arguments, &[&mini.model().join(file), &packed.join(file)]));
    line(&mut walk(&["decode"], &[&packed.join(file), &plain.join(file)]));
    let eval = |dir: &Path| {
        let mut command = walk(&["eval"], &[dir]);
        command.arg("--corpus").arg(mini.plan()).arg("--reference").arg(mini.model());
        line(&mut command)["evaluation"].take()
    };
    let found = eval(&packed);
    assert!(found.is_object(), "{found}");
    assert_eq!(found, eval(&plain));
    // Not the model itself.
    assert_ne!(found, eval(&mini.model()));
}
