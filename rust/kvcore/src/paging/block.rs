//! Names of blocks and slots, and the few words that are kept about each.
#![forbid(unsafe_code)]

/// "No block", "no node": the one 32-bit value that is never an index.
pub(super) const NIL: u32 = u32::MAX;

/// One block of a pool: room for the K and V of `block_size` tokens in every layer of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(u32);

impl BlockId {
    /// No block: what a table says where a window's block was returned.
    pub const NONE: Self = Self(NIL);

    /// The block with this index.
    pub const fn new(index: u32) -> Self {
        Self(index)
    }

    /// Position in the pool, `0..num_blocks`; a number beyond any pool for [`BlockId::NONE`].
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// Whether this is [`BlockId::NONE`].
    pub const fn is_none(self) -> bool {
        self.0 == NIL
    }

    pub(super) const fn raw(self) -> u32 {
        self.0
    }
}

/// One place of the second tier: room for the bytes of one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(u32);

impl SlotId {
    /// The slot with this index.
    pub const fn new(index: u32) -> Self {
        Self(index)
    }

    /// Position in the tier, `0..spill_slots`.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    pub(super) const fn raw(self) -> u32 {
        self.0
    }
}

/// What the pool knows of one block. Kept together so that a random access costs one cache line.
#[derive(Debug, Clone)]
pub(super) struct BlockState {
    /// Block tables that hold it.
    pub refs: u32,
    /// Of these, tables that only borrow it: they read the leading slots that they matched and will not write.
    pub borrows: u32,
    /// Pins on it.
    pub pins: u32,
    /// Leading slots with a committed token.
    pub filled: u32,
    /// Node of the prefix index that publishes it, or [`NIL`].
    pub node: u32,
    /// Neighbours in the list it is on while `refs` is 0.
    pub prev: u32,
    pub next: u32,
    /// Retention class of the node that publishes it.
    pub class: u16,
    /// Its content turned out unreadable: it is not published again.
    pub spoiled: bool,
    /// When its last holder released it: the caller's clock in nanoseconds, and the number of that release.
    pub released: u64,
    pub tick: u64,
}

impl BlockState {
    pub(super) const EMPTY: Self = Self {
        refs: 0,
        borrows: 0,
        pins: 0,
        filled: 0,
        node: NIL,
        prev: NIL,
        next: NIL,
        class: 0,
        spoiled: false,
        released: 0,
        tick: 0,
    };
}
