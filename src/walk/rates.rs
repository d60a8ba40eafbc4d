//! What a layer's experts are encoded at and what that was chosen from: bits by tensor of the trellis codec, or rungs by
//! expert of KAIJU1.

use std::path::Path;

use super::probing::{AllocationRecord, ProbeLedger, allocation_path};
use super::rungs::{RungAllocation, RungLedger};
use crate::choose::probes::Probed;
use crate::config::choices::CodecName;
use crate::error::{Result, refuse};
use crate::store::hash::Hash;
use crate::store::strict_json::read_json;

/// The last round of probes of a layer.
#[derive(Debug, Clone)]
pub enum Ledger {
    /// Tensors at widths.
    Bits(ProbeLedger),
    /// Experts at rungs.
    Rungs(RungLedger),
}

impl Ledger {
    /// What an expert's probes settle.
    pub fn probe(&self, expert: usize) -> &dyn Probed {
        match self {
            Self::Bits(ledger) => &ledger.experts[expert].probe,
            Self::Rungs(ledger) => &ledger.experts[expert].probe,
        }
    }
}

/// A layer's allocation.
#[derive(Debug, Clone)]
pub enum Allocation {
    /// Bits by tensor.
    Bits(AllocationRecord),
    /// A rung an expert.
    Rungs(RungAllocation),
}

impl Allocation {
    /// Reads the record of a round; KAIJU1 has one round.
    ///
    /// # Errors
    /// Names the file that cannot be read.
    pub fn read(work: &Path, codec: CodecName, layer: usize, iteration: u32) -> Result<Self> {
        let path = work.join(allocation_path(layer, iteration));
        Ok(match codec {
            CodecName::Trellis => Self::Bits(read_json(path)?),
            CodecName::Kaiju1 => Self::Rungs(read_json(path)?),
        })
    }

    /// Bits of gate, up and down of an expert, or its rung for all three.
    ///
    /// # Errors
    /// A module or expert that it lacks.
    pub fn bits(&self, expert: usize) -> Result<[u32; 3]> {
        match self {
            Self::Bits(record) => record.bits(expert),
            Self::Rungs(record) => match record.rungs.get(expert) {
                Some(&rung) => Ok([rung; 3]),
                None => refuse("the allocation has no rung for the expert").expert(expert).err(),
            },
        }
    }

    /// SHA-256 of the ledger it was solved from.
    pub fn probe_sha256(&self) -> Option<&Hash> {
        match self {
            Self::Bits(record) => record.probe_sha256.as_ref(),
            Self::Rungs(record) => record.probe_sha256.as_ref(),
        }
    }

    /// What an expert is encoded at, in words.
    ///
    /// # Errors
    /// As [`Allocation::bits`].
    pub fn label(&self, expert: usize) -> Result<String> {
        let bits = self.bits(expert)?;
        Ok(match self {
            Self::Bits(_) => format!("{}/{}/{} bits", bits[0], bits[1], bits[2]),
            Self::Rungs(record) => record.settings[bits[0] as usize].to_string(),
        })
    }
}
