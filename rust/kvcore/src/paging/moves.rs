//! What the caller has to carry out on bytes, because only it has bytes.
#![forbid(unsafe_code)]

use super::block::{BlockId, SlotId};

/// One piece of work on whole blocks, all layers of a group. The moves of a call are carried out in their order and
/// before any write: a block that one move reads may be overwritten by a later one.
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
