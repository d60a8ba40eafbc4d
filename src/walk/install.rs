//! Installed experts: packed bytes of sealed shards, decoded for the forward pass.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use crate::checkpoint::WeightSource;
use crate::checkpoint::finished::{FinishedLayer, finished_path};
use crate::checkpoint::names::{Projection, split_expert};
use crate::checkpoint::reconstruction::install;
use crate::codec::PackedMatrix;
use crate::config::Geometry;
use crate::config::choices::CodecName;
use crate::error::{Result, refuse};

/// The carrier with the routed experts of finished layers decoded from their shards.
pub struct Installed {
    carrier: Arc<dyn WeightSource>,
    layers: BTreeMap<usize, FinishedLayer>,
}

impl Installed {
    /// Opens the shards of `layers` in a work directory over `carrier`.
    ///
    /// # Errors
    /// Names the shard that cannot be read.
    pub fn open(
        carrier: Arc<dyn WeightSource>,
        (work, codec): (&Path, CodecName),
        layers: &[usize],
        geometry: &Geometry,
    ) -> Result<Self> {
        let open = |&layer: &usize| {
            let path = work.join(finished_path(codec, layer, "safetensors"));
            let sizes = (geometry.hidden_size, geometry.moe_intermediate_size);
            Ok((layer, FinishedLayer::open(&path, codec, layer, sizes)?))
        };
        Ok(Self { carrier, layers: layers.iter().map(open).collect::<Result<_>>()? })
    }
}

/// Layer, expert and projection of a routed expert's weight.
fn parse(name: &str) -> Option<(usize, usize, Projection)> {
    split_expert(name.strip_suffix(".weight")?)
}

impl WeightSource for Installed {
    fn contains(&self, name: &str) -> bool {
        parse(name).is_some_and(|(layer, ..)| self.layers.contains_key(&layer)) || self.carrier.contains(name)
    }

    fn load(&self, name: &str, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
        let installed = parse(name).and_then(|(layer, e, p)| Some((self.layers.get(&layer)?, e, p)));
        let Some((shard, expert, projection)) = installed else {
            return self.carrier.load(name, shape, dtype, device);
        };
        let weight = shard.weight(expert, projection)?;
        let (k, n) = weight.sizes();
        if shape != [n, k] {
            return refuse(format!("the installed weight is [{n}, {k}]"))
                .tensor(name)
                .wanted(format!("{shape:?}"))
                .err();
        }
        install(&weight.dense(), dtype, device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expert_names_are_told_from_others() {
        assert_eq!(parse("model.layers.12.mlp.experts.7.down_proj.weight"), Some((12, 7, Projection::Down)));
        assert_eq!(parse("model.layers.12.mlp.shared_experts.down_proj.weight"), None);
        assert_eq!(parse("model.layers.12.mlp.gate.weight"), None);
    }
}
