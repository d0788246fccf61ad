//! What happened to blocks since somebody last asked, for routers and monitors.
//!
//! A ring of bounded length: the oldest events give way, and how many did is told.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use super::block::BlockId;

/// Why a block can no longer be found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Cause {
    /// Its space, or that of a block before it, was needed.
    Lru,
    /// Its time to live, or that of a block before it, was over.
    Expired,
    /// The prefix cache was reset.
    Reset,
    /// Another block holds the same tokens and more, or its own holder went back and wrote other tokens.
    Replaced,
    /// It went to the second tier; a prompt that begins with it brings it back.
    Spilled,
    /// Whoever has the bytes could not write it to the second tier, or read it from there or from a file.
    Failed,
}

impl Cause {
    /// `lru`, `expired`, `reset`, `replaced`, `spilled` or `failed`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Expired => "expired",
            Self::Reset => "reset",
            Self::Replaced => "replaced",
            Self::Spilled => "spilled",
            Self::Failed => "failed",
        }
    }
}

/// One thing that happened to one block of one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The block can be found. A block that is found with few tokens is stored a second time when it is full.
    Stored {
        /// The block.
        block: BlockId,
        /// Its group.
        group: usize,
        /// Chained hash of its tokens and all before them, and of the key.
        hash: u128,
        /// The same of the block before it, or of the key alone.
        parent_hash: u128,
        /// Tokens in it.
        num_tokens: usize,
    },
    /// The block can no longer be found.
    Removed {
        /// The block. [`BlockId::NONE`] for a block that was in the second tier.
        block: BlockId,
        /// Its group.
        group: usize,
        /// Chained hash of its tokens when it went.
        hash: u128,
        /// Why.
        cause: Cause,
    },
    /// A sequence was about to write into a block that others can read.
    Copied {
        /// The group of both.
        group: usize,
        /// The block that is shared.
        src: BlockId,
        /// The sequence's own from now on.
        dst: BlockId,
    },
}

/// Events in their order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Events {
    /// The newest of them.
    pub list: Vec<Event>,
    /// Older ones that found no room.
    pub dropped: u64,
}

/// The ring. Those who only look at the cache may empty it: a monitor must not wait until nobody else reads.
#[derive(Debug)]
pub(super) struct EventLog {
    ring: Mutex<Ring>,
    max: usize,
}

#[derive(Debug, Default)]
struct Ring {
    events: VecDeque<Event>,
    dropped: u64,
}

impl EventLog {
    pub fn new(max: usize) -> Self {
        Self { ring: Mutex::default(), max }
    }

    /// Whether anybody will hear of it.
    pub fn is_on(&self) -> bool {
        self.max > 0
    }

    pub fn push(&mut self, event: Event) {
        if self.max == 0 {
            return;
        }
        let ring = self.ring.get_mut().unwrap_or_else(PoisonError::into_inner);
        if ring.events.len() == self.max {
            ring.events.pop_front();
            ring.dropped += 1;
        }
        ring.events.push_back(event);
    }

    /// All of them, to one caller: who comes while another takes them finds none left.
    pub fn take(&self) -> Events {
        let Ok(mut ring) = self.ring.try_lock() else { return Events::default() };
        let ring = std::mem::take(&mut *ring);
        Events { list: ring.events.into(), dropped: ring.dropped }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_give_way_and_are_counted() {
        let event = |block| Event::Copied { group: 0, src: BlockId::new(block), dst: BlockId::NONE };
        let mut log = EventLog::new(2);
        (0..5).for_each(|block| log.push(event(block)));
        assert_eq!(log.take(), Events { list: vec![event(3), event(4)], dropped: 3 });
        assert_eq!(log.take(), Events::default());
        let mut off = EventLog::new(0);
        off.push(event(1));
        assert_eq!((off.is_on(), off.take()), (false, Events::default()));
    }
}
