//! The only home of ISA code: one small trait, a scalar truth, and files that hold intrinsics only.
//!
//! ```text
//! algorithm (attention, linear, ops)  =  generic code over `S: Simd`, 16 logical f32 lanes on every level
//! level.dispatch(work)                =  run-time choice; the CPU's features are enabled around the whole of `work`
//! ```
//!
//! A value of an ISA type (`Avx2`, ...) proves that the CPU has the features: its `new()` returns `None`
//! otherwise, and there is no other way to get one. That is why the trait's methods are safe. Since every level
//! has the same 16 logical lanes, sums run in the same order on each, and levels differ only by the rounding of
//! their dot products.

mod format;
mod level;
pub mod math;
mod prefetch;
mod scalar;
pub mod tile;
mod tiles;
mod vector;

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
#[cfg(target_arch = "aarch64")]
mod neon;

pub use format::{Bf16, Dot, F16, F32, Format, Fp8E4M3, Fp8E5M2, Int8, TiledBf16};
pub use level::Level;
pub use prefetch::prefetch;
pub use tiles::{Fours, Left, Pairs, Shaped, Sums, TILE_ROWS, TILE_VALUES, TILE_WORDS, Tiles, TwoTiles};
pub use vector::{LANES, Simd, Work};

#[cfg(test)]
mod tests;
