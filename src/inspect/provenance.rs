//! What a checkpoint says of itself: config, shard metadata, manifests. Everything is read as it is; what cannot be read
//! is told and stops nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use rayon::prelude::*;
use serde::Serialize;
use serde_json::Value;

use crate::checkpoint::Reconstruction;
use crate::checkpoint::complete::{CARRIER_MANIFEST_FILE, MANIFEST_FILE};
use crate::checkpoint::roles::QUANTIZATION_FILES;
use crate::error::{IoContext, Result};

/// Manifests longer than this are not read, bytes.
const MAX_MANIFEST: u64 = 1 << 30;
/// Longest text of a single value that is told.
const MAX_TEXT: usize = 80;

/// What is said.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Provenance {
    /// `model_type` of `config.json`.
    pub model_type: Option<String>,
    /// Blocks about quantization by file: `quantization_config` and `hybrid_tr3_tail` of `config.json`, and the whole of
    /// files like `quantization_config.json`.
    pub quantization: BTreeMap<String, Value>,
    /// `__metadata__` of the shards: by key, every value and how many shards have it.
    pub metadata: BTreeMap<String, BTreeMap<String, usize>>,
    /// Manifests by kind.
    pub manifests: BTreeMap<String, Manifests>,
}

/// Manifests of one kind.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Manifests {
    /// Their file names.
    pub files: Vec<String>,
    /// Their plain values at the top and in `provenance` and `origin`: by field, every value and how many manifests have it.
    pub says: BTreeMap<String, BTreeMap<String, usize>>,
    /// Entries of their lists and maps, all files together, by field.
    pub entries: BTreeMap<String, usize>,
    /// Modules whose bits are as the shards have them.
    pub bits_agree: usize,
    /// The first module whose bits are not, in words.
    pub bits_differ: Option<String>,
    /// What could not be read, in words, by file.
    pub unreadable: BTreeMap<String, String>,
}

/// What one manifest says.
#[derive(Default)]
struct Said {
    says: Vec<(String, String)>,
    entries: Vec<(String, usize)>,
    bits: Vec<(String, u64)>,
}

impl Provenance {
    /// Reads what lies beside the shards of `path`, or beside the file `path` with its name.
    ///
    /// # Errors
    /// Names a folder that cannot be listed.
    pub fn read(path: &Path, weights: &Reconstruction) -> Result<Self> {
        let mut provenance = Self::default();
        for (_, shard) in weights.checkpoint().shards() {
            for (key, value) in shard.metadata() {
                count(&mut provenance.metadata, key, value);
            }
        }
        let mut files = Vec::new();
        if path.is_dir() {
            for entry in std::fs::read_dir(path).at(path)? {
                files.push(entry.at(path)?.file_name().to_string_lossy().into_owned());
            }
            provenance.read_config(path);
        } else if let Some(stem) = path.file_stem() {
            files.push(format!("{}.json", stem.to_string_lossy()));
        }
        let folder = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new("")) };
        files.sort();
        let mut by_kind: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for file in files {
            if let Some(kind) = kind_of(&file).filter(|_| folder.join(&file).is_file()) {
                by_kind.entry(kind).or_default().push(file);
            }
        }
        for (kind, files) in by_kind {
            let read = |file: &String| (file.clone(), read_manifest(&folder.join(file)));
            let said: Vec<_> = files.par_iter().map(read).collect();
            let mut manifests = Manifests { files, ..Manifests::default() };
            said.into_iter().for_each(|(file, said)| manifests.add(file, said, weights));
            provenance.manifests.insert(kind.to_owned(), manifests);
        }
        Ok(provenance)
    }

    fn read_config(&mut self, dir: &Path) {
        let read = |file: &str| read_value(&dir.join(file)).ok();
        if let Some(config) = read("config.json") {
            self.model_type = config["model_type"].as_str().map(str::to_owned);
            for key in ["quantization_config", "hybrid_tr3_tail", "compression_config"] {
                if let Some(block) = config.get(key).filter(|block| !block.is_null()) {
                    self.quantization.insert(format!("config.json {key}"), block.clone());
                }
            }
        }
        for file in QUANTIZATION_FILES {
            if let Some(block) = read(file) {
                self.quantization.insert(file.to_owned(), block);
            }
        }
    }
}

