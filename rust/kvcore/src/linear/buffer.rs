//! Memory for packed weights: large zeroed mappings, on huge pages where the system offers them.
//!
//! A processor's prefetcher stops at the end of a page, so a layer of a megabyte on small pages is read at half the
//! machine's bandwidth. Layers of one model therefore lie together in chunks large enough for huge pages.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::{MmapOptions, MmapRaw};

use crate::{Error, Result};

/// Where huge pages start, on all systems at hand.
const HUGE_PAGE: usize = 2 << 20;
/// Bytes of a chunk; only what is written to becomes resident.
const CHUNK: usize = 64 << 20;
/// Larger buffers have a chunk of their own.
const LARGE: usize = CHUNK / 4;
/// Buffers start at whole pairs of cache lines.
const ALIGN: usize = 128;

/// Where the packed weights of one model lie, side by side. Memory goes back to the system chunk by chunk, as soon
/// as no layer uses a chunk any more; the arena itself may be dropped before its layers.
#[derive(Default)]
pub struct Arena(Mutex<Option<Free>>);

struct Chunk {
    map: MmapRaw,
    /// Where its buffers end, in ascending order.
    ends: Mutex<Vec<usize>>,
}

/// What is left of the newest chunk.
struct Free {
    chunk: Arc<Chunk>,
    range: Range<usize>,
}

/// Bytes of a chunk that belong to one layer alone.
pub(super) struct Buffer {
    chunk: Arc<Chunk>,
    range: Range<usize>,
}

impl Arena {
    /// An arena without memory.
    pub fn new() -> Self {
        Self::default()
    }

    /// `len` zero bytes. Pages are first touched by the thread that packs into them.
    pub(super) fn zeroed(&self, len: usize) -> Result<Buffer> {
        if len > LARGE {
            return map(len)?.take(len);
        }
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if free.as_ref().is_none_or(|free| free.range.len() < len.next_multiple_of(ALIGN)) {
            *free = Some(map(CHUNK)?);
        }
        free.as_mut().map_or_else(|| map(len)?.take(len), |free| free.take(len))
    }
}

/// A new chunk for `len` bytes from a huge page's start on.
fn map(len: usize) -> Result<Free> {
    let failed = |reason: String| Error::OutOfMemory { bytes: len, what: "packed weights", reason };
    let padded = len.checked_next_multiple_of(ALIGN).and_then(|len| len.checked_add(HUGE_PAGE));
    let padded = padded.filter(|&len| isize::try_from(len).is_ok()).ok_or_else(|| failed("too large".into()))?;
    let map = MmapOptions::new().len(padded).map_anon().map_err(|e| failed(e.to_string()))?;
    // Without support it is slower, not wrong. (Miri has no advice.)
    #[cfg(all(target_os = "linux", not(miri)))]
    let _ = map.advise(memmap2::Advice::HugePage);
    let start = map.as_ptr().align_offset(HUGE_PAGE).min(HUGE_PAGE);
    let chunk = Chunk { map: map.into(), ends: Mutex::default() };
    Ok(Free { chunk: Arc::new(chunk), range: start..padded })
}

impl Free {
    fn take(&mut self, len: usize) -> Result<Buffer> {
        let range = self.range.start..self.range.start + len;
        self.range.start += len.next_multiple_of(ALIGN);
        self.chunk.ends.lock().unwrap_or_else(PoisonError::into_inner).push(range.end);
        Ok(Buffer { chunk: Arc::clone(&self.chunk), range })
    }
}

impl Buffer {
    /// Bytes held.
    pub(super) fn len(&self) -> usize {
        self.range.len()
    }

    /// Addresses of the buffer behind it in its chunk: that of the layer that was packed next.
    pub(super) fn behind(&self) -> Range<usize> {
        let start = self.chunk.map.as_ptr().addr();
        let ends = self.chunk.ends.lock().unwrap_or_else(PoisonError::into_inner);
        let at = ends.partition_point(|end| *end <= self.range.end);
        start + self.range.end..start + ends.get(at).copied().unwrap_or(self.range.end)
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the range lies within the mapping, which lives as long as `chunk` and is never remapped; no other
        // buffer has any of its bytes, since `take` hands each out once, and `&mut self` guards writes to it.
        unsafe { std::slice::from_raw_parts(self.chunk.map.as_ptr().add(self.range.start), self.range.len()) }
    }

    /// The bytes as steps of groups.
    pub(super) fn groups<T: bytemuck::Pod>(&self) -> &[T] {
        bytemuck::cast_slice(self.bytes())
    }

    /// The bytes as steps of groups, to be filled.
    pub(super) fn groups_mut<T: bytemuck::Pod>(&mut self) -> &mut [T] {
        // SAFETY: as in `bytes`; `&mut self` makes it the only reference.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(self.chunk.map.as_mut_ptr().add(self.range.start), self.range.len())
        };
        bytemuck::cast_slice_mut(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_zeroed_aligned_and_disjoint() {
        let arena = Arena::new();
        let mut buffers = Vec::new();
        for (i, len) in [1, 100, 4096, LARGE, LARGE, LARGE, LARGE, LARGE + 1, 7, CHUNK].into_iter().enumerate() {
            let mut buffer = arena.zeroed(len).unwrap();
            assert_eq!((buffer.len(), buffer.bytes().as_ptr() as usize % ALIGN), (len, 0));
            let bytes: &mut [u8] = buffer.groups_mut();
            assert!(bytes[0] == 0 && bytes[len - 1] == 0);
            (bytes[0], bytes[len - 1]) = (i as u8, i as u8);
            buffers.push(buffer);
        }
        drop(arena);
        for (i, buffer) in buffers.iter().enumerate() {
            let bytes: &[u8] = buffer.groups();
            assert!(bytes[0] == i as u8 && bytes[bytes.len() - 1] == i as u8);
        }
    }

    #[test]
    fn what_cannot_be_had_is_an_error() {
        for len in [usize::MAX, isize::MAX as usize, 1 << 60] {
            assert!(matches!(Arena::new().zeroed(len), Err(Error::OutOfMemory { .. })));
        }
    }
}
