//! Sixteen f32 at once, on what a machine has.
//!
//! Every operation is that of the f32 type, lane by lane, so results do not depend on the implementation. Minima are
//! taken of numbers that are never NaN and never -0.

/// Sixteen f32.
pub trait Lanes: Copy {
    /// The same value everywhere.
    fn splat(value: f32) -> Self;
    /// Reads 16 values.
    fn load(values: &[f32; 16]) -> Self;
    /// Writes 16 values.
    fn store(self, values: &mut [f32; 16]);
    /// Lane-wise sum.
    fn add(self, other: Self) -> Self;
    /// Lane-wise difference.
    fn sub(self, other: Self) -> Self;
    /// Lane-wise product.
    fn mul(self, other: Self) -> Self;
    /// Lane-wise minimum.
    fn min(self, other: Self) -> Self;
    /// The nearest integer, ties to even; exact below 2^22.
    fn round(self) -> Self;
    /// Lane l of the result is lane `index[l]` (0 to 15).
    fn permute(self, index: &[u32; 16]) -> Self;
    /// Lane l of the result is lane `l ^ with` (0 to 15).
    fn exchange(self, with: usize) -> Self;
    /// `one` where the bit of the lane is set, `zero` elsewhere.
    fn choose(bits: u16, zero: Self, one: Self) -> Self;
    /// Bits of the lanes that are less than or equal to the other's.
    fn at_most(self, other: Self) -> u32;
    /// The least lane.
    fn least(self) -> f32;
}

/// Adding and subtracting this rounds an f32 below 2^22 to the nearest integer, ties to even.
const ROUND: f32 = 12_582_912.0;

/// Plain arrays, for any machine. Its methods are calls: inlined everywhere, arrays would make one function of some hundred
/// thousand instructions, which takes a compiler minutes.
#[derive(Clone, Copy)]
pub struct Plain([f32; 16]);

impl Plain {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|lane| f(self.0[lane], other.0[lane])))
    }
}

impl Lanes for Plain {
    #[inline(never)]
    fn splat(value: f32) -> Self {
        Self([value; 16])
    }

    #[inline(never)]
    fn load(values: &[f32; 16]) -> Self {
        Self(*values)
    }

    #[inline(never)]
    fn store(self, values: &mut [f32; 16]) {
        *values = self.0;
    }

    #[inline(never)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }

    #[inline(never)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }

    #[inline(never)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }

