//! Gates 3, 4, 6 and 7 of a complete checkpoint: its manifest, files, index and carried payloads, and every module decoded
//! again, from whole layers or from rank slices.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use rayon::prelude::*;
use serde_json::{Value, json};

use super::AuditOptions;
use super::findings::Findings;
use super::shard;
use crate::checkpoint::CheckpointDir;
use crate::checkpoint::complete::{
    BlockFacts, CONFIG_FILE, CompleteManifest, HYBRID_BLOCK, HYBRID_TENSOR_SCHEMA, KAIJU1_SCHEMA, LayerEntry,
    MANIFEST_FILE, MANIFEST_HASH_FILE, QUANTIZATION_FILE, R7_BLOCK, V2_SCHEMA, check_block, read_config,
};
use crate::checkpoint::finished::{FinishedManifest, finished_stem};
use crate::checkpoint::kaiju1_block::{KAIJU1_BLOCK, kaiju1_block, preset_of};
use crate::checkpoint::kaiju1_manifest::Kaiju1Manifest;
use crate::checkpoint::kaiju1_shard::shard_stem;
use crate::checkpoint::manifest_v2::V2Manifest;
use crate::checkpoint::names::{Projection, expert_module, split_experts};
use crate::checkpoint::schema_v1::{V1Layer, V1Manifest, manifest_name};
use crate::checkpoint::slices::{dense_of, reassemble};
use crate::codec::trellis::linear::reconstruction_sha256;
use crate::config::Geometry;
use crate::config::choices::CodecName;
use crate::error::{IoContext, Result, refuse};
use crate::store::hash::{Hash, sha256_file};
use crate::store::strict_json::{StrictValue, read_json};
use crate::walk::progress::{Observer, advance, proceed};

/// Audits a complete checkpoint; says what it is.
///
/// # Errors
/// Interrupted by the user; a carrier that is given and is none.
pub fn audit_complete(
    dir: &Path,
    options: &AuditOptions,
    findings: &mut Findings,
    observer: &dyn Observer,
) -> Result<&'static str> {
    for gate in [0, 1, 2, 5, 8, 9] {
        findings.skip(gate, "this is in the work directory of the walk, not in the checkpoint");
    }
    let Some(manifest) = findings.hold(7, CompleteManifest::read(dir)) else {
        return Ok("complete checkpoint");
    };
    let (subject, whole) = match manifest.schema.as_str() {
        V2_SCHEMA => ("complete checkpoint", Some(CodecName::Trellis)),
        KAIJU1_SCHEMA => ("complete checkpoint of KAIJU1 experts", Some(CodecName::Kaiju1)),
        _ => ("complete checkpoint of rank slices", None),
    };
    files(dir, &manifest, findings, observer)?;
    let opened = findings.hold(7, CheckpointDir::open(dir));
    let geometry = findings.hold(7, Geometry::read(&dir.join(CONFIG_FILE)));
    let (Some(checkpoint), Some(geometry)) = (opened, geometry) else { return Ok(subject) };
    findings.hold(7, config(dir, &manifest, &geometry));
    tensors(dir, &checkpoint, &manifest, findings);
    payloads(
        &checkpoint,
        &manifest.carried_tensor_payload_sha256,
        "as the manifest has it",
        findings,
        observer,
    )?;
    match &options.carrier {
        None => findings.skip(7, "the carrier was not read again: --carrier DIR"),
        Some(carrier) => {
            findings.hold(7, carried_config(dir, carrier));
            let carrier = CheckpointDir::open(carrier)?;
            let carried = &manifest.carried_tensor_payload_sha256;
            payloads(&carrier, carried, "as the checkpoint carries it", findings, observer)?;
        }
    }
    let sizes = (geometry.hidden_size, geometry.moe_intermediate_size);
    for layer in geometry.moe_layers() {
        match whole {
            Some(codec) => {
                let path = dir.join(format!("{}.json", finished_stem(codec, layer)));
                let (experts, channels) = (geometry.n_routed_experts, geometry.moe_intermediate_size);
                let check = |of_layer: FinishedManifest| match of_layer {
                    FinishedManifest::V2(of_layer) => {
                        manifest.check_layer(&of_layer, &path, (experts, channels))
                    }
                    FinishedManifest::Kaiju1(of_layer) => {
                        manifest.check_kaiju1_layer(&of_layer, &path, experts)
                    }
                };
                findings.hold(6, FinishedManifest::read(dir, codec, layer).and_then(check));
                let wanted = Some((geometry.n_routed_experts, sizes));
                shard::audit_layer(dir, (layer, codec), wanted, findings, observer)?;
            }
            None => {
                let sizes = (geometry.n_routed_experts, geometry.moe_intermediate_size);
                audit_slices(dir, layer, sizes, &manifest, findings, observer)?;
            }
        }
    }
    Ok(subject)
}

