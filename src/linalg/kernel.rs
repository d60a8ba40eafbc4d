//! The one product kernel of the house, and the definition of its order of operations.
//!
//! Definition: each output element is `c` plus chains, added one by one in ascending order; a chain is at most
//! [`DEPTH`] fused multiply-adds over ascending inner terms, the first onto zero. So an element depends on its row of
//! `A`, its column of `B` and the old `c` alone: not on the instruction set, the number of threads, the blocking, or
//! which other rows share the call. [`reference`] is the same in three loops.
//!
//! Source: the register-blocked outer-product scheme of Goto and van de Geijn ("Anatomy of high-performance matrix
//! multiplication", ACM TOMS 34(3), 2008): `B` in panels, `A` in strips of as many rows as there are registers for
//! sums. Jobs are rectangles of the output; how they are cut is free.
//!
//! What it does not do: be fast on a CPU without fused multiply-add (it stays exact there).

use rayon::prelude::*;

use super::engine::{Engine, Real, Vector};
use super::view::{Layout, View, pack_strip};

/// Terms of a chain of fused multiply-adds.
pub(super) const DEPTH: usize = 256;
/// Rows of a job: whole strips of every engine, and factors that fit the second cache.
const JOB_ROWS: usize = 96;
/// Multiply-adds that are worth a job of their own.
const JOB_WORK: usize = 1 << 19;
/// Below this many multiply-adds a product stays on the calling thread.
const PARALLEL_FROM: usize = 1 << 22;
/// Panels whose sums an engine may hold at once, and so the unit of cutting columns.
const GROUP: usize = 2;

/// A packed matrix `[terms, n]`, see [`pack_panels`](super::view::pack_panels).
#[derive(Debug, Clone, Copy)]
pub(super) struct Panels<'a, T> {
    /// Panel after panel.
    pub data: &'a [T],
    /// Terms of a panel; a product may use fewer.
    pub terms: usize,
}

/// Which elements of the output are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Extent {
    /// All.
    Full,
    /// Those on and below the diagonal; others may be left as they are, or not.
    Lower,
}

/// `c[m, n] += a[m, k] b[k, n]`; `c` is row-major with `ldc` elements from row to row.
///
/// # Panics
/// When an operand is shorter than its shape, or the machine lacks the engine.
pub(super) fn accumulate<T: Real>(
    engine: Engine,
    (m, n, k): (usize, usize, usize),
    a: View<'_, T>,
    b: Panels<'_, T>,
    (c, ldc): (&mut [T], usize),
    extent: Extent,
) {
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    assert!(ldc >= n && c.len() >= (m - 1) * ldc + n, "output shorter than its shape");
    assert!(engine.is_present(), "{engine:?} on a machine without it");
    let (height, width) = job_shape(m, n, k, T::PANEL);
    let job = |(rows, c): (usize, &mut [T])| {
        let (row, across) = (rows * height, n.div_ceil(width));
        let mut jobs: Vec<Job<'_, T>> = (0..across)
            .map(|index| Job {
                a: a.from(row, 0),
                k,
                b: Panels { data: &b.data[index * width * b.terms..], ..b },
                first: (row, index * width),
                extent,
                c: Vec::with_capacity(height.min(m - row)),
            })
            .collect();
        for line in c.chunks_mut(ldc) {
            for (job, part) in jobs.iter_mut().zip(line[..n].chunks_mut(width)) {
                job.c.push(part);
            }
        }
        if across > 1 {
            jobs.into_par_iter().for_each(|job| job.run(engine));
        } else {
            jobs.into_iter().for_each(|job| job.run(engine));
        }
    };
    let c = &mut c[..(m - 1) * ldc + n];
    if m * n * k >= PARALLEL_FROM && height < m {
        c.par_chunks_mut(height * ldc).enumerate().for_each(job);
    } else {
        c.chunks_mut(height * ldc).enumerate().for_each(job);
    }
}

/// Rows and columns of a job. A product for one thread is not cut in columns: each job packs its rows of `A` anew.
fn job_shape(m: usize, n: usize, k: usize, panel: usize) -> (usize, usize) {
    let (mut height, mut width) = (JOB_ROWS.min(m), n.next_multiple_of(GROUP * panel));
    let threads = rayon::current_num_threads();
    if m * n * k < PARALLEL_FROM || threads == 1 {
        return (height, width);
    }
    let wanted = (3 * threads).min(m * n * k / JOB_WORK);
    while m.div_ceil(height) * n.div_ceil(width) < wanted {
        if width >= 8 * GROUP * panel {
            width = (width / 2).next_multiple_of(GROUP * panel);
        } else if height >= 24 {
            height /= 2;
        } else {
            break;
        }
    }
    (height, width)
}

