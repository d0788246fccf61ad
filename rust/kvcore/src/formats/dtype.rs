//! Names and sizes of the formats that K and V can be stored in.
#![forbid(unsafe_code)]

use std::fmt;
use std::str::FromStr;

use crate::Error;

/// How one value of K or V is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// 32-bit float; attention over it is full f32 arithmetic.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// OCP fp8 e4m3.
    Fp8E4M3,
    /// OCP fp8 e5m2.
    Fp8E5M2,
    /// 8-bit integers, symmetric, one scale for each token and head.
    Int8,
    /// 4-bit integers in groups of dimensions, a scale and a minimum for each token, head and group.
    Int4,
}

/// Where the scales of stored values come from: stored = value / scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleMode {
    /// One scale for each layer and head, given from outside: 1, or calibrated. Only fp8 takes others than 1.
    Static,
    /// Each token's K and V in each head have a scale of their own, computed when they are written and kept beside
    /// them. (int4 has them for each group of dimensions.)
    PerTokenHead,
}

impl KvDtype {
    /// All formats.
    pub const ALL: [KvDtype; 7] =
        [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Fp8E4M3, KvDtype::Fp8E5M2, KvDtype::Int8, KvDtype::Int4];

    /// Bits of one value, scales not counted.
    pub const fn bits(self) -> usize {
        match self {
            KvDtype::F32 => 32,
            KvDtype::F16 | KvDtype::Bf16 => 16,
            KvDtype::Fp8E4M3 | KvDtype::Fp8E5M2 | KvDtype::Int8 => 8,
            KvDtype::Int4 => 4,
        }
    }

    /// Values of the summed dimension that lie side by side: what the kernels' format asks for.
    pub const fn step(self) -> usize {
        match self {
            KvDtype::F32 | KvDtype::F16 => 1,
            KvDtype::Bf16 | KvDtype::Fp8E4M3 | KvDtype::Fp8E5M2 | KvDtype::Int8 | KvDtype::Int4 => 2,
        }
    }

    /// The scale modes that the format can have, the usual one first.
    pub const fn scale_modes(self) -> &'static [ScaleMode] {
        match self {
            KvDtype::F32 | KvDtype::F16 | KvDtype::Bf16 => &[ScaleMode::Static],
            KvDtype::Fp8E4M3 | KvDtype::Fp8E5M2 => &[ScaleMode::Static, ScaleMode::PerTokenHead],
            KvDtype::Int8 | KvDtype::Int4 => &[ScaleMode::PerTokenHead],
        }
    }

    /// The scale mode of a caller who names none.
    pub const fn default_scale_mode(self) -> ScaleMode {
        self.scale_modes()[0]
    }

    /// Whether it is one of the two fp8 formats.
    pub const fn is_fp8(self) -> bool {
        matches!(self, KvDtype::Fp8E4M3 | KvDtype::Fp8E5M2)
    }

    /// The full name: `float32`, `float16`, `bfloat16`, `fp8_e4m3`, `fp8_e5m2`, `int8` or `int4`.
    pub const fn name(self) -> &'static str {
        match self {
            KvDtype::F32 => "float32",
            KvDtype::F16 => "float16",
            KvDtype::Bf16 => "bfloat16",
            KvDtype::Fp8E4M3 => "fp8_e4m3",
            KvDtype::Fp8E5M2 => "fp8_e5m2",
            KvDtype::Int8 => "int8",
            KvDtype::Int4 => "int4",
        }
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KvDtype {
    type Err = Error;

    /// Takes full names, and the short ones `f32`, `f16`, `bf16` and `fp8` (`fp8_e4m3`).
    fn from_str(name: &str) -> Result<Self, Error> {
        match name {
            "float32" | "f32" => Ok(KvDtype::F32),
            "float16" | "f16" => Ok(KvDtype::F16),
            "bfloat16" | "bf16" => Ok(KvDtype::Bf16),
            "fp8_e4m3" | "fp8" => Ok(KvDtype::Fp8E4M3),
            "fp8_e5m2" => Ok(KvDtype::Fp8E5M2),
            "int8" => Ok(KvDtype::Int8),
            "int4" => Ok(KvDtype::Int4),
            other => Err(Error::InvalidArgument(format!(
                "KV cache dtype: expected float32 (f32), float16 (f16), bfloat16 (bf16), fp8_e4m3 (fp8), fp8_e5m2, \
                 int8 or int4, got {other:?}"
            ))),
        }
    }
}

impl ScaleMode {
    /// `static` or `per_token_head`.
    pub const fn name(self) -> &'static str {
        match self {
            ScaleMode::Static => "static",
            ScaleMode::PerTokenHead => "per_token_head",
        }
    }
}

impl fmt::Display for ScaleMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ScaleMode {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        match name {
            "static" => Ok(ScaleMode::Static),
            "per_token_head" => Ok(ScaleMode::PerTokenHead),
            other => {
                Err(Error::InvalidArgument(format!("scale_mode: expected static or per_token_head, got {other:?}")))
            }
        }
    }
}
