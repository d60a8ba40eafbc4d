//! The packed linears of a checkpoint: EXL3 in every layout that checkpoints of this family come in, and KAIJU1.
//!
//! EXL3:
//!
//! - Plain: a module's tensors are its own, `{module}.{trellis,suh,svh}` with `mcg`, `mul1` or no marker (exllamav3).
//! - Shared: schema v2's experts, whose residual-side vectors are stored once a layer.
//! - Ranks: `{module}.rank{r}.{...}`, tensor-parallel slices that are linears of their own. Slices of `down_proj` and
//!   `o_proj` cut the inputs, all others the outputs; whether they were cut from one linear (schema v1) or encoded one by
//!   one, the module's weight is their dense weights side by side.
//!
//! KAIJU1 is one tensor, `{module}.kaiju1` ([`kaiju_tensor`](super::kaiju_tensor)); there are no ranks of it.
//!
//! A module that has two weights (packed and plain, EXL3 and KAIJU1), or tensors that belong to no layout, is refused by
//! name.

use std::collections::{BTreeMap, BTreeSet};

use rayon::prelude::*;

use super::kaiju_tensor::{KAIJU_PART, kaiju_header, read_kaiju};
use super::trellis_tensors::{LinearNames, TensorReader};
use super::{CheckpointDir, names, schema_v2};
use crate::codec::kaiju::Header;
use crate::codec::trellis::codebook::Codebook;
use crate::error::{Result, refuse};
use crate::linalg::Matrix;

/// How a module's packed tensors are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// All tensors are the module's own.
    Plain,
    /// One of the vectors belongs to the layer (schema v2).
    Shared,
    /// So many tensor-parallel slices.
    Ranks(usize),
}

impl Layout {
    /// As reports spell it.
    pub fn name(self) -> String {
        match self {
            Self::Plain => "exl3".to_owned(),
            Self::Shared => "r7 v2".to_owned(),
            Self::Ranks(ranks) => format!("tp {ranks}"),
        }
    }
}

/// A packed linear of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedModule {
    /// The module's name: that of its weight without `.weight`.
    pub module: String,
    /// Inputs.
    pub k: usize,
    /// Outputs.
    pub n: usize,
    /// What it is stored as.
    pub form: PackedForm,
}

/// What a packed linear is stored as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PackedForm {
    /// EXL3.
    Trellis(TrellisForm),
    /// KAIJU1.
    Kaiju {
        /// Name of its tensor.
        tensor: String,
        /// What the payload says of itself.
        header: Header,
    },
}

/// A packed linear in EXL3.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrellisForm {
    /// Bits a weight.
    pub bits: u32,
    /// The codebook.
    pub codebook: Codebook,
    /// The layout.
    pub layout: Layout,
    /// Names of its tensors; one entry a rank.
    pub slices: Vec<LinearNames>,
}

impl PackedForm {
    /// Layout or format, as reports spell it.
    pub fn name(&self) -> String {
        match self {
            Self::Trellis(form) => form.layout.name(),
            Self::Kaiju { .. } => "kaiju1".to_owned(),
        }
    }

    /// Codebook or code width, as reports spell it.
    pub fn codebook(&self) -> String {
        match self {
            Self::Trellis(form) => form.codebook.name().to_owned(),
            Self::Kaiju { header, .. } => format!("p{}", header.code.bits()),
        }
    }

    /// Names of everything stored for it.
    pub fn tensors(&self) -> Vec<&str> {
        match self {
            Self::Trellis(form) => form.slices.iter().flat_map(|names| names.all()).collect(),
            Self::Kaiju { tensor, .. } => vec![tensor],
        }
    }

    /// The tensor that holds the codes; the first where there are ranks.
    pub fn main_tensor(&self) -> &str {
        match self {
            Self::Trellis(form) => &form.slices[0].trellis,
            Self::Kaiju { tensor, .. } => tensor,
        }
    }
}

impl PackedModule {
    /// Name of the weight it stands for.
    pub fn weight_name(&self) -> String {
        format!("{}.weight", self.module)
    }

    /// Bits a weight of an EXL3 trellis; `None` of KAIJU1, whose rate is no whole number.
    pub fn bits(&self) -> Option<u32> {
        match &self.form {
            PackedForm::Trellis(form) => Some(form.bits),
            PackedForm::Kaiju { .. } => None,
        }
    }

    /// The weight `[N, K]` that every reader installs: the f16 values of EXL3 upcast, the f32 values of KAIJU1.
    ///
    /// # Errors
    /// As [`LinearNames::read`] and [`read_kaiju`].
    pub fn weight(&self, tensors: &dyn TensorReader) -> Result<Matrix> {
        let form = match &self.form {
            PackedForm::Trellis(form) => form,
            PackedForm::Kaiju { tensor, .. } => return Ok(read_kaiju(tensors, tensor)?.dense()),
        };
        let decode = |names: &LinearNames| Ok(names.read(tensors)?.dense_f32());
        if let [names] = &form.slices[..] {
            return Ok(decode(names)?.transposed());
        }
        let parts: Vec<Matrix> = form.slices.par_iter().map(decode).collect::<Result<_>>()?;
        Ok(join(&parts, cuts_inputs(&self.module), (self.k, self.n)).transposed())
    }
}

