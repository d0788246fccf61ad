//! The pools of all groups and the index that publishes their blocks: always changed together.
//!
//! ```text
//! take:   a vacant block; none: the victim of its pool is evicted and becomes vacant
//! evict:  with a second tier: the node keeps a slot in place of the block (see spill.rs)
//!         otherwise, or if the slot cannot be written, its place is dropped
//! drop:   group that keeps all tokens: the node goes, and all below it;  window: the node loses this block only
//! raise:  a longer or more important retention goes up the path, so that parents outlive their children
//! ```
#![forbid(unsafe_code)]

use super::block::BlockId;
use super::events::{Cause, Event, EventLog};
use super::group::Group;
use super::moves::Carrier;
use super::prefix::{Gone, Link, PrefixIndex};
use super::retention::{ClassId, Classes};
use super::spill::Spilled;
use super::transfer::Place;
use crate::{Error, Result};

#[derive(Debug)]
pub(super) struct Blocks {
    pub groups: Vec<Group>,
    pub index: PrefixIndex,
    pub classes: Classes,
    pub events: EventLog,
}

impl Blocks {
    /// A block with one reference and no content.
    pub fn take(&mut self, group: usize, carrier: &mut dyn Carrier) -> Result<BlockId> {
        if let Some(victim) = self.groups[group].pool.next_victim(&self.classes) {
            self.evict(group, victim, carrier)?;
        }
        let block = self.groups[group].pool.allocate();
        block.ok_or_else(|| Error::InvalidState("more blocks were granted than are free".into()))
    }

    /// Makes an evictable block vacant.
    fn evict(&mut self, group: usize, victim: BlockId, carrier: &mut dyn Carrier) -> Result<()> {
        let cause = match self.spill(group, victim, carrier)? {
            Spilled::Written => return Ok(()),
            Spilled::NoSlot => Cause::Lru,
            Spilled::Failed => Cause::Failed,
        };
        if let Some(node) = self.groups[group].pool.node(victim) {
            self.drop_place(node, group, cause);
        }
        Ok(())
    }

    /// Makes what a node has in one group unfindable.
    pub fn drop_place(&mut self, node: u32, group: usize, cause: Cause) {
        if self.groups[group].window.is_none() {
            return self.remove(node, cause);
        }
        let place = self.index.place(node, group);
        let hash = if self.events.is_on() { self.index.hash_of(node) } else { 0 };
        self.index.set_place(node, group, Place::Nowhere);
        let Self { groups, index, classes, events } = self;
        vacate(&mut groups[group], events, group, place, hash, cause);
        index.prune(node, |gone| classes.drop(gone.class));
    }

