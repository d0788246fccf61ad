//! Reference counts over a fixed number of blocks.
//!
//! ```text
//! allocate: the newest vacant block                      refs 0 -> 1
//! retain:   off its list if it was free                  refs + 1
//! release:  refs - 1; at 0 onto a list: published blocks to the back of `evictable`, others to the front of `vacant`
//! ```
//!
//! A block that the prefix index still publishes keeps its content while it is free. It is taken only when nothing is
//! vacant, the longest unused first; who takes it must unpublish it before (see [`BlockPool::next_victim`]).
#![forbid(unsafe_code)]

use super::block::{BlockId, BlockState, NIL};
use super::free_list::FreeList;
use crate::{Error, Result};

/// The blocks of one cache. Nothing here costs more in a larger pool, except [`BlockPool::new`].
#[derive(Debug)]
pub struct BlockPool {
    states: Vec<BlockState>,
    /// Free, content worthless.
    vacant: FreeList,
    /// Free, but a prefix can still be found in it; least recently used first.
    evictable: FreeList,
    /// Sum of `filled` over the blocks that are held.
    stored: usize,
}

impl BlockPool {
    /// A pool of `num_blocks` vacant blocks. Errors: `InvalidArgument` for 0 or 2^32 - 1 and more, `OutOfMemory` when
    /// the table (20 bytes a block) cannot be had.
    pub fn new(num_blocks: usize) -> Result<Self> {
        if num_blocks == 0 || num_blocks >= NIL as usize {
            return Err(Error::InvalidArgument(format!("num_blocks must be 1..{NIL}, got {num_blocks}")));
        }
        let mut states = filled_vec(num_blocks, BlockState::EMPTY, "block states")?;
        let mut vacant = FreeList::new();
        for block in 0..num_blocks as u32 {
            vacant.push_back(&mut states, block);
        }
        Ok(Self { states, vacant, evictable: FreeList::new(), stored: 0 })
    }

    /// Takes a vacant block, with one reference. None when nothing is vacant (blocks may still be evictable).
    pub fn allocate(&mut self) -> Option<BlockId> {
        let block = self.vacant.front()?;
        self.vacant.remove(&mut self.states, block);
        let state = &mut self.states[block as usize];
        state.refs = 1;
        state.filled = 0;
        Some(BlockId::new(block))
    }

    /// The published block that must be unpublished before `allocate` can succeed; None if it can, or nothing is free.
    pub fn next_victim(&self) -> Option<BlockId> {
        if self.vacant.len() > 0 { None } else { self.evictable.front().map(BlockId::new) }
    }

    /// Adds a reference; a free published block comes back into use. Errors: `InvalidState` for a vacant block, whose
    /// content means nothing, `InvalidArgument` for an id outside the pool.
    pub fn retain(&mut self, block: BlockId) -> Result<()> {
        let state = self.get_mut(block)?;
        match (state.refs, state.node) {
            (0, NIL) => {
                return Err(Error::InvalidState(format!("block {} is vacant: it cannot be shared", block.raw())));
            }
            (u32::MAX, _) => return Err(Error::InvalidState(format!("block {} has 2^32 - 1 references", block.raw()))),
            _ => state.refs += 1,
        }
        if state.refs == 1 {
            self.stored += state.filled as usize;
            self.evictable.remove(&mut self.states, block.raw());
        }
        Ok(())
    }

    /// Drops a reference. Errors: `InvalidState` for a block that nobody holds (released twice), `InvalidArgument` for
    /// an id outside the pool; the counts stay as they were.
    pub fn release(&mut self, block: BlockId) -> Result<()> {
        let state = self.get_mut(block)?;
        if state.refs == 0 {
            return Err(Error::InvalidState(format!("block {} was released but nobody holds it", block.raw())));
        }
        state.refs -= 1;
        if state.refs == 0 {
            let published = state.node != NIL;
            self.stored -= state.filled as usize;
            if published {
                self.evictable.push_back(&mut self.states, block.raw());
            } else {
                self.vacant.push_front(&mut self.states, block.raw());
            }
        }
        Ok(())
    }

    /// Releases blocks from the last to the first, so that of a chain the leaves are evicted before their parents.
    /// All or nothing: an id that is there more often than it is held is an error and changes no count.
    pub fn release_all(&mut self, blocks: &[BlockId]) -> Result<()> {
        for (done, &block) in blocks.iter().rev().enumerate() {
            let Err(error) = self.release(block) else { continue };
            for &released in blocks.iter().rev().take(done) {
                self.restore(released);
            }
            return Err(error);
        }
        Ok(())
    }

    /// References to a block; 0 for an id outside the pool.
    pub fn ref_count(&self, block: BlockId) -> usize {
        self.states.get(block.index()).map_or(0, |state| state.refs as usize)
    }

    /// Blocks of the pool.
    pub fn num_blocks(&self) -> usize {
        self.states.len()
    }

