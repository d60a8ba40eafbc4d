//! `JOURNAL.json`: the identity of a walk and the seals of its finished stages.
//!
//! A stage is sealed once all its outputs are published; its seal names the SHA-256 of every file it was made from and of
//! every file it made. Seals form a chain that starts from the identity, and the file names the last link: a seal that is
//! changed, dropped, doubled or put elsewhere, and a journal that was cut short, do not hold together. The file is
//! canonical JSON, so that no byte of it is without meaning. What this cannot show is a journal made anew as a whole;
//! `WALK_COMPLETE.json` names the chain up to its own seal for whoever keeps a copy of it.
//!
//! What the seals say of files is held against the work directory by [`super::sealed_files`]. An identity that differs
//! in any field is refused by that field's name.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::driver::{COMPLETE_FILE, CORPUS_FILE};
use super::sealed_files;
use crate::checkpoint::finished::finished_folder;
use crate::config::choices::CodecName;
use crate::error::{IoContext, Result, refuse};
use crate::store::atomic::write_json_atomic;
use crate::store::canonical_json::{canonical, canonical_hash};
use crate::store::failpoint;
use crate::store::hash::Hash;
use crate::store::strict_json::{parse_json, read_file};

/// File name within the work directory.
pub const JOURNAL_FILE: &str = "JOURNAL.json";
const SCHEMA: &str = "walk-journal-v2";

/// A finished stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seal {
    /// The stage's name.
    pub stage: String,
    /// What it was made from, by name.
    pub inputs: BTreeMap<String, Hash>,
    /// SHA-256 of every file it made, by path relative to the work directory.
    pub outputs: BTreeMap<String, Hash>,
    /// SHA-256 over the chain before it and the fields above.
    pub chain_sha256: Hash,
}

impl Seal {
    fn link(&self, before: &Hash) -> Result<Hash> {
        canonical_hash(&(before, &self.stage, &self.inputs, &self.outputs))
    }
}

/// The file's content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JournalRecord {
    schema: String,
    /// What the walk is of, by field.
    pub identity: BTreeMap<String, String>,
    /// Finished stages in the order they were finished.
    pub stages: Vec<Seal>,
    /// The last link of the chain.
    pub head_sha256: Hash,
}

impl JournalRecord {
    /// A journal without seals.
    ///
    /// # Errors
    /// None in practice; see [`canonical_hash`].
    pub fn new(identity: BTreeMap<String, String>) -> Result<Self> {
        let mut record =
            Self { schema: SCHEMA.to_owned(), identity, stages: Vec::new(), head_sha256: Hash::new() };
        record.head_sha256 = record.root()?;
        Ok(record)
    }

    /// Reads the `bytes` of a journal; `path` is only named in refusals.
    ///
    /// # Errors
    /// Another schema; bytes that are not the canonical form of what they say; a chain that does not hold together
    /// (names the first seal that does not follow).
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let record: Self = parse_json(path, bytes)?;
        let wrong = |what: String| refuse(what).file(path).wanted("the file as the walk wrote it");
        if record.schema != SCHEMA {
            return wrong(format!("schema is {:?}", record.schema)).field("schema").wanted(SCHEMA).err();
        }
        let mut written = canonical(&record)?;
        written.push(b'\n');
        if written != bytes {
            return wrong("the journal is not canonical JSON and a newline".into()).err();
        }
        let (mut before, mut seen) = (record.root()?, BTreeSet::new());
        for seal in &record.stages {
            if seal.link(&before)? != seal.chain_sha256 || !seen.insert(&seal.stage) {
                return wrong(format!("the seal of {} does not follow from the ones before it", seal.stage))
                    .field("stages")
                    .err();
            }
            before.clone_from(&seal.chain_sha256);
        }
        if before != record.head_sha256 {
            return wrong("the last seal is not the one the journal ends with".into())
                .field("head_sha256")
                .err();
        }
        Ok(record)
    }

    /// Reads the journal of a work directory.
    ///
    /// # Errors
    /// As [`JournalRecord::parse`], or when it cannot be read.
    pub fn read(work: &Path) -> Result<Self> {
        let path = work.join(JOURNAL_FILE);
        Self::parse(&path, &read_file(&path)?)
    }

    /// The same, or nothing where no walk was begun.
    ///
    /// # Errors
    /// As [`JournalRecord::read`].
    pub fn read_if_begun(work: &Path) -> Result<Option<Self>> {
        work.join(JOURNAL_FILE).exists().then(|| Self::read(work)).transpose()
    }

    /// Where the chain begins.
    fn root(&self) -> Result<Hash> {
        canonical_hash(&(&self.schema, &self.identity))
    }

    /// The seal of a stage, if it has one.
    pub fn sealed(&self, stage: &str) -> Option<&Seal> {
        self.stages.iter().find(|seal| seal.stage == stage)
    }

    /// The sealed hash of an output of a stage, by its path relative to the work directory.
    pub fn output(&self, stage: &str, path: &Path) -> Option<&Hash> {
        self.sealed(stage)?.outputs.get(&key(path))
    }

    /// Appends a seal.
    ///
    /// # Errors
    /// None in practice; see [`canonical_hash`].
    pub fn push(
        &mut self,
        stage: &str,
        inputs: BTreeMap<String, Hash>,
        outputs: BTreeMap<String, Hash>,
    ) -> Result<()> {
        let mut seal = Seal { stage: stage.to_owned(), inputs, outputs, chain_sha256: Hash::new() };
        seal.chain_sha256 = seal.link(&self.head_sha256)?;
        self.head_sha256.clone_from(&seal.chain_sha256);
        self.stages.push(seal);
        Ok(())
    }
}

