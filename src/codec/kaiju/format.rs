//! The layout of one tensor: header, index and columns of the side-band, rows of the bulk.
//!
//! | part | bytes |
//! |---|---|
//! | header | `KJU1`, then u32: rows, cols, hi_count, bulk_cols, step_num, step_den, extension |
//! | HiIndex | u32 by side-band column, ascending |
//! | HiBand | by side-band column: f16 scale, then an i8 by row |
//! | BulkRows | by row: f16 scale, the codes of its 24-blocks, their scales of 4 bits, two a byte, low nibble first |
//!
//! Everything is little-endian. Bulk columns are those not in HiIndex, ascending. A bulk weight is
//! `row_scale · (q + 1) / 16 · x`; a side-band weight is `scale · i8`. Extension: code bits in the low byte, layout version 1
//! in the next.

use half::f16;

use super::code::CodeWidth;
use super::golay::LENGTH;
use crate::error::{Result, refuse};
use crate::store::hash::sha256_hex;

/// First bytes of a payload.
pub const MAGIC: [u8; 4] = *b"KJU1";
/// Bytes of the header.
pub const HEADER_BYTES: usize = 32;
/// Version of the layout, in the extension word.
pub const LAYOUT_VERSION: u32 = 1;

/// What a payload says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Columns in the side-band.
    pub hi_count: usize,
    /// Columns in the bulk, a multiple of 24.
    pub bulk_cols: usize,
    /// Width of a block's code.
    pub code: CodeWidth,
}

impl Header {
    /// The header of an encode: `ceil(hi_frac · cols)` columns for the side-band, then the multiple of 24 that is nearest to
    /// the rest for the bulk (a remainder of 12 rounds up), at most what there is.
    ///
    /// # Errors
    /// Sizes beyond 32 bits or of zero, a fraction that is no number from 0 to 1.
    pub fn plan((rows, cols): (usize, usize), code: CodeWidth, hi_frac: f64) -> Result<Self> {
        if rows == 0 || cols == 0 || u32::try_from(rows).is_err() || u32::try_from(cols).is_err() {
            return refuse(format!("a tensor of {rows} x {cols}")).wanted("sizes from 1 to 2^32 - 1").err();
        }
        if !(0.0..=1.0).contains(&hi_frac) {
            return refuse(format!("a side-band of {hi_frac} of the columns")).wanted("0 to 1").err();
        }
        let rest = cols - ((hi_frac * cols as f64).ceil() as usize).min(cols);
        let blocks = ((rest + LENGTH / 2) / LENGTH).min(cols / LENGTH);
        let bulk_cols = blocks * LENGTH;
        Ok(Self { rows, cols, hi_count: cols - bulk_cols, bulk_cols, code })
    }

    /// Reads a header.
    ///
    /// # Errors
    /// Names the field that is wrong, and what would be right.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let Some((header, _)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
            return refuse(format!("{} bytes", bytes.len()))
                .field("header")
                .wanted(format!("at least {HEADER_BYTES}"))
                .err();
        };
        let (words, _) = header.as_chunks::<4>();
        if words[0] != MAGIC {
            return refuse(format!("the first bytes are {:02x?}", words[0]))
                .field("magic")
                .wanted("4b 4a 55 31 (KJU1)")
                .err();
        }
        let word = |at: usize| u32::from_le_bytes(words[at]);
        let size = |at: usize| word(at) as usize;
        let (rows, cols, hi_count, bulk_cols) = (size(1), size(2), size(3), size(4));
        let wrong = |field: &str, what: String| refuse(what).field(field.to_owned());
        if rows == 0 || cols == 0 {
            return wrong("rows, cols", format!("a tensor of {rows} x {cols}"))
                .wanted("at least 1 each")
                .err();
        }
        if !bulk_cols.is_multiple_of(LENGTH) {
            return wrong("bulk_cols", bulk_cols.to_string()).wanted("a multiple of 24").err();
        }
        if hi_count.checked_add(bulk_cols) != Some(cols) {
            return wrong("hi_count, bulk_cols", format!("{hi_count} and {bulk_cols} columns"))
                .wanted(format!("{cols} together"))
                .err();
        }
        let (num, den) = (word(5), word(6));
        if (num, den) != (1, 1) {
            return wrong("step_num, step_den", format!("a step of {num}/{den}")).wanted("1/1").err();
        }
        let extension = word(7);
        let code = CodeWidth::from_bits(extension & 0xFF)
            .map_err(|error| error.place(|refusal| refusal.field("code bits")))?;
        let version = extension >> 8 & 0xFF;
        if version != LAYOUT_VERSION {
            return wrong("layout version", version.to_string()).wanted("1").err();
        }
        if extension >> 16 != 0 {
            return wrong("extension", format!("{extension:#x} has bits beyond the layout version"))
                .wanted("none")
                .err();
        }
        let header = Self { rows, cols, hi_count, bulk_cols, code };
        match header.checked_len() {
            Some(_) => Ok(header),
            None => wrong("rows, cols", format!("a tensor of {rows} x {cols}"))
                .wanted("a payload of fewer than 2^63 bytes")
                .err(),
        }
    }

    /// Bytes of a whole payload.
    pub fn payload_len(&self) -> usize {
        self.checked_len().expect("checked when the header was made")
    }

    /// Bits a weight, the header and all scales included.
    pub fn bits_per_weight(&self) -> f64 {
        self.payload_len() as f64 * 8.0 / (self.rows as f64 * self.cols as f64)
    }

    /// 24-blocks of a row.
    pub fn blocks(&self) -> usize {
        self.bulk_cols / LENGTH
    }

    fn checked_len(&self) -> Option<usize> {
        let hi = self.hi_count.checked_mul(4 + 2 + self.rows)?;
        let rows = self.rows.checked_mul(self.row_len())?;
        let len = HEADER_BYTES.checked_add(hi)?.checked_add(rows)?;
        (len <= isize::MAX as usize).then_some(len)
    }

    fn row_len(&self) -> usize {
        2 + self.blocks() * self.code.bytes() + self.blocks().div_ceil(2)
    }

    fn band_start(&self) -> usize {
        HEADER_BYTES + 4 * self.hi_count
    }

    fn rows_start(&self) -> usize {
        self.band_start() + self.hi_count * (2 + self.rows)
    }

    fn write(&self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(&MAGIC);
        let sizes = [self.rows, self.cols, self.hi_count, self.bulk_cols, 1, 1].map(|size| size as u32);
        let extension = self.code.bits() | LAYOUT_VERSION << 8;
        sizes.into_iter().chain([extension]).for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
    }
}