    /// Blocks that nobody holds, vacant or evictable.
    pub fn num_free(&self) -> usize {
        self.vacant.len() + self.evictable.len()
    }

    /// Free blocks in which a prefix can still be found.
    pub fn num_evictable(&self) -> usize {
        self.evictable.len()
    }

    /// Slots with a committed token in blocks that are held, a shared block counted once.
    pub fn stored_tokens(&self) -> usize {
        self.stored
    }

    /// The index node that publishes the block.
    pub(super) fn node(&self, block: BlockId) -> Option<u32> {
        let node = self.states[block.index()].node;
        (node != NIL).then_some(node)
    }

    /// Notes who publishes the block, or that nobody does any more; a free block changes its list.
    pub(super) fn set_node(&mut self, block: BlockId, node: Option<u32>) {
        let state = &mut self.states[block.index()];
        let (was, is) = (state.node != NIL, node.is_some());
        state.node = node.unwrap_or(NIL);
        if state.refs == 0 && was != is {
            if is {
                self.vacant.remove(&mut self.states, block.raw());
                self.evictable.push_back(&mut self.states, block.raw());
            } else {
                self.evictable.remove(&mut self.states, block.raw());
                self.vacant.push_front(&mut self.states, block.raw());
            }
        }
    }

    /// Leading slots of the block with a committed token.
    pub(super) fn filled(&self, block: BlockId) -> usize {
        self.states[block.index()].filled as usize
    }

    /// Sets the committed slots of a block that is held.
    pub(super) fn set_filled(&mut self, block: BlockId, filled: usize) {
        let state = &mut self.states[block.index()];
        debug_assert!(state.refs > 0);
        self.stored = self.stored - state.filled as usize + filled;
        state.filled = filled as u32;
    }

    /// Takes back a release, of a vacant block too.
    fn restore(&mut self, block: BlockId) {
        let state = &mut self.states[block.index()];
        state.refs += 1;
        if state.refs == 1 {
            self.stored += state.filled as usize;
            let list = if state.node == NIL { &mut self.vacant } else { &mut self.evictable };
            list.remove(&mut self.states, block.raw());
        }
    }

    fn get_mut(&mut self, block: BlockId) -> Result<&mut BlockState> {
        let total = self.states.len();
        self.states
            .get_mut(block.index())
            .ok_or_else(|| Error::InvalidArgument(format!("block {} is outside the pool of {total}", block.raw())))
    }

    /// Every invariant of the pool alone. O(num_blocks).
    pub fn check(&self) -> std::result::Result<(), String> {
        let mut listed = vec![false; self.states.len()];
        for (list, published) in [(&self.vacant, false), (&self.evictable, true)] {
            list.check(&self.states, |block| {
                let state = &self.states[block as usize];
                if state.refs != 0 || (state.node != NIL) != published || listed[block as usize] {
                    return Err(format!("block {block} is on the wrong list: {state:?}"));
                }
                listed[block as usize] = true;
                Ok(())
            })?;
        }
        let mut stored = 0;
        for (block, state) in self.states.iter().enumerate() {
            if listed[block] != (state.refs == 0) {
                return Err(format!("block {block} has {} references, on a free list: {}", state.refs, listed[block]));
            }
            stored += if state.refs > 0 { state.filled as usize } else { 0 };
        }
        if stored != self.stored {
            return Err(format!("{stored} tokens are stored, the counter says {}", self.stored));
        }
        Ok(())
    }
}

/// A vector of `len` equal values, or `OutOfMemory` instead of an abort.
pub(super) fn filled_vec<T: Clone>(len: usize, value: T, what: &'static str) -> Result<Vec<T>> {
    let mut values = Vec::new();
    values.try_reserve_exact(len).map_err(|error| Error::OutOfMemory {
        bytes: len.saturating_mul(size_of::<T>()),
        what,
        reason: error.to_string(),
    })?;
    values.resize(len, value);
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_blocks_are_taken_last_and_in_order_of_release() {
        let mut pool = BlockPool::new(3).unwrap();
        let [a, b, c] = [(); 3].map(|()| pool.allocate().unwrap());
        assert_eq!((pool.allocate(), pool.next_victim()), (None, None));
        pool.set_node(a, Some(7));
        pool.set_node(b, Some(8));
        pool.release_all(&[a, b, c]).unwrap();
        pool.check().unwrap();
        assert_eq!((pool.num_free(), pool.num_evictable()), (3, 2));
        assert_eq!(pool.allocate(), Some(c));
        assert_eq!((pool.allocate(), pool.next_victim()), (None, Some(b)));
        pool.set_node(b, None);
        assert_eq!((pool.next_victim(), pool.allocate()), (None, Some(b)));
        pool.retain(a).unwrap();
        pool.check().unwrap();
        assert_eq!((pool.num_free(), pool.ref_count(a)), (0, 1));
    }
}
