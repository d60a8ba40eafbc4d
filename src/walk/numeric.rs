//! The numeric environment: what has to compute the same bytes for a walk to be resumed.
//!
//! The kernels of the tile search and of the matrix products are bit-equal on all instruction sets, but `exp`, `ln`, `sin`
//! and `cos` come from the system's library, and a library of this build may be of another version. So the environment is
//! not described but measured: a fixed small model is run over two fixed prompts, one of its experts is encoded and decoded
//! behind the rows that come out, and the SHA-256 of all of it is the fingerprint. That of a KAIJU1 walk has an expert of that
//! codec behind it. Threads do not enter it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicUsize;

use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::checkpoint::WeightSource;
use crate::checkpoint::names::Projection;
use crate::choose::expert::{Expert, ExpertWeights, decode};
use crate::choose::vectors::{ExpertChoice, SharedChoice, expert_vectors, shared_vectors};
use crate::codec::Codec;
use crate::codec::trellis::encode::TrellisCodec;
use crate::codec::trellis::search::TileSearch;
use crate::codec::weight::KaijuCodec;
use crate::config::choices::CodecName;
use crate::config::kaiju1::Kaiju1;
use crate::config::recipe::Rational;
use crate::config::{Geometry, Recipe};
use crate::error::Result;
use crate::linalg::Matrix;
use crate::model::{Embedding, Head, Layer, round_bf16};
use crate::store::hash::{Hash, hex, sha256_hex};
use crate::store::seed::{SplitMix64, derive_seed};

/// The exact versions of all libraries of this build.
const DEPENDENCIES: &str = include_str!("../../Cargo.lock");

/// What computes a walk's bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NumericEnvironment {
    /// Version of this program.
    pub build_version: String,
    /// SHA-256 of its `Cargo.lock`: the exact versions of its libraries.
    pub dependencies_sha256: Hash,
    /// SHA-256 of a fixed small forward, encode and decode.
    pub numeric_fingerprint: Hash,
}

impl NumericEnvironment {
    /// Measures this process.
    ///
    /// # Errors
    /// None on a machine that computes.
    pub fn measure(search: &'static dyn TileSearch, codec: CodecName) -> Result<Self> {
        Ok(Self {
            build_version: env!("CARGO_PKG_VERSION").to_owned(),
            dependencies_sha256: sha256_hex(DEPENDENCIES.as_bytes()),
            numeric_fingerprint: fingerprint(search, codec)?,
        })
    }

    /// The fields by name, as they enter a walk's identity.
    pub fn fields(&self) -> BTreeMap<String, String> {
        let Self { build_version, dependencies_sha256, numeric_fingerprint } = self;
        let fields = [
            ("build_version", build_version),
            ("dependencies_sha256", dependencies_sha256),
            ("numeric_fingerprint", numeric_fingerprint),
        ];
        fields.map(|(name, value)| (name.to_owned(), value.clone())).into()
    }
}

/// Width of everything in the fixed model that is not a head.
const WIDTH: usize = 128;

/// Weights made on demand: uniform values seeded by the tensor's name.
struct Seeded;

impl WeightSource for Seeded {
    fn contains(&self, _: &str) -> bool {
        true
    }

    fn load(&self, name: &str, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
        let norm = name.ends_with("norm.weight");
        let (centre, spread) = match shape {
            [_, inputs] => (0.0, 1.5 / (*inputs as f32).sqrt()),
            _ if norm => (1.0, 0.1),
            _ => (0.0, 0.1),
        };
        let mut random = SplitMix64::new(derive_seed(&["fingerprint".into(), name.into()]));
        let mut uniform = || (random.next_u64() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| centre + spread * uniform()).collect();
        Ok(Tensor::from_vec(values, shape, device)?.to_dtype(dtype)?)
    }
}