/// A tensor of `rows` outputs and `cols` inputs in KAIJU1: a payload found to be whole and valid.
#[derive(Debug, Clone, PartialEq)]
pub struct KaijuTensor {
    header: Header,
    hi_index: Vec<u32>,
    hi_scales: Vec<f32>,
    bytes: Vec<u8>,
}

/// One column of the side-band.
#[derive(Debug, Clone, PartialEq)]
pub struct HiColumn {
    /// The column.
    pub column: u32,
    /// Scale.
    pub scale: f16,
    /// Values by row.
    pub values: Vec<i8>,
}

/// The bulk of one row.
#[derive(Debug, Clone, PartialEq)]
pub struct BulkRow {
    /// Scale of the row.
    pub scale: f16,
    /// Code of each 24-block.
    pub codes: Vec<u64>,
    /// Scale of each 24-block, 0 to 15.
    pub block_scales: Vec<u8>,
}

/// The stored parts of a row's bulk.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowBytes<'a> {
    pub scale: f16,
    pub codes: &'a [u8],
    pub block_scales: &'a [u8],
}

impl RowBytes<'_> {
    /// Scale of a block, 0 to 15.
    #[inline(always)]
    pub fn block_scale(&self, block: usize) -> u8 {
        self.block_scales[block / 2] >> (4 * (block % 2)) & 15
    }
}

impl KaijuTensor {
    /// Reads a payload and checks all of it.
    ///
    /// # Errors
    /// Names the field, column, row and block of what is wrong, and what would be right.
    pub fn parse(bytes: Vec<u8>) -> Result<Self> {
        let header = Header::parse(&bytes)?;
        if bytes.len() != header.payload_len() {
            return refuse(format!("the payload has {} bytes", bytes.len()))
                .wanted(format!("{}, by its header", header.payload_len()))
                .err();
        }
        let index = bytes[HEADER_BYTES..header.band_start()].as_chunks::<4>().0;
        let hi_index: Vec<u32> = index.iter().map(|word| u32::from_le_bytes(*word)).collect();
        for (at, &column) in hi_index.iter().enumerate() {
            let wrong = |what: String| refuse(what).field(format!("HiIndex[{at}]"));
            if column as usize >= header.cols {
                return wrong(format!("column {column}")).wanted(format!("below {}", header.cols)).err();
            }
            if at > 0 && hi_index[at - 1] >= column {
                return wrong(format!("column {column} after {}", hi_index[at - 1]))
                    .wanted("ascending columns")
                    .err();
            }
        }
        let mut tensor = Self { header, hi_index, hi_scales: Vec::with_capacity(header.hi_count), bytes };
        for at in 0..header.hi_count {
            let scale = tensor.hi_column_bytes(at).0;
            tensor.hi_scales.push(scale.to_f32());
            check_scale(scale)
                .map_err(|error| error.place(|refusal| refusal.field(format!("HiBand[{at}] scale"))))?;
        }
        (0..header.rows).try_for_each(|row| tensor.check_row(row))?;
        Ok(tensor)
    }