/// The journal of an open work directory.
#[derive(Debug)]
pub struct Journal {
    work: PathBuf,
    record: JournalRecord,
    identity_sha256: Hash,
}

impl Journal {
    /// Opens the journal of `work`, or begins one with this identity. Every file it seals is hashed again; `hashed` is
    /// called with the name of each.
    ///
    /// # Errors
    /// A journal of another identity (names the field), one that does not hold together, or a sealed file that is gone
    /// or changed (names the file).
    pub fn open(
        work: &Path,
        identity: BTreeMap<String, String>,
        hashed: &(dyn Fn(&str) -> Result<()> + Sync),
    ) -> Result<Self> {
        let path = work.join(JOURNAL_FILE);
        let identity_sha256 = canonical_hash(&identity)?;
        let Some(record) = JournalRecord::read_if_begun(work)? else {
            // Without its journal nothing tells what these were made from.
            let [trellis, kaiju1] = [CodecName::Trellis, CodecName::Kaiju1].map(finished_folder);
            for leftover in [COMPLETE_FILE, trellis, kaiju1, CORPUS_FILE, "states"] {
                let leftover = work.join(leftover);
                if leftover.exists() {
                    return refuse(format!("the work directory has this, but no {JOURNAL_FILE}"))
                        .file(&leftover)
                        .wanted("the whole work directory of a walk, or an empty one")
                        .err();
                }
            }
            let record = JournalRecord::new(identity)?;
            write_json_atomic(&path, &record)?;
            return Ok(Self { work: work.to_path_buf(), record, identity_sha256 });
        };
        check_identity(&path, &record.identity, &identity)?;
        if let Some(fault) = sealed_files::faults(work, &record, hashed)?.into_iter().next() {
            return fault.err();
        }
        Ok(Self { work: work.to_path_buf(), record, identity_sha256 })
    }

    /// What the walk is of, by field.
    pub fn identity(&self) -> &BTreeMap<String, String> {
        &self.record.identity
    }

    /// SHA-256 of the canonical identity: part of the name of every unit of work.
    pub fn identity_sha256(&self) -> &Hash {
        &self.identity_sha256
    }

    /// SHA-256 over everything sealed so far.
    pub fn head_sha256(&self) -> &Hash {
        &self.record.head_sha256
    }

    /// All seals, in the order they were made.
    pub fn seals(&self) -> &[Seal] {
        &self.record.stages
    }

    /// Whether nothing is sealed yet.
    pub fn is_new(&self) -> bool {
        self.record.stages.is_empty()
    }

    /// The seal of a stage, if it has one.
    pub fn sealed(&self, stage: &str) -> Option<&Seal> {
        self.record.sealed(stage)
    }

    /// The sealed hash of an output of a stage.
    ///
    /// # Errors
    /// When stage or output was never sealed.
    pub fn output(&self, stage: &str, path: &Path) -> Result<Hash> {
        match self.record.output(stage, path) {
            Some(hash) => Ok(hash.clone()),
            None => refuse(format!("stage {stage} has no sealed output {}", key(path)))
                .file(self.work.join(JOURNAL_FILE))
                .err(),
        }
    }

