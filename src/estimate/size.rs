//! Bytes: shards to the byte, states, the source checkpoint, and what a walk holds in memory.

use std::collections::BTreeMap;

use serde::Serialize;

use super::tokens::Tokens;
use crate::checkpoint::names::{Projection, expert_module};
use crate::checkpoint::schema_v2::{MARKER, shared_names};
use crate::codec::trellis::pack;
use crate::config::{Geometry, Recipe};
use crate::error::Result;
use crate::store::tensor_dtype::TensorDtype;

/// JSON records an expert leaves behind in a layer, besides the channel orders: seen on the miniature.
const RECORDS_AN_EXPERT: u64 = 27_000;
/// The same a channel of its order, in two files.
const RECORDS_A_CHANNEL: u64 = 10;
/// JSON a prompt takes in a layer's records.
const RECORDS_A_PROMPT: u64 = 190;

/// Logits of a model that the evaluation holds at a time.
const LOGITS_IN_WORK: f64 = (1 << 23) as f64;

/// A tensor of a file to be: name, type, shape.
type Outline = (String, TensorDtype, Vec<usize>);

/// Length of a safetensors file as [`crate::store::safetensors_write`] writes it, its header included.
fn file_bytes(metadata: &[(&str, &str)], mut tensors: Vec<Outline>) -> u64 {
    // Payloads by width descending, then name; header entries by name.
    tensors.sort_by(|a, b| b.1.size().cmp(&a.1.size()).then_with(|| a.0.cmp(&b.0)));
    let (mut cursor, mut entries) = (0u64, 0usize);
    for (name, dtype, shape) in &tensors {
        let end = cursor + shape.iter().product::<usize>() as u64 * dtype.size() as u64;
        let shape: Vec<String> = shape.iter().map(usize::to_string).collect();
        let entry = format!(
            "\"{name}\":{{\"data_offsets\":[{cursor},{end}],\"dtype\":\"{dtype}\",\"shape\":[{}]}}",
            shape.join(",")
        );
        entries += entry.len() + 1;
        cursor = end;
    }
    let pairs: usize = metadata.iter().map(|(key, value)| key.len() + value.len() + 6).sum();
    let metadata = if metadata.is_empty() { 0 } else { "\"__metadata__\":{},".len() + pairs - 1 };
    // Braces around it, and one comma less than there are entries.
    let header = (1 + metadata + entries).next_multiple_of(8) as u64;
    8 + header + cursor
}

/// Length of a schema-v2 shard of experts of a layer, each with the bits of gate, up, down.
pub fn shard_bytes(
    layer: usize,
    (hidden, intermediate): (usize, usize),
    experts: impl IntoIterator<Item = (usize, [u32; 3])>,
) -> u64 {
    let (gate_up_suh, down_svh) = shared_names(layer);
    let mut tensors: Vec<Outline> =
        vec![(gate_up_suh, TensorDtype::F16, vec![hidden]), (down_svh, TensorDtype::F16, vec![hidden])];
    for (id, bits) in experts {
        for (role, bits) in Projection::ALL.iter().zip(bits) {
            let name = |part: &str| format!("{}.{part}", expert_module(layer, id, *role));
            let (k, n, own) = match role {
                Projection::Down => (intermediate, hidden, "suh"),
                _ => (hidden, intermediate, "svh"),
            };
            tensors.push((name("trellis"), TensorDtype::I16, vec![k / 16, n / 16, pack::words(bits)]));
            tensors.push((name(own), TensorDtype::F16, vec![intermediate]));
            tensors.push((name("mcg"), TensorDtype::I32, Vec::new()));
        }
    }
    let layer = layer.to_string();
    file_bytes(&[("format", "pt"), ("r7_schema", "2"), ("r7_layer", &layer), ("r7_marker", MARKER)], tensors)
}

/// Bits of a layer's experts that meet the recipe's target, upgrades spread evenly: which tensors get them changes the
/// length of a shard by some digits of its header at most.
///
/// # Errors
/// As [`Recipe::upgrades`].
pub fn even_bits(geometry: &Geometry, recipe: &Recipe) -> Result<Vec<[u32; 3]>> {
    let experts = geometry.n_routed_experts;
    let tensors = 3 * experts as u64;
    let upgrades = recipe.upgrades(tensors)?;
    let bits = |tensor: u64| {
        let before = |count: u64| count * upgrades / tensors;
        recipe.floor_bits + (before(tensor + 1) - before(tensor)) as u32
    };
    Ok((0..experts as u64).map(|id| [bits(3 * id), bits(3 * id + 1), bits(3 * id + 2)]).collect())
}

