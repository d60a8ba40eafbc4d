//! Probes: every tensor of an expert at every candidate width, by real round trips.
//!
//! The loss of a tensor at a width is that of the whole expert with this tensor at the width and the other two at the
//! expert's context. A gate or up candidate changes the input of down, so down's covariance is rebuilt and down encoded
//! again at its context width: with candidates 3, 4, 5 that makes 3 + 3 + 3 + 4 = 13 encodes an expert.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::down_input::DownInput;
use super::expert::{Decoded, Expert, Loss, decode};
use crate::checkpoint::names::Projection;
use crate::codec::Codec;
use crate::error::{Result, refuse};
use crate::linalg::Matrix;
use crate::store::canonical_json::{float17, parse_float17};
use crate::store::hash::Hash;

/// One tensor at one width, in context.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measurement {
    /// Mean squared output error a held-out row.
    pub loss: String,
    /// The same over the mean squared output.
    pub relative_loss: String,
    /// Relative global scale of the encode.
    pub scale: String,
    /// SHA-256 of the packed payload.
    pub packed_sha256: Hash,
    /// Reconstructions the loss was measured with: gate, up, down.
    pub reconstruction_sha256: [Hash; 3],
}

/// All measurements of one expert in one context.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertProbe {
    /// The expert's id.
    pub expert: usize,
    /// Bits of gate, up and down in the context.
    pub context: [u32; 3],
    /// Encodes made.
    pub encodes: usize,
    /// Derived rows that were not finite and left out of a covariance, over all encodes.
    pub dropped_rows: usize,
    /// Damping of down's correction (17 digits); none where the source weight is its target.
    pub down_damping: Option<String>,
    /// By module name, then by bits.
    pub tensors: BTreeMap<String, BTreeMap<String, Measurement>>,
}

/// How a promise was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Basis {
    /// The final bits are the context: the expert was measured as a whole.
    Measured,
    /// The sum of first differences from the context.
    FirstOrder,
}

/// What the probes of an expert settle for its final encode; `bits` are those of gate, up and down, or their rung.
pub trait Probed {
    /// The relative global scale of a tensor.
    ///
    /// # Errors
    /// Bits that were not measured, or a value that is no number; so the others.
    fn scale(&self, role: Projection, bits: u32) -> Result<f64>;

    /// The damping of down's correction; `None` where the source weight is its target.
    ///
    /// # Errors
    /// As [`Probed::scale`].
    fn damping(&self, bits: [u32; 3]) -> Result<Option<f64>>;

    /// SHA-256 of the payload that the final encode of a tensor has to repeat; none where it depends on what was not
    /// probed together.
    ///
    /// # Errors
    /// As [`Probed::scale`].
    fn packed_sha256(&self, role: Projection, bits: [u32; 3]) -> Result<Option<&Hash>>;

    /// The loss that is promised of the expert, how it was made, and the bits of its context.
    ///
    /// # Errors
    /// As [`Probed::scale`].
    fn promise(&self, bits: [u32; 3]) -> Result<(Basis, [u32; 3], f64)>;
}

impl Probed for ExpertProbe {
    fn scale(&self, role: Projection, bits: u32) -> Result<f64> {
        ExpertProbe::scale(self, role, bits)
    }

    fn damping(&self, _: [u32; 3]) -> Result<Option<f64>> {
        ExpertProbe::damping(self)
    }

    /// Gate and up do not depend on the context.
    fn packed_sha256(&self, role: Projection, bits: [u32; 3]) -> Result<Option<&Hash>> {
        match role {
            Projection::Gate | Projection::Up => {
                Ok(Some(&self.measurement(role, bits[role as usize])?.packed_sha256))
            }
            Projection::Down => Ok(None),
        }
    }

    fn promise(&self, bits: [u32; 3]) -> Result<(Basis, [u32; 3], f64)> {
        let at = |role: Projection, bits: u32| Ok::<f64, crate::Error>(self.losses(role, &[bits])?[0]);
        let context = at(Projection::Gate, self.context[Projection::Gate as usize])?;
        if bits == self.context {
            return Ok((Basis::Measured, self.context, context));
        }
        let mut sum = context;
        for role in Projection::ALL {
            sum += at(role, bits[role as usize])? - at(role, self.context[role as usize])?;
        }
        Ok((Basis::FirstOrder, self.context, sum))
    }
}

impl ExpertProbe {
    /// The damping of down's correction; `None` where the source weight is its target.
    ///
    /// # Errors
    /// A damping that is no number.
    pub fn damping(&self) -> Result<Option<f64>> {
        self.down_damping.as_deref().map(parse_float17).transpose()
    }

    /// The relative global scale of a tensor at a width.
    ///
    /// # Errors
    /// A width that was not measured, or a scale that is no number.
    pub fn scale(&self, role: Projection, bits: u32) -> Result<f64> {
        parse_float17(&self.measurement(role, bits)?.scale)
    }

    fn measurement(&self, role: Projection, bits: u32) -> Result<&Measurement> {
        let found = self.tensors.get(role.as_str()).and_then(|widths| widths.get(&bits.to_string()));
        let missing = || {
            let missing = refuse("no usable measurement").expert(self.expert).tensor(role.as_str());
            missing.wanted(format!("a probe at {bits} bits")).into()
        };
        found.ok_or_else(missing)
    }

