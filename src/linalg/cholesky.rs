//! Cholesky factorisation in f64 on the fixed-order product, so that its bits are the same on every machine.
//!
//! Left-looking by block columns (Golub and Van Loan, "Matrix Computations", 4.2.8).

use rayon::prelude::*;

use super::{Matrix, View, matmul_f64};

/// Columns factored at a time: two panels of the product.
const BLOCK: usize = 64;

/// Why a matrix has no Cholesky factor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NotPositive {
    /// The row whose pivot failed.
    pub row: usize,
    /// The pivot found there: zero, negative or not finite.
    pub pivot: f64,
}

/// Overwrites the lower triangle of the symmetric `a` with `C` such that `A = C Cᵀ`, and zeroes the upper triangle.
///
/// # Errors
/// The first pivot that is not a positive finite number.
pub fn cholesky(a: &mut Matrix<f64>) -> Result<(), NotPositive> {
    let k = a.rows;
    assert_eq!(k, a.cols, "square");
    let mut update = vec![0.0f64; k * BLOCK];
    for b0 in (0..k).step_by(BLOCK) {
        let width = BLOCK.min(k - b0);
        if b0 > 0 {
            let height = k - b0;
            let below = &a.data[b0 * k..];
            update[..height * width].fill(0.0);
            matmul_f64(
                (height, width, b0),
                View::rows(below, k),
                View::transposed(below, k),
                &mut update[..height * width],
                width,
            );
            for i in 0..height {
                for j in 0..width {
                    a.data[(b0 + i) * k + b0 + j] -= update[i * width + j];
                }
            }
        }
        factor_columns(a, b0, width)?;
    }
    for i in 0..k {
        a.data[i * k + i + 1..(i + 1) * k].fill(0.0);
    }
    Ok(())
}

/// Columns of a right-hand side that one thread solves for at a time.
const PANEL: usize = 32;

/// Overwrites `rhs[k, n]` with `A⁻¹ rhs`, for the factor `c` of A that [`cholesky`] leaves. Every column is solved by
/// itself in a fixed order.
pub fn cholesky_solve(c: &Matrix<f64>, rhs: &mut Matrix<f64>) {
    let (k, n) = (c.rows, rhs.cols);
    assert_eq!((c.cols, rhs.rows), (k, k), "as many rows as the factor");
    // The way back reads columns of the factor; a large one strides over a page a row.
    let across = c.transposed();
    let solved: Vec<Vec<f64>> = (0..n.div_ceil(PANEL))
        .into_par_iter()
        .map(|panel| {
            let (from, width) = (panel * PANEL, PANEL.min(n - panel * PANEL));
            let mut x: Vec<f64> =
                (0..k).flat_map(|i| rhs.data[i * n + from..][..width].iter().copied()).collect();
            forward(c, &mut x, width);
            backward(&across, &mut x, width);
            x
        })
        .collect();
    for (panel, x) in solved.iter().enumerate() {
        let (from, width) = (panel * PANEL, PANEL.min(n - panel * PANEL));
        for (i, row) in x.chunks_exact(width).enumerate() {
            rhs.data[i * n + from..][..width].copy_from_slice(row);
        }
    }
}

/// `x = C⁻¹ x`, rows in pairs: both take off what the rows above account for, then the second what the first does.
fn forward(c: &Matrix<f64>, x: &mut [f64], width: usize) {
    let k = c.rows;
    for i in (0..k).step_by(2) {
        let (done, rest) = x.split_at_mut(i * width);
        let first = &c.row(i)[..i];
        if i + 1 == k {
            take_off(rest, done, [first], width);
            divide(rest, c.row(i)[i]);
            break;
        }
        let second = c.row(i + 1);
        take_off(&mut rest[..2 * width], done, [first, &second[..i]], width);
        let (upper, lower) = rest.split_at_mut(width);
        divide(upper, c.row(i)[i]);
        take_off(&mut lower[..width], upper, [&second[i..=i]], width);
        divide(&mut lower[..width], second[i + 1]);
    }
}

/// `x = C⁻ᵀ x` for the transposed factor. A row takes off the rows below it from its neighbour down, so none can begin
/// before its neighbour is solved.
fn backward(across: &Matrix<f64>, x: &mut [f64], width: usize) {
    for i in (0..across.rows).rev() {
        let (rest, done) = x.split_at_mut((i + 1) * width);
        let (row, line) = (&mut rest[i * width..], across.row(i));
        take_off(row, done, [&line[i + 1..]], width);
        divide(row, line[i]);
    }
}

fn divide(row: &mut [f64], pivot: f64) {
    row.iter_mut().for_each(|x| *x /= pivot);
}

/// `rows[r] -= Σ_j factors[r][j] · done[j]`, each term by itself and j ascending, for R rows of `width` entries.
fn take_off<const R: usize>(rows: &mut [f64], done: &[f64], factors: [&[f64]; R], width: usize) {
    let mut from = 0;
    // 16 sums fill half the registers of any x86-64.
    while R == 1 && from + 16 <= width {
        take_off_columns::<R, 16>(rows, done, factors, width, from);
        from += 16;
    }
    while from + 8 <= width {
        take_off_columns::<R, 8>(rows, done, factors, width, from);
        from += 8;
    }
    for column in from..width {
        take_off_columns::<R, 1>(rows, done, factors, width, column);
    }
}

