//! Source, carrier and work directory: what each has to be before a walk may start.
//!
//! The source gives the routed experts and must be plain BF16: a config with any quantization metadata, or a routed
//! expert tensor that is missing, of another type or shape, or unknown, is refused (no quantising of the quantised).
//! The carrier gives everything else. Both may be one directory only if the recipe allows it, and the work directory
//! neither contains nor lies in either, symbolic links resolved.

use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use super::directory::CheckpointDir;
use super::names::{self, Projection};
use crate::error::{IoContext, Result, refuse};
use crate::store::strict_json::{StrictValue, read_json};
use crate::store::tensor_dtype::TensorDtype;

/// Files whose presence alone says that a checkpoint is quantized.
pub const QUANTIZATION_FILES: [&str; 3] =
    ["quantization_config.json", "quantize_config.json", "hf_quant_config.json"];

/// What roles need to know of a model's geometry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertGeometry {
    /// The MoE layers whose routed experts are replaced, ascending; never the MTP layer.
    pub moe_layers: Vec<usize>,
    /// Routed experts a layer.
    pub experts: usize,
    /// Hidden size.
    pub hidden: usize,
    /// Width of a routed expert.
    pub intermediate: usize,
}

impl ExpertGeometry {
    /// `[out, in]` of a projection: `[intermediate, hidden]` for gate and up, `[hidden, intermediate]` for down.
    #[must_use]
    pub fn shape(&self, projection: Projection) -> [usize; 2] {
        if projection == Projection::Down {
            [self.hidden, self.intermediate]
        } else {
            [self.intermediate, self.hidden]
        }
    }
}

/// The BF16 checkpoint the routed experts are read from.
#[derive(Debug, Clone)]
pub struct Source(Arc<CheckpointDir>);

/// The checkpoint everything else comes from.
#[derive(Debug, Clone)]
pub struct Carrier(Arc<CheckpointDir>);

impl Source {
    /// Opens `dir` as a source of the experts that `geometry` describes.
    ///
    /// # Errors
    /// Names file, layer, expert and tensor of what no source may have or lack.
    pub fn open(dir: impl AsRef<Path>, geometry: &ExpertGeometry) -> Result<Self> {
        let dir = dir.as_ref();
        refuse_quantization(dir)?;
        let checkpoint = CheckpointDir::open(dir)?;
        check_experts(&checkpoint, geometry)?;
        Ok(Self(Arc::new(checkpoint)))
    }

    /// The checkpoint.
    pub fn checkpoint(&self) -> &Arc<CheckpointDir> {
        &self.0
    }
}

impl Carrier {
    /// Opens `dir` as a carrier. What its tensors have to be is for the forward pass to say.
    ///
    /// # Errors
    /// As [`CheckpointDir::open`].
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        Ok(Self(Arc::new(CheckpointDir::open(dir)?)))
    }

    /// The checkpoint.
    pub fn checkpoint(&self) -> &Arc<CheckpointDir> {
        &self.0
    }
}

/// Both roles, checked together with the work directory.
#[derive(Debug, Clone)]
pub struct Roles {
    /// Where routed experts come from.
    pub source: Source,
    /// Where everything else comes from.
    pub carrier: Carrier,
}

impl Roles {
    /// Opens both roles. `work` need not exist yet. `allow_same` is the recipe's word on one directory for both roles.
    ///
    /// # Errors
    /// Names the directory that collides, or what [`Source::open`] and [`Carrier::open`] name.
    pub fn open(
        source: &Path,
        carrier: &Path,
        work: &Path,
        geometry: &ExpertGeometry,
        allow_same: bool,
    ) -> Result<Self> {
        check_disjoint(source, carrier, work, allow_same)?;
        let opened = Source::open(source, geometry)?;
        let same = source.canonicalize().at(source)? == carrier.canonicalize().at(carrier)?;
        let carrier = if same { Carrier(opened.0.clone()) } else { Carrier::open(carrier)? };
        Ok(Self { source: opened, carrier })
    }
}

