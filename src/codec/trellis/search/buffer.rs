//! A work buffer for cost rows: megabytes, kept by its thread, on huge pages where the system grants them.

use crate::error::{Result, refuse};
use memmap2::MmapMut;

/// Size and alignment of a huge page.
const HUGE_PAGE: usize = 2 << 20;

/// Half-precision numbers as bits, aligned to a huge page; grows as asked and never shrinks. Contents are arbitrary.
pub(super) struct Buffer(Option<MmapMut>);

impl Buffer {
    pub(super) const fn new() -> Self {
        Self(None)
    }

    /// At least `length` numbers.
    ///
    /// # Errors
    /// Refuses if the system has no memory for them.
    pub(super) fn halves(&mut self, length: usize) -> Result<&mut [u16]> {
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
        let (_, halves, _) = unsafe { map[skip..].align_to_mut::<u16>() };
        Ok(&mut halves[..length])
    }
}
