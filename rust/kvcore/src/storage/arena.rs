//! The mapping that holds all blocks, of which parts can be frozen: lent to readers who outlive every borrow.
//!
//! ```text
//! bytes           all of it, to be read: nobody can write while that borrow lasts
//! get_mut(range)  this range alone (or two), to be written: panics if a part of it is frozen
//! freeze(range)   keeps the range as it is, and the mapping, until the `Frozen` is dropped, in whatever thread
//! ```
//! Who writes never forms a reference to more than the range that is written, so that no `&mut` ever covers bytes that a
//! reader outside of this library (numpy) looks at. That frozen blocks are not written is the block manager's business;
//! that a mistake there is a panic and not a race is decided here, for each range that is handed out.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use memmap2::{MmapMut, MmapRaw};

/// Bytes that become resident as they are first written, all zero before.
pub(super) struct Arena {
    /// Never unmapped before the last `Frozen` is gone.
    map: Arc<MmapRaw>,
    /// For each range (start, end) that was frozen, how many of its `Frozen`s there are still. No range without any
    /// stays here for long.
    frozen: BTreeMap<(usize, usize), Arc<AtomicUsize>>,
    /// Bytes of the longest range that was ever frozen.
    longest: usize,
    /// How many ranges there may be before those without a `Frozen` are looked for.
    most: usize,
}

/// A range that nobody changes while this lives; its bytes live as long, too.
#[derive(Debug)]
pub struct Frozen {
    map: Arc<MmapRaw>,
    range: Range<usize>,
    live: Arc<AtomicUsize>,
}

impl Arena {
    /// Reserve memory.
    ///
    /// # Errors
    /// What the system says.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let map = MmapMut::map_anon(bytes)?;
        // Fewer TLB misses on long contexts; a system without huge pages says no, which is no error. Miri has no
        // advice.
        #[cfg(all(target_os = "linux", not(miri)))]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Self { map: Arc::new(MmapRaw::from(map)), frozen: BTreeMap::new(), longest: 0, most: 64 })
    }

    /// All bytes.
    #[inline(always)]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is as long as it says, readable, initialised (anonymous: zeros, then what was written) and
        // lives as long as `self.map`, which this borrow keeps. Only `get_mut`, `get_two_mut` and `copy` write to it,
        // and all need `&mut self`, which cannot be had during this borrow.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr(), self.map.len()) }
    }

    /// Some bytes, to be written.
    ///
    /// # Panics
    /// If the range is not within the arena, or a part of it is frozen.
    #[inline(always)]
    pub fn get_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        self.claim(&range);
        // SAFETY: `claim` has found the range within the mapping, which is writable, initialised and lives as long as
        // `self.map`. No other reference to these bytes is there: those of `bytes`, of this function and of
        // `get_two_mut` end before `&mut self` can be had again, and no `Frozen`, from which alone bytes are read without a borrow of the arena,
        // overlaps the range; none can be made while this borrow lasts.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().add(range.start), range.len()) }
    }

    /// Two ranges, the first before the second, to be written.
    ///
    /// # Panics
    /// As [`Arena::get_mut`] for each of them; if the second does not begin at the first's end or behind it.
    #[inline(always)]
    pub fn get_two_mut(&mut self, first: Range<usize>, second: Range<usize>) -> (&mut [u8], &mut [u8]) {
        assert!(first.end <= second.start, "two ranges that overlap or are in the wrong order");
        self.claim(&first);
        self.claim(&second);
        let base = self.map.as_mut_ptr();
        // SAFETY: as in `get_mut` for each range, and the two do not overlap.
        unsafe {
            (
                std::slice::from_raw_parts_mut(base.add(first.start), first.len()),
                std::slice::from_raw_parts_mut(base.add(second.start), second.len()),
            )
        }
    }

    /// Copy a range to the one that begins at `to`; both may overlap.
    ///
    /// # Panics
    /// As [`Arena::get_mut`] for the destination; if the source is not within the arena.
    pub fn copy(&mut self, from: Range<usize>, to: usize) {
        assert!(from.start <= from.end && from.end <= self.map.len(), "a range outside of the arena");
        self.claim(&(to..to.saturating_add(from.len())));
        let base = self.map.as_mut_ptr();
        // SAFETY: both ranges are within the mapping, and `&mut self` keeps everybody else from it but the readers of
        // `Frozen`s, none of which overlaps the destination (`claim`). `copy` allows source and destination to overlap.
        unsafe { std::ptr::copy(base.add(from.start), base.add(to), from.len()) }
    }

    /// Keep a range as it is until what is returned is dropped.
    ///
    /// # Panics
    /// If the range is not within the arena.
    pub fn freeze(&mut self, range: Range<usize>) -> Frozen {
        assert!(range.start <= range.end && range.end <= self.map.len(), "a range outside of the arena");
        if self.frozen.len() >= self.most {
            self.frozen.retain(|_, live| is_live(live));
            self.most = (2 * self.frozen.len()).max(64);
        }
        self.longest = self.longest.max(range.len());
        let live = Arc::clone(self.frozen.entry((range.start, range.end)).or_default());
        live.fetch_add(1, Ordering::Relaxed);
        Frozen { map: Arc::clone(&self.map), range, live }
    }

    /// Whether any of these bytes is frozen.
    pub fn is_frozen(&self, range: &Range<usize>) -> bool {
        // Whatever begins before these cannot reach the range.
        let from = (range.start.saturating_sub(self.longest), 0);
        let near = self.frozen.range(from..(range.end, 0));
        near.into_iter().any(|(&(start, end), live)| start < end && end > range.start && is_live(live))
    }

    /// Panics unless the range may be written.
    #[inline(always)]
    fn claim(&self, range: &Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.map.len(), "a range outside of the arena");
        if !self.frozen.is_empty() {
            self.claim_beside_frozen(range);
        }
    }

    #[cold]
    #[inline(never)]
    fn claim_beside_frozen(&self, range: &Range<usize>) {
        assert!(!self.is_frozen(range), "bytes {range:?} are being viewed: they cannot be written");
    }
}

