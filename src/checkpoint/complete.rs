//! A complete checkpoint: carried tensors and the layers of a walk in one model directory, and what it says of itself.
//!
//! `MANIFEST.json` lists every file and every carried payload by SHA-256 and names the walk they come from;
//! `MANIFEST.sha256` is its own hash. `config.json` tells a loader what it has to be able to do, in `quantization_config`
//! (which `quantization_config.json` repeats). Names with the MTP layer's number in them are templated by that number.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::directory::INDEX_FILE;
use super::finished::finished_stem;
use super::kaiju1_block::KAIJU1_BLOCK;
use super::kaiju1_manifest::Kaiju1Manifest;
use super::manifest_v2::V2Manifest;
use super::schema_v1;
use super::schema_v2::{MARKER, shard_stem};
use crate::config::choices::CodecName;
use crate::error::{Result, refuse};
use crate::store::hash::{Hash, sha256_hex};
use crate::store::strict_json::{StrictValue, parse_json, read_file, read_json};

/// The manifest of a complete checkpoint.
pub const MANIFEST_FILE: &str = "MANIFEST.json";
/// Its hash, as `sha256sum` writes it.
pub const MANIFEST_HASH_FILE: &str = "MANIFEST.sha256";
/// The model's configuration.
pub const CONFIG_FILE: &str = "config.json";
/// The manifest of a carrier with packed linears.
pub const CARRIER_MANIFEST_FILE: &str = "CARRIER_MANIFEST.json";
/// What `config.json` says of quantization, by itself.
pub const QUANTIZATION_FILE: &str = "quantization_config.json";
/// `schema` of an assembled checkpoint of schema-v2 layers.
pub const V2_SCHEMA: &str = "r7-complete-v2-checkpoint-v1";
/// `schema` of one of rank slices.
pub const V1_SCHEMA: &str = "r7-complete-v1-checkpoint-v1";
/// `schema` of an assembled checkpoint of KAIJU1 layers.
pub const KAIJU1_SCHEMA: &str = "kaiju1-complete-checkpoint-v1";
/// What a loader of experts with different widths has to know.
pub const FEATURE: &str = "r7-asymmetric-two-stack";
/// The outputs of a tensor-parallel slice are a multiple of this.
pub const SLICE_QUANTUM: usize = 128;
/// The block of `quantization_config` for layers whose widths differ.
pub const R7_BLOCK: &str = "r7_routed_experts";
/// The block for rank slices of one width, which existing loaders know.
pub const HYBRID_BLOCK: &str = "hybrid_tr3_tail";
/// Names of an expert's tensors in [`HYBRID_BLOCK`].
pub const HYBRID_TENSOR_SCHEMA: &str =
    "model.layers.{L}.mlp.experts.{E}.{proj}.rank{r}.{trellis|suh|svh|mcg}";

/// What a complete checkpoint was made from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    /// SHA-256 of the walk's `WALK_COMPLETE.json`.
    pub walk_complete_sha256: Hash,
    /// Head of the walk's journal.
    pub journal_head_sha256: Hash,
    /// The walk's recipe.
    pub recipe_sha256: Hash,
    /// The walk's corpus.
    pub corpus_plan_sha256: Hash,
    /// Inventory of the BF16 source of the experts.
    pub source_inventory_sha256: Hash,
    /// Inventory of the carrier.
    pub carrier_inventory_sha256: Hash,
}

/// A replaced layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerEntry {
    /// File name of the layer's manifest.
    pub manifest: String,
    /// Its shard, of a whole layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard: Option<String>,
    /// Its shards by rank, of schema v1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shards: Option<Vec<String>>,
    /// Sum of its tensors' bits a weight; with KAIJU1 the bits of its payloads.
    pub bit_units: u64,
}

impl LayerEntry {
    /// The entry of a layer, whole or in so many ranks.
    pub fn named(layer: usize, tp_size: Option<usize>, bit_units: u64) -> Self {
        match tp_size {
            None => Self {
                manifest: format!("{}.json", shard_stem(layer)),
                shard: Some(format!("{}.safetensors", shard_stem(layer))),
                shards: None,
                bit_units,
            },
            Some(tp_size) => Self {
                manifest: schema_v1::manifest_name(layer),
                shard: None,
                shards: Some((0..tp_size).map(|rank| schema_v1::shard_name(layer, rank)).collect()),
                bit_units,
            },
        }
    }

