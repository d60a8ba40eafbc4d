//! Fetching a checkpoint from a model hub into the hub cache, for models that bring no weights.
//!
//! The client honours `HF_ENDPOINT`, `HF_HOME` and the token (`HF_TOKEN`, or the one stored in the cache). The first request has a
//! time limit, so that a machine without network hears so within seconds; what the cache already holds needs none.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

use hf_hub::api::sync::{ApiBuilder, ApiError};

use crate::error::{Result, refuse};
use crate::store::index::{INDEX_FILE, ShardIndex};

/// The files a checkpoint consists of, in words.
pub const WANTED_FILES: &str = "config.json, tokenizer.json, model.safetensors.index.json and its shards";

/// How long the first answer of the hub may take.
const FIRST_ANSWER: Duration = Duration::from_secs(15);

/// Times a broken download is taken up again.
const RETRIES: usize = 5;

/// Files fetched where the repository has them; some only so that their presence is seen.
const OPTIONAL: [&str; 8] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "quantization_config.json",
    "quantize_config.json",
    "hf_quant_config.json",
];

/// Fetches the checkpoint `repo` (`owner/name`) as far as the cache lacks it, and gives its directory.
///
/// # Errors
/// Names the files wanted, the repository, what the network said, and how to pass a local directory.
pub fn fetch_checkpoint(repo: &str) -> Result<PathBuf> {
    fetch(repo).map_err(|said| {
        refuse(format!("fetching {WANTED_FILES} of {repo} failed: {said}"))
            .field("--source and --carrier")
            .wanted(format!(
                "a reachable hub, or the files in local directories passed with `--source DIR --carrier DIR` \
                 ({WANTED_FILES} in each)"
            ))
            .into()
    })
}

fn fetch(repo: &str) -> Result<PathBuf, String> {
    if std::env::var_os("HF_HOME").is_none() && std::env::home_dir().is_none() {
        return Err("there is no home directory for the hub cache; set HF_HOME".to_owned());
    }
    let config = first_answer(repo)?;
    let snapshot = config.parent().ok_or("the cache gave a path without folder")?.to_path_buf();
    let get = |file: &str| -> Result<Option<()>, String> {
        match client(true, RETRIES).map(|api| api.model(repo.to_owned()).get(file)) {
            Ok(Ok(path)) if path.parent() == Some(&snapshot) => Ok(Some(())),
            Ok(Ok(_)) => Err("the repository changed while it was fetched; start again".to_owned()),
            Ok(Err(error)) if is_absent(&error) => Ok(None),
            Ok(Err(error)) | Err(error) => Err(format!("{file}: {error}")),
        }
    };
    for file in OPTIONAL {
        get(file)?;
    }
    if get(INDEX_FILE)?.is_none() {
        return match get("model.safetensors")? {
            Some(()) => Ok(snapshot),
            None => Err("it has neither model.safetensors.index.json nor model.safetensors".to_owned()),
        };
    }
    let index = ShardIndex::read(snapshot.join(INDEX_FILE)).map_err(|error| error.to_string())?;
    for shard in index.weight_map.values().collect::<BTreeSet<_>>() {
        get(shard)?.ok_or_else(|| format!("the index names {shard}, which is not there"))?;
    }
    Ok(snapshot)
}

/// Gets config.json within [`FIRST_ANSWER`]. The request runs in a thread of its own, because the client has no time
/// limit that covers name resolution.
fn first_answer(repo: &str) -> Result<PathBuf, String> {
    let (sender, receiver) = mpsc::channel();
    let model = repo.to_owned();
    std::thread::spawn(move || {
        let answer = client(false, 0).and_then(|api| api.model(model).get("config.json"));
        // Nobody listens any more once the time is up.
        let _ = sender.send(answer.map_err(|error| format!("config.json: {error}")));
    });
    match receiver.recv_timeout(FIRST_ANSWER) {
        Ok(answer) => answer,
        Err(mpsc::RecvTimeoutError::Timeout) => {
            Err(format!("the hub did not answer within {} seconds", FIRST_ANSWER.as_secs()))
        }
        Err(mpsc::RecvTimeoutError::Disconnected) => Err("the hub client gave up".to_owned()),
    }
}

fn client(progress: bool, retries: usize) -> Result<hf_hub::api::sync::Api, ApiError> {
    let mut builder = ApiBuilder::from_env().with_progress(progress).with_retries(retries);
    if let Some(token) = std::env::var("HF_TOKEN").ok().filter(|token| !token.is_empty()) {
        builder = builder.with_token(Some(token));
    }
    builder.build()
}

/// Whether the hub answered that there is no such file; the client gives its status only as text.
fn is_absent(error: &ApiError) -> bool {
    error.to_string().contains("status: 404")
}
