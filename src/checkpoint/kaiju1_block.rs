//! What `config.json` says of KAIJU1 experts: the block `kaiju1_routed_experts` of `quantization_config`.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use super::complete::KAIJU1_SCHEMA;
use super::kaiju1_manifest::{Kaiju1Manifest, bits_per_weight};
use super::kaiju1_shard::{SCHEMA_VERSION, shard_stem};
use super::schema_v2::MARKER;
use crate::codec::kaiju::format::LAYOUT_VERSION;
use crate::config::kaiju1::{Kaiju1Preset, Kaiju1Setting};
use crate::error::{Result, refuse};

/// The block's name.
pub const KAIJU1_BLOCK: &str = "kaiju1_routed_experts";
/// What a loader of these experts has to know.
pub const FEATURE: &str = "kaiju1-leech24";

/// The block of layers with these manifests, ascending; `preset` is the one that the recipe names.
pub fn kaiju1_block(
    preset: Kaiju1Preset,
    mtp_layer: usize,
    manifests: &BTreeMap<usize, Kaiju1Manifest>,
) -> Value {
    let mut used: Vec<Kaiju1Setting> = Vec::new();
    for setting in manifests.values().flat_map(|manifest| manifest.settings.values()) {
        if !used.contains(setting) {
            used.push(*setting);
        }
    }
    used.sort_by(|a, b| a.code_bits.cmp(&b.code_bits).then(a.hi_frac.0.total_cmp(&b.hi_frac.0)));
    let total = |of: fn(&Kaiju1Manifest) -> u64| manifests.values().map(of).fold(0, u64::saturating_add);
    let (bits, weights) = (total(|manifest| manifest.layer_bits), total(|manifest| manifest.weights));
    let mut block = json!({
        "marker": MARKER,
        "recipe_version": manifests.values().next().map(|manifest| &manifest.recipe_version),
        "schema": KAIJU1_SCHEMA,
        "feature": FEATURE,
        "feature_version": 1,
        "requires_loader_feature": FEATURE,
        "schema_version": SCHEMA_VERSION,
        "layout_version": LAYOUT_VERSION,
        "tensor_schema": "model.layers.{L}.mlp.experts.{E}.{proj}.kaiju1",
        "moe_layers": [manifests.keys().next(), manifests.keys().next_back()],
        "preset": preset.as_str(),
        "feedback": manifests.values().all(|manifest| manifest.feedback),
        "payload_bits": bits.to_string(),
        "weights": weights.to_string(),
        "bits_per_weight": bits_per_weight(bits, weights),
        "manifests": manifests.keys().map(|&layer| format!("{}.json", shard_stem(layer))).collect::<Vec<_>>(),
    });
    block[format!("mtp_layer_{mtp_layer}")] = json!("carried");
    let show =
        |setting: &Kaiju1Setting| json!({"code_bits": setting.code_bits, "hi_frac": setting.hi_frac.0});
    match used[..] {
        [ref only] => {
            block["settings"] = json!("one");
            block["code_bits"] = json!(only.code_bits);
            block["hi_frac"] = json!(only.hi_frac.0);
        }
        _ => {
            // The manifests tell which expert has which.
            block["settings"] = json!("by_expert");
            block["rungs"] = used.iter().map(show).collect();
        }
    }
    block
}

/// The preset that a block names, which the layers cannot tell. `path` is only named in refusals.
///
/// # Errors
/// Another word.
pub fn preset_of(path: &Path, block: &Value) -> Result<Kaiju1Preset> {
    let named =
        [Kaiju1Preset::V1, Kaiju1Preset::V2].into_iter().find(|preset| block["preset"] == preset.as_str());
    named.ok_or_else(|| {
        refuse(format!("it is {}", block["preset"]))
            .file(path)
            .field(format!("quantization_config.{KAIJU1_BLOCK}.preset"))
            .wanted("\"v1\" or \"v2\"")
            .into()
    })
}
