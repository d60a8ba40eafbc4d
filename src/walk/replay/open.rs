//! Opening a replay: what is asked for, and everything that enters it held against its seal.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use tempfile::TempDir;

use super::carrier::SealedCarrier;
use super::report::{EnvironmentDifference, NotReplayed, Reason};
use super::{Replay, ReplayOptions, output};
use crate::checkpoint::Reconstruction;
use crate::checkpoint::finished::finished_path;
use crate::checkpoint::inventory::{InventoryFile, Role};
use crate::codec::trellis::search::best_search;
use crate::config::choices::CodecName;
use crate::config::{Geometry, Recipe};
use crate::corpus::CorpusPlan;
use crate::error::{IoContext, Result, refuse};
use crate::store::canonical_json::canonical_hash;
use crate::store::hash::Hash;
use crate::store::lock::WorkLock;
use crate::walk::driver::CORPUS_FILE;
use crate::walk::journal::{JOURNAL_FILE, JournalRecord, key};
use crate::walk::locations::Locations;
use crate::walk::numeric::NumericEnvironment;
use crate::walk::open::{CONFIG_FILE, RECIPE_FILE, inventory_file};
use crate::walk::progress::{Observer, advance};
use crate::walk::sealed_files::{faults_of, has_state, refuse_foreign};
use crate::walk::state::{manifest_path, prompt_path, stage_of};

/// Sealed hashes by path relative to the work directory.
type Sealed = BTreeMap<String, Hash>;

/// Prompt ids that a refusal of an unknown one lists.
const LISTED: usize = 5;

impl Replay {
    /// Opens a work directory, and holds everything that the replay will read against its seal.
    ///
    /// # Errors
    /// A work directory without a walk or with a walk at work; a file that is gone or is not the sealed one (names it);
    /// a layer or prompt that cannot be replayed, with what would help.
    pub fn open(work: &Path, options: &ReplayOptions, observer: &dyn Observer) -> Result<Self> {
        let opened = Instant::now();
        if work.exists() {
            refuse_foreign(work)?;
        }
        let Some(mut record) = JournalRecord::read_if_begun(work)? else {
            return refuse("there is no walk here")
                .file(work.join(JOURNAL_FILE))
                .field("--work")
                .wanted("the work directory of a walk")
                .err();
        };
        let lock = WorkLock::share(work)?;
        if lock.is_some() {
            // A walk may have gone on between the first look and the lock.
            record = JournalRecord::read(work)?;
        }
        let (corpus_path, config_path) = (Path::new(CORPUS_FILE), Path::new(CONFIG_FILE));
        let (recipe_path, inventory_path) =
            (Path::new(RECIPE_FILE), Path::new(inventory_file(Role::Carrier)));
        let mut sealed = Sealed::new();
        for (stage, path) in [
            ("corpus-plan", corpus_path),
            ("inputs", config_path),
            ("inputs", recipe_path),
            ("inputs", inventory_path),
        ] {
            sealed.insert(key(path), output(work, &record, stage, path)?);
        }
        refuse_faults(work, &sealed, &|_| Ok(()))?;
        let corpus = CorpusPlan::load(work.join(corpus_path))?;
        check_prompt(work, &corpus, options.prompt.as_deref())?;

        let carrier_dir = carrier_dir(work, options)?;
        let geometry = Geometry::read(&work.join(config_path))?;
        let codec = Recipe::load(work.join(recipe_path))?.codec;
        let kept: BTreeSet<usize> =
            (0..geometry.num_hidden_layers).filter(|&layer| has_state(work, layer)).collect();
        let states = match options.layer {
            Some(layer) => vec![one_layer(work, &record, &geometry, &kept, layer)?],
            None => whole_run(work, &record, &geometry)?,
        };
        let unreachable = if options.layer.is_some() { Vec::new() } else { unreachable(&record, &geometry) };
        let inventory = InventoryFile::read_as(work.join(inventory_path), Role::Carrier)?.inventory;
        let carrier = SealedCarrier { checkpoint: Reconstruction::open(&carrier_dir)?, inventory };

        let mut replay = Self {
            work: work.to_path_buf(),
            geometry,
            codec,
            corpus,
            carrier: Arc::new(carrier),
            identity_sha256: canonical_hash(&record.identity)?,
            environment: environment(&record, codec, observer)?,
            record,
            prompt: options.prompt.clone(),
            states,
            kept,
            unreachable,
            scratch: None,
            _lock: lock,
            opened,
        };
        let sealed = replay.enters()?;
        observer.begin("sealed files", None, sealed.len() as u64);
        refuse_faults(work, &sealed, &|file| advance(observer, file))?;
        observer.end();
        if !replay.states.iter().all(|state| replay.kept.contains(state)) {
            replay.scratch = Some(scratch(work, options.scratch.as_deref())?);
        }
        Ok(replay)
    }

