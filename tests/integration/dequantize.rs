//! `walk dequantize` and `walk eval` through the built binary: golden decodes, whole directories, refusals, resumption.

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use half::{bf16, f16};
use serde_json::{Value, json};
use walk::checkpoint::{CheckpointDir, ExpertGeometry, Source};
use walk::publish::dense::WeightDtype;
use walk::publish::dequantize::{DequantizeOptions, dequantize as plain_form};
use walk::store::safetensors_read::SafetensorsFile;
use walk::store::tensor_dtype::TensorDtype;
use walk::walk::progress::{Observer, Silent};

use crate::support::files;
use crate::support::mini::{EXPERTS, LAYERS, Mini, WIDTH, noise};
use crate::support::packed::{
    LINEARS, Stored, assemble, index, json_of, linear, ranks, reconstructed, walked, write,
};

fn walk(arguments: &[&dyn AsRef<std::ffi::OsStr>]) -> Command {
    let mut command = Command::cargo_bin("walk").unwrap();
    command.args(arguments.iter().map(|argument| argument.as_ref()));
    command
}

/// The data of the one JSON line on stdout.
fn line(command: &mut Command) -> Value {
    let output = command.args(["--json", "--quiet"]).assert().success().get_output().clone();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    serde_json::from_str::<Value>(&text).unwrap()["data"].take()
}

