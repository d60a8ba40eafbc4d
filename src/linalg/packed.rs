//! A right operand, packed once and multiplied often: weights, and the keys and values of a prompt.
//!
//! A product has the bits of [`matmul_f32`](super::matmul_f32) onto zeros, whatever rows share the call.

use super::engine::{Engine, Real};
use super::kernel::{Extent, Panels, accumulate};
use super::view::{View, pack_panels};
use crate::error::{Result, refuse};

/// Columns of a panel.
const PANEL: usize = <f32 as Real>::PANEL;

/// A matrix `[k, m]`, packed in panels.
#[derive(Debug, Clone)]
pub struct Packed {
    k: usize,
    m: usize,
    panels: Vec<f32>,
}

impl Packed {
    /// Packs a flat weight `[m, k]` (`[out, in]`), to be multiplied by its transpose.
    ///
    /// # Panics
    /// When the weight is shorter.
    pub fn transposed(weight: &[f32], m: usize, k: usize) -> Self {
        Self::new(View::transposed(weight, k), k, m)
    }

    /// Packs a flat matrix `[k, m]`.
    ///
    /// # Panics
    /// When the matrix is shorter.
    pub fn plain(matrix: &[f32], k: usize, m: usize) -> Self {
        Self::new(View::rows(matrix, m), k, m)
    }

    fn new(matrix: View<'_, f32>, k: usize, m: usize) -> Self {
        let mut panels = vec![0f32; m.next_multiple_of(PANEL) * k];
        pack_panels(matrix, k, m, &mut panels);
        Self { k, m, panels }
    }

    /// Inner size.
    pub fn rows(&self) -> usize {
        self.k
    }

    /// Width of the result.
    pub fn columns(&self) -> usize {
        self.m
    }

    /// `x [n, k]` (flat) times this: `[n, m]` (flat).
    ///
    /// # Errors
    /// When `x` is not made of whole rows.
    pub fn multiply(&self, x: &[f32]) -> Result<Vec<f32>> {
        self.part(x, self.k, self.m)
    }

    /// The same with the first `k` inner terms and the first `m` columns only: what a block of queries sees of the keys
    /// (`m`), and of the values (`k`), of a prompt.
    ///
    /// # Errors
    /// When `x` is not made of whole rows of `k`, or the matrix is smaller.
    pub fn part(&self, x: &[f32], k: usize, m: usize) -> Result<Vec<f32>> {
        self.part_with(Engine::best(), x, k, m)
    }

    /// [`Packed::part`] on a chosen engine, for tests of bit equality.
    fn part_with(&self, engine: Engine, x: &[f32], k: usize, m: usize) -> Result<Vec<f32>> {
        if k == 0 || m == 0 || k > self.k || m > self.m || !x.len().is_multiple_of(k) {
            return refuse(format!("{} values for [{k}, {m}] of a matrix [{}, {}]", x.len(), self.k, self.m))
                .wanted("whole rows")
                .err();
        }
        let rows = x.len() / k;
        let mut y = vec![0f32; rows * m];
        let panels = Panels { data: &self.panels, terms: self.k };
        accumulate(engine, (rows, m, k), View::rows(x, k), panels, (&mut y, m), Extent::Full);
        Ok(y)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::tests::{assert_bits, noise, with_threads};
    use crate::linalg::{engines, matmul_f32, matmul_reference};

    fn reference(x: &[f32], matrix: View<'_, f32>, k: usize, m: usize) -> Vec<f32> {
        let rows = x.len() / k;
        let mut y = vec![0f32; rows * m];
        matmul_reference((rows, m, k), View::rows(x, k), matrix, &mut y, m);
        y
    }

    /// Inner sizes around a chain, widths around a panel and a pair, rows around the strips (1, 4, 6, 12).
    #[test]
    fn a_product_has_the_bits_of_matmul_onto_zeros() {
        for (k, m) in [(1, 1), (7, 15), (255, 16), (256, 17), (257, 33), (600, 40)] {
            let (x, weight) = (noise(25 * k, 1), noise(k * m, 2));
            let packed = Packed::transposed(&weight, m, k);
            for rows in [1, 5, 6, 7, 12, 25] {
                let x = &x[..rows * k];
                let mut expected = vec![0f32; rows * m];
                matmul_f32((rows, m, k), View::rows(x, k), View::transposed(&weight, k), &mut expected, m);
                assert_bits(&expected, &reference(x, View::transposed(&weight, k), k, m), "reference");
                for engine in engines() {
                    let what = format!("{engine:?}: {rows} rows, {k} to {m}");
                    assert_bits(&packed.part_with(engine, x, k, m).unwrap(), &expected, &what);
                }
            }
        }
    }

    #[test]
    fn a_product_that_underflows_has_the_zero_of_matmul() {
        let (x, weight) = ([-1e-30f32; 2], [1e-30f32; 2]);
        let mut expected = [0f32];
        matmul_f32((1, 1, 2), View::rows(&x, 2), View::transposed(&weight, 2), &mut expected, 1);
        assert_bits(&Packed::transposed(&weight, 1, 2).multiply(&x).unwrap(), &expected, "underflow");
    }

    #[test]
    fn threads_leave_the_bits() {
        // Wide, tall and both: cut in columns, in rows, in either.
        for (rows, k, m) in [(8, 513, 1500), (700, 256, 24), (200, 300, 200)] {
            let (x, weight) = (noise(rows * k, 1), noise(k * m, 2));
            let product = || Packed::transposed(&weight, m, k).multiply(&x).unwrap();
            let expected = with_threads(1, product);
            assert_bits(&expected, &reference(&x, View::transposed(&weight, k), k, m), "one thread");
            for threads in [2, 4] {
                let what = format!("{rows} rows, {k} to {m}, {threads} threads");
                assert_bits(&with_threads(threads, product), &expected, &what);
            }
        }
    }

    #[test]
    fn a_part_of_a_matrix_is_the_matrix_of_the_part() {
        let (k, m) = (300, 70);
        let (x, matrix) = (noise(9 * 290, 1), noise(k * m, 2));
        let packed = Packed::plain(&matrix, k, m);
        assert_eq!((packed.rows(), packed.columns()), (k, m));
        let expected = reference(&x, View::rows(&matrix, m), 290, 35);
        assert_bits(&packed.part(&x, 290, 35).unwrap(), &expected, "part");
        assert!(packed.part(&x, 290, 71).is_err() && packed.part(&x, 301, 35).is_err());
        assert!(packed.multiply(&x[..299]).is_err());
    }
}
