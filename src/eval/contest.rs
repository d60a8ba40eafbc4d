//! What an evaluation of checkpoints on disk needs: a candidate, the reference it is held against, and the prompts, all
//! of one model.
//!
//! A checkpoint may be plain, a carrier with packed linears, or have packed experts (schema v2 or rank slices): both
//! sides are read through [`Reconstruction`]. The candidate's `config.json` gives the geometry and its `tokenizer.json`
//! the ids; the reference's must agree with both.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::{Evaluation, Perplexity, StateType, evaluate, perplexity};
use crate::checkpoint::complete::{MANIFEST_FILE, unverified};
use crate::checkpoint::names::{self, Projection};
use crate::checkpoint::{ExpertGeometry, Reconstruction};
use crate::config::{Geometry, Model};
use crate::corpus::{CorpusPlan, Plan, SealContext, TextEncoder, seal};
use crate::error::{Result, refuse};
use crate::store::hash::Hash;
use crate::walk::preflight::check_tensors;
use crate::walk::progress::Observer;

/// What is to be evaluated.
#[derive(Debug, Clone)]
pub struct ContestOptions {
    /// Directory of the candidate.
    pub candidate: PathBuf,
    /// A registered model or a directory.
    pub reference: Option<String>,
    /// The corpus plan.
    pub plan: PathBuf,
    /// Model whose card says what prompts start with: a registered one or a directory.
    pub model: Option<String>,
}

/// Candidate, reference and prompts.
#[derive(Debug)]
pub struct Contest {
    geometry: Geometry,
    candidate: Reconstruction,
    reference: Option<Reconstruction>,
    corpus: CorpusPlan,
    inputs: ContestInputs,
}

/// What an evaluation was made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ContestInputs {
    /// The candidate's directory.
    pub candidate: String,
    /// The reference's directory.
    pub reference: Option<String>,
    /// The tokenizer that was used.
    pub tokenizer: String,
    /// Its SHA-256.
    pub tokenizer_sha256: Hash,
    /// The model card whose prefix the prompts without one of their own in the plan start with.
    pub prefix_tokens_from: Option<String>,
    /// Identity of the tokenised corpus.
    pub corpus_plan_sha256: Hash,
}

/// What an evaluation found; one of the two is there if the plan has tokens to score.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ContestReport {
    /// What it was made of.
    pub inputs: ContestInputs,
    /// Reference against candidate.
    pub evaluation: Option<Evaluation>,
    /// The candidate alone, without a reference.
    pub perplexity: Option<Perplexity>,
}

impl Contest {
    /// Opens and checks both checkpoints and seals the plan. No payload of a linear is read.
    ///
    /// # Errors
    /// Names what is wrong with a config, a tokenizer, the plan or a tensor; or where the two checkpoints disagree: the
    /// config's field, or the prompt that their tokenizers cut in other tokens.
    pub fn open(options: &ContestOptions) -> Result<Self> {
        let dir = &options.candidate;
        let config = dir.join("config.json");
        if !config.is_file() {
            return refuse("the candidate has no config.json")
                .file(dir)
                .wanted("a complete checkpoint directory")
                .err();
        }
        let geometry = Geometry::read(&config)?;
        let candidate = Reconstruction::open(dir)?;
        check_weights(&geometry, &candidate)?;
        let found = options.reference.as_deref().map(Model::find).transpose()?;
        let reference = match &found {
            None => None,
            Some(model) => {
                let from = model.source_dir()?;
                geometry.agrees_with(&config, &from)?;
                let reference = Reconstruction::open(&from)?;
                check_weights(&geometry, &reference)?;
                Some((from, reference))
            }
        };
        let cards = [
            options.model.as_deref().map(Model::find).transpose()?,
            Some(Model::find_in(&dir.to_string_lossy(), &[])?),
            found,
        ];
        let card = cards.into_iter().flatten().find(|model| model.card.prefix_tokens.is_some());
        let prefix = card.as_ref().and_then(|model| model.card.prefix_tokens.as_deref());
        let plan = Plan::load(&options.plan)?;
        let from = reference.as_ref().map(|(from, _)| from.as_path());
        let (encoder, corpus) = tokenise(&plan, &geometry, prefix, dir, from)?;
        let inputs = ContestInputs {
            candidate: dir.display().to_string(),
            reference: from.map(|from| from.display().to_string()),
            tokenizer: encoder.path().display().to_string(),
            tokenizer_sha256: encoder.sha256().to_owned(),
            prefix_tokens_from: card.map(|model| model.folder.join("model.json").display().to_string()),
            corpus_plan_sha256: corpus.hash()?,
        };
        let reference = reference.map(|(_, reference)| reference);
        Ok(Self { geometry, candidate, reference, corpus, inputs })
    }