impl Manifests {
    fn add(&mut self, file: String, said: Result<Said, String>, weights: &Reconstruction) {
        let said = match said {
            Ok(said) => said,
            Err(why) => {
                self.unreadable.insert(file, why);
                return;
            }
        };
        for (field, value) in said.says {
            count(&mut self.says, &field, &value);
        }
        for (field, entries) in said.entries {
            *self.entries.entry(field).or_default() += entries;
        }
        for (module, bits) in said.bits {
            let stored = weights.packed().get(&module);
            match stored.map(|stored| stored.bits()) {
                Some(Some(stored)) if u64::from(stored) == bits => self.bits_agree += 1,
                found => {
                    let stored = match (stored, found) {
                        (Some(_), Some(Some(bits))) => format!("{bits} bits"),
                        (Some(module), _) => module.form.name(),
                        _ => "not there".to_owned(),
                    };
                    self.bits_differ.get_or_insert(format!(
                        "{file}: {module} is said to have {bits} bits, and is {stored}"
                    ));
                }
            }
        }
    }
}

fn count(counts: &mut BTreeMap<String, BTreeMap<String, usize>>, field: &str, value: &str) {
    *counts.entry(field.to_owned()).or_default().entry(value.to_owned()).or_default() += 1;
}

/// Which kind of manifest a file is, as a name with a star.
fn kind_of(file: &str) -> Option<&'static str> {
    let layer = |stem: &str| file.starts_with(stem) && file.ends_with(".json");
    match file {
        MANIFEST_FILE => Some(MANIFEST_FILE),
        CARRIER_MANIFEST_FILE => Some(CARRIER_MANIFEST_FILE),
        _ if layer("r7-experts-layer-") => Some("r7-experts-layer-*.json"),
        _ if layer("r7-v1-layer-") => Some("r7-v1-layer-*.json"),
        _ => None,
    }
}

fn read_value(path: &Path) -> Result<Value, String> {
    let length = std::fs::metadata(path).map_err(|error| error.to_string())?.len();
    if length > MAX_MANIFEST {
        return Err(format!("{length} bytes are too many to read"));
    }
    let bytes = std::fs::read(path).map_err(|error| error.to_string())?;
    serde_json::from_slice(&bytes).map_err(|error| format!("no JSON: {error}"))
}

fn read_manifest(path: &Path) -> Result<Said, String> {
    let Value::Object(fields) = read_value(path)? else { return Err("no JSON object".to_owned()) };
    let mut said = Said::default();
    for (field, value) in &fields {
        match (field.as_str(), value) {
            ("bit_map" | "per_tensor_bits", Value::Object(bits)) => {
                said.bits
                    .extend(bits.iter().filter_map(|(module, bits)| Some((module.clone(), bits.as_u64()?))));
                said.entries.push((field.clone(), bits.len()));
            }
            ("provenance" | "origin", Value::Object(inner)) => {
                for (key, value) in inner {
                    said.says.extend(text_of(value).map(|text| (format!("{field}.{key}"), text)));
                }
            }
            (_, Value::Object(entries)) => said.entries.push((field.clone(), entries.len())),
            (_, Value::Array(entries)) => said.entries.push((field.clone(), entries.len())),
            _ => said.says.extend(text_of(value).map(|text| (field.clone(), text))),
        }
    }
    Ok(said)
}

/// A single value as text.
fn text_of(value: &Value) -> Option<String> {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        Value::Bool(yes) => yes.to_string(),
        _ => return None,
    };
    let short: String = text.chars().take(MAX_TEXT).collect();
    Some(if short.len() < text.len() { format!("{short}...") } else { text })
}

/// `a (3 times), b` where that is short, else `N values`, and of numbers the first and the last.
pub(super) fn summary(values: &BTreeMap<String, usize>) -> String {
    const LONGEST: usize = 100;
    let times = |(value, count): (&String, &usize)| match count {
        1 => value.clone(),
        _ => format!("{value} ({count} times)"),
    };
    let all = values.iter().map(times).collect::<Vec<_>>().join(", ");
    if values.len() == 1 || all.len() <= LONGEST {
        return all;
    }
    let numbers: Option<BTreeSet<u64>> = values.keys().map(|value| value.parse().ok()).collect();
    let ends = match numbers.as_ref().map(|numbers| (numbers.first(), numbers.last())) {
        Some((Some(first), Some(last))) => format!(", {first} to {last}"),
        _ => String::new(),
    };
    format!("{} values{ends}", values.len())
}
