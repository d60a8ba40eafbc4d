//! What a replay found, for machines and for people.

use serde::Serialize;

use super::compare::Difference;
use crate::error::{Error, refuse};

/// A field of the numeric environment that is another one here than it was when the walk began.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EnvironmentDifference {
    /// Name in the walk's identity.
    pub field: String,
    /// What the walk has.
    pub walk: String,
    /// What this process has.
    pub replay: String,
}

/// Where a replayed layer's input came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum InputFrom {
    /// The sealed tokens: the state before layer 0 is their embeddings.
    Tokens,
    /// The sealed state on disk.
    Sealed,
    /// The state replayed just before, equal to the sealed one by its hash.
    Replayed,
}

/// How a replayed state was held against the sealed one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ComparedBy {
    /// Byte by byte with the file on disk.
    Bytes,
    /// By the SHA-256 that the journal seals of the file, which is deleted.
    Hash,
}

/// A replayed layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReplayedLayer {
    /// The layer; `None` for the embeddings, which come before layer 0.
    pub layer: Option<usize>,
    /// The layer whose input state was compared: the one after it.
    pub state: usize,
    /// Where its input came from.
    pub input: InputFrom,
    /// How it was compared.
    pub compared_by: ComparedBy,
    /// Prompts compared.
    pub prompts: usize,
    /// Prompts that differ.
    pub differing_prompts: usize,
    /// Bytes of hidden states and top-k lists compared.
    pub bytes: u64,
    /// The first difference, prompts in plan order.
    pub first_difference: Option<PromptDifference>,
    /// Wall-clock seconds.
    pub seconds: f64,
}

/// Where a prompt's replayed state first differs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PromptDifference {
    /// The prompt's id.
    pub prompt: String,
    /// What differs.
    #[serde(flatten)]
    pub difference: Difference,
}

/// A layer that a whole run could not be compared at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NotReplayed {
    /// The layer.
    pub layer: usize,
    /// Why.
    pub reason: Reason,
}

/// Why a layer was not replayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// A walk encodes the last layer and never forwards it.
    LastLayer,
    /// The walk has not come so far.
    NotForwarded,
    /// Its sealed input is deleted, and what was replayed in its place differs from it.
    InputDiffers,
}

impl Reason {
    /// The reason as a clause.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::LastLayer => {
                "the last layer is encoded but never forwarded: no state follows to compare with"
            }
            Self::NotForwarded => "the walk has not sealed its forward yet",
            Self::InputDiffers => "its sealed input is deleted, and the one replayed differs from it",
        }
    }
}

/// What a replay found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReplayReport {
    /// Whether every state compared is the sealed one.
    pub equal: bool,
    /// Prompts that were replayed.
    pub prompts: usize,
    /// Calibration prompts of the walk.
    pub walk_prompts: usize,
    /// Bytes of hidden states and top-k lists compared.
    pub bytes: u64,
    /// In what the numeric environment differs from the walk's.
    pub environment: Vec<EnvironmentDifference>,
    /// Layers in order.
    pub layers: Vec<ReplayedLayer>,
    /// Layers of a whole run that could not be compared.
    pub not_replayed: Vec<NotReplayed>,
    /// Wall-clock seconds, checking of the sealed files included.
    pub seconds: f64,
}

impl ReplayReport {
    /// The first layer that differs, and where.
    pub fn first_difference(&self) -> Option<(&ReplayedLayer, &PromptDifference)> {
        self.layers.iter().find_map(|layer| Some((layer, layer.first_difference.as_ref()?)))
    }

    /// The first difference as a failed check; nothing where all is equal.
    pub fn failure(&self) -> Option<Error> {
        let (layer, found) = self.first_difference()?;
        let place = layer.layer.map_or("the embeddings", |_| "the layer");
        let mut refusal = refuse(format!("{place} replayed otherwise than sealed: {}", found.difference))
            .prompt(&found.prompt)
            .wanted(match found.difference {
                Difference::Hash { .. } => {
                    "the sealed state; a walk with --keep-states shows row, channel and values"
                }
                _ => "the sealed state",
            });
        if let Some(layer) = layer.layer {
            refusal = refusal.layer(layer);
        }
        if let Some(row) = found.difference.row() {
            refusal = refusal.row(row);
        }
        Some(refusal.check())
    }
}
