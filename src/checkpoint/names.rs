//! How the tensors of a GLM-MoE-DSA checkpoint are spelt, in one place.
//!
//! Every name used anywhere in the crate is written by a function of this module, so that a typing error cannot make a
//! tensor silently absent. Layer indices count from 0; index `L` (the number of decoder layers) is the MTP block.

/// Token embeddings `[vocab_size, hidden_size]`.
pub const EMBED_TOKENS: &str = "model.embed_tokens.weight";
/// Weight of the final norm `[hidden_size]`.
pub const NORM: &str = "model.norm.weight";
/// Output head `[vocab_size, hidden_size]`; absent where the embeddings are tied.
pub const LM_HEAD: &str = "lm_head.weight";

/// The three matrices of a gated MLP, as the checkpoint spells them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Projection {
    /// `gate_proj`, `[intermediate, hidden]`.
    Gate,
    /// `up_proj`, `[intermediate, hidden]`.
    Up,
    /// `down_proj`, `[hidden, intermediate]`.
    Down,
}

impl Projection {
    /// All three, in the order gate, up, down.
    pub const ALL: [Self; 3] = [Self::Gate, Self::Up, Self::Down];

    /// The module name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Gate => "gate_proj",
            Self::Up => "up_proj",
            Self::Down => "down_proj",
        }
    }
}

/// Everything of one layer starts with this: `model.layers.{i}.`.
pub fn layer_prefix(layer: usize) -> String {
    format!("model.layers.{layer}.")
}

/// The layer of a name that starts with a [`layer_prefix`].
pub fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("model.layers.")?.split_once('.')?.0.parse().ok()
}

/// Norm before attention `[hidden_size]`.
pub fn input_layernorm(layer: usize) -> String {
    format!("model.layers.{layer}.input_layernorm.weight")
}

/// Norm before the MLP `[hidden_size]`.
pub fn post_attention_layernorm(layer: usize) -> String {
    format!("model.layers.{layer}.post_attention_layernorm.weight")
}

/// Weight of an attention module: `q_a_proj`, `q_a_layernorm`, `q_b_proj`, `kv_a_proj_with_mqa`, `kv_a_layernorm`,
/// `kv_b_proj` or `o_proj`.
pub fn attention(layer: usize, module: &str) -> String {
    format!("model.layers.{layer}.self_attn.{module}.weight")
}

/// Bias of an attention module (`q_a_proj`, `kv_a_proj_with_mqa`, `o_proj`, and only with `attention_bias`).
pub fn attention_bias(layer: usize, module: &str) -> String {
    format!("model.layers.{layer}.self_attn.{module}.bias")
}

/// Weight of an indexer module: `wq_b`, `wk`, `weights_proj` or `k_norm`.
pub fn indexer(layer: usize, module: &str) -> String {
    format!("model.layers.{layer}.self_attn.indexer.{module}.weight")
}

/// Bias of the indexer's LayerNorm `[index_head_dim]`.
pub fn indexer_k_norm_bias(layer: usize) -> String {
    format!("model.layers.{layer}.self_attn.indexer.k_norm.bias")
}

/// The five tensors that a full layer has and a shared layer lacks.
pub fn indexer_tensors(layer: usize) -> [String; 5] {
    [
        indexer(layer, "wq_b"),
        indexer(layer, "wk"),
        indexer(layer, "weights_proj"),
        indexer(layer, "k_norm"),
        indexer_k_norm_bias(layer),
    ]
}

/// One matrix of a dense layer's MLP.
pub fn dense_mlp(layer: usize, projection: Projection) -> String {
    format!("model.layers.{layer}.mlp.{}.weight", projection.as_str())
}

/// Router weight `[n_routed_experts, hidden_size]`.
pub fn router(layer: usize) -> String {
    format!("model.layers.{layer}.mlp.gate.weight")
}

/// Router correction bias `[n_routed_experts]`, F32.
pub fn router_bias(layer: usize) -> String {
    format!("model.layers.{layer}.mlp.gate.e_score_correction_bias")
}

/// Everything of a layer's routed experts starts with this and a dot: `model.layers.{layer}.mlp.experts`.
pub fn experts_prefix(layer: usize) -> String {
    format!("model.layers.{layer}.mlp.experts")
}

/// A projection of a routed expert as a module: the name of its weight without `.weight`.
pub fn expert_module(layer: usize, expert: usize, projection: Projection) -> String {
    format!("{}.{expert}.{}", experts_prefix(layer), projection.as_str())
}

/// One matrix of a routed expert.
pub fn expert(layer: usize, expert: usize, projection: Projection) -> String {
    format!("{}.weight", expert_module(layer, expert, projection))
}

/// Layer and rest of a name that starts with [`experts_prefix`] and a dot.
pub fn split_experts(name: &str) -> Option<(usize, &str)> {
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    Some((layer.parse().ok()?, rest.strip_prefix("mlp.experts.")?))
}

/// Layer, expert and projection of an [`expert_module`], nothing appended.
pub fn split_expert(module: &str) -> Option<(usize, usize, Projection)> {
    let (layer, rest) = split_experts(module)?;
    let (expert, projection) = rest.split_once('.')?;
    let known = Projection::ALL.into_iter().find(|known| known.as_str() == projection)?;
    let number: usize = expert.parse().ok()?;
    (number.to_string() == expert).then_some((layer, number, known))
}

/// One matrix of the shared experts, which are stored as one MLP of `n_shared_experts` times the width.
pub fn shared_experts(layer: usize, projection: Projection) -> String {
    format!("model.layers.{layer}.mlp.shared_experts.{}.weight", projection.as_str())
}

/// What only an MTP block has, as the starts of names: its projection, both its norms, and its head.
pub fn mtp_prefixes(layer: usize) -> [String; 4] {
    ["eh_proj.", "enorm.", "hnorm.", "shared_head."].map(|module| format!("model.layers.{layer}.{module}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_spelt_as_published() {
        assert_eq!(expert(3, 17, Projection::Down), "model.layers.3.mlp.experts.17.down_proj.weight");
        assert_eq!(split_expert("model.layers.3.mlp.experts.17.down_proj"), Some((3, 17, Projection::Down)));
        for other in
            ["model.layers.3.mlp.experts.07.down_proj", "model.layers.3.mlp.shared_experts.down_proj"]
        {
            assert_eq!(split_expert(other), None);
        }
        assert_eq!(shared_experts(3, Projection::Up), "model.layers.3.mlp.shared_experts.up_proj.weight");
        assert_eq!(dense_mlp(0, Projection::Gate), "model.layers.0.mlp.gate_proj.weight");
        assert_eq!(router_bias(9), "model.layers.9.mlp.gate.e_score_correction_bias");
        assert_eq!(attention(1, "kv_a_proj_with_mqa"), "model.layers.1.self_attn.kv_a_proj_with_mqa.weight");
        assert_eq!(indexer_tensors(2)[4], "model.layers.2.self_attn.indexer.k_norm.bias");
    }
}
