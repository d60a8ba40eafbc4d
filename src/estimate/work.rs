//! Amounts of work, by what this machine does at a rate of its own.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Serialize, Serializer};

/// One kind of work. Sizes are those that a rate depends on by more than an amount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Op {
    /// Tile search at a width; weights.
    Search(u32),
    /// Block LDL of a K x K metric with its transform; matrices.
    Factor(usize),
    /// tr(D) of the same, without L; matrices.
    Trace(usize),
    /// f64 Cholesky of K x K and solving for K right-hand sides; matrices.
    Solve(usize),
    /// Covariance sums; f64 operations.
    Syrk,
    /// f32 products: expert outputs, error feedback, attention, heads; operations.
    ProductF32,
    /// f64 products: moments and corrections of down; operations.
    ProductF64,
    /// Activations; exponentials.
    Activation,
    /// Weights divided by their vectors and rotated.
    Rotate,
    /// Weights packed, unpacked and decoded twice.
    Pack,
    /// Weights decoded to dense f16, hashed and widened.
    Decode,
    /// Weights decoded and laid out for a forward pass.
    Install,
    /// BF16 weights widened and transposed.
    Load,
    /// Weights read once in a simple sum.
    Scan,
    /// Bytes through SHA-256.
    Hash,
    /// Integer programs that spend a layer's upgrades.
    Allocate,
    /// Bytes written and made durable.
    Write,
    /// Files published: made durable and renamed.
    Publish,
}

impl Op {
    /// What an amount counts.
    pub fn unit(self) -> &'static str {
        match self {
            Self::Factor(_) | Self::Trace(_) | Self::Solve(_) => "matrices",
            Self::Syrk | Self::ProductF32 | Self::ProductF64 => "flop",
            Self::Activation => "exponentials",
            Self::Hash | Self::Write => "bytes",
            Self::Publish => "files",
            Self::Allocate => "programs",
            _ => "weights",
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Search(bits) => write!(f, "tile search at {bits} bits"),
            Self::Factor(k) => write!(f, "block LDL of {k}"),
            Self::Trace(k) => write!(f, "trace of D of {k}"),
            Self::Solve(k) => write!(f, "f64 solve of {k}"),
            Self::Syrk => f.write_str("covariance sums"),
            Self::ProductF32 => f.write_str("f32 products"),
            Self::ProductF64 => f.write_str("f64 products"),
            Self::Activation => f.write_str("activations"),
            Self::Rotate => f.write_str("rotation"),
            Self::Pack => f.write_str("packing with read-back"),
            Self::Decode => f.write_str("decoding with hashes"),
            Self::Install => f.write_str("decoding for the forward"),
            Self::Load => f.write_str("loading source weights"),
            Self::Scan => f.write_str("scanning weights"),
            Self::Hash => f.write_str("SHA-256"),
            Self::Allocate => f.write_str("allocation"),
            Self::Write => f.write_str("durable writing"),
            Self::Publish => f.write_str("publishing files"),
        }
    }
}

impl Serialize for Op {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Amounts by kind.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Work(BTreeMap<Op, f64>);

impl Work {
    /// Adds an amount.
    pub fn add(&mut self, op: Op, amount: f64) {
        if amount > 0.0 {
            *self.0.entry(op).or_default() += amount;
        }
    }

    /// Adds `times` another.
    pub fn add_times(&mut self, times: f64, other: &Self) {
        other.0.iter().for_each(|(&op, amount)| self.add(op, times * amount));
    }

    /// The amounts, by kind.
    pub fn amounts(&self) -> impl Iterator<Item = (Op, f64)> {
        self.0.iter().map(|(&op, &amount)| (op, amount))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_add_up_by_kind() {
        let mut expert = Work::default();
        expert.add(Op::Search(3), 10.0);
        expert.add(Op::Search(4), 1.0);
        expert.add(Op::Hash, 0.0);
        let mut layer = Work::default();
        layer.add_times(2.0, &expert);
        layer.add(Op::Search(3), 5.0);
        assert_eq!(layer.amounts().collect::<Vec<_>>(), [(Op::Search(3), 25.0), (Op::Search(4), 2.0)]);
    }
}
