//! `plan.json`: which texts calibrate the walk and which ones evaluate it.
//!
//! ```json
//! {
//!   "version": 1,
//!   "prefix_tokens": ["<|endoftext|>"],
//!   "max_tokens": 256,
//!   "prompts": [
//!     {"id": "greeting", "axis": "prose", "use": "calibrate", "text": "Once upon a time"},
//!     {"id": "book", "axis": "prose", "use": "evaluate", "file": "book.txt", "lines": [10, 80]},
//!     {"id": "docs", "axis": "technical", "use": "calibrate", "file": "docs.txt", "split": "\n%%\n"},
//!     {"id": "raw", "axis": "code", "use": "evaluate", "token_ids": [17, 4, 99], "prefix_tokens": []}
//!   ]
//! }
//! ```
//!
//! | field of the plan | meaning |
//! |---|---|
//! | `version` | 1 |
//! | `prefix_tokens` | tokens every prompt starts with, as token strings of the tokenizer or as ids; `[]` for none; absent: the model's own default (`models/<name>/model.json`) |
//! | `max_tokens` | prompts are cut to this many tokens, prefix included; absent: nothing is cut, and a prompt longer than the model's `max_position_embeddings` is refused |
//! | `prompts` | the entries, at least one of them with `use` = `calibrate` |
//!
//! | field of an entry | meaning |
//! |---|---|
//! | `id` | name of the prompt and of its files: 1 to 100 of `A-Z a-z 0-9 . _ -`, not starting with `.` |
//! | `axis` | the kind of text, by which figures are reported; spelled like an id |
//! | `use` | `calibrate`: its rows reach states, covariances and holdout; `evaluate`: it is only ever measured |
//! | `text` | the text itself, or |
//! | `file` | a UTF-8 file, relative to the plan's folder and within it, or |
//! | `token_ids` | exact ids, each within the model's vocabulary (the prefix goes before them as well) |
//! | `bytes` | with `file`: `[start, end]`, the bytes from `start` up to but not including `end`, both on character boundaries |
//! | `lines` | with `file`: `[first, last]`, counted from 1, both included, with their line ends |
//! | `split` | with `text` or `file`: the entry is one document per piece between separators, `<id>.000`, `<id>.001`, ...; pieces are not trimmed |
//! | `max_tokens`, `prefix_tokens` | as above, for this entry instead of the plan's |
//!
//! Exactly one of `text`, `file` and `token_ids` is given. Texts are encoded without the tokenizer's own special tokens;
//! the prefix is put before the ids. Unknown keys, keys and ids that occur twice (also after splitting), prompts without a token beyond
//! the prefix, files that are missing or outside the plan's folder (also by symbolic link), ranges outside the file and
//! ids outside the vocabulary are refused, naming file, entry, field and what would be right.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Error, Result, refuse};
use crate::store::hash::{Hash, sha256_hex};
use crate::store::strict_json::{parse_json, read_file};

/// The version of the format this build reads.
pub const PLAN_VERSION: u64 = 1;

/// Longest id of a prompt, in characters.
pub const MAX_ID: usize = 100;

/// What a prompt is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PromptUse {
    /// Its rows calibrate the walk.
    Calibrate,
    /// It is measured and never enters state, rows, covariances or holdout.
    Evaluate,
}

/// A token by its string in the tokenizer or by its id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenRef {
    /// The token's string, for example `<sop>`.
    Name(String),
    /// The token's id; not yet checked against a vocabulary.
    Id(i64),
}

impl<'de> Deserialize<'de> for TokenRef {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Token;
        impl Visitor<'_> for Token {
            type Value = TokenRef;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a token string or a token id")
            }
            fn visit_str<E: de::Error>(self, name: &str) -> Result<TokenRef, E> {
                Ok(TokenRef::Name(name.to_owned()))
            }
            fn visit_i64<E: de::Error>(self, id: i64) -> Result<TokenRef, E> {
                Ok(TokenRef::Id(id))
            }
            fn visit_u64<E: de::Error>(self, id: u64) -> Result<TokenRef, E> {
                i64::try_from(id)
                    .map(TokenRef::Id)
                    .map_err(|_| E::custom(format!("token id {id} is too large")))
            }
        }
        deserializer.deserialize_any(Token)
    }
}

/// One entry of `prompts`, as written. See the module's page for the fields.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct PlanEntry {
    pub id: String,
    pub axis: String,
    #[serde(rename = "use")]
    pub usage: PromptUse,
    #[serde(default)]
    pub text: Option<String>,
    #[serde(default)]
    pub file: Option<String>,
    #[serde(default)]
    pub token_ids: Option<Vec<i64>>,
    #[serde(default)]
    pub bytes: Option<[u64; 2]>,
    #[serde(default)]
    pub lines: Option<[u64; 2]>,
    #[serde(default)]
    pub split: Option<String>,
    #[serde(default)]
    pub max_tokens: Option<usize>,
    #[serde(default)]
    pub prefix_tokens: Option<Vec<TokenRef>>,
}

/// The file as written. See the module's page for the fields.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct PlanFile {
    pub version: u64,
    #[serde(default)]
    pub prefix_tokens: Option<Vec<TokenRef>>,
    #[serde(default)]
    pub max_tokens: Option<usize>,
    pub prompts: Vec<PlanEntry>,
}

/// A plan that was read; its texts are not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Where it was read.
    pub path: PathBuf,
    /// SHA-256 of the file.
    pub sha256: Hash,
    /// What it says.
    pub file: PlanFile,
}

