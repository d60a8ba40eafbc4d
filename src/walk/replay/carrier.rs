//! The carrier held against its sealed inventory, tensor by tensor as they are loaded.
//!
//! A replay of one layer needs few tensors, and those alone are hashed. Where a tensor lies in the checkpoint makes no
//! difference to what is computed from it: a carrier that was cut into other shards is the same.

use candle_core::{DType, Device, Tensor};

use crate::checkpoint::inventory::Inventory;
use crate::checkpoint::{CheckpointDir, WeightSource};
use crate::error::{Result, refuse};

/// A checkpoint that gives only what its inventory has.
pub struct SealedCarrier {
    /// The checkpoint as it is now.
    pub checkpoint: CheckpointDir,
    /// The sealed inventory.
    pub inventory: Inventory,
}

impl WeightSource for SealedCarrier {
    fn contains(&self, name: &str) -> bool {
        self.inventory.tensors.contains_key(name)
    }

    fn load(&self, name: &str, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
        let Some(sealed) = self.inventory.tensors.get(name) else {
            return refuse("the sealed inventory of the carrier has no such tensor").tensor(name).err();
        };
        let place = self.checkpoint.info(name)?;
        let stored = place.info.dtype.to_string();
        let found = [
            ("dtype", stored, sealed.dtype.clone()),
            ("shape", format!("{:?}", place.info.shape), format!("{:?}", sealed.shape)),
            ("sha256", self.checkpoint.payload_sha256(name)?, sealed.sha256.clone()),
        ];
        if let Some((aspect, found, wanted)) = found.into_iter().find(|(_, found, wanted)| found != wanted) {
            return refuse(format!("the carrier is not the one that was inventoried: {aspect} is {found}"))
                .file(self.checkpoint.dir().join(place.file))
                .tensor(name)
                .wanted(format!("{wanted}, as the walk sealed it"))
                .err();
        }
        self.checkpoint.load(name, shape, dtype, device)
    }
}
