//! Who owns which block: ids and token ids only, never bytes.
//!
//! From the bottom up: [`block`] (names), `free_list` (O(1) lists over a fixed array), [`pool`] (reference counts),
//! [`prefix`] (which block holds which tokens), [`sequence`] and [`batch`] (what callers hold), and [`manager`], the
//! only one that callers need.
#![forbid(unsafe_code)]

pub mod batch;
pub mod block;
mod check;
mod free_list;
pub mod manager;
pub mod pool;
pub mod prefix;
pub mod sequence;

pub use batch::{Batch, BatchSeq};
pub use block::{BlockCopy, BlockId};
pub use manager::{BlockManager, ManagerConfig, PagingStats};
pub use pool::BlockPool;
pub use prefix::{HashFn, hash_block};
pub use sequence::SeqId;