/// Every listed file has its hash, and there is no other.
fn files(
    dir: &Path,
    manifest: &CompleteManifest,
    findings: &mut Findings,
    observer: &dyn Observer,
) -> Result<()> {
    let listed = &manifest.files_sha256;
    for entry in std::fs::read_dir(dir).at(dir)? {
        let name = entry.at(dir)?.file_name().to_string_lossy().into_owned();
        if !listed.contains_key(&name) && name != MANIFEST_FILE && name != MANIFEST_HASH_FILE {
            findings.fail(7, refuse("the manifest does not list this file").file(dir.join(name)));
        }
    }
    observer.begin("files", None, listed.len() as u64);
    let check = |(name, hash): (&String, &Hash)| {
        let path = dir.join(name);
        let found = sha256_file(&path).and_then(|found| match found == *hash {
            true => Ok(()),
            false => Err(refuse(format!("its hash is {found}")).file(path).wanted(hash).check()),
        });
        advance(observer, name)?;
        Ok(found)
    };
    let checks: Vec<Result<()>> = listed.par_iter().map(check).collect::<Result<_>>()?;
    observer.end();
    for check in checks {
        findings.hold(7, check);
    }
    Ok(())
}

/// Both places tell of quantization alike, and what they say of the layers follows from the layers.
fn config(dir: &Path, manifest: &CompleteManifest, geometry: &Geometry) -> Result<()> {
    let config = read_config(dir)?;
    let StrictValue(beside) = read_json(dir.join(QUANTIZATION_FILE))?;
    let wrong = |what: String, field: String, wanted: String| {
        Err(refuse(what).file(dir.join(CONFIG_FILE)).field(field).wanted(wanted).check())
    };
    let quantization = config.get("quantization_config").unwrap_or(&Value::Null);
    if *quantization != beside {
        let what = format!("{QUANTIZATION_FILE} says something else");
        return wrong(what, "quantization_config".to_owned(), "the same in both".to_owned());
    }
    let kaiju1 = manifest.schema == KAIJU1_SCHEMA;
    // A packed carrier's method stays.
    let packed_carrier = manifest.carried_tensor_payload_sha256.keys().any(|name| name.ends_with(".trellis"));
    let method = if kaiju1 && !packed_carrier { "kaiju1" } else { "exl3" };
    if quantization["quant_method"] != method {
        let field = "quantization_config.quant_method".to_owned();
        return wrong(format!("it is {}", quantization["quant_method"]), field, format!("{method:?}"));
    }
    let layers = geometry.moe_layers();
    let (Some(&first), Some(&last)) = (layers.first(), layers.last()) else {
        return wrong(
            "the model has no MoE layer".to_owned(),
            "mlp_layer_types".to_owned(),
            "one".to_owned(),
        );
    };
    if manifest.layer_numbers()? != layers {
        return wrong(
            format!("the MoE layers are {layers:?}"),
            "mlp_layer_types".to_owned(),
            format!("{:?}, the layers of {MANIFEST_FILE}", manifest.layer_numbers()?),
        );
    }
    if kaiju1 {
        let read = |&layer: &usize| Ok((layer, Kaiju1Manifest::read(dir, layer)?));
        let manifests = layers.iter().map(read).collect::<Result<BTreeMap<_, _>>>()?;
        for (layer, of_layer) in &manifests {
            let made = &of_layer.provenance;
            if made.recipe_sha256 != manifest.origin.recipe_sha256 {
                return Err(refuse(format!("it is {}", made.recipe_sha256))
                    .file(dir.join(format!("{}.json", shard_stem(*layer))))
                    .layer(*layer)
                    .field("provenance.recipe_sha256")
                    .wanted(format!("{}, that of {MANIFEST_FILE}", manifest.origin.recipe_sha256))
                    .check());
            }
        }
        let block = &quantization[KAIJU1_BLOCK];
        let preset = preset_of(&dir.join(CONFIG_FILE), block)?;
        same_block(dir, KAIJU1_BLOCK, block, &kaiju1_block(preset, manifest.mtp_layer, &manifests))?;
        return only_mtp(dir, &quantization[HYBRID_BLOCK], manifest.mtp_layer);
    }
    let tp_size = manifest.sliced_from.as_ref().map(|from| from.tp_size);
    let (mut used, mut target) = (BTreeSet::new(), String::new());
    for &layer in &layers {
        let source = match tp_size {
            None => V2Manifest::read(dir, layer)?,
            Some(_) => V1Manifest::read(dir, layer)?.source_manifest,
        };
        used.extend(source.bit_map.values().copied());
        target = source.allocation_target_bpw;
    }
    let (block, hybrid) = (&quantization[R7_BLOCK], &quantization[HYBRID_BLOCK]);
    if block.is_null() {
        let field = format!("quantization_config.{HYBRID_BLOCK}");
        let Some(tp) = tp_size else {
            return wrong(format!("there is no {R7_BLOCK}"), field, "one for whole layers".to_owned());
        };
        let wanted = [
            ("format", json!("exl3-trellis")),
            ("codebook", json!("mcg")),
            ("tp", json!(tp)),
            ("bits", json!(used.first())),
            ("experts_per_layer", json!(geometry.n_routed_experts)),
            ("tensor_schema", json!(HYBRID_TENSOR_SCHEMA)),
        ];
        if let Some((key, value)) = wanted.into_iter().find(|(key, value)| hybrid[*key] != *value) {
            return wrong(format!("it is {}", hybrid[key]), format!("{field}.{key}"), value.to_string());
        }
        let ranges = [json!([first, last]), json!([first, manifest.mtp_layer])];
        return match used.len() == 1 && ranges.contains(&hybrid["moe_layers"]) {
            true => Ok(()),
            false => wrong(format!("it is {hybrid}"), field, "one width for the replaced layers".to_owned()),
        };
    }
    check_block(&dir.join(CONFIG_FILE), block, &used)?;
    let facts = BlockFacts {
        recipe_version: manifest.recipe_version.clone(),
        moe_layers: (first, last),
        mtp_layer: manifest.mtp_layer,
        k_values: serde_json::from_value(block["k_values"].clone()).unwrap_or_default(),
        target_bpw: target,
        manifests: layers.iter().map(|&layer| LayerEntry::named(layer, tp_size, 0).manifest).collect(),
        tp_size,
    };
    same_block(dir, R7_BLOCK, block, &facts.r7())?;
    only_mtp(dir, hybrid, manifest.mtp_layer)
}

