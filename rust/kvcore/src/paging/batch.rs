//! What a plan grants: which tokens may be written, and the blocks that they and their past are in.
#![forbid(unsafe_code)]

use super::block::BlockId;
use super::sequence::SeqId;

/// The result of [`plan`](super::BlockManager::plan). It ends with the next plan, fork, truncate or free of any of its
/// sequences, or when it is committed in part; until then it may be attended, and until its commit written.
#[derive(Debug, Clone)]
pub struct Batch {
    /// One per sequence, in the order of the plan.
    pub rows: Vec<BatchSeq>,
    pub(super) manager: u64,
    pub(super) serial: u64,
}

/// The planned tokens of one sequence.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BatchSeq {
    /// The sequence.
    pub seq: SeqId,
    /// Position of the first planned token.
    pub start: usize,
    /// Planned tokens, at least 1.
    pub len: usize,
    /// For each group the block table that covers tokens `0..start + len`: token t is in slot `t % block_size` of
    /// `tables[group][t / block_size]`, which is [`BlockId::NONE`] where no planned token can see it any more.
    pub tables: Vec<Vec<BlockId>>,
    /// Blocks with the K and V of the sequence's encoder.
    pub cross: Vec<BlockId>,
    /// Tokens in these.
    pub cross_tokens: usize,
}

impl Batch {
    /// Planned tokens of all sequences.
    pub fn num_tokens(&self) -> usize {
        self.rows.iter().map(|row| row.len).sum()
    }
}
