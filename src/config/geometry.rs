//! The geometry of a GLM-MoE-DSA model, read from its `config.json`.
//!
//! Purpose: every size and switch the forward pass needs, checked once, so that nothing later has to doubt it.
//! Source: the configuration of `glm_moe_dsa` in Hugging Face Transformers 5.24 and the published GLM-5.2 config.
//!
//! Invariants of a [`Geometry`] that was read: all sizes are positive and below [`MAX_SIZE`]; the per-layer schedules
//! have one entry per decoder layer; the first layer's indexer is full; there is at least one MoE layer; a switch whose
//! other setting this crate does not compute has been refused. Fields that change nothing in the forward pass
//! (`head_dim`, `initializer_range`, token ids, ...) are not read. In particular `head_dim` is not the rotary width.

use std::path::Path;

use serde_json::Value;

use super::fields::Fields;
use super::rope::{Rope, read_rope};
use crate::error::{IoContext, Result, refuse};
use crate::store::strict_json::{StrictValue, read_file};

/// No single size in a config may exceed this: it keeps products of three of them within 64 bits.
pub const MAX_SIZE: usize = 1 << 21;
/// Longest `config.json` that is read, in bytes.
pub const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Sizes and switches of a model; names are those of `config.json`.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Geometry {
    /// Width of the residual stream, H.
    pub hidden_size: usize,
    /// Decoder layers 0..L-1; layer index L is the MTP block, stored but never run.
    pub num_hidden_layers: usize,
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of a dense layer's MLP.
    pub intermediate_size: usize,
    /// Routed experts of a MoE layer, E.
    pub n_routed_experts: usize,
    /// Routed experts per token.
    pub num_experts_per_tok: usize,
    /// Shared experts; they are stored as one MLP of this many times the expert width.
    pub n_shared_experts: usize,
    /// Width of one routed expert.
    pub moe_intermediate_size: usize,
    /// Expert groups, contiguous in expert id.
    pub n_group: usize,
    /// Groups a token may choose from.
    pub topk_group: usize,
    /// Whether the chosen router scores are divided by their sum.
    pub norm_topk_prob: bool,
    /// Factor on the router weights.
    pub routed_scaling_factor: f64,
    /// Attention heads, A.
    pub num_attention_heads: usize,
    /// Rank of the query latent.
    pub q_lora_rank: usize,
    /// Rank of the key/value latent.
    pub kv_lora_rank: usize,
    /// Head width without position.
    pub qk_nope_head_dim: usize,
    /// Rotary head width; the only width RoPE ever uses.
    pub qk_rope_head_dim: usize,
    /// Head width of the values.
    pub v_head_dim: usize,
    /// Whether q_a, kv_a and o projections have biases.
    pub attention_bias: bool,
    /// Indexer heads.
    pub index_n_heads: usize,
    /// Width of an indexer head.
    pub index_head_dim: usize,
    /// Keys a query may attend to.
    pub index_topk: usize,
    /// Epsilon of the block norms and the final norm.
    pub rms_norm_eps: f64,
    /// Rotary positions.
    pub rope: Rope,
    /// Positions the model was made for.
    pub max_position_embeddings: usize,
    /// Whether the output head is the embedding matrix.
    pub tie_word_embeddings: bool,
    /// Per decoder layer: sparse (MoE) or dense.
    pub(super) moe: Vec<bool>,
    /// Per decoder layer: computes its own top-k keys, or takes those of the layer before.
    pub(super) full_indexer: Vec<bool>,
}

impl Geometry {
    /// Reads `config.json` at `path` (the file itself).
    ///
    /// # Errors
    /// When the file cannot be read, is too long, or [`parse`](Self::parse) refuses it.
    pub fn read(path: &Path) -> Result<Self> {
        let length = std::fs::metadata(path).at(path)?.len();
        if length > MAX_CONFIG_BYTES {
            return refuse(format!("{length} bytes"))
                .file(path)
                .wanted(format!("a config.json of at most {MAX_CONFIG_BYTES} bytes"))
                .err();
        }
        Self::parse(path, &read_file(path)?)
    }

