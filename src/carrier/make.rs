//! Making a carrier: the model checked, the work bound to its inputs, the layers in order, the directory published.
//!
//! Unfinished work lies beside the result, in the folders of its [`DirTransaction`]: the rolling state and the finished
//! linears in the scratch folder, the finished files in the partial directory. The same command again goes on at the first
//! linear, prompt or file that is missing.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Device};
use rayon::prelude::*;
use serde_json::{Value, json};

use super::calibrate::Calibration;
use super::directory::{Made, bytes_written, write};
use super::encode::{ModuleRecord, SiteCovariance, encode_linear};
use super::linears::{CarriedLinear, Scope, Sorted, sort};
use super::manifest::Manifest;
use super::modules::{MODULES_FOLDER, ModuleStore, Overlay};
use super::report::{CarrierReport, Run};
use crate::checkpoint::inventory::{Inventory, Role, open_role};
use crate::checkpoint::{CheckpointDir, Reconstruction, WeightSource};
use crate::codec::trellis::linear::TrellisLinear;
use crate::codec::trellis::own::OwnVectors;
use crate::codec::trellis::search::TileSearch;
use crate::config::choices::CodecName;
use crate::config::{Geometry, Recipe, ResolvedModel};
use crate::corpus::{CorpusPlan, Plan, SealContext, SealedPrompt, TextEncoder, seal};
use crate::error::{Result, refuse};
use crate::linalg::Matrix;
use crate::model::{Layer, Site};
use crate::publish::check_apart;
use crate::store::atomic::{create_dir_durably, sweep_temporaries};
use crate::store::canonical_json::canonical_hash;
use crate::store::hash::{Hash, sha256_file};
use crate::store::transaction::DirTransaction;
use crate::walk::forward::{ForwardInput, embed, forward_layer};
use crate::walk::numeric::NumericEnvironment;
use crate::walk::preflight::{check_tensors, trellis_of};
use crate::walk::progress::{Observer, Stopwatch, advance, proceed};
use crate::walk::state::{StateManifest, audit, delete, manifest_path};

/// What is asked of a carrier.
#[derive(Debug, Clone)]
pub struct CarrierOptions {
    /// Bits a packed weight, 1 to 8.
    pub bits: u32,
    /// Which linears are offered.
    pub scope: Scope,
    /// Parts of names of linears that stay as they are.
    pub keep: Vec<String>,
    /// Whether the routed experts of the decoder layers are left out.
    pub without_experts: bool,
}

/// An opened piece of work: everything checked and bound.
struct Work<'a> {
    geometry: Geometry,
    recipe: &'a Recipe,
    options: &'a CarrierOptions,
    search: &'static dyn TileSearch,
    model: Arc<CheckpointDir>,
    inventory: Inventory,
    corpus: CorpusPlan,
    sorted: Sorted,
    binding: Value,
    identity_sha256: Hash,
}

/// Makes the carrier `out` of the BF16 model `model.source_dir`, calibrated on the calibration prompts of `plan`.
///
/// # Errors
/// Names what is wrong with options, model, plan or directory, other work that lies where this one would, and a disk that
/// is too full; [`Error::Interrupted`](crate::Error::Interrupted) where the observer asks to stop.
pub fn make_carrier(
    model: &ResolvedModel,
    (recipe, plan): (&Recipe, &Path),
    out: &Path,
    options: &CarrierOptions,
    search: &'static dyn TileSearch,
    observer: &dyn Observer,
) -> Result<CarrierReport> {
    let (mut clock, started) = (Stopwatch::default(), Instant::now());
    let work = Work::open(model, (recipe, plan), out, options, search, observer)?;
    clock.count("open", started);
    let needed = work.bytes_needed()?;
    let Some(transaction) = DirTransaction::begin(out, &work.binding, needed)? else {
        observer.note("the carrier was published by an earlier run, which ended right after");
        return Ok(CarrierReport::new(&Manifest::read(out)?, work.run(&model.name, &mut clock), out));
    };
    let scratch = transaction.scratch()?;
    sweep_temporaries(&scratch)?;
    let records = work.layers(&scratch, &mut clock, observer)?;
    let started = Instant::now();
    let made = Made {
        model: &work.model,
        inventory: &work.inventory,
        sorted: &work.sorted,
        records: &records,
        store: &ModuleStore::new(&scratch),
        binding: &work.binding,
        identity_sha256: &work.identity_sha256,
        calibration: (work.corpus.calibrate().count(), work.corpus.calibration_rows),
    };
    let manifest = write(&made, (options.bits, options.scope), &transaction, observer)?;
    transaction.publish()?;
    clock.count("write", started);
    Ok(CarrierReport::new(&manifest, work.run(&model.name, &mut clock), out))
}

