//! Where two inventories of what should be one checkpoint first differ.
//!
//! Tensors come before files: an index or config that changed with its tensors says less than the tensor does.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use super::{Inventory, InventoryFile, InventoryTensor};
use crate::error::{Result, refuse};
use crate::store::hash::Hash;

/// What differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    /// A tensor, and the shard it lies in now, or lay in where it is missing.
    Tensor {
        /// Its name.
        name: String,
        /// The shard's file name.
        shard: String,
    },
    /// A configuration or tokenizer file.
    File(String),
}

/// In what it differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aspect {
    /// It is in one of the two only.
    Presence,
    /// Stored element type.
    Dtype,
    /// Extents.
    Shape,
    /// Shard, or byte range within it.
    Place,
    /// Content.
    Sha256,
}

impl fmt::Display for Aspect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Presence => "presence",
            Self::Dtype => "dtype",
            Self::Shape => "shape",
            Self::Place => "place",
            Self::Sha256 => "sha256",
        })
    }
}

/// The first difference of a checkpoint from what was inventoried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InventoryDifference {
    /// What differs.
    pub item: Item,
    /// In what.
    pub aspect: Aspect,
    /// What is there now.
    pub found: String,
    /// What the inventory has.
    pub wanted: String,
}

impl Inventory {
    /// The first difference from `sealed`, an earlier inventory of the checkpoint: tensors by name, then files by name;
    /// of one tensor dtype, shape, place and content, in this order. `None` where there is none.
    pub fn first_difference(&self, sealed: &Self) -> Option<InventoryDifference> {
        let tensor = first_unequal(&self.tensors, &sealed.tensors);
        if let Some((name, found, wanted)) = tensor {
            return Some(tensor_difference(name, found, wanted));
        }
        let (name, found, wanted) = first_unequal(&self.files, &sealed.files)?;
        let show = |sha256: Option<&Hash>| sha256.map_or_else(|| ABSENT.to_owned(), Hash::clone);
        Some(InventoryDifference {
            item: Item::File(name.to_owned()),
            aspect: if found.is_some() && wanted.is_some() { Aspect::Sha256 } else { Aspect::Presence },
            found: show(found),
            wanted: show(wanted),
        })
    }

    /// Refuses the checkpoint in `dir`, of which this is the inventory, where it is not the one of `sealed`; `record` is
    /// the file that `sealed` was read from.
    ///
    /// # Errors
    /// Names the first tensor or file that differs, in what, and both values.
    pub fn verify_against(&self, sealed: &InventoryFile, dir: &Path, record: &Path) -> Result<()> {
        let Some(difference) = self.first_difference(&sealed.inventory) else { return Ok(()) };
        let InventoryDifference { item, aspect, found, wanted } = difference;
        let refusal = refuse(format!(
            "the {} is not the one that was inventoried: {aspect} is {found}",
            sealed.role.as_str()
        ))
        .wanted(format!("{wanted}, as in {}", record.display()));
        match item {
            Item::Tensor { name, shard } => refusal.file(dir.join(shard)).tensor(name),
            Item::File(name) => refusal.file(dir.join(name)),
        }
        .err()
    }
}

/// How a value that is not there is shown.
pub(super) const ABSENT: &str = "absent";

/// The first key, in order, whose values are not equal or that only one side has.
pub(super) fn first_unequal<'a, V: PartialEq>(
    found: &'a BTreeMap<String, V>,
    wanted: &'a BTreeMap<String, V>,
) -> Option<(&'a str, Option<&'a V>, Option<&'a V>)> {
    let changed = found.iter().find(|(name, value)| wanted.get(*name) != Some(value)).map(|(name, _)| name);
    let missing = wanted.keys().find(|name| !found.contains_key(*name));
    let first = match (changed, missing) {
        (Some(changed), Some(missing)) => changed.min(missing),
        (first, None) | (None, first) => first?,
    };
    Some((first, found.get(first), wanted.get(first)))
}

fn tensor_difference(
    name: &str,
    found: Option<&InventoryTensor>,
    wanted: Option<&InventoryTensor>,
) -> InventoryDifference {
    let shard = found.or(wanted).map(|tensor| tensor.file.clone()).unwrap_or_default();
    let (aspect, found, wanted) = match (found, wanted) {
        (Some(found), Some(wanted)) => values_that_differ(found, wanted),
        (found, wanted) => {
            let show = |tensor: Option<&InventoryTensor>| tensor.map_or_else(|| ABSENT.to_owned(), describe);
            (Aspect::Presence, show(found), show(wanted))
        }
    };
    InventoryDifference { item: Item::Tensor { name: name.to_owned(), shard }, aspect, found, wanted }
}

