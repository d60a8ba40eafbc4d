//! Instruction sets: which this machine has, and their vectors.
//!
//! A vector is what the micro-kernel ([`kernel`](super::kernel)) is written in: load, store, splat, add and fused
//! multiply-add, each exactly rounded, hence bit equality between [`Engine`]s. Without FMA in the target's baseline
//! [`Engine::Portable`] makes a library call of each multiply-add: slow and the same.
//!
//! What it does not do: NEON by hand; there the compiler makes vectors of the portable code.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m256, __m256d, __m512, __m512d, _mm256_add_pd, _mm256_add_ps, _mm256_fmadd_pd, _mm256_fmadd_ps,
    _mm256_loadu_pd, _mm256_loadu_ps, _mm256_set1_pd, _mm256_set1_ps, _mm256_storeu_pd, _mm256_storeu_ps,
    _mm512_add_pd, _mm512_add_ps, _mm512_fmadd_pd, _mm512_fmadd_ps, _mm512_loadu_pd, _mm512_loadu_ps,
    _mm512_set1_pd, _mm512_set1_ps, _mm512_storeu_pd, _mm512_storeu_ps,
};

/// An instruction set the kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// Whatever the target's baseline offers.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512F.
    Avx512,
}

impl Engine {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    /// Whether this machine can run it.
    pub(super) fn is_present(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => is_x86_feature_detected!("avx512f"),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// The fastest that this machine can run.
    pub(super) fn best() -> Self {
        [Self::Avx512, Self::Avx2].into_iter().find(|engine| engine.is_present()).unwrap_or(Self::Portable)
    }
}

/// The engines this machine can run, fastest last.
pub fn engines() -> Vec<Engine> {
    [Engine::Portable, Engine::Avx2, Engine::Avx512]
        .into_iter()
        .filter(|engine| engine.is_present())
        .collect()
}

/// The two element types.
pub(super) trait Real: Copy + Default + Send + Sync + std::ops::AddAssign {
    /// Columns of a packed panel: 64 bytes, a cache line and an AVX-512 vector.
    const PANEL: usize = 64 / size_of::<Self>();
    /// `self * factor + sum`, rounded once.
    fn fma(self, factor: Self, sum: Self) -> Self;
    /// The vector of [`Engine::Portable`].
    type Portable: Vector<Self>;
    /// The vector of [`Engine::Avx2`].
    #[cfg(target_arch = "x86_64")]
    type Avx2: Vector<Self>;
    /// The vector of [`Engine::Avx512`].
    #[cfg(target_arch = "x86_64")]
    type Avx512: Vector<Self>;
}

impl Real for f32 {
    fn fma(self, factor: Self, sum: Self) -> Self {
        self.mul_add(factor, sum)
    }
    type Portable = [f32; 16];
    #[cfg(target_arch = "x86_64")]
    type Avx2 = __m256;
    #[cfg(target_arch = "x86_64")]
    type Avx512 = __m512;
}

impl Real for f64 {
    fn fma(self, factor: Self, sum: Self) -> Self {
        self.mul_add(factor, sum)
    }
    type Portable = [f64; 8];
    #[cfg(target_arch = "x86_64")]
    type Avx2 = __m256d;
    #[cfg(target_arch = "x86_64")]
    type Avx512 = __m512d;
}

/// Some neighbouring elements, in registers.
///
/// # Safety
/// Of every method: the machine has the vector's instruction set. `load` and `store`: `LANES` elements at the pointer
/// are valid for it, at any alignment.
pub(super) trait Vector<T>: Copy {
    /// Elements of a vector; it divides [`Real::PANEL`].
    const LANES: usize;
    /// All lanes `value`.
    unsafe fn splat(value: T) -> Self;
    /// Reads.
    unsafe fn load(from: *const T) -> Self;
    /// Writes.
    unsafe fn store(self, to: *mut T);
    /// `self + other`.
    unsafe fn add(self, other: Self) -> Self;
    /// `self * factor + sum`, rounded once.
    unsafe fn mul_add(self, factor: Self, sum: Self) -> Self;
}

macro_rules! portable_vector {
    ($real:ty, $lanes:literal) => {
        impl Vector<$real> for [$real; $lanes] {
            const LANES: usize = $lanes;
            #[inline(always)]
            unsafe fn splat(value: $real) -> Self {
                [value; $lanes]
            }
            #[inline(always)]
            unsafe fn load(from: *const $real) -> Self {
                // SAFETY: `LANES` elements are valid (the trait's contract), and an array asks for no more alignment.
                unsafe { from.cast::<Self>().read() }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $real) {
                // SAFETY: as above.
                unsafe { to.cast::<Self>().write(self) }
            }
            #[inline(always)]
            unsafe fn add(mut self, other: Self) -> Self {
                for lane in 0..$lanes {
                    self[lane] += other[lane];
                }
                self
            }
            #[inline(always)]
            unsafe fn mul_add(mut self, factor: Self, sum: Self) -> Self {
                for lane in 0..$lanes {
                    self[lane] = self[lane].mul_add(factor[lane], sum[lane]);
                }
                self
            }
        }
    };
}

portable_vector!(f32, 16);
portable_vector!(f64, 8);

#[cfg(target_arch = "x86_64")]
macro_rules! x86_vector {
    ($vector:ty, $real:ty, $splat:ident, $load:ident, $store:ident, $add:ident, $mul_add:ident) => {
        impl Vector<$real> for $vector {
            const LANES: usize = size_of::<$vector>() / size_of::<$real>();
            #[inline(always)]
            unsafe fn splat(value: $real) -> Self {
                // SAFETY: the machine has the instruction set (the trait's contract).
                unsafe { $splat(value) }
            }
            #[inline(always)]
            unsafe fn load(from: *const $real) -> Self {
                // SAFETY: as above, and `LANES` elements are valid; the instruction asks for no alignment.
                unsafe { $load(from) }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $real) {
                // SAFETY: as for `load`.
                unsafe { $store(to, self) }
            }
            #[inline(always)]
            unsafe fn add(self, other: Self) -> Self {
                // SAFETY: as for `splat`.
                unsafe { $add(self, other) }
            }
            #[inline(always)]
            unsafe fn mul_add(self, factor: Self, sum: Self) -> Self {
                // SAFETY: as for `splat`.
                unsafe { $mul_add(self, factor, sum) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
x86_vector!(__m256, f32, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_add_ps, _mm256_fmadd_ps);
#[cfg(target_arch = "x86_64")]
x86_vector!(__m256d, f64, _mm256_set1_pd, _mm256_loadu_pd, _mm256_storeu_pd, _mm256_add_pd, _mm256_fmadd_pd);
#[cfg(target_arch = "x86_64")]
x86_vector!(__m512, f32, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_add_ps, _mm512_fmadd_ps);
#[cfg(target_arch = "x86_64")]
x86_vector!(__m512d, f64, _mm512_set1_pd, _mm512_loadu_pd, _mm512_storeu_pd, _mm512_add_pd, _mm512_fmadd_pd);
