//! Which offsets z a search may choose from.
//!
//! A code keeps every z in a box, but for at most one coordinate that may lie outside of it. Both codes and the whole
//! lattice are this one shape: per parity of z the values inside and those outside.

/// A set of lattice points to search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Region {
    /// Every point of the Leech lattice.
    Lattice,
    /// What 56 bits represent: z in -1..=1, at most one coordinate in -5..=-2 or 2..=3.
    P56,
    /// What 64 bits represent: z in -2..=1, at most one coordinate -3 or 2.
    P64,
}

/// The values of z that a region allows, even ones first, inside and outside of the box.
#[derive(Debug)]
pub struct Values {
    /// Values inside, by parity of z.
    pub inside: [&'static [i32]; 2],
    /// Values that at most one coordinate may have, by parity of z.
    pub outside: [&'static [i32]; 2],
}

impl Region {
    /// Its values; none where every integer is allowed.
    pub fn values(self) -> Option<&'static Values> {
        const P56: Values = Values { inside: [&[0], &[-1, 1]], outside: [&[-4, -2, 2], &[-5, -3, 3]] };
        const P64: Values = Values { inside: [&[-2, 0], &[-1, 1]], outside: [&[2], &[-3]] };
        match self {
            Self::Lattice => None,
            Self::P56 => Some(&P56),
            Self::P64 => Some(&P64),
        }
    }
}
