//! What a sequence has computed becomes findable.
//!
//! ```text
//! for each block from the last published one on, the last partial one included:
//!     a node has these tokens (and more):  stay private, go on below that node; blocks that it lacks are given to it
//!     my node has the first of them:       it grows
//!     otherwise:                           a new node with my blocks
//!     the node whose tokens are the beginning of mine is of no use any more: it goes
//! the chain so far was evicted meanwhile:  start again at the root
//! ```
#![forbid(unsafe_code)]

use std::ops::Range;

use super::block::{BlockId, NIL};
use super::blocks::Blocks;
use super::events::Cause;
use super::prefix::Link;
use super::retention::ClassId;
use super::sequence::{Sequence, Table};
use super::transfer::Place;

impl Blocks {
    /// Publishes what is new since the last time.
    pub fn publish(&mut self, sequence: &mut Sequence, block_size: usize) {
        if sequence.computed == 0 {
            return;
        }
        let (mut position, mut at) = (sequence.chained, sequence.link);
        if position == 0 || !self.index.is_alive(at) {
            (position, at) = (0, self.index.root_or_insert(&sequence.domain));
        }
        loop {
            let start = position * block_size;
            let end = (start + block_size).min(sequence.computed);
            if start == end {
                break;
            }
            let class = self.class_at(sequence, start);
            self.classes.hold(class);
            let next = self.publish_block(sequence, position, at, &(start..end), class, block_size);
            self.classes.drop(class);
            let Some(next) = next else {
                // Something of it is unreadable, or was taken over by another prefix: the rest stays private.
                self.prune(at.slot);
                sequence.use_prefix = false;
                return;
            };
            if end - start < block_size {
                break;
            }
            (position, at) = (position + 1, next);
        }
        // A small window may have left no block for it.
        self.prune(at.slot);
        (sequence.chained, sequence.link) = (position, if position == 0 { Link::NONE } else { at });
    }

    /// One block with the tokens of `range` below `at`; the node that has them now.
    fn publish_block(
        &mut self,
        sequence: &mut Sequence,
        position: usize,
        at: Link,
        range: &Range<usize>,
        class: ClassId,
        block_size: usize,
    ) -> Option<Link> {
        if self.blocks_at(sequence, position).any(|(group, block)| self.groups[group].pool.is_spoiled(block)) {
            return None;
        }
        let tokens = &sequence.tokens[range.clone()];
        let own = self.blocks_at(sequence, position).find_map(|(group, block)| self.groups[group].pool.node(block));
        let has_all = |node: &u32| self.index.parent(*node) == at && self.index.tokens(*node).starts_with(tokens);
        let found = match own.filter(has_all) {
            Some(own) => Some(own),
            None if range.len() == block_size => self.index.find(at, tokens).map(|link| link.slot),
            None => self.index.starting_with(at.slot, tokens),
        };
        let (node, is_new) = match (found, own) {
            (Some(found), own) => {
                if own != Some(found) {
                    sequence.hangs = true;
                    if let Some(own) = own.filter(|&own| tokens.starts_with(self.index.tokens(own))) {
                        if !self.is_pinned(own) {
                            self.remove(own, Cause::Replaced);
                        } else if self.index.tokens(found).len() <= range.len() && !self.is_pinned(found) {
                            self.take_over(sequence, position, own, found);
                        }
                    }
                }
                (found, false)
            }
            (None, Some(own)) => {
                if self.index.parent(own) != at || !tokens.starts_with(self.index.tokens(own)) {
                    return None;
                }
                self.grow(sequence, position, own, tokens, block_size);
                (own, true)
            }
            (None, None) => {
                self.classes.hold(class);
                (self.index.insert(at, tokens, class).slot, true)
            }
        };
        self.give(sequence, position, range.len(), node);
        self.raise(node, class);
        if !self.index.is_root(at.slot) {
            let class = self.index.class(node);
            self.raise(at.slot, class);
        }
        if is_new {
            self.replace_beginning(at, node);
        }
        Some(self.index.link(node))
    }

