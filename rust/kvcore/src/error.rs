//! One error enum for the whole crate; every public function that can be given bad input returns it.
#![forbid(unsafe_code)]

/// What can go wrong. The Python package maps each variant to one exception class.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The pool cannot give the blocks that a plan needs; nothing was changed.
    #[error("out of KV blocks: {needed} needed, {available} available (the pool has {total})")]
    OutOfBlocks {
        /// Blocks that the whole call needs.
        needed: usize,
        /// Blocks that are free or hold only evictable cached prefixes.
        available: usize,
        /// Blocks of the pool.
        total: usize,
    },
    /// An argument is out of its range or does not fit the others; says what was expected and what came.
    #[error("{0}")]
    InvalidArgument(String),
    /// A sequence handle that was freed, never existed or belongs to another cache.
    #[error("invalid sequence handle: {0}")]
    InvalidHandle(String),
    /// A batch used outside its life: after a newer plan, a truncate, fork or free of one of its sequences.
    #[error("stale batch: {0}")]
    StaleBatch(String),
    /// Calls in an order that would read or publish what was not written.
    #[error("{0}")]
    InvalidState(String),
    /// Memory for the pool cannot be had.
    #[error("cannot reserve {bytes} bytes ({what}): {reason}")]
    OutOfMemory {
        /// Bytes that were asked for.
        bytes: usize,
        /// What for.
        what: &'static str,
        /// The system's words.
        reason: String,
    },
    /// More blocks would be pinned than the cache allows; nothing was changed.
    #[error("too many pinned KV blocks: {needed} more to pin, {pinned} pinned, {limit} allowed (the pool has {total})")]
    PinLimit {
        /// Blocks that the pin would add.
        needed: usize,
        /// Blocks that are pinned.
        pinned: usize,
        /// Blocks that may be pinned.
        limit: usize,
        /// Blocks of the pool.
        total: usize,
    },
    /// A file of saved blocks that is damaged, or belongs to another model, layout or version.
    #[error("{0}")]
    Checkpoint(String),
    /// A SIMD level that this CPU or build does not have.
    #[error("{0}")]
    UnsupportedSimd(String),
    /// The spill file does not give or take a block; its slot holds nothing.
    #[error("spill file: {message}")]
    Spill {
        /// The system's kind of error; `InvalidData` for bytes that are not what was written, `NotFound` for a slot that
        /// holds nothing.
        kind: std::io::ErrorKind,
        /// What was tried, and the system's words.
        message: String,
    },
    /// The caller's interrupt check asked to stop; the call's output is incomplete.
    #[error("interrupted")]
    Interrupted,
}

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
