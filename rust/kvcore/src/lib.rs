//! The KV cache of large language models: paged blocks with copy-on-write sharing, prefix reuse, number
//! formats and SIMD attention straight over the block tables. Pure Rust; the Python package binds to it.
//!
//! Modules, from the bottom up: [`error`], [`paging`] (who owns which block), [`formats`] (how a value is stored), [`simd`]
//! (the only home of ISA code), [`storage`] (what is in a block), [`threads`], [`attention`], [`linear`], [`ops`], and [`cache`], which
//! joins paging and storage.

pub mod attention;
pub mod cache;
pub mod error;
pub mod formats;
pub mod linear;
pub mod ops;
pub mod paging;
mod shape;
pub mod simd;
pub mod storage;
pub mod threads;

pub use error::{Error, Result};