    /// The losses of a tensor at the candidate widths, in their order.
    ///
    /// # Errors
    /// A width that was not measured, or a loss that is no number.
    pub fn losses(&self, role: Projection, candidates: &[u32]) -> Result<Vec<f64>> {
        candidates
            .iter()
            .map(|&bits| {
                let not_a_number = |_| {
                    let place = refuse("no usable measurement").expert(self.expert).tensor(role.as_str());
                    place.wanted("a decimal loss").into()
                };
                self.measurement(role, bits)?.loss.parse().map_err(not_a_number)
            })
            .collect()
    }
}

/// Encodes a probe of one expert takes: every tensor at every width, and down once more for each gate or up off context.
pub fn encodes_of_an_expert(candidates: usize) -> usize {
    3 * candidates + 2 * (candidates - 1)
}

/// One encoded and decoded tensor.
struct Candidate {
    decoded: Decoded,
    scale: f64,
}

/// What an earlier round of probes, or a search, has settled for an expert.
#[derive(Debug, Clone, Default)]
pub struct Known<'a> {
    /// Damping of down's correction.
    pub damping: Option<Option<f64>>,
    /// The round whose relative global scales are kept: for gate and up they could not differ, and down's hardly
    /// depends on what feeds it.
    pub scales: Option<&'a ExpertProbe>,
}

/// Measures one expert. `done` is called after every encode.
///
/// # Errors
/// No held-out rows, and whatever an encode refuses.
pub fn probe_expert<C: Codec>(
    codec: &C,
    expert: &Expert<'_>,
    candidates: &[u32],
    context: [u32; 3],
    known: &Known<'_>,
    done: impl Fn(),
) -> Result<ExpertProbe> {
    expert.require_holdout()?;
    let mut probe = ExpertProbe {
        expert: expert.id,
        context,
        encodes: 0,
        dropped_rows: 0,
        down_damping: None,
        tensors: BTreeMap::new(),
    };
    let mut encode = |role: Projection,
                      bits: u32,
                      scale: Option<f64>,
                      covariance: &Matrix<f32>,
                      target: Option<&Matrix<f32>>|
     -> Result<Candidate> {
        let scale = match scale {
            Some(scale) => scale,
            None => match known.scales {
                Some(earlier) => earlier.scale(role, bits)?,
                None => expert.fit_scale(codec, role, bits, target)?,
            },
        };
        let decoded = decode(&expert.encode(codec, role, (bits, scale), covariance, target)?);
        probe.encodes += 1;
        done();
        Ok(Candidate { decoded, scale })
    };
    let input = expert.input_covariance()?;
    let mut across = |role| -> Result<BTreeMap<u32, Candidate>> {
        candidates.iter().map(|&bits| Ok((bits, encode(role, bits, None, &input, None)?))).collect()
    };
    let (gates, ups) = (across(Projection::Gate)?, across(Projection::Up)?);
    drop(input);
    let (gate, up) = (&gates[&context[0]].decoded, &ups[&context[1]].decoded);
    let damping = match known.damping {
        Some(known) => known,
        None => expert.choose_damping(&gate.dense, &up.dense)?,
    };
    let mut dropped_rows = 0;
    let mut down_input = |gate: &Decoded, up: &Decoded| -> Result<DownInput> {
        let input = expert.down_input(&gate.dense, &up.dense, damping)?;
        dropped_rows += input.dropped_rows;
        Ok(input)
    };
    let settled = down_input(gate, up)?;
    let downs: BTreeMap<u32, Candidate> = candidates
        .iter()
        .map(|&bits| {
            let target = settled.target.as_ref();
            Ok((bits, encode(Projection::Down, bits, None, &settled.covariance, target)?))
        })
        .collect::<Result<_>>()?;
    drop(settled);
    let down_scale = downs[&context[2]].scale;

    let reference = expert.reference();
    let loss = |g: &Decoded, u: &Decoded, d: &Decoded| expert.loss(&reference, &g.dense, &u.dense, &d.dense);
    let mut tensors = BTreeMap::new();
    for (role, own) in [(Projection::Gate, &gates), (Projection::Up, &ups)] {
        let mut widths = BTreeMap::new();
        for (&bits, candidate) in own {
            let (g, u) =
                if role == Projection::Gate { (&candidate.decoded, up) } else { (gate, &candidate.decoded) };
            let rebuilt;
            let down = if bits == context[role as usize] {
                &downs[&context[2]].decoded
            } else {
                let input = down_input(g, u)?;
                let target = input.target.as_ref();
                rebuilt = encode(Projection::Down, context[2], Some(down_scale), &input.covariance, target)?;
                &rebuilt.decoded
            };
            widths.insert(bits.to_string(), measurement(candidate, loss(g, u, down), [g, u, down]));
        }
        tensors.insert(role.as_str().to_owned(), widths);
    }
    let widths = downs.iter().map(|(bits, candidate)| {
        let down = &candidate.decoded;
        (bits.to_string(), measurement(candidate, loss(gate, up, down), [gate, up, down]))
    });
    tensors.insert(Projection::Down.as_str().to_owned(), widths.collect());
    probe.tensors = tensors;
    probe.dropped_rows = dropped_rows;
    probe.down_damping = damping.map(float17);
    Ok(probe)
}

fn measurement(candidate: &Candidate, loss: Loss, parts: [&Decoded; 3]) -> Measurement {
    Measurement {
        loss: float17(loss.absolute),
        relative_loss: float17(loss.relative()),
        scale: float17(candidate.scale),
        packed_sha256: candidate.decoded.packed_sha256.clone(),
        reconstruction_sha256: parts.map(|part| part.reconstruction_sha256.clone()),
    }
}
