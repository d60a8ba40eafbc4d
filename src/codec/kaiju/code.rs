//! The two fixed-width codes of lattice points.
//!
//! 56 bits: t in {-1, 0, 1} by coordinate, z = t but for at most one coordinate f (24 = none). With
//! e = (m + Σt) mod 2, f = 24 needs e = 0, and t = -1, 0, +1 stands for z = -2, -5, +2 where e = 1 and for -3, -4, +3 where
//! e = 0. N = m + 2 (k + 4096 (f + 25 Σ (t_i + 1) 3^i)).
//!
//! 64 bits: z in -2..=1 as digits z + 2, at most one coordinate in {-3, 2}; m is the parity of Σz. N = k + 4096 r; r below
//! 4^24 has 24 digits of base 4; above, r - 4^24 = (2f + [z_f = -3]) 4^23 + the other 23 digits.
//!
//! Digits are least significant first, coordinate 0 lowest; N is stored little-endian in 7 or 8 bytes.
//!
//! Source: the format's document (distributed-inference/KAIJU1_FORMAT.md of forkjoin-ai/gnosis), whose fields do not fit
//! their 56 bits as written; `docs/formats/kaiju1.md` says what was changed.

use super::golay::LENGTH;
use super::leech::Point;
use super::region::Region;
use crate::error::{Result, refuse};

/// 3^24.
const TRITS: u64 = 3u64.pow(24);
/// First N of 56 bits that stands for nothing.
pub(super) const P56_END: u64 = 2 * 4096 * 25 * TRITS;
/// 4^24: the first r with a coordinate outside of the box.
pub(super) const P64_ESCAPE: u64 = 1 << 48;
/// First r of 64 bits that stands for nothing.
pub(super) const P64_END: u64 = 13 * P64_ESCAPE;
/// f of 56 bits where no coordinate is outside of the box.
pub(super) const NONE: u64 = 24;

/// z that t = -1, 0, 1 stands for at f, by e.
pub(super) const P56_OUTSIDE: [[i32; 3]; 2] = [[-3, -4, 3], [-2, -5, 2]];

/// Width of a code of 24 weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CodeWidth {
    /// 56 bits.
    P56,
    /// 64 bits.
    P64,
}

impl CodeWidth {
    /// Both.
    pub const ALL: [Self; 2] = [Self::P56, Self::P64];

    /// Bits a code: 56 or 64.
    pub fn bits(self) -> u32 {
        8 * self.bytes() as u32
    }

    /// Bytes a code.
    pub fn bytes(self) -> usize {
        match self {
            Self::P56 => 7,
            Self::P64 => 8,
        }
    }

    /// The width of so many bits.
    ///
    /// # Errors
    /// Neither 56 nor 64.
    pub fn from_bits(bits: u32) -> Result<Self> {
        let width = Self::ALL.into_iter().find(|width| width.bits() == bits);
        width.ok_or_else(|| refuse(format!("a code of {bits} bits")).wanted("56 or 64").into())
    }

    /// The points it represents.
    pub fn region(self) -> Region {
        match self {
            Self::P56 => Region::P56,
            Self::P64 => Region::P64,
        }
    }

    /// The code of a point, none where the width does not represent it or it is not in the lattice.
    pub fn encode(self, point: &Point) -> Option<u64> {
        if !point.is_in_lattice() {
            return None;
        }
        let values = self.region().values()?;
        let inside = |z: i32| values.inside.iter().any(|values| values.contains(&z));
        let mut beyond = (0..LENGTH).filter(|&i| !inside(point.z[i]));
        let at = beyond.next();
        let outside = |&i: &usize| values.outside.iter().any(|values| values.contains(&point.z[i]));
        if beyond.next().is_some() || !at.iter().all(outside) {
            return None;
        }
        let word = u64::from(point.word);
        match self {
            Self::P56 => {
                let mut digits = point.z;
                if let Some(f) = at {
                    let column = |row: &[i32; 3]| row.iter().position(|&z| z == point.z[f]);
                    digits[f] = P56_OUTSIDE.iter().find_map(column)? as i32 - 1;
                }
                let trits = digits.iter().rev().fold(0, |sum, t| sum * 3 + (t + 1) as u64);
                let f = at.map_or(NONE, |f| f as u64);
                Some(u64::from(point.odd) + 2 * (word + 4096 * (f + 25 * trits)))
            }
            Self::P64 => {
                let rest = (0..LENGTH).rev().filter(|&i| at != Some(i));
                let digits = rest.fold(0, |sum, i| sum * 4 + (point.z[i] + 2) as u64);
                let escape = |f: usize| {
                    let low = u64::from(point.z[f] == -3);
                    P64_ESCAPE + ((2 * f as u64 + low) << 46)
                };
                Some(word + 4096 * (digits + at.map_or(0, escape)))
            }
        }
    }

