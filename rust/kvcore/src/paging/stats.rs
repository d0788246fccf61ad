//! Counts, and what lies in every block.
#![forbid(unsafe_code)]

/// Counts of a manager or of one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PagingStats {
    /// Blocks of the pools.
    pub total: usize,
    /// Blocks that nobody holds and nobody can find: `free + cached + used = total`.
    pub free: usize,
    /// Blocks that nobody holds but that can still be found by their prefix, or are pinned.
    pub cached: usize,
    /// Blocks that sequences hold.
    pub used: usize,
    /// Pinned blocks, those that sequences hold included: what `max_pinned_fraction` bounds.
    pub pinned: usize,
    /// Blocks whose content is in the second tier.
    pub spilled: usize,
    /// Sequences that were not freed.
    pub num_sequences: usize,
    /// Slots of used blocks that hold a committed token; a shared block counts once.
    pub tokens: usize,
    /// Slots of used blocks: `tokens / slots` is how well the memory is used.
    pub slots: usize,
    /// Tokens that `add` found in the cache, since the start.
    pub hit_tokens: u64,
    /// Tokens that `add` looked for, since the start.
    pub query_tokens: u64,
    /// Blocks that stopped being findable because of space or time: the sum of the next two.
    pub evictions: u64,
    /// Blocks whose space, or that of a block before them, was needed.
    pub evicted_lru: u64,
    /// Blocks whose time, or that of a block before them, was over.
    pub evicted_expired: u64,
    /// Blocks that a reset made unfindable.
    pub evicted_reset: u64,
    /// Blocks copied before a write.
    pub copies: u64,
    /// Blocks that went to the second tier.
    pub spills: u64,
    /// Blocks that came back from it.
    pub fetches: u64,
}

/// In what state a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Occupancy {
    /// Nobody holds it, nothing can be found in it.
    Vacant = 0,
    /// Sequences hold it.
    Used = 1,
    /// Nobody holds it, but a prefix can be found in it.
    Cached = 2,
    /// The same, and it will not be evicted.
    Pinned = 3,
}

/// One block as a picture shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlockInfo {
    /// Block tables that hold it.
    pub refs: usize,
    /// Leading slots with a token that somebody can read.
    pub filled: usize,
    /// Its state.
    pub state: Occupancy,
}
