//! Borrowed matrices, and the two copies the kernel reads: panels of `B`, strips of `A`.

use rayon::prelude::*;

use super::engine::Real;
use super::kernel::DEPTH;

/// From this many elements on, threads pack together.
const PARALLEL_FROM: usize = 1 << 18;

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
    pub(super) data: &'a [T],
    pub(super) stride: usize,
    pub(super) layout: Layout,
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

    /// Element `(i, j)`.
    pub(super) fn at(&self, i: usize, j: usize) -> T {
        self.data[self.offset(i, j)]
    }

    /// The matrix that begins at element `(i, j)` of this one.
    pub(super) fn from(&self, i: usize, j: usize) -> Self {
        Self { data: &self.data[self.offset(i, j)..], ..*self }
    }

    fn offset(&self, i: usize, j: usize) -> usize {
        match self.layout {
            Layout::Rows => i * self.stride + j,
            Layout::Columns => j * self.stride + i,
        }
    }
}

/// Copies the first `R` rows of `a`, `strip.len() / R` elements of each, transposed: the `R` factors of a term side by
/// side.
#[inline(always)]
pub(super) fn pack_strip<T: Real, const R: usize>(a: View<'_, T>, strip: &mut [T]) {
    let strip = strip.as_chunks_mut::<R>().0;
    match a.layout {
        Layout::Rows => {
            for r in 0..R {
                let row = &a.data[r * a.stride..][..strip.len()];
                for (factors, value) in strip.iter_mut().zip(row) {
                    factors[r] = *value;
                }
            }
        }
        Layout::Columns => {
            for (term, factors) in strip.iter_mut().enumerate() {
                factors.copy_from_slice(&a.data[term * a.stride..][..R]);
            }
        }
    }
}

/// Packs the first `k` rows and `n` columns of `b`: panel after panel of [`Real::PANEL`] columns, each `[k, PANEL]`, the
/// last filled up with zeros.
pub(super) fn pack_panels<T: Real>(b: View<'_, T>, k: usize, n: usize, panels: &mut [T]) {
    let pack = |(index, panel): (usize, &mut [T])| {
        let column = index * T::PANEL;
        let width = T::PANEL.min(n - column);
        // By stretches that stay in the first cache: the transposing copy goes over each several times.
        for (stretch, part) in panel.chunks_mut(DEPTH * T::PANEL).enumerate() {
            pack_panel(b.from(stretch * DEPTH, column), width, part);
        }
    };
    let jobs = k * T::PANEL;
    if panels.len() >= PARALLEL_FROM {
        panels.par_chunks_mut(jobs).enumerate().for_each(pack);
    } else {
        panels.chunks_mut(jobs).enumerate().for_each(pack);
    }
}

fn pack_panel<T: Real>(b: View<'_, T>, width: usize, panel: &mut [T]) {
    if width < T::PANEL {
        panel.fill(T::default());
    }
    match b.layout {
        Layout::Rows => {
            for (term, line) in panel.chunks_exact_mut(T::PANEL).enumerate() {
                let row = &b.data[term * b.stride..][..width];
                if width == T::PANEL {
                    // A copy of a length known to the compiler.
                    line.copy_from_slice(&row[..T::PANEL]);
                } else {
                    line[..width].copy_from_slice(row);
                }
            }
        }
        Layout::Columns => {
            let terms = panel.len() / T::PANEL;
            for column in 0..width {
                let values = &b.data[column * b.stride..][..terms];
                for (line, value) in panel.chunks_exact_mut(T::PANEL).zip(values) {
                    line[column] = *value;
                }
            }
        }
    }
}
