//! `C += A B` with one ascending chain of fused multiply-adds an element.
//!
//! Source: the register-blocked outer-product scheme of Goto and van de Geijn ("Anatomy of high-performance matrix
//! multiplication", ACM TOMS 34(3), 2008), with the one restriction that the inner index is never split between
//! accumulators. `f32::mul_add` is correctly rounded on every target, hence bit equality between [`Engine`]s; on a
//! machine without FMA it is a library call, slow and the same.

use rayon::prelude::*;

/// Columns of a packed panel: two AVX-512 vectors of f32.
const PANEL: usize = 32;
/// Inner length of a packed panel: 64 KiB of f32, half of a usual L2 way count.
const INNER: usize = 512;
/// Below this many multiply-adds a product stays on the calling thread.
const PARALLEL_FROM: usize = 1 << 22;

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

/// The engines this machine can run, fastest last.
pub fn engines() -> Vec<Engine> {
    #[allow(unused_mut)]
    let mut found = vec![Engine::Portable];
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            found.push(Engine::Avx2);
        }
        if is_x86_feature_detected!("avx512f") {
            found.push(Engine::Avx512);
        }
    }
    found
}

fn best_engine() -> Engine {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            return Engine::Avx512;
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return Engine::Avx2;
        }
    }
    Engine::Portable
}

/// How a matrix lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Element `(i, j)` at `i * stride + j`.
    Rows,
    /// Element `(i, j)` at `j * stride + i`: the transpose of a row-major matrix.
    Columns,
}

/// A borrowed matrix.
#[derive(Debug, Clone, Copy)]
pub struct View<'a, T> {
    data: &'a [T],
    stride: usize,
    layout: Layout,
}

impl<'a, T: Copy> View<'a, T> {
    /// Row-major, `stride` elements from row to row.
    pub fn rows(data: &'a [T], stride: usize) -> Self {
        Self { data, stride, layout: Layout::Rows }
    }

    /// The transpose of a row-major matrix with `stride` elements from row to row.
    pub fn transposed(data: &'a [T], stride: usize) -> Self {
        Self { data, stride, layout: Layout::Columns }
    }

    #[inline(always)]
    fn at(&self, i: usize, j: usize) -> T {
        match self.layout {
            Layout::Rows => self.data[i * self.stride + j],
            Layout::Columns => self.data[j * self.stride + i],
        }
    }
}

/// The two element types.
trait Real: Copy + Default + Send + Sync {
    fn fma(self, b: Self, c: Self) -> Self;
}

impl Real for f32 {
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        self.mul_add(b, c)
    }
}

impl Real for f64 {
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        self.mul_add(b, c)
    }
}

/// `c[m, n] += a[m, k] b[k, n]`; `c` is row-major with `ldc` elements from row to row.
///
/// # Panics
/// When a view is shorter than its shape.
pub fn matmul_f32(
    shape: (usize, usize, usize),
    a: View<'_, f32>,
    b: View<'_, f32>,
    c: &mut [f32],
    ldc: usize,
) {
    matmul_f32_with(best_engine(), shape, a, b, c, ldc);
}

/// [`matmul_f32`] on a chosen engine, for tests of bit equality.
pub fn matmul_f32_with(
    engine: Engine,
    shape: (usize, usize, usize),
    a: View<'_, f32>,
    b: View<'_, f32>,
    c: &mut [f32],
    ldc: usize,
) {
    product(engine, shape, a, b, c, ldc, false);
}

/// [`matmul_f32`] in f64.
pub fn matmul_f64(
    shape: (usize, usize, usize),
    a: View<'_, f64>,
    b: View<'_, f64>,
    c: &mut [f64],
    ldc: usize,
) {
    product(best_engine(), shape, a, b, c, ldc, false);
}

/// `c[k, k] += xᵀ x` for row-major `x[rows, k]`, on and below the diagonal (some elements above it are written too);
/// the caller mirrors once at the end.
pub fn syrk_f64(rows: usize, k: usize, x: &[f64], c: &mut [f64]) {
    product(best_engine(), (k, k, rows), View::transposed(x, k), View::rows(x, k), c, k, true);
}

