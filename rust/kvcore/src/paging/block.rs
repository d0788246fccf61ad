//! Names of blocks, and the few words that are kept about each.
#![forbid(unsafe_code)]

/// "No block", "no node": the one 32-bit value that is never an index.
pub(super) const NIL: u32 = u32::MAX;

/// One block of the pool: room for the K and V of `block_size` tokens in every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(u32);

impl BlockId {
    /// No block: what a table says where a window's block was returned.
    pub const NONE: Self = Self(NIL);

    /// The block with this index.
    pub const fn new(index: u32) -> Self {
        Self(index)
    }

    /// Position in the pool, `0..num_blocks`.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    pub(super) const fn raw(self) -> u32 {
        self.0
    }
}

/// A copy that sharing demands: all layers of `src` go to `dst` before anything is written to `dst` or `src`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockCopy {
    /// The block that is read.
    pub src: BlockId,
    /// The block that is overwritten; nobody else holds it.
    pub dst: BlockId,
}

/// What the pool knows of one block. Kept together so that a random access costs one cache line.
#[derive(Debug, Clone)]
pub(super) struct BlockState {
    /// Block tables that hold it.
    pub refs: u32,
    /// Leading slots with a committed token.
    pub filled: u32,
    /// Node of the prefix index that publishes it, or [`NIL`].
    pub node: u32,
    /// Neighbours in the list it is on while `refs` is 0.
    pub prev: u32,
    pub next: u32,
}

impl BlockState {
    pub(super) const EMPTY: Self = Self { refs: 0, filled: 0, node: NIL, prev: NIL, next: NIL };
}
