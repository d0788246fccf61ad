//! What is in a block: bytes only, never who owns it.
#![forbid(unsafe_code)]

pub mod layout;
mod rows;
pub mod scales;
pub mod store;
pub mod view;

pub use crate::formats::{KvDtype, ScaleMode, fp8};
pub use layout::{Layout, TILE};
pub use scales::{Scales, check_scale};
pub use store::KvStore;
pub use view::{LayerView, expand_int4_k_tile, expand_int4_v_tile};