/// Runs a command that must be refused with all of `parts` in its one line.
#[track_caller]
fn refused(command: &mut Command, parts: &[&str]) {
    let output = command.arg("--quiet").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(output.stdout.is_empty() && said.lines().count() == 1, "{said}");
    for part in parts {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
}

fn dequantize(input: &Path, out: &Path, dtype: &str) -> Command {
    walk(&[&"dequantize", &input, &out, &"--dtype", &dtype])
}

/// The steps between two f16 numbers of the same sign.
fn ulps(a: f16, b: f16) -> u16 {
    a.to_bits().abs_diff(b.to_bits())
}

fn halves(file: &SafetensorsFile, name: &str) -> Vec<f16> {
    file.bytes(name).unwrap().as_chunks().0.iter().map(|bytes| f16::from_le_bytes(*bytes)).collect()
}

#[test]
fn every_golden_linear_decodes_in_every_layout_and_type() {
    let folder = tempfile::tempdir().unwrap();
    let packed = folder.path().join("packed.safetensors");
    let mut tensors: Vec<Stored> = LINEARS.iter().flat_map(|name| linear(name, name)).collect();
    // Ranks: outputs cut in three, inputs cut in two.
    tensors.extend(ranks("mcg.k3", "a.up_proj", false));
    tensors.extend(ranks("mcg.k4", "a.down_proj", true));
    let bias: Vec<u8> = [1.5f32, f32::MIN_POSITIVE].iter().flat_map(|x| x.to_le_bytes()).collect();
    tensors.push(Stored {
        name: "gate.e_score_correction_bias".into(),
        dtype: TensorDtype::F32,
        shape: vec![2],
        bytes: bias.clone(),
    });
    write(&packed, &tensors);

    let out = |dtype: &str| folder.path().join(format!("{dtype}.safetensors"));
    let open = |dtype: &str| SafetensorsFile::open(out(dtype)).unwrap();
    for dtype in ["f16", "f32", "bf16"] {
        let report = line(&mut dequantize(&packed, &out(dtype), dtype));
        assert_eq!((&report["tensors"], &report["modules_decoded"]), (&json!(10), &json!(9)));
        let error = report["rounding"]["max_relative_error"].as_f64().unwrap();
        assert_eq!(error > 0.0, dtype == "bf16", "{dtype}");
        assert!(error <= 0.5f64.powi(8), "half a step of BF16: {error}");
    }
    let (exact, wide, rounded) = (open("f16"), open("f32"), open("bf16"));
    let modules = LINEARS.iter().map(|name| (*name, *name));
    for (golden, module) in modules.chain([("mcg.k3", "a.up_proj"), ("mcg.k4", "a.down_proj")]) {
        let name = format!("{module}.weight");
        let (shape, wanted) = reconstructed(golden);
        for (file, dtype) in
            [(&exact, TensorDtype::F16), (&wide, TensorDtype::F32), (&rounded, TensorDtype::BF16)]
        {
            let info = file.info(&name).unwrap();
            assert_eq!((info.dtype, &info.shape), (dtype, &shape), "{name}");
        }
        let found = halves(&exact, &name);
        assert_eq!(found.len(), wanted.len());
        // The golden value is f32, of another order of operations; rounded to f16 they are neighbours at most.
        assert!(found.iter().zip(&wanted).all(|(a, b)| ulps(*a, *b) <= 1), "{name}");
        let upcast: Vec<u8> = found.iter().flat_map(|x| x.to_f32().to_le_bytes()).collect();
        assert!(wide.bytes(&name).unwrap() == upcast, "{name}");
        let nearest: Vec<u8> = found.iter().flat_map(|x| bf16::from_f32(x.to_f32()).to_le_bytes()).collect();
        assert!(rounded.bytes(&name).unwrap() == nearest, "{name}");
    }
    assert_eq!(halves(&exact, "a.up_proj.weight"), halves(&exact, "mcg.k3.weight"));
    assert_eq!(halves(&exact, "a.down_proj.weight"), halves(&exact, "mcg.k4.weight"));
    let carried = rounded.info("gate.e_score_correction_bias").unwrap();
    assert_eq!(carried.dtype, TensorDtype::F32);
    assert!(rounded.bytes("gate.e_score_correction_bias").unwrap() == bias);

    refused(&mut dequantize(&packed, &out("f16"), "f16"), &["f16.safetensors: it is there already"]);
    for threads in ["1", "2"] {
        let again = folder.path().join(format!("{threads}.safetensors"));
        dequantize(&packed, &again, "bf16").args(["--quiet", "--threads", threads]).assert().success();
        assert!(std::fs::read(&again).unwrap() == std::fs::read(out("bf16")).unwrap());
    }
}

#[test]
fn what_belongs_to_no_layout_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let case = |name: &str, tensors: Vec<Stored>, parts: &[&str]| {
        let path = folder.path().join(format!("{name}.safetensors"));
        write(&path, &tensors);
        let out = folder.path().join("out.safetensors");
        refused(&mut dequantize(&path, &out, "bf16"), &[&[&*path.to_string_lossy()], parts].concat());
        assert!(!out.exists());
    };
    let without = |part: &str| {
        let mut tensors = linear("mcg.k2", "m");
        tensors.retain(|tensor| !tensor.name.ends_with(part));
        tensors
    };
    case("no suh", without("suh"), &["tensor m.suh", "the linear's vector is missing"]);
    case("no svh", without("svh"), &["tensor m.svh", "the linear's vector is missing"]);
    case("no trellis", without("trellis"), &["a part of a packed linear without the rest"]);
    let mut tensors = linear("mcg.k2", "m");
    tensors.extend(linear("mul1.k4", "m").into_iter().filter(|tensor| tensor.name == "m.mul1"));
    case("two markers", tensors, &["tensor m.trellis", "two codebook markers"]);
    let mut tensors = linear("mcg.k2", "m");
    for tensor in &mut tensors {
        if tensor.name == "m.mcg" {
            tensor.bytes[0] ^= 1;
        }
    }
    case("wrong marker", tensors, &["tensor m.mcg", "codebook marker 0xCBAC1FEC", "wanted: 0xCBAC1FED"]);
    let mut tensors = linear("mcg.k2", "m");
    tensors.push(Stored {
        name: "m.weight".into(),
        dtype: TensorDtype::BF16,
        shape: vec![1],
        bytes: vec![0; 2],
    });
    case("packed and plain", tensors, &["tensor m.trellis", "the module also has m.weight"]);
    let mut tensors = ranks("mcg.k3", "m", false);
    tensors.retain(|tensor| !tensor.name.starts_with("m.rank1."));
    case("rank gap", tensors, &["tensor m.rank0.trellis", "2 ranks, and rank 1 is not among them"]);
    let mut tensors = ranks("mcg.k3", "m", false);
    tensors.extend(linear("mcg.k3", "m"));
    case("whole and ranks", tensors, &["the module is stored whole and in ranks"]);
    let mut tensors = linear("mcg.k2", "m.rank0");
    tensors.extend(linear("mcg.k5", "m.rank1"));
    case("ranks of other bits", tensors, &["m.rank1.trellis is 128 x 128 at 5 bits (mcg)", "no slice"]);
    let mut tensors = linear("mcg.k4", "m.rank0");
    tensors.extend(linear("mul1.k4", "m.rank1"));
    case("ranks of other codebooks", tensors, &["m.rank1.trellis is 128 x 128 at 4 bits (mul1)"]);
    let mut tensors = linear("mcg.k2", "m");
    for tensor in &mut tensors {
        if tensor.name == "m.suh" {
            tensor.bytes[..2].copy_from_slice(&f16::NAN.to_le_bytes());
        }
    }
    case("not finite", tensors, &["tensor m.suh", "value NaN at flat index 0"]);
    let mut tensors = linear("mcg.k2", "m");
    for tensor in &mut tensors {
        if tensor.name == "m.suh" || tensor.name == "m.svh" {
            tensor.bytes = [f16::MAX; 128].iter().flat_map(|x| x.to_le_bytes()).collect();
        }
    }
    case("overflow", tensors, &["tensor m.weight", "the decoded value at flat index", "finite weights"]);
}

