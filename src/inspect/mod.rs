//! What a checkpoint holds and says of itself, and how two differ.
//!
//! [`Inspection`] reads headers (of KAIJU1 payloads too), codebook markers and manifests; payloads are left alone, so that a
//! checkpoint of any size takes seconds. [`diff`] reads everything.

pub mod diff;
mod diff_table;
mod orders;
pub mod provenance;
pub mod role;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Serialize;

use crate::checkpoint::packed::PackedModule;
use crate::checkpoint::trellis_tensors::TensorReader;
use crate::checkpoint::{CheckpointDir, Reconstruction, names};
use crate::error::Result;
use provenance::Provenance;
use role::{Role, Roles};
pub(crate) use table::printable;

/// What a checkpoint holds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Inspection {
    /// What was opened.
    pub path: String,
    /// Safetensors files.
    pub files: usize,
    /// Their bytes, headers included.
    pub file_bytes: u64,
    /// Tensors stored.
    pub tensors: usize,
    /// Over everything.
    pub total: Group,
    /// By role, where there is anything of it.
    pub roles: BTreeMap<Role, Group>,
    /// Routed experts by layer.
    pub expert_layers: BTreeMap<usize, Group>,
    /// What the checkpoint says of itself.
    pub provenance: Provenance,
    /// Packed linears by module, and the plain tensors; only on demand.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights: Option<Vec<Weight>>,
}

/// Weights that belong together.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Group {
    /// Layers they are in.
    pub layers: BTreeSet<usize>,
    /// Plain tensors.
    pub plain_tensors: usize,
    /// Packed modules.
    pub packed_modules: usize,
    /// Weights: values of plain tensors, `k * n` of packed modules.
    pub weights: u64,
    /// Bytes stored for them, rotation vectors and markers included.
    pub bytes: u64,
    /// Plain tensors by type.
    pub dtypes: BTreeMap<String, usize>,
    /// Packed modules by layout, codebook and bits.
    pub packed: Vec<PackedKind>,
    /// Weights in packed modules.
    pub packed_weights: u64,
    /// Those in trellises.
    pub trellis_weights: u64,
    /// Bits of the trellises alone.
    pub trellis_bits: u64,
}

/// Packed modules of one kind.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct PackedKind {
    /// As [`PackedForm::name`](crate::checkpoint::packed::PackedForm::name) spells it.
    pub layout: String,
    /// Name of the codebook, or the width of a lattice point's code.
    pub codebook: String,
    /// Bits a weight of a trellis.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bits: Option<u32>,
    /// Modules.
    pub modules: usize,
}

/// A plain tensor or a packed module.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Weight {
    /// Name of the tensor, or of the module.
    pub name: String,
    /// Its role.
    pub role: Role,
    /// Element type of a plain tensor, layout of a packed module.
    pub stored: String,
    /// Extents as a plain tensor: `[n, k]` of a packed module.
    pub shape: Vec<usize>,
    /// Bits a weight of a trellis.
    pub bits: Option<u32>,
    /// Codebook of a packed module, or the width of a lattice point's code.
    pub codebook: Option<String>,
    /// Bytes stored; a vector that several modules share counts for the first of them.
    pub bytes: u64,
    /// The file of the tensor, or of the module's first trellis or its payload.
    pub file: String,
}

impl Weight {
    /// Weights.
    fn count(&self) -> u64 {
        self.shape.iter().map(|&n| n as u64).product()
    }
}

impl Group {
    /// Bits a weight, everything stored counted; `None` where there are no weights.
    pub fn bits_per_weight(&self) -> Option<f64> {
        (self.weights > 0).then(|| self.bytes as f64 * 8.0 / self.weights as f64)
    }

    /// Bits a weight of the trellises alone; `None` where there are none.
    pub fn trellis_bits_per_weight(&self) -> Option<f64> {
        (self.trellis_weights > 0).then(|| self.trellis_bits as f64 / self.trellis_weights as f64)
    }