    /// Makes a node and all that follow it unfindable.
    pub fn remove(&mut self, node: u32, cause: Cause) {
        let Self { groups, index, classes, events } = self;
        index.remove(node, events.is_on(), |gone: &Gone<'_>| {
            for (group, place) in gone.places().enumerate() {
                vacate(&mut groups[group], events, group, place, gone.hash, cause);
            }
            classes.drop(gone.class);
        });
    }

    /// Removes a node that was made but got neither blocks nor children, and its parents if they have none.
    pub fn prune(&mut self, node: u32) {
        let Self { index, classes, .. } = self;
        index.prune(node, |gone| classes.drop(gone.class));
    }

    /// Forgets whatever has expired. O(classes in use), and O(1) for each block that goes.
    pub fn sweep(&mut self) {
        for group in 0..self.groups.len() {
            while let Some(node) = self.expired(group) {
                self.drop_place(node, group, Cause::Expired);
            }
        }
    }

    fn expired(&self, group: usize) -> Option<u32> {
        let Group { pool, tier, .. } = &self.groups[group];
        let in_pool = |pool: &super::pool::BlockPool| pool.node(pool.next_expired(&self.classes)?);
        in_pool(pool).or_else(|| tier.as_ref().and_then(in_pool))
    }

    /// At least this retention for a node and all before it.
    pub fn raise(&mut self, mut node: u32, class: ClassId) {
        let Self { groups, index, classes, .. } = self;
        while !index.is_root(node) && !classes.covers(index.class(node), class) {
            let have = index.class(node);
            let joined = classes.join(have, class);
            classes.hold(joined);
            classes.drop(have);
            index.set_class(node, joined);
            for (at, group) in groups.iter_mut().enumerate() {
                match (index.place(node, at), &mut group.tier) {
                    (Place::Block(block), _) => group.pool.set_class(block, joined),
                    (Place::Slot(slot), Some(tier)) => tier.set_class(BlockId::new(slot.raw()), joined),
                    _ => {}
                }
            }
            node = index.parent(node).slot;
        }
    }

    /// Counts as a use of a node and all before it, in the groups in which these have to outlive their children.
    pub fn touch_path(&mut self, link: Link) {
        let Self { groups, index, .. } = self;
        if !index.is_alive(link) {
            return;
        }
        let mut node = link.slot;
        while !index.is_root(node) {
            for (at, group) in groups.iter_mut().enumerate().filter(|(_, group)| group.window.is_none()) {
                match (index.place(node, at), &mut group.tier) {
                    (Place::Block(block), _) => group.pool.touch(block),
                    (Place::Slot(slot), Some(tier)) => tier.touch(BlockId::new(slot.raw())),
                    _ => {}
                }
            }
            node = index.parent(node).slot;
        }
    }

    /// Whether any block of the node is pinned.
    pub fn is_pinned(&self, node: u32) -> bool {
        let pinned = |(at, group): (usize, &Group)| match self.index.place(node, at) {
            Place::Block(block) => group.pool.pin_count(block) > 0,
            _ => false,
        };
        self.groups.iter().enumerate().any(pinned)
    }

    /// Forgets everything that is not pinned. O(nodes).
    pub fn reset(&mut self) {
        for slot in 0..self.index.num_slots() {
            // From each leaf up to the first node that has to stay.
            let mut at = if self.index.is_used(slot) { self.index.link(slot) } else { Link::NONE };
            while self.index.is_alive(at)
                && !self.index.is_root(at.slot)
                && !self.index.has_children(at.slot)
                && !self.is_pinned(at.slot)
            {
                let parent = self.index.parent(at.slot);
                self.remove(at.slot, Cause::Reset);
                at = parent;
            }
        }
        for slot in 0..self.index.num_slots() {
            for group in 0..self.groups.len() {
                if !self.index.is_used(slot) || self.index.is_root(slot) || self.groups[group].window.is_none() {
                    continue;
                }
                match self.index.place(slot, group) {
                    Place::Nowhere => {}
                    Place::Block(block) if self.groups[group].pool.pin_count(block) > 0 => {}
                    _ => self.drop_place(slot, group, Cause::Reset),
                }
            }
        }
    }

    /// Puts a block of somebody's into a node; a slot that was there is free.
    pub fn set_block(&mut self, node: u32, group: usize, block: BlockId) {
        let Self { groups, index, .. } = self;
        if let (Place::Slot(slot), Some(tier)) = (index.place(node, group), &mut groups[group].tier) {
            tier.set_node(BlockId::new(slot.raw()), None);
        }
        index.set_place(node, group, Place::Block(block));
        groups[group].pool.set_node(block, Some((node, index.class(node))));
        self.tell_stored(node, group);
    }

    /// Takes a block out of a node to which another block with the same tokens comes.
    pub fn displace(&mut self, node: u32, group: usize) {
        let Self { groups, index, events, .. } = self;
        if let place @ Place::Block(_) = index.place(node, group) {
            index.set_place(node, group, Place::Nowhere);
            let hash = if events.is_on() { index.hash_of(node) } else { 0 };
            vacate(&mut groups[group], events, group, place, hash, Cause::Replaced);
        }
    }

    /// Notes that a block can be found.
    pub fn tell_stored(&mut self, node: u32, group: usize) {
        let Self { index, events, .. } = self;
        if let Place::Block(block) = index.place(node, group)
            && events.is_on()
        {
            events.push(Event::Stored {
                block,
                group,
                hash: index.hash_of(node),
                parent_hash: index.hash_of(index.parent(node).slot),
                num_tokens: index.tokens(node).len(),
            });
        }
    }
}

/// A place that the index has given up.
fn vacate(group: &mut Group, events: &mut EventLog, number: usize, place: Place, hash: u128, cause: Cause) {
    let block = match place {
        Place::Nowhere => return,
        Place::Block(block) => {
            group.pool.set_node(block, None);
            block
        }
        Place::Slot(slot) => {
            if let Some(tier) = &mut group.tier {
                tier.set_node(BlockId::new(slot.raw()), None);
            }
            BlockId::NONE
        }
    };
    match cause {
        // What the second tier has lost had to go there because its space was needed.
        Cause::Lru | Cause::Failed => group.evicted_lru += 1,
        Cause::Expired => group.evicted_expired += 1,
        Cause::Reset => group.evicted_reset += 1,
        Cause::Replaced | Cause::Spilled => {}
    }
    events.push(Event::Removed { block, group: number, hash, cause });
}