/// A dense and a MoE layer; YaRN, so that logarithm and powers are used too.
fn geometry() -> Result<Geometry> {
    let config = json!({
        "model_type": "glm_moe_dsa", "hidden_size": WIDTH, "num_hidden_layers": 2, "vocab_size": 64,
        "intermediate_size": WIDTH, "moe_intermediate_size": WIDTH, "first_k_dense_replace": 1,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": true, "routed_scaling_factor": 2.5, "num_attention_heads": 2, "num_key_value_heads": 2,
        "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 24,
        "index_n_heads": 2, "index_head_dim": 16, "index_topk": 16, "indexer_types": ["full", "shared"],
        "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "attention_bias": false, "hidden_act": "silu",
        "tie_word_embeddings": false, "num_nextn_predict_layers": 0,
        "rope_parameters": {
            "rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
            "mscale": 1.0, "mscale_all_dim": 1.0
        }
    });
    Geometry::from_json(&config, Path::new("the fingerprint's model"))
}

/// SHA-256 over hidden states, top-k lists, logits, covariances, packed and decoded weights and a loss of a fixed run.
///
/// # Errors
/// None on a machine that computes.
pub fn fingerprint(search: &'static dyn TileSearch, codec: CodecName) -> Result<Hash> {
    let (geometry, device, mut hasher) = (geometry()?, Device::Cpu, Sha256::new());
    let tokens: Vec<Vec<u32>> = [40u32, 23]
        .iter()
        .map(|&length| (0..length).map(|at| (at * at + 7 * at + length) % 64).collect())
        .collect();
    let positions: Vec<Vec<u32>> = tokens.iter().map(|ids| (0..ids.len() as u32).collect()).collect();
    let embedding = Embedding::load(&geometry, &Seeded, &device)?;
    let mut hidden = tokens.iter().map(|ids| embedding.embed(ids)).collect::<Result<Vec<_>>>()?;
    let (mut carry, mut rows) = (vec![None, None], Vec::new());
    for index in 0..geometry.num_hidden_layers {
        let output =
            Layer::load(&geometry, index, &Seeded, &device)?.forward(&hidden, &positions, &carry, &Seeded)?;
        hidden = output.hidden.iter().map(round_bf16).collect::<Result<_>>()?;
        for state in &hidden {
            update(&mut hasher, &state.flatten_all()?.to_vec1::<f32>()?);
        }
        output.carry.iter().for_each(|topk| topk.indices.iter().for_each(|i| hasher.update(i.to_le_bytes())));
        carry = output.carry.into_iter().map(Some).collect();
        for capture in output.capture.into_iter().flatten() {
            update(&mut hasher, &capture.expert_weights);
            rows.extend(capture.mlp_in.flatten_all()?.to_vec1::<f32>()?);
        }
    }
    let logits = Head::load(&geometry, &Seeded, &device)?.logits(&hidden[0])?;
    update(&mut hasher, &logits.flatten_all()?.to_vec1::<f32>()?);
    let (rows, recipe) = (Matrix::new(rows.len() / WIDTH, WIDTH, rows), Recipe::built_in()?);
    let trellis = (TrellisCodec::with_search(search, 0, 1), [3, 4, 5]);
    encode((&trellis.0, trellis.1), &recipe, &rows, &mut hasher)?;
    if codec == CodecName::Kaiju1 {
        // Both code widths, and both with errors fed forward.
        let rungs = Kaiju1::default().by_expert(Rational { numerator: 3, denominator: 1 });
        encode((&KaijuCodec::new(&rungs)?, [1, 2, 0]), &recipe, &rows, &mut hasher)?;
    }
    Ok(hex(&hasher.finalize()))
}

