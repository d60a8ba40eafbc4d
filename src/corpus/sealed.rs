//! `CORPUS_PLAN.json`: the exact tokens of a walk, sealed before the first of them is used.
//!
//! It holds every prompt in plan order with its token ids, and for calibration prompts the global id of their first
//! row: row ids count tokens (prefix included) over the calibration prompts in plan order, so that evaluation prompts
//! added or removed change no row id. The complete prompt domain is listed beside it; later stages are complete when,
//! and only when, they cover it. Paths are relative to the plan's folder: the same corpus gives the same bytes anywhere.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::documents::{Content, Document};
use super::encoder::TextEncoder;
use super::plan::{Plan, PromptUse, TokenRef, is_usable_id};
use crate::error::{Refusal, Result, refuse};
use crate::store::atomic::write_json_atomic;
use crate::store::canonical_json::{canonical, canonical_hash};
use crate::store::hash::{Hash, is_hash, sha256_hex};
use crate::store::strict_json::{parse_json, read_file};

/// Value of the `schema` field.
pub const SCHEMA: &str = "walk-corpus-plan-v1";

/// One prompt, sealed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SealedPrompt {
    /// Id, unique, usable as a file name.
    pub id: String,
    /// Kind of text.
    pub axis: String,
    /// What it is for.
    #[serde(rename = "use")]
    pub usage: PromptUse,
    /// How many of the ids are the prefix.
    pub prefix_length: usize,
    /// Global row id of the first token; `None` for evaluation prompts.
    pub row_offset: Option<u64>,
    /// Tokens that `max_tokens` cut off the end.
    pub cut_tokens: usize,
    /// Exact ids, prefix included.
    pub token_ids: Vec<u32>,
    /// SHA-256 of the ids as little-endian 32-bit integers.
    pub token_ids_sha256: Hash,
}

/// The prompts that every complete stage covers, in plan order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PromptDomain {
    /// Ids of the calibration prompts.
    pub calibrate: Vec<String>,
    /// Ids of the evaluation prompts.
    pub evaluate: Vec<String>,
}

/// The sealed corpus.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CorpusPlan {
    /// Always [`SCHEMA`].
    pub schema: String,
    /// SHA-256 of `plan.json`.
    pub plan_sha256: Hash,
    /// SHA-256 of `tokenizer.json`.
    pub tokenizer_sha256: Hash,
    /// SHA-256 of the files the plan names, by path within its folder.
    pub files_sha256: BTreeMap<String, Hash>,
    /// Ids are below this.
    pub vocab_size: usize,
    /// No prompt is longer than this.
    pub max_position_embeddings: usize,
    /// Tokens of all calibration prompts, prefixes included.
    pub calibration_rows: u64,
    /// The complete expected prompt domain.
    pub domain: PromptDomain,
    /// The prompts in plan order.
    pub prompts: Vec<SealedPrompt>,
}

/// What sealing needs of the model.
#[derive(Debug, Clone, Copy)]
pub struct SealContext<'a> {
    /// The carrier's tokenizer.
    pub encoder: &'a TextEncoder,
    /// `vocab_size` of the model.
    pub vocab_size: usize,
    /// `max_position_embeddings` of the model.
    pub max_position_embeddings: usize,
    /// The model's own prefix, used where the plan names none; `None` when the model states none either.
    pub default_prefix: Option<&'a [String]>,
}

/// Tokenises a plan.
///
/// # Errors
/// Names plan, entry and field of what is wrong; see [`super::plan`].
pub fn seal(plan: &Plan, context: &SealContext<'_>) -> Result<CorpusPlan> {
    let (documents, files_sha256) = plan.documents()?;
    let mut prompts = Vec::with_capacity(documents.len());
    let mut calibration_rows = 0;
    for document in &documents {
        let mut prompt = seal_document(plan, document, context)?;
        if prompt.usage == PromptUse::Calibrate {
            prompt.row_offset = Some(calibration_rows);
            calibration_rows += prompt.token_ids.len() as u64;
        }
        prompts.push(prompt);
    }
    let sealed = CorpusPlan {
        schema: SCHEMA.to_owned(),
        plan_sha256: plan.sha256.clone(),
        tokenizer_sha256: context.encoder.sha256().to_owned(),
        files_sha256,
        vocab_size: context.vocab_size,
        max_position_embeddings: context.max_position_embeddings,
        calibration_rows,
        domain: domain_of(&prompts),
        prompts,
    };
    sealed.validate().map_err(|refusal| *refusal)?;
    Ok(sealed)
}

