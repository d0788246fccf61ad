//! One group of layers: its pool, its window, its second tier, and what happened to its blocks.
#![forbid(unsafe_code)]

use super::block::BlockId;
use super::config::GroupConfig;
use super::pool::BlockPool;
use super::stats::PagingStats;
use crate::Result;

/// Blocks of one group, and what is counted about them.
#[derive(Debug)]
pub(super) struct Group {
    pub pool: BlockPool,
    pub window: Option<usize>,
    /// Slots of the second tier: blocks that nobody ever holds.
    pub tier: Option<BlockPool>,
    pub evicted_lru: u64,
    pub evicted_expired: u64,
    pub evicted_reset: u64,
    pub copies: u64,
    pub spills: u64,
    pub fetches: u64,
}

impl Group {
    pub fn new(config: GroupConfig, spill_slots: usize) -> Result<Self> {
        Ok(Self {
            pool: BlockPool::new(config.num_blocks)?,
            window: config.window,
            tier: if spill_slots > 0 { Some(BlockPool::new(spill_slots)?) } else { None },
            evicted_lru: 0,
            evicted_expired: 0,
            evicted_reset: 0,
            copies: 0,
            spills: 0,
            fetches: 0,
        })
    }

    /// First token before position `end` that a query at `end` or later sees.
    pub fn first_seen(&self, end: usize) -> usize {
        self.window.map_or(0, |window| (end + 1).saturating_sub(window))
    }

    /// Counts of this group alone.
    pub fn stats(&self, block_size: usize) -> PagingStats {
        let mut stats = count(&self.pool, block_size);
        stats.spilled = self.tier.as_ref().map_or(0, BlockPool::num_evictable);
        (stats.evicted_lru, stats.evicted_expired) = (self.evicted_lru, self.evicted_expired);
        stats.evictions = self.evicted_lru + self.evicted_expired;
        stats.evicted_reset = self.evicted_reset;
        (stats.copies, stats.spills, stats.fetches) = (self.copies, self.spills, self.fetches);
        stats
    }
}

/// What a pool alone can tell.
pub(super) fn count(pool: &BlockPool, block_size: usize) -> PagingStats {
    let used = pool.num_blocks() - pool.num_free() - pool.num_idle_pinned();
    PagingStats {
        total: pool.num_blocks(),
        free: pool.num_free() - pool.num_evictable(),
        cached: pool.num_evictable() + pool.num_idle_pinned(),
        used,
        pinned: pool.num_pinned(),
        tokens: pool.stored_tokens(),
        slots: used * block_size,
        ..PagingStats::default()
    }
}

/// Drops a reference of a table's entry, which borrows or not.
pub(super) fn release(pool: &mut BlockPool, block: BlockId, borrowed: bool) -> Result<()> {
    if borrowed {
        pool.unlend(block);
    }
    pool.release(block)
}
