//! A dense row-major matrix.

/// Row-major `[rows, cols]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix<T = f32> {
    /// Number of rows.
    pub rows: usize,
    /// Number of columns, which is the distance between rows.
    pub cols: usize,
    /// `rows * cols` elements.
    pub data: Vec<T>,
}

impl<T: Copy + Default> Matrix<T> {
    /// A matrix of zeros.
    pub fn zeros(rows: usize, cols: usize) -> Self {
        Self { rows, cols, data: vec![T::default(); rows * cols] }
    }

    /// Wraps `data`.
    ///
    /// # Panics
    /// When `data` is not `rows * cols` long.
    pub fn new(rows: usize, cols: usize, data: Vec<T>) -> Self {
        assert_eq!(data.len(), rows * cols, "matrix of {rows} x {cols}");
        Self { rows, cols, data }
    }

    /// Row `i`.
    pub fn row(&self, i: usize) -> &[T] {
        &self.data[i * self.cols..(i + 1) * self.cols]
    }

    /// The transpose, as a copy.
    pub fn transposed(&self) -> Self {
        let mut out = Self::zeros(self.cols, self.rows);
        // Square blocks keep both sides in cache.
        const BLOCK: usize = 32;
        for i0 in (0..self.rows).step_by(BLOCK) {
            for j0 in (0..self.cols).step_by(BLOCK) {
                for i in i0..self.rows.min(i0 + BLOCK) {
                    for j in j0..self.cols.min(j0 + BLOCK) {
                        out.data[j * self.rows + i] = self.data[i * self.cols + j];
                    }
                }
            }
        }
        out
    }

    /// The rows named by `indices`, in that order.
    pub fn gather_rows(&self, indices: &[usize]) -> Self {
        let data = indices.iter().flat_map(|&i| self.row(i).iter().copied()).collect();
        Self::new(indices.len(), self.cols, data)
    }
}

impl Matrix<f64> {
    /// `self · other`, by the fixed-order kernel.
    pub fn product(&self, other: &Matrix<f64>) -> Matrix<f64> {
        assert_eq!(self.cols, other.rows);
        let mut out = Matrix::zeros(self.rows, other.cols);
        super::matmul_f64(
            (self.rows, other.cols, self.cols),
            super::View::rows(&self.data, self.cols),
            super::View::rows(&other.data, other.cols),
            &mut out.data,
            other.cols,
        );
        out
    }
}

impl Matrix<f32> {
    /// The same values in f64.
    pub fn widened(&self) -> Matrix<f64> {
        Matrix::new(self.rows, self.cols, self.data.iter().map(|&x| f64::from(x)).collect())
    }

    /// `self · other`, by the fixed-order kernel.
    pub fn product(&self, other: &Matrix<f32>) -> Matrix<f32> {
        assert_eq!(self.cols, other.rows);
        let mut out = Matrix::zeros(self.rows, other.cols);
        super::matmul_f32(
            (self.rows, other.cols, self.cols),
            super::View::rows(&self.data, self.cols),
            super::View::rows(&other.data, other.cols),
            &mut out.data,
            other.cols,
        );
        out
    }
}
