//! Which kernels multiply what a cache holds.
#![forbid(unsafe_code)]

use crate::simd::{Level, TILE_WORDS};
use crate::storage::{KvDtype, Layout};

/// Whether tile registers multiply this layout on this level: bf16, and what is expanded to it. A step of a tile takes 16
/// dimensions at least.
pub fn tiled(level: Level, layout: &Layout) -> bool {
    level.has_tiles()
        && layout.dtype.bits() <= 16
        && layout.dtype != KvDtype::F16
        && layout.k_dim.is_multiple_of(TILE_WORDS)
}

/// `$body` with `$F` as the format that a layout's tiles are multiplied in.
macro_rules! with_format {
    ($level:expr, $layout:expr, |$F:ident| $body:expr) => {
        match $layout.dtype {
            _ if crate::attention::format::tiled($level, $layout) => with_format!(@ $F TiledBf16, $body),
            crate::storage::KvDtype::F32 => with_format!(@ $F F32, $body),
            crate::storage::KvDtype::F16 => with_format!(@ $F F16, $body),
            crate::storage::KvDtype::Bf16 | crate::storage::KvDtype::Int4 => with_format!(@ $F Bf16, $body),
            crate::storage::KvDtype::Fp8E4M3 => with_format!(@ $F Fp8E4M3, $body),
            crate::storage::KvDtype::Fp8E5M2 => with_format!(@ $F Fp8E5M2, $body),
            crate::storage::KvDtype::Int8 => with_format!(@ $F Int8, $body),
        }
    };
    (@ $F:ident $format:ident, $body:expr) => {{
        type $F = crate::simd::$format;
        $body
    }};
}
pub(super) use with_format;
