//! The DSA indexer: which keys a query may attend to.
//!
//! `score[s,t] = Σ_h w[s,h] · relu(iq[s,h]·ik[t] · Di^-0.5)` for `t <= s`, with `w = x·weights_projᵀ · Hi^-0.5`; each
//! query keeps the `min(index_topk, S)` best keys. ReLU makes exact zeros, so ties are common; the rule is: higher
//! score first, then lower index, with -0.0 equal to 0.0. Heads are summed in ascending order.
//!
//! The result is the raw list, including the places that no causal key is left to fill (lowest later indices first):
//! shared layers take it over as it is, and the causal mask of attention still applies to it.
//!
//! Source: `GlmMoeDsaIndexer` of Transformers 5.24, with a stable top-k. What it does not do: keep keys between calls.

use candle_core::Device;
use rayon::prelude::*;

use super::linear::Linear;
use super::norm::{LATENT_NORM_EPS, LayerNorm};
use super::rope::Angles;
use crate::checkpoint::{WeightSource, names};
use crate::config::Geometry;
use crate::error::{Result, refuse};
use crate::linalg::Packed;

/// Queries that are scored together.
const BLOCK_ROWS: usize = 128;

/// The keys each query of a prompt chose, as handed from layer to layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopK {
    /// Key indices, row-major `[S, k]`; a row is sorted by score, then index.
    pub indices: Vec<i32>,
    /// Keys per query, `min(index_topk, S)`.
    pub k: usize,
}

impl TopK {
    /// The keys each query attends to: the causal members of its list, ascending.
    ///
    /// # Errors
    /// When the list is not `rows` times `min(index_topk, rows)` indices below `rows`, repeats one, or leaves a query
    /// without a key.
    pub(super) fn allowed(&self, rows: usize, index_topk: usize) -> Result<Vec<Vec<u32>>> {
        let k = index_topk.min(rows);
        if self.k != k || self.indices.len() != rows * k {
            return refuse(format!("a top-k list of {} indices, {} a row", self.indices.len(), self.k))
                .wanted(format!("{rows} rows of {k}"))
                .err();
        }
        let mut all = Vec::with_capacity(rows);
        for (row, list) in self.indices.chunks_exact(k).enumerate() {
            let mut keys = Vec::with_capacity(k.min(row + 1));
            for index in list {
                match u32::try_from(*index) {
                    Ok(key) if (key as usize) < rows => keys.push(key),
                    _ => {
                        return refuse(format!("top-k index {index}"))
                            .row(row)
                            .wanted(format!("at most {}", rows - 1))
                            .err();
                    }
                }
            }
            keys.sort_unstable();
            if keys.windows(2).any(|pair| pair[0] == pair[1]) {
                return refuse("the top-k list repeats a key").row(row).wanted("distinct keys").err();
            }
            keys.truncate(keys.partition_point(|key| *key as usize <= row));
            if keys.is_empty() {
                return refuse("the top-k list has no causal key").row(row).wanted("at least one").err();
            }
            all.push(keys);
        }
        Ok(all)
    }
}

/// The `k` best of the causal scores of query `row`, then later indices until there are `k`.
///
/// Scores must not be NaN. The order is "higher score, then lower index", -0.0 being equal to 0.0.
fn top_k(scores: &[f32], k: usize, list: &mut Vec<i32>, keys: &mut Vec<u64>) {
    keys.clear();
    keys.extend(scores.iter().enumerate().map(|(index, score)| {
        // Adding 0.0 makes -0.0 positive; then the bits, flipped, ascend where the scores descend.
        let bits = (score + 0.0).to_bits();
        let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
        u64::from(!ascending) << 32 | index as u64
    }));
    if keys.len() > k {
        keys.select_nth_unstable(k - 1);
        keys.truncate(k);
    }
    keys.sort_unstable();
    list.extend(keys.iter().map(|key| *key as u32 as i32));
    let later = scores.len()..scores.len() + (k - keys.len());
    list.extend(later.map(|index| index as i32));
}

/// The indexer of a full layer.
#[derive(Debug, Clone)]
pub struct Indexer {
    wq_b: Linear,
    wk: Linear,
    k_norm: LayerNorm,
    weights_proj: Linear,
    heads: usize,
    head_dim: usize,
    topk: usize,
}

impl Indexer {
    /// Loads the indexer of `layer`.
    ///
    /// # Errors
    /// What the source says.
    pub fn load(
        geometry: &Geometry,
        layer: usize,
        weights: &dyn WeightSource,
        device: &Device,
    ) -> Result<Self> {
        let (heads, head_dim, hidden) =
            (geometry.index_n_heads, geometry.index_head_dim, geometry.hidden_size);
        let linear = |module: &str, out, input| {
            Linear::load(weights, &names::indexer(layer, module), out, input, device)
        };
        let k_norm = (names::indexer(layer, "k_norm"), names::indexer_k_norm_bias(layer));
        Ok(Self {
            wq_b: linear("wq_b", heads * head_dim, geometry.q_lora_rank)?,
            wk: linear("wk", head_dim, hidden)?,
            k_norm: LayerNorm::load(weights, (&k_norm.0, &k_norm.1), head_dim, LATENT_NORM_EPS, device)?,
            weights_proj: linear("weights_proj", heads, hidden)?,
            heads,
            head_dim,
            topk: geometry.index_topk,
        })
    }