impl Plan {
    /// Reads `path` and checks everything that needs neither the texts nor a tokenizer.
    ///
    /// # Errors
    /// Names plan, entry and field, and line and column where the JSON itself is wrong.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::parse(path, &read_file(path)?)
    }

    /// Reads the `bytes` of a plan; `path` is named in refusals, and texts are looked for beside it.
    ///
    /// # Errors
    /// As [`Plan::load`].
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let file: PlanFile = parse_json(path, bytes).map_err(|error| name_entry(path, bytes, error))?;
        let plan = Self { path: path.to_path_buf(), sha256: sha256_hex(bytes), file };
        plan.check()?;
        Ok(plan)
    }

    /// The folder that `file` entries are relative to.
    pub fn folder(&self) -> &Path {
        match self.path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        }
    }

    fn check(&self) -> Result<()> {
        let place = |what: String, field: &str| refuse(what).file(&self.path).field(field);
        if self.file.version != PLAN_VERSION {
            return place(format!("version is {}", self.file.version), "version")
                .wanted(PLAN_VERSION.to_string())
                .err();
        }
        if self.file.prompts.is_empty() {
            return place("there are no prompts".into(), "prompts").wanted("at least one entry").err();
        }
        if self.file.max_tokens == Some(0) {
            return place("max_tokens is 0".into(), "max_tokens")
                .wanted("more than the prefix is long")
                .err();
        }
        for entry in &self.file.prompts {
            self.check_entry(entry)?;
        }
        if !self.file.prompts.iter().any(|entry| entry.usage == PromptUse::Calibrate) {
            return place("no entry has use \"calibrate\"".into(), "prompts")
                .wanted("at least one entry that calibrates the walk")
                .err();
        }
        Ok(())
    }

    fn check_entry(&self, entry: &PlanEntry) -> Result<()> {
        let place = |what: String, field: &str| refuse(what).file(&self.path).prompt(&entry.id).field(field);
        for (value, field) in [(&entry.id, "id"), (&entry.axis, "axis")] {
            if !is_usable_id(value) {
                return place(format!("{value:?} cannot name a prompt's files"), field)
                    .wanted(format!("1 to {MAX_ID} of A-Z a-z 0-9 . _ -, not starting with `.`"))
                    .err();
            }
        }
        let sources = [
            ("text", entry.text.is_some()),
            ("file", entry.file.is_some()),
            ("token_ids", entry.token_ids.is_some()),
        ];
        let given: Vec<&str> = sources.iter().filter(|(_, given)| *given).map(|(name, _)| *name).collect();
        if given.len() != 1 {
            let what = if given.is_empty() {
                "no tokens are given".into()
            } else {
                format!("{} are both given", given.join(" and "))
            };
            return place(what, given.get(1).copied().unwrap_or("text"))
                .wanted("exactly one of `text`, `file`, `token_ids`")
                .err();
        }
        let range = if entry.bytes.is_some() { "bytes" } else { "lines" };
        if entry.file.is_none() && (entry.bytes.is_some() || entry.lines.is_some()) {
            return place("a range is given, but no file".into(), range)
                .wanted("a range only beside `file`")
                .err();
        }
        if entry.bytes.is_some() && entry.lines.is_some() {
            return place("two ranges are given".into(), "lines")
                .wanted("`bytes` or `lines`, not both")
                .err();
        }
        match &entry.split {
            Some(split) if split.is_empty() => place("the separator is empty".into(), "split")
                .wanted("a separator such as \"\\n%%\\n\"")
                .err(),
            Some(_) if entry.token_ids.is_some() => place("token ids cannot be split".into(), "split")
                .wanted("`split` only beside `text` or `file`")
                .err(),
            _ => Ok(()),
        }
    }
}

/// Whether `id` can name a prompt and its files.
#[must_use]
pub fn is_usable_id(id: &str) -> bool {
    (1..=MAX_ID).contains(&id.len())
        && !id.starts_with('.')
        && id.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
}

/// Adds the entry to an error of the typed parse: the first entry that does not parse by itself is the culprit.
fn name_entry(path: &Path, bytes: &[u8], error: Error) -> Error {
    let entries = serde_json::from_slice::<Value>(bytes).ok().and_then(|mut plan| {
        match plan.get_mut("prompts")?.take() {
            Value::Array(entries) => Some(entries),
            _ => None,
        }
    });
    let culprit = entries.into_iter().flatten().enumerate().find_map(|(position, entry)| {
        let id = entry["id"].as_str().map_or_else(|| format!("number {position} of the plan"), str::to_owned);
        parse_json::<PlanEntry>(path, entry.to_string().as_bytes()).err().map(|_| id)
    });
    match (culprit, error) {
        (Some(id), Error::Refused(refusal)) => refusal.prompt(id).file(path).into(),
        (_, error) => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_that_name_files_everywhere() {
        for good in ["a", "prose.calibrate.000", "A-b_c.9", &"x".repeat(100)] {
            assert!(is_usable_id(good), "{good}");
        }
        for bad in ["", ".", "..", ".a", "a/b", "a b", "ä", "a\\b", "a\n", &"x".repeat(101)] {
            assert!(!is_usable_id(bad), "{bad}");
        }
    }

    #[test]
    fn the_example_of_the_page_is_a_plan() {
        let page: String = include_str!("plan.rs")
            .lines()
            .skip_while(|line| !line.contains("```json"))
            .skip(1)
            .take_while(|line| !line.contains("```"))
            .map(|line| line.trim_start_matches("//!"))
            .collect();
        let file: PlanFile = serde_json::from_str(&page).unwrap();
        assert_eq!(file.prompts.len(), 4);
        assert_eq!(file.prefix_tokens, Some(vec![TokenRef::Name("<|endoftext|>".into())]));
    }
}
