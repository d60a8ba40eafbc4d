//! Whether two configs describe the same model.
//!
//! The model's own `config.json` decides the geometry, and source and carrier bring theirs: where they say something
//! else, one of the three is of another model.

use std::path::Path;

use super::geometry::Geometry;
use crate::error::{Result, refuse};

impl Geometry {
    /// Refuses a checkpoint directory whose `config.json` gives another geometry than this one, which was read from
    /// `own`. A directory without the file contradicts nothing.
    ///
    /// # Errors
    /// Names the directory's file, the field and both values; or what is wrong with the file itself.
    pub fn agrees_with(&self, own: &Path, dir: &Path) -> Result<()> {
        let path = dir.join("config.json");
        if !path.exists() {
            return Ok(());
        }
        match self.difference(&Self::read(&path)?) {
            None => Ok(()),
            Some((field, mine, theirs)) => refuse(format!("{field} is {theirs}"))
                .file(path)
                .field(field)
                .wanted(format!("{mine}, as {} says", own.display()))
                .err(),
        }
    }

    /// The first field, in the order of the struct, in which another geometry differs: its name and both values.
    fn difference(&self, other: &Self) -> Option<(&'static str, String, String)> {
        macro_rules! compare {
            ($($field:ident),* $(; $list:ident as $name:literal $yes:literal $no:literal)*) => {
                // Naming every field makes a new one a compile error here.
                let Self { $($field: _,)* $($list: _,)* } = self;
                $(if self.$field != other.$field {
                    let name = if stringify!($field) == "rope" { "rope_parameters" } else { stringify!($field) };
                    return Some((name, self.$field.to_string(), other.$field.to_string()));
                })*
                $(if let Some(layer) = (0..self.$list.len()).find(|&layer| self.$list[layer] != other.$list[layer]) {
                    let word = |yes: bool| format!("{:?} for layer {layer}", if yes { $yes } else { $no });
                    return Some(($name, word(self.$list[layer]), word(other.$list[layer])));
                })*
            };
        }
        compare!(
            hidden_size, num_hidden_layers, vocab_size, intermediate_size, n_routed_experts, num_experts_per_tok,
            n_shared_experts, moe_intermediate_size, n_group, topk_group, norm_topk_prob, routed_scaling_factor,
            num_attention_heads, q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim,
            attention_bias, index_n_heads, index_head_dim, index_topk, rms_norm_eps, rope, max_position_embeddings,
            tie_word_embeddings;
            moe as "mlp_layer_types" "sparse" "dense";
            full_indexer as "indexer_types" "full" "shared"
        );
        None
    }
}
