//! From a payload to weights.
//!
//! Every weight is one product of exact factors (at most 11 + 4 + 5 bits), so its f32 is exact whatever the order of
//! multiplication, and every implementation gives the same bits.

use half::f16;
use rayon::prelude::*;

use super::code::{CodeWidth, NONE, P56_OUTSIDE, P64_ESCAPE};
use super::format::{KaijuTensor, RowBytes};
use super::golay::{LENGTH, WORDS};
use crate::linalg::Matrix;

/// Coordinates of a block's point, one byte each.
type Coordinates = [i8; LENGTH];

/// Digits of 0..729 to base 3, in the low 6 bytes.
static TRITS6: [u64; 729] = digits(3, 6);
/// Digits of a byte to base 4, in the low 4 bytes.
static QUADS4: [u64; 256] = digits(4, 4);
/// Bits of a byte, one a byte.
static BITS8: [u64; 256] = digits(2, 8);

const fn digits<const N: usize>(base: usize, count: usize) -> [u64; N] {
    let mut table = [0; N];
    let mut number = 0;
    while number < N {
        let (mut rest, mut at) = (number, 0);
        while at < count {
            table[number] |= ((rest % base) as u64) << (8 * at);
            rest /= base;
            at += 1;
        }
        number += 1;
    }
    table
}

/// The point of a code that is known to be valid.
#[inline(always)]
fn coordinates(width: CodeWidth, code: u64) -> Coordinates {
    // Eight bytes are written at a time; the last ones run over.
    let mut z = [0u8; LENGTH + 8];
    let mut write = |at: usize, digits: u64| z[at..at + 8].copy_from_slice(&digits.to_le_bytes());
    let (odd, word, least, outside);
    match width {
        CodeWidth::P56 => {
            (odd, word) = (code & 1, code >> 1 & 0xFFF);
            let (f, trits) = ((code >> 13) % 25, (code >> 13) / 25);
            let (low, high) = ((trits % 531_441) as u32, (trits / 531_441) as u32);
            for (at, half) in [(0, low), (12, high)] {
                write(at, TRITS6[(half % 729) as usize]);
                write(at + 6, TRITS6[(half / 729) as usize]);
            }
            least = 1;
            // See `CodeWidth::check`: the parity of the digits' sum is that of the number.
            let e = ((trits ^ code) & 1) as usize;
            let f = f as usize;
            outside = (f != NONE as usize).then(|| (f, P56_OUTSIDE[e][usize::from(z[f % LENGTH])]));
        }
        CodeWidth::P64 => {
            word = code & 0xFFF;
            let r = code >> 12;
            let digits = match r.checked_sub(P64_ESCAPE) {
                None => {
                    outside = None;
                    r
                }
                Some(escape) => {
                    let (f, low) = ((escape >> 47) as usize, escape >> 46 & 1 == 1);
                    outside = Some((f, if low { -3 } else { 2 }));
                    let below = (1u64 << (2 * f)) - 1;
                    let rest = escape & ((1 << 46) - 1);
                    rest & below | (rest & !below) << 2
                }
            };
            // Σz has the parity of the digits' low bits, and of the value outside, whose digit is 0 here.
            let low_bits = (digits & 0x5555_5555_5555).count_ones();
            odd = u64::from(low_bits & 1) ^ outside.map_or(0, |(_, value)| value as u64 & 1);
            let bytes = digits.to_le_bytes();
            (0..6).for_each(|at| write(4 * at, QUADS4[usize::from(bytes[at])]));
            least = 2;
        }
    }
    // Plain loops here and below: what takes a closure would not be compiled for the caller's instructions.
    let mut offsets: Coordinates = [0; LENGTH];
    for (offset, &digit) in offsets.iter_mut().zip(&z) {
        *offset = digit as i8 - least;
    }
    if let Some((f, value)) = outside {
        offsets[f] = value as i8;
    }
    let word = WORDS[word as usize].to_le_bytes();
    let mut bits = [0u8; LENGTH];
    for (at, byte) in bits.chunks_exact_mut(8).zip(word) {
        at.copy_from_slice(&BITS8[usize::from(byte)].to_le_bytes());
    }
    let odd = odd as i8;
    // Even: 2c + 4z. Odd: 1 + 4z, negated where c = 1.
    for (x, &bit) in offsets.iter_mut().zip(&bits) {
        let bit = bit as i8;
        let negated = -(bit & odd);
        *x = ((4 * *x + odd + 2 * (bit & (1 - odd))) ^ negated) - negated;
    }
    offsets
}

