//! Reference counts over a fixed number of blocks.
//!
//! ```text
//! allocate: the newest vacant block                      refs 0 -> 1
//! retain:   off its list if it was free                  refs + 1
//! release:  refs - 1; at 0 onto a list: pinned, else if published the back of its class, else the front of `vacant`
//! victim:   of the class with the lowest priority the block that was released first
//! ```
//!
//! A block that the prefix index still publishes keeps its content while it is free. It is taken only when nothing is
//! vacant; who takes it must unpublish it before (see [`BlockPool::next_victim`]). A holder may *borrow*: it reads the
//! leading slots that it found and will not write, so that the block's real holder may go on behind these.
//!
//! The slots of the second tier are counted by the same code, as blocks that nobody holds.
#![forbid(unsafe_code)]

use super::block::{BlockId, BlockState, NIL};
use super::free_list::FreeList;
use super::retention::{ClassId, Classes};
use crate::{Error, Result};

/// Most blocks of a pool: one bit tells blocks from slots.
pub(super) const MAX_BLOCKS: usize = 1 << 31;

/// The blocks of one group. Nothing here costs more in a larger pool, except [`BlockPool::new`].
#[derive(Debug)]
pub struct BlockPool {
    states: Vec<BlockState>,
    /// Free, content worthless.
    vacant: FreeList,
    /// Free, but a prefix can still be found in it: one list per retention class, first released first.
    evictable: Vec<FreeList>,
    /// Bit c: list c is not empty.
    classes_in_use: [u64; 4],
    num_evictable: usize,
    /// Held by nobody, but pinned.
    idle_pinned: FreeList,
    /// Pinned, held or not.
    num_pinned: usize,
    /// Sum of `filled` over the blocks that are held.
    stored: usize,
    /// The caller's clock, and releases so far.
    now: u64,
    ticks: u64,
}

impl BlockPool {
    /// A pool of `num_blocks` vacant blocks. Errors: `InvalidArgument` for 0 or more than 2^31, `OutOfMemory` when the
    /// table (56 bytes a block) cannot be had.
    pub fn new(num_blocks: usize) -> Result<Self> {
        if num_blocks == 0 || num_blocks >= MAX_BLOCKS {
            return Err(Error::InvalidArgument(format!("num_blocks must be 1..{MAX_BLOCKS}, got {num_blocks}")));
        }
        let mut states = filled_vec(num_blocks, BlockState::EMPTY, "block states")?;
        let mut vacant = FreeList::new();
        for block in 0..num_blocks as u32 {
            vacant.push_back(&mut states, block);
        }
        Ok(Self {
            states,
            vacant,
            evictable: Vec::new(),
            classes_in_use: [0; 4],
            num_evictable: 0,
            idle_pinned: FreeList::new(),
            num_pinned: 0,
            stored: 0,
            now: 0,
            ticks: 0,
        })
    }

    /// Takes a vacant block, with one reference. None when nothing is vacant (blocks may still be evictable).
    pub fn allocate(&mut self) -> Option<BlockId> {
        let block = self.vacant.front()?;
        self.vacant.remove(&mut self.states, block);
        let state = &mut self.states[block as usize];
        (state.refs, state.filled, state.spoiled) = (1, 0, false);
        Some(BlockId::new(block))
    }

    /// Adds a reference; a free published block comes back into use. Errors: `InvalidState` for a vacant block, whose
    /// content means nothing, `InvalidArgument` for an id outside the pool.
    pub fn retain(&mut self, block: BlockId) -> Result<()> {
        let state = self.get_mut(block)?;
        match (state.refs, state.node) {
            (0, NIL) => {
                return Err(Error::InvalidState(format!("block {} is vacant: it cannot be shared", block.raw())));
            }
            (0, _) => self.unshelve(block),
            (u32::MAX, _) => return Err(Error::InvalidState(format!("block {} has 2^32 - 1 references", block.raw()))),
            _ => {}
        }
        let state = &mut self.states[block.index()];
        state.refs += 1;
        if state.refs == 1 {
            self.stored += state.filled as usize;
        }
        Ok(())
    }