fn values_that_differ(found: &InventoryTensor, wanted: &InventoryTensor) -> (Aspect, String, String) {
    if found.dtype != wanted.dtype {
        return (Aspect::Dtype, found.dtype.clone(), wanted.dtype.clone());
    }
    if found.shape != wanted.shape {
        return (Aspect::Shape, format!("{:?}", found.shape), format!("{:?}", wanted.shape));
    }
    if (&found.file, found.start, found.end) != (&wanted.file, wanted.start, wanted.end) {
        return (Aspect::Place, place(found), place(wanted));
    }
    (Aspect::Sha256, found.sha256.clone(), wanted.sha256.clone())
}

fn describe(tensor: &InventoryTensor) -> String {
    format!("{} {:?} in {}", tensor.dtype, tensor.shape, place(tensor))
}

fn place(tensor: &InventoryTensor) -> String {
    format!("{} bytes {}..{}", tensor.file, tensor.start, tensor.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inventory() -> Inventory {
        let tensor = |start: u64| InventoryTensor {
            file: "model.safetensors".to_owned(),
            dtype: "BF16".to_owned(),
            shape: vec![2, 4],
            start,
            end: start + 16,
            sha256: "0".repeat(64),
        };
        Inventory {
            files: [("config.json".to_owned(), "1".repeat(64))].into(),
            tensors: ["a", "b", "c"]
                .into_iter()
                .zip([64, 80, 96])
                .map(|(n, s)| (n.to_owned(), tensor(s)))
                .collect(),
        }
    }

    /// What is said of `sealed` after `change`.
    fn said(change: impl FnOnce(&mut Inventory)) -> (Item, Aspect, String, String) {
        let mut found = inventory();
        change(&mut found);
        let difference = found.first_difference(&inventory()).unwrap();
        (difference.item, difference.aspect, difference.found, difference.wanted)
    }

    fn tensor(name: &str) -> Item {
        Item::Tensor { name: name.to_owned(), shard: "model.safetensors".to_owned() }
    }

    #[test]
    fn equal_inventories_do_not_differ() {
        assert_eq!(inventory().first_difference(&inventory()), None);
        assert_eq!(inventory().shards(), [("model.safetensors".to_owned(), 112)].into());
    }

    #[test]
    fn every_aspect_of_a_tensor_is_told_with_both_values() {
        let b = |change: fn(&mut InventoryTensor)| said(|i| change(i.tensors.get_mut("b").unwrap()));
        assert_eq!(b(|t| t.dtype = "F16".into()), (tensor("b"), Aspect::Dtype, "F16".into(), "BF16".into()));
        assert_eq!(b(|t| t.shape = vec![8]), (tensor("b"), Aspect::Shape, "[8]".into(), "[2, 4]".into()));
        let (item, aspect, found, wanted) = b(|t| t.start = 72);
        assert_eq!((item, aspect), (tensor("b"), Aspect::Place));
        assert_eq!(
            (found.as_str(), wanted.as_str()),
            ("model.safetensors bytes 72..96", "model.safetensors bytes 80..96")
        );
        assert_eq!(
            b(|t| t.sha256 = "f".repeat(64)),
            (tensor("b"), Aspect::Sha256, "f".repeat(64), "0".repeat(64))
        );
    }

    #[test]
    fn missing_and_extra_tensors_come_in_the_order_of_names() {
        let (item, aspect, found, wanted) = said(|i| {
            i.tensors.remove("b");
            i.tensors.get_mut("c").unwrap().sha256 = "f".repeat(64);
        });
        assert_eq!((item, aspect, found.as_str()), (tensor("b"), Aspect::Presence, "absent"));
        assert_eq!(wanted, "BF16 [2, 4] in model.safetensors bytes 80..96");
        let (item, aspect, _, wanted) = said(|i| {
            let extra = i.tensors["a"].clone();
            i.tensors.insert("aa".to_owned(), extra);
            i.tensors.remove("b");
        });
        assert_eq!((item, aspect, wanted.as_str()), (tensor("aa"), Aspect::Presence, "absent"));
    }

    #[test]
    fn files_come_after_tensors() {
        let file = |name: &str| Item::File(name.to_owned());
        let (item, aspect, ..) =
            said(|i| i.files.insert("config.json".into(), "2".repeat(64)).map_or((), drop));
        assert_eq!((item, aspect), (file("config.json"), Aspect::Sha256));
        let (item, aspect, found, wanted) = said(|i| i.files.clear());
        assert_eq!((item, aspect), (file("config.json"), Aspect::Presence));
        assert_eq!((found, wanted), ("absent".to_owned(), "1".repeat(64)));
        let (item, ..) = said(|i| {
            i.files.clear();
            i.tensors.remove("c");
        });
        assert_eq!(item, tensor("c"));
    }
}