fn product<T: Real>(
    engine: Engine,
    (m, n, k): (usize, usize, usize),
    a: View<'_, T>,
    b: View<'_, T>,
    c: &mut [T],
    ldc: usize,
    lower: bool,
) {
    if m == 0 || n == 0 {
        return;
    }
    assert!(ldc >= n && c.len() >= (m - 1) * ldc + n, "output shorter than its shape");
    let output = Output { at: c.as_mut_ptr(), ldc };
    let panel = |j0: usize| {
        let first_row = if lower { j0 } else { 0 };
        // SAFETY: panels cover disjoint column ranges of `c`, which is borrowed mutably for the whole call and long
        // enough for every (row < m, column < n); the engine was detected (or is the portable one).
        unsafe { run_panel(engine, first_row..m, j0..n.min(j0 + PANEL), k, a, b, output) }
    };
    let panels = n.div_ceil(PANEL);
    if m * n * k.max(1) >= PARALLEL_FROM && panels > 1 {
        (0..panels).into_par_iter().for_each(|p| panel(p * PANEL));
    } else {
        (0..panels).for_each(|p| panel(p * PANEL));
    }
}

/// The output matrix, shared by panels that write disjoint columns.
#[derive(Clone, Copy)]
struct Output<T> {
    at: *mut T,
    ldc: usize,
}

// SAFETY: see `product`: every panel writes columns no other panel touches.
unsafe impl<T: Send> Send for Output<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Output<T> {}