    fn add(&mut self, layer: Option<usize>, weight: &Weight) {
        self.layers.extend(layer);
        let count = weight.count();
        self.weights += count;
        self.bytes += weight.bytes;
        let Some(codebook) = &weight.codebook else {
            self.plain_tensors += 1;
            *self.dtypes.entry(weight.stored.clone()).or_default() += 1;
            return;
        };
        self.packed_modules += 1;
        self.packed_weights += count;
        let bits = weight.bits;
        if let Some(bits) = bits {
            self.trellis_weights += count;
            self.trellis_bits += u64::from(bits) * count;
        }
        let kind = PackedKind { layout: weight.stored.clone(), codebook: codebook.clone(), bits, modules: 1 };
        let same = |known: &&mut PackedKind| {
            (&known.layout, &known.codebook, known.bits) == (&kind.layout, &kind.codebook, kind.bits)
        };
        match self.packed.iter_mut().find(same) {
            Some(known) => known.modules += 1,
            None => {
                self.packed.push(kind);
                self.packed.sort();
            }
        }
    }
}

impl Inspection {
    /// Looks at a checkpoint directory, a folder of shards, or one safetensors file. `list` keeps every weight.
    ///
    /// # Errors
    /// As [`CheckpointDir::open_any`] and [`packed_modules`](crate::checkpoint::packed::packed_modules). What a manifest
    /// says is only told, whatever it is.
    pub fn take(path: &Path, list: bool) -> Result<Self> {
        let weights = Reconstruction::new(CheckpointDir::open_any(path)?.into())?;
        let checkpoint = weights.checkpoint();
        let roles = Roles::of(checkpoint.names());
        let (mut total, mut by_role) = (Group::default(), BTreeMap::<Role, Group>::new());
        let mut expert_layers = BTreeMap::<usize, Group>::new();
        let mut listed = Vec::new();
        let mut counted = BTreeSet::new();
        for name in weights.weights() {
            let weight = match weights.packed_weight(&name) {
                Some(module) => packed(module, checkpoint, &roles, &mut counted)?,
                None => plain(&name, checkpoint, &roles)?,
            };
            let layer = names::layer_of(&name);
            total.add(layer, &weight);
            by_role.entry(weight.role).or_default().add(layer, &weight);
            if let (Role::RoutedExperts, Some(layer)) = (weight.role, layer) {
                expert_layers.entry(layer).or_default().add(Some(layer), &weight);
            }
            if list {
                listed.push(weight);
            }
        }
        let file_bytes = checkpoint.shards().map(|(_, shard)| {
            let header = shard.header();
            header.tensors.values().map(|info| info.end).max().unwrap_or(header.data_start)
        });
        Ok(Self {
            path: path.display().to_string(),
            files: checkpoint.shards().count(),
            file_bytes: file_bytes.sum(),
            tensors: checkpoint.names().count(),
            total,
            roles: by_role,
            expert_layers,
            provenance: Provenance::read(path, &weights)?,
            weights: list.then_some(listed),
        })
    }
}

fn plain(name: &str, checkpoint: &CheckpointDir, roles: &Roles) -> Result<Weight> {
    let place = checkpoint.info(name)?;
    Ok(Weight {
        name: name.to_owned(),
        role: roles.role(name),
        stored: place.info.dtype.to_string(),
        shape: place.info.shape.clone(),
        bits: None,
        codebook: None,
        bytes: place.info.end - place.info.start,
        file: place.file.to_owned(),
    })
}

fn packed(
    module: &PackedModule,
    checkpoint: &CheckpointDir,
    roles: &Roles,
    counted: &mut BTreeSet<String>,
) -> Result<Weight> {
    let mut bytes = 0;
    for name in module.form.tensors() {
        if counted.insert(name.to_owned()) {
            let info = checkpoint.tensor_info(name)?;
            bytes += info.end - info.start;
        }
    }
    Ok(Weight {
        name: module.module.clone(),
        role: roles.role(&module.weight_name()),
        stored: module.form.name(),
        shape: vec![module.n, module.k],
        bits: module.bits(),
        codebook: Some(module.form.codebook()),
        bytes,
        file: checkpoint.info(module.form.main_tensor())?.file.to_owned(),
    })
}