    /// The blocks of a sequence at one position of its tables.
    pub(super) fn blocks_at(&self, sequence: &Sequence, position: usize) -> impl Iterator<Item = (usize, BlockId)> {
        let blocks = sequence.tables.iter().map(move |table| table.blocks[position]);
        blocks.enumerate().filter(|(_, block)| !block.is_none())
    }

    /// Retention of the block that starts with this token.
    fn class_at(&mut self, sequence: &Sequence, start: usize) -> ClassId {
        let marks = sequence.marks.iter().filter(|mark| mark.num_tokens > start);
        marks.fold(sequence.class, |class, mark| self.classes.join(class, mark.class))
    }

    /// Moves the sequence's pinned blocks from its node to one that has its tokens and more.
    fn take_over(&mut self, sequence: &Sequence, position: usize, own: u32, found: u32) {
        let is_mine = |(group, table): (usize, &Table)| match self.index.place(own, group) {
            Place::Nowhere => true,
            place => place == Place::Block(table.blocks[position]),
        };
        if !sequence.tables.iter().enumerate().all(is_mine) {
            return;
        }
        for group in 0..sequence.tables.len() {
            if let Place::Block(block) = self.index.place(own, group) {
                self.displace(found, group);
                self.index.set_place(own, group, Place::Nowhere);
                self.set_block(found, group, block);
            }
        }
        let class = self.index.class(own);
        self.raise(found, class);
        self.prune(own);
    }

    /// More tokens for a node of which at least one block is the sequence's own.
    pub(super) fn grow(&mut self, sequence: &Sequence, position: usize, node: u32, tokens: &[u32], block_size: usize) {
        for (group, table) in sequence.tables.iter().enumerate() {
            // Other blocks than the sequence's do not have these tokens.
            match self.index.place(node, group) {
                Place::Nowhere => continue,
                Place::Block(block) if block == table.blocks[position] => continue,
                Place::Block(block) => self.groups[group].pool.set_node(block, None),
                Place::Slot(slot) => {
                    if let Some(tier) = &mut self.groups[group].tier {
                        tier.set_node(BlockId::new(slot.raw()), None);
                    }
                }
            }
            self.index.set_place(node, group, Place::Nowhere);
        }
        self.index.extend(node, tokens);
        if tokens.len() == block_size {
            (0..self.groups.len()).for_each(|group| self.tell_stored(node, group));
        }
    }

    /// Gives a node the sequence's blocks for the places that it has none, or only a slot, for: if the node
    /// has no more tokens than the `len` that the sequence has computed.
    fn give(&mut self, sequence: &Sequence, position: usize, len: usize, node: u32) {
        if self.index.tokens(node).len() > len {
            return;
        }
        for (group, table) in sequence.tables.iter().enumerate() {
            let block = table.blocks[position];
            if matches!(self.index.place(node, group), Place::Block(_)) || block.is_none() {
                continue;
            }
            if self.groups[group].pool.node(block).is_none() {
                self.set_block(node, group, block);
            }
        }
    }

    /// The sibling whose tokens are the beginning of this node's goes; its retention stays.
    fn replace_beginning(&mut self, parent: Link, node: u32) {
        let (less, _) = self.index.neighbours(parent.slot, self.index.tokens(node));
        self.replace_if_beginning(less, node);
    }

    /// A node (or [`NIL`]) whose tokens are the beginning of its sibling's goes, unless it is pinned.
    pub(super) fn replace_if_beginning(&mut self, less: u32, node: u32) {
        if less == NIL || !self.index.tokens(node).starts_with(self.index.tokens(less)) || self.is_pinned(less) {
            return;
        }
        let class = self.index.class(less);
        self.raise(node, class);
        self.remove(less, Cause::Replaced);
    }
}
