//! What is in a block: bytes only, never who owns it.

mod arena;
pub mod clean;
pub mod expand;
pub mod layout;
pub mod persist;
mod positioned;
mod rows;
pub mod scales;
pub mod spill;
pub mod store;
pub mod strided;
mod token;
pub mod view;

pub use crate::formats::{KvDtype, ScaleMode, fp8};
pub use arena::Frozen;
pub use clean::Cleaner;
pub use expand::{expand_int4_k_tile, expand_int4_v_tile, expand_k_tile, expand_v_tile};
pub use layout::{BLOCK_SIZES, Layout, TILE};
pub use scales::{Scales, check_scale};
pub use spill::SpillFile;
pub use store::KvStore;
pub use strided::{Strided, TileArrays};
pub use view::LayerView;