    /// Gives back a block that was allocated and turned out useless: it is the last to be allocated again.
    pub(super) fn put_back(&mut self, block: BlockId) {
        let state = &mut self.states[block.index()];
        debug_assert!(state.refs == 1 && state.node == NIL && state.filled == 0);
        state.refs = 0;
        self.vacant.push_back(&mut self.states, block.raw());
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
            self.stored -= state.filled as usize;
            self.stamp(block);
            self.shelve(block);
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

    /// Notes that one of the references, of a block that is held, borrows.
    pub(super) fn lend(&mut self, block: BlockId) {
        let state = &mut self.states[block.index()];
        state.borrows += 1;
        debug_assert!(state.borrows <= state.refs);
    }

    /// Notes that one of the references does not borrow any more.
    pub(super) fn unlend(&mut self, block: BlockId) {
        debug_assert!(self.states[block.index()].borrows > 0);
        self.states[block.index()].borrows -= 1;
    }

    /// References to a block; 0 for an id outside the pool.
    pub fn ref_count(&self, block: BlockId) -> usize {
        self.states.get(block.index()).map_or(0, |state| state.refs as usize)
    }

    /// Of these, those that borrow.
    pub(super) fn borrow_count(&self, block: BlockId) -> usize {
        self.states[block.index()].borrows as usize
    }

    /// Blocks of the pool.
    pub fn num_blocks(&self) -> usize {
        self.states.len()
    }

    /// Blocks that can be had: vacant or evictable.
    pub fn num_free(&self) -> usize {
        self.vacant.len() + self.num_evictable
    }

    /// Free blocks in which a prefix can still be found.
    pub fn num_evictable(&self) -> usize {
        self.num_evictable
    }

    /// Blocks that nobody holds, but that are pinned.
    pub(super) fn num_idle_pinned(&self) -> usize {
        self.idle_pinned.len()
    }

    /// Pinned blocks, held or not.
    pub(super) fn num_pinned(&self) -> usize {
        self.num_pinned
    }

    /// Slots with a committed token in blocks that are held, a shared block counted once.
    pub fn stored_tokens(&self) -> usize {
        self.stored
    }

    /// Whether a block can be allocated without evicting another.
    pub(super) fn has_vacant(&self) -> bool {
        !self.vacant.is_empty()
    }

    /// The published block that must be unpublished before `allocate` can succeed; None if it can, or nothing is free.
    pub(super) fn next_victim(&self, classes: &Classes) -> Option<BlockId> {
        if self.has_vacant() {
            return None;
        }
        let oldest = |class: &ClassId| {
            let front = self.evictable[usize::from(*class)].front()?;
            Some((classes.get(*class).priority, self.states[front as usize].tick, front))
        };
        self.classes_in_use().filter_map(|class| oldest(&class)).min().map(|(.., block)| BlockId::new(block))
    }

    /// A free published block whose time is over.
    pub(super) fn next_expired(&self, classes: &Classes) -> Option<BlockId> {
        self.classes_in_use().find_map(|class| {
            let front = self.evictable[usize::from(class)].front()?;
            let end = classes.get(class).expires(self.states[front as usize].released);
            (end != u64::MAX && end <= self.now).then_some(BlockId::new(front))
        })
    }

    pub(super) fn set_now(&mut self, now: u64) {
        self.now = now;
    }

    /// The index node that publishes the block.
    pub(super) fn node(&self, block: BlockId) -> Option<u32> {
        let node = self.states[block.index()].node;
        (node != NIL).then_some(node)
    }

    /// Notes who publishes the block and its retention, or that nobody does any more; a free block changes its list.
    pub(super) fn set_node(&mut self, block: BlockId, node: Option<(u32, ClassId)>) {
        self.relist(block, |state| match node {
            Some((node, class)) => (state.node, state.class) = (node, class),
            None => state.node = NIL,
        });
    }

    /// Changes the retention of a published block; if it is free, that counts as a use.
    pub(super) fn set_class(&mut self, block: BlockId, class: ClassId) {
        self.stamp(block);
        self.relist(block, |state| state.class = class);
    }

    /// Counts as a use of a free block.
    pub(super) fn touch(&mut self, block: BlockId) {
        if self.states[block.index()].refs == 0 {
            self.stamp(block);
            self.relist(block, |_| ());
        }
    }

    /// Retention of a published block.
    pub(super) fn class(&self, block: BlockId) -> ClassId {
        self.states[block.index()].class
    }

    /// When the block was last released.
    pub(super) fn released(&self, block: BlockId) -> u64 {
        self.states[block.index()].released
    }

    /// As if the block, which nobody holds and which is published, had been released then. O(1) unless others of its
    /// class were renewed while nobody held them.
    pub(super) fn set_released(&mut self, block: BlockId, released: u64) {
        self.unshelve(block);
        self.states[block.index()].released = released;
        let class = usize::from(self.states[block.index()].class);
        self.evictable[class].insert_by_release(&mut self.states, block.raw());
        self.count_shelved(class);
    }

    pub(super) fn pin_count(&self, block: BlockId) -> usize {
        self.states[block.index()].pins as usize
    }

    pub(super) fn pin(&mut self, block: BlockId) {
        self.num_pinned += usize::from(self.states[block.index()].pins == 0);
        self.relist(block, |state| state.pins += 1);
    }

    /// One pin less; a free block whose last it was counts as just used.
    pub(super) fn unpin(&mut self, block: BlockId) {
        debug_assert!(self.states[block.index()].pins > 0);
        self.num_pinned -= usize::from(self.states[block.index()].pins == 1);
        if self.states[block.index()].refs == 0 {
            self.stamp(block);
        }
        self.relist(block, |state| state.pins -= 1);
    }

    /// Whether the content is unreadable.
    pub(super) fn is_spoiled(&self, block: BlockId) -> bool {
        self.states[block.index()].spoiled
    }

    pub(super) fn spoil(&mut self, block: BlockId) {
        self.states[block.index()].spoiled = true;
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

    fn stamp(&mut self, block: BlockId) {
        self.ticks += 1;
        let state = &mut self.states[block.index()];
        (state.released, state.tick) = (self.now, self.ticks);
    }

    fn relist(&mut self, block: BlockId, change: impl FnOnce(&mut BlockState)) {
        let free = self.states[block.index()].refs == 0;
        if free {
            self.unshelve(block);
        }
        change(&mut self.states[block.index()]);
        if free {
            self.shelve(block);
        }
    }

    /// Puts a block that nobody holds onto its list.
    fn shelve(&mut self, block: BlockId) {
        let BlockState { pins, node, class, .. } = self.states[block.index()];
        if pins > 0 {
            self.idle_pinned.push_back(&mut self.states, block.raw());
        } else if node == NIL {
            self.vacant.push_front(&mut self.states, block.raw());
        } else {
            let class = usize::from(class);
            if class >= self.evictable.len() {
                self.evictable.resize(class + 1, FreeList::new());
            }
            self.evictable[class].push_back(&mut self.states, block.raw());
            self.count_shelved(class);
        }
    }

    fn count_shelved(&mut self, class: usize) {
        self.classes_in_use[class / 64] |= 1 << (class % 64);
        self.num_evictable += 1;
    }

    /// Takes a block that nobody holds off its list.
    fn unshelve(&mut self, block: BlockId) {
        let BlockState { pins, node, class, .. } = self.states[block.index()];
        if pins > 0 {
            self.idle_pinned.remove(&mut self.states, block.raw());
        } else if node == NIL {
            self.vacant.remove(&mut self.states, block.raw());
        } else {
            let class = usize::from(class);
            self.evictable[class].remove(&mut self.states, block.raw());
            if self.evictable[class].is_empty() {
                self.classes_in_use[class / 64] &= !(1 << (class % 64));
            }
            self.num_evictable -= 1;
        }
    }

    fn classes_in_use(&self) -> impl Iterator<Item = ClassId> + '_ {
        self.classes_in_use.iter().enumerate().flat_map(|(word, &bits)| {
            let mut bits = bits;
            std::iter::from_fn(move || {
                let bit = bits.trailing_zeros();
                bits &= bits.checked_sub(1)?;
                Some((word * 64) as ClassId + bit as ClassId)
            })
        })
    }

    /// Takes back a release, of a vacant block too.
    fn restore(&mut self, block: BlockId) {
        if self.states[block.index()].refs == 0 {
            self.unshelve(block);
            self.stored += self.states[block.index()].filled as usize;
        }
        self.states[block.index()].refs += 1;
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
        let mut num_evictable = 0;
        let lists = [(&self.vacant, None, false), (&self.idle_pinned, None, true)].into_iter();
        let classes = self.evictable.iter().enumerate().map(|(class, list)| (list, Some(class), false));
        for (list, class, pinned) in lists.chain(classes) {
            let mut last = 0;
            list.check(&self.states, |block| {
                let state = &self.states[block as usize];
                let published = if pinned { state.node != NIL } else { class.is_some() };
                if state.refs != 0
                    || (state.pins != 0) != pinned
                    || (state.node != NIL) != published
                    || class.is_some_and(|class| class != usize::from(state.class))
                    || std::mem::replace(&mut listed[block as usize], true)
                {
                    return Err(format!("block {block} is on the wrong list: {state:?}"));
                }
                if class.is_some() {
                    num_evictable += 1;
                    if state.released < last || state.released > self.now || state.tick > self.ticks {
                        return Err(format!("block {block} is not in the order of release: {state:?}"));
                    }
                    last = state.released;
                }
                Ok(())
            })?;
            if let Some(class) = class
                && (self.classes_in_use[class / 64] >> (class % 64) & 1 == 1) == list.is_empty()
            {
                return Err(format!("class {class} has {} blocks, which its bit denies", list.len()));
            }
        }
        if num_evictable != self.num_evictable {
            return Err(format!("{num_evictable} blocks are evictable, the counter says {}", self.num_evictable));
        }
        let (mut stored, mut pinned) = (0, 0);
        for (block, state) in self.states.iter().enumerate() {
            if listed[block] != (state.refs == 0) || state.borrows > state.refs {
                return Err(format!("block {block} is on a free list ({}): {state:?}", listed[block]));
            }
            stored += if state.refs > 0 { state.filled as usize } else { 0 };
            pinned += usize::from(state.pins > 0);
        }
        if (stored, pinned) != (self.stored, self.num_pinned) {
            return Err(format!(
                "{stored} tokens are stored and {pinned} blocks pinned, the counters say {} and {}",
                self.stored, self.num_pinned
            ));
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
    use super::super::retention::Retention;
    use super::*;
    use std::time::Duration;

    fn classes(wishes: &[(u64, u8)]) -> Classes {
        let mut classes = Classes::new();
        for (class, &(ttl, priority)) in wishes.iter().enumerate() {
            let retention = Retention { ttl: Some(Duration::from_nanos(ttl)), priority };
            assert_eq!(classes.acquire(retention).unwrap(), class as ClassId);
        }
        classes
    }

    #[test]
    fn published_blocks_are_taken_last_and_in_order_of_release() {
        let classes = classes(&[(100, 50)]);
        let mut pool = BlockPool::new(3).unwrap();
        let [a, b, c] = [(); 3].map(|()| pool.allocate().unwrap());
        assert_eq!((pool.allocate(), pool.next_victim(&classes)), (None, None));
        pool.set_node(a, Some((7, 0)));
        pool.set_node(b, Some((8, 0)));
        pool.release_all(&[a, b, c]).unwrap();
        pool.check().unwrap();
        assert_eq!((pool.num_free(), pool.num_evictable()), (3, 2));
        assert_eq!(pool.allocate(), Some(c));
        assert_eq!((pool.allocate(), pool.next_victim(&classes)), (None, Some(b)));
        pool.set_node(b, None);
        assert_eq!((pool.next_victim(&classes), pool.allocate()), (None, Some(b)));
        pool.retain(a).unwrap();
        pool.check().unwrap();
        assert_eq!((pool.num_free(), pool.ref_count(a)), (0, 1));
    }

    #[test]
    fn lower_priorities_go_first_pinned_blocks_never_and_time_runs_per_class() {
        let classes = classes(&[(100, 50), (10, 50), (1000, 20)]);
        let mut pool = BlockPool::new(4).unwrap();
        let blocks = [(); 4].map(|()| pool.allocate().unwrap());
        for (block, class) in blocks.into_iter().zip([0, 1, 2, 2]) {
            pool.set_node(block, Some((block.raw(), class)));
        }
        for block in blocks {
            pool.release(block).unwrap();
        }
        assert_eq!(pool.next_victim(&classes), Some(blocks[2]));
        pool.pin(blocks[2]);
        assert_eq!(pool.next_victim(&classes), Some(blocks[3]));
        assert_eq!((pool.num_free(), pool.num_idle_pinned(), pool.num_pinned()), (3, 1, 1));
        pool.retain(blocks[3]).unwrap();
        assert_eq!(pool.next_victim(&classes), Some(blocks[0]));
        pool.set_now(9);
        assert_eq!(pool.next_expired(&classes), None);
        pool.set_now(10);
        assert_eq!(pool.next_expired(&classes), Some(blocks[1]));
        pool.touch(blocks[1]);
        assert_eq!(pool.next_expired(&classes), None);
        pool.check().unwrap();
        pool.unpin(blocks[2]);
        pool.check().unwrap();
        assert_eq!(pool.next_victim(&classes), Some(blocks[2]));
    }
}
