//! A replayed state against the sealed one.

use std::fmt;

use half::bf16;
use serde::Serialize;

use super::super::state::PromptState;
use crate::error::{Result, refuse};
use crate::store::hash::Hash;

/// A BF16 value.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Bf16Value {
    /// As f32.
    pub value: f32,
    /// Its 16 bits, `0x` and four hexadecimal digits.
    pub bits: String,
}

impl Bf16Value {
    fn new(bits: u16) -> Self {
        Self { value: bf16::from_bits(bits).to_f32(), bits: format!("0x{bits:04x}") }
    }
}

impl fmt::Display for Bf16Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.value, self.bits)
    }
}

/// The first difference of a prompt's state: the lowest row, in it the top-k list (which a layer makes first) before the
/// hidden state.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "of", rename_all = "snake_case")]
pub enum Difference {
    /// A value of the hidden state.
    Hidden {
        /// Token.
        row: usize,
        /// Channel of the hidden size.
        channel: usize,
        /// Value replayed.
        replayed: Bf16Value,
        /// Value sealed.
        sealed: Bf16Value,
    },
    /// An entry of a top-k list.
    TopkIndices {
        /// Token.
        row: usize,
        /// Place in the list.
        place: usize,
        /// Key replayed.
        replayed: i32,
        /// Key sealed.
        sealed: i32,
    },
    /// A token's position.
    Positions {
        /// Token.
        row: usize,
        /// Position replayed.
        replayed: u32,
        /// Position sealed.
        sealed: u32,
    },
    /// The tensors are equal, but the file says that it was made from something else.
    Job {
        /// The job by what the journal seals.
        replayed: Hash,
        /// The job that the file names.
        sealed: Hash,
    },
    /// The file as a whole; the sealed one is deleted.
    Hash {
        /// SHA-256 of the file replayed.
        replayed: Hash,
        /// SHA-256 sealed.
        sealed: Hash,
    },
}

impl Difference {
    /// The row, where it is known.
    pub fn row(&self) -> Option<usize> {
        match self {
            Self::Hidden { row, .. } | Self::TopkIndices { row, .. } | Self::Positions { row, .. } => {
                Some(*row)
            }
            Self::Job { .. } | Self::Hash { .. } => None,
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hidden { channel, replayed, sealed, .. } => {
                write!(f, "hidden state, channel {channel}: replayed {replayed}, sealed {sealed}")
            }
            Self::TopkIndices { place, replayed, sealed, .. } => {
                write!(f, "top-k list, place {place}: replayed {replayed}, sealed {sealed}")
            }
            Self::Positions { replayed, sealed, .. } => {
                write!(f, "position: replayed {replayed}, sealed {sealed}")
            }
            Self::Job { replayed, sealed } => {
                write!(f, "equal values, but the job is {replayed}, and the sealed file names {sealed}")
            }
            Self::Hash { replayed, sealed } => {
                write!(f, "the file's sha256: replayed {replayed}, sealed {sealed}")
            }
        }
    }
}

/// The first difference of the tensors of a state.
///
/// # Errors
/// When they are not of the same shapes: names the tensor.
pub fn first_difference(replayed: &PromptState, sealed: &PromptState) -> Result<Option<Difference>> {
    let shapes = |state: &PromptState| {
        let list = state.topk.as_ref().map(|topk| vec![topk.indices.len() / topk.k.max(1), topk.k]);
        [("hidden", Some(state.hidden.dims().to_vec())), ("topk_indices", list)]
    };
    let mut pairs = shapes(replayed).into_iter().zip(shapes(sealed));
    if let Some(((tensor, replayed), (_, sealed))) = pairs.find(|(replayed, sealed)| replayed != sealed) {
        return refuse(format!("the sealed state's shape is {sealed:?}"))
            .tensor(tensor)
            .wanted(format!("{replayed:?}"))
            .err();
    }
    let width = replayed.hidden.dim(1)?;
    let hidden = unequal(&bits(replayed)?, &bits(sealed)?).map(|(at, replayed, sealed)| {
        let (replayed, sealed) = (Bf16Value::new(replayed), Bf16Value::new(sealed));
        Difference::Hidden { row: at / width, channel: at % width, replayed, sealed }
    });
    let topk = replayed.topk.as_ref().zip(sealed.topk.as_ref()).and_then(|(replayed, sealed)| {
        let (at, ours, theirs) = unequal(&replayed.indices, &sealed.indices)?;
        let (row, place) = (at / replayed.k, at % replayed.k);
        Some(Difference::TopkIndices { row, place, replayed: ours, sealed: theirs })
    });
    let positions = unequal(&replayed.positions, &sealed.positions)
        .map(|(row, replayed, sealed)| Difference::Positions { row, replayed, sealed });
    // The first of equal rows is taken.
    Ok([positions, topk, hidden].into_iter().flatten().min_by_key(Difference::row))
}

