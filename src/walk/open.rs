//! Opening a walk: model, recipe, corpus and checkpoints checked, work directory locked, journal begun or held against
//! what is there. Nothing is computed yet.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use super::driver::{CORPUS_FILE, Walk};
use super::journal::{Journal, JournalRecord};
use super::locations::Locations;
use super::numeric::NumericEnvironment;
use super::preflight::{check_sizes, check_tensors, refuse_unsupported};
use super::progress::{Observer, Stopwatch, advance};
use super::sealed_files;
use crate::checkpoint::inventory::{Inventory, InventoryFile, Role};
use crate::checkpoint::{ExpertGeometry, Reconstruction, Roles};
use crate::codec::trellis::search::best_search;
use crate::config::{Geometry, Recipe, ResolvedModel};
use crate::corpus::{Plan, SealContext, TextEncoder, seal};
use crate::error::{IoContext, Result, refuse};
use crate::store::atomic::{create_dir_durably, sweep_temporaries, write_atomic, write_json_atomic};
use crate::store::hash::sha256_file;
use crate::store::lock::WorkLock;

/// What may differ between two runs on one work directory, threads and progress besides.
#[derive(Debug, Clone, Default)]
pub struct WalkOptions {
    /// Keeps the states before finished layers, for replays and for work that comes back to them.
    pub keep_states: bool,
    /// Stops once this MoE layer is sealed.
    pub stop_after: Option<usize>,
    /// Refuses a source that is not the one this inventory file was taken of.
    pub source_inventory: Option<PathBuf>,
    /// The same of the carrier.
    pub carrier_inventory: Option<PathBuf>,
}

/// The model's `config.json` as the walk read it, within the work directory.
pub const CONFIG_FILE: &str = "CONFIG.json";
/// The recipe, within the work directory.
pub const RECIPE_FILE: &str = "RECIPE.json";

/// The sealed inventory of a role, within the work directory.
pub fn inventory_file(role: Role) -> &'static str {
    match role {
        Role::Source => "SOURCE_INVENTORY.json",
        Role::Carrier => "CARRIER_INVENTORY.json",
    }
}

