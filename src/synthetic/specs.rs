//! Which tensors a checkpoint has, with shapes and types: of a BF16 model, and of packed v2 layers.

use super::noise::Noise;
use crate::checkpoint::names::{self, Projection};
use crate::checkpoint::schema_v2::{linear_names, shared_names};
use crate::codec::trellis::pack;
use crate::codec::trellis::tile::TILE_DIM;
use crate::config::Geometry;
use crate::store::safetensors_stream::TensorSpec;
use crate::store::tensor_dtype::TensorDtype;

/// A tensor of a BF16 model and what its values are.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelTensor {
    /// Name, type and shape.
    pub spec: TensorSpec,
    /// Its values.
    pub noise: Noise,
}

/// All tensors of a model, in the order embeddings, layers, MTP block (where `mtp`), final norm, head.
pub fn model_tensors(geometry: &Geometry, mtp: bool) -> Vec<ModelTensor> {
    let mut list = List(Vec::new());
    let (vocabulary, hidden) = (geometry.vocab_size, geometry.hidden_size);
    // The first norm brings any size to one.
    list.add(names::EMBED_TOKENS, &[vocabulary, hidden], Noise { centre: 0.0, deviation: 1.0 });
    for layer in 0..geometry.num_hidden_layers {
        let indexer = geometry.indexer_is_full(layer);
        list.layer(geometry, layer, indexer, geometry.is_moe(layer));
    }
    if mtp {
        list.mtp(geometry);
    }
    list.norm(names::NORM.to_owned(), hidden);
    if !geometry.tie_word_embeddings {
        list.linear(names::LM_HEAD.to_owned(), vocabulary, hidden);
    }
    list.0
}

struct List(Vec<ModelTensor>);

impl List {
    fn add(&mut self, name: impl Into<String>, shape: &[usize], noise: Noise) {
        self.0.push(ModelTensor { spec: TensorSpec::new(name, TensorDtype::BF16, shape), noise });
    }

    /// Inputs of unit size give outputs of unit size.
    fn linear(&mut self, name: String, out: usize, input: usize) {
        self.add(name, &[out, input], Noise { centre: 0.0, deviation: 1.0 / (input as f32).sqrt() });
    }

    fn norm(&mut self, name: String, width: usize) {
        self.add(name, &[width], Noise { centre: 1.0, deviation: 0.05 });
    }

    fn bias(&mut self, name: String, width: usize) {
        self.add(name, &[width], Noise { centre: 0.0, deviation: 0.05 });
    }

    fn mlp(&mut self, name: impl Fn(Projection) -> String, hidden: usize, inner: usize) {
        for projection in Projection::ALL {
            let (out, input) = if projection == Projection::Down { (hidden, inner) } else { (inner, hidden) };
            self.linear(name(projection), out, input);
        }
    }

    fn layer(&mut self, geometry: &Geometry, layer: usize, indexer: bool, moe: bool) {
        let hidden = geometry.hidden_size;
        self.norm(names::input_layernorm(layer), hidden);
        self.attention(geometry, layer);
        if indexer {
            self.indexer(geometry, layer);
        }
        self.norm(names::post_attention_layernorm(layer), hidden);
        if moe {
            self.moe(geometry, layer);
        } else {
            self.mlp(|p| names::dense_mlp(layer, p), hidden, geometry.intermediate_size);
        }
    }

    fn attention(&mut self, geometry: &Geometry, layer: usize) {
        let (hidden, heads) = (geometry.hidden_size, geometry.num_attention_heads);
        let (q_rank, kv_rank) = (geometry.q_lora_rank, geometry.kv_lora_rank);
        let (nope, value) = (geometry.qk_nope_head_dim, geometry.v_head_dim);
        let kv_a = kv_rank + geometry.qk_rope_head_dim;
        for (module, out, input) in [
            ("q_a_proj", q_rank, hidden),
            ("q_b_proj", heads * geometry.qk_head_dim(), q_rank),
            ("kv_a_proj_with_mqa", kv_a, hidden),
            ("kv_b_proj", heads * (nope + value), kv_rank),
            ("o_proj", hidden, heads * value),
        ] {
            self.linear(names::attention(layer, module), out, input);
        }
        self.norm(names::attention(layer, "q_a_layernorm"), q_rank);
        self.norm(names::attention(layer, "kv_a_layernorm"), kv_rank);
        if geometry.attention_bias {
            for (module, out) in [("q_a_proj", q_rank), ("kv_a_proj_with_mqa", kv_a), ("o_proj", hidden)] {
                self.bias(names::attention_bias(layer, module), out);
            }
        }
    }

