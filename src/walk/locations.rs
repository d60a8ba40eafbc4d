//! `LOCATIONS.json`: where a walk's checkpoints lay when it last ran, and whether its states are to be kept.
//!
//! Not sealed and no part of the walk's identity: a checkpoint may be moved. It spares `walk replay` and `walk audit` of a
//! work directory the paths, and what they find there is held against the sealed inventories.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::config::ResolvedModel;
use crate::error::{IoContext, Result, refuse};
use crate::store::atomic::write_json_atomic;
use crate::store::strict_json::read_json;

/// File name within the work directory.
pub const LOCATIONS_FILE: &str = "LOCATIONS.json";

/// Absolute paths.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Locations {
    /// Name of the model.
    pub model: String,
    /// Source of the experts.
    pub source: PathBuf,
    /// Everything else.
    pub carrier: PathBuf,
    /// Whether any run was asked to keep the states before finished layers: a later one that is not asked must not throw
    /// them away.
    pub keep_states: bool,
}

impl Locations {
    /// Where a resolved model lies.
    ///
    /// # Errors
    /// Names the path that cannot be resolved.
    pub fn of(model: &ResolvedModel, keep_states: bool) -> Result<Self> {
        let absolute = |path: &Path| path.canonicalize().at(path);
        Ok(Self {
            model: model.name.clone(),
            source: absolute(&model.source_dir)?,
            carrier: absolute(&model.carrier_dir)?,
            keep_states,
        })
    }

    /// Publishes the file unless it says the same already. Paths that are no Unicode cannot be kept, and are not.
    ///
    /// # Errors
    /// Names the file.
    pub fn write(&self, work: &Path) -> Result<()> {
        let unicode = [&self.source, &self.carrier].iter().all(|path| path.to_str().is_some());
        let path = work.join(LOCATIONS_FILE);
        if unicode && !read_json::<Self>(&path).is_ok_and(|known| known == *self) {
            write_json_atomic(&path, self)?;
        }
        Ok(())
    }

    /// Reads the file of a work directory.
    ///
    /// # Errors
    /// Names the file, and the options that stand in for it.
    pub fn read(work: &Path) -> Result<Self> {
        let path = work.join(LOCATIONS_FILE);
        if !path.exists() {
            return refuse("nothing says where the walk's checkpoints lie")
                .file(path)
                .wanted("--source and --carrier with the directories where they lie now")
                .err();
        }
        read_json(&path)
    }
}
