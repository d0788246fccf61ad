//! What has to be done with bytes, and who does it: the manager has none.
#![forbid(unsafe_code)]

use super::block::{BlockId, SlotId};

/// One piece of work on whole blocks, all layers of a group. Moves are carried out in their order and before any write: a
/// block that one move reads may be overwritten by a later one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Move {
    /// A copy that sharing demands.
    Copy {
        /// The group whose pool both are in.
        group: usize,
        /// The block that is read.
        src: BlockId,
        /// The block that is overwritten; nobody else can read it.
        dst: BlockId,
    },
    /// A cached block goes to the second tier, because its space is needed.
    Spill {
        /// The group whose pool and tier these are.
        group: usize,
        /// The block that is read.
        block: BlockId,
        /// The slot that is overwritten.
        slot: SlotId,
    },
    /// A spilled block comes back, because a prompt begins with its tokens. The slot is free afterwards.
    Fetch {
        /// The group whose pool and tier these are.
        group: usize,
        /// The slot that is read.
        slot: SlotId,
        /// The block that is overwritten.
        block: BlockId,
    },
}

/// Whoever has the bytes. The second tier may fail, and the manager has to know it before it decides anything else.
///
/// A list of moves is one that notes them for later, and takes for granted that they will succeed.
pub trait Carrier {
    /// Carries out a move. False for a spill whose slot could not be written: the block is evicted then. Nothing else may
    /// fail: what is fetched was read by [`Carrier::can_fetch`].
    fn carry_out(&mut self, step: Move) -> bool;

    /// Reads what is in a slot and keeps it for the fetch that follows. False if it is not what was spilled: it is
    /// forgotten then, and no block gave way to it.
    fn can_fetch(&mut self, group: usize, slot: SlotId) -> bool;
}

impl Carrier for Vec<Move> {
    fn carry_out(&mut self, step: Move) -> bool {
        self.push(step);
        true
    }

    fn can_fetch(&mut self, _group: usize, _slot: SlotId) -> bool {
        true
    }
}
