//! Schema v1: the routed experts of a layer in tensor-parallel slices, one shard a rank.
//!
//! Tensors are `{module}.rank{r}.{trellis,suh,svh,mcg}`; the vectors that schema v2 stores once a layer are repeated in every
//! expert and rank. The manifest `r7-v1-layer-NNN.json` carries the whole manifest of the layer it was cut from, so that
//! nothing of where a tensor comes from is lost, and the slices can be put together again to the byte.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;

use serde::{Deserialize, Serialize};

use super::complete::FEATURE;
use super::manifest_v2::V2Manifest;
use super::names::{Projection, expert_module};
use super::schema_v2::{MARKER, V2Layer, check_metadata};
use super::slices::slice;
use super::trellis_tensors::LinearNames;
use crate::codec::trellis::codebook::Codebook;
use crate::codec::trellis::linear::TrellisLinear;
use crate::codec::trellis::pack;
use crate::codec::trellis::tile::TILE_DIM;
use crate::error::{IoContext, Result, refuse};
use crate::store::canonical_json::canonical_file;
use crate::store::hash::{Hash, sha256_hex};
use crate::store::safetensors_read::SafetensorsFile;
use crate::store::safetensors_stream::{TensorSpec, WrittenShard, stream_safetensors};
use crate::store::strict_json::{parse_json, read_file};
use crate::store::tensor_dtype::TensorDtype;

/// Value of `schema_version`.
pub const SCHEMA_VERSION: u32 = 1;

/// `r7-v1-layer-NNN.json`.
pub fn manifest_name(layer: usize) -> String {
    format!("r7-v1-layer-{layer:03}.json")
}

/// `r7-v1-layer-NNN-rank-RR.safetensors`.
pub fn shard_name(layer: usize, rank: usize) -> String {
    format!("r7-v1-layer-{layer:03}-rank-{rank:02}.safetensors")
}

/// What the tensors of a slice of a projection of an expert are called.
pub fn slice_names(layer: usize, expert: usize, role: Projection, rank: usize) -> LinearNames {
    LinearNames::own(&format!("{}.rank{rank}", expert_module(layer, expert, role)), Codebook::Mcg)
}

/// A manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct V1Manifest {
    /// Always [`MARKER`].
    pub marker: String,
    /// Version of the recipe's rules.
    pub recipe_version: String,
    /// Always [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Always 2.
    pub source_schema_version: u32,
    /// The layer.
    pub layer: usize,
    /// Ranks.
    pub tp_size: usize,
    /// Bits by module.
    pub per_tensor_bits: BTreeMap<String, u32>,
    /// The widths that occur, ascending.
    pub k_values: Vec<u32>,
    /// [`FEATURE`] where widths differ; none where loaders of one width do.
    pub requires_loader_feature: Option<String>,
    /// SHA-256 of the shards by file name.
    pub shards_sha256: BTreeMap<String, Hash>,
    /// SHA-256 of the manifest it was cut from, as a file.
    pub source_manifest_sha256: Hash,
    /// That manifest.
    pub source_manifest: V2Manifest,
}

impl V1Manifest {
    /// The manifest of a layer cut into the shards `shards_sha256`, ranks in order.
    pub fn new(source: &V2Manifest, source_sha256: &Hash, shards_sha256: &[Hash]) -> Self {
        let layer = source.layer;
        let shard = |(rank, hash): (usize, &Hash)| (shard_name(layer, rank), hash.clone());
        Self {
            marker: MARKER.to_owned(),
            recipe_version: source.recipe_version.clone(),
            schema_version: SCHEMA_VERSION,
            source_schema_version: source.schema_version,
            layer,
            tp_size: shards_sha256.len(),
            per_tensor_bits: source.bit_map.clone(),
            requires_loader_feature: required_feature(source),
            k_values: widths(source),
            shards_sha256: shards_sha256.iter().enumerate().map(shard).collect(),
            source_manifest_sha256: source_sha256.clone(),
            source_manifest: source.clone(),
        }
    }

