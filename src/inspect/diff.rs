//! Two checkpoints, weight by weight.
//!
//! A plain tensor and a packed module of one name, `{module}.weight`, are the same weight. Two are equal when what is
//! stored of them is: type, shape and bytes, or layout and every packed part. Where they are not, their values are
//! compared in f64, packed ones decoded: `||a - b|| / ||a||` and the largest difference. Sums run in the order of the
//! values, so that figures do not depend on threads. Where the manifests beside the shards of one side say that the
//! channels of an expert are stored in another order than its source's, its packed weights are compared in the source's
//! order too, and what is nearer is told.
//!
//! Memory: as many pairs of decoded linears as there are threads; plain tensors are read in place.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use half::{bf16, f16};
use rayon::prelude::*;
use serde::Serialize;

use super::orders::ChannelOrders;
use super::role::{Role, Roles};
use crate::checkpoint::kaiju_tensor::KAIJU_PART;
use crate::checkpoint::packed::{PackedForm, PackedModule};
use crate::checkpoint::trellis_tensors::TensorReader;
use crate::checkpoint::{CheckpointDir, Reconstruction};
use crate::error::Result;
use crate::linalg::Matrix;
use crate::store::tensor_dtype::TensorDtype;
use crate::walk::progress::{Observer, advance};

/// What was found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DiffReport {
    /// The first checkpoint.
    pub a: String,
    /// The second.
    pub b: String,
    /// Whether differences in how equal values are stored count.
    pub values_only: bool,
    /// Weights whose values were compared in the order of the source's channels, not as they are stored.
    pub reordered: usize,
    /// Over everything.
    pub total: RoleDiff,
    /// By role.
    pub roles: BTreeMap<Role, RoleDiff>,
    /// The weights that differ, by name.
    pub differences: Vec<Difference>,
}

/// Weights of a role.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct RoleDiff {
    /// Equal ones.
    pub equal: usize,
    /// Different ones.
    pub different: usize,
    /// Those only the first checkpoint has.
    pub only_a: usize,
    /// Those only the second has.
    pub only_b: usize,
    /// `||a - b|| / ||a||` over all compared weights that have values of equal shapes; `None` without any.
    pub relative_error: Option<f64>,
    /// Largest difference of values.
    pub max_error: Option<f64>,
    #[serde(skip)]
    sums: Sums,
}

/// A weight that is not the same in both.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Difference {
    /// Its name.
    pub name: String,
    /// Its role.
    pub role: Role,
    /// What it is in the first checkpoint: type or packed form, and shape. `None`: it is not there.
    pub a: Option<String>,
    /// The same in the second.
    pub b: Option<String>,
    /// Parts of a packed module whose bytes differ.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<String>,
    /// Values that differ, where both are numbers of equal shapes.
    pub values_differing: Option<u64>,
    /// `||a - b|| / ||a||`: `null` in JSON where that is no number.
    pub relative_error: Option<f64>,
    /// Largest difference.
    pub max_error: Option<f64>,
}

/// Sums over pairs of values.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Sums {
    compared: bool,
    differing: u64,
    error: f64,
    norm: f64,
    max: f64,
}

impl Sums {
    fn over(pairs: impl Iterator<Item = (f64, f64)>) -> Self {
        let mut sums = Self { compared: true, ..Self::default() };
        for (a, b) in pairs {
            let error = (a - b).abs();
            sums.norm += a * a;
            // Equal infinities do not differ; what is no number differs from everything.
            if a != b {
                sums.differing += 1;
                sums.error += error * error;
                sums.max = larger(sums.max, error);
            }
        }
        sums
    }

    /// None where one of them has no floats.
    fn between(a: &Values<'_>, b: &Values<'_>) -> Self {
        match (a.iter(), b.iter()) {
            (Some(a), Some(b)) => Self::over(a.zip(b)),
            _ => Self::default(),
        }
    }

    fn add(&mut self, other: &Self) {
        self.compared |= other.compared;
        self.differing += other.differing;
        self.error += other.error;
        self.norm += other.norm;
        self.max = larger(self.max, other.max);
    }

    fn relative(&self) -> Option<f64> {
        let relative = if self.error == 0.0 { 0.0 } else { (self.error / self.norm).sqrt() };
        self.compared.then_some(relative)
    }
}

/// Unlike [`f64::max`], keeps what is no number.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || b <= a { a } else { b }
}

/// How two weights of one name compare.
struct Compared {
    stored_equal: bool,
    reordered: bool,
    parts: Vec<String>,
    sums: Sums,
}

/// A checkpoint and the order of its experts' channels.
struct Side {
    weights: Reconstruction,
    orders: ChannelOrders,
}

impl Side {
    fn open(path: &Path) -> Result<Self> {
        let weights = Reconstruction::new(CheckpointDir::open_any(path)?.into())?;
        let orders = ChannelOrders::read(weights.checkpoint().dir());
        Ok(Self { weights, orders })
    }
}

