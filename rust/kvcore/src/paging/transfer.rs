//! Cached prefixes out of one manager and into another.
#![forbid(unsafe_code)]

use super::block::{BlockId, SlotId};
use super::key::OwnedKey;
use super::retention::Retention;

/// Where the content of a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Nowhere: it was evicted while other groups keep theirs.
    Nowhere,
    /// In a block of the pool.
    Block(BlockId),
    /// In the second tier.
    Slot(SlotId),
}

/// One published block of every group, with the tokens that are in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixEntry {
    /// The entry before it in the prompt: an earlier position in the list; None for a prompt's first block.
    pub parent: Option<usize>,
    /// Key of the prompt.
    pub key: OwnedKey,
    /// Its tokens, 1 to `block_size`; fewer only in a last block.
    pub tokens: Vec<u32>,
    /// For each group, where its K and V are.
    pub places: Vec<Place>,
    /// How long it stays.
    pub retention: Retention,
    /// Chained hash of its tokens and all before them.
    pub hash: u128,
}

/// What is to be published; see [`PrefixEntry`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportEntry {
    /// The entry before it: an earlier position in the list.
    pub parent: Option<usize>,
    /// Key of the prompt; equal to the parent's.
    pub key: OwnedKey,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// For each group whether its K and V are there to be written. Groups that keep all tokens need them.
    pub present: Vec<bool>,
    /// How long it stays.
    pub retention: Retention,
}