/// Bulk weights of a row, in the order of the bulk's columns.
#[inline(always)]
fn bulk_plain(width: CodeWidth, row: RowBytes<'_>, out: &mut [f32]) {
    let scale = row.scale.to_f32() / 16.0;
    let codes = row.codes.chunks_exact(width.bytes());
    for (block, (code, out)) in codes.zip(out.chunks_exact_mut(LENGTH)).enumerate() {
        let scale = scale * f32::from(row.block_scale(block) + 1);
        let x = match width {
            CodeWidth::P56 => coordinates(CodeWidth::P56, width.read(code)),
            CodeWidth::P64 => coordinates(CodeWidth::P64, width.read(code)),
        };
        for (out, x) in out.iter_mut().zip(x) {
            *out = scale * f32::from(x);
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,popcnt")]
fn bulk_avx2(width: CodeWidth, row: RowBytes<'_>, out: &mut [f32]) {
    bulk_plain(width, row, out);
}

/// The same on the best instructions there are.
fn bulk(width: CodeWidth, row: RowBytes<'_>, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("popcnt") {
        // SAFETY: the machine has AVX2 and POPCNT.
        return unsafe { bulk_avx2(width, row, out) };
    }
    bulk_plain(width, row, out);
}

impl KaijuTensor {
    /// One row of weights, `cols` values in the order of the columns.
    ///
    /// # Panics
    /// When `out` is not of that length or the row is beyond the last.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        let mut packed = vec![0.0; self.bulk_cols()];
        self.row_into(row, &mut packed, out);
    }

    /// The same with a buffer of `bulk_cols` values.
    fn row_into(&self, row: usize, packed: &mut [f32], out: &mut [f32]) {
        assert_eq!(out.len(), self.cols());
        bulk(self.code(), self.row_bytes(row), packed);
        // Between two columns of the side-band lies a run of the bulk.
        let (mut from, mut at) = (0, 0);
        for (hi, &column) in self.hi_index().iter().enumerate() {
            let run = column as usize - at;
            out[at..at + run].copy_from_slice(&packed[from..from + run]);
            let (_, values) = self.hi_column_bytes(hi);
            out[column as usize] = self.hi_scales()[hi] * f32::from(values[row] as i8);
            (from, at) = (from + run, at + run + 1);
        }
        out[at..].copy_from_slice(&packed[from..]);
    }

    /// All weights, `[rows, cols]`.
    pub fn dense(&self) -> Matrix<f32> {
        let mut dense = Matrix::zeros(self.rows(), self.cols());
        dense.data.par_chunks_mut(self.cols()).enumerate().for_each_init(
            || vec![0.0; self.bulk_cols()],
            |packed, (row, out)| self.row_into(row, packed, out),
        );
        dense
    }

    /// `y[m, rows] = x[m, cols] · Wᵀ`, a row of weights at a time: no dense copy. Sums run over ascending columns in f32.
    ///
    /// # Panics
    /// When `x` has another number of columns.
    pub fn forward(&self, x: &Matrix<f32>) -> Matrix<f32> {
        assert_eq!(x.cols, self.cols());
        let mut outputs = Matrix::zeros(self.rows(), x.rows);
        outputs.data.par_chunks_mut(x.rows.max(1)).enumerate().for_each_init(
            || (vec![0.0; self.bulk_cols()], vec![0.0; self.cols()]),
            |(packed, weights), (row, out)| {
                self.row_into(row, packed, weights);
                for (y, x) in out.iter_mut().zip(x.data.chunks_exact(x.cols)) {
                    *y = x.iter().zip(&*weights).map(|(x, w)| x * w).sum();
                }
            },
        );
        outputs.transposed()
    }
}

/// A weight of the side-band.
pub(super) fn hi_value(scale: f16, value: i8) -> f32 {
    scale.to_f32() * f32::from(value)
}