/// A rectangle of the output, on one thread.
struct Job<'a, T> {
    /// Begins at the first row.
    a: View<'a, T>,
    k: usize,
    /// Begins at the first column.
    b: Panels<'a, T>,
    /// Row and column of the output.
    first: (usize, usize),
    extent: Extent,
    /// The rectangle, row by row.
    c: Vec<&'a mut [T]>,
}

impl<T: Real> Job<'_, T> {
    /// The caller has seen that the machine has the engine.
    fn run(self, engine: Engine) {
        match engine {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the engine is present.
            Engine::Avx2 => unsafe { run_avx2(self) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the engine is present.
            Engine::Avx512 => unsafe { run_avx512(self) },
            // SAFETY: arrays ask for no instruction set.
            _ => unsafe { self.body::<T::Portable, 4, 1, 1>() },
        }
    }

    /// In strips of `R` rows, `P` panels of `W` vectors at a time.
    ///
    /// # Safety
    /// The machine has the instruction set of `V`.
    #[inline(always)]
    unsafe fn body<V: Vector<T>, const R: usize, const P: usize, const W: usize>(mut self) {
        let mut width = self.c[0].len();
        if self.extent == Extent::Lower {
            width = width.min((self.first.0 + self.c.len()).saturating_sub(self.first.1));
        }
        if width == 0 {
            return;
        }
        // Few columns do not pay for a packed `A`.
        let packs = width > GROUP * T::PANEL || self.a.layout == Layout::Columns;
        let mut factors = vec![T::default(); if packs { self.c.len() * self.k.min(DEPTH) } else { 0 }];
        for start in (0..self.k).step_by(DEPTH) {
            let depth = DEPTH.min(self.k - start);
            let factors = if packs { &mut factors[..self.c.len() * depth] } else { &mut [][..] };
            if packs {
                self.pack::<R>(start, depth, factors);
            }
            let mut column = 0;
            while column < width {
                // SAFETY: the caller's contract.
                unsafe {
                    if width - column > (P - 1) * T::PANEL {
                        self.panels::<V, R, P, W>(start, depth, column, factors);
                        column += P * T::PANEL;
                    } else {
                        self.panels::<V, R, 1, W>(start, depth, column, factors);
                        column += T::PANEL;
                    }
                }
            }
        }
    }

    /// Packs all rows of `A`, strip after strip.
    #[inline(always)]
    fn pack<const R: usize>(&self, start: usize, depth: usize, factors: &mut [T]) {
        let mut row = 0;
        while row < self.c.len() {
            let (a, height) = (self.a.from(row, start), strip_height::<R>(self.c.len() - row));
            let strip = &mut factors[row * depth..][..height * depth];
            match height {
                4 => pack_strip::<T, 4>(a, strip),
                2 => pack_strip::<T, 2>(a, strip),
                1 => pack_strip::<T, 1>(a, strip),
                _ => pack_strip::<T, R>(a, strip),
            }
            row += height;
        }
    }

    /// All strips times `P` panels.
    ///
    /// # Safety
    /// The machine has the instruction set of `V`.
    #[inline(always)]
    unsafe fn panels<V: Vector<T>, const R: usize, const P: usize, const W: usize>(
        &mut self,
        start: usize,
        depth: usize,
        column: usize,
        factors: &[T],
    ) {
        let mut panels: [&[T]; P] = [&[]; P];
        for (index, panel) in panels.iter_mut().enumerate() {
            let at = (column + index * T::PANEL) * self.b.terms + start * T::PANEL;
            *panel = &self.b.data[at..][..depth * T::PANEL];
        }
        let mut row = 0;
        while row < self.c.len() {
            let height = strip_height::<R>(self.c.len() - row);
            let last = self.first.0 + row + height - 1;
            if self.extent == Extent::Full || self.first.1 + column <= last {
                let c = &mut self.c[row..][..height];
                // SAFETY: the caller's contract.
                unsafe {
                    if factors.is_empty() {
                        let a = self.a.from(row, start);
                        match height {
                            4 => tile::<T, V, 4, P, W>(Strip::Rows(a), panels, c, column),
                            2 => tile::<T, V, 2, P, W>(Strip::Rows(a), panels, c, column),
                            1 => tile::<T, V, 1, P, W>(Strip::Rows(a), panels, c, column),
                            _ => tile::<T, V, R, P, W>(Strip::Rows(a), panels, c, column),
                        }
                    } else {
                        let strip = &factors[row * depth..][..height * depth];
                        match height {
                            4 => tile::<T, V, 4, P, W>(Strip::Packed(strip), panels, c, column),
                            2 => tile::<T, V, 2, P, W>(Strip::Packed(strip), panels, c, column),
                            1 => tile::<T, V, 1, P, W>(Strip::Packed(strip), panels, c, column),
                            _ => tile::<T, V, R, P, W>(Strip::Packed(strip), panels, c, column),
                        }
                    }
                }
            }
            row += height;
        }
    }
}