/// A block says what follows from the layers, and nothing else.
fn same_block(dir: &Path, name: &str, block: &Value, wanted: &Value) -> Result<()> {
    let keys: BTreeSet<&String> =
        [block, wanted].into_iter().filter_map(Value::as_object).flat_map(|entries| entries.keys()).collect();
    match keys.into_iter().find(|key| block[key.as_str()] != wanted[key.as_str()]) {
        None => Ok(()),
        Some(key) => Err(refuse(format!("it is {}", block[key.as_str()]))
            .file(dir.join(CONFIG_FILE))
            .field(format!("quantization_config.{name}.{key}"))
            .wanted(wanted[key.as_str()].to_string())
            .check()),
    }
}

/// A carrier's block for rank slices is left for the MTP layer alone.
fn only_mtp(dir: &Path, hybrid: &Value, mtp_layer: usize) -> Result<()> {
    let mtp = json!([mtp_layer, mtp_layer]);
    match hybrid.is_null() || hybrid["moe_layers"] == mtp {
        true => Ok(()),
        false => Err(refuse(format!("it is {}", hybrid["moe_layers"]))
            .file(dir.join(CONFIG_FILE))
            .field(format!("quantization_config.{HYBRID_BLOCK}.moe_layers"))
            .wanted(format!("{mtp}: the carried MTP layer"))
            .check()),
    }
}

/// What the configuration says beside quantization is what the carrier's says.
fn carried_config(dir: &Path, carrier: &Path) -> Result<()> {
    let (mut config, mut wanted) = (read_config(dir)?, read_config(carrier)?);
    for entries in [&mut config, &mut wanted] {
        entries.remove("quantization_config");
    }
    let keys: BTreeSet<&String> = config.keys().chain(wanted.keys()).collect();
    match keys.into_iter().find(|key| config.get(*key) != wanted.get(*key)) {
        None => Ok(()),
        Some(key) => Err(refuse("it is not what the carrier's config.json says")
            .file(dir.join(CONFIG_FILE))
            .field(key)
            .wanted(wanted.get(key).map_or("no such field".to_owned(), Value::to_string))
            .check()),
    }
}

