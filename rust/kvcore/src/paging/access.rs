//! What those who write a sequence to a file, or fill one from a file, ask for.
#![forbid(unsafe_code)]

use super::block::BlockId;
use super::key::Key;
use super::manager::BlockManager;
use super::sequence::SeqId;
use crate::Result;

impl BlockManager {
    /// The key of a sequence. Errors: `InvalidHandle`.
    pub fn key(&self, seq: SeqId) -> Result<Key<'_>> {
        Ok(self.sequences.get(seq)?.domain.as_key())
    }

    /// Returns the blocks of a window's group before entry `until` of the block table, which hold nothing that any query
    /// will see. Errors: `InvalidHandle`.
    pub fn return_blocks(&mut self, seq: SeqId, _group: usize, until: usize) -> Result<()> {
        let sequence = self.sequences.get_mut(seq)?;
        for block in sequence.blocks.iter_mut().take(until) {
            if *block != BlockId::NONE {
                self.blocks.pool.release(std::mem::replace(block, BlockId::NONE))?;
            }
        }
        Ok(())
    }
}
