//! The slice of weights behind the one that is multiplied, asked for meanwhile.
//!
//! ```text
//! of L lines, over T tiles of rows of N steps each: after step i of tile t the first L * (t * N + i) / (T * N)
//! ```
//! A step of many products takes so long that the processor, which looks some hundred instructions ahead, would ask for the
//! next lines too late, and its own prefetcher follows what it asks for (docs/performance.md).
#![forbid(unsafe_code)]

use crate::simd::Simd;

/// Bytes of a cache line.
pub(super) const LINE: usize = 64;

/// Where a processor's own prefetcher begins anew.
const PAGE: usize = 4 << 10;

/// Lines that are asked for at once.
const BURST: usize = 4;

/// Where what is asked for lies. Only an address: nothing is read through it.
pub(super) struct Ahead {
    at: *const u8,
    /// Tiles that pass over the slice: together they ask for as much as it holds.
    tiles: usize,
    /// Lines that are due, times `tiles`.
    due: usize,
}

impl Ahead {
    /// Behind `slice`, which so many tiles of rows pass over.
    pub(super) fn of<T>(slice: &[T], tiles: usize) -> Self {
        Self { at: slice.as_ptr_range().end.cast(), tiles, due: 0 }
    }

    /// One tile has gone through one step of `lines` lines.
    #[inline(always)]
    pub(super) fn step<S: Simd>(&mut self, s: S, lines: usize) {
        self.due += lines;
        while self.due >= BURST * self.tiles {
            for line in 0..BURST {
                s.prefetch(self.at.wrapping_add(line * LINE));
            }
            self.at = self.at.wrapping_add(BURST * LINE);
            self.due -= BURST * self.tiles;
        }
    }
}

/// In the first quarter of a page: ask for what lies a page behind `step`, where a stream through weights will need it first.
#[inline(always)]
pub(super) fn next_page<S: Simd, T>(s: S, step: &T) {
    let at = std::ptr::from_ref(step).cast::<u8>();
    if at.addr() % PAGE < PAGE / 4 {
        for line in (0..size_of::<T>()).step_by(LINE) {
            s.prefetch(at.wrapping_add(PAGE + line));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Level, Work};

    struct Steps<'a>(&'a mut Ahead, usize);

    impl<S: Simd> Work<S> for Steps<'_> {
        type Output = ();

        fn run(self, s: S) {
            self.0.step(s, self.1);
        }
    }

    #[test]
    fn all_tiles_together_ask_for_as_much_as_the_slice_holds() {
        for (lines, steps, tiles) in [(20, 18, 1), (17, 64, 4), (2, 288, 22), (2, 9, 43)] {
            let slice = vec![0u8; lines * steps * LINE];
            let mut ahead = Ahead::of(&slice, tiles);
            for step in 1..=steps * tiles {
                Level::best().dispatch(Steps(&mut ahead, lines));
                let asked = (ahead.at.addr() - slice.as_ptr_range().end.addr()) / LINE;
                assert_eq!(asked, lines * step / tiles / BURST * BURST, "{lines} {steps} {tiles}");
            }
        }
    }
}
