//! What llama.cpp calls the weights of common checkpoints.
//!
//! Source: `gguf-py/gguf/constants.py` and `tensor_mapping.py` of ggml-org/llama.cpp.

/// Ways to the decoder layers.
const STEMS: [&str; 4] =
    ["model.layers.", "model.language_model.layers.", "language_model.model.layers.", "layers."];

/// Modules of a layer.
const MODULES: [(&str, &str); 24] = [
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.kv_b_proj", "attn_kv_b"),
    ("self_attn.indexer.wq_b", "indexer.attn_q_b"),
    ("self_attn.indexer.wk", "indexer.attn_k"),
    ("self_attn.indexer.weights_proj", "indexer.proj"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.gate", "ffn_gate_inp"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    ("eh_proj", "nextn.eh_proj"),
    ("mlp.router", "ffn_gate_inp"),
];

/// Matrices of an MLP or an expert.
const MATRICES: [(&str, &str); 6] = [
    ("gate_proj", "ffn_gate"),
    ("up_proj", "ffn_up"),
    ("down_proj", "ffn_down"),
    ("w1", "ffn_gate"),
    ("w3", "ffn_up"),
    ("w2", "ffn_down"),
];

/// The name of a weight in llama.cpp, and the expert where the experts of a layer are one tensor there; `None` of names
/// this table does not know.
pub fn llama_name(weight: &str) -> Option<(String, Option<u64>)> {
    let module = weight.strip_suffix(".weight")?;
    let of = |table: &[(&'static str, &'static str)], name: &str| {
        table.iter().find(|(theirs, _)| *theirs == name).map(|(_, ours)| *ours)
    };
    match module {
        "lm_head" => return Some(("output.weight".into(), None)),
        "model.embed_tokens" | "model.language_model.embed_tokens" => {
            return Some(("token_embd.weight".into(), None));
        }
        _ => {}
    }
    let inner = STEMS.iter().find_map(|stem| module.strip_prefix(stem))?;
    let (layer, inner) = inner.split_once('.')?;
    let layer: u64 = layer.parse().ok()?;
    let block = |name: &str| format!("blk.{layer}.{name}.weight");
    if let Some(name) = of(&MODULES, inner) {
        return Some((block(name), None));
    }
    let experts =
        ["mlp.experts.", "block_sparse_moe.experts."].iter().find_map(|stem| inner.strip_prefix(stem));
    if let Some((expert, matrix)) = experts.and_then(|inner| inner.split_once('.')) {
        let name = format!("{}_exps", of(&MATRICES, matrix)?);
        return Some((block(&name), Some(expert.parse().ok()?)));
    }
    let matrix = inner.strip_prefix("mlp.")?;
    Some((block(of(&MATRICES[..3], matrix)?), None))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_checkpoints_are_known() {
        for (weight, wanted, expert) in [
            ("model.layers.7.mlp.down_proj.weight", "blk.7.ffn_down.weight", None),
            ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight", None),
            ("model.layers.31.self_attn.o_proj.weight", "blk.31.attn_output.weight", None),
            ("model.layers.3.mlp.experts.17.up_proj.weight", "blk.3.ffn_up_exps.weight", Some(17)),
            ("model.layers.3.block_sparse_moe.experts.5.w2.weight", "blk.3.ffn_down_exps.weight", Some(5)),
            ("model.layers.4.mlp.shared_experts.gate_proj.weight", "blk.4.ffn_gate_shexp.weight", None),
            ("model.layers.4.mlp.shared_expert.down_proj.weight", "blk.4.ffn_down_shexp.weight", None),
            ("model.layers.4.mlp.gate.weight", "blk.4.ffn_gate_inp.weight", None),
            ("model.layers.9.self_attn.kv_a_proj_with_mqa.weight", "blk.9.attn_kv_a_mqa.weight", None),
            ("model.layers.9.self_attn.indexer.wq_b.weight", "blk.9.indexer.attn_q_b.weight", None),
            ("model.language_model.layers.2.mlp.gate_proj.weight", "blk.2.ffn_gate.weight", None),
            ("lm_head.weight", "output.weight", None),
            ("model.embed_tokens.weight", "token_embd.weight", None),
        ] {
            assert_eq!(llama_name(weight), Some((wanted.to_owned(), expert)), "{weight}");
        }
        for unknown in [
            "model.layers.7.mlp.down_proj",
            "model.layers.x.mlp.down_proj.weight",
            "model.layers.7.mlp.experts.x.up_proj.weight",
            "model.layers.7.mlp.w1.weight",
            "encoder.layer.2.output.dense.weight",
            "model.norm.weight",
        ] {
            assert_eq!(llama_name(unknown), None, "{unknown}");
        }
    }
}
