//! The carrier held against its sealed inventory, tensor by tensor as they are loaded.
//!
//! A replay of one layer needs few tensors, and those alone are hashed. Where a tensor lies in the checkpoint makes no
//! difference to what is computed from it: a carrier that was cut into other shards is the same.

use candle_core::{DType, Device, Tensor};

use crate::checkpoint::inventory::Inventory;
use crate::checkpoint::{Reconstruction, WeightSource};
use crate::error::{Result, refuse};

/// A checkpoint that gives only what its inventory has.
pub struct SealedCarrier {
    /// The checkpoint as it is now.
    pub checkpoint: Reconstruction,
    /// The sealed inventory.
    pub inventory: Inventory,
}

impl SealedCarrier {
    /// Refuses a stored tensor that is not the sealed one.
    fn check(&self, name: &str) -> Result<()> {
        let Some(sealed) = self.inventory.tensors.get(name) else {
            return refuse("the sealed inventory of the carrier has no such tensor").tensor(name).err();
        };
        let checkpoint = self.checkpoint.checkpoint();
        let place = checkpoint.info(name)?;
        let found = [
            ("dtype", place.info.dtype.to_string(), sealed.dtype.clone()),
            ("shape", format!("{:?}", place.info.shape), format!("{:?}", sealed.shape)),
            ("sha256", checkpoint.payload_sha256(name)?, sealed.sha256.clone()),
        ];
        match found.into_iter().find(|(_, found, wanted)| found != wanted) {
            None => Ok(()),
            Some((aspect, found, wanted)) => {
                refuse(format!("the carrier is not the one that was inventoried: {aspect} is {found}"))
                    .file(checkpoint.dir().join(place.file))
                    .tensor(name)
                    .wanted(format!("{wanted}, as the walk sealed it"))
                    .err()
            }
        }
    }
}

impl WeightSource for SealedCarrier {
    fn contains(&self, name: &str) -> bool {
        self.inventory.tensors.contains_key(name) || self.checkpoint.packed_weight(name).is_some()
    }

    fn load(&self, name: &str, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
        match self.checkpoint.packed_weight(name) {
            None => self.check(name)?,
            Some(module) => {
                module.form.tensors().into_iter().try_for_each(|name| self.check(name))?;
            }
        }
        self.checkpoint.load(name, shape, dtype, device)
    }
}