/// Compares two checkpoints, each a directory, a folder of shards or a safetensors file. With `values_only`, weights
/// with equal values are equal however they are stored.
///
/// # Errors
/// As [`CheckpointDir::open_any`] and [`packed_modules`](crate::checkpoint::packed::packed_modules); names a packed
/// tensor that cannot be decoded.
pub fn diff(a: &Path, b: &Path, values_only: bool, observer: &dyn Observer) -> Result<DiffReport> {
    let (side_a, side_b) = (Side::open(a)?, Side::open(b)?);
    let (first, second) = (&side_a.weights, &side_b.weights);
    let roles = Roles::of(first.checkpoint().names().chain(second.checkpoint().names()));
    let (of_a, of_b): (BTreeSet<String>, BTreeSet<String>) =
        (first.weights().into_iter().collect(), second.weights().into_iter().collect());
    let names: Vec<&String> = of_a.union(&of_b).collect();
    let mut report = DiffReport {
        a: a.display().to_string(),
        b: b.display().to_string(),
        values_only,
        reordered: 0,
        total: RoleDiff::default(),
        roles: BTreeMap::new(),
        differences: Vec::new(),
    };
    observer.begin("diff", None, names.len() as u64);
    let compared: Vec<Option<Compared>> = names
        .par_iter()
        .map(|name| {
            let both = of_a.contains(*name) && of_b.contains(*name);
            let compared = both.then(|| compare((&side_a, &side_b), name)).transpose()?;
            advance(observer, name)?;
            Ok(compared)
        })
        .collect::<Result<_>>()?;
    observer.end();
    for (name, compared) in names.into_iter().zip(compared) {
        let role = roles.role(name);
        let tell = |side: &Reconstruction| told(side, name);
        let (a, b) = (
            of_a.contains(name).then(|| tell(first)).transpose()?,
            of_b.contains(name).then(|| tell(second)).transpose()?,
        );
        report.add(name, role, (a, b), compared);
    }
    for role in report.roles.values_mut().chain([&mut report.total]) {
        role.relative_error = role.sums.relative();
        role.max_error = role.sums.compared.then_some(role.sums.max);
    }
    Ok(report)
}

impl DiffReport {
    fn add(
        &mut self,
        name: &str,
        role: Role,
        (a, b): (Option<String>, Option<String>),
        found: Option<Compared>,
    ) {
        let equal = found.as_ref().is_some_and(|found| {
            let same_values = found.sums.compared && found.sums.differing == 0;
            found.stored_equal || (self.values_only && same_values)
        });
        for count in [&mut self.total, self.roles.entry(role).or_default()] {
            match (&found, &a) {
                (Some(found), _) => {
                    count.equal += usize::from(equal);
                    count.different += usize::from(!equal);
                    count.sums.add(&found.sums);
                }
                (None, Some(_)) => count.only_a += 1,
                (None, None) => count.only_b += 1,
            }
        }
        self.reordered += usize::from(found.as_ref().is_some_and(|found| found.reordered));
        if equal {
            return;
        }
        let sums = found.as_ref().map(|found| found.sums).filter(|sums| sums.compared);
        self.differences.push(Difference {
            name: name.to_owned(),
            role,
            a,
            b,
            parts: found.map_or_else(Vec::new, |found| found.parts),
            values_differing: sums.map(|sums| sums.differing),
            relative_error: sums.and_then(|sums| sums.relative()),
            max_error: sums.map(|sums| sums.max),
        });
    }
}

/// Type or packed form and shape of a weight.
fn told(side: &Reconstruction, name: &str) -> Result<String> {
    let shape = side.shape(name)?;
    Ok(match side.packed_weight(name) {
        Some(module) => {
            let bits = module.bits().map_or(String::new(), |bits| format!("{bits}-bit "));
            format!("{} {} {bits}{shape:?}", module.form.name(), module.form.codebook())
        }
        None => format!("{} {shape:?}", side.checkpoint().info(name)?.info.dtype),
    })
}

fn compare((side_a, side_b): (&Side, &Side), name: &str) -> Result<Compared> {
    let (a, b) = (&side_a.weights, &side_b.weights);
    let mut parts = Vec::new();
    let stored_equal = match (a.packed_weight(name), b.packed_weight(name)) {
        (Some(mine), Some(theirs)) => {
            parts = differing_parts((a, mine), (b, theirs))?;
            mine.form.name() == theirs.form.name() && parts.is_empty()
        }
        (None, None) => {
            let (mine, theirs) = (a.checkpoint().info(name)?.info, b.checkpoint().info(name)?.info);
            (mine.dtype, &mine.shape) == (theirs.dtype, &theirs.shape)
                && a.checkpoint().tensor_bytes(name)? == b.checkpoint().tensor_bytes(name)?
        }
        _ => false,
    };
    let (sums, reordered) = match a.shape(name)? == b.shape(name)? {
        true => sums((side_a, side_b), name, stored_equal)?,
        false => (Sums::default(), false),
    };
    Ok(Compared { stored_equal, reordered, parts, sums })
}