    #[inline(never)]
    fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }

    #[inline(never)]
    fn round(self) -> Self {
        Self(self.0.map(|x| (x + ROUND) - ROUND))
    }

    #[inline(never)]
    fn permute(self, index: &[u32; 16]) -> Self {
        Self(index.map(|lane| self.0[lane as usize & 15]))
    }

    #[inline(never)]
    fn exchange(self, with: usize) -> Self {
        Self(std::array::from_fn(|lane| self.0[(lane ^ with) & 15]))
    }

    #[inline(never)]
    fn choose(bits: u16, zero: Self, one: Self) -> Self {
        Self(std::array::from_fn(|lane| if bits >> lane & 1 == 1 { one.0[lane] } else { zero.0[lane] }))
    }

    #[inline(never)]
    fn at_most(self, other: Self) -> u32 {
        (0..16).fold(0, |bits, lane| bits | u32::from(self.0[lane] <= other.0[lane]) << lane)
    }

    #[inline(never)]
    fn least(self) -> f32 {
        self.0.into_iter().fold(f32::INFINITY, |a, b| if b < a { b } else { a })
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! Every method runs only within the engines of [`super::super::platform`], which are handed out on machines that
    //! have the instructions.

    use std::arch::x86_64::*;

    use super::{Lanes, ROUND};

    /// One AVX-512 register.
    #[derive(Clone, Copy)]
    pub struct Avx512(__m512);

    /// Two AVX2 registers.
    #[derive(Clone, Copy)]
    pub struct Avx2([__m256; 2]);

    const LANES: [i32; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

    impl Lanes for Avx512 {
        #[inline(always)]
        fn splat(value: f32) -> Self {
            // SAFETY: as this module says.
            Self(unsafe { _mm512_set1_ps(value) })
        }

        #[inline(always)]
        fn load(values: &[f32; 16]) -> Self {
            // SAFETY: as this module says; 16 values are read.
            Self(unsafe { _mm512_loadu_ps(values.as_ptr()) })
        }

        #[inline(always)]
        fn store(self, values: &mut [f32; 16]) {
            // SAFETY: as this module says; 16 values are written.
            unsafe { _mm512_storeu_ps(values.as_mut_ptr(), self.0) }
        }

        #[inline(always)]
        fn add(self, other: Self) -> Self {
            // SAFETY: as this module says.
            Self(unsafe { _mm512_add_ps(self.0, other.0) })
        }

        #[inline(always)]
        fn sub(self, other: Self) -> Self {
            // SAFETY: as this module says.
            Self(unsafe { _mm512_sub_ps(self.0, other.0) })
        }

        #[inline(always)]
        fn mul(self, other: Self) -> Self {
            // SAFETY: as this module says.
            Self(unsafe { _mm512_mul_ps(self.0, other.0) })
        }

        #[inline(always)]
        fn min(self, other: Self) -> Self {
            // SAFETY: as this module says.
            Self(unsafe { _mm512_min_ps(self.0, other.0) })
        }

        #[inline(always)]
        fn round(self) -> Self {
            self.add(Self::splat(ROUND)).sub(Self::splat(ROUND))
        }

        #[inline(always)]
        fn permute(self, index: &[u32; 16]) -> Self {
            // SAFETY: as this module says; 16 indices are read.
            Self(unsafe { _mm512_permutexvar_ps(_mm512_loadu_si512(index.as_ptr().cast()), self.0) })
        }

        #[inline(always)]
        fn exchange(self, with: usize) -> Self {
            // SAFETY: as this module says; 16 indices are read.
            unsafe {
                let lanes = _mm512_loadu_si512(LANES.as_ptr().cast());
                let index = _mm512_xor_si512(lanes, _mm512_set1_epi32(with as i32));
                Self(_mm512_permutexvar_ps(index, self.0))
            }
        }

        #[inline(always)]
        fn choose(bits: u16, zero: Self, one: Self) -> Self {
            // SAFETY: as this module says.
            Self(unsafe { _mm512_mask_blend_ps(bits, zero.0, one.0) })
        }

        #[inline(always)]
        fn at_most(self, other: Self) -> u32 {
            // SAFETY: as this module says.
            u32::from(unsafe { _mm512_cmp_ps_mask::<_CMP_LE_OQ>(self.0, other.0) })
        }

        #[inline(always)]
        fn least(self) -> f32 {
            // SAFETY: as this module says.
            unsafe { _mm512_reduce_min_ps(self.0) }
        }
    }

    /// Lane-wise operations on both registers.
    macro_rules! both {
        ($a:expr, $b:expr, $operation:ident) => {
            // SAFETY: as this module says.
            Self(unsafe { [$operation($a.0[0], $b.0[0]), $operation($a.0[1], $b.0[1])] })
        };
    }

    impl Lanes for Avx2 {
        #[inline(always)]
        fn splat(value: f32) -> Self {
            // SAFETY: as this module says.
            Self([unsafe { _mm256_set1_ps(value) }; 2])
        }

        #[inline(always)]
        fn load(values: &[f32; 16]) -> Self {
            // SAFETY: as this module says; twice 8 of 16 values are read.
            Self(unsafe { [_mm256_loadu_ps(values.as_ptr()), _mm256_loadu_ps(values.as_ptr().add(8))] })
        }

        #[inline(always)]
        fn store(self, values: &mut [f32; 16]) {
            // SAFETY: as this module says; twice 8 of 16 values are written.
            unsafe {
                _mm256_storeu_ps(values.as_mut_ptr(), self.0[0]);
                _mm256_storeu_ps(values.as_mut_ptr().add(8), self.0[1]);
            }
        }

        #[inline(always)]
        fn add(self, other: Self) -> Self {
            both!(self, other, _mm256_add_ps)
        }

        #[inline(always)]
        fn sub(self, other: Self) -> Self {
            both!(self, other, _mm256_sub_ps)
        }

        #[inline(always)]
        fn mul(self, other: Self) -> Self {
            both!(self, other, _mm256_mul_ps)
        }

        #[inline(always)]
        fn min(self, other: Self) -> Self {
            both!(self, other, _mm256_min_ps)
        }

        #[inline(always)]
        fn round(self) -> Self {
            self.add(Self::splat(ROUND)).sub(Self::splat(ROUND))
        }

        #[inline(always)]
        fn permute(self, index: &[u32; 16]) -> Self {
            let mut out = self.0;
            for (out, index) in out.iter_mut().zip(index.as_chunks::<8>().0) {
                // SAFETY: as this module says; 8 indices are read. The permutation looks at 3 bits of each, the blend at
                // bit 3, moved to the sign.
                unsafe {
                    let index = _mm256_loadu_si256(index.as_ptr().cast());
                    let low = _mm256_permutevar8x32_ps(self.0[0], index);
                    let high = _mm256_permutevar8x32_ps(self.0[1], index);
                    *out = _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(index)));
                }
            }
            Self(out)
        }

        #[inline(always)]
        fn exchange(self, with: usize) -> Self {
            // SAFETY: as this module says; 8 indices are read.
            unsafe {
                let lanes = _mm256_loadu_si256(LANES.as_ptr().cast());
                let index = _mm256_xor_si256(lanes, _mm256_set1_epi32(with as i32 & 7));
                let low = _mm256_permutevar8x32_ps(self.0[0], index);
                let high = _mm256_permutevar8x32_ps(self.0[1], index);
                let crossed = _mm256_castsi256_ps(_mm256_set1_epi32((with as i32) << 28));
                Self([_mm256_blendv_ps(low, high, crossed), _mm256_blendv_ps(high, low, crossed)])
            }
        }

        #[inline(always)]
        fn choose(bits: u16, zero: Self, one: Self) -> Self {
            // SAFETY: as this module says; 8 lane numbers are read.
            unsafe {
                let lanes = _mm256_loadu_si256(LANES.as_ptr().cast());
                // Bit l of `bits` moved to the sign of lane l.
                let shift = _mm256_sub_epi32(_mm256_set1_epi32(31), lanes);
                let mut out = zero.0;
                for (half, out) in out.iter_mut().enumerate() {
                    let bits = _mm256_set1_epi32(i32::from(bits) >> (8 * half));
                    let mask = _mm256_castsi256_ps(_mm256_sllv_epi32(bits, shift));
                    *out = _mm256_blendv_ps(*out, one.0[half], mask);
                }
                Self(out)
            }
        }

        #[inline(always)]
        fn at_most(self, other: Self) -> u32 {
            // SAFETY: as this module says.
            unsafe {
                let low = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LE_OQ>(self.0[0], other.0[0]));
                let high = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LE_OQ>(self.0[1], other.0[1]));
                (low | high << 8) as u32
            }
        }

        #[inline(always)]
        fn least(self) -> f32 {
            let mut values = [0.0; 16];
            self.store(&mut values);
            values.into_iter().fold(f32::INFINITY, |a, b| if b < a { b } else { a })
        }
    }
}