/// # Safety
/// The engine's features are present; `c` is valid for the given rows and columns and nobody else uses them.
unsafe fn run_panel<T: Real>(
    engine: Engine,
    rows: std::ops::Range<usize>,
    columns: std::ops::Range<usize>,
    k: usize,
    a: View<'_, T>,
    b: View<'_, T>,
    c: Output<T>,
) {
    match engine {
        // SAFETY: the caller's contract.
        Engine::Portable => unsafe { panel_body::<T, 4>(rows, columns, k, a, b, c) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's contract.
        Engine::Avx2 => unsafe { panel_avx2(rows, columns, k, a, b, c) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's contract.
        Engine::Avx512 => unsafe { panel_avx512(rows, columns, k, a, b, c) },
        #[cfg(not(target_arch = "x86_64"))]
        // SAFETY: the caller's contract.
        _ => unsafe { panel_body::<T, 4>(rows, columns, k, a, b, c) },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn panel_avx2<T: Real>(
    rows: std::ops::Range<usize>,
    columns: std::ops::Range<usize>,
    k: usize,
    a: View<'_, T>,
    b: View<'_, T>,
    c: Output<T>,
) {
    // SAFETY: the caller's contract; the body itself has no further demands.
    unsafe { panel_body::<T, 2>(rows, columns, k, a, b, c) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
unsafe fn panel_avx512<T: Real>(
    rows: std::ops::Range<usize>,
    columns: std::ops::Range<usize>,
    k: usize,
    a: View<'_, T>,
    b: View<'_, T>,
    c: Output<T>,
) {
    // SAFETY: the caller's contract; the body itself has no further demands.
    unsafe { panel_body::<T, 4>(rows, columns, k, a, b, c) }
}

/// One panel of output columns: packs `b` once for each stretch of the inner index and walks the rows over it.
#[inline(always)]
unsafe fn panel_body<T: Real, const MR: usize>(
    rows: std::ops::Range<usize>,
    columns: std::ops::Range<usize>,
    k: usize,
    a: View<'_, T>,
    b: View<'_, T>,
    c: Output<T>,
) {
    let width = columns.len();
    let mut packed = vec![[T::default(); PANEL]; INNER.min(k)];
    let mut factors = vec![[T::default(); MR]; INNER.min(k)];
    for p0 in (0..k).step_by(INNER) {
        let depth = INNER.min(k - p0);
        for (p, line) in packed[..depth].iter_mut().enumerate() {
            for (l, value) in line[..width].iter_mut().enumerate() {
                *value = b.at(p0 + p, columns.start + l);
            }
        }
        let mut i = rows.start;
        while i < rows.end {
            let height = MR.min(rows.end - i);
            for (p, column) in factors[..depth].iter_mut().enumerate() {
                for (r, value) in column[..height].iter_mut().enumerate() {
                    *value = a.at(i + r, p0 + p);
                }
            }
            // SAFETY: rows i..i+height and the panel's columns are ours (the caller's contract).
            unsafe {
                let at = c.at.add(i * c.ldc + columns.start);
                if height == MR {
                    block::<T, MR>(&factors[..depth], &packed[..depth], at, c.ldc, width);
                } else {
                    for r in 0..height {
                        row(&factors[..depth], r, &packed[..depth], at.add(r * c.ldc), width);
                    }
                }
            }
            i += height;
        }
    }
}

/// `MR` rows of one panel.
#[inline(always)]
unsafe fn block<T: Real, const MR: usize>(
    factors: &[[T; MR]],
    packed: &[[T; PANEL]],
    at: *mut T,
    ldc: usize,
    width: usize,
) {
    let mut sum = [[T::default(); PANEL]; MR];
    for (r, line) in sum.iter_mut().enumerate() {
        for (l, value) in line[..width].iter_mut().enumerate() {
            // SAFETY: row r and column l lie inside the block the caller owns.
            *value = unsafe { *at.add(r * ldc + l) };
        }
    }
    for (column, line) in factors.iter().zip(packed) {
        for r in 0..MR {
            for l in 0..PANEL {
                sum[r][l] = column[r].fma(line[l], sum[r][l]);
            }
        }
    }
    for (r, line) in sum.iter().enumerate() {
        for (l, value) in line[..width].iter().enumerate() {
            // SAFETY: as above.
            unsafe { *at.add(r * ldc + l) = *value };
        }
    }
}

/// One row of one panel, for the rows left over at the end.
#[inline(always)]
unsafe fn row<T: Real, const MR: usize>(
    factors: &[[T; MR]],
    r: usize,
    packed: &[[T; PANEL]],
    at: *mut T,
    width: usize,
) {
    let mut sum = [T::default(); PANEL];
    for (l, value) in sum[..width].iter_mut().enumerate() {
        // SAFETY: column l lies inside the row the caller owns.
        *value = unsafe { *at.add(l) };
    }
    for (column, line) in factors.iter().zip(packed) {
        for l in 0..PANEL {
            sum[l] = column[r].fma(line[l], sum[l]);
        }
    }
    for (l, value) in sum[..width].iter().enumerate() {
        // SAFETY: as above.
        unsafe { *at.add(l) = *value };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(n: usize, mut seed: u64) -> Vec<f32> {
        (0..n)
            .map(|_| {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0
            })
            .collect()
    }

    /// The definition: one ascending chain of fused multiply-adds an element.
    fn reference(m: usize, n: usize, k: usize, a: &[f32], b: &[f32]) -> Vec<f32> {
        let mut c = vec![0.0f32; m * n];
        for i in 0..m {
            for j in 0..n {
                for p in 0..k {
                    c[i * n + j] = a[i * k + p].mul_add(b[p * n + j], c[i * n + j]);
                }
            }
        }
        c
    }

    #[test]
    fn every_engine_gives_the_bits_of_the_definition() {
        // Sizes at the edges of the row block, the panel and the inner stretch, and one beyond the parallel threshold.
        for (m, n, k) in [(1, 1, 1), (8, 32, 512), (9, 33, 513), (7, 31, 5), (3, 70, 1030), (130, 300, 130)] {
            let (a, b) = (noise(m * k, 1), noise(k * n, 2));
            let want = reference(m, n, k, &a, &b);
            let mut transposed = vec![0.0; m * k];
            for i in 0..m {
                for p in 0..k {
                    transposed[p * m + i] = a[i * k + p];
                }
            }
            for engine in engines() {
                for view in [View::rows(&a, k), View::transposed(&transposed, m)] {
                    let mut c = vec![0.0; m * n];
                    matmul_f32_with(engine, (m, n, k), view, View::rows(&b, n), &mut c, n);
                    assert_eq!(c, want, "{engine:?} {m}x{n}x{k}");
                }
            }
        }
    }

    #[test]
    fn syrk_fills_the_lower_triangle() {
        let (rows, k) = (70, 75);
        let x: Vec<f64> = noise(rows * k, 3).into_iter().map(f64::from).collect();
        let mut c = vec![0.0; k * k];
        syrk_f64(rows, k, &x, &mut c);
        let mut want = vec![0.0; k * k];
        matmul_f64((k, k, rows), View::transposed(&x, k), View::rows(&x, k), &mut want, k);
        for i in 0..k {
            for j in 0..=i {
                assert_eq!(c[i * k + j].to_bits(), want[i * k + j].to_bits());
            }
        }
    }
}