    /// The entry of a KAIJU1 layer.
    pub fn kaiju1(layer: usize, payload_bits: u64) -> Self {
        let stem = finished_stem(CodecName::Kaiju1, layer);
        Self {
            manifest: format!("{stem}.json"),
            shard: Some(format!("{stem}.safetensors")),
            shards: None,
            bit_units: payload_bits,
        }
    }

    /// Its files.
    fn files(&self) -> impl Iterator<Item = &str> {
        let shards = self.shard.iter().chain(self.shards.iter().flatten());
        std::iter::once(&self.manifest).chain(shards).map(String::as_str)
    }
}

/// Of rank slices: what the whole checkpoint was like, so that it can be put together again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SlicedFrom {
    /// SHA-256 of the whole checkpoint's `MANIFEST.json`.
    pub manifest_sha256: Hash,
    /// Its `quantization_config`.
    pub quantization_config: Value,
    /// Ranks.
    pub tp_size: usize,
}

/// `MANIFEST.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompleteManifest {
    /// [`V2_SCHEMA`], [`V1_SCHEMA`] or [`KAIJU1_SCHEMA`].
    pub schema: String,
    /// Always [`MARKER`].
    pub marker: String,
    /// Version of the recipe's rules.
    pub recipe_version: String,
    /// Every other file of the directory but `MANIFEST.sha256`.
    pub files_sha256: BTreeMap<String, Hash>,
    /// Payloads of the carried tensors.
    pub carried_tensor_payload_sha256: BTreeMap<String, Hash>,
    /// Tensors in all.
    pub tensor_count: usize,
    /// Carried ones.
    pub carried_tensor_count: usize,
    /// Those of the replaced layers.
    pub r7_tensor_count: usize,
    /// Replaced layers by number.
    pub layers: BTreeMap<String, LayerEntry>,
    /// The MTP layer, which is carried.
    pub mtp_layer: usize,
    /// Payloads of the MTP layer's tensors; in the file `mtp{L}_carried_tensor_payload_sha256`.
    #[serde(skip)]
    pub mtp_carried_tensor_payload_sha256: BTreeMap<String, Hash>,
    /// The walk.
    pub origin: Origin,
    /// Of rank slices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sliced_from: Option<SlicedFrom>,
}

impl CompleteManifest {
    /// The key of the MTP layer's payloads in the file.
    fn mtp_key(&self) -> String {
        format!("mtp{}_carried_tensor_payload_sha256", self.mtp_layer)
    }

    /// As the file has it.
    ///
    /// # Errors
    /// A value that JSON cannot hold.
    pub fn to_json(&self) -> Result<Value> {
        let text = |error: serde_json::Error| refuse(format!("the manifest has no JSON form: {error}"));
        let mut value = serde_json::to_value(self).map_err(text)?;
        value[self.mtp_key()] = json!(self.mtp_carried_tensor_payload_sha256);
        Ok(value)
    }

