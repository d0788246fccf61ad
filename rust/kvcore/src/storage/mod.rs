//! What is in a block: bytes only, never who owns it.
#![forbid(unsafe_code)]

pub mod expand;
pub mod layout;
mod rows;
pub mod scales;
pub mod store;
pub mod view;

pub use crate::formats::{KvDtype, ScaleMode, fp8};
pub use expand::{expand_int4_k_tile, expand_int4_v_tile, expand_k_tile, expand_v_tile};
pub use layout::{Layout, TILE};
pub use scales::{Scales, check_scale};
pub use store::KvStore;
pub use view::LayerView;