impl Walk {
    /// Checks model, recipe, corpus and work directory, takes the inventories, seals the corpus plan, and opens or begins
    /// the journal.
    ///
    /// # Errors
    /// Names what is wrong with any of them; a work directory of another walk is refused by the field that differs.
    pub fn open(
        model: &ResolvedModel,
        recipe: Recipe,
        plan: &Path,
        work: &Path,
        mut options: WalkOptions,
        observer: &dyn Observer,
    ) -> Result<Self> {
        let started = Instant::now();
        refuse_unsupported(&recipe)?;
        // Read before anything is: a wrong path is told at once.
        let expected = |role, path: &Option<PathBuf>| -> Result<Option<(PathBuf, InventoryFile)>> {
            let Some(path) = path else { return Ok(None) };
            Ok(Some((path.clone(), InventoryFile::read_as(path, role)?)))
        };
        let expected_source = expected(Role::Source, &options.source_inventory)?;
        let expected_carrier = expected(Role::Carrier, &options.carrier_inventory)?;
        let geometry = Geometry::read(&model.config_path)?;
        let moe_layers = geometry.moe_layers();
        if moe_layers.is_empty() {
            return refuse("the model has no MoE layer").file(&model.config_path).err();
        }
        if let Some(stranger) = options.stop_after.filter(|layer| !moe_layers.contains(layer)) {
            return refuse(format!("layer {stranger} has no routed experts"))
                .field("--pilot-stop-after-layer")
                .wanted(format!("one of {moe_layers:?}"))
                .err();
        }
        check_sizes(&geometry, &recipe)?;
        let experts = ExpertGeometry {
            moe_layers,
            experts: geometry.n_routed_experts,
            hidden: geometry.hidden_size,
            intermediate: geometry.moe_intermediate_size,
        };
        let plan = Plan::load(plan)?;
        let encoder = TextEncoder::from_file(&model.tokenizer_path)?;
        let context = SealContext {
            encoder: &encoder,
            vocab_size: geometry.vocab_size,
            max_position_embeddings: geometry.max_position_embeddings,
            default_prefix: model.prefix_tokens.as_deref(),
        };
        let corpus = seal(&plan, &context)?;
        let allow_same = recipe.allow_same_source_and_carrier;
        let roles = Roles::open(&model.source_dir, &model.carrier_dir, work, &experts, allow_same)?;
        let (source, carrier) = (roles.source.checkpoint().clone(), roles.carrier.checkpoint().clone());
        let same = Arc::ptr_eq(&source, &carrier);
        let carried_weights = Arc::new(Reconstruction::new(carrier.clone())?);
        geometry.check_indexer_tensors(carried_weights.as_ref())?;
        check_tensors(&geometry, &carried_weights)?;
        if !same && corpus.evaluate().next().is_some() {
            // The evaluation runs the source as a whole model too.
            check_tensors(&geometry, &Reconstruction::new(source.clone())?)?;
        }

        if work.exists() {
            sealed_files::refuse_foreign(work)?;
        }
        let tensors = source.names().count() + if same { 0 } else { carrier.names().count() };
        observer.begin("inventory", None, tensors as u64);
        let inventory = Inventory::take(&source, &|name| advance(observer, name))?;
        let carried = match same {
            true => inventory.clone(),
            false => Inventory::take(&carrier, &|name| advance(observer, name))?,
        };
        observer.end();
        let (inventory_sha256, carrier_sha256) = (inventory.sha256()?, carried.sha256()?);
        let taken = [
            (Role::Source, &inventory, &model.source_dir, expected_source),
            (Role::Carrier, &carried, &model.carrier_dir, expected_carrier),
        ];
        for (role, inventory, dir, expected) in &taken {
            if let Some((path, expected)) = expected {
                inventory.verify_against(expected, dir, path)?;
            }
            // The work directory's own inventory names the tensor; the identity below could only name the hash.
            let sealed = work.join(inventory_file(*role));
            if sealed.exists() {
                inventory.verify_against(&InventoryFile::read_as(&sealed, *role)?, dir, &sealed)?;
            }
        }

        create_dir_durably(work)?;
        let lock = WorkLock::acquire(work)?;
        sweep_temporaries(work)?;
        let (recipe_sha256, corpus_sha256) = (recipe.identity_hash()?, corpus.hash()?);
        let environment = NumericEnvironment::measure(best_search(), recipe.codec)?;
        let mut identity = environment.fields();
        let fields = [
            ("recipe_version", recipe.recipe_version.clone()),
            ("recipe_variant", recipe.variant.clone()),
            ("recipe_sha256", recipe_sha256.clone()),
            ("corpus_plan_sha256", corpus_sha256.clone()),
            ("source_inventory_sha256", inventory_sha256.clone()),
            ("carrier_inventory_sha256", carrier_sha256),
            ("config_sha256", sha256_file(&model.config_path)?),
        ];
        identity.extend(fields.map(|(field, value)| (field.to_owned(), value)));
        let known = JournalRecord::read_if_begun(work)?;
        let to_hash = known.as_ref().map_or(0, |record| sealed_files::count(work, record));
        observer.begin("sealed files", None, to_hash as u64);
        let mut journal = Journal::open(work, identity, &|file| advance(observer, file))?;
        observer.end();
        if journal.sealed("inputs").is_none() {
            let config = std::fs::read(&model.config_path).at(&model.config_path)?;
            let mut outputs = vec![
                (PathBuf::from(CONFIG_FILE), write_atomic(work.join(CONFIG_FILE), &config)?),
                (PathBuf::from(RECIPE_FILE), write_json_atomic(work.join(RECIPE_FILE), &recipe)?),
            ];
            for (role, inventory, ..) in taken {
                let file = inventory_file(role);
                let sha256 = InventoryFile::new(role, inventory.clone())?.write(work.join(file))?;
                outputs.push((PathBuf::from(file), sha256));
            }
            journal.seal("inputs", [], outputs)?;
        }
        if journal.sealed("corpus-plan").is_none() {
            let sha256 = corpus.write(work.join(CORPUS_FILE))?;
            journal.seal(
                "corpus-plan",
                [("corpus_plan", corpus_sha256.clone())],
                [(PathBuf::from(CORPUS_FILE), sha256)],
            )?;
        }
        if !options.keep_states && Locations::read(work).is_ok_and(|known| known.keep_states) {
            observer.note(
                "the states of finished layers are kept, as an earlier run on this directory was asked to",
            );
            options.keep_states = true;
        }
        Locations::of(model, options.keep_states)?.write(work)?;
        let mut clock = Stopwatch::default();
        clock.count("open", started);
        Ok(Self {
            geometry,
            recipe,
            corpus,
            source,
            carrier: carried_weights,
            work: work.to_path_buf(),
            recipe_sha256,
            corpus_sha256,
            inventory,
            inventory_sha256,
            environment,
            resumed: known
                .map_or_else(Vec::new, |record| record.stages.into_iter().map(|seal| seal.stage).collect()),
            journal,
            _lock: lock,
            clock,
            options,
        })
    }
}
