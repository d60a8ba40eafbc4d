//! `JOURNAL.json`: the identity of a walk and the seals of its finished stages.
//!
//! A stage is sealed once all its outputs are published; its seal names the SHA-256 of each. On start every sealed
//! output that still has to exist is hashed again. Anything that differs in the identity is refused by its field's name.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::driver::{COMPLETE_FILE, CORPUS_FILE};
use super::emit::V2_FOLDER;
use crate::error::{IoContext, Result, refuse};
use crate::store::atomic::write_json_atomic;
use crate::store::failpoint;
use crate::store::hash::{Hash, sha256_file};
use crate::store::strict_json::read_json;

/// File name within the work directory.
pub const JOURNAL_FILE: &str = "JOURNAL.json";
const SCHEMA: &str = "walk-journal-v1";

/// A finished stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seal {
    /// The stage's name.
    pub stage: String,
    /// What it was made from, by name.
    pub inputs: BTreeMap<String, Hash>,
    /// SHA-256 of what it made, by path relative to the work directory.
    pub outputs: BTreeMap<String, Hash>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Contents {
    schema: String,
    identity: BTreeMap<String, String>,
    stages: Vec<Seal>,
}

/// The journal of an open work directory.
#[derive(Debug)]
pub struct Journal {
    work: PathBuf,
    contents: Contents,
}

impl Journal {
    /// Opens the journal of `work`, or begins one with this identity.
    ///
    /// # Errors
    /// A journal of another identity (names the field), or a sealed output that is gone or changed (names the file).
    pub fn open(work: &Path, identity: BTreeMap<String, String>) -> Result<Self> {
        let path = work.join(JOURNAL_FILE);
        if !path.exists() {
            // Without its journal nothing tells what these were made from.
            for leftover in [COMPLETE_FILE, V2_FOLDER, CORPUS_FILE, "states"] {
                let leftover = work.join(leftover);
                if leftover.exists() {
                    return refuse(format!("the work directory has this, but no {JOURNAL_FILE}"))
                        .file(&leftover)
                        .wanted("the whole work directory of a walk, or an empty one")
                        .err();
                }
            }
            let contents = Contents { schema: SCHEMA.to_owned(), identity, stages: Vec::new() };
            let journal = Self { work: work.to_path_buf(), contents };
            write_json_atomic(&path, &journal.contents)?;
            return Ok(journal);
        }
        let contents: Contents = read_json(&path)?;
        if contents.schema != SCHEMA {
            return refuse(format!("schema is {:?}", contents.schema))
                .file(&path)
                .field("schema")
                .wanted(SCHEMA)
                .err();
        }
        // The field a reader understands best comes first: a recipe's name says more than its hash.
        let variant = "recipe_variant".to_owned();
        let fields = std::iter::once(&variant).chain(identity.keys()).chain(contents.identity.keys());
        for field in fields {
            let (now, then) = (identity.get(field), contents.identity.get(field));
            if now != then {
                let show = |value: Option<&String>| value.map_or("nothing".to_owned(), Clone::clone);
                return refuse(format!(
                    "this work directory was begun with {}, now it is {}",
                    show(then),
                    show(now)
                ))
                .file(&path)
                .field(field)
                .wanted("the same model, corpus and recipe as before, or another --work directory")
                .err();
            }
        }
        let journal = Self { work: work.to_path_buf(), contents };
        journal.audit()?;
        Ok(journal)
    }

    /// Hashes every sealed output again, states that a later state has replaced aside.
    fn audit(&self) -> Result<()> {
        let state_of =
            |path: &str| path.strip_prefix("states/").and_then(|rest| rest.get(..3)?.parse::<u32>().ok());
        let outputs = || self.contents.stages.iter().flat_map(|seal| &seal.outputs);
        let newest = outputs().filter_map(|(path, _)| state_of(path)).max();
        for (path, sealed) in outputs() {
            if state_of(path) < newest && state_of(path).is_some() {
                continue;
            }
            let file = self.work.join(path);
            if sha256_file(&file)? != *sealed {
                return refuse("the file is not the one that was sealed")
                    .file(&file)
                    .wanted(format!("sha256 {sealed}"))
                    .err();
            }
        }
        Ok(())
    }

    /// What the work directory is of, by field.
    pub fn identity(&self) -> &BTreeMap<String, String> {
        &self.contents.identity
    }

    /// Whether anything was sealed yet.
    pub fn is_new(&self) -> bool {
        self.contents.stages.is_empty()
    }

    /// The seal of a stage, if it has one.
    pub fn sealed(&self, stage: &str) -> Option<&Seal> {
        self.contents.stages.iter().find(|seal| seal.stage == stage)
    }

    /// The sealed hash of an output of a stage.
    ///
    /// # Errors
    /// When stage or output was never sealed.
    pub fn output(&self, stage: &str, path: &Path) -> Result<Hash> {
        let key = key(path);
        match self.sealed(stage).and_then(|seal| seal.outputs.get(&key)) {
            Some(hash) => Ok(hash.clone()),
            None => refuse(format!("stage {stage} has no sealed output {key}"))
                .file(self.work.join(JOURNAL_FILE))
                .err(),
        }
    }

    /// Seals a stage. `outputs` are published already, paths relative to the work directory.
    ///
    /// # Errors
    /// Names the journal when it cannot be written.
    pub fn seal(
        &mut self,
        stage: &str,
        inputs: impl IntoIterator<Item = (&'static str, Hash)>,
        outputs: impl IntoIterator<Item = (PathBuf, Hash)>,
    ) -> Result<()> {
        failpoint::hit("seal", &self.work.join(stage)).at(self.work.join(JOURNAL_FILE))?;
        self.contents.stages.push(Seal {
            stage: stage.to_owned(),
            inputs: inputs.into_iter().map(|(name, hash)| (name.to_owned(), hash)).collect(),
            outputs: outputs.into_iter().map(|(path, hash)| (key(&path), hash)).collect(),
        });
        write_json_atomic(self.work.join(JOURNAL_FILE), &self.contents)?;
        Ok(())
    }
}

/// A relative path with forward slashes on every system.
fn key(path: &Path) -> String {
    path.components().map(|part| part.as_os_str().to_string_lossy()).collect::<Vec<_>>().join("/")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::atomic::write_atomic;

    fn identity(recipe: &str) -> BTreeMap<String, String> {
        BTreeMap::from([("recipe_sha256".to_owned(), recipe.to_owned())])
    }

    #[test]
    fn a_seal_outlives_the_process_and_binds_its_outputs() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.json");
        let mut journal = Journal::open(dir.path(), identity("r")).unwrap();
        let hash = write_atomic(&file, b"1").unwrap();
        journal.seal("one", [("recipe", hash.clone())], [(PathBuf::from("a.json"), hash.clone())]).unwrap();
        let journal = Journal::open(dir.path(), identity("r")).unwrap();
        assert_eq!(journal.output("one", Path::new("a.json")).unwrap(), hash);
        assert!(journal.sealed("two").is_none());
        let error = Journal::open(dir.path(), identity("other")).unwrap_err().to_string();
        assert!(error.contains("recipe_sha256"), "{error}");
        write_atomic(&file, b"2").unwrap();
        let error = Journal::open(dir.path(), identity("r")).unwrap_err().to_string();
        assert!(error.contains("a.json") && error.contains("not the one that was sealed"), "{error}");
    }
}