/// Checks that the three directories do not get in each other's way; only the first two need to exist.
///
/// # Errors
/// Names the directory that collides.
pub fn check_disjoint(source: &Path, carrier: &Path, work: &Path, allow_same: bool) -> Result<()> {
    for (dir, role) in [(source, "source"), (carrier, "carrier")] {
        if !dir.is_dir() {
            return refuse(format!("the {role} is no directory"))
                .file(dir)
                .wanted("a checkpoint directory")
                .err();
        }
    }
    if !allow_same && source.canonicalize().at(source)? == carrier.canonicalize().at(carrier)? {
        return refuse("source and carrier are the same directory")
            .file(source)
            .wanted("separate checkpoints, or a recipe with \"allow_same_source_and_carrier\": true")
            .err();
    }
    let work_resolved = resolve(work)?;
    for (dir, role) in [(source, "source"), (carrier, "carrier")] {
        let resolved = dir.canonicalize().at(dir)?;
        if work_resolved.starts_with(&resolved) || resolved.starts_with(&work_resolved) {
            return refuse(format!("the work directory and the {role} {} overlap", dir.display()))
                .file(work)
                .wanted("a work directory outside both checkpoints and not around them")
                .err();
        }
    }
    Ok(())
}

/// `path` with the symbolic links of its existing part resolved, and the rest taken as it will be created.
///
/// # Errors
/// Names the path that cannot be resolved.
pub fn resolve(path: &Path) -> Result<PathBuf> {
    let absolute = std::path::absolute(path).at(path)?;
    let mut existing = absolute.as_path();
    let mut rest: Vec<Component<'_>> = Vec::new();
    loop {
        match existing.canonicalize() {
            Ok(resolved) => return Ok(rest.iter().rev().fold(resolved, |path, part| step(path, *part))),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let mut components = existing.components();
                match components.next_back() {
                    Some(last) => rest.push(last),
                    None => return Err(error).at(path),
                }
                existing = components.as_path();
            }
            Err(error) => return Err(error).at(path),
        }
    }
}

fn step(mut path: PathBuf, component: Component<'_>) -> PathBuf {
    if component == Component::ParentDir {
        path.pop();
    } else {
        path.push(component);
    }
    path
}

/// Refuses a checkpoint directory whose config or files say that it is quantized.
///
/// # Errors
/// Names the file and the key.
pub fn refuse_quantization(dir: &Path) -> Result<()> {
    const WANTED: &str =
        "an unquantized BF16 checkpoint: quantising quantized experts again would lose twice";
    for name in QUANTIZATION_FILES {
        if dir.join(name).exists() {
            return refuse("the source is quantized: this file says so")
                .file(dir.join(name))
                .wanted(WANTED)
                .err();
        }
    }
    let path = dir.join("config.json");
    if !path.exists() {
        return refuse("the source has no config.json")
            .file(path)
            .wanted("a complete checkpoint directory")
            .err();
    }
    let StrictValue(config) = read_json(&path)?;
    match quantization_key(&config, "") {
        Some(key) => {
            refuse("the source's config has quantization metadata").file(path).field(key).wanted(WANTED).err()
        }
        None => Ok(()),
    }
}

/// Whether a key of a config is about quantization.
fn about_quantization(key: &str) -> bool {
    let lower = key.to_lowercase();
    lower.contains("quant") || lower == "compression_config" || lower == "hybrid_tr3_tail"
}

/// Takes every key that is about quantization out of a config, at any depth, and gives their paths.
pub fn strip_quantization(config: &mut Value) -> Vec<String> {
    fn strip(value: &mut Value, path: &str, stripped: &mut Vec<String>) {
        match value {
            Value::Object(entries) => {
                let place =
                    |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
                entries.retain(|key, _| {
                    let about = about_quantization(key);
                    if about {
                        stripped.push(place(key));
                    }
                    !about
                });
                entries.iter_mut().for_each(|(key, value)| strip(value, &place(key), stripped));
            }
            Value::Array(items) => {
                let items = items.iter_mut().enumerate();
                items.for_each(|(i, item)| strip(item, &format!("{path}[{i}]"), stripped));
            }
            _ => {}
        }
    }
    let mut stripped = Vec::new();
    strip(config, "", &mut stripped);
    stripped
}

/// The path of the first key that is about quantization and says anything, at any depth.
fn quantization_key(value: &Value, path: &str) -> Option<String> {
    match value {
        Value::Object(entries) => entries.iter().find_map(|(key, value)| {
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            let says = !matches!(value, Value::Null | Value::Bool(false));
            if about_quantization(key) && says { Some(path) } else { quantization_key(value, &path) }
        }),
        Value::Array(items) => {
            items.iter().enumerate().find_map(|(i, item)| quantization_key(item, &format!("{path}[{i}]")))
        }
        _ => None,
    }
}

