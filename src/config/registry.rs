//! `--model`: from a name or a directory to the files a walk needs.
//!
//! A registered model is a folder `models/<name>` with `config.json`, usually `recipe.json` and `model.json` (description, prefix
//! tokens, hub ids), and weights where they are small. Registries are looked for in `$WALK_MODELS`, `./models`, `models` beside
//! the executable and its parent folders, and the folder this program was built in; the first that knows the name is
//! taken. Anything else that `--model` names has to be a directory with `config.json`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::geometry::Geometry;
use super::hub::{WANTED_FILES, fetch_checkpoint};
use crate::error::{Result, refuse};
use crate::store::strict_json::read_json;

/// `model.json` as written.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelCard {
    /// One line for people.
    #[serde(default)]
    pub description: String,
    /// Token strings every prompt starts with unless the plan says otherwise; `[]` for none, absent if not known.
    #[serde(default)]
    pub prefix_tokens: Option<Vec<String>>,
    /// Where weights are published.
    #[serde(default)]
    pub hub: Option<HubIds>,
}

/// Hub ids (`owner/name`) of a model's checkpoints.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HubIds {
    /// The BF16 source.
    #[serde(default)]
    pub source: Option<String>,
    /// The carrier.
    #[serde(default)]
    pub carrier: Option<String>,
}

/// A model that was found; nothing of its weights was touched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    /// Registry name, or the last part of the directory's path.
    pub name: String,
    /// Its folder.
    pub folder: PathBuf,
    /// What its `model.json` says.
    pub card: ModelCard,
}

/// A model with its checkpoints in place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedModel {
    /// Registry name, or the last part of the directory's path.
    pub name: String,
    /// The model's `config.json`.
    pub config_path: PathBuf,
    /// The model's `recipe.json`, if it brings one.
    pub recipe_path: Option<PathBuf>,
    /// The carrier's `tokenizer.json`.
    pub tokenizer_path: PathBuf,
    /// Where routed experts come from.
    pub source_dir: PathBuf,
    /// Where everything else comes from.
    pub carrier_dir: PathBuf,
    /// Default prefix of prompts; `None`: the plan has to say.
    pub prefix_tokens: Option<Vec<String>>,
}

impl Model {
    /// Finds a registered model or a directory that holds `config.json`.
    ///
    /// # Errors
    /// Lists the registered names when there is neither.
    pub fn find(name_or_dir: &str) -> Result<Self> {
        Self::find_in(name_or_dir, &registry_folders())
    }

    /// As [`Model::find`], in these registries.
    ///
    /// # Errors
    /// As [`Model::find`].
    pub fn find_in(name_or_dir: &str, registries: &[PathBuf]) -> Result<Self> {
        let known = known_models(registries);
        if let Some(folder) = known.get(name_or_dir) {
            return Self::open(name_or_dir.to_owned(), folder.clone());
        }
        let folder = PathBuf::from(name_or_dir);
        let names: Vec<&str> = known.keys().map(String::as_str).collect();
        let wanted = format!("one of {}, or a directory that holds config.json", names.join(", "));
        if !folder.is_dir() {
            return refuse(format!("there is no model {name_or_dir:?}"))
                .field("--model")
                .wanted(wanted)
                .err();
        }
        if !folder.join("config.json").is_file() {
            return refuse("the directory holds no config.json")
                .file(folder)
                .field("--model")
                .wanted(wanted)
                .err();
        }
        let absolute = folder.canonicalize().unwrap_or_else(|_| folder.clone());
        let name = absolute.file_name().map_or("model".into(), |name| name.to_string_lossy().into_owned());
        Self::open(name, folder)
    }

    fn open(name: String, folder: PathBuf) -> Result<Self> {
        let card = folder.join("model.json");
        let card = if card.is_file() { read_json(&card)? } else { ModelCard::default() };
        Ok(Self { name, folder, card })
    }

    /// The model's `config.json`.
    pub fn config_path(&self) -> PathBuf {
        self.folder.join("config.json")
    }

    /// The model's `recipe.json`, if it brings one.
    pub fn recipe_path(&self) -> Option<PathBuf> {
        Some(self.folder.join("recipe.json")).filter(|path| path.is_file())
    }

    /// Whether the folder holds weights itself.
    pub fn has_weights(&self) -> bool {
        ["model.safetensors.index.json", "model.safetensors"]
            .iter()
            .any(|file| self.folder.join(file).is_file())
    }

    /// Finds the model and puts its checkpoints in place; `source` and `carrier` override where they are. Weights that
    /// are only on the hub are fetched. Their configs have to give the model's geometry.
    ///
    /// # Errors
    /// Names the model or directory, the files wanted and how to pass local ones; or file and field of a config that
    /// contradicts the model's.
    pub fn resolve(
        name_or_dir: &str,
        source: Option<&Path>,
        carrier: Option<&Path>,
    ) -> Result<ResolvedModel> {
        Self::find(name_or_dir)?.with_weights(source, carrier)
    }