/// Evaluations of a mini walk's result.
fn eval(candidate: &Path, reference: Option<&Path>, mini: &Mini) -> Command {
    let mut command = walk(&[&"eval", &candidate, &"--corpus", &mini.plan()]);
    if let Some(reference) = reference {
        command.arg("--reference").arg(reference);
    }
    command
}

#[test]
fn an_assembled_walk_evaluates_as_the_walk_did_and_becomes_plain() {
    let (mini, work, report) = walked("w");
    let assembled = mini.path().join("assembled");
    assemble(&mini, &work.join("v2"), &assembled);

    // The same figures, digit for digit, as the walk printed.
    let data = line(&mut eval(&assembled, Some(&mini.model()), &mini));
    assert!(report["evaluation"]["all"]["kl_mean"].as_f64().unwrap() > 0.0);
    assert_eq!(data["evaluation"], report["evaluation"]);
    assert_eq!(data["perplexity"], Value::Null);
    let card = data["inputs"]["prefix_tokens_from"].as_str().unwrap();
    assert!(card.ends_with("assembled/model.json"), "{card}");
    let output = eval(&assembled, Some(&mini.model()), &mini).arg("--quiet").output().unwrap();
    let table = String::from_utf8(output.stdout).unwrap();
    let printed = std::process::Command::new(env!("CARGO_BIN_EXE_walk"))
        .args(["--quiet", "--model"])
        .arg(mini.model())
        .arg("--corpus")
        .arg(mini.plan())
        .arg("--work")
        .arg(&work)
        .output()
        .unwrap();
    let printed = String::from_utf8(printed.stdout).unwrap();
    let figures = &table[table.find("evaluation: ").unwrap()..];
    assert!(figures.lines().count() == 4 && printed.contains(figures), "{table}\n{printed}");
    // Alone: the same perplexity. Without a card of its own the reference's card says the prefix, --model's goes first.
    let alone = line(&mut eval(&assembled, None, &mini));
    assert_eq!(alone["perplexity"]["all"]["perplexity"], report["evaluation"]["all"]["result_perplexity"]);
    assert_eq!(alone["evaluation"], Value::Null);
    std::fs::remove_file(assembled.join("model.json")).unwrap();
    refused(&mut eval(&assembled, None, &mini), &["neither the plan nor the model", "prefix_tokens"]);
    for data in [
        line(&mut eval(&assembled, Some(&mini.model()), &mini)),
        line(eval(&assembled, Some(&mini.model()), &mini).args(["--model", "tiny"])),
    ] {
        assert_eq!(data["evaluation"], report["evaluation"]);
    }

    // Plain, in shards of at most a MiB, and again on one thread.
    let plain = |name: &str| mini.path().join(name);
    let command = |out: &str, dtype: &str| {
        let mut command = dequantize(&assembled, &plain(out), dtype);
        command.args(["--max-shard-gib", "0.0009765625"]);
        command
    };
    let made = line(&mut command("bf16", "bf16"));
    let modules = EXPERTS * 3 * (LAYERS - 1);
    assert_eq!(made["modules_decoded"], modules);
    assert_eq!(made["copied"], json!(["tokenizer.json"]));
    assert_eq!(made["config_keys_removed"], json!(["quantization_config"]));
    let left_out = made["left_out"].as_array().unwrap();
    for name in ["MANIFEST.json", "quantization_config.json", "r7-experts-layer-001.json"] {
        assert!(left_out.contains(&json!(name)), "{left_out:?}");
        assert!(!plain("bf16").join(name).exists());
    }
    assert!(made["shards"].as_object().unwrap().len() > 1);
    let opened = CheckpointDir::open(plain("bf16")).unwrap();
    let source = CheckpointDir::open(mini.model()).unwrap();
    assert!(opened.names().eq(source.names()), "the tensors of the model it came from");
    for name in source.names().filter(|name| !name.contains(".experts.")) {
        assert!(opened.tensor_bytes(name).unwrap() == source.tensor_bytes(name).unwrap(), "{name}");
    }
    let mut config = json_of(&mini.model().join("config.json"));
    assert_eq!(json_of(&plain("bf16").join("config.json")), config.take());
    // It is what a walk takes for a plain BF16 source.
    let geometry = ExpertGeometry {
        moe_layers: (1..LAYERS).collect(),
        experts: EXPERTS,
        hidden: WIDTH,
        intermediate: WIDTH,
    };
    Source::open(plain("bf16"), &geometry).unwrap();
    command("one", "bf16").args(["--quiet", "--threads", "1"]).assert().success();
    assert_eq!(files(&plain("bf16")), files(&plain("one")));

    // Through the forward: f16 is what the packed form decodes to, BF16 within its rounding.
    command("f16", "f16").arg("--quiet").assert().success();
    let against = |out: &str| line(&mut eval(&plain(out), Some(&assembled), with_card(&mini, &plain(out))));
    let exact = against("f16");
    assert_eq!(exact["evaluation"]["all"]["kl_mean"], 0.0);
    assert_eq!(exact["evaluation"]["all"]["top1_agreement"], 1.0);
    let rounded = against("bf16")["evaluation"]["all"]["kl_mean"].as_f64().unwrap();
    let walked = report["evaluation"]["all"]["kl_mean"].as_f64().unwrap();
    assert!(rounded > 0.0 && rounded < walked / 50.0, "{rounded} beside {walked}");
}

