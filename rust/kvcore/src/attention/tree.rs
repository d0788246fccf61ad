//! Rows that branch: several drafts of what may come, verified in one call.
//!
//! ```text
//! row        0   1   2   3   4        slot = start + row
//! parent     -   0   1   0   3        row 4 follows 3, which follows 0: it sees the context, then slots 0, 3, 4
//! position   0   1   2   1   2        (from start on)
//! ```
//! A row sees the tokens before `start`, and of the others those that it follows, each at its position. What it reads is
//! the very tiles that it would read if its path alone had been written: where a path leaves the order of the slots, a
//! tile is put together in a buffer. So its bits are those of the path without the tree. (Trees of drafts as in SpecInfer,
//! Miao et al., 2024.)
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::{Mask, Rows};
use crate::{Error, Result};

/// The most rows of one tree.
pub const MAX_ROWS: usize = 1024;

/// The slots of a row's tokens from `start` on, where they are not in order.
#[derive(Clone, Debug)]
pub struct Path {
    /// The position of the first.
    pub start: usize,
    /// Slot by position, both counted from the start.
    pub slots: Arc<[usize]>,
}

impl Path {
    /// The position behind the last token.
    pub fn end(&self) -> usize {
        self.start + self.slots.len()
    }

    /// The slot of the token at `position`.
    pub fn slot(&self, position: usize) -> usize {
        match position.checked_sub(self.start).and_then(|i| self.slots.get(i)) {
            Some(&slot) => self.start + slot,
            None => position,
        }
    }
}

/// # Errors
/// [`Error::InvalidArgument`] for parents that do not fit the rows.
pub fn check(parents: &[Option<usize>], rows: &Rows<'_>) -> Result<()> {
    let wrong = |text: String| Err(Error::InvalidArgument(format!("parents: {text}")));
    if parents.len() != rows.len {
        return wrong(format!("expected one for each of {} rows, got {}", rows.len, parents.len()));
    }
    if parents.len() > MAX_ROWS {
        return wrong(format!("expected at most {MAX_ROWS} rows, got {}", parents.len()));
    }
    match parents.iter().enumerate().find(|(row, parent)| parent.is_some_and(|parent| parent >= *row)) {
        Some((row, Some(parent))) => wrong(format!("expected a row before row {row}, got {parent}")),
        _ => Ok(()),
    }
}

/// The position of each row, and its path if that is not the order of the slots: of rows that see another sequence's
/// tokens it always is.
pub fn places(rows: &Rows<'_>) -> Vec<(usize, Option<Path>)> {
    let Some(parents) = rows.parents else {
        return (rows.start..rows.start + rows.len).map(|position| (position, None)).collect();
    };
    let mut slots: Vec<Arc<[usize]>> = Vec::with_capacity(parents.len());
    for (row, parent) in parents.iter().enumerate() {
        let before: &[usize] = parent.map_or(&[], |parent| &slots[parent]);
        slots.push(before.iter().copied().chain([row]).collect());
    }
    let place = |slots: Arc<[usize]>| {
        let position = rows.start + slots.len() - 1;
        let is_cross = matches!(rows.mask, Mask::Cross { .. });
        let in_order = is_cross || slots.iter().enumerate().all(|(i, &slot)| i == slot);
        (position, (!in_order).then_some(Path { start: rows.start, slots }))
    };
    slots.into_iter().map(place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_of_two_branches() {
        let parents = [None, Some(0), Some(1), Some(0), Some(3), None];
        let rows = Rows { parents: Some(&parents), ..Rows::new(&[], 100, 6, Mask::Causal) };
        assert!(check(&parents, &rows).is_ok());
        let places = places(&rows);
        let positions: Vec<usize> = places.iter().map(|(position, _)| *position).collect();
        assert_eq!(positions, [100, 101, 102, 101, 102, 100]);
        assert!(places[..3].iter().all(|(_, path)| path.is_none()));
        let path = places[4].1.as_ref().unwrap();
        assert_eq!([0, 99, 100, 101, 102].map(|p| path.slot(p)), [0, 99, 100, 103, 104]);
        assert_eq!(places[5].1.as_ref().unwrap().slot(100), 105);
    }

    #[test]
    fn rows_that_see_another_sequence_have_positions_alone() {
        let parents = [None, None, Some(1)];
        let rows = Rows { parents: Some(&parents), ..Rows::new(&[], 7, 3, Mask::Cross { tokens: 3 }) };
        assert!(check(&parents, &rows).is_ok());
        let places = places(&rows);
        assert!(places.iter().all(|(_, path)| path.is_none()));
        assert_eq!(places.iter().map(|(position, _)| *position).collect::<Vec<_>>(), [7, 7, 8]);
    }

    #[test]
    fn parents_that_do_not_fit() {
        let rows = Rows::new(&[], 7, 2, Mask::Causal);
        assert!(check(&[None], &rows).is_err());
        assert!(check(&[None, Some(1)], &rows).is_err());
        assert!(check(&[Some(0), None], &rows).is_err());
        assert!(check(&[None; 1025], &Rows { len: 1025, ..rows }).is_err());
    }
}
