//! A work buffer for cost rows: megabytes, kept by its thread, on huge pages where the system grants them.

use crate::error::{Result, refuse};
use memmap2::MmapMut;

/// Size and alignment of a huge page.
const HUGE_PAGE: usize = 2 << 20;

/// Room for half-precision numbers as bits, aligned to a huge page; grows as asked and never shrinks. Contents are
/// arbitrary.
pub(super) struct Buffer(Option<MmapMut>);

impl Buffer {
    pub(super) const fn new() -> Self {
        Self(None)
    }

    /// Room for `length` numbers, valid until the next call.
    ///
    /// # Errors
    /// Refuses if the system has no memory for them.
    pub(super) fn halves(&mut self, length: usize) -> Result<*mut u16> {
        let bytes = (length * size_of::<u16>()).next_multiple_of(HUGE_PAGE) + HUGE_PAGE;
        if self.0.as_ref().is_none_or(|map| map.len() < bytes) {
            // The old one goes first: both together may be too much.
            self.0 = None;
            let map = MmapMut::map_anon(bytes).map_err(|error| {
                refuse(format!("no memory for the search's cost rows: {error}"))
                    .wanted(format!("{bytes} bytes"))
            })?;
            // Advice only: refused, the search is a little slower.
            #[cfg(target_os = "linux")]
            let _ = map.advise(memmap2::Advice::HugePage);
            self.0 = Some(map);
        }
        let map = self.0.as_mut().map_or(&mut [][..], |map| &mut map[..]);
        let skip = map.as_ptr().align_offset(HUGE_PAGE);
        Ok(map[skip..].as_mut_ptr().cast())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rooms_are_aligned_and_grow() {
        let mut buffer = Buffer::new();
        // One number, one more than a huge page holds, and back.
        for length in [1, (HUGE_PAGE >> 1) + 1, 7] {
            let room = buffer.halves(length).unwrap();
            assert_eq!(room as usize % HUGE_PAGE, 0);
            let map = buffer.0.as_ref().unwrap();
            assert!(room as usize + 2 * length <= map.as_ptr() as usize + map.len());
        }
    }
}
