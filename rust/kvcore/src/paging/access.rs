//! What those who write a sequence to a file ask for.
#![forbid(unsafe_code)]

use super::key::Key;
use super::manager::BlockManager;
use super::sequence::SeqId;
use crate::Result;

impl BlockManager {
    /// The key of a sequence. Errors: `InvalidHandle`.
    pub fn key(&self, seq: SeqId) -> Result<Key<'_>> {
        Ok(self.sequences.get(seq)?.domain.as_key())
    }

    /// Whether what a sequence has computed may be found by others: not without `use_prefix`, nor what it began to compute
    /// before the prefix cache was reset. Errors: `InvalidHandle`.
    pub fn is_shared(&self, seq: SeqId) -> Result<bool> {
        let sequence = self.sequences.get(seq)?;
        Ok(sequence.use_prefix && (sequence.computed == 0 || sequence.era == self.era))
    }
}