    /// The point of a code.
    ///
    /// # Errors
    /// A code that stands for nothing.
    pub fn decode(self, code: u64) -> Result<Point> {
        self.check(code)?;
        match self {
            Self::P56 => {
                let (odd, word) = (code & 1 == 1, (code >> 1 & 0xFFF) as u16);
                let (f, mut trits) = ((code >> 13) % 25, (code >> 13) / 25);
                let mut z = [0; LENGTH];
                for z in &mut z {
                    *z = (trits % 3) as i32 - 1;
                    trits /= 3;
                }
                if f != NONE {
                    let e = (z.iter().sum::<i32>() & 1) as usize ^ usize::from(odd);
                    z[f as usize] = P56_OUTSIDE[e][(z[f as usize] + 1) as usize];
                }
                Ok(Point { odd, word, z })
            }
            Self::P64 => {
                let (word, r) = ((code & 0xFFF) as u16, code >> 12);
                let mut z = [0; LENGTH];
                if let Some(escape) = r.checked_sub(P64_ESCAPE) {
                    let (f, low) = ((escape >> 47) as usize, escape >> 46 & 1 == 1);
                    let rest = (0..LENGTH).filter(|&i| i != f).enumerate();
                    rest.for_each(|(digit, i)| z[i] = (escape >> (2 * digit) & 3) as i32 - 2);
                    z[f] = if low { -3 } else { 2 };
                } else {
                    (0..LENGTH).for_each(|i| z[i] = (r >> (2 * i) & 3) as i32 - 2);
                }
                let odd = z.iter().fold(0, |sum, z| sum ^ z) & 1 == 1;
                Ok(Point { odd, word, z })
            }
        }
    }

    /// Refuses a code that stands for nothing.
    ///
    /// # Errors
    /// Says what the code is and what would be right.
    pub fn check(self, code: u64) -> Result<()> {
        match self {
            Self::P56 if code >= P56_END => {
                refuse(format!("code {code:#x} is out of range")).wanted(format!("below {P56_END:#x}")).err()
            }
            Self::P56 => {
                let (f, trits) = ((code >> 13) % 25, (code >> 13) / 25);
                // Powers of 3 are odd, so the digits' sum has the parity of the number, and 24 coordinates subtract an even
                // count: this is e.
                if f == NONE && (trits ^ code) & 1 == 1 {
                    return refuse(format!("code {code:#x} is reserved: its offsets have the wrong parity"))
                        .wanted("a coordinate that mends the parity, or an even sum")
                        .err();
                }
                Ok(())
            }
            Self::P64 if code >> 12 >= P64_END => {
                let end = P64_END as u128 * 4096;
                refuse(format!("code {code:#x} is out of range")).wanted(format!("below {end:#x}")).err()
            }
            Self::P64 => Ok(()),
        }
    }

    /// Reads a stored code.
    pub fn read(self, bytes: &[u8]) -> u64 {
        let mut whole = [0; 8];
        whole[..self.bytes()].copy_from_slice(&bytes[..self.bytes()]);
        u64::from_le_bytes(whole)
    }

    /// Appends a code as stored.
    pub fn write(self, code: u64, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(&code.to_le_bytes()[..self.bytes()]);
    }
}