    /// Every file of the work directory that the states are made from or compared with.
    fn enters(&self) -> Result<Sealed> {
        let (mut sealed, prompts) = (Sealed::new(), self.prompts());
        for &state in &self.states {
            if let Some(layer) = state.checked_sub(1) {
                self.check_inputs(layer)?;
                if self.geometry.is_moe(layer) {
                    for path in
                        ["safetensors", "json"].map(|extension| finished_path(self.codec, layer, extension))
                    {
                        let stage = format!("layer-{layer:03}/emit");
                        sealed.insert(key(&path), output(&self.work, &self.record, &stage, &path)?);
                    }
                }
            }
            for kept in [state.checked_sub(1), Some(state)].into_iter().flatten() {
                if !self.kept.contains(&kept) {
                    continue;
                }
                let files = prompts.iter().map(|prompt| prompt_path(kept, &prompt.id));
                for path in files.chain([manifest_path(kept)]) {
                    let hash = output(&self.work, &self.record, &stage_of(kept), &path)?;
                    sealed.insert(key(&path), hash);
                }
            }
        }
        Ok(sealed)
    }

    /// The seal of a forward has to name the state and the shard that other seals say were made for it.
    fn check_inputs(&self, layer: usize) -> Result<()> {
        let stage = stage_of(layer + 1);
        let state = output(&self.work, &self.record, &stage_of(layer), &manifest_path(layer))?;
        let inputs = self.record.sealed(&stage).map(|seal| &seal.inputs);
        for (name, wanted) in [("state", Some(state)), ("installed", self.installed(layer)?)] {
            let found = inputs.and_then(|inputs| inputs.get(name));
            if found != wanted.as_ref() {
                let show = |hash: Option<&Hash>| hash.map_or_else(|| "nothing".to_owned(), Hash::clone);
                return refuse(format!("the seal of {stage} names another input: {}", show(found)))
                    .file(self.work.join(JOURNAL_FILE))
                    .layer(layer)
                    .field(name)
                    .wanted(format!("{}, which was sealed before it", show(wanted.as_ref())))
                    .err();
            }
        }
        Ok(())
    }
}

/// Refuses the first sealed file that is gone or changed.
fn refuse_faults(work: &Path, sealed: &Sealed, hashed: &(dyn Fn(&str) -> Result<()> + Sync)) -> Result<()> {
    match faults_of(work, sealed, hashed)?.into_iter().next() {
        Some(fault) => fault.err(),
        None => Ok(()),
    }
}

/// Where the carrier lies: where the options say, else where the walk found it.
fn carrier_dir(work: &Path, options: &ReplayOptions) -> Result<PathBuf> {
    let carrier = match &options.carrier {
        Some(carrier) => carrier.clone(),
        None => Locations::read(work)?.carrier,
    };
    if !carrier.is_dir() {
        return refuse("there is no carrier any more")
            .file(carrier)
            .field("--carrier")
            .wanted("the directory where the walk's carrier lies now")
            .err();
    }
    Ok(carrier)
}

/// In what this process computes otherwise than the one that began the walk, said at once.
fn environment(
    record: &JournalRecord,
    codec: CodecName,
    observer: &dyn Observer,
) -> Result<Vec<EnvironmentDifference>> {
    let mut differences = Vec::new();
    for (field, replay) in NumericEnvironment::measure(best_search(), codec)?.fields() {
        let walk = record.identity.get(&field).cloned().unwrap_or_default();
        if walk != replay {
            differences.push(EnvironmentDifference { field, walk, replay });
        }
    }
    let fingerprint = differences.iter().any(|difference| difference.field == "numeric_fingerprint");
    for EnvironmentDifference { field, walk, replay } in &differences {
        observer.note(&format!("{field} of the walk is {walk}, here it is {replay}"));
    }
    if fingerprint {
        observer.note(
            "THE NUMERIC ENVIRONMENT IS NOT THE WALK'S: this build or machine computes other bytes, and a difference \
             found here says nothing against the walk",
        );
    } else if !differences.is_empty() {
        observer.note("another build than the walk's, but its numeric fingerprint is the same");
    }
    Ok(differences)
}