/// The highest strip that fits: `R`, or a power of two for the rows left over.
#[inline(always)]
fn strip_height<const R: usize>(rows: usize) -> usize {
    match rows {
        rows if rows >= R => R,
        4.. => 4,
        2.. => 2,
        _ => 1,
    }
}

/// # Safety
/// The machine has AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn run_avx2<T: Real>(job: Job<'_, T>) {
    // SAFETY: the caller's contract.
    unsafe { job.body::<T::Avx2, 6, 1, 2>() }
}

/// # Safety
/// The machine has AVX-512F.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn run_avx512<T: Real>(job: Job<'_, T>) {
    // SAFETY: the caller's contract.
    unsafe { job.body::<T::Avx512, 12, 2, 1>() }
}

/// Where the factors of a tile are.
enum Strip<'a, T> {
    /// Those of a term side by side, see [`pack_strip`].
    Packed(&'a [T]),
    /// In the rows of `A`.
    Rows(View<'a, T>),
}

/// The micro-kernel: one chain for each of `R` rows and the columns of `P` panels, added to `c` from `column` on.
///
/// # Safety
/// The machine has the instruction set of `V`.
#[inline(always)]
unsafe fn tile<T: Real, V: Vector<T>, const R: usize, const P: usize, const W: usize>(
    strip: Strip<'_, T>,
    panels: [&[T]; P],
    c: &mut [&mut [T]],
    column: usize,
) {
    const { assert!(W * V::LANES == T::PANEL) };
    let depth = panels[0].len() / T::PANEL;
    let (factors, row_step, term_step) = match strip {
        Strip::Packed(strip) => (strip, 1, R),
        Strip::Rows(a) => (a.data, a.stride, 1),
    };
    assert!(depth > 0 && panels.iter().all(|panel| panel.len() == depth * T::PANEL) && c.len() == R);
    // Checked, for a stride may be any number.
    let last = (R - 1).checked_mul(row_step).and_then(|at| at.checked_add((depth - 1) * term_step));
    assert!(last.is_some_and(|last| last < factors.len()), "`A` shorter than its shape");
    // SAFETY: the machine has the instruction set; `term < depth`, and the lengths are asserted above.
    let mut sums = [[[unsafe { V::splat(T::default()) }; W]; P]; R];
    for term in 0..depth {
        let mut vectors = [[sums[0][0][0]; W]; P];
        for (vectors, panel) in vectors.iter_mut().zip(panels) {
            for (w, vector) in vectors.iter_mut().enumerate() {
                // SAFETY: as above.
                *vector = unsafe { V::load(panel.as_ptr().add(term * T::PANEL + w * V::LANES)) };
            }
        }
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: as above.
            let factor = unsafe { V::splat(*factors.get_unchecked(term * term_step + r * row_step)) };
            for (sum, vector) in sums.as_flattened_mut().iter_mut().zip(vectors.as_flattened()) {
                // SAFETY: as above.
                *sum = unsafe { factor.mul_add(*vector, *sum) };
            }
        }
    }
    for (row, sums) in c.iter_mut().zip(&sums) {
        let vectors = sums.as_flattened().iter();
        for (c, sum) in row[column..].chunks_mut(V::LANES).zip(vectors) {
            if c.len() == V::LANES {
                // SAFETY: the slice has `LANES` elements; the machine has the instruction set.
                unsafe { V::load(c.as_ptr()).add(*sum).store(c.as_mut_ptr()) };
            } else {
                let mut chains = [T::default(); 16];
                const { assert!(V::LANES <= 16) };
                // SAFETY: the array has `LANES` elements; the machine has the instruction set.
                unsafe { sum.store(chains.as_mut_ptr()) };
                c.iter_mut().zip(chains).for_each(|(c, chain)| *c += chain);
            }
        }
    }
}

/// What [`accumulate`] computes, bit for bit, in three loops.
pub(super) fn reference<T: Real>(
    (m, n, k): (usize, usize, usize),
    a: View<'_, T>,
    b: View<'_, T>,
    c: &mut [T],
    ldc: usize,
) {
    for i in 0..m {
        for j in 0..n {
            for start in (0..k).step_by(DEPTH) {
                let terms = start..k.min(start + DEPTH);
                c[i * ldc + j] += terms.fold(T::default(), |chain, p| a.at(i, p).fma(b.at(p, j), chain));
            }
        }
    }
}
