//! What the next job will probably read, which workers ask for while they wait for it.
//!
//! ```text
//! set       a range of addresses, by whoever knows what comes next
//! step      the next piece of it, from its end on, into this core's cache; nothing when all was asked for
//! ```
//! A decode step reads all weights once, and the memory would rest whenever the caller does what is not shared out. Workers
//! take a job's last items first, so what they ask for is what they will read themselves: asked for from the start on, half
//! of it lay in the cache of the wrong core, and nothing was won.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::simd::prefetch;

/// Bytes that are asked for between two looks for a job: a few lines, so that no job waits.
const PIECE: usize = 1 << 10;
/// Of a cache.
const LINE: usize = 64;

/// A range of addresses, from which threads take pieces.
#[derive(Default)]
pub struct Ahead {
    start: AtomicUsize,
    /// Where what was not yet asked for ends.
    end: AtomicUsize,
}

impl Ahead {
    /// From here on this range, whatever is left of the one before. (Pieces of a mixture of both do no harm.)
    pub fn set(&self, addresses: Range<usize>) {
        self.start.store(addresses.start, Ordering::Relaxed);
        self.end.store(addresses.end, Ordering::Relaxed);
    }

    /// Ask for the next piece.
    #[inline]
    pub fn step(&self) {
        if self.end.load(Ordering::Relaxed) > self.start.load(Ordering::Relaxed) {
            let from = self.end.fetch_sub(PIECE, Ordering::Relaxed).wrapping_sub(PIECE);
            for line in (0..PIECE).step_by(LINE) {
                prefetch(from.wrapping_add(line));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_asked_for_once_whatever_lies_there() {
        let ahead = Ahead::default();
        ahead.step();
        assert_eq!(ahead.end.load(Ordering::Relaxed), 0);
        // No such addresses.
        ahead.set(usize::MAX - 3 * PIECE..usize::MAX - PIECE);
        for _ in 0..3 {
            ahead.step();
        }
        assert_eq!(ahead.end.load(Ordering::Relaxed), usize::MAX - 3 * PIECE);
    }
}
