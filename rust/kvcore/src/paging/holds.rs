//! Blocks whose bytes somebody reads without a sequence: views.
//!
//! ```text
//! hold_block(seq, group, i): nobody is about to write into it:  a reference, as a further sequence would have it
//! unhold(hold):              the reference is dropped
//! ```
//! A hold never borrows (see pool.rs): what it sees stays as it is, and whoever goes on behind it writes into a copy. It is
//! the only holder that may come while a batch is being written: a last block into which one writes is refused.
#![forbid(unsafe_code)]

use std::collections::HashMap;

use super::block::BlockId;
use super::manager::BlockManager;
use super::sequence::SeqId;
use crate::{Error, Result};

/// Handle of a hold. Never given twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HoldId {
    manager: u64,
    serial: u64,
}

/// A block that is held, and how much of it the sequence had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// To end it.
    pub id: HoldId,
    /// The block.
    pub block: BlockId,
    /// Its leading slots that are committed.
    pub filled: usize,
}

/// All holds of one manager.
#[derive(Debug, Default)]
pub(super) struct HoldTable {
    /// Group (`None`: the encoder's pool) and block.
    entries: HashMap<u64, (Option<usize>, BlockId)>,
    last_serial: u64,
}

impl HoldTable {
    /// The blocks that are held in a group, or in the encoder's pool, each as often as it is held.
    pub fn blocks(&self, group: Option<usize>) -> impl Iterator<Item = BlockId> + '_ {
        self.entries.values().filter(move |(of, _)| *of == group).map(|&(_, block)| block)
    }
}

impl BlockManager {
    /// Holds entry `index` of a sequence's block table: its committed slots stay as they are until
    /// [`BlockManager::unhold`], also after the sequence has ended. Errors, with nothing changed: `InvalidHandle`;
    /// `InvalidArgument` for a group that is not there, for an entry without committed tokens, and for one that a window
    /// has returned; `InvalidState` for a last block into which a batch writes that is not committed.
    pub fn hold_block(&mut self, seq: SeqId, group: usize, index: usize) -> Result<Held> {
        let sequence = self.sequences.get(seq)?;
        let Some(table) = sequence.tables.get(group) else { return Err(self.no_group(group)) };
        let (block_size, computed) = (self.config.block_size, sequence.computed);
        let end = computed.div_ceil(block_size);
        if !(table.returned..end).contains(&index) {
            return Err(no_entry(index, table.returned, end));
        }
        let block = table.blocks[index];
        let writes_to = |other: &super::sequence::Sequence| {
            let first = other.computed / block_size;
            other.planned > 0 && other.tables[group].blocks.get(first) == Some(&block)
        };
        if self.sequences.iter().any(writes_to) {
            return Err(Error::InvalidState(format!(
                "block {index} of the sequence is being written by a batch that is not committed"
            )));
        }
        self.blocks.groups[group].pool.retain(block)?;
        Ok(self.held(Some(group), block, block_size.min(computed - index * block_size)))
    }

    /// Holds the block `index` of a sequence's encoder. Errors, with nothing changed: `InvalidHandle`; `InvalidArgument`
    /// for an entry that is not there.
    pub fn hold_cross(&mut self, seq: SeqId, index: usize) -> Result<Held> {
        let sequence = self.sequences.get(seq)?;
        let (Some(&block), Some(pool)) = (sequence.cross.get(index), &mut self.cross) else {
            return Err(no_entry(index, 0, sequence.cross.len()));
        };
        let block_size = self.config.block_size;
        let filled = block_size.min(sequence.cross_tokens - index * block_size);
        pool.retain(block)?;
        Ok(self.held(None, block, filled))
    }

    fn held(&mut self, group: Option<usize>, block: BlockId, filled: usize) -> Held {
        self.holds.last_serial += 1;
        let serial = self.holds.last_serial;
        self.holds.entries.insert(serial, (group, block));
        Held { id: HoldId { manager: self.id, serial }, block, filled }
    }

    /// Ends a hold. Errors: `InvalidHandle` for another cache's, and the second time.
    pub fn unhold(&mut self, hold: HoldId) -> Result<()> {
        if hold.manager != self.id {
            return Err(Error::InvalidHandle("the hold belongs to another cache".into()));
        }
        match self.holds.entries.remove(&hold.serial) {
            Some((Some(group), block)) => self.blocks.groups[group].pool.release(block),
            Some((None, block)) => self.cross.as_mut().map_or(Ok(()), |pool| pool.release(block)),
            None => Err(Error::InvalidHandle("the hold was ended already".into())),
        }
    }

    /// Holds that were not ended.
    pub fn num_holds(&self) -> usize {
        self.holds.entries.len()
    }
}

fn no_entry(index: usize, first: usize, end: usize) -> Error {
    Error::InvalidArgument(match (first, end) {
        _ if first >= end => format!("index: the sequence has no stored tokens there, got {index}"),
        (0, _) => format!("index: expected 0 to {}, got {index}", end - 1),
        _ => format!("index: expected {first} to {} (a sliding window has passed those before), got {index}", end - 1),
    })
}
