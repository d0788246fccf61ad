//! What those who write a sequence to a file, or fill one from a file, ask for.
#![forbid(unsafe_code)]

use super::block::BlockId;
use super::key::Key;
use super::manager::BlockManager;
use super::sequence::SeqId;
use crate::{Error, Result};

impl BlockManager {
    /// The key of a sequence. Errors: `InvalidHandle`.
    pub fn key(&self, seq: SeqId) -> Result<Key<'_>> {
        Ok(self.sequences.get(seq)?.domain.as_key())
    }

    /// Whether what a sequence computes may be found by others. Errors: `InvalidHandle`.
    pub fn is_shared(&self, seq: SeqId) -> Result<bool> {
        Ok(self.sequences.get(seq)?.use_prefix)
    }

    /// Returns the blocks of a window's group before entry `until` of the block table, which hold nothing that a query to
    /// come will see. Errors: `InvalidHandle`, `InvalidArgument` for a group that keeps all tokens.
    pub fn return_blocks(&mut self, seq: SeqId, group: usize, until: usize) -> Result<()> {
        if self.config.groups.get(group).is_none_or(|config| config.window.is_none()) {
            return Err(Error::InvalidArgument(format!("group {group}: expected one with a window")));
        }
        let table = &mut self.sequences.get_mut(seq)?.tables[group];
        while table.returned < until.min(table.blocks.len()) {
            let block = std::mem::replace(&mut table.blocks[table.returned], BlockId::NONE);
            self.blocks.groups[group].pool.release(block)?;
            table.returned += 1;
        }
        Ok(())
    }
}