/// Whether a range's count says that somebody reads it. What they read happens before the count falls to zero (`Release`
/// in `drop`), which happens before whatever follows here.
fn is_live(count: &AtomicUsize) -> bool {
    count.load(Ordering::Acquire) > 0
}

impl Frozen {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `freeze` has found the range within the mapping, which is initialised and lives as long as `self.map`.
        // Nobody writes to it while `self` lives: all writes go through ranges that `claim` has allowed.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(self.range.start), self.range.len()) }
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.live.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panics(work: impl FnOnce() + std::panic::UnwindSafe) -> bool {
        std::panic::catch_unwind(work).is_err()
    }

    #[test]
    #[expect(clippy::single_range_in_vec_init, reason = "lists of frozen ranges, some of which have one")]
    fn what_is_frozen_cannot_be_written() {
        let allowed = |freeze: &[Range<usize>], write: Range<usize>| {
            let mut arena = Arena::new(4096).unwrap();
            let frozen: Vec<Frozen> = freeze.iter().cloned().map(|range| arena.freeze(range)).collect();
            let asked = write.clone();
            let free = !panics(std::panic::AssertUnwindSafe(|| arena.get_mut(asked).fill(1)));
            assert_eq!(free, !panics(std::panic::AssertUnwindSafe(|| arena.copy(0..write.len(), write.start))));
            assert_eq!(arena.is_frozen(&write), !free);
            let two = (write.start..write.start, write.clone());
            assert_eq!(free, !panics(std::panic::AssertUnwindSafe(|| arena.get_two_mut(two.0, two.1).1.fill(1))));
            assert!(frozen.iter().all(|frozen| frozen.bytes().iter().all(|&byte| byte == 0)));
            free
        };
        assert!(allowed(&[], 0..4096));
        assert!(allowed(&[100..200], 0..100));
        assert!(allowed(&[100..200], 200..300));
        assert!(allowed(&[100..200, 300..400], 200..300));
        assert!(!allowed(&[100..200], 0..101));
        assert!(!allowed(&[100..200], 199..300));
        assert!(!allowed(&[100..200], 120..130));
        assert!(!allowed(&[100..200], 0..4096));
        // A long one that begins far before a short one.
        assert!(!allowed(&[0..1000, 500..510], 900..910));
        assert!(!allowed(&[100..200, 100..120], 150..160));
        // Nothing is frozen.
        assert!(allowed(&[150..150], 100..200));
    }

    #[test]
    fn what_is_dropped_can_be_written_again() {
        let mut arena = Arena::new(4096).unwrap();
        let (first, second) = (arena.freeze(0..64), arena.freeze(0..64));
        drop(first);
        assert!(arena.is_frozen(&(0..64)));
        std::thread::spawn(move || drop(second)).join().unwrap();
        arena.get_mut(0..64).fill(7);
        for start in 0..1000 {
            drop(arena.freeze(start..start + 1));
        }
        assert!(arena.frozen.len() <= 64, "{}", arena.frozen.len());
    }

    #[test]
    fn what_is_frozen_outlives_the_arena() {
        let mut arena = Arena::new(1 << 20).unwrap();
        arena.get_mut(5..8).copy_from_slice(&[1, 2, 3]);
        arena.copy(5..8, 4000);
        let frozen = arena.freeze(4000..4003);
        drop(arena);
        assert_eq!(frozen.bytes(), [1, 2, 3]);
    }

    #[test]
    fn ranges_are_checked() {
        let mut arena = Arena::new(4096).unwrap();
        let mut bad = |work: fn(&mut Arena)| panics(std::panic::AssertUnwindSafe(|| work(&mut arena)));
        assert!(bad(|arena| arena.get_mut(4096..4097).fill(0)));
        #[expect(clippy::reversed_empty_ranges, reason = "the mistake that is tested")]
        let reversed = bad(|arena| arena.get_mut(9..8).fill(0));
        assert!(reversed);
        assert!(bad(|arena| arena.get_two_mut(0..9, 8..10).0.fill(0)));
        assert!(bad(|arena| arena.get_two_mut(8..10, 0..4).0.fill(0)));
        assert!(bad(|arena| arena.get_two_mut(8..10, 4000..5000).0.fill(0)));
        assert!(!bad(|arena| arena.get_two_mut(8..10, 10..10).0.fill(3)));
        assert!(bad(|arena| arena.copy(0..10, 4090)));
        assert!(bad(|arena| arena.copy(4090..4100, 0)));
        assert!(bad(|arena| arena.copy(0..10, usize::MAX - 3)));
        assert!(bad(|arena| drop(arena.freeze(4000..5000))));
    }
}
