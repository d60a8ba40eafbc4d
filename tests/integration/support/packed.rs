//! Checkpoints with packed linears, put together by hand: golden linears under any names, rank slices, and a mini walk's
//! layers in place of the experts they replace.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use half::f16;
use serde_json::{Value, json};
use walk::codec::trellis::pack;
use walk::store::safetensors_read::SafetensorsFile;
use walk::store::safetensors_write::{TensorData, write_safetensors};
use walk::store::tensor_dtype::TensorDtype;

use super::mini::Mini;
use super::repository;

/// A stored tensor with its name.
pub struct Stored {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: TensorDtype,
    /// Extents.
    pub shape: Vec<usize>,
    /// Payload.
    pub bytes: Vec<u8>,
}

/// The golden linears' names.
pub const LINEARS: [&str; 7] = ["mcg.k2", "mcg.k3", "mcg.k4", "mcg.k5", "mcg.k6", "mul1.k4", "3inst.k4"];

/// The golden file.
pub fn golden() -> SafetensorsFile {
    SafetensorsFile::open(repository("tests/golden/exl3/linears.safetensors")).unwrap()
}

/// One tensor of a file.
pub fn stored(file: &SafetensorsFile, name: &str) -> Stored {
    let info = file.info(name).unwrap();
    let bytes = file.bytes(name).unwrap().to_vec();
    Stored { name: name.to_owned(), dtype: info.dtype, shape: info.shape.clone(), bytes }
}

/// All tensors of a file.
pub fn all_stored(path: &Path) -> Vec<Stored> {
    let file = SafetensorsFile::open(path).unwrap();
    file.names().map(|name| stored(&file, name)).collect()
}

/// The packed tensors of a golden linear, under another module's name.
pub fn linear(golden_name: &str, module: &str) -> Vec<Stored> {
    let file = golden();
    let parts = ["trellis", "suh", "svh", "mcg", "mul1"];
    let present = parts.iter().filter(|part| file.contains(&format!("{golden_name}.{part}")));
    let rename = |part: &&str| Stored {
        name: format!("{module}.{part}"),
        ..stored(&file, &format!("{golden_name}.{part}"))
    };
    present.map(rename).collect()
}

/// A golden KAIJU1 payload as the tensor of a module.
pub fn kaiju(golden_name: &str, module: &str) -> Stored {
    let payload = stored(&kaiju_golden(), &format!("{golden_name}.payload"));
    Stored { name: format!("{module}.kaiju1"), ..payload }
}

/// What it decodes to: `[rows, cols]`, f32.
pub fn kaiju_dense(golden_name: &str) -> Stored {
    stored(&kaiju_golden(), &format!("{golden_name}.dense"))
}

fn kaiju_golden() -> SafetensorsFile {
    SafetensorsFile::open(repository("tests/golden/kaiju/payloads.safetensors")).unwrap()
}

/// The packed tensors of a golden linear cut into ranks of 128 inputs or outputs.
pub fn ranks(golden_name: &str, module: &str, inputs: bool) -> Vec<Stored> {
    let whole = linear(golden_name, module);
    let part = |name: &str| whole.iter().find(|tensor| tensor.name.ends_with(name));
    let (trellis, suh, svh) = (part("trellis").unwrap(), part("suh").unwrap(), part("svh").unwrap());
    let [rows, cols, words] = trellis.shape[..] else { panic!("a trellis") };
    assert_eq!(words, pack::words((words / 16) as u32));
    let count = if inputs { rows } else { cols } / 8;
    let mut out = Vec::new();
    for rank in 0..count {
        let mine = rank * 8..(rank + 1) * 8;
        let mut bytes = Vec::new();
        for (row, line) in trellis.bytes.chunks_exact(cols * words * 2).enumerate() {
            match inputs {
                true if mine.contains(&row) => bytes.extend_from_slice(line),
                true => {}
                false => bytes.extend_from_slice(&line[mine.start * words * 2..mine.end * words * 2]),
            }
        }
        let shape = if inputs { vec![8, cols, words] } else { vec![rows, 8, words] };
        let name = |part: &str| format!("{module}.rank{rank}.{part}");
        let cut = |vector: &Stored, cut: bool, part: &str| {
            let bytes = match cut {
                true => vector.bytes[rank * 256..(rank + 1) * 256].to_vec(),
                false => vector.bytes.clone(),
            };
            Stored { name: name(part), dtype: TensorDtype::F16, shape: vec![bytes.len() / 2], bytes }
        };
        out.push(Stored { name: name("trellis"), dtype: TensorDtype::I16, shape, bytes });
        out.extend([cut(suh, inputs, "suh"), cut(svh, !inputs, "svh")]);
        let marker = whole.iter().find(|tensor| tensor.dtype == TensorDtype::I32).unwrap();
        let kind = marker.name.rsplit('.').next().unwrap();
        out.push(Stored {
            name: name(kind),
            dtype: TensorDtype::I32,
            shape: vec![],
            bytes: marker.bytes.clone(),
        });
    }
    out
}

