//! Carries out what the manager decides about bytes: copies before a write, blocks to the second tier and back.
#![forbid(unsafe_code)]

use std::collections::VecDeque;

use super::{KvCache, MAX_COPIES};
use crate::paging::{BlockId, BlockManager, Carrier, Move, SlotId};
use crate::storage::{KvStore, SpillFile};

/// All that has bytes. What is to be fetched waits in memory for a block, so that none gives way to what cannot be read.
pub(super) struct Bytes<'a> {
    stores: &'a mut [KvStore],
    spill: Option<&'a mut SpillFile>,
    copies: &'a mut VecDeque<(usize, BlockId, BlockId)>,
    staged: &'a mut Vec<u8>,
}

impl KvCache {
    /// The manager and what it moves.
    pub(super) fn parts(&mut self) -> (&mut BlockManager, Bytes<'_>) {
        let Self { manager, stores, spill, copies, staged, .. } = self;
        (manager, Bytes { stores, spill: spill.as_mut(), copies, staged })
    }
}

impl Carrier for Bytes<'_> {
    fn carry_out(&mut self, step: Move) -> bool {
        match (step, &mut self.spill) {
            (Move::Copy { group, src, dst }, _) => {
                self.stores[group].copy_block(src, dst);
                if self.copies.len() == MAX_COPIES {
                    self.copies.pop_front();
                }
                self.copies.push_back((group, src, dst));
                true
            }
            (Move::Spill { group, block, slot }, Some(spill)) => {
                spill.write(group, slot.index(), self.stores[group].block_bytes(block)).is_ok()
            }
            (Move::Fetch { group, block, .. }, _) => {
                self.stores[group].block_bytes_mut(block).copy_from_slice(self.staged);
                true
            }
            (Move::Spill { .. }, None) => false,
        }
    }

    fn can_fetch(&mut self, group: usize, slot: SlotId) -> bool {
        self.staged.resize(self.stores[group].layout().block_bytes(), 0);
        self.spill.as_mut().is_some_and(|spill| spill.read(group, slot.index(), self.staged).is_ok())
    }
}
