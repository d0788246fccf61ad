//! A planned batch, and which of its layers have been written.
#![forbid(unsafe_code)]

use super::tree::Tree;
use crate::paging;

/// A planned batch: the slots of its new tokens, and which layers have been written.
#[derive(Clone, Debug)]
pub struct Batch {
    pub(super) plan: paging::Batch,
    /// Of every layer; those without K and V of new tokens (cross, none) count as written.
    pub(super) written: Vec<bool>,
    /// Of each sequence whose new tokens branch; empty if none does.
    pub(super) trees: Vec<Option<Tree>>,
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

    /// Sequences of the plan.
    pub fn num_sequences(&self) -> usize {
        self.plan.rows.len()
    }

    /// The position of each row in its sequence: where rows branch, two may have the same.
    pub fn positions(&self) -> impl Iterator<Item = usize> + '_ {
        self.plan.rows.iter().enumerate().flat_map(|(index, of)| {
            let tree = self.tree(index);
            (0..of.len).map(move |row| of.start + tree.map_or(row, |tree| tree.depth(row)))
        })
    }

    /// How the new tokens of the plan's sequence `index` branch.
    pub(super) fn tree(&self, index: usize) -> Option<&Tree> {
        self.trees.get(index).and_then(Option::as_ref)
    }
}