/// Writes a safetensors file.
pub fn write(path: &Path, tensors: &[Stored]) {
    let data: Vec<TensorData<'_>> =
        tensors.iter().map(|t| TensorData::from_bytes(&*t.name, t.dtype, &t.shape, &t.bytes)).collect();
    write_safetensors(path, &BTreeMap::from([("format".into(), "pt".into())]), &data).unwrap();
}

/// `reconstructed` of a golden linear as a weight `[N, K]`, rounded to f16.
pub fn reconstructed(golden_name: &str) -> (Vec<usize>, Vec<f16>) {
    let Stored { shape, bytes, .. } = stored(&golden(), &format!("{golden_name}.reconstructed"));
    let (k, n) = (shape[0], shape[1]);
    let value = |at: usize| f32::from_le_bytes(bytes[4 * at..4 * at + 4].try_into().unwrap());
    let transposed = (0..n).flat_map(|col| (0..k).map(move |row| row * n + col));
    (vec![n, k], transposed.map(|at| f16::from_f32(value(at))).collect())
}

/// A complete directory: the mini model with the layers of a walk's `v2` folder in place of the experts they replace.
pub fn assemble(mini: &Mini, v2: &Path, out: &Path) {
    std::fs::create_dir(out).unwrap();
    let carried: Vec<Stored> = all_stored(&mini.model().join("model.safetensors"))
        .into_iter()
        .filter(|tensor| !tensor.name.contains(".mlp.experts."))
        .collect();
    write(&out.join("model-00001-of-00001.safetensors"), &carried);
    for entry in std::fs::read_dir(v2).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, out.join(path.file_name().unwrap())).unwrap();
    }
    for file in ["tokenizer.json", "model.json"] {
        std::fs::copy(mini.model().join(file), out.join(file)).unwrap();
    }
    let mut config = json_of(&mini.model().join("config.json"));
    let quantization = json!({"quant_method": "exl3", "r7_routed_experts": {"marker": "CODEX_ROUND7"}});
    config["quantization_config"] = quantization.clone();
    std::fs::write(out.join("config.json"), config.to_string()).unwrap();
    std::fs::write(out.join("quantization_config.json"), quantization.to_string()).unwrap();
    std::fs::write(out.join("MANIFEST.json"), json!({"schema": "r7-complete-v2-checkpoint-v1"}).to_string())
        .unwrap();
    index(out);
}

/// Writes the index of the shards in a folder.
pub fn index(folder: &Path) {
    let mut weight_map = serde_json::Map::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|ending| ending == "safetensors") {
            let file = path.file_name().unwrap().to_str().unwrap();
            for name in SafetensorsFile::open(&path).unwrap().names() {
                weight_map.insert(name.to_owned(), json!(file));
            }
        }
    }
    let index = json!({"metadata": {}, "weight_map": weight_map});
    std::fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// A JSON file.
pub fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// A mini walk, finished: the model, its work directory, and the report it printed.
pub fn walked(name: &str) -> (Mini, PathBuf, Value) {
    let mini = Mini::new();
    let work = mini.work(name);
    let output = super::command(&mini, &work).arg("--json").assert().success().get_output().clone();
    let text = String::from_utf8(output.stdout).unwrap();
    let mut report: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!(report["type"], "report");
    (mini, work, report["data"].take())
}