    /// Reads the `bytes` of a config; `path` is only named in refusals.
    ///
    /// # Errors
    /// When they are no JSON object, have a key twice, or [`from_json`](Self::from_json) refuses them.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        match serde_json::from_slice(bytes) {
            Ok(StrictValue(value)) => Self::from_json(&value, path),
            Err(error) => {
                refuse(format!("not JSON: {error}")).file(path).wanted("a model's config.json").err()
            }
        }
    }

    /// Reads a parsed config; `origin` is the file named in refusals.
    ///
    /// # Errors
    /// Names the field that is missing, out of range, contradictory, or asks for something this crate does not compute.
    pub fn from_json(config: &Value, origin: &Path) -> Result<Self> {
        let fields = Fields::new(config, origin)?;
        fields.fixed_text("model_type", "glm_moe_dsa", true)?;
        for (name, value) in [
            ("hidden_act", "silu"),
            ("scoring_func", "sigmoid"),
            ("topk_method", "noaux_tc"),
            ("moe_router_dtype", "float32"),
        ] {
            fields.fixed_text(name, value, false)?;
        }
        for (name, value) in
            [("mlp_bias", false), ("rope_interleave", true), ("indexer_rope_interleave", true)]
        {
            fields.fixed_flag(name, value)?;
        }
        let layers = fields.size("num_hidden_layers")?;
        let geometry = Self {
            hidden_size: fields.size("hidden_size")?,
            num_hidden_layers: layers,
            vocab_size: fields.size("vocab_size")?,
            intermediate_size: fields.size("intermediate_size")?,
            n_routed_experts: fields.size("n_routed_experts")?,
            num_experts_per_tok: fields.size("num_experts_per_tok")?,
            n_shared_experts: fields.size("n_shared_experts")?,
            moe_intermediate_size: fields.size("moe_intermediate_size")?,
            n_group: fields.size_or("n_group", 1)?,
            topk_group: fields.size_or("topk_group", 1)?,
            norm_topk_prob: fields.flag_or("norm_topk_prob", true)?,
            routed_scaling_factor: fields.positive("routed_scaling_factor")?,
            num_attention_heads: fields.size("num_attention_heads")?,
            q_lora_rank: fields.size("q_lora_rank")?,
            kv_lora_rank: fields.size("kv_lora_rank")?,
            qk_nope_head_dim: fields.size("qk_nope_head_dim")?,
            qk_rope_head_dim: fields.size("qk_rope_head_dim")?,
            v_head_dim: fields.size("v_head_dim")?,
            attention_bias: fields.flag_or("attention_bias", false)?,
            index_n_heads: fields.size("index_n_heads")?,
            index_head_dim: fields.size("index_head_dim")?,
            index_topk: fields.size("index_topk")?,
            rms_norm_eps: fields.positive("rms_norm_eps")?,
            rope: read_rope(&fields)?,
            max_position_embeddings: fields.size("max_position_embeddings")?,
            tie_word_embeddings: fields.flag_or("tie_word_embeddings", false)?,
            moe: read_moe_layers(&fields, layers)?,
            full_indexer: read_indexer_schedule(&fields, layers)?,
        };
        geometry.check(&fields)?;
        Ok(geometry)
    }

    /// Relations between fields.
    fn check(&self, fields: &Fields) -> Result<()> {
        let heads = self.num_attention_heads;
        fields.must("num_key_value_heads", fields.size_or("num_key_value_heads", heads)? == heads, || {
            format!("num_attention_heads, {heads}: the expanded MLA form has a key per head")
        })?;
        let width = self.qk_head_dim();
        fields.must("qk_head_dim", fields.size_or("qk_head_dim", width)? == width, || {
            format!("qk_nope_head_dim + qk_rope_head_dim = {width}")
        })?;
        let rope = self.qk_rope_head_dim;
        fields.must("qk_rope_head_dim", rope.is_multiple_of(2) && rope <= self.index_head_dim, || {
            format!("an even number of at most index_head_dim = {}", self.index_head_dim)
        })?;
        let (experts, groups) = (self.n_routed_experts, self.n_group);
        let grouped = experts.is_multiple_of(groups) && (groups == 1 || experts / groups >= 2);
        fields.must("n_group", grouped, || {
            format!("a divisor of n_routed_experts = {experts} leaving at least 2 experts a group")
        })?;
        fields.must("topk_group", self.topk_group <= groups, || format!("at most n_group = {groups}"))?;
        let choice = experts / groups * self.topk_group;
        fields.must("num_experts_per_tok", self.num_experts_per_tok <= choice, || {
            format!("at most the {choice} experts a token may choose from")
        })?;
        fields.must("mlp_layer_types", self.moe.contains(&true), || "at least one MoE layer".into())
    }

    /// Whether decoder layer `layer` is a MoE layer. False from layer L on.
    pub fn is_moe(&self, layer: usize) -> bool {
        self.moe.get(layer).copied().unwrap_or(false)
    }

    /// Whether decoder layer `layer` computes its own top-k keys. False from layer L on.
    pub fn indexer_is_full(&self, layer: usize) -> bool {
        self.full_indexer.get(layer).copied().unwrap_or(false)
    }

    /// The first MoE layer; a geometry has at least one.
    pub fn first_moe_layer(&self) -> usize {
        self.moe.iter().position(|moe| *moe).unwrap_or(self.num_hidden_layers)
    }

    /// All MoE layers, ascending, layers 0..L-1 only.
    pub fn moe_layers(&self) -> Vec<usize> {
        (0..self.num_hidden_layers).filter(|layer| self.moe[*layer]).collect()
    }

    /// The index under which the MTP block is stored: L. It is carried and never run.
    pub fn mtp_layer(&self) -> usize {
        self.num_hidden_layers
    }

    /// Width of a query or key head.
    pub fn qk_head_dim(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// Width of the shared experts' MLP.
    pub fn shared_intermediate_size(&self) -> usize {
        self.n_shared_experts * self.moe_intermediate_size
    }
}