/// The tensors are the carried ones and routed experts of replaced layers; none of those is carried.
fn tensors(dir: &Path, checkpoint: &CheckpointDir, manifest: &CompleteManifest, findings: &mut Findings) {
    let replaced = manifest.layer_numbers().unwrap_or_default();
    let carried = &manifest.carried_tensor_payload_sha256;
    let is_replaced = |name: &str| split_experts(name).is_some_and(|(layer, _)| replaced.contains(&layer));
    let wrong = |what: &str, name: &str| refuse(what).file(dir.join(MANIFEST_FILE)).tensor(name);
    for name in checkpoint.names().filter(|name| !is_replaced(name) && !carried.contains_key(*name)) {
        findings
            .fail(7, wrong("the tensor is neither carried nor a routed expert of a replaced layer", name));
    }
    for name in carried.keys().filter(|name| is_replaced(name)) {
        findings.fail(7, wrong("a carried tensor is a routed expert of a replaced layer", name));
    }
    let found = checkpoint.names().filter(|name| is_replaced(name)).count();
    let counts = [
        ("tensor_count", checkpoint.names().count(), manifest.tensor_count),
        ("carried_tensor_count", carried.len(), manifest.carried_tensor_count),
        ("r7_tensor_count", found, manifest.r7_tensor_count),
    ];
    for (field, found, said) in counts {
        findings.same(7, &said.to_string(), &found.to_string(), || {
            refuse(format!("it says {said}")).file(dir.join(MANIFEST_FILE)).field(field)
        });
    }
    let mtp = crate::checkpoint::names::layer_prefix(manifest.mtp_layer);
    let of_mtp: BTreeMap<&String, &Hash> =
        carried.iter().filter(|(name, _)| name.starts_with(&mtp)).collect();
    let listed: BTreeMap<&String, &Hash> = manifest.mtp_carried_tensor_payload_sha256.iter().collect();
    findings.hold(
        7,
        match of_mtp == listed {
            true => Ok(()),
            false => Err(refuse("its list of the MTP layer's payloads is not that of the carried ones")
                .file(dir.join(MANIFEST_FILE))
                .layer(manifest.mtp_layer)
                .check()),
        },
    );
}

/// Payloads of a checkpoint have these hashes.
fn payloads(
    checkpoint: &CheckpointDir,
    wanted: &BTreeMap<String, Hash>,
    whose: &str,
    findings: &mut Findings,
    observer: &dyn Observer,
) -> Result<()> {
    observer.begin("carried payloads", None, wanted.len() as u64);
    let check = |(name, hash): (&String, &Hash)| {
        let found = checkpoint.payload_sha256(name).and_then(|found| match found == *hash {
            true => Ok(()),
            false => Err(refuse(format!("its payload's hash is {found}"))
                .file(checkpoint.dir())
                .tensor(name)
                .wanted(format!("{hash}, {whose}"))
                .check()),
        });
        advance(observer, name)?;
        Ok(found)
    };
    let checks: Vec<Result<()>> = wanted.par_iter().map(check).collect::<Result<_>>()?;
    observer.end();
    for check in checks {
        findings.hold(7, check);
    }
    Ok(())
}

/// A layer of rank slices: put together and decoded, they are what the walk's manifest says.
fn audit_slices(
    dir: &Path,
    layer: usize,
    (experts, channels): (usize, usize),
    whole: &CompleteManifest,
    findings: &mut Findings,
    observer: &dyn Observer,
) -> Result<()> {
    proceed(observer)?;
    let Some(manifest) = findings.hold(6, V1Manifest::read(dir, layer)) else { return Ok(()) };
    let Some(ranks) = findings.hold(6, V1Layer::open(dir, layer, manifest.tp_size)) else { return Ok(()) };
    let source = &manifest.source_manifest;
    let path = dir.join(manifest_name(layer));
    findings.hold(3, shard::bits(source, experts, &|what| refuse(what).file(&path).layer(layer)));
    findings.hold(6, whole.check_layer(source, &path, (experts, channels)));
    let modules: BTreeSet<(usize, Projection)> =
        (0..experts).flat_map(|expert| Projection::ALL.map(|role| (expert, role))).collect();
    observer.begin("decode", Some(layer), modules.len() as u64);
    let check = |&(expert, role): &(usize, Projection)| -> Result<()> {
        let module = expert_module(layer, expert, role);
        let wrong = |what: &str| Err(refuse(what).file(&path).layer(layer).tensor(&module).check());
        let slices = ranks.slices(expert, role)?;
        let linear = reassemble(&slices, role)?;
        let dense = dense_of(&slices, role);
        let Some(hashes) = source.roundtrip_hashes.get(&module) else {
            return wrong("the manifest does not know the module");
        };
        if linear.packed_sha256() != hashes.packed_sha256 {
            return wrong("the slices put together are not what was encoded");
        }
        if reconstruction_sha256(&dense) != hashes.reconstruction_sha256 {
            return wrong("the slices do not decode to what was encoded");
        }
        Ok(())
    };
    let checks: Vec<Result<()>> = modules
        .par_iter()
        .map(|module| {
            let found = check(module);
            observer.advance(&format!("expert {}", module.0));
            found
        })
        .collect();
    observer.end();
    for check in checks {
        findings.hold(6, check);
    }
    Ok(())
}
