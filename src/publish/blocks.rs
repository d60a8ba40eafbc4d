//! What `config.json` says of rank slices: `hybrid_tr3_tail` where one width fits all, which loaders of one width read, else
//! `r7_routed_experts`, and why.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::complete::Complete;
use crate::checkpoint::complete::{
    BlockFacts, CONFIG_FILE, HYBRID_BLOCK, HYBRID_TENSOR_SCHEMA, R7_BLOCK, check_block,
};
use crate::checkpoint::manifest_v2::V2Manifest;
use crate::checkpoint::schema_v1::{manifest_name, widths};
use crate::error::{Result, refuse};
use crate::store::hash::Hash;

/// The `quantization_config` of slices, and why unmodified r13 loaders cannot read them.
///
/// # Errors
/// A configuration that does not tell of the layers.
pub(super) fn sliced_quantization(
    whole: &Complete,
    manifests: &BTreeMap<usize, (V2Manifest, Hash)>,
    tp_size: usize,
) -> Result<(Map<String, Value>, Option<String>)> {
    let mut quantization = whole.quantization()?.clone();
    let Some(block) = quantization.remove(R7_BLOCK) else {
        return refuse(format!("quantization_config has no {R7_BLOCK}"))
            .file(whole.dir.join(CONFIG_FILE))
            .err();
    };
    let used: BTreeSet<u32> = manifests.values().flat_map(|(manifest, _)| widths(manifest)).collect();
    check_block(&whole.dir.join(CONFIG_FILE), &block, &used)?;
    let (Some(&first), Some(&last)) = (whole.layers.first(), whole.layers.last()) else {
        return refuse("the checkpoint has no replaced layer").file(&whole.dir).err();
    };
    let mtp = whole.manifest.mtp_layer;
    match one_width(manifests) {
        Ok(bits) => {
            let mut hybrid = json!({
                "format": "exl3-trellis",
                "codebook": "mcg",
                "tp": tp_size,
                "bits": bits,
                "experts_per_layer": whole.geometry.n_routed_experts,
                "moe_layers": [first, last],
                "tensor_schema": HYBRID_TENSOR_SCHEMA,
            });
            let carried = quantization.get(HYBRID_BLOCK).cloned();
            let same = |key: &str| carried.as_ref().is_none_or(|carried| carried[key] == hybrid[key]);
            match ["tp", "bits", "codebook"].into_iter().find(|key| !same(key)) {
                None => {
                    if carried.is_some() {
                        hybrid["moe_layers"] = json!([first, mtp]);
                    }
                    quantization.insert(HYBRID_BLOCK.to_owned(), hybrid);
                    Ok((quantization, None))
                }
                Some(key) => {
                    let carried = carried.unwrap_or_default();
                    let reason = format!(
                        "{HYBRID_BLOCK} can describe one layout only: the carried MTP layer {mtp} has {key} {}, the \
                         replaced layers {}",
                        carried[key], hybrid[key]
                    );
                    Ok((with_r7(quantization, &block, manifests, whole, tp_size), Some(reason)))
                }
            }
        }
        Err(reason) => Ok((with_r7(quantization, &block, manifests, whole, tp_size), Some(reason))),
    }
}

fn with_r7(
    mut quantization: Map<String, Value>,
    block: &Value,
    manifests: &BTreeMap<usize, (V2Manifest, Hash)>,
    whole: &Complete,
    tp_size: usize,
) -> Map<String, Value> {
    let text = |key: &str| block[key].as_str().unwrap_or_default().to_owned();
    let widths = block["k_values"].as_array().cloned().unwrap_or_default();
    let facts = BlockFacts {
        recipe_version: text("recipe_version"),
        moe_layers: (whole.layers[0], whole.layers[whole.layers.len() - 1]),
        mtp_layer: whole.manifest.mtp_layer,
        k_values: widths.iter().filter_map(|bits| u32::try_from(bits.as_u64()?).ok()).collect(),
        target_bpw: text("target_bpw"),
        manifests: manifests.keys().map(|&layer| manifest_name(layer)).collect(),
        tp_size: Some(tp_size),
    };
    quantization.insert(R7_BLOCK.to_owned(), facts.r7());
    quantization
}

/// The one width of all tensors; else why there is none.
fn one_width(manifests: &BTreeMap<usize, (V2Manifest, Hash)>) -> Result<u32, String> {
    let mut only: Option<(usize, u32)> = None;
    for (&layer, (manifest, _)) in manifests {
        let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
        manifest.bit_map.values().for_each(|&bits| *counts.entry(bits).or_default() += 1);
        let spelt: Vec<String> =
            counts.iter().map(|(bits, n)| format!("{n} tensors at {bits} bits")).collect();
        let mut widths = counts.keys();
        let (Some(&bits), None) = (widths.next(), widths.next()) else {
            let mean = &manifest.allocation_target_bpw;
            let never = match mean.parse::<u32>() {
                Ok(_) => "",
                Err(_) => ", which no single integer width can average to",
            };
            return Err(format!(
                "layer {layer} has {}: {mean} bits a weight{never}; unmodified r13 loaders pass one width to a layer",
                spelt.join(", ")
            ));
        };
        match only {
            Some((before, other)) if other != bits => {
                return Err(format!(
                    "layer {before} is at {other} bits and layer {layer} at {bits}; {HYBRID_BLOCK} has one `bits` for \
                     all layers"
                ));
            }
            _ => only = Some((layer, bits)),
        }
    }
    only.map(|(_, bits)| bits).ok_or_else(|| "there is no replaced layer".to_owned())
}
