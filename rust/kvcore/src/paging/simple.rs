//! Calls whose bodies are still simple.
#![forbid(unsafe_code)]
#![allow(missing_docs, clippy::unnecessary_wraps, clippy::needless_pass_by_value, clippy::unused_self)]

use std::time::Duration;

use super::block::{BlockId, SlotId};
use super::events::Events;
use super::manager::BlockManager;
use super::pins::PinId;
use super::retention::Retention;
use super::sequence::SeqId;
use super::stats::{BlockInfo, Occupancy, PagingStats};
use super::transfer::{ImportEntry, PrefixEntry};
use crate::{Error, Result};

impl BlockManager {
    /// Time since any fixed point; an earlier one than before is ignored. Forgets what expired.
    pub fn set_now(&mut self, _now: Duration) {}

    /// Beam search: `result[i]` continues `seqs[parents[i]]`. The first use of a parent keeps its handle, others are
    /// forks, unused ones are freed. All or nothing.
    pub fn reorder(&mut self, seqs: &[SeqId], parents: &[usize]) -> Result<Vec<SeqId>> {
        for &seq in seqs {
            self.sequences.get(seq)?;
        }
        if parents.iter().any(|&parent| parent >= seqs.len()) {
            return Err(Error::InvalidArgument("parents: out of range".into()));
        }
        let mut used = vec![false; seqs.len()];
        let mut result = Vec::new();
        for &parent in parents {
            let first = !std::mem::replace(&mut used[parent], true);
            result.push(if first { seqs[parent] } else { self.fork(seqs[parent])? });
        }
        for (&seq, _) in seqs.iter().zip(used).filter(|(_, used)| !used) {
            self.free(seq)?;
        }
        Ok(result)
    }

    /// Blocks for K and V of an encoder, once per sequence; forks share them.
    pub fn reserve_cross(&mut self, seq: SeqId, _num_tokens: usize) -> Result<&[BlockId]> {
        self.sequences.get(seq)?;
        Err(Error::InvalidState("this cache has no pool for cross attention".into()))
    }

    /// The blocks of `reserve_cross` and its tokens; none and 0 before.
    pub fn cross(&self, seq: SeqId) -> Result<(&[BlockId], usize)> {
        self.sequences.get(seq)?;
        Ok((&[], 0))
    }

    /// The prefix of that many tokens gets at least this retention, now or when it is published.
    pub fn mark(&mut self, seq: SeqId, _num_tokens: usize, retention: Retention) -> Result<()> {
        retention.validate()?;
        self.sequences.get(seq)?;
        Ok(())
    }

    /// Keeps the prefix of that many committed tokens until `unpin`.
    pub fn pin(&mut self, seq: SeqId, _num_tokens: usize) -> Result<PinId> {
        self.sequences.get(seq)?;
        Ok(PinId { manager: self.id, serial: 0, index: 0 })
    }

    /// Ends a pin.
    pub fn unpin(&mut self, _pin: PinId) -> Result<()> {
        Ok(())
    }

    /// What happened since the last call.
    pub fn take_events(&mut self) -> Events {
        Events::default()
    }

    /// A published block turned out unreadable.
    pub fn forget_block(&mut self, _group: usize, _block: BlockId) {}

    /// A spill could not be written.
    pub fn forget_slot(&mut self, _group: usize, _slot: SlotId) {}

    /// Everything that is published, parents before children.
    pub fn export_prefixes(&self) -> Vec<PrefixEntry> {
        Vec::new()
    }

    /// Publishes prefixes in vacant blocks; per entry and group the block that the caller has to fill.
    pub fn import_prefixes(&mut self, entries: &[ImportEntry]) -> Result<Vec<Vec<Option<BlockId>>>> {
        Ok(entries.iter().map(|entry| vec![None; entry.present.len()]).collect())
    }

    /// Every block of a group; empty for a group that is not there.
    pub fn group_snapshot(&self, group: usize) -> Vec<BlockInfo> {
        let pool = &self.blocks.pool;
        let info = |block| {
            let (refs, filled) = (pool.ref_count(block), pool.filled(block));
            let state = match (refs, pool.node(block)) {
                (0, None) => Occupancy::Vacant,
                (0, _) => Occupancy::Cached,
                _ => Occupancy::Used,
            };
            BlockInfo { refs, filled, state }
        };
        let num_blocks = if group == 0 { pool.num_blocks() } else { 0 };
        (0..num_blocks as u32).map(BlockId::new).map(info).collect()
    }

    /// Every sequence that was not freed.
    pub fn seq_ids(&self) -> Vec<SeqId> {
        self.sequences.ids().collect()
    }

    /// Groups of the cache.
    pub fn num_groups(&self) -> usize {
        self.config.groups.len()
    }

    /// Blocks that a plan can get in one group; 0 for a group that is not there.
    pub fn free_blocks(&self, group: usize) -> usize {
        if group == 0 { self.num_free_blocks() } else { 0 }
    }

    /// Counts of one group. Errors: `InvalidArgument`.
    pub fn group_stats(&self, group: usize) -> Result<PagingStats> {
        if group >= self.num_groups() {
            return Err(Error::InvalidArgument(format!("group: expected 0 to {}, got {group}", self.num_groups() - 1)));
        }
        Ok(self.stats())
    }
}