    /// Reads the manifest of a layer in `dir`.
    ///
    /// # Errors
    /// Names the file that cannot be read, and the field that is not as schema v1 has it.
    pub fn read(dir: &Path, layer: usize) -> Result<Self> {
        let path = dir.join(manifest_name(layer));
        let manifest: Self = parse_json(&path, &read_file(&path)?)?;
        let source = &manifest.source_manifest;
        source.check_layer(&path, layer)?;
        let shards = (0..manifest.tp_size.min(1 << 16)).map(|rank| shard_name(layer, rank));
        let fields = [
            ("marker", manifest.marker == MARKER && source.marker == MARKER, MARKER.to_owned()),
            ("schema_version", manifest.schema_version == SCHEMA_VERSION, SCHEMA_VERSION.to_string()),
            (
                "source_schema_version",
                manifest.source_schema_version == source.schema_version,
                "2".to_owned(),
            ),
            ("layer", manifest.layer == layer && source.layer == layer, layer.to_string()),
            (
                "per_tensor_bits",
                manifest.per_tensor_bits == source.bit_map,
                "the source manifest's".to_owned(),
            ),
            (
                "recipe_version",
                manifest.recipe_version == source.recipe_version,
                source.recipe_version.clone(),
            ),
            ("k_values", manifest.k_values == widths(source), format!("{:?}", widths(source))),
            (
                "requires_loader_feature",
                manifest.requires_loader_feature == required_feature(source),
                format!("{:?}", required_feature(source)),
            ),
            (
                "source_manifest_sha256",
                manifest.source_manifest_sha256 == source_sha256(source)?,
                "the hash of source_manifest as a file".to_owned(),
            ),
            ("shards_sha256", shards.eq(manifest.shards_sha256.keys().cloned()), "a shard a rank".to_owned()),
        ];
        match fields.into_iter().find(|(_, right, _)| !right) {
            None => Ok(manifest),
            Some((field, _, wanted)) => refuse("it is no manifest of rank slices of this layer")
                .file(path)
                .layer(layer)
                .field(field)
                .wanted(wanted)
                .err(),
        }
    }
}

/// What a loader of a layer's slices has to know.
fn required_feature(manifest: &V2Manifest) -> Option<String> {
    (widths(manifest).len() > 1).then(|| FEATURE.to_owned())
}

/// SHA-256 of a v2 manifest as a file.
fn source_sha256(manifest: &V2Manifest) -> Result<Hash> {
    Ok(sha256_hex(&canonical_file(manifest)?))
}

/// The widths that occur in a layer, ascending.
pub fn widths(manifest: &V2Manifest) -> Vec<u32> {
    let widths: std::collections::BTreeSet<u32> = manifest.bit_map.values().copied().collect();
    widths.into_iter().collect()
}

/// About how long the shard of a rank will be.
pub fn shard_bytes(manifest: &V2Manifest, (hidden, intermediate): (usize, usize), tp_size: usize) -> u64 {
    let channels = (intermediate / tp_size) as u64;
    let bits: u64 = manifest.bit_map.values().map(|&bits| u64::from(bits)).sum();
    let modules = manifest.bit_map.len() as u64;
    let vectors = modules * 2 * (hidden as u64 + channels);
    // A header entry is shorter than this.
    bits * hidden as u64 * channels / 8 + vectors + modules * 4 * 256
}