/// Encodes an expert behind `rows` as a walk would, down towards its corrected target; `bits` are those of its tensors.
fn encode<C: Codec>(
    (codec, bits): (&C, [u32; 3]),
    recipe: &Recipe,
    rows: &Matrix<f32>,
    hasher: &mut Sha256,
) -> Result<()> {
    let weight = |role: Projection| -> Result<Matrix<f32>> {
        let tensor = Seeded.load(role.as_str(), &[WIDTH, WIDTH], DType::F32, &Device::Cpu)?;
        Ok(Matrix::new(WIDTH, WIDTH, tensor.flatten_all()?.to_vec1()?))
    };
    let shared = shared_vectors("fingerprint", 0, WIDTH, &SharedChoice::default());
    let split = rows.rows * 3 / 4;
    let part = |range: std::ops::Range<usize>| rows.gather_rows(&range.collect::<Vec<_>>());
    let expert = Expert {
        layer: 0,
        id: 0,
        recipe,
        weights: ExpertWeights {
            matrices: [weight(Projection::Gate)?, weight(Projection::Up)?, weight(Projection::Down)?],
        },
        vectors: expert_vectors("fingerprint", 0, 0, &ExpertChoice::plain(WIDTH), &shared),
        fit: part(0..split),
        fallback: Matrix::zeros(0, WIDTH),
        fallback_share: 0.0,
        holdout: part(split..rows.rows),
        median_diagonal: None,
        clipped: AtomicUsize::new(0),
    };
    let input = expert.input_covariance()?;
    update(hasher, &input.data);
    let mut dense = Vec::new();
    for (role, bits) in [(Projection::Gate, bits[0]), (Projection::Up, bits[1])] {
        let scale = expert.fit_scale(codec, role, bits, None)?;
        let decoded = decode(&expert.encode(codec, role, (bits, scale), &input, None)?);
        hasher.update(&decoded.packed_sha256);
        hasher.update(&decoded.reconstruction_sha256);
        dense.push(decoded.dense);
    }
    let through = expert.down_input(&dense[0], &dense[1], Some(0.1))?;
    update(hasher, &through.covariance.data);
    let target = through.target.as_ref();
    let down = expert.encode(codec, Projection::Down, (bits[2], 1.0), &through.covariance, target)?;
    let decoded = decode(&down);
    hasher.update(&decoded.packed_sha256);
    let loss = expert.loss(&expert.reference(), &dense[0], &dense[1], &decoded.dense);
    hasher.update(loss.absolute.to_le_bytes());
    hasher.update(loss.energy.to_le_bytes());
    Ok(())
}

fn update(hasher: &mut Sha256, values: &[f32]) {
    values.iter().for_each(|value| hasher.update(value.to_le_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::trellis::search::{available_searches, best_search};

    #[test]
    fn every_instruction_set_and_any_number_of_threads_give_one_fingerprint() {
        let trellis = |search| fingerprint(search, CodecName::Trellis).unwrap();
        let kaiju1 = || fingerprint(best_search(), CodecName::Kaiju1).unwrap();
        let wanted = (trellis(best_search()), kaiju1());
        assert_ne!(wanted.0, wanted.1);
        for search in available_searches() {
            assert_eq!(trellis(search), wanted.0, "{}", search.name());
        }
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let found = pool.install(|| (trellis(best_search()), kaiju1()));
            assert_eq!(found, wanted, "{threads} threads");
        }
    }

    #[test]
    fn it_hangs_on_every_value_that_goes_into_it() {
        let rows: Vec<f32> = (0..64 * WIDTH).map(|at| ((at * 37 % 101) as f32 - 50.0) / 25.0).collect();
        let hash = |rows: &[f32]| {
            let mut hasher = Sha256::new();
            let codec = TrellisCodec::with_search(best_search(), 0, 1);
            let (rows, recipe) = (Matrix::new(64, WIDTH, rows.to_vec()), Recipe::built_in().unwrap());
            encode((&codec, [3, 4, 5]), &recipe, &rows, &mut hasher).unwrap();
            hex(&hasher.finalize())
        };
        let mut moved = rows.clone();
        moved[5] = moved[5].next_up();
        assert_ne!(hash(&rows), hash(&moved));
    }
}