/// Whether ranks cut the inputs of a module rather than its outputs.
pub fn cuts_inputs(module: &str) -> bool {
    module.ends_with(".down_proj") || module.ends_with(".o_proj")
}

/// Slices side by side: below one another where inputs were cut.
pub fn join<T: Copy + Default>(parts: &[Matrix<T>], inputs: bool, (k, n): (usize, usize)) -> Matrix<T> {
    let mut data = Vec::with_capacity(k * n);
    if inputs {
        parts.iter().for_each(|part| data.extend_from_slice(&part.data));
    } else {
        for row in 0..k {
            parts.iter().for_each(|part| data.extend_from_slice(part.row(row)));
        }
    }
    Matrix { rows: k, cols: n, data }
}

/// Parts of a packed linear, as the last part of a tensor's name.
const PARTS: [&str; 5] = ["trellis", "suh", "svh", "mcg", "mul1"];

/// Every packed linear of a checkpoint by module. Headers and markers only (of KAIJU1 the payload's header); payloads are
/// not read.
///
/// # Errors
/// Names file and tensor of what belongs to no layout: a part without its trellis, a missing vector, two markers, a rank
/// left out, ranks that differ in more than their tensors, a module that is packed and plain, or packed twice, a KAIJU1
/// payload that is no header or of another length than its header says.
pub fn packed_modules(checkpoint: &CheckpointDir) -> Result<BTreeMap<String, PackedModule>> {
    let mut slices: BTreeMap<&str, BTreeMap<usize, LinearNames>> = BTreeMap::new();
    let mut known: BTreeSet<String> = BTreeSet::new();
    let mut ranked: BTreeMap<&str, bool> = BTreeMap::new();
    for name in checkpoint.names() {
        let Some(owner) = name.strip_suffix(".trellis") else { continue };
        let (module, rank) = split_rank(owner);
        let odd = owner
            .rsplit_once(".rank")
            .is_some_and(|(_, rank)| !rank.is_empty() && rank.bytes().all(|byte| byte.is_ascii_digit()));
        if odd && rank.is_none() {
            return refuse("the number of the rank is not spelt as a number")
                .file(checkpoint.file_of(name))
                .tensor(name)
                .wanted("rank0, rank1 and so on")
                .err();
        }
        let names = find(checkpoint, owner)?;
        names.check_marker(checkpoint)?;
        known.extend(names.all().map(str::to_owned));
        if ranked.insert(module, rank.is_some()).is_some_and(|before| before != rank.is_some()) {
            return refuse("the module is stored whole and in ranks")
                .file(checkpoint.file_of(name))
                .tensor(name)
                .wanted("one of them")
                .err();
        }
        slices.entry(module).or_default().insert(rank.unwrap_or(0), names);
    }
    for name in checkpoint.names() {
        let part = name.rsplit_once('.').map_or(name, |(_, part)| part);
        if PARTS.contains(&part) && !known.contains(name) {
            return refuse("a part of a packed linear without the rest of it")
                .file(checkpoint.file_of(name))
                .tensor(name)
                .wanted("trellis, suh, svh and at most one marker, mcg or mul1")
                .err();
        }
    }
    let module = |(module, slices): (&str, BTreeMap<usize, LinearNames>)| {
        let ranks = ranked.get(module).is_some_and(|ranked| *ranked);
        Ok((module.to_owned(), assemble(checkpoint, module, slices, ranks)?))
    };
    let mut modules: BTreeMap<String, PackedModule> =
        slices.into_iter().map(module).collect::<Result<_>>()?;
    for name in checkpoint.names() {
        if name.rsplit('.').next() != Some(KAIJU_PART) {
            continue;
        }
        let found = kaiju_module(checkpoint, name)?;
        if let Some(other) = modules.get(&found.module) {
            return refuse(format!("the module also has {}", other.form.main_tensor()))
                .file(checkpoint.file_of(name))
                .tensor(name)
                .wanted("one of them")
                .err();
        }
        modules.insert(found.module.clone(), found);
    }
    Ok(modules)
}

/// The module of a KAIJU1 tensor.
fn kaiju_module(checkpoint: &CheckpointDir, name: &str) -> Result<PackedModule> {
    let place = |what: String| refuse(what).file(checkpoint.file_of(name)).tensor(name);
    let Some((module, _)) = name.rsplit_once('.').filter(|(module, _)| !module.is_empty()) else {
        return place("the module has no name".to_owned()).wanted(format!("{{module}}.{KAIJU_PART}")).err();
    };
    if module.rsplit_once(".rank").is_some_and(|(_, rank)| rank.bytes().all(|byte| byte.is_ascii_digit())) {
        return place("a rank of a KAIJU1 linear".to_owned()).wanted("the whole linear").err();
    }
    let weight = format!("{module}.weight");
    if checkpoint.contains(&weight) {
        return place(format!("the module also has {weight}")).wanted("one of them").err();
    }
    let header = kaiju_header(checkpoint, name)?;
    Ok(PackedModule {
        module: module.to_owned(),
        k: header.cols,
        n: header.rows,
        form: PackedForm::Kaiju { tensor: name.to_owned(), header },
    })
}

