//! Memory that begins at a cache line.
//!
//! A vector or a row of a tile that lies across two lines takes twice as long to load or store, and an allocator's pieces begin
//! anywhere.
#![forbid(unsafe_code)]

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use bytemuck::Pod;

/// Bytes of a cache line.
const LINE: usize = 64;
/// Bytes of a word.
const WORD: usize = size_of::<u32>();

/// Values of a multiple of four bytes, the first at the start of a cache line.
#[derive(Debug)]
pub struct Lines<T> {
    words: Vec<u32>,
    /// Words before the first value.
    before: usize,
    len: usize,
    values: PhantomData<T>,
}

impl<T> Default for Lines<T> {
    fn default() -> Self {
        Self { words: Vec::new(), before: 0, len: 0, values: PhantomData }
    }
}

impl<T: Pod> Lines<T> {
    /// Room for `len` values, whatever they are.
    pub fn resize(&mut self, len: usize) {
        const { assert!(size_of::<T>().is_multiple_of(WORD) && align_of::<T>() <= LINE) }
        let words = len * (size_of::<T>() / WORD) + LINE / WORD;
        if self.words.len() < words {
            self.words.resize(words, 0);
            let start = self.words.as_ptr().addr();
            self.before = (start.next_multiple_of(LINE) - start) / WORD;
        }
        self.len = len;
    }

    fn words(&self) -> std::ops::Range<usize> {
        self.before..self.before + self.len * (size_of::<T>() / WORD)
    }
}

impl<T: Pod> Deref for Lines<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        bytemuck::cast_slice(&self.words[self.words()])
    }
}

impl<T: Pod> DerefMut for Lines<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let words = self.words();
        bytemuck::cast_slice_mut(&mut self.words[words])
    }
}

impl<T: Pod> Clone for Lines<T> {
    fn clone(&self) -> Self {
        let mut clone = Self::default();
        clone.resize(self.len);
        clone.copy_from_slice(self);
        clone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_begin_at_a_line_and_stay_as_memory_grows() {
        let mut lines = Lines::<[u16; 6]>::default();
        assert!(lines.is_empty());
        for len in [1, 3, 2, 100, 0, 5000] {
            lines.resize(len);
            assert_eq!(lines.len(), len);
            lines.iter_mut().for_each(|x| *x = [7; 6]);
            assert!(len == 0 || lines.as_ptr().addr().is_multiple_of(LINE));
            let clone = lines.clone();
            assert!(*clone == *lines && (len == 0 || clone.as_ptr().addr().is_multiple_of(LINE)));
        }
    }
}
