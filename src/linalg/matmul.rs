//! `C += A B` and `C += Xᵀ X` for operands that are used once: `B` is packed as the product goes.

use super::engine::{Engine, Real};
use super::kernel::{DEPTH, Extent, Panels, accumulate, reference};
use super::view::{View, pack_panels};

/// `c[m, n] += a[m, k] b[k, n]`; `c` is row-major with `ldc` elements from row to row.
///
/// # Panics
/// When an operand is shorter than its shape.
pub fn matmul_f32(
    shape: (usize, usize, usize),
    a: View<'_, f32>,
    b: View<'_, f32>,
    c: &mut [f32],
    ldc: usize,
) {
    matmul_f32_with(Engine::best(), shape, a, b, c, ldc);
}

/// [`matmul_f32`] on a chosen engine, for tests of bit equality.
///
/// # Panics
/// As there, and when the machine lacks the engine.
pub fn matmul_f32_with(
    engine: Engine,
    shape: (usize, usize, usize),
    a: View<'_, f32>,
    b: View<'_, f32>,
    c: &mut [f32],
    ldc: usize,
) {
    product(engine, shape, a, b, (c, ldc), Extent::Full);
}

/// What [`matmul_f32`] computes, bit for bit, in three loops.
pub fn matmul_reference(
    shape: (usize, usize, usize),
    a: View<'_, f32>,
    b: View<'_, f32>,
    c: &mut [f32],
    ldc: usize,
) {
    reference(shape, a, b, c, ldc);
}

/// [`matmul_f32`] in f64.
///
/// # Panics
/// As there.
pub fn matmul_f64(
    shape: (usize, usize, usize),
    a: View<'_, f64>,
    b: View<'_, f64>,
    c: &mut [f64],
    ldc: usize,
) {
    product(Engine::best(), shape, a, b, (c, ldc), Extent::Full);
}

/// `c[k, k] += xᵀ x` for row-major `x[rows, k]`, on and below the diagonal (some elements above it are written too);
/// the caller mirrors once at the end.
///
/// # Panics
/// When an operand is shorter than its shape.
pub fn syrk_f64(rows: usize, k: usize, x: &[f64], c: &mut [f64]) {
    product(Engine::best(), (k, k, rows), View::transposed(x, k), View::rows(x, k), (c, k), Extent::Lower);
}

