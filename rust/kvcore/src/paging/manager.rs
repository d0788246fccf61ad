//! Sequences over pools of blocks: the only place that decides who holds which block.
//!
//! ```text
//! add(tokens):    take references to the longest published prefix, at most all but the last token     (admit.rs)
//! plan(seq, n):   count what all sequences need; too much: an error, nothing changed                  (plan.rs)
//! commit(batch):  planned tokens, or some of them, count as computed and are published   (commit.rs, publish.rs)
//! fork, reorder:  a reference to every block                                                          (beams.rs)
//! truncate(seq):  references to what is wholly behind dropped
//! free(seq):      references dropped from the last block to the first
//! ```
//!
//! Two sequences that compute the same block at the same time both keep their own; the first to commit publishes it, the
//! second hangs its later blocks below the first's. Should the first's be forgotten, the second publishes its own with
//! its next commit, or when it ends.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::admit::Trail;
use super::batch::{Batch, BatchSeq};
use super::block::BlockId;
use super::blocks::Blocks;
use super::config::ManagerConfig;
use super::events::{EventLog, Events};
use super::group::{Group, release};
use super::holds::HoldTable;
use super::key::OwnedKey;
use super::pins::PinTable;
use super::plan::Notes;
use super::pool::BlockPool;
use super::prefix::{Link, PrefixIndex};
use super::retention::{ClassId, Classes, nanos};
use super::room::make_room;
use super::sequence::{SeqId, Sequence, SequenceTable};
use crate::{Error, Result};

/// Serial numbers of managers, so that a handle shows whose it is. Nothing else is shared between them.
static NEXT_MANAGER: AtomicU64 = AtomicU64::new(1);

/// Owner of all blocks and sequences of one cache. See the module's pseudocode.
#[derive(Debug)]
pub struct BlockManager {
    pub(super) id: u64,
    pub(super) config: ManagerConfig,
    pub(super) blocks: Blocks,
    pub(super) cross: Option<BlockPool>,
    pub(super) sequences: SequenceTable,
    pub(super) pins: PinTable,
    pub(super) holds: HoldTable,
    pub(super) no_key: Arc<OwnedKey>,
    /// Retention of what asks for nothing else.
    pub(super) class: ClassId,
    /// Calls of `plan` so far: the serial number of the next batch.
    pub(super) plans: u64,
    /// Resets of the prefix cache so far.
    pub(super) era: u64,
    now: u64,
    pub(super) hit_tokens: u64,
    pub(super) query_tokens: u64,
    pub(super) trail: Trail,
    pub(super) notes: Notes,
}

