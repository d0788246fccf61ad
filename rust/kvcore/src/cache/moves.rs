//! Carries out what the manager decides about bytes: copies before a write, blocks to the second tier and back.
#![forbid(unsafe_code)]

use super::{KvCache, MAX_COPIES};
use crate::paging::{BlockId, Move};

impl KvCache {
    /// Carries out `self.moves` in their order; the blocks whose content could not be read back.
    pub(super) fn carry_out(&mut self) -> Vec<(usize, BlockId)> {
        let mut lost = Vec::new();
        for &step in &self.moves {
            match (step, &mut self.spill) {
                (Move::Copy { group, src, dst }, _) => {
                    self.stores[group].copy_block(src, dst);
                    if self.copies.len() == MAX_COPIES {
                        self.copies.pop_front();
                    }
                    self.copies.push_back((group, src, dst));
                }
                (Move::Spill { group, block, slot }, Some(spill)) => {
                    // A slot that could not be written cannot be read either: who fetches it learns of it.
                    let _ = spill.write(group, slot.index(), self.stores[group].block_bytes(block));
                }
                (Move::Fetch { group, slot, block }, Some(spill)) => {
                    if spill.read(group, slot.index(), self.stores[group].block_bytes_mut(block)).is_err() {
                        lost.push((group, block));
                    }
                }
                (Move::Spill { .. } | Move::Fetch { .. }, None) => {}
            }
        }
        lost
    }
}