/// Puts the mini model's card into a directory, so that the plan's prompts have a prefix.
fn with_card<'m>(mini: &'m Mini, folder: &Path) -> &'m Mini {
    std::fs::copy(mini.model().join("model.json"), folder.join("model.json")).unwrap();
    mini
}

/// Stops after so many tensors.
struct StopAfter(std::sync::atomic::AtomicI64);

impl Observer for StopAfter {
    fn begin(&self, _: &str, _: Option<usize>, _: u64) {}
    fn advance(&self, _: &str) {
        self.0.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
    }
    fn end(&self) {}
    fn note(&self, _: &str) {}
    fn stop_requested(&self) -> bool {
        self.0.load(std::sync::atomic::Ordering::Relaxed) <= 0
    }
}

/// A directory of golden linears, a config and a tokenizer.
fn packed_directory(folder: &Path) -> PathBuf {
    let dir = folder.join("packed");
    std::fs::create_dir(&dir).unwrap();
    for (file, names) in [("a.safetensors", &LINEARS[..4]), ("b.safetensors", &LINEARS[4..])] {
        let tensors: Vec<Stored> = names.iter().flat_map(|name| linear(name, name)).collect();
        write(&dir.join(file), &tensors);
    }
    index(&dir);
    let config =
        json!({"hidden_size": 128, "quantization_config": {"bits": 4}, "text": {"QuantMethod": "x"}});
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    std::fs::write(dir.join("tokenizer.json"), "{}").unwrap();
    std::fs::write(dir.join("pytorch_model.bin"), "weights").unwrap();
    dir
}