    /// Reads the manifest of `dir` and holds it against its own hash beside it.
    ///
    /// # Errors
    /// Names the file that is missing, cannot be read, does not have this form, or has another hash than it says.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join(MANIFEST_FILE);
        if !path.exists() {
            return refuse("the directory has no manifest")
                .file(&path)
                .wanted("a complete checkpoint, as `walk assemble` and `walk convert` make it")
                .err();
        }
        let bytes = read_file(&path)?;
        let hash_path = dir.join(MANIFEST_HASH_FILE);
        let (said, found) = (read_file(&hash_path)?, hash_line(&sha256_hex(&bytes)));
        if said != found.as_bytes() {
            return refuse("it is not the hash of the manifest beside it")
                .file(hash_path)
                .wanted(found.trim_end())
                .err();
        }
        Self::parse(&path, &bytes)
    }

    /// Reads the `bytes` of a manifest; `path` is only named in refusals.
    ///
    /// # Errors
    /// Names the file and what does not have this form.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let StrictValue(mut value) = parse_json(path, bytes)?;
        let key =
            value["mtp_layer"].as_u64().map(|layer| format!("mtp{layer}_carried_tensor_payload_sha256"));
        let mtp = key.and_then(|key| value.as_object_mut()?.remove(&key));
        let wrong = |error: serde_json::Error| {
            refuse(format!("not as a complete checkpoint's manifest is: {error}"))
                .file(path)
                .wanted(format!("schema {V2_SCHEMA}, {V1_SCHEMA} or {KAIJU1_SCHEMA}"))
        };
        // The strict reader gave an object; arrays in place of structs would not have come through it.
        let mut manifest: Self = serde_json::from_value(value).map_err(wrong)?;
        manifest.mtp_carried_tensor_payload_sha256 =
            serde_json::from_value(mtp.unwrap_or(Value::Null)).map_err(wrong)?;
        if ![V2_SCHEMA, V1_SCHEMA, KAIJU1_SCHEMA].contains(&manifest.schema.as_str())
            || manifest.marker != MARKER
        {
            return refuse(format!("schema {:?}, marker {:?}", manifest.schema, manifest.marker))
                .file(path)
                .wanted(format!("{V2_SCHEMA}, {V1_SCHEMA} or {KAIJU1_SCHEMA}, {MARKER}"))
                .err();
        }
        manifest.check_names(path)?;
        Ok(manifest)
    }

    /// Its layers are told as their schema names them, and its files are files of the directory.
    fn check_names(&self, path: &Path) -> Result<()> {
        let wrong = |field: &str, what: String, wanted: String| {
            refuse(what).file(path).field(field).wanted(wanted).err()
        };
        let tp_size = self.sliced_from.as_ref().map(|from| from.tp_size);
        if tp_size.is_some() != (self.schema == V1_SCHEMA) {
            return wrong(
                "sliced_from",
                format!("schema {}", self.schema),
                format!("one with {V1_SCHEMA} alone"),
            );
        }
        if let Some(tp) = tp_size.filter(|tp| !(1..=1 << 16).contains(tp)) {
            return wrong("sliced_from.tp_size", tp.to_string(), "the number of ranks".to_owned());
        }
        for (key, entry) in &self.layers {
            let layer: Option<usize> = key.parse().ok().filter(|layer: &usize| layer.to_string() == *key);
            let Some(layer) = layer else {
                return wrong("layers", format!("a layer {key:?}"), "layer numbers".to_owned());
            };
            let wanted = match self.schema == KAIJU1_SCHEMA {
                true => LayerEntry::kaiju1(layer, entry.bit_units),
                false => LayerEntry::named(layer, tp_size, entry.bit_units),
            };
            if *entry != wanted {
                return wrong(
                    "layers",
                    format!("layer {key} has {}, {:?}, {:?}", entry.manifest, entry.shard, entry.shards),
                    format!("{}, {:?}, {:?}", wanted.manifest, wanted.shard, wanted.shards),
                );
            }
        }
        let plain = |name: &&String| {
            !name.is_empty()
                && !name.contains(|c: char| c.is_control() || matches!(c, '/' | '\\' | ':'))
                && !name.starts_with("..")
        };
        if let Some(name) = self.files_sha256.keys().find(|name| !plain(name)) {
            return wrong("files_sha256", format!("a file {name:?}"), "plain file names".to_owned());
        }
        let listed = |name: &str| self.files_sha256.contains_key(name);
        let needed = self.layers.values().flat_map(LayerEntry::files).chain([
            CONFIG_FILE,
            QUANTIZATION_FILE,
            INDEX_FILE,
        ]);
        match needed.into_iter().find(|name| !listed(name)) {
            None => Ok(()),
            Some(name) => wrong(
                "files_sha256",
                format!("{name} is not in it"),
                "every file of the checkpoint".to_owned(),
            ),
        }
    }

    /// A layer's v2 manifest tells of all its experts and their channels, and adds up to what this one says of the layer;
    /// `path` is only named in refusals.
    ///
    /// # Errors
    /// As [`V2Manifest::check_whole`]; names the layer whose bit units or recipe version are others here.
    pub fn check_layer(
        &self,
        layer: &V2Manifest,
        path: &Path,
        (experts, channels): (usize, usize),
    ) -> Result<()> {
        layer.check_whole(path, experts, channels)?;
        self.check_entry(path, layer.layer, (layer.allocation_bit_units, &layer.recipe_version))
    }

    /// The same of a KAIJU1 layer's manifest.
    ///
    /// # Errors
    /// As [`Kaiju1Manifest::check_whole`]; names the layer whose bits or recipe version are others here.
    pub fn check_kaiju1_layer(&self, layer: &Kaiju1Manifest, path: &Path, experts: usize) -> Result<()> {
        layer.check_whole(path, experts)?;
        self.check_entry(path, layer.layer, (layer.layer_bits, &layer.recipe_version))
    }

    fn check_entry(&self, path: &Path, layer: usize, (bit_units, recipe_version): (u64, &str)) -> Result<()> {
        let entry = self.layers.get(&layer.to_string());
        let same = entry.is_some_and(|entry| entry.bit_units == bit_units);
        match same && recipe_version == self.recipe_version {
            true => Ok(()),
            false => refuse(format!("{MANIFEST_FILE} has other bit units, or another recipe version"))
                .file(path)
                .layer(layer)
                .wanted("the layer's own")
                .err(),
        }
    }

    /// The replaced layers, ascending.
    ///
    /// # Errors
    /// A key that is no number.
    pub fn layer_numbers(&self) -> Result<Vec<usize>> {
        let number = |key: &String| {
            key.parse()
                .map_err(|_| refuse(format!("a layer {key:?}")).field("layers").wanted("numbers").into())
        };
        let mut layers = self.layers.keys().map(number).collect::<Result<Vec<usize>>>()?;
        layers.sort_unstable();
        Ok(layers)
    }
}