/// `{module}.rank{r}` as (module, r).
fn split_rank(owner: &str) -> (&str, Option<usize>) {
    let split = owner.rsplit_once(".rank").and_then(|(module, rank)| {
        let number: usize = rank.parse().ok()?;
        (number.to_string() == rank).then_some((module, Some(number)))
    });
    split.unwrap_or((owner, None))
}

/// The tensors of the linear whose trellis is `{owner}.trellis`.
fn find(checkpoint: &CheckpointDir, owner: &str) -> Result<LinearNames> {
    let trellis = format!("{owner}.trellis");
    let markers: Vec<Codebook> = Codebook::ALL
        .into_iter()
        .filter(|codebook| {
            codebook.marker().is_some() && checkpoint.contains(&format!("{owner}.{}", codebook.name()))
        })
        .collect();
    let codebook = match markers[..] {
        [] => Codebook::ThreeInst,
        [codebook] => codebook,
        _ => {
            return refuse("the linear has two codebook markers")
                .file(checkpoint.file_of(&trellis))
                .tensor(trellis)
                .wanted("mcg, mul1, or none")
                .err();
        }
    };
    let mut linear = LinearNames::own(owner, codebook);
    if let Some((layer, expert, projection)) = names::split_expert(owner) {
        let shared = schema_v2::linear_names(layer, expert, projection);
        for (own, shared) in [(&mut linear.suh, shared.suh), (&mut linear.svh, shared.svh)] {
            if !checkpoint.contains(own) && checkpoint.contains(&shared) {
                *own = shared;
            }
        }
    }
    for vector in [&linear.suh, &linear.svh] {
        if !checkpoint.contains(vector) {
            return refuse("the linear's vector is missing")
                .file(checkpoint.file_of(&trellis))
                .tensor(vector)
                .wanted(format!("suh and svh beside {trellis}"))
                .err();
        }
    }
    Ok(linear)
}

fn assemble(
    checkpoint: &CheckpointDir,
    module: &str,
    slices: BTreeMap<usize, LinearNames>,
    ranked: bool,
) -> Result<PackedModule> {
    let first = &slices[slices.keys().next().unwrap_or(&0)];
    let place = |what: String| refuse(what).file(checkpoint.file_of(&first.trellis)).tensor(&first.trellis);
    let weight = format!("{module}.weight");
    if checkpoint.contains(&weight) {
        return place(format!("the module also has {weight}")).wanted("one of them").err();
    }
    let ranks = slices.len();
    if let Some(gone) = (0..ranks).find(|rank| !slices.contains_key(rank)) {
        return place(format!("{ranks} ranks, and rank {gone} is not among them"))
            .wanted("ranks from 0")
            .err();
    }
    let (mut k, mut n, bits) = first.extent(checkpoint)?;
    let codebook = first.codebook;
    for names in slices.values().skip(1) {
        let (rank_k, rank_n, rank_bits) = names.extent(checkpoint)?;
        let inputs = cuts_inputs(module);
        let across = if inputs { rank_n == n } else { rank_k == k };
        if !across || rank_bits != bits || names.codebook != codebook {
            return place(format!(
                "{} is {rank_k} x {rank_n} at {rank_bits} bits ({}), which is no slice beside this one",
                names.trellis,
                names.codebook.name()
            ))
            .wanted(format!("{bits} bits ({}) and the same size across", codebook.name()))
            .err();
        }
        if inputs { k += rank_k } else { n += rank_n }
    }
    let slices: Vec<LinearNames> = slices.into_values().collect();
    let shared = |names: &LinearNames| !names.suh.starts_with(module) || !names.svh.starts_with(module);
    let layout = match (ranked, shared(&slices[0])) {
        (true, _) => Layout::Ranks(ranks),
        (false, true) => Layout::Shared,
        (false, false) => Layout::Plain,
    };
    let form = PackedForm::Trellis(TrellisForm { bits, codebook, layout, slices });
    Ok(PackedModule { module: module.to_owned(), k, n, form })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_told_from_names() {
        assert_eq!(split_rank("a.down_proj.rank3"), ("a.down_proj", Some(3)));
        for whole in ["a.down_proj", "a.rank", "a.rank03", "a.rankx"] {
            assert_eq!(split_rank(whole), (whole, None));
        }
        assert!(cuts_inputs("x.down_proj") && cuts_inputs("x.o_proj") && !cuts_inputs("x.up_proj"));
    }

    #[test]
    fn slices_join_along_the_side_they_were_cut_from() {
        let part = |first: f32| Matrix::new(1, 2, vec![first, first + 1.0]);
        let whole = vec![0.0, 1.0, 2.0, 3.0];
        assert_eq!(join(&[part(0.0), part(2.0)], false, (1, 4)), Matrix::new(1, 4, whole.clone()));
        assert_eq!(join(&[part(0.0), part(2.0)], true, (2, 2)), Matrix::new(2, 2, whole));
    }
}