    fn indexer(&mut self, geometry: &Geometry, layer: usize) {
        let (heads, width) = (geometry.index_n_heads, geometry.index_head_dim);
        self.linear(names::indexer(layer, "wq_b"), heads * width, geometry.q_lora_rank);
        self.linear(names::indexer(layer, "wk"), width, geometry.hidden_size);
        self.linear(names::indexer(layer, "weights_proj"), heads, geometry.hidden_size);
        self.norm(names::indexer(layer, "k_norm"), width);
        self.bias(names::indexer_k_norm_bias(layer), width);
    }

    fn moe(&mut self, geometry: &Geometry, layer: usize) {
        let (hidden, experts) = (geometry.hidden_size, geometry.n_routed_experts);
        self.linear(names::router(layer), experts, hidden);
        // F32, and small beside the scores, so that every expert gets about its share of the rows.
        self.bias(names::router_bias(layer), experts);
        if let Some(bias) = self.0.last_mut() {
            bias.spec.dtype = TensorDtype::F32;
            bias.noise.deviation = 0.005;
        }
        self.mlp(|p| names::shared_experts(layer, p), hidden, geometry.shared_intermediate_size());
        for expert in 0..experts {
            self.mlp(|p| names::expert(layer, expert, p), hidden, geometry.moe_intermediate_size);
        }
    }

    /// The MTP block: a MoE layer with a full indexer, behind its own projection and norms.
    fn mtp(&mut self, geometry: &Geometry) {
        let (layer, hidden) = (geometry.mtp_layer(), geometry.hidden_size);
        let [projection, embedding_norm, hidden_norm, head] = names::mtp_prefixes(layer);
        self.linear(format!("{projection}weight"), hidden, 2 * hidden);
        self.norm(format!("{embedding_norm}weight"), hidden);
        self.norm(format!("{hidden_norm}weight"), hidden);
        self.norm(format!("{head}norm.weight"), hidden);
        self.layer(geometry, layer, true, true);
    }
}

/// Bits of a module where `cycle` is dealt out to gate, up and down of expert 0, of expert 1, and so on: `[3, 4]` gives a mean
/// of 3.5.
pub fn bits_of(cycle: &[u32], expert: usize, projection: Projection) -> u32 {
    cycle[(Projection::ALL.len() * expert + projection as usize) % cycle.len()]
}

/// Inputs and outputs of a projection of a routed expert.
pub fn sizes(geometry: &Geometry, projection: Projection) -> (usize, usize) {
    let (hidden, inner) = (geometry.hidden_size, geometry.moe_intermediate_size);
    if projection == Projection::Down { (inner, hidden) } else { (hidden, inner) }
}

/// All tensors of a layer's v2 shard.
pub fn v2_tensors(geometry: &Geometry, layer: usize, experts: usize, cycle: &[u32]) -> Vec<TensorSpec> {
    let (gate_up_suh, down_svh) = shared_names(layer);
    let vector = |name: String, length: usize| TensorSpec::new(name, TensorDtype::F16, &[length]);
    let mut list = vec![vector(gate_up_suh, geometry.hidden_size), vector(down_svh, geometry.hidden_size)];
    for expert in 0..experts {
        for projection in Projection::ALL {
            let names = linear_names(layer, expert, projection);
            let (k, n) = sizes(geometry, projection);
            let words = pack::words(bits_of(cycle, expert, projection));
            let trellis = [k / TILE_DIM, n / TILE_DIM, words];
            list.push(TensorSpec::new(names.trellis, TensorDtype::I16, &trellis));
            let private = if projection == Projection::Down { names.suh } else { names.svh };
            list.push(vector(private, geometry.moe_intermediate_size));
            list.extend(names.marker.map(|name| TensorSpec::new(name, TensorDtype::I32, &[])));
        }
    }
    list
}