    /// Seals a stage. `outputs` are published already, paths relative to the work directory.
    ///
    /// # Errors
    /// Names the journal when it cannot be written; what is in memory is then as it was.
    pub fn seal(
        &mut self,
        stage: &str,
        inputs: impl IntoIterator<Item = (&'static str, Hash)>,
        outputs: impl IntoIterator<Item = (PathBuf, Hash)>,
    ) -> Result<()> {
        failpoint::hit("seal", &self.work.join(stage)).at(self.work.join(JOURNAL_FILE))?;
        let mut record = self.record.clone();
        record.push(
            stage,
            inputs.into_iter().map(|(name, hash)| (name.to_owned(), hash)).collect(),
            outputs.into_iter().map(|(path, hash)| (key(&path), hash)).collect(),
        )?;
        write_json_atomic(self.work.join(JOURNAL_FILE), &record)?;
        self.record = record;
        Ok(())
    }

    /// Reads the journal back and hashes what a stage's seal names again.
    ///
    /// # Errors
    /// Names the file that is not as it was sealed.
    pub fn audit(&self, stage: &str) -> Result<()> {
        let record = JournalRecord::read(&self.work)?;
        let path = self.work.join(JOURNAL_FILE);
        let seal = match record.sealed(stage) {
            Some(seal) if record == self.record => seal,
            _ => return refuse("the journal is not the one this walk wrote").file(path).err(),
        };
        match sealed_files::faults_of(&self.work, &seal.outputs, &|_| Ok(()))?.into_iter().next() {
            Some(fault) => fault.err(),
            None => Ok(()),
        }
    }
}

/// Refuses another identity by the field a reader understands best: a recipe's name says more than its hash.
fn check_identity(
    path: &Path,
    then: &BTreeMap<String, String>,
    now: &BTreeMap<String, String>,
) -> Result<()> {
    let variant = "recipe_variant".to_owned();
    let fields = std::iter::once(&variant).chain(now.keys()).chain(then.keys());
    for field in fields {
        let (now, then) = (now.get(field), then.get(field));
        if now != then {
            let show = |value: Option<&String>| value.map_or("nothing".to_owned(), Clone::clone);
            let wanted = match field.as_str() {
                "build_version" | "dependencies_sha256" | "numeric_fingerprint" => {
                    "a build and a machine that compute the same bytes as those that began this walk"
                }
                _ => "the same model, corpus and recipe as before, or another --work directory",
            };
            return refuse(format!(
                "this work directory was begun with {}, now it is {}",
                show(then),
                show(now)
            ))
            .file(path)
            .field(field)
            .wanted(wanted)
            .err();
        }
    }
    Ok(())
}

/// A relative path with forward slashes on every system.
pub fn key(path: &Path) -> String {
    path.components().map(|part| part.as_os_str().to_string_lossy()).collect::<Vec<_>>().join("/")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::atomic::write_atomic;

    fn identity(recipe: &str) -> BTreeMap<String, String> {
        BTreeMap::from([("recipe_sha256".to_owned(), recipe.to_owned())])
    }

    fn open(work: &Path, recipe: &str) -> Result<Journal> {
        Journal::open(work, identity(recipe), &|_| Ok(()))
    }

    /// A journal of three seals, one file each.
    fn three(work: &Path) -> Journal {
        let mut journal = open(work, "r").unwrap();
        for stage in ["one", "two", "three"] {
            let hash = write_atomic(work.join(stage), stage.as_bytes()).unwrap();
            journal.seal(stage, [("recipe", hash.clone())], [(PathBuf::from(stage), hash)]).unwrap();
        }
        journal
    }

    #[test]
    fn a_seal_outlives_the_process_and_binds_its_outputs() {
        let dir = tempfile::tempdir().unwrap();
        three(dir.path());
        let journal = open(dir.path(), "r").unwrap();
        assert!(journal.output("one", Path::new("one")).is_ok() && journal.sealed("four").is_none());
        journal.audit("two").unwrap();
        let error = open(dir.path(), "other").unwrap_err().to_string();
        assert!(error.contains("recipe_sha256"), "{error}");
        write_atomic(dir.path().join("two"), b"2").unwrap();
        for error in [open(dir.path(), "r").unwrap_err(), journal.audit("two").unwrap_err()] {
            assert!(error.to_string().contains("two: the file is not the one that was sealed"), "{error}");
        }
        std::fs::remove_file(dir.path().join("two")).unwrap();
        let error = open(dir.path(), "r").unwrap_err().to_string();
        assert!(error.contains("two: the sealed file is gone"), "{error}");
    }

    #[test]
    fn no_byte_of_a_journal_can_change() {
        let dir = tempfile::tempdir().unwrap();
        three(dir.path());
        let path = dir.path().join(JOURNAL_FILE);
        let bytes = std::fs::read(&path).unwrap();
        JournalRecord::parse(&path, &bytes).unwrap();
        for at in 0..bytes.len() {
            for bit in [1, 32] {
                let mut changed = bytes.clone();
                changed[at] ^= bit;
                let error = JournalRecord::parse(&path, &changed).unwrap_err().to_string();
                assert!(error.contains(JOURNAL_FILE), "byte {at}: {error}");
            }
        }
        for end in 0..bytes.len() {
            assert!(JournalRecord::parse(&path, &bytes[..end]).is_err(), "cut at {end}");
        }
    }

    #[test]
    fn no_seal_can_be_dropped_doubled_or_moved() {
        let dir = tempfile::tempdir().unwrap();
        let record = three(dir.path()).record;
        type Change = fn(&mut Vec<Seal>);
        let changes: [(&str, Change); 5] = [
            ("dropped first", |seals| drop(seals.remove(0))),
            ("dropped last", |seals| drop(seals.pop())),
            ("doubled", |seals| seals.push(seals[2].clone())),
            ("moved", |seals| seals.swap(1, 2)),
            ("all gone", Vec::clear),
        ];
        for (what, change) in changes {
            let mut changed = record.clone();
            change(&mut changed.stages);
            let mut bytes = canonical(&changed).unwrap();
            bytes.push(b'\n');
            let error = JournalRecord::parse(Path::new("J"), &bytes).unwrap_err().to_string();
            assert!(error.contains("seal"), "{what}: {error}");
        }
    }
}
