//! A doubly linked list whose links live in the block array itself: every operation is O(1) and allocates nothing.
//!
//! ```text
//! head <-> a <-> b <-> ... <-> tail        oldest at the head
//! ```
#![forbid(unsafe_code)]

use super::block::{BlockState, NIL};

/// Ends and length of one list. Several lists may run through the same array; a block is on at most one of them.
#[derive(Debug, Clone)]
pub(super) struct FreeList {
    head: u32,
    tail: u32,
    len: usize,
}

impl FreeList {
    pub const fn new() -> Self {
        Self { head: NIL, tail: NIL, len: 0 }
    }

    pub const fn len(&self) -> usize {
        self.len
    }

    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The oldest block.
    pub fn front(&self) -> Option<u32> {
        (self.head != NIL).then_some(self.head)
    }

    pub fn push_back(&mut self, states: &mut [BlockState], block: u32) {
        states[block as usize].prev = self.tail;
        states[block as usize].next = NIL;
        match self.tail {
            NIL => self.head = block,
            tail => states[tail as usize].next = block,
        }
        self.tail = block;
        self.len += 1;
    }

    /// Puts a block behind the last one that was not released later than it.
    pub fn insert_by_release(&mut self, states: &mut [BlockState], block: u32) {
        let released = states[block as usize].released;
        let mut before = self.tail;
        while before != NIL && states[before as usize].released > released {
            before = states[before as usize].prev;
        }
        let after = match before {
            NIL => return self.push_front(states, block),
            _ if before == self.tail => return self.push_back(states, block),
            before => std::mem::replace(&mut states[before as usize].next, block),
        };
        states[after as usize].prev = block;
        states[block as usize].prev = before;
        states[block as usize].next = after;
        self.len += 1;
    }

    pub fn push_front(&mut self, states: &mut [BlockState], block: u32) {
        states[block as usize].prev = NIL;
        states[block as usize].next = self.head;
        match self.head {
            NIL => self.tail = block,
            head => states[head as usize].prev = block,
        }
        self.head = block;
        self.len += 1;
    }

    /// Takes a block out, wherever it stands. It must be on this list.
    pub fn remove(&mut self, states: &mut [BlockState], block: u32) {
        let BlockState { prev, next, .. } = states[block as usize];
        match prev {
            NIL => self.head = next,
            prev => states[prev as usize].next = next,
        }
        match next {
            NIL => self.tail = prev,
            next => states[next as usize].prev = prev,
        }
        states[block as usize].prev = NIL;
        states[block as usize].next = NIL;
        self.len -= 1;
    }

    /// Calls `visit` on every block from the oldest on; an error if the links do not form one list of `len` blocks.
    pub fn check(&self, states: &[BlockState], mut visit: impl FnMut(u32) -> Result<(), String>) -> Result<(), String> {
        let (mut prev, mut at, mut count) = (NIL, self.head, 0);
        while at != NIL {
            count += 1;
            let state =
                states.get(at as usize).ok_or(format!("a free list leads to block {at}, which does not exist"))?;
            if state.prev != prev || count > self.len {
                return Err(format!("the links of a free list are broken at block {at}"));
            }
            visit(at)?;
            (prev, at) = (at, state.next);
        }
        if prev != self.tail || count != self.len {
            return Err(format!("a free list says that it has {} blocks and has {count}", self.len));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(list: &FreeList, states: &[BlockState]) -> Vec<u32> {
        let mut blocks = Vec::new();
        list.check(states, |block| {
            blocks.push(block);
            Ok(())
        })
        .unwrap();
        blocks
    }

    #[test]
    fn blocks_leave_from_head_middle_and_tail() {
        let mut states = vec![BlockState::EMPTY; 5];
        let mut list = FreeList::new();
        for block in 0..4 {
            list.push_back(&mut states, block);
        }
        list.push_front(&mut states, 4);
        assert_eq!(order(&list, &states), [4, 0, 1, 2, 3]);
        list.remove(&mut states, 1);
        list.remove(&mut states, 4);
        list.remove(&mut states, 3);
        assert_eq!(order(&list, &states), [0, 2]);
        list.remove(&mut states, 0);
        list.remove(&mut states, 2);
        assert_eq!((order(&list, &states), list.front(), list.len()), (vec![], None, 0));
        list.push_back(&mut states, 2);
        assert_eq!(order(&list, &states), [2]);
    }

    #[test]
    fn blocks_are_inserted_by_their_time_of_release() {
        let mut states = vec![BlockState::EMPTY; 6];
        let mut list = FreeList::new();
        for (block, released) in [5, 3, 9, 5, 1, 7].into_iter().enumerate() {
            states[block].released = released;
            list.insert_by_release(&mut states, block as u32);
        }
        assert_eq!(order(&list, &states), [4, 1, 0, 3, 5, 2]);
    }
}