    /// Puts the checkpoints in place, as [`Model::resolve`].
    ///
    /// # Errors
    /// As [`Model::resolve`].
    pub fn with_weights(&self, source: Option<&Path>, carrier: Option<&Path>) -> Result<ResolvedModel> {
        // Everything that can be said without the network comes first: a source may be a terabyte.
        let hub = self.card.hub.clone().unwrap_or_default();
        let source = self.place("source", source, hub.source.as_deref())?;
        let carrier = self.place("carrier", carrier, hub.carrier.as_deref())?;
        if let Place::Local(dir) = &carrier {
            require_tokenizer(dir)?;
        }
        for place in [&source, &carrier] {
            if let Place::Local(dir) = place {
                self.check_config(dir)?;
            }
        }
        let carrier_dir = carrier.get()?;
        let source_dir = if source == carrier { carrier_dir.clone() } else { source.get()? };
        for (place, dir) in [(&source, &source_dir), (&carrier, &carrier_dir)] {
            if let Place::Hub(_) = place {
                self.check_config(dir)?;
            }
        }
        Ok(ResolvedModel {
            name: self.name.clone(),
            config_path: self.config_path(),
            recipe_path: self.recipe_path(),
            tokenizer_path: require_tokenizer(&carrier_dir)?,
            source_dir,
            carrier_dir,
            prefix_tokens: self.card.prefix_tokens.clone(),
        })
    }

    /// Refuses a checkpoint whose config contradicts the model's.
    fn check_config(&self, dir: &Path) -> Result<()> {
        if dir == self.folder {
            return Ok(());
        }
        let own = self.config_path();
        Geometry::read(&own)?.agrees_with(&own, dir)
    }

    /// Where its BF16 weights are: its folder, or what is fetched from the hub.
    ///
    /// # Errors
    /// As [`Model::resolve`].
    pub fn source_dir(&self) -> Result<PathBuf> {
        self.place("source", None, self.card.hub.as_ref().and_then(|hub| hub.source.as_deref()))?.get()
    }

    fn place(&self, role: &str, given: Option<&Path>, hub: Option<&str>) -> Result<Place> {
        if let Some(dir) = given {
            if !dir.is_dir() {
                return refuse("no such directory")
                    .file(dir)
                    .field(format!("--{role}"))
                    .wanted(format!("a directory with {WANTED_FILES}"))
                    .err();
            }
            return Ok(Place::Local(dir.to_path_buf()));
        }
        if self.has_weights() {
            return Ok(Place::Local(self.folder.clone()));
        }
        if let Some(repo) = hub {
            return Ok(Place::Hub(repo.to_owned()));
        }
        let other = match self.card.hub.as_ref().and_then(|ids| ids.source.as_ref()) {
            Some(repo) if role == "carrier" => {
                format!(
                    " (the source is {repo} on the hub, or --source DIR; the carrier is published separately)"
                )
            }
            _ => String::new(),
        };
        refuse(format!("model {} has no weights in its folder, and no hub id for its {role}", self.name))
            .file(&self.folder)
            .field(format!("--{role}"))
            .wanted(format!("--{role} DIR, a directory with {WANTED_FILES}{other}"))
            .err()
    }
}

/// Where a checkpoint is.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    Local(PathBuf),
    Hub(String),
}

impl Place {
    fn get(&self) -> Result<PathBuf> {
        match self {
            Self::Local(dir) => Ok(dir.clone()),
            Self::Hub(repo) => fetch_checkpoint(repo),
        }
    }
}

fn require_tokenizer(carrier: &Path) -> Result<PathBuf> {
    let path = carrier.join("tokenizer.json");
    if path.is_file() {
        return Ok(path);
    }
    refuse("the carrier has no tokenizer.json")
        .file(path)
        .wanted(format!("a directory with {WANTED_FILES}"))
        .err()
}

/// The registries, in the order they are asked.
#[must_use]
pub fn registry_folders() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    folders.extend(std::env::var_os("WALK_MODELS").filter(|value| !value.is_empty()).map(PathBuf::from));
    folders.push(PathBuf::from("models"));
    if let Ok(executable) = std::env::current_exe() {
        folders.extend(executable.ancestors().skip(1).map(|folder| folder.join("models")));
    }
    folders.push(Path::new(env!("CARGO_MANIFEST_DIR")).join("models"));
    folders
}

/// The registered names, sorted.
#[must_use]
pub fn known_names() -> BTreeSet<String> {
    known_models(&registry_folders()).into_keys().collect()
}

/// Every registered model with its folder; the first registry that knows a name has it.
fn known_models(registries: &[PathBuf]) -> BTreeMap<String, PathBuf> {
    let mut known = BTreeMap::new();
    for registry in registries {
        for entry in std::fs::read_dir(registry).into_iter().flatten().flatten() {
            let folder = entry.path();
            if folder.join("config.json").is_file() {
                known.entry(entry.file_name().to_string_lossy().into_owned()).or_insert(folder);
            }
        }
    }
    known
}
