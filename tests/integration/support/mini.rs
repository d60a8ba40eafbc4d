//! A mini model made on the spot: width 128, seeded random weights, the tiny model's tokenizer. A walk of it takes a few
//! seconds, so that whole walks can be run, broken and compared.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use half::bf16;
use serde_json::json;
use walk::checkpoint::names::{self, Projection};
use walk::store::safetensors_write::{TensorData, write_safetensors};
use walk::store::seed::{SplitMix64, derive_seed};

/// Hidden size and expert width: one Hadamard block each.
pub const WIDTH: usize = 128;
/// Routed experts.
pub const EXPERTS: usize = 2;
/// Decoder layers: one dense, two MoE.
pub const LAYERS: usize = 3;
const VOCAB: usize = 2048;
const Q_RANK: usize = 64;
const KV_RANK: usize = 32;
const HEADS: usize = 2;
const NOPE: usize = 16;
const ROPE: usize = 8;
const VALUE: usize = 16;
const INDEX_HEADS: usize = 2;
const INDEX_DIM: usize = 16;

/// One stored tensor: name, shape, values. A bias vector is F32, everything else BF16.
pub type MiniTensor = (String, Vec<usize>, Vec<f32>);

/// A folder with a mini model and a plan for it.
pub struct Mini {
    folder: tempfile::TempDir,
}

impl Mini {
    /// The model as it should be.
    pub fn new() -> Self {
        Self::with(|_| {})
    }

    /// The model with its tensors changed before they are written.
    pub fn with(change: impl FnOnce(&mut Vec<MiniTensor>)) -> Self {
        Self::made(WIDTH, change)
    }

    /// The model with experts two Hadamard blocks wide, which two ranks can share, and an MTP block with an expert.
    pub fn wide() -> Self {
        Self::made(2 * WIDTH, |tensors| {
            let values = |n: usize| (0..n).map(|i| (i % 7) as f32 - 3.0).collect::<Vec<f32>>();
            let experts = names::expert(LAYERS, 0, Projection::Gate);
            tensors.push((experts, vec![2 * WIDTH, WIDTH], values(2 * WIDTH * WIDTH)));
            tensors.push((format!("{}eh_proj.weight", names::layer_prefix(LAYERS)), vec![4, 2], values(8)));
        })
    }

    fn made(width: usize, change: impl FnOnce(&mut Vec<MiniTensor>)) -> Self {
        let mini = Self { folder: tempfile::tempdir().unwrap() };
        let model = mini.model();
        std::fs::create_dir(&model).unwrap();
        std::fs::write(model.join("config.json"), config(width).to_string()).unwrap();
        let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/tiny/tokenizer.json");
        std::fs::copy(tokenizer, model.join("tokenizer.json")).unwrap();
        std::fs::write(
            model.join("model.json"),
            r#"{"description":"mini","prefix_tokens":["<|endoftext|>"]}"#,
        )
        .unwrap();
        let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/tiny/recipe.json");
        let mut recipe: serde_json::Value = serde_json::from_slice(&std::fs::read(recipe).unwrap()).unwrap();
        // Samples would take most of a mini walk's time; what one round of allocation gives is enough for most tests.
        for (field, value) in
            [("scale_sample_tiles", 2), ("sketch_tiles", 2), ("draws", 2), ("fixed_point_iterations", 1)]
        {
            recipe[field] = json!(value);
        }
        std::fs::write(model.join("recipe.json"), recipe.to_string()).unwrap();
        let mut tensors = tensors(width);
        change(&mut tensors);
        let data: Vec<TensorData<'_>> =
            tensors.iter().map(|(name, shape, values)| tensor(name, shape, values)).collect();
        write_safetensors(model.join("model.safetensors"), &BTreeMap::new(), &data).unwrap();
        let plan = json!({"version": 1, "prompts": [
            noise("a", "calibrate", 1, 200),
            noise("b", "calibrate", 2, 90),
            noise("c", "calibrate", 3, 1),
            noise("d", "evaluate", 4, 60),
        ]});
        std::fs::write(mini.plan(), plan.to_string()).unwrap();
        mini
    }

    /// Its temporary folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The model directory.
    pub fn model(&self) -> PathBuf {
        self.path().join("mini")
    }

    /// The plan.
    pub fn plan(&self) -> PathBuf {
        self.path().join("plan.json")
    }

    /// A work directory of this name.
    pub fn work(&self, name: &str) -> PathBuf {
        self.path().join("work").join(name)
    }
}

