//! Memory for packed weights: page-aligned, zeroed by the system, on huge pages where it offers them.
#![forbid(unsafe_code)]

use memmap2::MmapMut;

use crate::{Error, Result};

/// Zeroed bytes that start at a page. Pages are first touched by the thread that packs into them.
pub(super) struct Buffer(MmapMut);

impl Buffer {
    /// `len` zero bytes, at least 1.
    pub(super) fn zeroed(len: usize) -> Result<Self> {
        let what = "packed weights";
        let map = MmapMut::map_anon(len).map_err(|e| Error::OutOfMemory { bytes: len, what, reason: e.to_string() })?;
        // Fewer page faults and TLB misses; without support it is slower, not wrong.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Self(map))
    }

    /// Bytes held.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The bytes as steps of groups.
    pub(super) fn groups<T: bytemuck::Pod>(&self) -> &[T] {
        bytemuck::cast_slice(&self.0)
    }

    /// The bytes as steps of groups, to be filled.
    pub(super) fn groups_mut<T: bytemuck::Pod>(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut self.0)
    }
}
