//! An inventory on disk: `walk-inventory-v1`, canonical JSON with its role and its own hash.
//!
//! What is read back is exactly what was written: another schema, a key too many, a hash that is not that of the content, a
//! shard length that does not follow from the tensors, or bytes that are not canonical are refused.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::difference::{ABSENT, first_unequal};
use super::{Inventory, InventoryTensor};
use crate::error::{IoContext, Result, refuse};
use crate::store::atomic::write_json_atomic;
use crate::store::canonical_json::canonical;
use crate::store::hash::Hash;
use crate::store::strict_json::{StrictValue, read_file};

/// The file format's name.
pub const SCHEMA: &str = "walk-inventory-v1";

/// The longest inventory file that is read, in bytes; GLM-5.2's has some 20 MB.
pub const MAX_INVENTORY_BYTES: u64 = 1 << 28;

/// What a checkpoint is inventoried as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Where routed experts come from.
    Source,
    /// Where everything else comes from.
    Carrier,
}

impl Role {
    /// `source` or `carrier`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Carrier => "carrier",
        }
    }
}

/// An inventory with the role it was taken in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InventoryFile {
    /// The role.
    pub role: Role,
    /// Files and tensors.
    pub inventory: Inventory,
    /// [`Inventory::sha256`] of it.
    pub inventory_sha256: Hash,
}

/// The file as it is written.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written<'a> {
    schema: Cow<'a, str>,
    role: Role,
    inventory_sha256: Cow<'a, str>,
    files: Cow<'a, BTreeMap<String, Hash>>,
    /// Byte length of every shard, for whoever copies or mounts them; it follows from `tensors`.
    shards: BTreeMap<String, u64>,
    tensors: Cow<'a, BTreeMap<String, InventoryTensor>>,
}

impl InventoryFile {
    /// An inventory in a role.
    ///
    /// # Errors
    /// None in practice.
    pub fn new(role: Role, inventory: Inventory) -> Result<Self> {
        let inventory_sha256 = inventory.sha256()?;
        Ok(Self { role, inventory, inventory_sha256 })
    }

    fn written(&self) -> Written<'_> {
        Written {
            schema: SCHEMA.into(),
            role: self.role,
            inventory_sha256: self.inventory_sha256.as_str().into(),
            files: Cow::Borrowed(&self.inventory.files),
            shards: self.inventory.shards(),
            tensors: Cow::Borrowed(&self.inventory.tensors),
        }
    }

    /// Publishes it as canonical JSON and a newline, and returns the SHA-256 of the file.
    ///
    /// # Errors
    /// Names the path when it cannot be written.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<Hash> {
        write_json_atomic(path, &self.written())
    }

    /// Reads a file and checks that it holds what it says.
    ///
    /// # Errors
    /// Names the file and what of it is not as [`InventoryFile::write`] writes it.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let length = std::fs::metadata(path).at(path)?.len();
        if length > MAX_INVENTORY_BYTES {
            return refuse(format!("the inventory has {length} bytes"))
                .file(path)
                .wanted(format!("at most {MAX_INVENTORY_BYTES}"))
                .err();
        }
        Self::parse(path, &read_file(path)?)
    }

    /// Reads the `bytes` of a file; `path` is only named in refusals.
    ///
    /// # Errors
    /// As [`InventoryFile::read`].
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let wanted = format!("a file of schema {SCHEMA}, as `walk inventory --out` writes it");
        let no_json =
            |error: serde_json::Error| refuse(format!("no inventory: {error}")).file(path).wanted(&wanted);
        let StrictValue(value) = serde_json::from_slice(bytes).map_err(no_json)?;
        let Value::Object(fields) = &value else {
            return refuse("no inventory: the JSON is no object").file(path).wanted(wanted).err();
        };
        let schema = fields.get("schema").cloned().unwrap_or(Value::Null);
        if schema != SCHEMA {
            return refuse(format!("the schema is {schema}")).file(path).field("schema").wanted(SCHEMA).err();
        }
        let written: Written<'_> = serde_json::from_slice(bytes).map_err(no_json)?;
        let inventory =
            Inventory { files: written.files.into_owned(), tensors: written.tensors.into_owned() };
        let read = Self { role: written.role, inventory_sha256: inventory.sha256()?, inventory };
        if written.inventory_sha256 != read.inventory_sha256 {
            return refuse(format!("the inventory says its hash is {}", written.inventory_sha256))
                .file(path)
                .field("inventory_sha256")
                .wanted(format!("{}, the hash of its files and tensors", read.inventory_sha256))
                .err();
        }
        let shards = read.inventory.shards();
        if written.shards != shards {
            let (shard, found, wanted) = first_unequal(&written.shards, &shards).unwrap_or_default();
            let show = |bytes: Option<&u64>| bytes.map_or_else(|| ABSENT.to_owned(), u64::to_string);
            return refuse(format!("the length of {shard} is {}", show(found)))
                .file(path)
                .field("shards")
                .wanted(format!("{}, the end of its last tensor", show(wanted)))
                .err();
        }
        let mut canonical = canonical(&read.written())?;
        canonical.push(b'\n');
        if bytes != canonical {
            return refuse("the inventory is not canonical JSON and a newline")
                .file(path)
                .wanted(wanted)
                .err();
        }
        Ok(read)
    }

    /// Reads the inventory of a checkpoint in this role.
    ///
    /// # Errors
    /// As [`InventoryFile::read`], or when it was taken in the other role.
    pub fn read_as(path: impl AsRef<Path>, role: Role) -> Result<Self> {
        let path = path.as_ref();
        let read = Self::read(path)?;
        if read.role == role {
            return Ok(read);
        }
        refuse(format!("the inventory is of a {}", read.role.as_str()))
            .file(path)
            .field("role")
            .wanted(role.as_str())
            .err()
    }
}

impl Serialize for InventoryFile {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.written().serialize(serializer)
    }
}