/// Every routed expert tensor of the replaced layers is there, BF16 and `[out, in]`, and there is none besides.
///
/// # Errors
/// Names file, layer, expert and tensor of what a source may not have or lack.
pub fn check_experts(checkpoint: &CheckpointDir, geometry: &ExpertGeometry) -> Result<()> {
    for name in checkpoint.names() {
        let Some((layer, inner)) = names::split_experts(name) else { continue };
        if !geometry.moe_layers.contains(&layer) {
            continue;
        }
        if !is_expert_weight(inner, geometry.experts) {
            return refuse("the source has an expert tensor of a replaced layer that no BF16 checkpoint has")
                .file(checkpoint.dir().join(checkpoint.info(name)?.file))
                .layer(layer)
                .tensor(name)
                .wanted(format!(
                    "experts 0 to {} with gate_proj, up_proj, down_proj weights only",
                    geometry.experts - 1
                ))
                .err();
        }
    }
    for &layer in &geometry.moe_layers {
        for expert in 0..geometry.experts {
            for projection in Projection::ALL {
                check_expert(checkpoint, geometry, layer, expert, projection)?;
            }
        }
    }
    Ok(())
}

fn check_expert(
    checkpoint: &CheckpointDir,
    geometry: &ExpertGeometry,
    layer: usize,
    expert: usize,
    projection: Projection,
) -> Result<()> {
    let name = names::expert(layer, expert, projection);
    let shape = geometry.shape(projection);
    let wanted = format!("BF16 of shape {shape:?}");
    if !checkpoint.contains(&name) {
        return refuse("the source lacks this expert tensor")
            .file(checkpoint.dir())
            .layer(layer)
            .expert(expert)
            .tensor(name)
            .wanted(wanted)
            .err();
    }
    let place = checkpoint.info(&name)?;
    if place.info.dtype != TensorDtype::BF16 || place.info.shape != shape {
        return refuse(format!(
            "the source's expert tensor is {} of shape {:?}",
            place.info.dtype, place.info.shape
        ))
        .file(checkpoint.dir().join(place.file))
        .layer(layer)
        .expert(expert)
        .tensor(name)
        .wanted(wanted)
        .err();
    }
    Ok(())
}

fn is_expert_weight(inner: &str, experts: usize) -> bool {
    let parts: Vec<&str> = inner.split('.').collect();
    let [expert, projection, "weight"] = parts[..] else { return false };
    let known = expert.parse::<usize>().is_ok_and(|e| e < experts && e.to_string() == expert);
    known && Projection::ALL.iter().any(|known| known.as_str() == projection)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn quantization_keys_are_found_at_any_depth_unless_they_say_nothing() {
        let found = |value: Value| quantization_key(&value, "");
        assert_eq!(found(json!({"a": [{"QuantMethod": "x"}]})).as_deref(), Some("a[0].QuantMethod"));
        assert_eq!(found(json!({"quantization_config": {}})).as_deref(), Some("quantization_config"));
        assert_eq!(found(json!({"quantization_config": null, "is_quantized": false, "a": 1})), None);
    }

    #[test]
    fn a_stripped_config_keeps_the_rest() {
        let mut config = json!({"quantization_config": {"x": 1}, "is_quantized": false, "hybrid_tr3_tail": {},
                                "a": [{"QuantMethod": "x", "b": 1.5}]});
        let stripped = strip_quantization(&mut config);
        assert_eq!(stripped, ["hybrid_tr3_tail", "is_quantized", "quantization_config", "a[0].QuantMethod"]);
        assert_eq!(config, json!({"a": [{"b": 1.5}]}));
    }

    #[test]
    fn only_expert_weights_are_expert_weights() {
        assert_eq!(
            names::split_experts("model.layers.3.mlp.experts.0.up_proj.weight"),
            Some((3, "0.up_proj.weight"))
        );
        assert_eq!(names::split_experts("model.layers.3.mlp.shared_experts.up_proj.weight"), None);
        assert!(is_expert_weight("7.down_proj.weight", 8));
        for bad in
            ["8.down_proj.weight", "07.down_proj.weight", "7.down_proj.trellis", "gate_up_proj", "7.x.weight"]
        {
            assert!(!is_expert_weight(bad, 8), "{bad}");
        }
    }
}
