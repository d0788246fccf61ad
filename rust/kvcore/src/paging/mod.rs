//! Who owns which block: ids and token ids only, never bytes.
//!
//! From the bottom up: [`block`] (names), `free_list` (O(1) lists over a fixed array), [`pool`] (reference counts),
//! [`prefix`] (which block holds which tokens), [`sequence`] and [`batch`] (what callers hold), and [`manager`], the
//! only one that callers need.
#![forbid(unsafe_code)]

pub mod batch;
pub mod block;
mod check;
mod config;
mod events;
mod free_list;
mod hash;
mod key;
mod access;
pub mod manager;
mod moves;
mod pins;
pub mod pool;
pub mod prefix;
mod retention;
pub mod sequence;
mod simple;
mod stats;
mod transfer;

pub use batch::{Batch, BatchSeq};
pub use block::{BlockCopy, BlockId, SlotId};
pub use config::{AddOptions, GroupConfig, ManagerConfig};
pub use events::{Cause, Event, Events};
pub use hash::{HashFn, hash_block};
pub use key::{Key, OwnedKey};
pub use manager::{BlockManager, Found};
pub use moves::Move;
pub use pins::PinId;
pub use pool::BlockPool;
pub use retention::Retention;
pub use sequence::SeqId;
pub use stats::{BlockInfo, Occupancy, PagingStats};
pub use transfer::{ImportEntry, Place, PrefixEntry};