/// `mlp_layer_types` where present, else `first_k_dense_replace`.
fn read_moe_layers(fields: &Fields, layers: usize) -> Result<Vec<bool>> {
    if let Some(moe) = fields.per_layer("mlp_layer_types", layers, "sparse", "dense")? {
        return Ok(moe);
    }
    let frequency = fields.size_or("moe_layer_freq", 1)?;
    fields.must("moe_layer_freq", frequency == 1, || "1".into())?;
    let dense = fields.count("first_k_dense_replace")?;
    Ok((0..layers).map(|layer| layer >= dense).collect())
}

/// `indexer_types` where present, else `index_topk_pattern`, else the frequency rule.
fn read_indexer_schedule(fields: &Fields, layers: usize) -> Result<Vec<bool>> {
    let (field, full) = if let Some(full) = fields.per_layer("indexer_types", layers, "full", "shared")? {
        ("indexer_types", full)
    } else if let Some(full) = fields.pattern("index_topk_pattern", layers, 'F', 'S')? {
        ("index_topk_pattern", full)
    } else {
        let frequency = fields.count_or("index_topk_freq", 1)?.max(1);
        let offset = fields.count_or("index_skip_topk_offset", 2)?;
        let full = (0..layers).map(|layer| (layer + 1).saturating_sub(offset).is_multiple_of(frequency));
        ("index_topk_freq", full.collect())
    };
    fields.must(field, full[0], || "a full indexer in layer 0, which has no layer before it".into())?;
    Ok(full)
}
