//! What the integration tests share: weights from safetensors files, paths, error measures.
#![allow(dead_code)]

pub mod gguf;
pub mod mini;
pub mod packed;
pub mod stage;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use mini::Mini;
use walk::store::atomic::write_json_atomic;
use walk::store::hash::sha256_file;
use walk::walk::journal::{JournalRecord, Seal};

use candle_core::{DType, Device, Tensor};
use walk::checkpoint::WeightSource;
use walk::config::Geometry;
use walk::error::refuse;
use walk::model::{Embedding, Head, Layer, TopK, round_bf16};

/// A path below the repository root.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// All tensors of some safetensors files, by name.
#[derive(Clone)]
pub struct FileWeights(pub HashMap<String, Tensor>);

impl FileWeights {
    /// Every `model*.safetensors` in a folder.
    pub fn open(folder: &Path) -> Self {
        let mut tensors = HashMap::new();
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if name.starts_with("model") && name.ends_with(".safetensors") {
                tensors.extend(candle_core::safetensors::load(&path, &Device::Cpu).unwrap());
            }
        }
        Self(tensors)
    }
}

impl WeightSource for FileWeights {
    fn contains(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    fn load(&self, name: &str, shape: &[usize], dtype: DType, device: &Device) -> walk::Result<Tensor> {
        let Some(tensor) = self.0.get(name) else {
            return refuse("missing").tensor(name).wanted(format!("a tensor {shape:?}")).err();
        };
        if tensor.dims() != shape {
            return refuse(format!("shape {:?}", tensor.dims()))
                .tensor(name)
                .wanted(format!("{shape:?}"))
                .err();
        }
        Ok(tensor.to_dtype(dtype)?.to_device(device)?)
    }
}

/// What is carried from layer to layer.
#[derive(Clone, Copy, PartialEq)]
pub enum State {
    F32,
    Bf16,
}

/// A whole model, loaded.
pub struct Model {
    pub geometry: Geometry,
    pub weights: FileWeights,
    pub embedding: Embedding,
    pub layers: Vec<Layer>,
    pub head: Head,
}

impl Model {
    pub fn open(folder: &Path) -> Self {
        let geometry = Geometry::read(&folder.join("config.json")).unwrap();
        let weights = FileWeights::open(folder);
        geometry.check_indexer_tensors(&weights).unwrap();
        let layer = |layer| Layer::load(&geometry, layer, &weights, &Device::Cpu).unwrap();
        Self {
            embedding: Embedding::load(&geometry, &weights, &Device::Cpu).unwrap(),
            layers: (0..geometry.num_hidden_layers).map(layer).collect(),
            head: Head::load(&geometry, &weights, &Device::Cpu).unwrap(),
            geometry,
            weights,
        }
    }

    /// The state after the last layer, and each layer's top-k lists.
    pub fn forward(&self, prompts: &[Vec<u32>], state: State) -> (Vec<Tensor>, Vec<Vec<TopK>>) {
        let positions: Vec<Vec<u32>> = prompts.iter().map(|ids| (0..ids.len() as u32).collect()).collect();
        let mut hidden: Vec<Tensor> = prompts.iter().map(|ids| self.embedding.embed(ids).unwrap()).collect();
        let mut carry = vec![None; prompts.len()];
        let mut lists = Vec::new();
        for layer in &self.layers {
            let out = layer.forward(&hidden, &positions, &carry, &self.weights).unwrap();
            hidden = out.hidden;
            if state == State::Bf16 {
                hidden = hidden.iter().map(|state| round_bf16(state).unwrap()).collect();
            }
            lists.push(out.carry.clone());
            carry = out.carry.into_iter().map(Some).collect();
        }
        (hidden, lists)
    }
}

/// All values of a tensor as f32.
pub fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// All values of an I32 tensor.
pub fn integers(tensor: &Tensor) -> Vec<i32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// `‖a - b‖ / ‖b‖`.
pub fn relative_l2(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |x: f64| x * x;
    let error: f64 = a.iter().zip(b).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    (error / b.iter().map(|b| square(f64::from(*b))).sum::<f64>()).sqrt()
}

/// Exact bytes of values.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// A quiet walk of the mini model through the built binary.
pub fn command(mini: &Mini, work: &Path) -> Command {
    let mut command = Command::cargo_bin("walk").unwrap();
    command
        .args(["--quiet", "--model"])
        .arg(mini.model())
        .arg("--corpus")
        .arg(mini.plan())
        .arg("--work")
        .arg(work);
    command
}

/// Makes a journal anew, as a forger would: the same identity, and the seals that `change` leaves.
pub fn forge_journal(work: &Path, change: impl FnOnce(&mut Vec<Seal>)) {
    let known = JournalRecord::read(work).unwrap();
    let mut seals = known.stages;
    change(&mut seals);
    let mut forged = JournalRecord::new(known.identity).unwrap();
    for Seal { stage, inputs, outputs, .. } in seals {
        forged.push(&stage, inputs, outputs).unwrap();
    }
    write_json_atomic(work.join("JOURNAL.json"), &forged).unwrap();
}

/// Cuts a journal after a stage, whose seal is changed.
pub fn cut_journal(work: &Path, last: &str, change: impl FnOnce(&mut Seal)) {
    forge_journal(work, |seals| {
        let at = seals.iter().position(|seal| seal.stage == last).unwrap();
        seals.truncate(at + 1);
        change(&mut seals[at]);
    });
}

/// SHA-256 of every file below a folder, by relative path. The lock holds nothing, the report tells of times.
pub fn files(folder: &Path) -> BTreeMap<String, String> {
    fn visit(root: &Path, folder: &Path, found: &mut BTreeMap<String, String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                visit(root, &path, found);
            } else if !["LOCK", "REPORT.json"].iter().any(|name| path.file_name().unwrap() == *name) {
                let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
                found.insert(name, sha256_file(&path).unwrap());
            }
        }
    }
    let mut found = BTreeMap::new();
    visit(folder, folder, &mut found);
    found
}
