//! The second tier: which slot keeps which evicted block. Bytes are the caller's business.
//!
//! ```text
//! spill(block): a vacant slot; none: the least valuable slot is given up, unless it is worth more than the block
//!               the node keeps the slot in place of the block, and its time goes on
//! fetch(slot):  a block is taken for it, the node has that block, the slot is free
//! ```
#![forbid(unsafe_code)]

use super::block::{BlockId, SlotId};
use super::blocks::Blocks;
use super::events::{Cause, Event};
use super::group::Group;
use super::manager::BlockManager;
use super::moves::Move;
use super::transfer::Place;
use crate::{Error, Result};

impl Blocks {
    /// Gives the node of an evictable block a slot in its place; None if there is none to be had, or the node is gone.
    pub fn spill(&mut self, group: usize, block: BlockId) -> Option<SlotId> {
        let Group { pool, tier, .. } = &self.groups[group];
        let tier = tier.as_ref()?;
        if let Some(victim) = tier.next_victim(&self.classes) {
            let priority = |node: Option<u32>| node.map(|node| self.classes.get(self.index.class(node)).priority);
            if priority(tier.node(victim)) > priority(pool.node(block)) {
                return None;
            }
            if let Some(node) = tier.node(victim) {
                self.drop_place(node, group, Cause::Lru);
            }
        }
        let Self { groups, index, events, .. } = self;
        let Group { pool, tier, spills, .. } = &mut groups[group];
        // The node may have been below the one that was given up.
        let node = pool.node(block)?;
        let tier = tier.as_mut()?;
        let slot = tier.allocate()?;
        let (class, released) = (index.class(node), pool.released(block));
        tier.set_node(slot, Some((node, class)));
        tier.release(slot).ok()?;
        tier.set_released(slot, released);
        let slot = SlotId::new(slot.raw());
        index.set_place(node, group, Place::Slot(slot));
        pool.set_node(block, None);
        *spills += 1;
        if events.is_on() {
            events.push(Event::Removed { block, group, hash: index.hash_of(node), cause: Cause::Spilled });
        }
        Some(slot)
    }

    /// Keeps a slot from being given up until it is fetched.
    pub fn hold_slot(&mut self, group: usize, slot: SlotId) -> Result<()> {
        self.tier(group)?.retain(BlockId::new(slot.raw()))
    }

    /// Takes a block for what is in a slot that is held; the caller has its one reference.
    pub fn fetch(&mut self, group: usize, node: u32, slot: SlotId, moves: &mut Vec<Move>) -> Result<BlockId> {
        let block = self.take(group, moves)?;
        moves.push(Move::Fetch { group, slot, block });
        let filled = self.index.tokens(node).len();
        self.groups[group].pool.set_filled(block, filled);
        self.set_block(node, group, block);
        self.groups[group].fetches += 1;
        self.tier(group)?.release(BlockId::new(slot.raw()))?;
        Ok(block)
    }

    fn tier(&mut self, group: usize) -> Result<&mut super::pool::BlockPool> {
        let tier = self.groups[group].tier.as_mut();
        tier.ok_or_else(|| Error::InvalidState(format!("group {group} has no second tier")))
    }
}

impl BlockManager {
    /// A published block turned out unreadable (its fetch failed): nobody finds it or what depends on it any more, and
    /// no sequence that holds it publishes it again. What is not published is left alone.
    pub fn forget_block(&mut self, group: usize, block: BlockId) {
        let Some(pool) = self.blocks.groups.get_mut(group).map(|group| &mut group.pool) else { return };
        if block.index() >= pool.num_blocks() {
            return;
        }
        let node = pool.node(block);
        if pool.ref_count(block) > 0 {
            pool.spoil(block);
        }
        if let Some(node) = node {
            self.blocks.drop_place(node, group, Cause::Failed);
        }
    }

    /// A spill could not be written: what is in this slot now is forgotten, and what depends on it.
    pub fn forget_slot(&mut self, group: usize, slot: SlotId) {
        let tier = self.blocks.groups.get(group).and_then(|group| group.tier.as_ref());
        let known = tier.filter(|tier| slot.index() < tier.num_blocks());
        if let Some(node) = known.and_then(|tier| tier.node(BlockId::new(slot.raw()))) {
            self.blocks.drop_place(node, group, Cause::Failed);
        }
    }
}