/// [`take_off`] for C columns, whose sums are kept in registers.
#[inline(always)]
fn take_off_columns<const R: usize, const C: usize>(
    rows: &mut [f64],
    done: &[f64],
    factors: [&[f64]; R],
    width: usize,
    from: usize,
) {
    let count = factors[0].len();
    let factors = factors.map(|row| &row[..count]);
    let mut sums = [[0.0; C]; R];
    for (r, sum) in sums.iter_mut().enumerate() {
        sum.copy_from_slice(&rows[r * width + from..][..C]);
    }
    for (j, line) in done.chunks_exact(width).take(count).enumerate() {
        let line = line[from..].first_chunk::<C>().expect("C columns from here");
        for (sum, factors) in sums.iter_mut().zip(&factors) {
            let factor = factors[j];
            sum.iter_mut().zip(line).for_each(|(x, d)| *x -= factor * d);
        }
    }
    for (r, sum) in sums.iter().enumerate() {
        rows[r * width + from..][..C].copy_from_slice(sum);
    }
}

/// Factors columns `b0..b0 + width`, already updated by all columns to their left.
fn factor_columns(a: &mut Matrix<f64>, b0: usize, width: usize) -> Result<(), NotPositive> {
    let k = a.rows;
    let mut head = vec![0.0f64; width];
    for j in 0..width {
        let row = b0 + j;
        head[..j].copy_from_slice(&a.data[row * k + b0..row * k + b0 + j]);
        let pivot = a.data[row * k + row] - head[..j].iter().map(|x| x * x).sum::<f64>();
        if !(pivot > 0.0 && pivot.is_finite()) {
            return Err(NotPositive { row, pivot });
        }
        let root = pivot.sqrt();
        a.data[row * k + row] = root;
        for i in row + 1..k {
            let line = &mut a.data[i * k + b0..i * k + b0 + j + 1];
            let dot: f64 = line[..j].iter().zip(&head[..j]).map(|(x, y)| x * y).sum();
            line[j] = (line[j] - dot) / root;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_factor_reproduces_the_matrix() {
        // One below, at and above the block size, and several blocks.
        for k in [1, 63, 64, 65, 200] {
            let mut seed = 7u64;
            let x: Vec<f64> = (0..k * k)
                .map(|_| {
                    seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1);
                    (seed >> 33) as f64 / (1u64 << 31) as f64 - 0.5
                })
                .collect();
            let mut a = Matrix::zeros(k, k);
            matmul_f64((k, k, k), View::rows(&x, k), View::transposed(&x, k), &mut a.data, k);
            for i in 0..k {
                a.data[i * k + i] += 0.1;
            }
            let mut c = a.clone();
            cholesky(&mut c).unwrap();
            let mut back = Matrix::<f64>::zeros(k, k);
            matmul_f64((k, k, k), View::rows(&c.data, k), View::transposed(&c.data, k), &mut back.data, k);
            for (x, y) in a.data.iter().zip(&back.data) {
                assert!((x - y).abs() < 1e-10 * k as f64, "{x} {y}");
            }
            // A⁻¹ A is the identity; more columns than one panel.
            let mut solved = a.clone();
            cholesky_solve(&c, &mut solved);
            for (at, x) in solved.data.iter().enumerate() {
                let one = f64::from(u8::from(at / k == at % k));
                assert!((x - one).abs() < 1e-7, "{k}: {x}");
            }
        }
    }

    #[test]
    fn columns_are_solved_term_by_term_in_order() {
        // Odd and even numbers of rows; whole panels, half ones, eight columns, and columns by themselves.
        for (k, n) in [(1, 1), (2, 8), (7, 59), (64, 32), (65, 51)] {
            let entry = |i: usize, j: usize| ((i * 37 + j * 101) % 97) as f64 / 97.0 - 0.5;
            let mut c = Matrix::<f64>::zeros(k, k);
            for i in 0..k {
                (0..i).for_each(|j| c.data[i * k + j] = entry(i, j));
                c.data[i * k + i] = 1.5 + entry(i, i);
            }
            let mut solved = Matrix::new(k, n, (0..k * n).map(|at| entry(at / n + 3, at % n)).collect());
            let mut plain = solved.clone();
            for column in 0..n {
                let mut x: Vec<f64> = (0..k).map(|i| plain.data[i * n + column]).collect();
                for i in 0..k {
                    (0..i).for_each(|j| x[i] -= c.data[i * k + j] * x[j]);
                    x[i] /= c.data[i * k + i];
                }
                for i in (0..k).rev() {
                    (i + 1..k).for_each(|j| x[i] -= c.data[j * k + i] * x[j]);
                    x[i] /= c.data[i * k + i];
                }
                (0..k).for_each(|i| plain.data[i * n + column] = x[i]);
            }
            cholesky_solve(&c, &mut solved);
            let bits = |m: &Matrix<f64>| m.data.iter().map(|x| x.to_bits()).collect::<Vec<u64>>();
            assert_eq!(bits(&solved), bits(&plain), "{k} x {n}");
        }
    }

    #[test]
    fn an_indefinite_matrix_names_its_row() {
        let mut a = Matrix::new(2, 2, vec![1.0, 2.0, 2.0, 1.0]);
        assert_eq!(cholesky(&mut a).unwrap_err().row, 1);
        let mut a = Matrix::new(1, 1, vec![f64::NAN]);
        assert_eq!(cholesky(&mut a).unwrap_err().row, 0);
    }
}
