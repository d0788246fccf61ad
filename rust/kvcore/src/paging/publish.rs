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
use super::sequence::Sequence;
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
        let found = match range.len() == block_size {
            true => self.index.find(at, tokens),
            false => self.index.starting_with(at.slot, tokens).map(|slot| self.index.link(slot)),
        };
        let own = self.blocks_at(sequence, position).find_map(|(group, block)| self.groups[group].pool.node(block));
        let (node, is_new) = match (found, own) {
            (Some(found), own) => {
                if own != Some(found.slot) {
                    sequence.hangs = true;
                    if let Some(own) = own.filter(|&own| !self.is_pinned(own)) {
                        self.remove(own, Cause::Replaced);
                    }
                }
                (found, false)
            }
            (None, Some(own)) => {
                if self.index.parent(own) != at || !tokens.starts_with(self.index.tokens(own)) {
                    return None;
                }
                self.grow(sequence, position, own, tokens, block_size);
                (self.index.link(own), true)
            }
            (None, None) => {
                self.classes.hold(class);
                (self.index.insert(at, tokens, class), true)
            }
        };
        self.give(sequence, position, node.slot);
        self.raise(node.slot, class);
        if !self.index.is_root(at.slot) {
            let class = self.index.class(node.slot);
            self.raise(at.slot, class);
        }
        if is_new {
            self.replace_beginning(at, node.slot);
        }
        Some(node)
    }

    /// The blocks of a sequence at one position of its tables.
    fn blocks_at(&self, sequence: &Sequence, position: usize) -> impl Iterator<Item = (usize, BlockId)> {
        let blocks = sequence.tables.iter().map(move |table| table.blocks[position]);
        blocks.enumerate().filter(|(_, block)| !block.is_none())
    }

    /// Retention of the block that starts with this token.
    fn class_at(&mut self, sequence: &Sequence, start: usize) -> ClassId {
        let marks = sequence.marks.iter().filter(|mark| mark.num_tokens > start);
        marks.fold(sequence.class, |class, mark| self.classes.join(class, mark.class))
    }

    /// More tokens for a node of which at least one block is the sequence's own.
    fn grow(&mut self, sequence: &Sequence, position: usize, node: u32, tokens: &[u32], block_size: usize) {
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

    /// Gives a node the sequence's blocks for the places that it has none, or only a slot, for. A block that holds fewer
    /// tokens than the node has is of no use.
    fn give(&mut self, sequence: &Sequence, position: usize, node: u32) {
        let filled = self.index.tokens(node).len();
        for (group, table) in sequence.tables.iter().enumerate() {
            let block = table.blocks[position];
            if matches!(self.index.place(node, group), Place::Block(_)) || block.is_none() {
                continue;
            }
            let pool = &self.groups[group].pool;
            if pool.node(block).is_none() && pool.filled(block) >= filled {
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