fn seal_document(plan: &Plan, document: &Document, context: &SealContext<'_>) -> Result<SealedPrompt> {
    let place = |what: String, field: &str| refuse(what).file(&plan.path).prompt(&document.id).field(field);
    let vocabulary = format!("ids from 0 to {}", context.vocab_size.saturating_sub(1));
    let checked = |id: i64, field: &str| -> Result<u32> {
        match u32::try_from(id) {
            Ok(good) if (good as usize) < context.vocab_size => Ok(good),
            _ => place(format!("token id {id} is outside the vocabulary"), field).wanted(&vocabulary).err(),
        }
    };

    let prefix = match (&document.prefix_tokens, context.default_prefix) {
        (Some(prefix), _) => prefix.clone(),
        (None, Some(default)) => default.iter().cloned().map(TokenRef::Name).collect(),
        (None, None) => {
            return place(
                "neither the plan nor the model says what prompts start with".into(),
                "prefix_tokens",
            )
            .wanted("`prefix_tokens` in the plan: token strings or ids, or [] for none")
            .err();
        }
    };
    let mut token_ids = Vec::new();
    for token in &prefix {
        let id = match token {
            TokenRef::Id(id) => *id,
            TokenRef::Name(name) => context.encoder.token_id(name).map(i64::from).ok_or_else(|| {
                place(format!("the tokenizer has no token {name:?}"), "prefix_tokens")
                    .wanted(format!("token strings of {}", context.encoder.path().display()))
            })?,
        };
        token_ids.push(checked(id, "prefix_tokens")?);
    }
    let prefix_length = token_ids.len();

    if let Some(max) = document.max_tokens {
        if max <= prefix_length {
            return place(
                format!("max_tokens {max} leaves no token beyond the prefix of {prefix_length}"),
                "max_tokens",
            )
            .wanted(format!("at least {}", prefix_length + 1))
            .err();
        }
        if max > context.max_position_embeddings {
            return place(format!("max_tokens {max} is more than the model's positions"), "max_tokens")
                .wanted(format!("at most max_position_embeddings, {}", context.max_position_embeddings))
                .err();
        }
    }

    let field = match &document.content {
        Content::Text(text) => {
            let encoded = context.encoder.encode(text).map_err(|error| place(error.to_string(), "text"))?;
            for id in encoded {
                token_ids.push(checked(i64::from(id), "text")?);
            }
            "text"
        }
        Content::Ids(ids) => {
            for &id in ids {
                token_ids.push(checked(id, "token_ids")?);
            }
            "token_ids"
        }
    };
    if token_ids.len() == prefix_length {
        return place("the prompt is empty: no token beyond the prefix".into(), field)
            .wanted("at least one token of content")
            .err();
    }
    let whole = token_ids.len();
    token_ids.truncate(document.max_tokens.unwrap_or(whole));
    if token_ids.len() > context.max_position_embeddings {
        return place(format!("the prompt has {whole} tokens"), "max_tokens")
            .wanted(format!(
                "max_tokens of at most max_position_embeddings, {}",
                context.max_position_embeddings
            ))
            .err();
    }
    Ok(SealedPrompt {
        id: document.id.clone(),
        axis: document.axis.clone(),
        usage: document.usage,
        prefix_length,
        row_offset: None,
        cut_tokens: whole - token_ids.len(),
        token_ids_sha256: ids_sha256(&token_ids),
        token_ids,
    })
}

fn ids_sha256(ids: &[u32]) -> Hash {
    sha256_hex(&ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>())
}

fn domain_of(prompts: &[SealedPrompt]) -> PromptDomain {
    let ids = |usage| prompts.iter().filter(|p| p.usage == usage).map(|p| p.id.clone()).collect();
    PromptDomain { calibrate: ids(PromptUse::Calibrate), evaluate: ids(PromptUse::Evaluate) }
}

