//! What a tensor is for, by its name.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::checkpoint::names::{self, EMBED_TOKENS, LM_HEAD, layer_of, mtp_prefixes};

/// What a tensor is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Token embeddings and output head.
    EmbeddingsHead,
    /// Attention projections.
    Attention,
    /// The sparse attention's indexer.
    Indexer,
    /// The MLP of dense layers.
    DenseMlp,
    /// Router weight and correction bias.
    Router,
    /// Shared experts.
    SharedExperts,
    /// Routed experts.
    RoutedExperts,
    /// Norms, also those inside attention.
    Norms,
    /// Everything of a block for multi-token prediction.
    Mtp,
    /// None of these.
    Other,
}

impl Role {
    /// As tables spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::EmbeddingsHead => "embeddings, head",
            Self::Attention => "attention",
            Self::Indexer => "indexer",
            Self::DenseMlp => "dense MLP",
            Self::Router => "router",
            Self::SharedExperts => "shared experts",
            Self::RoutedExperts => "routed experts",
            Self::Norms => "norms",
            Self::Mtp => "MTP block",
            Self::Other => "other",
        }
    }
}

/// Tells roles in one checkpoint, whose MTP blocks are known by what only they have.
#[derive(Debug, Clone, Default)]
pub struct Roles {
    mtp: BTreeSet<usize>,
}

impl Roles {
    /// Finds the MTP blocks among all tensors of a checkpoint.
    pub fn of<'a>(tensors: impl Iterator<Item = &'a str>) -> Self {
        let is_mtp = |name: &str, layer| mtp_prefixes(layer).iter().any(|prefix| name.starts_with(prefix));
        let mtp = tensors.filter_map(|name| layer_of(name).filter(|&layer| is_mtp(name, layer)));
        Self { mtp: mtp.collect() }
    }

    /// The role of a tensor, or of the weight of a packed module.
    pub fn role(&self, name: &str) -> Role {
        if name == EMBED_TOKENS || name == LM_HEAD {
            return Role::EmbeddingsHead;
        }
        if layer_of(name).is_some_and(|layer| self.mtp.contains(&layer)) {
            return Role::Mtp;
        }
        if names::split_experts(name).is_some() {
            return Role::RoutedExperts;
        }
        let norm = |part: &str| part.ends_with("norm");
        if name.rsplit('.').nth(1).is_some_and(norm) {
            return Role::Norms;
        }
        let inner = layer_of(name).and_then(|_| name.splitn(4, '.').nth(3)).unwrap_or("");
        for (start, role) in [
            ("mlp.shared_experts.", Role::SharedExperts),
            ("mlp.gate.", Role::Router),
            ("mlp.", Role::DenseMlp),
            ("self_attn.indexer.", Role::Indexer),
            ("self_attn.", Role::Attention),
        ] {
            if inner.starts_with(start) {
                return role;
            }
        }
        Role::Other
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_roles() {
        let roles =
            Roles::of(["model.layers.5.eh_proj.weight", "model.layers.4.mlp.gate.weight"].into_iter());
        for (name, role) in [
            ("model.embed_tokens.weight", Role::EmbeddingsHead),
            ("lm_head.weight", Role::EmbeddingsHead),
            ("model.norm.weight", Role::Norms),
            ("model.layers.0.input_layernorm.weight", Role::Norms),
            ("model.layers.0.self_attn.kv_a_layernorm.weight", Role::Norms),
            ("model.layers.0.self_attn.indexer.k_norm.bias", Role::Norms),
            ("model.layers.0.self_attn.indexer.wq_b.weight", Role::Indexer),
            ("model.layers.0.self_attn.kv_b_proj.weight", Role::Attention),
            ("model.layers.0.mlp.gate_proj.weight", Role::DenseMlp),
            ("model.layers.4.mlp.gate.e_score_correction_bias", Role::Router),
            ("model.layers.4.mlp.shared_experts.up_proj.weight", Role::SharedExperts),
            ("model.layers.4.mlp.experts.0.up_proj.weight", Role::RoutedExperts),
            ("model.layers.4.mlp.experts.r7_shared.down_svh", Role::RoutedExperts),
            ("model.layers.5.mlp.experts.0.up_proj.weight", Role::Mtp),
            ("model.layers.5.input_layernorm.weight", Role::Mtp),
            ("mcg.k3.weight", Role::Other),
            ("weight", Role::Other),
        ] {
            assert_eq!(roles.role(name), role, "{name}");
        }
    }
}
