//! The number formats of stored values, as plain functions of one value or one group of values: the truth that the
//! vector code is tested against. A leaf: it knows neither storage nor vectors.
#![forbid(unsafe_code)]

pub mod codec;
pub mod dtype;
pub mod fp8;
pub mod half_float;
pub mod int4;
pub mod int8;

pub use dtype::{KvDtype, ScaleMode};