/// What a walk leaves on disk, and what of it comes and goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Disk {
    /// The v2 shards of all MoE layers: the result.
    pub v2_shards: u64,
    /// One of them, the widest numbered.
    pub v2_shard_of_a_layer: u64,
    /// Finished experts, sealed one by one; they are kept.
    pub final_experts: u64,
    /// Routing ids and weights of every layer; they are kept.
    pub routing: u64,
    /// JSON records, about.
    pub records: u64,
    /// One layer's state: hidden values, key lists, positions, ids.
    pub state: u64,
    /// All of it at the worst moment: two states beside what is kept.
    pub peak: u64,
}

/// Bytes on disk of a walk.
///
/// # Errors
/// As [`Recipe::upgrades`].
pub fn disk(geometry: &Geometry, recipe: &Recipe, tokens: &Tokens) -> Result<Disk> {
    let sizes = (geometry.hidden_size, geometry.moe_intermediate_size);
    let bits = even_bits(geometry, recipe)?;
    let numbered = || bits.iter().copied().enumerate();
    let layers = geometry.moe_layers();
    let v2: Vec<u64> = layers.iter().map(|&layer| shard_bytes(layer, sizes, numbered())).collect();
    let single = |layer: usize| numbered().map(|expert| shard_bytes(layer, sizes, [expert])).sum::<u64>();
    let prompts = tokens.prompts as u64;
    let count = layers.len() as u64;
    let rows = tokens.calibrate;
    let a_row = 8 * geometry.num_experts_per_tok as u64;
    let records = geometry.n_routed_experts as u64
        * (RECORDS_AN_EXPERT + RECORDS_A_CHANNEL * geometry.moe_intermediate_size as u64)
        + RECORDS_A_PROMPT * prompts;
    let disk = Disk {
        v2_shards: v2.iter().sum(),
        v2_shard_of_a_layer: v2.iter().copied().max().unwrap_or(0),
        final_experts: layers.iter().map(|&layer| single(layer)).sum(),
        routing: count * (rows * a_row + prompts * 160),
        records: count * records,
        state: state_bytes(geometry, tokens),
        peak: 0,
    };
    let kept = disk.v2_shards + disk.final_experts + disk.routing + disk.records;
    Ok(Disk { peak: kept + 2 * disk.state, ..disk })
}

/// Bytes of one layer's state: per token hidden BF16 `[H]`, position, id, and at most `index_topk` keys of its prompt.
pub fn state_bytes(geometry: &Geometry, tokens: &Tokens) -> u64 {
    let keys = tokens.mean_length().min(geometry.index_topk as f64);
    let a_token = 2.0 * geometry.hidden_size as f64 + 8.0 + 4.0 * keys;
    (tokens.calibrate as f64 * a_token) as u64 + 400 * tokens.prompts as u64
}

/// Weights of a whole checkpoint, in parts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Parameters {
    /// Routed experts of the walked layers.
    pub routed: u64,
    /// Routed experts of the MTP layers.
    pub mtp_routed: u64,
    /// Everything else.
    pub carried: u64,
    /// F32 router biases, part of `carried`.
    pub router_biases: u64,
}

impl Parameters {
    /// Counts them; `mtp_layers` is the config's `num_nextn_predict_layers`.
    pub fn of(geometry: &Geometry, mtp_layers: u64) -> Self {
        let g = |size: usize| size as u64;
        let (h, experts) = (g(geometry.hidden_size), g(geometry.n_routed_experts));
        let expert = 3 * h * g(geometry.moe_intermediate_size);
        let feed = 3 * h * g(geometry.shared_intermediate_size()) + experts * h;
        let norms = 2 * h;
        let attention = attention_weights(geometry) + g(geometry.q_lora_rank) + g(geometry.kv_lora_rank);
        let indexer = indexer_weights(geometry) + 2 * g(geometry.index_head_dim);
        let moe = g(geometry.moe_layers().len());
        let layers = g(geometry.num_hidden_layers);
        let full = (0..geometry.num_hidden_layers).filter(|&layer| geometry.indexer_is_full(layer)).count();
        let dense = (layers - moe) * 3 * h * g(geometry.intermediate_size);
        let ends = if geometry.tie_word_embeddings { 1 } else { 2 } * g(geometry.vocab_size) * h + h;
        // enorm, hnorm, shared_head.norm and eh_proj beside a decoder layer with an indexer of its own.
        let mtp = mtp_layers * (attention + indexer + norms + feed + 3 * h + 2 * h * h);
        let biases = (moe + mtp_layers) * experts;
        Self {
            routed: moe * experts * expert,
            mtp_routed: mtp_layers * experts * expert,
            carried: layers * (attention + norms)
                + g(full) * indexer
                + moe * feed
                + dense
                + ends
                + mtp
                + biases,
            router_biases: biases,
        }
    }