/// A plan's prompt of seeded random tokens.
pub fn noise(id: &str, usage: &str, seed: u64, length: usize) -> serde_json::Value {
    let mut random = SplitMix64::new(seed);
    let ids: Vec<u64> = (0..length).map(|_| 1 + random.below(VOCAB as u64 - 1)).collect();
    json!({"id": id, "axis": "noise", "use": usage, "token_ids": ids})
}

fn tensor(name: &str, shape: &[usize], values: &[f32]) -> TensorData<'static> {
    if name.ends_with("correction_bias") {
        return TensorData::f32(name, shape, values);
    }
    let values: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
    TensorData::bf16(name, shape, &values)
}

fn config(width: usize) -> serde_json::Value {
    json!({
        "model_type": "glm_moe_dsa", "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "vocab_size": VOCAB,
        "intermediate_size": WIDTH, "moe_intermediate_size": width, "first_k_dense_replace": 1,
        "n_routed_experts": EXPERTS, "num_experts_per_tok": 1, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": true, "routed_scaling_factor": 1.5, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "q_lora_rank": Q_RANK, "kv_lora_rank": KV_RANK, "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "index_n_heads": INDEX_HEADS, "index_head_dim": INDEX_DIM,
        "index_topk": 32, "indexer_types": ["full", "full", "shared"], "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "max_position_embeddings": 512,
        "attention_bias": false, "hidden_act": "silu", "mlp_bias": false, "tie_word_embeddings": false,
        "num_nextn_predict_layers": 0
    })
}

fn tensors(width: usize) -> Vec<MiniTensor> {
    let mut out = Vec::new();
    let mut add = |name: String, shape: &[usize], centre: f32, spread: f32| {
        let mut random = SplitMix64::new(derive_seed(&["mini".into(), name.as_str().into()]));
        let mut uniform = || (random.next_u64() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        let count = shape.iter().product();
        let values = (0..count).map(|_| centre + spread * uniform()).collect();
        out.push((name, shape.to_vec(), values));
    };
    add("model.embed_tokens.weight".into(), &[VOCAB, WIDTH], 0.0, 1.0);
    add("lm_head.weight".into(), &[VOCAB, WIDTH], 0.0, 0.2);
    add("model.norm.weight".into(), &[WIDTH], 1.0, 0.1);
    for layer in 0..LAYERS {
        let spread = |inputs: usize| 1.5 / (inputs as f32).sqrt();
        add(names::input_layernorm(layer), &[WIDTH], 1.0, 0.1);
        add(names::post_attention_layernorm(layer), &[WIDTH], 1.0, 0.1);
        for (module, shape) in [
            ("q_a_proj", [Q_RANK, WIDTH]),
            ("q_b_proj", [HEADS * (NOPE + ROPE), Q_RANK]),
            ("kv_a_proj_with_mqa", [KV_RANK + ROPE, WIDTH]),
            ("kv_b_proj", [HEADS * (NOPE + VALUE), KV_RANK]),
            ("o_proj", [WIDTH, HEADS * VALUE]),
        ] {
            add(names::attention(layer, module), &shape, 0.0, spread(shape[1]));
        }
        add(names::attention(layer, "q_a_layernorm"), &[Q_RANK], 1.0, 0.1);
        add(names::attention(layer, "kv_a_layernorm"), &[KV_RANK], 1.0, 0.1);
        if layer < 2 {
            add(names::indexer(layer, "wq_b"), &[INDEX_HEADS * INDEX_DIM, Q_RANK], 0.0, spread(Q_RANK));
            add(names::indexer(layer, "wk"), &[INDEX_DIM, WIDTH], 0.0, spread(WIDTH));
            add(names::indexer(layer, "weights_proj"), &[INDEX_HEADS, WIDTH], 0.0, spread(WIDTH));
            add(names::indexer(layer, "k_norm"), &[INDEX_DIM], 1.0, 0.1);
            add(names::indexer_k_norm_bias(layer), &[INDEX_DIM], 0.0, 0.1);
        }
        let all = [Projection::Gate, Projection::Up, Projection::Down];
        if layer == 0 {
            all.iter().for_each(|&p| add(names::dense_mlp(layer, p), &[WIDTH, WIDTH], 0.0, spread(WIDTH)));
            continue;
        }
        add(names::router(layer), &[EXPERTS, WIDTH], 0.0, 0.1);
        add(names::router_bias(layer), &[EXPERTS], 0.0, 0.01);
        let shape = |p| if p == Projection::Down { [WIDTH, width] } else { [width, WIDTH] };
        all.iter().for_each(|&p| add(names::shared_experts(layer, p), &shape(p), 0.0, spread(shape(p)[1])));
        for expert in 0..EXPERTS {
            all.iter()
                .for_each(|&p| add(names::expert(layer, expert, p), &shape(p), 0.0, spread(shape(p)[1])));
        }
    }
    out
}
