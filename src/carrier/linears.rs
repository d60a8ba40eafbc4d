//! Which linears a carrier packs, and why every other tensor stays as it is.
//!
//! Scope `dense`: of every decoder layer the attention (its indexer too), the dense MLP and the shared experts. A linear is
//! packed when both sizes are multiples of 128 and it is stored in BF16. What stays, stays byte for byte: the router, which
//! decides in f32; norms, embeddings and head; biases; the MTP block, which is never run, so that nothing calibrates it; the
//! routed experts, which are the walk's.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use serde::Serialize;

use crate::checkpoint::CheckpointDir;
use crate::checkpoint::names::{self, Projection};
use crate::codec::trellis::hadamard::BLOCK;
use crate::config::Geometry;
use crate::error::{Error, Result, refuse};
use crate::model::Site;
use crate::store::tensor_dtype::TensorDtype;

/// Which linears are offered to be packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Attention, dense MLP and shared experts.
    #[default]
    Dense,
}

impl Scope {
    /// Its name in files and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Dense => "dense",
        }
    }
}

impl FromStr for Scope {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "dense" => Ok(Self::Dense),
            other => refuse(format!("no scope is called {other:?}")).wanted("dense").err(),
        }
    }
}

/// A linear that is packed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CarriedLinear {
    /// Its name without `.weight`.
    pub module: String,
    /// Its decoder layer.
    pub layer: usize,
    /// Where its input comes from.
    pub site: Site,
    /// Inputs, a multiple of 128.
    pub k: usize,
    /// Outputs, a multiple of 128.
    pub n: usize,
}

impl CarriedLinear {
    /// Its BF16 weight `[n, k]` in the model.
    pub fn weight(&self) -> String {
        format!("{}.weight", self.module)
    }
}

/// Every tensor of a model, sorted into what is packed, what stays and what is left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sorted {
    /// The packed linears in the order the forward pass reaches their sites, layer by layer.
    pub packed: Vec<CarriedLinear>,
    /// Every tensor that stays, with the reason.
    pub kept: BTreeMap<String, String>,
    /// Linears of the scope among them.
    pub kept_linears: BTreeSet<String>,
    /// Routed experts that are left out.
    pub left_out: BTreeSet<String>,
}

/// The linears of a scope in a layer, with their sites: module names without `.weight`.
fn offered(geometry: &Geometry, Scope::Dense: Scope, layer: usize) -> Vec<(String, Site)> {
    let module = |weight: String| weight.trim_end_matches(".weight").to_owned();
    let attention = |name: &str, site| (module(names::attention(layer, name)), site);
    let indexer = |name: &str, site| (module(names::indexer(layer, name)), site);
    let mut found =
        vec![attention("q_a_proj", Site::AttentionIn), attention("kv_a_proj_with_mqa", Site::AttentionIn)];
    let full = geometry.indexer_is_full(layer);
    if full {
        found.push(indexer("wk", Site::AttentionIn));
        found.push(indexer("weights_proj", Site::AttentionIn));
    }
    found.push(attention("q_b_proj", Site::QueryLatent));
    if full {
        found.push(indexer("wq_b", Site::QueryLatent));
    }
    found.push(attention("kv_b_proj", Site::KeyValueLatent));
    found.push(attention("o_proj", Site::Heads));
    for projection in Projection::ALL {
        let site = if projection == Projection::Down { Site::Gated } else { Site::MlpIn };
        let weight = match geometry.is_moe(layer) {
            true => names::shared_experts(layer, projection),
            false => names::dense_mlp(layer, projection),
        };
        found.push((module(weight), site));
    }
    found
}

/// Sorts the tensors of `model`. `keep` holds back every linear of the scope whose name contains one of its strings;
/// `without_experts` leaves out the routed experts of the decoder layers.
///
/// # Errors
/// Names a string of `keep` that no linear of the scope contains, and a scope of which nothing can be packed.
pub fn sort(
    geometry: &Geometry,
    model: &CheckpointDir,
    scope: Scope,
    keep: &[String],
    without_experts: bool,
) -> Result<Sorted> {
    let mut sorted = Sorted {
        packed: Vec::new(),
        kept: BTreeMap::new(),
        kept_linears: BTreeSet::new(),
        left_out: BTreeSet::new(),
    };
    let mut used = BTreeSet::new();
    for layer in 0..geometry.num_hidden_layers {
        for (module, site) in offered(geometry, scope, layer) {
            let weight = format!("{module}.weight");
            let info = model.info(&weight)?.info;
            let held: Vec<&String> = keep.iter().filter(|text| module.contains(text.as_str())).collect();
            used.extend(held.iter().copied());
            let reason = match (info.dtype, &info.shape[..], held.first()) {
                (_, _, Some(text)) => format!("--keep {text}"),
                (TensorDtype::BF16, &[n, k], None) if k.is_multiple_of(BLOCK) && n.is_multiple_of(BLOCK) => {
                    sorted.packed.push(CarriedLinear { module, layer, site, k, n });
                    continue;
                }
                (TensorDtype::BF16, shape, None) => format!("sizes {shape:?} are not multiples of 128"),
                (dtype, _, None) => format!("stored in {dtype}, not BF16"),
            };
            sorted.kept_linears.insert(weight.clone());
            sorted.kept.insert(weight, reason);
        }
    }
    if let Some(unused) = keep.iter().find(|text| text.is_empty() || !used.contains(text)) {
        return refuse(format!("{unused:?} is part of no linear of the scope {}", scope.as_str()))
            .field("--keep")
            .wanted("part of the name of a linear that would be packed, such as `indexer` or `layers.0.`")
            .err();
    }
    if sorted.packed.is_empty() {
        return refuse(format!("no linear of the scope {} can be packed", scope.as_str()))
            .file(model.dir())
            .wanted("a BF16 linear whose sizes are multiples of 128, and that --keep does not hold back")
            .err();
    }
    let packed: BTreeSet<String> = sorted.packed.iter().map(CarriedLinear::weight).collect();
    for name in model.names() {
        if packed.contains(name) || sorted.kept.contains_key(name) {
            continue;
        }
        let reason = reason_to_keep(geometry, name);
        if without_experts && reason == ROUTED_EXPERT {
            sorted.left_out.insert(name.to_owned());
        } else {
            sorted.kept.insert(name.to_owned(), reason.to_owned());
        }
    }
    Ok(sorted)
}