fn check_prompt(work: &Path, corpus: &CorpusPlan, id: Option<&str>) -> Result<()> {
    let Some(id) = id.filter(|id| corpus.calibrate().all(|prompt| prompt.id != *id)) else { return Ok(()) };
    if corpus.evaluate().any(|prompt| prompt.id == id) {
        return refuse("the prompt is for evaluation and never enters a state")
            .file(work.join(CORPUS_FILE))
            .prompt(id)
            .field("--prompt")
            .wanted("a calibration prompt")
            .err();
    }
    // Those that begin most alike come first, then those of the plan.
    let mut ids: Vec<&String> = corpus.domain.calibrate.iter().collect();
    let alike = |other: &str| id.chars().zip(other.chars()).take_while(|(a, b)| a == b).count();
    ids.sort_by_key(|other| std::cmp::Reverse(alike(other)));
    let listed: Vec<&str> = ids.iter().take(LISTED).map(|id| id.as_str()).collect();
    let more = ids.len().saturating_sub(LISTED);
    let more = if more > 0 { format!(" ({more} more)") } else { String::new() };
    refuse("the walk has no such prompt")
        .file(work.join(CORPUS_FILE))
        .prompt(id)
        .field("--prompt")
        .wanted(format!("one of {}{more}", listed.join(", ")))
        .err()
}

/// The state that the one layer makes.
fn one_layer(
    work: &Path,
    record: &JournalRecord,
    geometry: &Geometry,
    kept: &BTreeSet<usize>,
    layer: usize,
) -> Result<usize> {
    let refused = |what: String| refuse(what).layer(layer).field("--layer");
    let last = geometry.num_hidden_layers - 1;
    if layer > last {
        return refused("the model has no such layer".into()).wanted(format!("0 to {}", last - 1)).err();
    }
    if layer == last {
        return refused(Reason::LastLayer.as_str().into()).wanted(format!("0 to {}", last - 1)).err();
    }
    if record.sealed(&stage_of(layer + 1)).is_none() {
        return refused(Reason::NotForwarded.as_str().into()).wanted("a layer that the walk is past").err();
    }
    if !kept.contains(&layer) {
        return refused("the sealed state before the layer is deleted".into())
            .file(work.join(manifest_path(layer)))
            .wanted("a replay of the whole run (no --layer), or a walk with --keep-states")
            .err();
    }
    Ok(layer + 1)
}

/// All states that are sealed.
fn whole_run(work: &Path, record: &JournalRecord, geometry: &Geometry) -> Result<Vec<usize>> {
    let sealed = |state: &usize| record.sealed(&stage_of(*state)).is_some();
    let states: Vec<usize> = (0..geometry.num_hidden_layers).take_while(sealed).collect();
    if states.is_empty() {
        return refuse("the walk has sealed no state yet")
            .file(work.join(JOURNAL_FILE))
            .wanted("a walk that is past its embeddings")
            .err();
    }
    Ok(states)
}

/// The layers after which no state is sealed.
fn unreachable(record: &JournalRecord, geometry: &Geometry) -> Vec<NotReplayed> {
    let last = geometry.num_hidden_layers - 1;
    let ahead = (0..last).filter(|&layer| record.sealed(&stage_of(layer + 1)).is_none());
    let ahead = ahead.map(|layer| NotReplayed { layer, reason: Reason::NotForwarded });
    ahead.chain([NotReplayed { layer: last, reason: Reason::LastLayer }]).collect()
}

/// A folder of its own for states on their way, outside the work directory.
fn scratch(work: &Path, given: Option<&Path>) -> Result<TempDir> {
    let parent = given.map_or_else(std::env::temp_dir, Path::to_path_buf);
    let resolved = parent.canonicalize().at(&parent)?;
    if resolved.starts_with(work.canonicalize().at(work)?) {
        return refuse("the scratch folder lies in the work directory, where a replay writes nothing")
            .file(parent)
            .field("--scratch")
            .wanted("a folder elsewhere")
            .err();
    }
    tempfile::Builder::new().prefix("walk-replay-").tempdir_in(&resolved).at(&parent)
}
