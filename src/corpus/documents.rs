//! From plan entries to documents: files read, ranges cut, entries split.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};

use super::plan::{MAX_ID, Plan, PlanEntry, PromptUse, TokenRef, is_usable_id};
use crate::error::{IoContext, Refusal, Result, refuse};
use crate::store::hash::{Hash, sha256_hex};

/// What a document consists of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// Text, still to be encoded.
    Text(String),
    /// Exact token ids; not yet checked against a vocabulary.
    Ids(Vec<i64>),
}

/// One prompt to be: an entry of the plan or a piece of a split one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// Id, unique in the plan.
    pub id: String,
    /// Kind of text.
    pub axis: String,
    /// What it is for.
    pub usage: PromptUse,
    /// Text or ids.
    pub content: Content,
    /// Most tokens, prefix included; the entry's, else the plan's.
    pub max_tokens: Option<usize>,
    /// Prefix; the entry's, else the plan's, else the model's default.
    pub prefix_tokens: Option<Vec<TokenRef>>,
}

impl Plan {
    /// Reads the texts and gives the documents in plan order, and the SHA-256 of every file read, by its path within
    /// the plan's folder.
    ///
    /// # Errors
    /// Names plan, entry and field.
    pub fn documents(&self) -> Result<(Vec<Document>, BTreeMap<String, Hash>)> {
        let mut documents = Vec::new();
        let mut files = BTreeMap::new();
        let mut seen = BTreeSet::new();
        for entry in &self.file.prompts {
            for (id, content) in self.pieces(entry, &mut files)? {
                if !is_usable_id(&id) {
                    return self
                        .at(entry, "id", format!("{id:?}, made by `split`, is too long"))
                        .wanted(format!("at most {MAX_ID} characters"))
                        .err();
                }
                if !seen.insert(id.clone()) {
                    return self
                        .at(entry, "id", format!("the id {id:?} occurs twice"))
                        .wanted("ids that are distinct, also after `split`")
                        .err();
                }
                documents.push(Document {
                    id,
                    axis: entry.axis.clone(),
                    usage: entry.usage,
                    content,
                    max_tokens: entry.max_tokens.or(self.file.max_tokens),
                    prefix_tokens: entry.prefix_tokens.clone().or_else(|| self.file.prefix_tokens.clone()),
                });
            }
        }
        Ok((documents, files))
    }

    /// A refusal placed at a field of an entry.
    fn at(&self, entry: &PlanEntry, field: &str, what: impl Into<String>) -> Refusal {
        refuse(what).file(&self.path).prompt(&entry.id).field(field)
    }

    fn pieces(
        &self,
        entry: &PlanEntry,
        files: &mut BTreeMap<String, Hash>,
    ) -> Result<Vec<(String, Content)>> {
        let text = match (&entry.text, &entry.file, &entry.token_ids) {
            (Some(text), ..) => text.clone(),
            (_, Some(file), _) => self.file_text(entry, file, files)?,
            (.., ids) => {
                let ids = ids.clone().unwrap_or_default();
                return Ok(vec![(entry.id.clone(), Content::Ids(ids))]);
            }
        };
        let Some(separator) = &entry.split else {
            return Ok(vec![(entry.id.clone(), Content::Text(text))]);
        };
        let piece =
            |(i, piece): (usize, &str)| (format!("{}.{i:03}", entry.id), Content::Text(piece.to_owned()));
        Ok(text.split(separator.as_str()).enumerate().map(piece).collect())
    }

    fn file_text(&self, entry: &PlanEntry, file: &str, files: &mut BTreeMap<String, Hash>) -> Result<String> {
        let relative = relative_within(file).ok_or_else(|| {
            self.at(entry, "file", format!("{file:?} is not within the plan's folder"))
                .wanted("a path relative to the plan's folder that does not leave it")
        })?;
        let folder = self.folder();
        let path = folder.join(&relative);
        let resolved = path.canonicalize().map_err(|error| {
            self.at(entry, "file", format!("{file:?} cannot be read: {error}"))
                .wanted(format!("an existing file relative to {}", folder.display()))
        })?;
        if !resolved.starts_with(folder.canonicalize().at(folder)?) {
            return self
                .at(entry, "file", format!("{file:?} is a symbolic link out of the plan's folder"))
                .wanted("a file within the plan's folder")
                .err();
        }
        if !resolved.is_file() {
            return self
                .at(entry, "file", format!("{file:?} is no regular file"))
                .wanted("a text file")
                .err();
        }
        let bytes = std::fs::read(&resolved).at(&path)?;
        files.insert(relative, sha256_hex(&bytes));
        let text = String::from_utf8(bytes).map_err(|error| {
            let at = error.utf8_error().valid_up_to();
            self.at(entry, "file", format!("{file:?} is not UTF-8 at byte {at}")).wanted("UTF-8 text")
        })?;
        match (entry.bytes, entry.lines) {
            (Some([start, end]), _) => self.byte_range(entry, &text, start, end),
            (_, Some([first, last])) => self.line_range(entry, &text, first, last),
            _ => Ok(text),
        }
    }

    fn byte_range(&self, entry: &PlanEntry, text: &str, start: u64, end: u64) -> Result<String> {
        let length = text.len() as u64;
        if start >= end || end > length {
            return self
                .at(entry, "bytes", format!("[{start}, {end}] is no range of a file of {length} bytes"))
                .wanted("start < end <= the file's length")
                .err();
        }
        for at in [start, end] {
            if !text.is_char_boundary(at as usize) {
                return self
                    .at(entry, "bytes", format!("byte {at} lies within a UTF-8 character"))
                    .wanted("a range on character boundaries")
                    .err();
            }
        }
        Ok(text[start as usize..end as usize].to_owned())
    }

    fn line_range(&self, entry: &PlanEntry, text: &str, first: u64, last: u64) -> Result<String> {
        let lines: Vec<&str> = text.split_inclusive('\n').collect();
        if first < 1 || first > last || last > lines.len() as u64 {
            return self
                .at(
                    entry,
                    "lines",
                    format!("[{first}, {last}] is no range of a file of {} lines", lines.len()),
                )
                .wanted("1 <= first <= last <= the number of lines")
                .err();
        }
        Ok(lines[first as usize - 1..last as usize].concat())
    }
}

/// `file` without `.` and inner `..`, slash separated, or `None` when it is absolute, empty or leads outside.
fn relative_within(file: &str) -> Option<String> {
    let mut parts: Vec<&str> = Vec::new();
    for component in Path::new(file).components() {
        match component {
            Component::Normal(part) => parts.push(part.to_str()?),
            Component::CurDir => {}
            Component::ParentDir => {
                parts.pop()?;
            }
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    (!parts.is_empty()).then(|| parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_within_the_folder() {
        assert_eq!(relative_within("a/./b/../c.txt").as_deref(), Some("a/c.txt"));
        for outside in ["/etc/passwd", "../x", "a/../../x", "", ".", "a/.."] {
            assert_eq!(relative_within(outside), None, "{outside}");
        }
    }
}