#[test]
fn a_stopped_directory_goes_on_and_another_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let input = packed_directory(folder.path());
    let options = DequantizeOptions { dtype: WeightDtype::Bf16, shard_bytes: 70_000 };
    let out = |name: &str| folder.path().join(name);
    let whole = plain_form(&input, &out("whole"), options, &Silent).unwrap();
    assert_eq!(whole.config_keys_removed, ["quantization_config", "text.QuantMethod"]);
    assert_eq!(whole.left_out, ["pytorch_model.bin"]);
    assert_eq!(whole.shards.len(), 5);

    for stop in 1..7 {
        let stopped = plain_form(&input, &out("out"), options, &StopAfter((stop).into())).unwrap_err();
        assert_eq!(stopped.exit_code(), 3, "{stopped}");
        assert!(!out("out").exists() && out(".out.partial").exists());
        let other = DequantizeOptions { dtype: WeightDtype::F16, ..options };
        let error = plain_form(&input, &out("out"), other, &Silent).unwrap_err().to_string();
        assert!(error.contains("`dtype`") && error.contains("begun with \"bf16\""), "{error}");
        let mut made = plain_form(&input, &out("out"), options, &Silent).unwrap();
        assert_eq!(files(&out("out")), files(&out("whole")));
        made.output = whole.output.clone();
        assert_eq!(made, whole, "the report is that of one run");
        std::fs::remove_dir_all(out("out")).unwrap();
    }

    // Stopped right after it was published: nothing is left to do, and what was rounded is not known any more.
    plain_form(&input, &out("out"), options, &StopAfter(6.into())).unwrap_err();
    std::fs::remove_dir_all(out(".out.partial")).unwrap();
    std::fs::rename(out("whole"), out("out")).unwrap();
    let made = plain_form(&input, &out("out"), options, &Silent).unwrap();
    assert_eq!((made.shards, made.rounding), (whole.shards, None));
    assert!(!out(".out.transaction").exists());
    std::fs::rename(out("out"), out("whole")).unwrap();

    // Another input with the same headers is another input.
    plain_form(&input, &out("out"), options, &StopAfter(6.into())).unwrap_err();
    let mut tensors: Vec<Stored> = LINEARS[4..].iter().flat_map(|name| linear(name, name)).collect();
    tensors.iter_mut().filter(|tensor| tensor.name == "mul1.k4.suh").for_each(|t| t.bytes[1] ^= 0x80);
    write(&input.join("b.safetensors"), &tensors);
    let error = plain_form(&input, &out("out"), options, &Silent).unwrap_err().to_string();
    assert!(error.contains("`input`") && error.contains("RECORD.json"), "{error}");
    // So is a partial directory that nobody began, and a disk without room.
    std::fs::create_dir(out(".new.partial")).unwrap();
    refused(&mut dequantize(&input, &out("new"), "bf16"), &["partial directory that no transaction record"]);
    refused(&mut dequantize(&input, &out("whole"), "bf16"), &["whole: it is there already"]);
    refused(
        &mut dequantize(&input, &input.join("plain"), "bf16"),
        &["it overlaps the checkpoint that is read"],
    );
    refused(
        dequantize(&input, &out("x"), "bf16").args(["--max-shard-gib", "0"]),
        &["--max-shard-gib 0", "a positive number"],
    );
    refused(&mut dequantize(&out("nothing"), &out("x"), "bf16"), &["nothing: no such directory"]);
}

#[test]
fn candidates_that_are_of_another_model_are_refused() {
    let mini = Mini::new();
    let other = Mini::new();
    let config = other.model().join("config.json");
    let change = |field: &str, value: Value| {
        let mut json = json_of(&config);
        json[field] = value;
        std::fs::write(&config, json.to_string()).unwrap();
    };
    let evaluate = || eval(&mini.model(), Some(&other.model()), &mini);
    let itself = line(&mut evaluate());
    assert_eq!(itself["evaluation"]["all"]["kl_mean"], 0.0);
    assert_eq!(itself["evaluation"]["all"]["top1_agreement"], 1.0);
    change("rms_norm_eps", json!(1e-6));
    refused(&mut evaluate(), &["field `rms_norm_eps`", "wanted: 0.00001", "mini/config.json says"]);
    change("rms_norm_eps", json!(1e-5));

    // Another tokenizer that gives other ids for a text.
    let plan = mini.plan();
    let text = json!({"id": "t", "axis": "text", "use": "evaluate", "text": "the cat and the dog"});
    let calibrate = noise("a", "calibrate", 1, 9);
    std::fs::write(&plan, json!({"version": 1, "prompts": [calibrate, text]}).to_string()).unwrap();
    let tokenizer = other.model().join("tokenizer.json");
    let mut json = json_of(&tokenizer);
    json["model"]["merges"] = json!([]);
    std::fs::write(&tokenizer, json.to_string()).unwrap();
    refused(&mut evaluate(), &["prompt \"t\"", "the reference's tokenizer cuts the prompt in other tokens"]);
    std::fs::remove_file(mini.model().join("tokenizer.json")).unwrap();
    let data = line(&mut evaluate());
    assert_eq!(data["inputs"]["tokenizer"], json!(tokenizer.display().to_string()));

    // A routed expert that is missing is told before anything runs.
    let broken = Mini::with(|tensors| tensors.retain(|(name, ..)| !name.contains("experts.1.down_proj")));
    refused(
        &mut eval(&broken.model(), None, &broken),
        &["model.layers.1.mlp.experts.1.down_proj.weight", "no such tensor"],
    );
    refused(&mut eval(&mini.path().join("work"), None, &mini), &["the candidate has no config.json"]);
}
