//! What can be known to fail before the first hour is spent: sizes the codec cannot take, tensors that are missing or of
//! another shape, recipes this version does not do; and the encoder of those it does.

use candle_core::{DType, Device, Tensor};

use crate::checkpoint::structure::{check_layers, check_tied_head};
use crate::checkpoint::{Reconstruction, WeightSource};
use crate::codec::trellis::encode::TrellisCodec;
use crate::codec::trellis::hadamard::BLOCK;
use crate::codec::trellis::search::TileSearch;
use crate::codec::weight::{KaijuCodec, WeightCodec};
use crate::config::choices::{CodecName, VectorScope};
use crate::config::{Geometry, Recipe};
use crate::error::{Result, refuse};
use crate::model::{Embedding, Head, Layer};

use super::rungs::check_budget;

/// A checkpoint's names and shapes: every tensor loads as zeros.
struct Outline<'a>(&'a Reconstruction);

impl WeightSource for Outline<'_> {
    fn contains(&self, name: &str) -> bool {
        self.0.contains(name)
    }

    fn load(&self, name: &str, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
        self.0.check_shape(name, shape)?;
        Ok(Tensor::zeros(shape, dtype, device)?)
    }
}

/// Checks that the recipe's codec can take the experts' sizes, and that its target can be met with as many.
///
/// # Errors
/// Names the size; see [`Recipe::upgrades`] and [`check_budget`].
pub fn check_sizes(geometry: &Geometry, recipe: &Recipe) -> Result<()> {
    if recipe.codec == CodecName::Kaiju1 {
        return check_budget(recipe, (geometry.hidden_size, geometry.moe_intermediate_size));
    }
    let sizes =
        [("hidden_size", geometry.hidden_size), ("moe_intermediate_size", geometry.moe_intermediate_size)];
    for (field, size) in sizes {
        if !size.is_multiple_of(BLOCK) {
            return refuse(format!("{field} is {size}")).field(field).wanted("a multiple of 128").err();
        }
    }
    recipe.upgrades((geometry.n_routed_experts * 3) as u64)?;
    Ok(())
}

/// Checks that every tensor the forward pass of a whole model needs, routed experts aside, is there in its shape, and
/// that the checkpoint has the layers the config says.
///
/// # Errors
/// Names file, layer and tensor.
pub fn check_tensors(geometry: &Geometry, weights: &Reconstruction) -> Result<()> {
    check_layers(geometry, weights.checkpoint())?;
    check_tied_head(geometry, weights.checkpoint())?;
    let outline = Outline(weights);
    Embedding::load(geometry, &outline, &Device::Cpu)?;
    Head::load(geometry, &outline, &Device::Cpu)?;
    for layer in 0..geometry.num_hidden_layers {
        Layer::load(geometry, layer, &outline, &Device::Cpu)?;
    }
    Ok(())
}

/// The encoder a recipe asks for, a trellis one on this tile search.
///
/// # Errors
/// Settings that no encoder has.
pub fn codec_of(recipe: &Recipe, search: &'static dyn TileSearch) -> Result<WeightCodec> {
    Ok(match &recipe.kaiju1 {
        Some(knobs) => WeightCodec::Kaiju1(KaijuCodec::new(knobs)?),
        None => WeightCodec::Trellis(trellis_of(recipe, search)),
    })
}

/// The trellis encoder by a recipe's knobs.
pub fn trellis_of(recipe: &Recipe, search: &'static dyn TileSearch) -> TrellisCodec {
    let sweeps = recipe.refinement_sweeps as usize;
    let mut codec = TrellisCodec::with_search(search, sweeps, recipe.scale_sample_tiles);
    (codec.rounding, codec.metric) = (recipe.rounding, recipe.metric);
    codec
}

/// Refuses what a recipe may ask for and this version does not do, rather than doing something else.
pub(super) fn refuse_unsupported(recipe: &Recipe) -> Result<()> {
    let unsupported = |field: &str, what: &str, wanted: &str| {
        refuse(what).file(&recipe.origin).field(field).wanted(wanted).err()
    };
    if recipe.vectors != VectorScope::Shared {
        return unsupported("vectors", "schema v2 shares the residual-side vectors of a layer", "\"shared\"");
    }
    Ok(())
}
