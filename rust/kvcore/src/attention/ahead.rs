//! The tiles that are read next, asked for while others are read.
//!
//! ```text
//! of L lines, over the N steps of a product: after step i the first L * i / N
//! ```
//! Line after line and tile after tile, in the order of memory: asked for side by side, the same lines take a third
//! longer (docs/performance.md). Even steps keep the memory busy all the time.
#![forbid(unsafe_code)]

use crate::simd::Simd;

/// Bytes of a cache line.
const LINE: usize = 64;

/// The most tiles that are asked for together.
pub const MAX_TILES: usize = 4;

/// Some tiles of equal size. Only addresses: nothing is read through them.
pub struct Ahead {
    tiles: [*const u8; MAX_TILES],
    count: usize,
    /// Of a tile.
    tile_lines: usize,
    /// Over which the lines are spread.
    steps: usize,
    /// All lines for each step, less `steps` for each line.
    credit: usize,
    tile: usize,
    line: usize,
}

impl Ahead {
    /// The first [`MAX_TILES`] of `tiles`; none if they are empty.
    pub fn of<'a>(tiles: impl Iterator<Item = &'a [u8]>) -> Option<Self> {
        let (mut at, mut count, mut tile_lines) = ([std::ptr::null(); MAX_TILES], 0, 0);
        for (at, tile) in at.iter_mut().zip(tiles) {
            *at = tile.as_ptr();
            count += 1;
            tile_lines = tile.len().div_ceil(LINE);
        }
        (count * tile_lines > 0).then_some(Self { tiles: at, count, tile_lines, steps: 1, credit: 0, tile: 0, line: 0 })
    }

    /// Spread all over `steps` steps, before the first.
    pub fn over(&mut self, steps: usize) {
        self.steps = steps.max(1);
    }

    /// One step: ask for its lines. After the last nothing is left.
    #[inline(always)]
    pub fn step<S: Simd>(&mut self, s: S) {
        self.credit += self.count * self.tile_lines;
        while self.credit >= self.steps {
            self.credit -= self.steps;
            if self.tile == self.count {
                return;
            }
            s.prefetch(self.tiles[self.tile].wrapping_add(self.line * LINE));
            self.line += 1;
            if self.line == self.tile_lines {
                (self.line, self.tile) = (0, self.tile + 1);
            }
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
            (0..self.1).for_each(|_| self.0.step(s));
        }
    }

    #[test]
    fn lines_are_spread_evenly_and_end() {
        let bytes = vec![0u8; 64 * 100];
        for (tiles, steps) in [(1, 1), (2, 7), (3, 500), (4, 30), (4, 25), (4, 50)] {
            let mut ahead = Ahead::of(bytes.chunks(64 * 25).take(tiles)).unwrap();
            ahead.over(steps);
            for step in 1..=steps {
                Level::best().dispatch(Steps(&mut ahead, 1));
                assert_eq!(ahead.tile * 25 + ahead.line, 25 * tiles * step / steps);
            }
            Level::best().dispatch(Steps(&mut ahead, 400));
        }
        assert!(Ahead::of(std::iter::empty()).is_none());
        assert!(Ahead::of([&bytes[..0]].into_iter()).is_none());
    }
}