/// What a command says that reads a checkpoint and does not hold it against its manifest.
pub fn unverified(dir: &Path) -> String {
    format!("{}: not held against its {MANIFEST_FILE} here; walk audit does", dir.display())
}

/// The line of [`MANIFEST_HASH_FILE`].
pub fn hash_line(sha256: &str) -> String {
    format!("{sha256}  {MANIFEST_FILE}\n")
}

/// What the blocks of `quantization_config` are made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockFacts {
    /// Version of the recipe's rules.
    pub recipe_version: String,
    /// First and last replaced layer.
    pub moe_layers: (usize, usize),
    /// The MTP layer's number.
    pub mtp_layer: usize,
    /// Candidate widths of the recipe.
    pub k_values: Vec<u32>,
    /// Bits a weight.
    pub target_bpw: String,
    /// Manifests of the layers, ascending.
    pub manifests: Vec<String>,
    /// Ranks; none of whole layers.
    pub tp_size: Option<usize>,
}

impl BlockFacts {
    /// [`R7_BLOCK`].
    pub fn r7(&self) -> Value {
        let schema = if self.tp_size.is_some() { V1_SCHEMA } else { V2_SCHEMA };
        let mut block = json!({
            "marker": MARKER,
            "recipe_version": self.recipe_version,
            "schema": schema,
            "feature": FEATURE,
            "feature_version": 1,
            "requires_loader_feature": FEATURE,
            "schema_version": if self.tp_size.is_some() { 1 } else { 2 },
            "moe_layers": [self.moe_layers.0, self.moe_layers.1],
            "bits": "mixed_tensor",
            "k_values": self.k_values,
            "target_bpw": self.target_bpw,
            "codebook": "mcg",
            "tp_slice_quantum": SLICE_QUANTUM,
            "bit_map_manifests": self.manifests,
        });
        block[format!("mtp_layer_{}", self.mtp_layer)] = json!("carried");
        if let Some(tp) = self.tp_size {
            block["tp"] = json!(tp);
        }
        block
    }
}