    /// Bytes of a plain BF16 checkpoint.
    pub fn bf16_bytes(&self) -> u64 {
        2 * (self.routed + self.mtp_routed + self.carried) + 2 * self.router_biases
    }

    /// Bytes of all but the walked layers' routed experts, in BF16.
    pub fn carried_bf16_bytes(&self) -> u64 {
        2 * (self.mtp_routed + self.carried) + 2 * self.router_biases
    }
}

/// Matrix weights of an attention module, indexer left out.
pub fn attention_weights(geometry: &Geometry) -> u64 {
    let g = |size: usize| size as u64;
    let (h, heads) = (g(geometry.hidden_size), g(geometry.num_attention_heads));
    let (q, kv) = (g(geometry.q_lora_rank), g(geometry.kv_lora_rank));
    let (nope, rope, v) =
        (g(geometry.qk_nope_head_dim), g(geometry.qk_rope_head_dim), g(geometry.v_head_dim));
    h * q + q * heads * (nope + rope) + h * (kv + rope) + kv * heads * (nope + v) + heads * v * h
}

/// Matrix weights of an indexer.
pub fn indexer_weights(geometry: &Geometry) -> u64 {
    let g = |size: usize| size as u64;
    let (heads, width) = (g(geometry.index_n_heads), g(geometry.index_head_dim));
    g(geometry.q_lora_rank) * heads * width + g(geometry.hidden_size) * (width + heads)
}

/// What a walk holds at a time, about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Rows, routing and router scores of the layer in hand.
    pub capture: u64,
    /// One expert at work, with its covariance sums, factors and encode buffers.
    pub expert: u64,
    /// Experts at work at a time: one a thread.
    pub experts_at_work: u64,
    /// Factors the encoder remembers.
    pub remembered_factors: u64,
    /// Prompts of a batch going through a layer, and the layer's own weights.
    pub forward: u64,
    /// The evaluation: final states of both models, both heads, logits in work.
    pub evaluation: u64,
    /// The largest sum of what is held together.
    pub peak: u64,
}

/// Bytes in memory of a walk on so many threads.
pub fn memory(geometry: &Geometry, recipe: &Recipe, tokens: &Tokens, threads: usize) -> Memory {
    let (h, i) = (geometry.hidden_size as f64, geometry.moe_intermediate_size as f64);
    let rows = super::cost::Rows::of(geometry, recipe, tokens);
    let all = tokens.calibrate as f64;
    let experts = geometry.n_routed_experts as f64;
    let capture = all * (4.0 * h + 4.0 * experts + 4.0 * geometry.num_experts_per_tok as f64);
    // Source and permuted weights, reconstructions, rows with their derived ones, and either the covariance with its sum
    // and factor in the making or the buffers of an encode.
    let weights = 3.0 * 4.0 * h * i;
    let derived = rows.calibrating() * 4.0 * (h + 4.0 * i) + rows.holdout * 4.0 * (3.0 * h + 2.0 * i);
    let square = h.max(i).powi(2);
    let expert = 3.0 * weights + derived + square * (4.0 + 8.0 + 8.0) + 5.0 * 4.0 * h * i;
    let at_work = (threads as f64).min(experts);
    let remembered = (threads as f64 + 1.0) * square * 8.0;
    let layer = 4.0 * (attention_weights(geometry) + indexer_weights(geometry)) as f64
        + 4.0 * 3.0 * h * geometry.shared_intermediate_size() as f64;
    let batch = (crate::corpus::batch::BATCH_TOKENS as f64).min(all).max(tokens.mean_length());
    let forward = layer + batch * 4.0 * (8.0 * h + 3.0 * i) + 4.0 * weights;
    let head = 4.0 * geometry.vocab_size as f64 * h;
    let evaluation = match tokens.evaluate {
        0 => 0.0,
        scored => 2.0 * (scored as f64 * 4.0 * h + head + 4.0 * LOGITS_IN_WORK),
    };
    let peak = (capture + at_work * expert + remembered).max(capture + forward).max(evaluation).max(head);
    Memory {
        capture: capture as u64,
        expert: expert as u64,
        experts_at_work: at_work as u64,
        remembered_factors: remembered as u64,
        forward: forward as u64,
        evaluation: evaluation as u64,
        peak: peak as u64,
    }
}