    fn check_row(&self, row: usize) -> Result<()> {
        let parts = self.row_bytes(row);
        check_scale(parts.scale)
            .map_err(|error| error.place(|refusal| refusal.row(row).field("row scale")))?;
        let width = self.header.code;
        for (block, code) in parts.codes.chunks_exact(width.bytes()).enumerate() {
            width.check(width.read(code)).map_err(|error| {
                error.place(|refusal| refusal.row(row).field(format!("code of block {block}")))
            })?;
        }
        if self.header.blocks() % 2 == 1 && parts.block_scales.last().is_some_and(|byte| byte >> 4 != 0) {
            return refuse("the unused half of the last byte is not 0")
                .row(row)
                .field("block scales")
                .wanted("0")
                .err();
        }
        Ok(())
    }

    /// Puts a payload together.
    ///
    /// # Errors
    /// As [`KaijuTensor::parse`].
    ///
    /// # Panics
    /// When the parts have other sizes than the header says.
    pub fn assemble(header: &Header, hi: &[HiColumn], rows: &[BulkRow]) -> Result<Self> {
        assert_eq!((hi.len(), rows.len()), (header.hi_count, header.rows));
        let mut bytes = Vec::with_capacity(header.payload_len());
        header.write(&mut bytes);
        hi.iter().for_each(|column| bytes.extend_from_slice(&column.column.to_le_bytes()));
        for column in hi {
            bytes.extend_from_slice(&column.scale.to_le_bytes());
            bytes.extend(column.values.iter().map(|&value| value as u8));
        }
        for row in rows {
            bytes.extend_from_slice(&row.scale.to_le_bytes());
            row.codes.iter().for_each(|&code| header.code.write(code, &mut bytes));
            bytes.extend(
                row.block_scales.chunks(2).map(|two| two[0] | two.get(1).map_or(0, |high| high << 4)),
            );
        }
        Self::parse(bytes)
    }

    /// The payload as stored.
    pub fn payload(&self) -> &[u8] {
        &self.bytes
    }

    /// SHA-256 of the payload.
    pub fn packed_sha256(&self) -> String {
        sha256_hex(&self.bytes)
    }

    /// Its header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.header.rows
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.header.cols
    }

    /// Columns in the side-band.
    pub fn hi_count(&self) -> usize {
        self.header.hi_count
    }

    /// Columns in the bulk.
    pub fn bulk_cols(&self) -> usize {
        self.header.bulk_cols
    }

    /// Width of a block's code.
    pub fn code(&self) -> CodeWidth {
        self.header.code
    }

    /// Bits a weight, counted from the payload's bytes.
    pub fn bits_per_weight(&self) -> f64 {
        self.header.bits_per_weight()
    }

    /// Columns of the side-band, ascending.
    pub fn hi_index(&self) -> &[u32] {
        &self.hi_index
    }

    /// Their scales.
    pub(super) fn hi_scales(&self) -> &[f32] {
        &self.hi_scales
    }

    /// Columns of the bulk, ascending.
    pub fn bulk_columns(&self) -> Vec<u32> {
        bulk_columns(self.cols(), &self.hi_index)
    }

    /// The bulk of a row, field by field.
    ///
    /// # Panics
    /// When the row is beyond the last.
    pub fn bulk_row(&self, row: usize) -> BulkRow {
        let (parts, width) = (self.row_bytes(row), self.code());
        BulkRow {
            scale: parts.scale,
            codes: parts.codes.chunks_exact(width.bytes()).map(|code| width.read(code)).collect(),
            block_scales: (0..self.header.blocks()).map(|block| parts.block_scale(block)).collect(),
        }
    }

    /// One column of the side-band: scale, and values by row as bytes of i8.
    pub(super) fn hi_column_bytes(&self, at: usize) -> (f16, &[u8]) {
        let start = self.header.band_start() + at * (2 + self.rows());
        let column = &self.bytes[start..start + 2 + self.rows()];
        (f16::from_le_bytes([column[0], column[1]]), &column[2..])
    }

    /// The stored parts of a row's bulk.
    pub(super) fn row_bytes(&self, row: usize) -> RowBytes<'_> {
        let start = self.header.rows_start() + row * self.header.row_len();
        let bytes = &self.bytes[start..start + self.header.row_len()];
        let (codes, block_scales) = bytes[2..].split_at(self.header.blocks() * self.code().bytes());
        RowBytes { scale: f16::from_le_bytes([bytes[0], bytes[1]]), codes, block_scales }
    }
}

/// The columns not in an ascending list.
pub(super) fn bulk_columns(cols: usize, hi_index: &[u32]) -> Vec<u32> {
    let mut hi = hi_index.iter().copied().peekable();
    (0..cols as u32).filter(|&column| hi.next_if_eq(&column).is_none()).collect()
}

/// Bytes of the payload that an encode of these settings gives.
///
/// # Errors
/// As [`Header::plan`].
pub fn payload_bytes(rows: usize, cols: usize, code: CodeWidth, hi_frac: f64) -> Result<usize> {
    Ok(Header::plan((rows, cols), code, hi_frac)?.payload_len())
}

fn check_scale(scale: f16) -> Result<()> {
    if scale.is_finite() { Ok(()) } else { refuse(format!("{scale}")).wanted("a finite number").err() }
}
