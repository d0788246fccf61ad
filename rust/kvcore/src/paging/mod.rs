//! To come.
mod block;
pub use block::{BlockCopy, BlockId};