/// Why a routed expert stays.
pub const ROUTED_EXPERT: &str = "routed expert: the walk's to quantize";

/// Why a tensor that is no linear of a scope stays.
fn reason_to_keep(geometry: &Geometry, name: &str) -> &'static str {
    if [names::EMBED_TOKENS, names::LM_HEAD].contains(&name) {
        return "embedding or head";
    }
    let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    match layer.map(|(layer, rest)| (layer.parse::<usize>(), rest)) {
        Some((Ok(layer), _)) if layer >= geometry.num_hidden_layers => {
            "MTP block: never run, so that nothing calibrates it"
        }
        Some((Ok(_), rest)) if rest.starts_with("mlp.experts.") => ROUTED_EXPERT,
        Some((Ok(_), rest)) if rest.starts_with("mlp.gate.") => "router",
        _ if name.ends_with("norm.weight") || name.ends_with("norm.bias") => "norm",
        _ if name.ends_with(".bias") => "bias",
        _ => "no linear of the scope",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn tiny() -> (Geometry, CheckpointDir) {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/tiny");
        (Geometry::read(&dir.join("config.json")).unwrap(), CheckpointDir::open(dir).unwrap())
    }

    #[test]
    fn every_tensor_is_in_one_place() {
        let (geometry, model) = tiny();
        let all = sort(&geometry, &model, Scope::Dense, &[], false).unwrap();
        assert_eq!(all.packed.len() + all.kept.len(), model.names().count());
        assert!(all.left_out.is_empty());
        // q_a [128, 256] and three of an MLP a layer; wq_b [128, 128] on the four full ones. kv_a has 80 outputs, q_b and
        // o_proj 192 on a side, kv_b 64 inputs.
        assert_eq!(all.packed.len(), 5 * 4 + 4);
        assert_eq!(all.kept_linears.len(), 5 * 4 + 4 * 2);
        let order: Vec<(usize, Site)> = all.packed.iter().map(|linear| (linear.layer, linear.site)).collect();
        assert!(order.is_sorted());
        let reason = |name: &str| all.kept[name].as_str();
        assert_eq!(
            reason("model.layers.0.self_attn.o_proj.weight"),
            "sizes [256, 192] are not multiples of 128"
        );
        assert_eq!(
            reason("model.layers.5.self_attn.q_a_proj.weight"),
            "MTP block: never run, so that nothing calibrates it"
        );
        assert_eq!(reason("model.layers.2.mlp.gate.e_score_correction_bias"), "router");
        assert_eq!(reason("model.layers.0.self_attn.indexer.k_norm.bias"), "norm");
        assert_eq!(reason("lm_head.weight"), "embedding or head");
        assert!(all.kept.values().all(|reason| reason != "no linear of the scope"));
    }

    #[test]
    fn linears_are_held_back_by_name_and_experts_left_out() {
        let (geometry, model) = tiny();
        let keep = ["indexer".to_owned(), "layers.0.".to_owned()];
        let some = sort(&geometry, &model, Scope::Dense, &keep, true).unwrap();
        assert_eq!(some.packed.len(), 4 * 4);
        assert_eq!(some.kept["model.layers.1.self_attn.indexer.wq_b.weight"], "--keep indexer");
        // Three layers of eight experts; those of the MTP block stay.
        assert_eq!(some.left_out.len(), 3 * 8 * 3);
        assert!(some.left_out.iter().all(|name| !name.starts_with("model.layers.5.")));
        for wrong in ["experts.0.", "lm_head", ""] {
            let error = sort(&geometry, &model, Scope::Dense, &[wrong.to_owned()], false).unwrap_err();
            assert!(error.to_string().contains("field `--keep`"), "{error}");
        }
        let error = sort(&geometry, &model, Scope::Dense, &["model".to_owned()], false).unwrap_err();
        assert!(error.to_string().contains("can be packed"), "{error}");
    }
}