/// Bytes of an encoded layer's tensors by part: trellis words, private vectors, shared vectors and markers, header.
pub fn shard_parts(
    geometry: &Geometry,
    recipe: &Recipe,
    layer: usize,
) -> Result<BTreeMap<&'static str, u64>> {
    let bits = even_bits(geometry, recipe)?;
    let (h, i) = (geometry.hidden_size as u64, geometry.moe_intermediate_size as u64);
    let units: u64 = bits.iter().flatten().map(|&b| u64::from(b)).sum();
    let tensors = 3 * bits.len() as u64;
    let trellis = units * h * i / 8;
    let (private, shared, markers) = (2 * tensors * i, 4 * h, 4 * tensors);
    let sizes = (geometry.hidden_size, geometry.moe_intermediate_size);
    let whole = shard_bytes(layer, sizes, bits.into_iter().enumerate());
    Ok(BTreeMap::from([
        ("trellis", trellis),
        ("private vectors", private),
        ("shared vectors", shared),
        ("markers", markers),
        ("header", whole - trellis - private - shared - markers),
    ]))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::checkpoint::schema_v2::{PackedExpert, write_shard};
    use crate::codec::trellis::codebook::Codebook;
    use crate::codec::trellis::linear::TrellisLinear;
    use half::f16;

    fn geometry(model: &str) -> Geometry {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("models").join(model);
        Geometry::read(&folder.join("config.json")).unwrap()
    }

    #[test]
    fn a_shard_is_as_long_as_it_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let linear = |k: usize, n: usize, bits: u32| {
            let words = k / 16 * (n / 16) * pack::words(bits);
            let ones = |n: usize| vec![f16::ONE; n];
            TrellisLinear::new((k, n), bits, Codebook::Mcg, vec![0; words], ones(k), ones(n)).unwrap()
        };
        // Ids and offsets of one, two and three digits; all widths; one expert alone.
        for (layer, ids) in [(7usize, 0..12usize), (77, 98..102), (3, 5..6)] {
            let bits = |id: usize| [3 + (id % 3) as u32, 4, 5 - (id % 2) as u32];
            let packed = |id: usize| -> PackedExpert {
                let [gate, up, down] = bits(id);
                [linear(256, 128, gate), linear(256, 128, up), linear(128, 256, down)]
            };
            let experts: Vec<(usize, PackedExpert)> = ids.clone().map(|id| (id, packed(id))).collect();
            let path = dir.path().join(format!("{layer}.safetensors"));
            let written = write_shard(&path, layer, &experts).unwrap();
            let numbered = ids.map(|id| (id, bits(id)));
            assert_eq!(shard_bytes(layer, (256, 128), numbered), written.bytes, "layer {layer}");
        }
    }

    #[test]
    fn even_bits_meet_the_target() {
        let recipe = Recipe::built_in().unwrap();
        let bits = even_bits(&geometry("glm52"), &recipe).unwrap();
        assert_eq!(bits.iter().flatten().sum::<u32>(), 2688);
        assert!(bits.iter().flatten().all(|&b| b == 3 || b == 4));
    }

    #[test]
    fn a_checkpoint_is_counted_to_the_byte() {
        let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/tiny");
        let checkpoint = crate::checkpoint::CheckpointDir::open(&tiny).unwrap();
        let stored: u64 = checkpoint
            .names()
            .map(|name| {
                let place = checkpoint.info(name).unwrap();
                place.info.end - place.info.start
            })
            .sum();
        let with_mtp = checkpoint.names().any(|name| name.starts_with("model.layers.5."));
        let parameters = Parameters::of(&geometry("tiny"), u64::from(with_mtp));
        assert_eq!(parameters.bf16_bytes(), stored);
    }

    #[test]
    fn glm52_weighs_what_arithmetic_says() {
        let (geometry, recipe) = (geometry("glm52"), Recipe::built_in().unwrap());
        let parts = shard_parts(&geometry, &recipe, 3).unwrap();
        // 768 matrices of 6144 x 2048 at 3.5 bits.
        assert_eq!(parts["trellis"], 768 * 6144 * 2048 * 7 / 16);
        assert_eq!(parts["private vectors"], 768 * 2048 * 2);
        let whole: u64 = parts.values().sum();
        let tokens = Tokens::assumed(1_000_000, &[2048]);
        let disk = disk(&geometry, &recipe, &tokens).unwrap();
        assert!(disk.v2_shards.abs_diff(75 * whole) < 75 * 4096);
        let parameters = Parameters::of(&geometry, 1);
        assert_eq!(parameters.routed, 75 * 768 * 6144 * 2048);
        // 12 GiB of hidden values and 8 of key lists for a million tokens, as the record has it.
        assert!((19.0..20.5).contains(&(disk.state as f64 / (1u64 << 30) as f64)), "{}", disk.state);
    }
}