impl<'a> Work<'a> {
    fn open(
        model: &ResolvedModel,
        (recipe, plan): (&'a Recipe, &Path),
        out: &Path,
        options: &'a CarrierOptions,
        search: &'static dyn TileSearch,
        observer: &dyn Observer,
    ) -> Result<Self> {
        if !(1..=8).contains(&options.bits) {
            return refuse(format!("{} bits a weight", options.bits)).field("--bits").wanted("1 to 8").err();
        }
        if recipe.codec != CodecName::Trellis {
            return refuse("a carrier's linears are packed by the trellis codec")
                .file(&recipe.origin)
                .field("codec")
                .wanted("\"trellis\"")
                .err();
        }
        let geometry = Geometry::read(&model.config_path)?;
        let plan = Plan::load(plan)?;
        let encoder = TextEncoder::from_file(&model.tokenizer_path)?;
        let corpus = seal(
            &plan,
            &SealContext {
                encoder: &encoder,
                vocab_size: geometry.vocab_size,
                max_position_embeddings: geometry.max_position_embeddings,
                default_prefix: model.prefix_tokens.as_deref(),
            },
        )?;
        let source = &model.source_dir;
        let checkpoint = open_role(Role::Source, source)?;
        check_apart(out, &[("the model", source)])?;
        geometry.check_indexer_tensors(checkpoint.as_ref())?;
        check_tensors(&geometry, &Reconstruction::new(checkpoint.clone())?)?;
        let sorted = sort(&geometry, &checkpoint, options.scope, &options.keep, options.without_experts)?;
        observer.begin("inventory", None, checkpoint.names().count() as u64);
        let inventory = Inventory::take(&checkpoint, &|name| advance(observer, name))?;
        observer.end();
        let mut keep = options.keep.clone();
        keep.sort();
        keep.dedup();
        let binding = json!({
            "schema": "walk-carrier-v1",
            "bits": options.bits,
            "scope": options.scope.as_str(),
            "keep": keep,
            "without_experts": options.without_experts,
            "recipe_version": recipe.recipe_version,
            "recipe_variant": recipe.variant,
            "recipe_sha256": recipe.identity_hash()?,
            "corpus_plan_sha256": corpus.hash()?,
            "source_inventory_sha256": inventory.sha256()?,
            "config_sha256": sha256_file(&model.config_path)?,
            "numeric_environment": NumericEnvironment::measure(search, CodecName::Trellis)?.fields(),
        });
        let identity_sha256 = canonical_hash(&binding)?;
        Ok(Self {
            geometry,
            recipe,
            options,
            search,
            model: checkpoint,
            inventory,
            corpus,
            sorted,
            binding,
            identity_sha256,
        })
    }

    /// How this run was done, for its report.
    fn run(&self, model: &str, clock: &mut Stopwatch) -> Run {
        Run {
            model: model.to_owned(),
            recipe: self.recipe.variant.clone(),
            search_engine: self.search.name().to_owned(),
            threads: rayon::current_num_threads(),
            stage_seconds: clock.take(),
        }
    }

    /// Bytes on disk at the worst moment: the result, the packed linears once more, two states, and the rows that are kept
    /// between two sites of an MLP.
    fn bytes_needed(&self) -> Result<u64> {
        let (written, packed) = bytes_written(&self.model, &self.sorted, self.options.bits)?;
        let (tokens, hidden) = (self.corpus.calibration_rows, self.geometry.hidden_size as u64);
        let longest = self.corpus.calibrate().map(|prompt| prompt.token_ids.len()).max().unwrap_or(0);
        let topk = self.geometry.index_topk.min(longest) as u64;
        let state = tokens * (2 * hidden + 4 * (topk + 2));
        Ok(written + packed + 2 * state + 4 * tokens * hidden)
    }

    /// Calibrates and packs every layer, and gives the records in the order of the sorted linears.
    fn layers(
        &self,
        scratch: &Path,
        clock: &mut Stopwatch,
        observer: &dyn Observer,
    ) -> Result<Vec<ModuleRecord>> {
        let store = ModuleStore::new(scratch);
        create_dir_durably(scratch.join(MODULES_FOLDER))?;
        let prompts: Vec<&SealedPrompt> = self.corpus.calibrate().collect();
        let last = self.geometry.num_hidden_layers - 1;
        let mut state = self.latest_state(scratch, &prompts, observer)?;
        loop {
            let (manifest, state_sha256) = &state;
            let index = manifest.layer;
            let mut overlay = Overlay::new(&self.model);
            let calibration = Calibration { scratch, state: manifest, prompts: &prompts };
            let records = pack_layer((self, &store), &calibration, &mut overlay, clock, observer)?;
            calibration.forget_rows()?;
            if index == last {
                break;
            }
            let started = Instant::now();
            let layer = Layer::load(&self.geometry, index, &overlay, &Device::Cpu)?;
            let installed: Vec<(&str, &Hash)> = records
                .iter()
                .map(|record| (record.module.as_str(), &record.reconstruction_sha256))
                .collect();
            let input = ForwardInput {
                manifest,
                state_sha256,
                installed_sha256: Some(canonical_hash(&installed)?),
                identity_sha256: &self.identity_sha256,
            };
            let next = forward_layer(scratch, &layer, self.model.as_ref(), &input, &prompts, observer)?;
            delete(scratch, index)?;
            state = (next.manifest, next.sha256);
            clock.count("forward", started);
        }
        self.sorted.packed.iter().map(|linear| store.record(&linear.module)).collect()
    }

    /// The state before the last layer an earlier run reached, or the embeddings.
    fn latest_state(
        &self,
        scratch: &Path,
        prompts: &[&SealedPrompt],
        observer: &dyn Observer,
    ) -> Result<(StateManifest, Hash)> {
        let reached = (1..self.geometry.num_hidden_layers)
            .rev()
            .find(|&layer| scratch.join(manifest_path(layer)).exists());
        if let Some(layer) = reached {
            let sha256 = sha256_file(scratch.join(manifest_path(layer)))?;
            // What was left of a state whose successor is whole.
            delete(scratch, layer - 1)?;
            observer.note(&format!("going on at layer {layer}"));
            return Ok((audit(scratch, layer, &sha256, prompts)?, sha256));
        }
        let embedded =
            embed(scratch, &self.geometry, self.model.as_ref(), &self.identity_sha256, prompts, observer)?;
        Ok((embedded.manifest, embedded.sha256))
    }

    /// The BF16 weight of a linear, `[k, n]`.
    fn weight(&self, linear: &CarriedLinear) -> Result<Matrix<f32>> {
        let shape = [linear.n, linear.k];
        let stored = self.model.load(&linear.weight(), &shape, DType::F32, &Device::Cpu)?;
        Ok(Matrix::new(linear.n, linear.k, stored.flatten_all()?.to_vec1()?).transposed())
    }

    fn bf16_sha256(&self, linear: &CarriedLinear) -> Result<&Hash> {
        match self.inventory.tensors.get(&linear.weight()) {
            Some(tensor) => Ok(&tensor.sha256),
            None => refuse("the inventory has no such tensor").tensor(linear.weight()).err(),
        }
    }
}

/// Packs the linears of a layer, site by site, into `overlay`; what an earlier run finished is adopted.
fn pack_layer(
    (work, store): (&Work<'_>, &ModuleStore),
    calibration: &Calibration<'_>,
    overlay: &mut Overlay<'_>,
    clock: &mut Stopwatch,
    observer: &dyn Observer,
) -> Result<Vec<ModuleRecord>> {
    let index = calibration.state.layer;
    let (mut records, mut missing) = (Vec::new(), Vec::new());
    for linear in work.sorted.packed.iter().filter(|linear| linear.layer == index) {
        match store.adopt(linear, work.options.bits, work.bf16_sha256(linear)?)? {
            Some((packed, record)) => {
                overlay.put(&linear.module, packed);
                records.push(record);
            }
            None => missing.push(linear),
        }
    }
    let gated = missing.iter().any(|linear| linear.site == Site::Gated);
    for site in Site::ALL {
        let here: Vec<&CarriedLinear> =
            missing.iter().copied().filter(|linear| linear.site == site).collect();
        // The rows that the gated site starts from are kept by this one.
        if here.is_empty() && !(gated && site == Site::MlpIn) {
            continue;
        }
        let started = Instant::now();
        let layer = Layer::load(&work.geometry, index, overlay, &Device::Cpu)?;
        let covariance = calibration.covariance(&layer, site, observer)?;
        clock.count("calibrate", started);
        let started = Instant::now();
        observer.begin(&format!("encode {}", site.as_str()), Some(index), here.len() as u64);
        for (packed, record) in encode_site(work, store, &here, &covariance, observer)? {
            overlay.put(&record.module, packed);
            records.push(record);
        }
        observer.end();
        clock.count("encode", started);
    }
    Ok(records)
}

/// Encodes the linears of a site side by side and keeps each as it is finished.
fn encode_site(
    work: &Work<'_>,
    store: &ModuleStore,
    linears: &[&CarriedLinear],
    covariance: &SiteCovariance,
    observer: &dyn Observer,
) -> Result<Vec<(TrellisLinear, ModuleRecord)>> {
    // One for each site: what it remembers of a covariance is of no use to the next.
    let codec = OwnVectors::tune(work.options.bits, trellis_of(work.recipe, work.search));
    let encode = |linear: &&CarriedLinear| {
        proceed(observer)?;
        let weight = (&work.weight(linear)?, work.bf16_sha256(linear)?);
        let (packed, record) =
            encode_linear(&codec, work.recipe, linear, weight, covariance, work.options.bits)?;
        store.put(&packed, &record)?;
        observer.advance(&linear.module);
        Ok((packed, record))
    };
    let encoded: Vec<Result<_>> = linears.par_iter().map(encode).collect();
    // Of several that fail the first is told of.
    encoded.into_iter().collect()
}
