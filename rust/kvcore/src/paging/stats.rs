//! Counts, and what lies in every block.
#![forbid(unsafe_code)]

use super::block::BlockId;
use super::group::{Group, count};
use super::manager::BlockManager;
use crate::Result;

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
    /// Blocks whose space, or that of a block before them, was needed; those that the second tier could not write or
    /// give back are among them.
    pub evicted_lru: u64,
    /// Blocks whose time, or that of a block before them, was over.
    pub evicted_expired: u64,
    /// Blocks that a reset made unfindable.
    pub evicted_reset: u64,
    /// Blocks copied before a write.
    pub copies: u64,
    /// Blocks that went to the second tier: that were written there.
    pub spills: u64,
    /// Blocks that came back from it: that were read and unaltered.
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
    /// Whether it is pinned, held or not.
    pub pinned: bool,
    /// Its state.
    pub state: Occupancy,
}

impl PagingStats {
    fn add(mut self, other: Self) -> Self {
        let pairs = [
            (&mut self.total, other.total),
            (&mut self.free, other.free),
            (&mut self.cached, other.cached),
            (&mut self.used, other.used),
            (&mut self.pinned, other.pinned),
            (&mut self.spilled, other.spilled),
            (&mut self.tokens, other.tokens),
            (&mut self.slots, other.slots),
        ];
        pairs.into_iter().for_each(|(sum, more)| *sum += more);
        let pairs = [
            (&mut self.evictions, other.evictions),
            (&mut self.evicted_lru, other.evicted_lru),
            (&mut self.evicted_expired, other.evicted_expired),
            (&mut self.evicted_reset, other.evicted_reset),
            (&mut self.copies, other.copies),
            (&mut self.spills, other.spills),
            (&mut self.fetches, other.fetches),
        ];
        pairs.into_iter().for_each(|(sum, more)| *sum += more);
        self
    }
}

impl BlockManager {
    /// Counts over all groups and the encoders' pool. O(groups).
    pub fn stats(&self) -> PagingStats {
        let block_size = self.config.block_size;
        let cross = self.cross.as_ref().map_or_else(PagingStats::default, |pool| count(pool, block_size));
        let sum = self.blocks.groups.iter().fold(cross, |sum, group| sum.add(group.stats(block_size)));
        self.with_sequences(sum)
    }

    /// Counts of one group; those of sequences and hits are the cache's. Errors: `InvalidArgument`.
    pub fn group_stats(&self, group: usize) -> Result<PagingStats> {
        let of = self.blocks.groups.get(group).ok_or_else(|| self.no_group(group))?;
        Ok(self.with_sequences(of.stats(self.config.block_size)))
    }

    /// Counts of the encoders' pool; zeros if there is none.
    pub fn cross_stats(&self) -> PagingStats {
        self.cross.as_ref().map_or_else(PagingStats::default, |pool| count(pool, self.config.block_size))
    }

    fn with_sequences(&self, stats: PagingStats) -> PagingStats {
        PagingStats {
            num_sequences: self.sequences.len(),
            hit_tokens: self.hit_tokens,
            query_tokens: self.query_tokens,
            ..stats
        }
    }

    /// Every block of a group; empty for a group that is not there. O(blocks).
    pub fn group_snapshot(&self, group: usize) -> Vec<BlockInfo> {
        let Some(Group { pool, .. }) = self.blocks.groups.get(group) else { return Vec::new() };
        let info = |block| {
            let refs = pool.ref_count(block);
            let state = match (refs, pool.pin_count(block), pool.node(block)) {
                (0, 0, None) => Occupancy::Vacant,
                (0, 0, Some(_)) => Occupancy::Cached,
                (0, ..) => Occupancy::Pinned,
                _ => Occupancy::Used,
            };
            let filled = if state == Occupancy::Vacant { 0 } else { pool.filled(block) };
            BlockInfo { refs, filled, pinned: pool.pin_count(block) > 0, state }
        };
        (0..pool.num_blocks() as u32).map(BlockId::new).map(info).collect()
    }

    /// Blocks that a plan can get in the group that has the fewest: vacant ones, and cached ones that nobody holds and
    /// that are not pinned.
    pub fn num_free_blocks(&self) -> usize {
        self.blocks.groups.iter().map(|group| group.pool.num_free()).min().unwrap_or(0)
    }

    /// The same of one group; 0 for a group that is not there.
    pub fn free_blocks(&self, group: usize) -> usize {
        self.blocks.groups.get(group).map_or(0, |group| group.pool.num_free())
    }

    /// Blocks of the smallest pool.
    pub fn num_blocks(&self) -> usize {
        self.config.groups.iter().map(|group| group.num_blocks).min().unwrap_or(0)
    }
}