/// What of [`R7_BLOCK`] cannot be told from the layers: the recipe's widths have to hold those that are used. `path`
/// is only named in refusals.
///
/// # Errors
/// Names the field.
pub fn check_block(path: &Path, block: &Value, used: &BTreeSet<u32>) -> Result<()> {
    let field = |name: &str| format!("quantization_config.{R7_BLOCK}.{name}");
    let widths: Option<Vec<u32>> = block["k_values"]
        .as_array()
        .and_then(|widths| widths.iter().map(|bits| u32::try_from(bits.as_u64()?).ok()).collect());
    let ascending = widths.as_ref().is_some_and(|widths| {
        widths.windows(2).all(|pair| pair[0] < pair[1]) && used.iter().all(|bits| widths.contains(bits))
    });
    if !ascending {
        return refuse(format!("it is {}", block["k_values"]))
            .file(path)
            .field(field("k_values"))
            .wanted(format!("widths that hold {used:?}, ascending"))
            .err();
    }
    for name in ["recipe_version", "target_bpw"] {
        if block[name].as_str().is_none_or(str::is_empty) {
            return refuse(format!("it is {}", block[name]))
                .file(path)
                .field(field(name))
                .wanted("a text")
                .err();
        }
    }
    Ok(())
}

/// The `quantization_config` of an assembled checkpoint, from that of its carrier (if it has one) and the `block` of its
/// layers; `method` is told where the carrier tells none.
///
/// # Errors
/// Names the key of a carrier whose config is no object where one is wanted.
pub fn assembled_quantization(
    carrier: Option<&Value>,
    method: &str,
    (name, block): (&str, Value),
    mtp_layer: usize,
) -> Result<Value> {
    let mut config = match carrier {
        None | Some(Value::Null) => Map::from_iter([("quant_method".to_owned(), json!(method))]),
        Some(Value::Object(entries)) => entries.clone(),
        Some(_) => {
            return refuse("it is no object")
                .file(CONFIG_FILE)
                .field("quantization_config")
                .wanted("an object, or none")
                .err();
        }
    };
    // A carrier may be an assembled checkpoint itself: what it says of layers that are replaced is gone with them.
    config.remove(R7_BLOCK);
    config.remove(KAIJU1_BLOCK);
    config.insert(name.to_owned(), block);
    if let Some(hybrid) = config.get_mut(HYBRID_BLOCK) {
        let Some(hybrid) = hybrid.as_object_mut() else {
            return refuse("it is no object")
                .file(CONFIG_FILE)
                .field(format!("quantization_config.{HYBRID_BLOCK}"))
                .wanted("an object, or none")
                .err();
        };
        hybrid.insert("moe_layers".to_owned(), json!([mtp_layer, mtp_layer]));
        hybrid.insert("r7_compat_role".to_owned(), json!(format!("carried_mtp{mtp_layer}_only")));
    }
    Ok(Value::Object(config))
}

/// The `config.json` of a checkpoint directory as an object.
///
/// # Errors
/// Names the file that is missing or no object.
pub fn read_config(dir: &Path) -> Result<Map<String, Value>> {
    let path = dir.join(CONFIG_FILE);
    match read_json(&path)? {
        StrictValue(Value::Object(entries)) => Ok(entries),
        StrictValue(_) => refuse("it is no object").file(path).wanted("a model's configuration").err(),
    }
}