    /// Chooses the keys of a prompt's queries.
    ///
    /// `x [S, hidden]` is the normed layer input, `q_resid [S, q_lora_rank]` the normed query latent, both flat.
    ///
    /// # Errors
    /// Names the row whose score is not finite.
    pub fn forward(&self, x: &[f32], q_resid: &[f32], angles: &Angles) -> Result<TopK> {
        let (heads, width) = (self.heads, self.head_dim);
        let mut keys = self.k_norm.forward(&self.wk.forward(x)?);
        for (row, key) in keys.chunks_exact_mut(width).enumerate() {
            angles.rotate(row, key);
        }
        let rows = keys.len() / width;
        let keys = Packed::transposed(&keys, rows, width);
        let mut queries = self.wq_b.forward(q_resid)?;
        for (row, query) in queries.chunks_exact_mut(heads * width).enumerate() {
            for head in query.chunks_exact_mut(width) {
                angles.rotate(row, head);
            }
        }
        let mut head_weights = self.weights_proj.forward(x)?;
        let scale = (heads as f64).powf(-0.5) as f32;
        for weight in &mut head_weights {
            *weight *= scale;
        }
        let k = self.topk.min(rows);
        let blocks: Vec<Vec<i32>> = (0..rows.div_ceil(BLOCK_ROWS))
            .into_par_iter()
            .map(|block| {
                let start = block * BLOCK_ROWS;
                let end = rows.min(start + BLOCK_ROWS);
                let scores = self.scores(
                    &queries[start * heads * width..end * heads * width],
                    &keys,
                    end,
                    &head_weights[start * heads..end * heads],
                )?;
                let mut list = Vec::with_capacity((end - start) * k);
                let mut order = Vec::new();
                for (row, scores) in (start..end).zip(scores.chunks_exact(end)) {
                    let causal = &scores[..=row];
                    if causal.iter().any(|score| !score.is_finite()) {
                        return refuse("an indexer score is not finite")
                            .row(row)
                            .wanted("finite scores")
                            .err();
                    }
                    top_k(causal, k, &mut list, &mut order);
                }
                Ok(list)
            })
            .collect::<Result<_>>()?;
        Ok(TopK { indices: blocks.concat(), k })
    }

    /// Scores of a block of queries `[n, heads, width]` against the first `count` keys: `[n, count]`, not masked.
    fn scores(&self, queries: &[f32], keys: &Packed, count: usize, head_weights: &[f32]) -> Result<Vec<f32>> {
        let (heads, width) = (self.heads, self.head_dim);
        let scale = (width as f64).powf(-0.5) as f32;
        let mut scores = vec![0f32; head_weights.len() / heads * count];
        let mut query = Vec::with_capacity(queries.len() / heads);
        for head in 0..heads {
            query.clear();
            for row in queries.chunks_exact(heads * width) {
                query.extend_from_slice(&row[head * width..][..width]);
            }
            let dots = keys.part(&query, width, count)?;
            let rows = scores.chunks_exact_mut(count).zip(dots.chunks_exact(count));
            for ((scores, dots), weights) in rows.zip(head_weights.chunks_exact(heads)) {
                for (score, dot) in scores.iter_mut().zip(dots) {
                    // Not `max`, which would turn NaN into 0 and hide it.
                    let dot = dot * scale;
                    *score += weights[head] * if dot < 0.0 { 0.0 } else { dot };
                }
            }
        }
        Ok(scores)
    }
}

impl Geometry {
    /// Compares the schedule with the indexer tensors present, layer by layer (0..L-1; the MTP block has its own).
    ///
    /// # Errors
    /// Names the first layer and tensor that is missing on a full layer or present on a shared one.
    pub fn check_indexer_tensors(&self, source: &dyn WeightSource) -> Result<()> {
        for layer in 0..self.num_hidden_layers {
            let full = self.indexer_is_full(layer);
            for name in names::indexer_tensors(layer) {
                if source.contains(&name) != full {
                    let (what, wanted) = if full {
                        (
                            "missing, but the config makes this layer's indexer full",
                            "all five indexer tensors",
                        )
                    } else {
                        ("present, but the config makes this layer's indexer shared", "no indexer tensors")
                    };
                    return refuse(what).layer(layer).tensor(name).wanted(wanted).err();
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(scores: &[f32], k: usize) -> Vec<i32> {
        let (mut list, mut keys) = (Vec::new(), Vec::new());
        top_k(scores, k, &mut list, &mut keys);
        list
    }

    #[test]
    fn ties_go_to_the_lower_index_and_zeros_have_no_sign() {
        assert_eq!(list(&[0.0, -0.0, 1.0, 0.0, -1.0], 4), [2, 0, 1, 3]);
        assert_eq!(list(&[-0.0, 0.0], 1), [0]);
        assert_eq!(list(&[-2.0, -1.0, f32::MAX, f32::MIN], 4), [2, 1, 0, 3]);
    }

    #[test]
    fn places_beyond_the_causal_range_fill_from_the_lowest_index() {
        assert_eq!(list(&[-5.0, 3.0], 5), [1, 0, 2, 3, 4]);
    }

    #[test]
    fn a_malformed_list_is_refused_with_its_row() {
        let allowed = |indices: &[i32]| TopK { indices: indices.to_vec(), k: 2 }.allowed(3, 2);
        assert_eq!(allowed(&[0, 1, 1, 0, 2, 0]).unwrap(), [vec![0], vec![0, 1], vec![0, 2]]);
        for (indices, part) in [
            (&[0, 1, 1, 0, 3, 0][..], "row 2: top-k index 3"),
            (&[0, 1, 1, 0, -1, 0], "row 2: top-k index -1"),
            (&[0, 1, 1, 1, 2, 0], "row 1: the top-k list repeats"),
            (&[2, 1, 1, 0, 2, 0], "row 0: the top-k list has no causal key"),
            (&[0, 1, 1, 0], "wanted: 3 rows of 2"),
        ] {
            assert!(allowed(indices).unwrap_err().to_string().contains(part));
        }
    }
}
