//! Slots for tokens to come, all or nothing.
//!
//! ```text
//! count: for each group: blocks to add + copies of shared last blocks  <=  free blocks + those that this plan returns
//!        (of forgotten plans, and of windows that nobody can see any more); otherwise an error, nothing changed
//! write into the last block b at slot s:
//!     nobody else may write it, and no committed token of it is at s or behind       -> in place
//!     nobody else holds it, nothing at s or behind is published                      -> in place
//!     nobody else holds it, but others may find it                                   -> a copy if it was only borrowed
//!         and there is a block to be had (the source can be evicted then: nothing is lost), or if it is pinned;
//!         otherwise it is unpublished and written in place
//!     else                                                                           -> a copy
//! ```
#![forbid(unsafe_code)]

use super::batch::{Batch, BatchSeq};
use super::block::BlockId;
use super::blocks::Blocks;
use super::events::{Cause, Event};
use super::group::{Group, release};
use super::manager::BlockManager;
use super::moves::{Carrier, Move};
use super::sequence::{SeqId, Sequence};
use crate::{Error, Result};

/// Notes of a plan that is being counted; kept to allocate once.
#[derive(Debug, Default)]
pub(super) struct Notes {
    /// Blocks of windows that are returned: group and block.
    returned: Vec<(usize, BlockId)>,
    /// Shared last blocks: group, block, place in the plan, slot that is written first, whether it is borrowed.
    shared: Vec<(usize, BlockId, usize, usize, bool)>,
    /// Of each group: blocks needed and available.
    demand: Vec<(usize, usize)>,
}

impl BlockManager {
    /// Gets slots for the next `n` tokens of each sequence that have no K and V yet, all or nothing. What has to be done
    /// with bytes goes to `carrier`; it is carried out before the caller writes anything. Earlier batches of these
    /// sequences become stale, and what they planned but did not commit is forgotten.
    ///
    /// Errors, with nothing changed: `InvalidArgument` without items, for `n` of 0 or more than the tokens known, or a
    /// sequence named twice; `InvalidHandle`; `OutOfBlocks` with the numbers of the group that lacks blocks.
    pub fn plan(&mut self, items: &[(SeqId, usize)], carrier: &mut dyn Carrier) -> Result<Batch> {
        self.plans += 1;
        self.blocks.sweep();
        self.count(items)?;
        let Self { config, blocks, sequences, .. } = self;
        let block_size = config.block_size;
        // What is given back first: it was counted as available.
        for &(seq, n) in items {
            let sequence = sequences.get_mut(seq)?;
            let want = (sequence.computed + n).div_ceil(block_size);
            let first_writable = sequence.computed;
            for (group, table) in blocks.groups.iter_mut().zip(&mut sequence.tables) {
                if want < table.blocks.len() {
                    group.pool.release_all(&table.blocks[want..])?;
                    table.blocks.truncate(want);
                }
                let first = first_kept(group, first_writable, config.max_rollback, block_size);
                while table.returned < first {
                    let block = std::mem::replace(&mut table.blocks[table.returned], BlockId::NONE);
                    group.pool.release(block)?;
                    table.returned += 1;
                }
            }
        }
        let mut rows = Vec::with_capacity(items.len());
        for &(seq, n) in items {
            let sequence = sequences.get_mut(seq)?;
            let (start, filled) = (sequence.computed, sequence.computed % block_size);
            let borrowed = std::mem::replace(&mut sequence.borrowed, false);
            for (group, table) in sequence.tables.iter_mut().enumerate() {
                if filled != 0 {
                    let last = &mut table.blocks[start / block_size];
                    blocks.make_writable(group, last, filled, borrowed, carrier)?;
                }
                while table.blocks.len() < (start + n).div_ceil(block_size) {
                    table.blocks.push(blocks.take(group, carrier)?);
                }
            }
            if start == 0 {
                sequence.era = self.era;
            }
            sequence.planned = n;
            sequence.batch = self.plans;
            sequence.committed = false;
            rows.push(row(seq, sequence));
        }
        Ok(Batch { rows, manager: self.id, serial: self.plans })
    }

    /// First half of `plan`: is everything in order, and are there enough blocks?
    fn count(&mut self, items: &[(SeqId, usize)]) -> Result<()> {
        if items.is_empty() {
            return Err(Error::InvalidArgument("a plan needs at least one sequence, got none".into()));
        }
        let Self { config, blocks, sequences, notes, plans, .. } = self;
        let block_size = config.block_size;
        notes.returned.clear();
        notes.shared.clear();
        notes.demand.clear();
        notes.demand.extend(blocks.groups.iter().map(|group| (0, group.pool.num_free())));
        for (row, &(seq, n)) in items.iter().enumerate() {
            let sequence = sequences.get_mut(seq)?;
            if std::mem::replace(&mut sequence.seen, *plans) == *plans {
                return Err(Error::InvalidArgument(format!("item {row} of the plan names a sequence a second time")));
            }
            let open = sequence.tokens.len() - sequence.computed;
            if n == 0 || n > open {
                return Err(Error::InvalidArgument(match open {
                    0 => format!("item {row} plans {n} tokens, but every token of the sequence has K and V already"),
                    _ => format!("item {row} plans {n} tokens: expected 1 to {open}, those without K and V"),
                }));
            }
            let (computed, filled) = (sequence.computed, sequence.computed % block_size);
            let want = (computed + n).div_ceil(block_size);
            for (number, (group, table)) in blocks.groups.iter().zip(&sequence.tables).enumerate() {
                let have = table.blocks.len();
                notes.demand[number].0 += want.saturating_sub(have);
                notes.demand[number].1 += have.saturating_sub(want);
                let first = first_kept(group, computed, config.max_rollback, block_size);
                let returned = table.blocks.get(table.returned..first).unwrap_or_default();
                notes.returned.extend(returned.iter().map(|&block| (number, block)));
                if filled != 0 {
                    let last = table.blocks[computed / block_size];
                    if group.pool.ref_count(last) > 1 || group.pool.pin_count(last) > 0 {
                        notes.shared.push((number, last, row, filled, sequence.borrowed));
                    }
                }
            }
        }
        notes.returned.sort_unstable();
        for same in notes.returned.chunk_by(|a, b| a == b) {
            let (group, block) = same[0];
            let pool = &blocks.groups[group].pool;
            let last = pool.ref_count(block) == same.len() && pool.pin_count(block) == 0;
            notes.demand[group].1 += usize::from(last);
        }
        notes.shared.sort_unstable();
        for same in notes.shared.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1)) {
            let (group, block, ..) = same[0];
            let gone = notes.returned.partition_point(|&entry| entry <= (group, block))
                - notes.returned.partition_point(|&entry| entry < (group, block));
            notes.demand[group].0 += blocks.copies_of_shared(group, block, gone, same);
        }
        for (group, &(needed, available)) in blocks.groups.iter().zip(&notes.demand) {
            if needed > available {
                return Err(Error::OutOfBlocks { needed, available, total: group.pool.num_blocks() });
            }
        }
        Ok(())
    }
}

