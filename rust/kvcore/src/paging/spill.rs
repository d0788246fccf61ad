//! The second tier: which slot keeps which evicted block. Bytes are the carrier's business.
//!
//! ```text
//! spill(block): a vacant slot; none: the least valuable slot is given up, unless it is worth more than the block
//!               written:     the node keeps the slot in place of the block, and its time goes on
//!               not written: nothing is kept, the slot is the last to be tried again
//! fetch(slot):  read first; unreadable: nothing else changes
//!               a block is taken for it, the node has that block, the slot is free
//! ```
#![forbid(unsafe_code)]

use super::block::{BlockId, SlotId};
use super::blocks::Blocks;
use super::events::{Cause, Event};
use super::group::Group;
use super::manager::BlockManager;
use super::moves::{Carrier, Move};
use super::transfer::Place;
use crate::{Error, Result};

/// What became of a block that was to go to the second tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spilled {
    Written,
    Failed,
    NoSlot,
}

impl Blocks {
    /// Gives the node of an evictable block a slot in its place. Unless it was written the node still has the block, or
    /// is gone.
    pub fn spill(&mut self, group: usize, block: BlockId, carrier: &mut dyn Carrier) -> Result<Spilled> {
        let Some(slot) = self.slot_for(group, block) else { return Ok(Spilled::NoSlot) };
        if carrier.carry_out(Move::Spill { group, block, slot }) {
            self.move_to(group, block, slot)?;
            return Ok(Spilled::Written);
        }
        self.tier(group)?.put_back(BlockId::new(slot.raw()));
        Ok(Spilled::Failed)
    }

    /// A slot for an evictable block, taken.
    fn slot_for(&mut self, group: usize, block: BlockId) -> Option<SlotId> {
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
        let Group { pool, tier, .. } = &mut self.groups[group];
        // The node may have been below the one that was given up.
        pool.node(block)?;
        Some(SlotId::new(tier.as_mut()?.allocate()?.raw()))
    }

    /// The node of a block has this slot from now on, which was written.
    fn move_to(&mut self, group: usize, block: BlockId, slot: SlotId) -> Result<()> {
        let Self { groups, index, events, .. } = self;
        let Group { pool, tier, spills, .. } = &mut groups[group];
        let (Some(node), Some(tier)) = (pool.node(block), tier) else { return Ok(()) };
        let of_tier = BlockId::new(slot.raw());
        tier.set_node(of_tier, Some((node, index.class(node))));
        tier.release(of_tier)?;
        tier.set_released(of_tier, pool.released(block));
        index.set_place(node, group, Place::Slot(slot));
        pool.set_node(block, None);
        *spills += 1;
        if events.is_on() {
            events.push(Event::Removed { block, group, hash: index.hash_of(node), cause: Cause::Spilled });
        }
        Ok(())
    }

    /// Keeps a slot from being given up until it is fetched.
    pub fn hold_slot(&mut self, group: usize, slot: SlotId) -> Result<()> {
        self.tier(group)?.retain(BlockId::new(slot.raw()))
    }

    /// Drops a hold.
    pub fn unhold_slot(&mut self, group: usize, slot: SlotId) -> Result<()> {
        self.tier(group)?.release(BlockId::new(slot.raw()))
    }

    /// Takes a block for what is in a slot that is held; the caller has its one reference. None, and the slot still held,
    /// if it cannot be read.
    pub fn fetch(
        &mut self,
        group: usize,
        node: u32,
        slot: SlotId,
        carrier: &mut dyn Carrier,
    ) -> Result<Option<BlockId>> {
        // Before another block gives way to it.
        if !carrier.can_fetch(group, slot) {
            return Ok(None);
        }
        let block = self.take(group, carrier)?;
        carrier.carry_out(Move::Fetch { group, slot, block });
        let filled = self.index.tokens(node).len();
        self.groups[group].pool.set_filled(block, filled);
        self.set_block(node, group, block);
        self.groups[group].fetches += 1;
        self.unhold_slot(group, slot)?;
        Ok(Some(block))
    }

    fn tier(&mut self, group: usize) -> Result<&mut super::pool::BlockPool> {
        let tier = self.groups[group].tier.as_mut();
        tier.ok_or_else(|| Error::InvalidState(format!("group {group} has no second tier")))
    }
}

impl BlockManager {
    /// A published block has not the content that it should have (it was granted by `import_prefixes` and not filled):
    /// nobody finds it or what depends on it any more, and no sequence that holds it publishes it again. What is not
    /// published is left alone. That is no eviction.
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
            let counted: Vec<u64> = self.blocks.groups.iter().map(|group| group.evicted_lru).collect();
            self.blocks.drop_place(node, group, Cause::Failed);
            self.blocks.groups.iter_mut().zip(counted).for_each(|(group, counted)| group.evicted_lru = counted);
        }
    }

    /// What is in a slot turned out unreadable: it is forgotten, and what depends on it. An eviction.
    pub fn forget_slot(&mut self, group: usize, slot: SlotId) {
        let tier = self.blocks.groups.get(group).and_then(|group| group.tier.as_ref());
        let known = tier.filter(|tier| slot.index() < tier.num_blocks());
        if let Some(node) = known.and_then(|tier| tier.node(BlockId::new(slot.raw()))) {
            self.blocks.drop_place(node, group, Cause::Failed);
        }
    }
}