/// A configuration for people and machines: indented, keys sorted, a newline at the end.
///
/// # Errors
/// A value that JSON cannot hold.
pub fn pretty(value: &Value) -> Result<Vec<u8>> {
    fn sorted(value: &Value) -> Value {
        match value {
            Value::Object(entries) => {
                // A feature of serde_json that any dependency may turn on would keep the order of insertion.
                let entries: BTreeMap<&String, &Value> = entries.iter().collect();
                entries
                    .into_iter()
                    .map(|(key, value)| (key.clone(), sorted(value)))
                    .collect::<Map<_, _>>()
                    .into()
            }
            Value::Array(items) => items.iter().map(sorted).collect(),
            other => other.clone(),
        }
    }
    let text = |error: serde_json::Error| refuse(format!("it has no JSON form: {error}"));
    let mut bytes = serde_json::to_vec_pretty(&sorted(value)).map_err(text)?;
    bytes.push(b'\n');
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(tp_size: Option<usize>) -> BlockFacts {
        BlockFacts {
            recipe_version: "r".into(),
            moe_layers: (3, 77),
            mtp_layer: 78,
            k_values: vec![3, 4, 5],
            target_bpw: "3.5".into(),
            manifests: vec!["r7-experts-layer-003.json".into()],
            tp_size,
        }
    }

    #[test]
    fn a_carrier_of_rank_slices_keeps_its_block_for_the_mtp_layer_alone() {
        let carrier = json!({"quant_method": "exl3", HYBRID_BLOCK: {"moe_layers": [3, 78], "tp": 4}});
        let assembled = |carrier: Option<&Value>| {
            assembled_quantization(carrier, "exl3", (R7_BLOCK, facts(None).r7()), 78)
        };
        let config = assembled(Some(&carrier)).unwrap();
        assert_eq!(
            config[HYBRID_BLOCK],
            json!({"moe_layers": [78, 78], "tp": 4, "r7_compat_role": "carried_mtp78_only"})
        );
        let block = &config[R7_BLOCK];
        assert_eq!(block["schema"], "r7-complete-v2-checkpoint-v1");
        assert_eq!(block["mtp_layer_78"], "carried");
        assert_eq!(block["moe_layers"], json!([3, 77]));
        assert_eq!(facts(Some(4)).r7()["tp"], 4);
        let plain = assembled(None).unwrap();
        assert_eq!(plain["quant_method"], "exl3");
        assert!(assembled(Some(&json!([]))).is_err());
    }

    #[test]
    fn a_manifest_reads_back_and_other_keys_are_refused() {
        let hash = "0".repeat(64);
        let manifest = CompleteManifest {
            schema: V2_SCHEMA.into(),
            marker: MARKER.into(),
            recipe_version: "r".into(),
            files_sha256: [
                "config.json",
                "quantization_config.json",
                "model.safetensors.index.json",
                "r7-experts-layer-003.json",
                "r7-experts-layer-003.safetensors",
            ]
            .map(|file| (file.to_owned(), hash.clone()))
            .into(),
            carried_tensor_payload_sha256: BTreeMap::new(),
            tensor_count: 3,
            carried_tensor_count: 1,
            r7_tensor_count: 2,
            layers: BTreeMap::from([("3".to_owned(), LayerEntry::named(3, None, 7))]),
            mtp_layer: 78,
            mtp_carried_tensor_payload_sha256: BTreeMap::from([("x".to_owned(), hash.clone())]),
            origin: Origin {
                walk_complete_sha256: hash.clone(),
                journal_head_sha256: hash.clone(),
                recipe_sha256: hash.clone(),
                corpus_plan_sha256: hash.clone(),
                source_inventory_sha256: hash.clone(),
                carrier_inventory_sha256: hash,
            },
            sliced_from: None,
        };
        let mut value = manifest.to_json().unwrap();
        assert!(value["mtp78_carried_tensor_payload_sha256"]["x"].is_string());
        let read = |value: &Value| CompleteManifest::parse(Path::new("m"), value.to_string().as_bytes());
        assert_eq!(read(&value).unwrap(), manifest);
        assert_eq!(manifest.layer_numbers().unwrap(), [3]);
        value["more"] = json!(1);
        assert!(read(&value).unwrap_err().to_string().contains("more"));
        value.as_object_mut().unwrap().remove("more");
        for (pointer, bad) in [
            ("/mtp_layer", json!(5)),
            ("/layers/3/shard", json!("../x")),
            ("/layers/3/shards", json!(["a"])),
            ("/sliced_from", json!({"manifest_sha256": "0", "quantization_config": {}, "tp_size": 2})),
            ("/layers", json!({"03": value["layers"]["3"]})),
            ("/files_sha256", json!({})),
            ("/schema", json!(V1_SCHEMA)),
        ] {
            let mut changed = value.clone();
            match changed.pointer_mut(pointer) {
                Some(place) => *place = bad,
                None => changed[&pointer[1..]] = bad,
            }
            assert!(read(&changed).is_err(), "{pointer}");
        }
        let mut changed = value.clone();
        changed["files_sha256"]["../x"] = json!("0");
        assert!(read(&changed).unwrap_err().to_string().contains("../x"));
    }
}