    /// Runs the prompts through both, or through the candidate alone.
    ///
    /// # Errors
    /// As [`evaluate`] and [`perplexity`].
    pub fn run(self, state: StateType, observer: &dyn Observer) -> Result<ContestReport> {
        let (geometry, candidate, corpus) = (&self.geometry, &self.candidate, &self.corpus);
        let sides = [Some(candidate), self.reference.as_ref()].into_iter().flatten();
        for dir in sides.map(|side| side.checkpoint().dir()).filter(|dir| dir.join(MANIFEST_FILE).exists()) {
            observer.note(&unverified(dir));
        }
        let (evaluation, perplexity) = match &self.reference {
            Some(reference) => (evaluate(geometry, reference, candidate, corpus, state, observer)?, None),
            None => (None, perplexity(geometry, candidate, corpus, state, observer)?),
        };
        Ok(ContestReport { inputs: self.inputs, evaluation, perplexity })
    }
}

impl ContestReport {
    /// The report as plain text.
    pub fn render_table(&self) -> String {
        let inputs = &self.inputs;
        let mut text = format!("candidate {}\n", inputs.candidate);
        if let Some(reference) = &inputs.reference {
            text.push_str(&format!("reference {reference}\n"));
        }
        text.push_str(&format!("tokenizer {}\n", inputs.tokenizer));
        if let Some(card) = &inputs.prefix_tokens_from {
            text.push_str(&format!("prefix of prompts that the plan gives none: {card}\n"));
        }
        text.push('\n');
        match (&self.evaluation, &self.perplexity) {
            (Some(evaluation), _) => text.push_str(&evaluation.render_table()),
            (None, Some(perplexity)) => text.push_str(&perplexity.render_table()),
            (None, None) => text.push_str("evaluation: none\n"),
        }
        text
    }
}

/// Every tensor of a whole model is there in its shape, routed experts included.
fn check_weights(geometry: &Geometry, weights: &Reconstruction) -> Result<()> {
    geometry.check_indexer_tensors(weights)?;
    check_tensors(geometry, weights)?;
    let experts = ExpertGeometry {
        moe_layers: geometry.moe_layers(),
        experts: geometry.n_routed_experts,
        hidden: geometry.hidden_size,
        intermediate: geometry.moe_intermediate_size,
    };
    for &layer in &experts.moe_layers {
        for expert in 0..experts.experts {
            for projection in Projection::ALL {
                weights.check_shape(&names::expert(layer, expert, projection), &experts.shape(projection))?;
            }
        }
    }
    Ok(())
}

/// The plan by the candidate's tokenizer, or the reference's where it has none. With both, the evaluation prompts have
/// to be the same tokens by either.
fn tokenise(
    plan: &Plan,
    geometry: &Geometry,
    prefix: Option<&[String]>,
    candidate: &Path,
    reference: Option<&Path>,
) -> Result<(TextEncoder, CorpusPlan)> {
    let files: Vec<PathBuf> = [Some(candidate), reference]
        .into_iter()
        .flatten()
        .map(|dir| dir.join("tokenizer.json"))
        .filter(|path| path.is_file())
        .collect();
    let by = |path: &PathBuf| -> Result<(TextEncoder, CorpusPlan)> {
        let encoder = TextEncoder::from_file(path)?;
        let context = SealContext {
            encoder: &encoder,
            vocab_size: geometry.vocab_size,
            max_position_embeddings: geometry.max_position_embeddings,
            default_prefix: prefix,
        };
        let corpus = seal(plan, &context)?;
        Ok((encoder, corpus))
    };
    let Some((first, others)) = files.split_first() else {
        return refuse("neither candidate nor reference has a tokenizer.json")
            .file(candidate)
            .wanted("a complete checkpoint directory")
            .err();
    };
    let (encoder, corpus) = by(first)?;
    for path in others {
        let (other, theirs) = by(path)?;
        if other.sha256() == encoder.sha256() {
            continue;
        }
        for (mine, theirs) in corpus.evaluate().zip(theirs.evaluate()) {
            if mine.token_ids != theirs.token_ids {
                let pairs = mine.token_ids.iter().zip(&theirs.token_ids);
                return refuse("the reference's tokenizer cuts the prompt in other tokens")
                    .file(other.path())
                    .prompt(&mine.id)
                    .row(pairs.take_while(|(a, b)| a == b).count())
                    .wanted(format!("those of {}", encoder.path().display()))
                    .err();
            }
        }
    }
    Ok((encoder, corpus))
}
