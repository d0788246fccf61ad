//! What is in a block: bytes only, never who owns it.

pub mod fp8;
