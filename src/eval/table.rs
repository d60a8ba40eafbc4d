//! Aligned columns of plain text, and the numbers in them.

/// Lays out `rows` under `header`: the first column to the left, the others to the right, two spaces between columns,
/// no space at the end of a line. Widths are counted in characters. A row may be shorter than the header.
pub(crate) fn aligned(header: &[&str], rows: &[Vec<String>]) -> String {
    let header: Vec<String> = header.iter().map(|&cell| cell.to_owned()).collect();
    let lines: Vec<&[String]> =
        std::iter::once(header.as_slice()).chain(rows.iter().map(Vec::as_slice)).collect();
    let width = |column: usize| {
        let cells = lines.iter().filter_map(|line| line.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let mut text = String::new();
    for line in lines {
        let cells = line.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| match column {
            0 => format!("{cell:<width$}"),
            _ => format!("  {cell:>width$}"),
        });
        text.push_str(cells.collect::<String>().trim_end());
        text.push('\n');
    }
    text
}

/// A number with so many decimals; in scientific form where those would show nothing of it or it is huge; `-` where
/// there is none.
pub(crate) fn figure(value: f64, decimals: usize) -> String {
    if value.is_nan() {
        return "-".into();
    }
    let size = value.abs();
    if value != 0.0 && (size >= 1e9 || size < 0.5 * 0.1f64.powi(decimals as i32)) {
        return format!("{value:.2e}");
    }
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell_in_characters() {
        let rows = [vec!["a".into(), "1.5 ± 0.5".into(), "x".into()], vec!["long".into(), "2".into()]];
        assert_eq!(
            aligned(&["k", "v", ""], &rows),
            concat!("k             v\n", "a     1.5 ± 0.5  x\n", "long          2\n")
        );
    }

    #[test]
    fn figures_neither_vanish_nor_overflow() {
        assert_eq!(figure(0.0, 4), "0.0000");
        assert_eq!(figure(0.00006, 4), "0.0001");
        assert_eq!(figure(0.00004, 4), "4.00e-5");
        assert_eq!(figure(-1.5e-12, 4), "-1.50e-12");
        assert_eq!(figure(f64::INFINITY, 4), "inf");
        assert_eq!(figure(f64::NAN, 4), "-");
    }
}