/// Writes the shard of a rank, its tensors cut from the open layer one by one.
///
/// # Errors
/// Names file and tensor of what cannot be read, or the path that cannot be written.
pub fn write_rank(
    path: &Path,
    whole: &V2Layer,
    manifest: &V2Manifest,
    sizes: (usize, usize),
    (tp_size, rank): (usize, usize),
) -> Result<WrittenShard> {
    let layer = manifest.layer;
    let experts = manifest.permutations.len();
    let mut specs = Vec::with_capacity(experts * 12);
    let mut owners = BTreeMap::new();
    for expert in 0..experts {
        for role in Projection::ALL {
            let names = slice_names(layer, expert, role, rank);
            let module = expert_module(layer, expert, role);
            let Some(&bits) = manifest.bit_map.get(&module) else {
                return refuse("the manifest has no bits for the module").layer(layer).tensor(module).err();
            };
            specs.extend(slice_specs(&names, role, sizes, bits, tp_size));
            owners.extend(names.all().map(|name| (name.to_owned(), (expert, role))));
        }
    }
    // The tensors of a slice follow one another in the file, its marker apart: one slice is kept.
    let last: Mutex<Option<(usize, Projection, TrellisLinear)>> = Mutex::new(None);
    stream_safetensors(path, &shard_metadata(tp_size, rank), &specs, |spec, sink| {
        let (expert, role) = owners[&spec.name];
        if spec.dtype == TensorDtype::I32 {
            let marker = Codebook::Mcg.marker().unwrap_or_default();
            return sink.write_all(&marker.to_le_bytes()).at(path);
        }
        let mut last = last.lock().expect("no panic holds the lock");
        if last.as_ref().is_none_or(|(e, r, _)| (*e, *r) != (expert, role)) {
            *last = Some((expert, role, slice(&whole.linear(expert, role)?, role, tp_size, rank)));
        }
        let Some((.., part)) = last.as_ref() else { return Ok(()) };
        let part_of = |vector: &[half::f16]| vector.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let bytes = match spec.name.rsplit_once('.') {
            Some((_, "suh")) => part_of(&part.suh),
            Some((_, "svh")) => part_of(&part.svh),
            _ => part.trellis.iter().flat_map(|word| word.to_le_bytes()).collect(),
        };
        sink.write_all(&bytes).at(path)
    })
}

/// The header metadata of a rank's shard.
fn shard_metadata(tp_size: usize, rank: usize) -> BTreeMap<String, String> {
    [
        ("format", "pt".to_owned()),
        ("r7_schema", "1".to_owned()),
        ("r7_source_schema", "2".to_owned()),
        ("r7_tp_size", tp_size.to_string()),
        ("r7_tp_rank", rank.to_string()),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into()
}

/// Types and shapes of the tensors of a slice.
fn slice_specs(
    names: &LinearNames,
    role: Projection,
    (hidden, intermediate): (usize, usize),
    bits: u32,
    tp_size: usize,
) -> Vec<TensorSpec> {
    let channels = intermediate / tp_size;
    let (k, n) = if role == Projection::Down { (channels, hidden) } else { (hidden, channels) };
    let tiles = [k / TILE_DIM, n / TILE_DIM, pack::words(bits)];
    let mut specs = vec![
        TensorSpec::new(&*names.trellis, TensorDtype::I16, &tiles),
        TensorSpec::new(&*names.suh, TensorDtype::F16, &[k]),
        TensorSpec::new(&*names.svh, TensorDtype::F16, &[n]),
    ];
    specs.extend(names.marker.iter().map(|marker| TensorSpec::new(&**marker, TensorDtype::I32, &[])));
    specs
}

/// The open shards of a layer, ranks in order.
#[derive(Debug)]
pub struct V1Layer {
    files: Vec<SafetensorsFile>,
    layer: usize,
}

impl V1Layer {
    /// Opens the shards of a layer in `dir` and checks their metadata.
    ///
    /// # Errors
    /// Names the file and the metadata key that is not as schema v1 has it.
    pub fn open(dir: &Path, layer: usize, tp_size: usize) -> Result<Self> {
        let open = |rank: usize| {
            let path = dir.join(shard_name(layer, rank));
            let file = SafetensorsFile::open(&path)?;
            let keys = ["r7_schema", "r7_source_schema", "r7_tp_size", "r7_tp_rank"];
            check_metadata(&file, layer, &shard_metadata(tp_size, rank), &keys)?;
            Ok(file)
        };
        Ok(Self { files: (0..tp_size).map(open).collect::<Result<_>>()?, layer })
    }

    /// The slices of a projection of an expert, ranks in order.
    ///
    /// # Errors
    /// As [`LinearNames::read`].
    pub fn slices(&self, expert: usize, role: Projection) -> Result<Vec<TrellisLinear>> {
        let read =
            |(rank, file): (usize, &SafetensorsFile)| slice_names(self.layer, expert, role, rank).read(file);
        self.files.iter().enumerate().map(read).collect()
    }
}