/// Packs as many rows of `b` as make a chain, and takes all of `a` over them.
fn product<T: Real>(
    engine: Engine,
    (m, n, k): (usize, usize, usize),
    a: View<'_, T>,
    b: View<'_, T>,
    (c, ldc): (&mut [T], usize),
    extent: Extent,
) {
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    let mut panels = vec![T::default(); n.next_multiple_of(T::PANEL) * k.min(DEPTH)];
    for start in (0..k).step_by(DEPTH) {
        let terms = DEPTH.min(k - start);
        let panels = &mut panels[..n.next_multiple_of(T::PANEL) * terms];
        pack_panels(b.from(start, 0), terms, n, panels);
        let panels = Panels { data: panels, terms };
        accumulate(engine, (m, n, terms), a.from(0, start), panels, (&mut *c, ldc), extent);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::engines;
    use crate::linalg::tests::{assert_bits, noise, with_threads};

    /// Rows and columns: around the strips (4, 6, 12) and a job (96); around a panel (16; 8 in f64) and a pair of them.
    const EDGES: [(usize, usize); 12] = [
        (1, 1),
        (2, 7),
        (3, 8),
        (4, 9),
        (5, 15),
        (6, 16),
        (7, 17),
        (11, 31),
        (12, 32),
        (13, 33),
        (96, 48),
        (97, 65),
    ];
    /// Inner sizes: around one chain and two.
    const INNER: [usize; 6] = [1, 255, 256, 257, 512, 513];
    /// Beyond the size that stays on a thread: wide, tall, both.
    const LARGE: [(usize, usize, usize); 3] = [(7, 1300, 513), (700, 24, 257), (200, 130, 257)];

    fn shapes() -> Vec<(usize, usize, usize)> {
        let edges = INNER.into_iter().flat_map(|k| EDGES.map(|(m, n)| (m, n, k)));
        edges.chain(LARGE).collect()
    }

    /// `[rows, columns]` with `gap` unused elements after each row.
    fn spread(matrix: &[f32], columns: usize, gap: usize) -> Vec<f32> {
        matrix.chunks(columns).flat_map(|row| row.iter().copied().chain(vec![f32::NAN; gap])).collect()
    }

    fn transpose(matrix: &[f32], columns: usize) -> Vec<f32> {
        (0..columns).flat_map(|j| matrix.iter().skip(j).step_by(columns).copied()).collect()
    }

    #[test]
    fn every_engine_gives_the_bits_of_the_reference() {
        for (m, n, k) in shapes() {
            // Strides longer than rows, and a `c` that is not zero.
            let (a, b, c) = (noise(m * k, 1), noise(k * n, 2), spread(&noise(m * n, 3), n, 3));
            let (a_t, b_t) = (spread(&transpose(&a, k), m, 1), spread(&transpose(&b, n), k, 2));
            let (a, b) = (spread(&a, k, 2), spread(&b, n, 1));
            let (a, a_t) = (View::rows(&a, k + 2), View::transposed(&a_t, m + 1));
            let (b, b_t) = (View::rows(&b, n + 1), View::transposed(&b_t, k + 2));
            let mut expected = c.clone();
            matmul_reference((m, n, k), a, b, &mut expected, n + 3);
            for engine in engines() {
                for threads in [1, 2, 4] {
                    for (a, b) in [(a, b), (a_t, b_t)] {
                        let mut found = c.clone();
                        with_threads(threads, || {
                            matmul_f32_with(engine, (m, n, k), a, b, &mut found, n + 3);
                        });
                        assert_bits(
                            &found,
                            &expected,
                            &format!("{engine:?}, {threads} threads, {m}x{n}x{k}"),
                        );
                    }
                }
            }
        }
        println!("{:?} ran", engines());
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            assert_eq!(engines().contains(&Engine::Avx2), avx2);
            assert_eq!(engines().contains(&Engine::Avx512), is_x86_feature_detected!("avx512f"));
        }
        assert!(engines().contains(&Engine::Portable));
    }

    #[test]
    fn every_engine_gives_the_bits_of_the_reference_in_f64() {
        for (m, n, k) in shapes() {
            let wide =
                |values: Vec<f32>| values.into_iter().map(|x| f64::from(x) / 3.0).collect::<Vec<f64>>();
            let (a, b, c) = (wide(noise(m * k, 1)), wide(noise(k * n, 2)), wide(noise(m * n, 3)));
            let (a, b) = (View::transposed(&a, m), View::rows(&b, n));
            let mut expected = c.clone();
            reference((m, n, k), a, b, &mut expected, n);
            for engine in engines() {
                let mut found = c.clone();
                product(engine, (m, n, k), a, b, (&mut found, n), Extent::Full);
                let same = found.iter().map(|x| x.to_bits()).eq(expected.iter().map(|x| x.to_bits()));
                assert!(same, "{engine:?} {m}x{n}x{k}");
            }
        }
    }

    #[test]
    fn syrk_fills_the_lower_triangle() {
        // Within a job, and many jobs.
        for (rows, k) in [(70, 75), (300, 211)] {
            let x: Vec<f64> = noise(rows * k, 3).into_iter().map(f64::from).collect();
            let mut want = vec![0.0; k * k];
            reference((k, k, rows), View::transposed(&x, k), View::rows(&x, k), &mut want, k);
            for threads in [1, 2, 4] {
                let mut c = vec![0.0; k * k];
                with_threads(threads, || syrk_f64(rows, k, &x, &mut c));
                for i in 0..k {
                    for j in 0..=i {
                        assert_eq!(
                            c[i * k + j].to_bits(),
                            want[i * k + j].to_bits(),
                            "{rows}x{k} at {i}, {j}"
                        );
                    }
                }
            }
        }
    }
}
