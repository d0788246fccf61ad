//! Memory of calls that are over, for the next ones.
//!
//! ```text
//! take(n)   of what is kept the smallest piece of n to 2 n values, or else a new one
//! give      kept, unless it is small; what was given long ago goes when too much is kept
//! ```
//! The results of a layer have the sizes of those of the layer before. From the system memory comes page by page, each
//! zeroed when it is first touched, and an allocator gives large pieces back at once: in prefill that took up to a sixth
//! of the time.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Mutex;

use super::Threads;
use crate::{Error, Result};

/// Values below which an allocator has something at hand.
const SMALL: usize = 1 << 14;
/// Values of all pieces that are kept: 256 MiB.
const KEPT: usize = 64 << 20;

/// What is kept, the oldest first.
#[derive(Default)]
pub struct Memory(Mutex<VecDeque<Vec<f32>>>);

impl Memory {
    /// At least `len` values, whatever they are.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn take(&self, len: usize) -> Result<Vec<f32>> {
        // Held for a moment only; in a forked child the holder may not exist.
        if len >= SMALL
            && let Ok(mut kept) = self.0.try_lock()
        {
            let fits =
                kept.iter().enumerate().filter(|(_, piece)| (len..=len.saturating_mul(2)).contains(&piece.len()));
            if let Some((at, _)) = fits.min_by_key(|(_, piece)| piece.len()) {
                return kept.remove(at).map_or_else(|| new(len), Ok);
            }
        }
        new(len)
    }

    /// Back for the next call.
    pub fn give(&self, piece: Vec<f32>) {
        if piece.len() >= SMALL
            && let Ok(mut kept) = self.0.try_lock()
        {
            kept.push_back(piece);
            let mut sum: usize = kept.iter().map(Vec::len).sum();
            while sum > KEPT {
                sum -= kept.pop_front().map_or(sum, |oldest| oldest.len());
            }
        }
    }
}

/// `len` zeros. `vec!` would end the process if the system refused them.
fn new(len: usize) -> Result<Vec<f32>> {
    if len >= SMALL {
        let mut probe: Vec<f32> = Vec::new();
        probe.try_reserve_exact(len).map_err(|e| Error::OutOfMemory {
            bytes: len.saturating_mul(size_of::<f32>()),
            what: "the result",
            reason: e.to_string(),
        })?;
        // An allocation that nobody looks at may be optimised away.
        std::hint::black_box(&mut probe);
    }
    Ok(vec![0.0; len])
}

/// Values that a call needs until it ends; what they are at first means nothing.
pub struct Scratch<'a> {
    piece: Vec<f32>,
    len: usize,
    home: &'a Memory,
}

impl Threads {
    /// `len` values for as long as a call takes.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn scratch(&self, len: usize) -> Result<Scratch<'_>> {
        Ok(Scratch { piece: self.memory.take(len)?, len, home: &self.memory })
    }

    /// Where the memory of results comes from, and goes back to by whoever holds them.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }
}

impl std::ops::Deref for Scratch<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.piece[..self.len]
    }
}

impl std::ops::DerefMut for Scratch<'_> {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.piece[..self.len]
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        self.home.give(std::mem::take(&mut self.piece));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_is_taken_again_if_the_size_is_near() {
        let memory = Memory::default();
        for len in [3 * SMALL, 2 * SMALL, SMALL - 1] {
            memory.give(vec![1.0; len]);
        }
        assert_eq!(memory.take(SMALL - 1).unwrap(), vec![0.0; SMALL - 1]);
        assert_eq!(memory.take(4 * SMALL).unwrap(), vec![0.0; 4 * SMALL]);
        assert_eq!(memory.take(SMALL).unwrap(), vec![1.0; 2 * SMALL]);
        assert_eq!(memory.take(SMALL).unwrap(), vec![0.0; SMALL]);
        assert_eq!(memory.take(2 * SMALL).unwrap(), vec![1.0; 3 * SMALL]);
    }

    #[test]
    fn no_more_is_kept_than_the_bound() {
        let memory = Memory::default();
        for _ in 0..5 {
            memory.give(vec![0.0; KEPT / 4]);
        }
        memory.give(vec![0.0; KEPT + 1]);
        assert!(memory.0.lock().unwrap().is_empty());
    }

    #[test]
    fn a_size_that_cannot_be_had_is_an_error() {
        assert!(matches!(Memory::default().take(usize::MAX / 8), Err(Error::OutOfMemory { .. })));
    }

    #[test]
    fn scratch_has_its_length_and_goes_back() {
        let threads = Threads::new(Some(1)).unwrap();
        threads.scratch(2 * SMALL).unwrap().fill(1.0);
        let again = threads.scratch(SMALL + 1).unwrap();
        assert_eq!((again.len(), again[0]), (SMALL + 1, 1.0));
        assert_eq!(threads.scratch(0).unwrap().len(), 0);
    }
}