impl CorpusPlan {
    /// The calibration prompts in plan order.
    pub fn calibrate(&self) -> impl Iterator<Item = &SealedPrompt> {
        self.prompts.iter().filter(|prompt| prompt.usage == PromptUse::Calibrate)
    }

    /// The evaluation prompts in plan order.
    pub fn evaluate(&self) -> impl Iterator<Item = &SealedPrompt> {
        self.prompts.iter().filter(|prompt| prompt.usage == PromptUse::Evaluate)
    }

    /// SHA-256 of the canonical JSON.
    ///
    /// # Errors
    /// None in practice; see [`canonical`].
    pub fn hash(&self) -> Result<Hash> {
        canonical_hash(self)
    }

    /// Publishes it as `path` and returns the SHA-256 of the file.
    ///
    /// # Errors
    /// Names the path.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<Hash> {
        write_json_atomic(path, self)
    }

    /// Reads a sealed plan back and checks that it is whole, consistent and canonical to the byte.
    ///
    /// # Errors
    /// Names the file, and prompt and field where they are known.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::parse(path, &read_file(path)?)
    }

    /// Reads the `bytes` of a sealed plan; `path` is only named in refusals.
    ///
    /// # Errors
    /// As [`CorpusPlan::load`].
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let sealed: Self = parse_json(path, bytes)?;
        sealed.validate().map_err(|refusal| refusal.file(path))?;
        let mut expected = canonical(&sealed)?;
        expected.push(b'\n');
        if bytes != expected {
            return refuse("the file is not in canonical form; it was changed after it was sealed")
                .file(path)
                .wanted("the file as the walk wrote it")
                .err();
        }
        Ok(sealed)
    }

    /// Checks every invariant of the module's page.
    fn validate(&self) -> Result<(), Box<Refusal>> {
        let wrong = |what: String, field: &str| Err(Box::new(refuse(what).field(field)));
        if self.schema != SCHEMA {
            return Err(Box::new(
                refuse(format!("schema is {:?}", self.schema)).field("schema").wanted(SCHEMA),
            ));
        }
        let hashes = [&self.plan_sha256, &self.tokenizer_sha256];
        if let Some(bad) = hashes.into_iter().chain(self.files_sha256.values()).find(|hash| !is_hash(hash)) {
            return wrong(format!("{bad:?} is no SHA-256"), "sha256");
        }
        let mut seen = BTreeSet::new();
        let mut rows = 0;
        for prompt in &self.prompts {
            let wrong =
                |what: String, field: &str| Err(Box::new(refuse(what).prompt(&prompt.id).field(field)));
            if !is_usable_id(&prompt.id) || !seen.insert(&prompt.id) {
                return wrong("the id is unusable or occurs twice".into(), "id");
            }
            if prompt.token_ids.len() <= prompt.prefix_length {
                return wrong("no token beyond the prefix".into(), "token_ids");
            }
            if prompt.token_ids.len() > self.max_position_embeddings {
                return wrong("longer than max_position_embeddings".into(), "token_ids");
            }
            if let Some(id) = prompt.token_ids.iter().find(|&&id| id as usize >= self.vocab_size) {
                return wrong(format!("token id {id} is outside the vocabulary"), "token_ids");
            }
            if prompt.token_ids_sha256 != ids_sha256(&prompt.token_ids) {
                return wrong("the hash is not that of the token ids".into(), "token_ids_sha256");
            }
            let expected = (prompt.usage == PromptUse::Calibrate).then_some(rows);
            if prompt.row_offset != expected {
                let show =
                    |offset: Option<u64>| offset.map_or("null".to_owned(), |offset| offset.to_string());
                return wrong(
                    format!("row offset is {}, not {}", show(prompt.row_offset), show(expected)),
                    "row_offset",
                );
            }
            if expected.is_some() {
                rows += prompt.token_ids.len() as u64;
            }
        }
        if rows != self.calibration_rows {
            return wrong(
                format!("says {}, but the prompts have {rows}", self.calibration_rows),
                "calibration_rows",
            );
        }
        if self.domain != domain_of(&self.prompts) {
            return wrong("the domain is not that of the prompts".into(), "domain");
        }
        if self.domain.calibrate.is_empty() {
            return wrong("no prompt calibrates the walk".into(), "domain");
        }
        Ok(())
    }
}
