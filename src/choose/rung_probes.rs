//! Probes of whole experts: gate, up and down at one setting of the KAIJU1 codec, for each setting, by real round trips.
//!
//! Where a codec's rate is chosen by expert there is no context: what is measured is the finished expert itself.

use serde::{Deserialize, Serialize};

use super::expert::{Expert, decode};
use super::probes::{Basis, Probed};
use crate::checkpoint::names::Projection;
use crate::codec::Codec;
use crate::error::{Result, refuse};
use crate::store::canonical_json::{float17, parse_float17};
use crate::store::hash::Hash;

/// A whole expert at one rung.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RungMeasurement {
    /// Mean squared output error a held-out row.
    pub loss: String,
    /// The same over the mean squared output.
    pub relative_loss: String,
    /// Damping of down's correction (17 digits); none where the source weight is its target.
    pub down_damping: Option<String>,
    /// SHA-256 of the packed payloads: gate, up, down.
    pub packed_sha256: [Hash; 3],
    /// SHA-256 of the dense weights.
    pub reconstruction_sha256: [Hash; 3],
}

/// All measurements of one expert.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RungProbe {
    /// The expert's id.
    pub expert: usize,
    /// Derived rows that were not finite and left out of a covariance, over all rungs.
    pub dropped_rows: usize,
    /// By rung.
    pub rungs: Vec<RungMeasurement>,
}

impl RungProbe {
    fn rung(&self, bits: [u32; 3]) -> Result<&RungMeasurement> {
        match self.rungs.get(bits[0] as usize) {
            Some(found) if bits == [bits[0]; 3] => Ok(found),
            _ => {
                let missing = refuse("no usable measurement").expert(self.expert);
                missing.wanted(format!("a probe at rungs {bits:?}")).err()
            }
        }
    }

    /// The losses by rung.
    ///
    /// # Errors
    /// One that is no number.
    pub fn losses(&self) -> Result<Vec<f64>> {
        self.rungs.iter().map(|rung| parse_float17(&rung.loss)).collect()
    }
}

impl Probed for RungProbe {
    fn scale(&self, _: Projection, _: u32) -> Result<f64> {
        Ok(1.0)
    }

    fn damping(&self, bits: [u32; 3]) -> Result<Option<f64>> {
        self.rung(bits)?.down_damping.as_deref().map(parse_float17).transpose()
    }

    fn packed_sha256(&self, role: Projection, bits: [u32; 3]) -> Result<Option<&Hash>> {
        Ok(Some(&self.rung(bits)?.packed_sha256[role as usize]))
    }

    fn promise(&self, bits: [u32; 3]) -> Result<(Basis, [u32; 3], f64)> {
        Ok((Basis::Measured, bits, parse_float17(&self.rung(bits)?.loss)?))
    }
}

/// Encodes a probe of one expert takes.
pub fn encodes_of_rungs(rungs: usize) -> usize {
    Projection::ALL.len() * rungs
}

/// Measures one expert at rungs 0 to `rungs - 1`. `done` is called after every encode.
///
/// # Errors
/// No held-out rows, and whatever an encode refuses.
pub fn probe_rungs<C: Codec>(
    codec: &C,
    expert: &Expert<'_>,
    rungs: usize,
    done: impl Fn(),
) -> Result<RungProbe> {
    expert.require_holdout()?;
    let (input, reference) = (expert.input_covariance()?, expert.reference());
    let mut probe = RungProbe { expert: expert.id, dropped_rows: 0, rungs: Vec::with_capacity(rungs) };
    for rung in 0..rungs as u32 {
        let encode = |role: Projection, covariance: &_, target: Option<&_>| {
            let decoded = decode(&expert.encode(codec, role, (rung, 1.0), covariance, target)?);
            done();
            Ok::<_, crate::Error>(decoded)
        };
        let gate = encode(Projection::Gate, &input, None)?;
        let up = encode(Projection::Up, &input, None)?;
        let damping = expert.choose_damping(&gate.dense, &up.dense)?;
        let through = expert.down_input(&gate.dense, &up.dense, damping)?;
        let down = encode(Projection::Down, &through.covariance, through.target.as_ref())?;
        probe.dropped_rows += through.dropped_rows;
        let loss = expert.loss(&reference, &gate.dense, &up.dense, &down.dense);
        let parts = [gate, up, down];
        probe.rungs.push(RungMeasurement {
            loss: float17(loss.absolute),
            relative_loss: float17(loss.relative()),
            down_damping: damping.map(float17),
            packed_sha256: parts.each_ref().map(|part| part.packed_sha256.clone()),
            reconstruction_sha256: parts.each_ref().map(|part| part.reconstruction_sha256.clone()),
        });
    }
    Ok(probe)
}