/// Names of the parts that are not the same bytes in both, rank by rank; `ranks` where their numbers differ, none where
/// the formats do.
fn differing_parts(
    (a, mine): (&Reconstruction, &PackedModule),
    (b, theirs): (&Reconstruction, &PackedModule),
) -> Result<Vec<String>> {
    let (mine, theirs) = match (&mine.form, &theirs.form) {
        (PackedForm::Trellis(mine), PackedForm::Trellis(theirs)) => (mine, theirs),
        (PackedForm::Kaiju { tensor: mine, .. }, PackedForm::Kaiju { tensor: theirs, .. }) => {
            let equal = a.checkpoint().tensor_bytes(mine)? == b.checkpoint().tensor_bytes(theirs)?;
            return Ok(if equal { Vec::new() } else { vec![KAIJU_PART.to_owned()] });
        }
        _ => return Ok(Vec::new()),
    };
    if mine.slices.len() != theirs.slices.len() {
        return Ok(vec!["ranks".to_owned()]);
    }
    let mut parts = BTreeSet::new();
    for (mine, theirs) in mine.slices.iter().zip(&theirs.slices) {
        for (part, mine, theirs) in [
            ("trellis", &mine.trellis, &theirs.trellis),
            ("suh", &mine.suh, &theirs.suh),
            ("svh", &mine.svh, &theirs.svh),
        ] {
            if a.checkpoint().tensor_bytes(mine)? != b.checkpoint().tensor_bytes(theirs)? {
                parts.insert(part);
            }
        }
        if mine.codebook != theirs.codebook {
            parts.insert("codebook");
        }
    }
    Ok(parts.into_iter().map(str::to_owned).collect())
}

/// The values of a weight, in place or decoded.
enum Values<'a> {
    F64(&'a [[u8; 8]]),
    F32(&'a [[u8; 4]]),
    F16(&'a [[u8; 2]]),
    BF16(&'a [[u8; 2]]),
    Decoded(Matrix),
    /// Integers and truth values are compared as bytes alone.
    NoFloats,
}

impl<'a> Values<'a> {
    fn of(side: &'a Reconstruction, name: &str) -> Result<Self> {
        if let Some(module) = side.packed_weight(name) {
            return Ok(Self::Decoded(module.weight(side.checkpoint().as_ref())?));
        }
        let bytes = side.checkpoint().tensor_payload(name)?;
        Ok(match side.checkpoint().info(name)?.info.dtype {
            TensorDtype::F64 => Self::F64(bytes.as_chunks().0),
            TensorDtype::F32 => Self::F32(bytes.as_chunks().0),
            TensorDtype::F16 => Self::F16(bytes.as_chunks().0),
            TensorDtype::BF16 => Self::BF16(bytes.as_chunks().0),
            _ => Self::NoFloats,
        })
    }

    /// Packed weights in the source's order.
    fn undo(self, orders: &ChannelOrders, name: &str) -> Self {
        match self {
            Self::Decoded(weight) => Self::Decoded(orders.undo(name, weight)),
            stored => stored,
        }
    }

    fn iter(&self) -> Option<Box<dyn Iterator<Item = f64> + '_>> {
        Some(match self {
            Self::F64(values) => Box::new(values.iter().map(|x| f64::from_le_bytes(*x))),
            Self::F32(values) => Box::new(values.iter().map(|x| f64::from(f32::from_le_bytes(*x)))),
            Self::F16(values) => Box::new(values.iter().map(|x| f64::from(f16::from_le_bytes(*x)))),
            Self::BF16(values) => Box::new(values.iter().map(|x| f64::from(bf16::from_le_bytes(*x)))),
            Self::Decoded(matrix) => Box::new(matrix.data.iter().map(|x| f64::from(*x))),
            Self::NoFloats => return None,
        })
    }
}

/// The sums over a weight that both have in one shape, and whether they are in the source's order of channels. What is
/// stored alike is only read once, for its norm.
fn sums((a, b): (&Side, &Side), name: &str, same: bool) -> Result<(Sums, bool)> {
    let mine = Values::of(&a.weights, name)?;
    if same {
        // Also where a value is no number, which would differ from itself.
        let norm = mine.iter().map(|values| values.map(|x| x * x).sum());
        let sums = norm.map(|norm| Sums { compared: true, norm, ..Sums::default() });
        return Ok((sums.unwrap_or_default(), false));
    }
    let theirs = Values::of(&b.weights, name)?;
    let as_stored = Sums::between(&mine, &theirs);
    if as_stored.differing == 0 || a.orders.of(name) == b.orders.of(name) {
        return Ok((as_stored, false));
    }
    // A side without a manifest may be the source, or a plain form that kept the stored order: the nearer one is meant.
    let restored = Sums::between(&mine.undo(&a.orders, name), &theirs.undo(&b.orders, name));
    let nearer = restored.error < as_stored.error;
    Ok((if nearer { restored } else { as_stored }, nearer))
}