impl BlockManager {
    /// An empty manager. O(blocks). Errors: `InvalidArgument` for values out of range, `OutOfMemory` when the tables
    /// (60 to 64 bytes a block) cannot be had.
    pub fn new(config: ManagerConfig) -> Result<Self> {
        config.validate()?;
        let mut classes = Classes::new();
        let class = classes.acquire(config.retention)?;
        let groups =
            config.groups.iter().map(|&group| Group::new(group, config.spill_slots)).collect::<Result<Vec<_>>>()?;
        let buckets = config.groups.iter().map(|group| group.num_blocks).max().unwrap_or(1) + config.spill_slots;
        let index = PrefixIndex::new(buckets, config.block_size, groups.len(), config.hash, config.key.clone())?;
        let cross = if config.cross_blocks > 0 { Some(BlockPool::new(config.cross_blocks)?) } else { None };
        let id = NEXT_MANAGER.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            id,
            blocks: Blocks { groups, index, classes, events: EventLog::new(config.max_events) },
            config,
            cross,
            sequences: SequenceTable::new(id),
            pins: PinTable::new(id),
            holds: HoldTable::default(),
            no_key: Arc::new(OwnedKey::default()),
            class,
            plans: 0,
            era: 0,
            now: 0,
            hit_tokens: 0,
            query_tokens: 0,
            trail: Trail::default(),
            notes: Notes::default(),
        })
    }

    /// Time since any fixed point, by the caller's clock; an earlier one than before is ignored. Forgets what expired.
    pub fn set_now(&mut self, now: Duration) {
        let now = nanos(now);
        if now > self.now {
            self.now = now;
            for group in &mut self.blocks.groups {
                group.pool.set_now(now);
                if let Some(tier) = &mut group.tier {
                    tier.set_now(now);
                }
            }
            self.blocks.sweep();
        }
    }

    /// Adds token ids that have no K and V yet. Batches stay valid. Errors: `InvalidHandle`, `OutOfMemory`.
    pub fn append(&mut self, seq: SeqId, token_ids: &[u32]) -> Result<()> {
        let tokens = &mut self.sequences.get_mut(seq)?.tokens;
        make_room(tokens, token_ids.len(), "token ids")?;
        tokens.extend_from_slice(token_ids);
        Ok(())
    }

    /// Whether the batch may be attended, and (unless committed) written. Errors: `StaleBatch` after a newer plan, a
    /// fork, truncate or free of any of its sequences, and after a commit in part; `InvalidHandle` for another cache's
    /// batch.
    pub fn validate(&self, batch: &Batch) -> Result<()> {
        if batch.manager != self.id {
            return Err(Error::InvalidHandle("the batch belongs to another cache".into()));
        }
        for (row, of) in batch.rows.iter().enumerate() {
            match self.sequences.get(of.seq) {
                Err(_) => return Err(Error::StaleBatch(format!("the sequence of row {row} was freed"))),
                Ok(sequence) if sequence.batch != batch.serial => {
                    let why = "was planned again, forked, truncated or committed in part";
                    return Err(Error::StaleBatch(format!("the sequence of row {row} {why}")));
                }
                Ok(_) => {}
            }
        }
        Ok(())
    }

    /// Whether the batch was committed. False for a batch all of whose sequences have gone on: ask `validate` first.
    pub fn is_committed(&self, batch: &Batch) -> bool {
        let committed =
            |row: &BatchSeq| self.sequences.get(row.seq).is_ok_and(|s| s.batch == batch.serial && s.committed);
        batch.manager == self.id && batch.rows.iter().any(committed)
    }

    /// Keeps the first `num_tokens` tokens and releases the blocks wholly beyond them. What is planned but not committed
    /// is forgotten. Errors, with nothing changed: `InvalidHandle`; `InvalidArgument` unless `num_tokens` is 1 to the
    /// tokens known, and for so few that a window's tokens would be needed that were returned.
    pub fn truncate(&mut self, seq: SeqId, num_tokens: usize) -> Result<()> {
        let block_size = self.config.block_size;
        let Blocks { groups, index, .. } = &mut self.blocks;
        let sequence = self.sequences.get_mut(seq)?;
        let known = sequence.tokens.len();
        if num_tokens == 0 || num_tokens > known {
            return Err(Error::InvalidArgument(format!("num_tokens: expected 1 to {known}, got {num_tokens}")));
        }
        let computed = sequence.computed.min(num_tokens);
        let least = groups.iter().zip(&sequence.tables).map(|(group, table)| match table.returned * block_size {
            0 => 0,
            first => first + group.window.unwrap_or(1) - 1,
        });
        let least = least.max().unwrap_or(0);
        if computed < least {
            return Err(Error::InvalidArgument(format!(
                "num_tokens: expected {least} or more, because what a window of the layers needs before that was \
                 returned (max_rollback is {}), got {num_tokens}",
                self.config.max_rollback
            )));
        }
        let blocks_before = sequence.computed.div_ceil(block_size);
        let blocks_after = computed.div_ceil(block_size);
        // A borrowed block is the last of the table, and nothing is planned then.
        let ends_borrow = sequence.borrowed && blocks_after < blocks_before;
        for (group, table) in groups.iter_mut().zip(&mut sequence.tables) {
            if ends_borrow {
                group.pool.unlend(table.blocks[blocks_before - 1]);
            }
            let from = blocks_after.max(table.returned).min(table.blocks.len());
            group.pool.release_all(&table.blocks[from..])?;
            table.blocks.truncate(blocks_after);
            table.returned = table.returned.min(blocks_after);
            let filled = computed % block_size;
            if filled != 0 && (ends_borrow || !sequence.borrowed) {
                // The last block is cut. Only `plan` makes it writable; but nobody reads what its only holder gave up.
                let last = table.blocks[blocks_after - 1];
                if group.pool.ref_count(last) == 1 && group.pool.node(last).is_none() {
                    group.pool.set_filled(last, filled);
                }
            }
        }
        sequence.tokens.truncate(num_tokens);
        sequence.computed = computed;
        sequence.borrowed &= !ends_borrow && computed % block_size != 0;
        sequence.forget_plan();
        for mark in &mut sequence.marks {
            mark.num_tokens = mark.num_tokens.min(num_tokens);
        }
        let chained = sequence.chained.min(computed / block_size);
        sequence.link = match chained {
            0 => Link::NONE,
            _ => index.ancestor(sequence.link, sequence.chained - chained),
        };
        sequence.chained = chained;
        Ok(())
    }

    /// Ends a sequence. Its blocks are released from the last to the first, so that of its published blocks the leaves
    /// are evicted before their parents. Errors: `InvalidHandle`, also the second time.
    pub fn free(&mut self, seq: SeqId) -> Result<()> {
        let mut sequence = self.sequences.remove(seq)?;
        let may_publish = sequence.use_prefix && sequence.era == self.era && !sequence.borrowed;
        if may_publish && sequence.chained > 0 && !self.blocks.index.is_alive(sequence.link) {
            // What it hung its blocks below was forgotten meanwhile.
            self.blocks.publish(&mut sequence, self.config.block_size);
        }
        for (group, table) in self.blocks.groups.iter_mut().zip(&sequence.tables) {
            if let (true, Some(&last)) = (sequence.borrowed, table.blocks.last()) {
                group.pool.unlend(last);
            }
            group.pool.release_all(table.held())?;
        }
        if let Some(cross) = &mut self.cross {
            cross.release_all(&sequence.cross)?;
        }
        if sequence.hangs {
            // These are as recently used as the blocks below them.
            self.blocks.touch_path(sequence.link);
        }
        self.blocks.classes.drop(sequence.class);
        sequence.marks.iter().for_each(|mark| self.blocks.classes.drop(mark.class));
        Ok(())
    }

    /// Forgets every cached prefix that is not pinned. Sequences keep their blocks, but what they computed before, and
    /// what they compute after it, is not published any more.
    pub fn reset_prefix_cache(&mut self) -> Result<()> {
        self.era += 1;
        self.blocks.reset();
        Ok(())
    }

    /// What happened to blocks since the last call.
    pub fn take_events(&self) -> Events {
        self.blocks.events.take()
    }

    /// The blocks of a sequence in one group, those of an uncommitted plan included: [`BlockId::NONE`] where a window's
    /// block was returned. Errors: `InvalidHandle`, `InvalidArgument` for a group that is not there.
    pub fn block_table(&self, seq: SeqId, group: usize) -> Result<&[BlockId]> {
        let tables = &self.sequences.get(seq)?.tables;
        let table = tables.get(group).ok_or_else(|| self.no_group(group))?;
        Ok(&table.blocks)
    }

    /// The token ids of a sequence, those without K and V included. Errors: `InvalidHandle`.
    pub fn token_ids(&self, seq: SeqId) -> Result<&[u32]> {
        Ok(&self.sequences.get(seq)?.tokens)
    }

    /// Tokens known. Errors: `InvalidHandle`.
    pub fn num_tokens(&self, seq: SeqId) -> Result<usize> {
        Ok(self.sequences.get(seq)?.tokens.len())
    }

    /// Leading tokens whose K and V are stored. Errors: `InvalidHandle`.
    pub fn num_computed_tokens(&self, seq: SeqId) -> Result<usize> {
        Ok(self.sequences.get(seq)?.computed)
    }

    /// Tokens that `add` found in the cache; a fork inherits the number, nothing changes it. Errors: `InvalidHandle`.
    pub fn num_cached_tokens(&self, seq: SeqId) -> Result<usize> {
        Ok(self.sequences.get(seq)?.cached)
    }

    /// Every sequence that was not freed.
    pub fn seq_ids(&self) -> Vec<SeqId> {
        self.sequences.ids().collect()
    }

    /// Tokens of a block.
    pub fn block_size(&self) -> usize {
        self.config.block_size
    }

    /// Groups of the cache.
    pub fn num_groups(&self) -> usize {
        self.config.groups.len()
    }

    pub(super) fn no_group(&self, group: usize) -> Error {
        Error::InvalidArgument(format!("group: expected 0 to {}, got {group}", self.num_groups() - 1))
    }
}

impl Blocks {
    /// Blocks of a forgotten plan go back.
    pub fn release_plan(&mut self, sequence: &mut Sequence, block_size: usize) -> Result<()> {
        let computed_blocks = sequence.computed.div_ceil(block_size);
        for (group, table) in self.groups.iter_mut().zip(&mut sequence.tables) {
            for block in table.blocks.drain(computed_blocks..).rev() {
                release(&mut group.pool, block, false)?;
            }
        }
        sequence.forget_plan();
        Ok(())
    }
}
