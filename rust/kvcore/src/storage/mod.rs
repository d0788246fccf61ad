//! What is in a block: bytes only, never who owns it.
#![forbid(unsafe_code)]

pub mod dtype;
pub mod fp8;
pub mod layout;
pub mod persist;
mod positioned;
pub mod spill;
pub mod store;

pub use dtype::KvDtype;
pub use layout::{Layout, TILE};
pub use store::{KvStore, LayerView, Scales};
