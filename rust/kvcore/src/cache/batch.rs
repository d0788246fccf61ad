//! A planned batch, and which of its layers have been written.
#![forbid(unsafe_code)]

use crate::paging::{self, SeqId};

/// A planned batch: the slots of its new tokens, and which layers have been written.
#[derive(Clone, Debug)]
pub struct Batch {
    pub(super) plan: paging::Batch,
    /// Of every layer; those without K and V of new tokens (cross, none) count as written.
    pub(super) written: Vec<bool>,
}

impl Batch {
    /// New tokens of all sequences: the rows that write and attend take.
    pub fn num_tokens(&self) -> usize {
        self.plan.num_tokens()
    }

    /// New tokens of the plan's sequence `index`; 0 if there is none.
    pub fn num_tokens_of(&self, index: usize) -> usize {
        self.plan.rows.get(index).map_or(0, |row| row.len)
    }

    /// For each sequence of the plan: its handle, the position of its first new token, and their number.
    pub fn items(&self) -> impl Iterator<Item = (SeqId, usize, usize)> + '_ {
        self.plan.rows.iter().map(|row| (row.seq, row.start, row.len))
    }
}
