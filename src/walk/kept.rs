//! Finished units of an unfinished stage: a result, the job it is the result of, and a hash over it.
//!
//! A unit is adopted when it is the result of the same job and its content is what its hash says; otherwise it is computed
//! again. Its file disappears once the stage it belongs to is sealed.

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::store::atomic::{remove_tree_durably, write_json_atomic};
use crate::store::canonical_json::canonical_hash;
use crate::store::hash::Hash;
use crate::store::strict_json::read_json;

/// The folder of the units that an artifact is made from, relative like its path: the path without its extension.
pub fn units_folder(artifact: &Path) -> PathBuf {
    artifact.with_extension("")
}

/// Removes the units of an artifact that is sealed. What is gone already is no error: a walk may have been stopped here.
///
/// # Errors
/// Names the folder.
pub fn drop_units(work: &Path, artifact: &Path) -> Result<()> {
    remove_tree_durably(work.join(units_folder(artifact)))
}

/// The file of a unit.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept<T> {
    job_sha256: Hash,
    /// SHA-256 of the canonical `content`.
    content_sha256: Hash,
    content: T,
}

/// The kept result of `job`, if there is one as it was kept.
///
/// # Errors
/// Names the file that is no unit at all.
pub fn adopt<T: Serialize + DeserializeOwned>(path: &Path, job: &Hash) -> Result<Option<T>> {
    if !path.exists() {
        return Ok(None);
    }
    let kept: Kept<T> = read_json(path)?;
    let whole = kept.content_sha256 == canonical_hash(&kept.content)?;
    Ok((whole && kept.job_sha256 == *job).then_some(kept.content))
}

/// Keeps the result of `job` in an existing folder.
///
/// # Errors
/// Names the path.
pub fn keep(path: &Path, job: &Hash, content: &impl Serialize) -> Result<()> {
    let content_sha256 = canonical_hash(content)?;
    write_json_atomic(path, &Kept { job_sha256: job.clone(), content_sha256, content })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_is_adopted_only_as_it_was_kept_and_for_its_job() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("unit.json");
        let job = "job".to_owned();
        assert_eq!(adopt::<Vec<u32>>(&path, &job).unwrap(), None);
        keep(&path, &job, &[1, 2]).unwrap();
        assert_eq!(adopt::<Vec<u32>>(&path, &job).unwrap(), Some(vec![1, 2]));
        assert_eq!(adopt::<Vec<u32>>(&path, &"other".to_owned()).unwrap(), None);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace("[1,2]", "[1,3]")).unwrap();
        assert_eq!(adopt::<Vec<u32>>(&path, &job).unwrap(), None);
        std::fs::write(&path, "[").unwrap();
        assert!(adopt::<Vec<u32>>(&path, &job).unwrap_err().to_string().contains("unit.json"));
    }
}