/// The bits of the hidden state's BF16 values: zeros of either sign are two values.
fn bits(state: &PromptState) -> Result<Vec<u16>> {
    let bytes = state.hidden_bytes()?;
    Ok(bytes.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b)).collect())
}

/// Place and values of the first difference.
fn unequal<T: Copy + PartialEq>(replayed: &[T], sealed: &[T]) -> Option<(usize, T, T)> {
    let at = replayed.iter().zip(sealed).position(|(replayed, sealed)| replayed != sealed)?;
    Some((at, replayed[at], sealed[at]))
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::*;
    use crate::model::TopK;

    /// Two rows of three channels, lists of two.
    fn state(change: impl FnOnce(&mut [f32], &mut [i32], &mut [u32])) -> PromptState {
        let (mut hidden, mut indices) = ([1.0, 0.0, 3.0, 4.0, 5.0, 6.0], [0, -1, 1, 0]);
        let mut positions = [0, 1];
        change(&mut hidden, &mut indices, &mut positions);
        PromptState {
            hidden: Tensor::from_slice(&hidden, (2, 3), &Device::Cpu).unwrap(),
            topk: Some(TopK { indices: indices.to_vec(), k: 2 }),
            positions: positions.to_vec(),
        }
    }

    /// What is said where the sealed state is the one above after `change`.
    fn found(change: impl FnOnce(&mut [f32], &mut [i32], &mut [u32])) -> Option<Difference> {
        first_difference(&state(|_, _, _| {}), &state(change)).unwrap()
    }

    #[test]
    fn the_lowest_row_is_named_with_both_values() {
        assert_eq!(found(|_, _, _| {}), None);
        let value = |value: f32, bits: &str| Bf16Value { value, bits: bits.to_owned() };
        assert_eq!(
            found(|hidden, _, _| hidden[4] = -5.0),
            Some(Difference::Hidden {
                row: 1,
                channel: 1,
                replayed: value(5.0, "0x40a0"),
                sealed: value(-5.0, "0xc0a0")
            })
        );
        // A sign of zero is a difference of bytes.
        let zero = found(|hidden, _, _| (hidden[1], hidden[5]) = (-0.0, 7.0)).unwrap();
        assert_eq!(zero.to_string(), "hidden state, channel 1: replayed 0 (0x0000), sealed -0 (0x8000)");
        assert_eq!(zero.row(), Some(0));
        let list = Difference::TopkIndices { row: 1, place: 1, replayed: 0, sealed: 1 };
        // In the same row the list is named, in a later one it is not.
        assert_eq!(found(|hidden, indices, _| (hidden[3], indices[3]) = (0.0, 1)), Some(list));
        let later = found(|hidden, indices, _| (hidden[2], indices[2]) = (0.0, 0)).unwrap();
        assert!(matches!(later, Difference::Hidden { row: 0, channel: 2, .. }), "{later:?}");
        let position = Difference::Positions { row: 1, replayed: 1, sealed: 7 };
        assert_eq!(found(|_, _, positions| positions[1] = 7), Some(position));
    }

    #[test]
    fn other_shapes_are_refused_by_the_tensor() {
        let replayed = state(|_, _, _| {});
        let mut sealed = replayed.clone();
        sealed.topk = None;
        let error = first_difference(&replayed, &sealed).unwrap_err().to_string();
        assert!(error.contains("topk_indices") && error.contains("None"), "{error}");
        sealed = replayed.clone();
        sealed.hidden = sealed.hidden.reshape((3, 2)).unwrap();
        let error = first_difference(&replayed, &sealed).unwrap_err().to_string();
        assert!(error.contains("tensor hidden") && error.contains("[3, 2]"), "{error}");
    }
}