/// Blocks before this one are not seen any more by a query at `start`, nor after a permitted rollback from there.
pub(super) fn first_kept(group: &Group, start: usize, max_rollback: usize, block_size: usize) -> usize {
    group.first_seen(start.saturating_sub(max_rollback)) / block_size
}

fn row(seq: SeqId, sequence: &Sequence) -> BatchSeq {
    BatchSeq {
        seq,
        start: sequence.computed,
        len: sequence.planned,
        tables: sequence.tables.iter().map(|table| table.blocks.clone()).collect(),
        cross: sequence.cross.clone(),
        cross_tokens: sequence.cross_tokens,
    }
}

/// How a block is to be made writable.
enum Way {
    InPlace,
    Unpublish,
    Copy,
}

/// What that depends on.
#[derive(Clone, Copy)]
struct Sharing {
    refs: usize,
    borrows: usize,
    /// Slots with a committed token, and those of them that the index publishes.
    filled: usize,
    published: usize,
    pinned: bool,
}

impl Sharing {
    /// For a write at slot `slot` by one of the holders; `free`: whether there is a block that costs nothing.
    fn way(&self, slot: usize, borrowed: bool, free: bool) -> Way {
        let other_writers = self.refs - self.borrows - usize::from(!borrowed);
        if other_writers == 0 && self.filled <= slot {
            Way::InPlace
        } else if self.refs > 1 {
            Way::Copy
        } else if self.published <= slot {
            Way::InPlace
        } else if self.pinned || (borrowed && free) {
            Way::Copy
        } else {
            Way::Unpublish
        }
    }
}

impl Blocks {
    fn sharing(&self, group: usize, block: BlockId) -> Sharing {
        let pool = &self.groups[group].pool;
        Sharing {
            refs: pool.ref_count(block),
            borrows: pool.borrow_count(block),
            filled: pool.filled(block),
            published: pool.node(block).map_or(0, |node| self.index.tokens(node).len()),
            pinned: pool.pin_count(block) > 0,
        }
    }

    /// Blocks that the writers of one block need for copies, in their order; `gone` references are returned before.
    fn copies_of_shared(
        &self,
        group: usize,
        block: BlockId,
        gone: usize,
        writers: &[(usize, BlockId, usize, usize, bool)],
    ) -> usize {
        let mut sharing = self.sharing(group, block);
        sharing.refs -= gone;
        let mut needed = 0;
        for &(.., slot, borrowed) in writers {
            match sharing.way(slot, borrowed, false) {
                // The writer holds it from now on, and nobody can do the same after it.
                Way::InPlace | Way::Unpublish => {
                    sharing.borrows -= usize::from(borrowed);
                    sharing.filled = sharing.filled.min(slot);
                }
                Way::Copy => {
                    needed += 1;
                    sharing.refs -= 1;
                    sharing.borrows -= usize::from(borrowed);
                }
            }
        }
        needed
    }

    /// Before a write from slot `slot` on: whatever is at this slot and behind is nobody else's.
    fn make_writable(
        &mut self,
        group: usize,
        block: &mut BlockId,
        slot: usize,
        borrowed: bool,
        carrier: &mut dyn Carrier,
    ) -> Result<()> {
        let free = self.groups[group].pool.num_free() > 0;
        match self.sharing(group, *block).way(slot, borrowed, free) {
            Way::Copy => {
                let dst = self.take(group, carrier)?;
                let src = std::mem::replace(block, dst);
                carrier.carry_out(Move::Copy { group, src, dst });
                // Whoever takes the source next does so in a later move.
                release(&mut self.groups[group].pool, src, borrowed)?;
                self.groups[group].copies += 1;
                self.events.push(Event::Copied { group, src, dst });
            }
            way => {
                if let (Way::Unpublish, Some(node)) = (way, self.groups[group].pool.node(*block)) {
                    // Unpublishing, instead of copying, keeps the promise that a lone sequence never needs more than
                    // ceil(tokens / block_size) blocks. What was only found is lost for want of a free block.
                    self.drop_place(node, group, if borrowed { Cause::Lru } else { Cause::Replaced });
                }
                if borrowed {
                    self.groups[group].pool.unlend(*block);
                }
            }
        }
        self.groups[group].pool.set_filled(*block, slot);
        Ok(())
    }
}
