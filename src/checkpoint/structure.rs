//! Whether a checkpoint has the layers and the head that its config says.
//!
//! Purpose: a config with a layer too many would walk the MTP block, which is never run, as if it were a decoder layer;
//! one with a layer too few would leave the last layers out without a word; and a head beside tied embeddings is either
//! the same matrix or a sign that the config is another model's.

use std::collections::BTreeSet;

use super::directory::CheckpointDir;
use super::names::{EMBED_TOKENS, LM_HEAD, layer_of, mtp_prefixes};
use crate::config::Geometry;
use crate::error::{Result, refuse};

/// Checks that no decoder layer is an MTP block and that every stored layer beyond the last one is.
///
/// # Errors
/// Names file, layer, tensor and `num_hidden_layers`.
pub fn check_layers(geometry: &Geometry, checkpoint: &CheckpointDir) -> Result<()> {
    let layers = geometry.num_hidden_layers;
    let stored: BTreeSet<usize> = checkpoint.names().filter_map(layer_of).collect();
    for &layer in &stored {
        let prefixes = mtp_prefixes(layer);
        let mtp = checkpoint.names().find(|name| prefixes.iter().any(|prefix| name.starts_with(prefix)));
        let (what, name, wanted) = match mtp {
            Some(name) if layer < layers => (
                "this tensor is one of an MTP block, which is never walked",
                name,
                format!("at most {layer} for this checkpoint, the MTP block not counted"),
            ),
            None if layer >= layers => {
                let Some(name) = checkpoint.names().find(|name| layer_of(name) == Some(layer)) else {
                    continue;
                };
                (
                    "the checkpoint has a layer beyond the config's that is no MTP block",
                    name,
                    "a config that counts all decoder layers of the checkpoint".to_owned(),
                )
            }
            _ => continue,
        };
        return refuse(format!("{what}; num_hidden_layers is {layers}"))
            .file(checkpoint.dir().join(checkpoint.info(name)?.file))
            .field("num_hidden_layers")
            .layer(layer)
            .tensor(name)
            .wanted(wanted)
            .err();
    }
    Ok(())
}

/// Checks that a head stored beside tied embeddings is the embedding matrix, byte for byte: only the embeddings would be
/// used. Reads both.
///
/// # Errors
/// Names file, tensor and `tie_word_embeddings`.
pub fn check_tied_head(geometry: &Geometry, checkpoint: &CheckpointDir) -> Result<()> {
    let both = checkpoint.contains(LM_HEAD) && checkpoint.contains(EMBED_TOKENS);
    if !geometry.tie_word_embeddings || !both {
        return Ok(());
    }
    let (head, embedding) = (checkpoint.info(LM_HEAD)?, checkpoint.info(EMBED_TOKENS)?);
    let same = head.info.dtype == embedding.info.dtype
        && head.info.shape == embedding.info.shape
        && checkpoint.tensor_bytes(LM_HEAD)? == checkpoint.tensor_bytes(EMBED_TOKENS)?;
    if same {
        return Ok(());
    }
    refuse(format!("tie_word_embeddings is true, but this tensor differs from {EMBED_TOKENS}"))
        .file(checkpoint.dir().join(head.file))
        .field("tie_word_embeddings")
        .tensor(LM_HEAD)
        .wanted("false where the head is a matrix of its own; or no head, or one equal to the embeddings")
        .err()
}
