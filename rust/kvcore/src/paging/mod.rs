//! Who owns which block: ids and token ids only, never bytes.
//!
//! From the bottom up: `block` (names), `free_list` (O(1) lists over a fixed array), `retention` (how long a prefix
//! stays), [`pool`] (reference counts), `group` (a pool with its window and second tier), `prefix` and `siblings` (which
//! block holds which tokens), `blocks`, `publish` and `spill` (pools and index, changed together), `sequence` and
//! `batch` (what callers hold), and [`manager`], the only one that callers need; its calls are in `admit`, `plan`,
//! `commit`, `beams`, `pins`, `holds`, `transfer`, `restore` and `stats`.
#![forbid(unsafe_code)]

mod access;
mod admit;
mod batch;
mod beams;
mod block;
mod blocks;
mod check;
mod commit;
mod config;
mod events;
mod free_list;
mod group;
mod hash;
mod holds;
mod key;
pub mod manager;
mod moves;
mod pins;
mod plan;
pub mod pool;
mod prefix;
mod publish;
mod restore;
mod retention;
mod room;
mod sequence;
mod siblings;
mod spill;
mod stats;
mod transfer;

pub use admit::Found;
pub use batch::{Batch, BatchSeq};
pub use block::{BlockId, SlotId};
pub use config::{AddOptions, GroupConfig, ManagerConfig};
pub use events::{Cause, Event, Events};
pub use hash::{HashFn, hash_block};
pub use holds::{Held, HoldId};
pub use key::{Key, OwnedKey};
pub use manager::BlockManager;
pub use moves::{Carrier, Move};
pub use pins::PinId;
pub use pool::BlockPool;
pub use restore::{Restored, Saved};
pub use retention::Retention;
pub use sequence::SeqId;
pub use stats::{BlockInfo, Occupancy, PagingStats};
pub use transfer::{ImportEntry, Place, PrefixEntry};
