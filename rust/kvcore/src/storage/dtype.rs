//! The number formats that K and V can be stored in.
#![forbid(unsafe_code)]

use std::fmt;
use std::str::FromStr;

use super::fp8;
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
    /// OCP fp8 e4m3, one scale for K and one for V.
    Fp8E4M3,
}

impl KvDtype {
    /// All formats.
    pub const ALL: [KvDtype; 4] = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Fp8E4M3];

    /// Bytes of one value.
    pub const fn size(self) -> usize {
        match self {
            KvDtype::F32 => 4,
            KvDtype::F16 | KvDtype::Bf16 => 2,
            KvDtype::Fp8E4M3 => 1,
        }
    }

    /// Values of the summed dimension that lie side by side: what the kernels' format asks for.
    pub const fn step(self) -> usize {
        match self {
            KvDtype::F32 | KvDtype::F16 => 1,
            KvDtype::Bf16 | KvDtype::Fp8E4M3 => 2,
        }
    }

    /// The full name: `float32`, `float16`, `bfloat16` or `fp8_e4m3`.
    pub const fn name(self) -> &'static str {
        match self {
            KvDtype::F32 => "float32",
            KvDtype::F16 => "float16",
            KvDtype::Bf16 => "bfloat16",
            KvDtype::Fp8E4M3 => "fp8_e4m3",
        }
    }

    /// Store `x` in the first [`Self::size`] bytes of `out`: rounded to nearest, ties to even; fp8 saturates.
    #[inline(always)]
    pub fn encode(self, x: f32, out: &mut [u8]) {
        match self {
            KvDtype::F32 => out[..4].copy_from_slice(&x.to_ne_bytes()),
            KvDtype::F16 => out[..2].copy_from_slice(&half::f16::from_f32(x).to_ne_bytes()),
            KvDtype::Bf16 => out[..2].copy_from_slice(&half::bf16::from_f32(x).to_ne_bytes()),
            KvDtype::Fp8E4M3 => out[0] = fp8::f32_to_e4m3(x),
        }
    }

    /// The value stored in the first [`Self::size`] bytes of `bytes`, exactly.
    #[inline(always)]
    pub fn decode(self, bytes: &[u8]) -> f32 {
        let two = || [bytes[0], bytes[1]];
        match self {
            KvDtype::F32 => f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            KvDtype::F16 => half::f16::from_ne_bytes(two()).to_f32(),
            KvDtype::Bf16 => half::bf16::from_ne_bytes(two()).to_f32(),
            KvDtype::Fp8E4M3 => fp8::e4m3_to_f32(bytes[0]),
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

    /// Takes full and short names: `float32` or `f32`, `float16` or `f16`, `bfloat16` or `bf16`, `fp8_e4m3` or `fp8`.
    fn from_str(name: &str) -> Result<Self, Error> {
        match name {
            "float32" | "f32" => Ok(KvDtype::F32),
            "float16" | "f16" => Ok(KvDtype::F16),
            "bfloat16" | "bf16" => Ok(KvDtype::Bf16),
            "fp8_e4m3" | "fp8" => Ok(KvDtype::Fp8E4M3),
            other => Err(Error::InvalidArgument(format!(
                "KV cache dtype: expected float32 (f32), float16 (f16), bfloat16 (bf16) or fp8_e4m3 (fp8), got {other:?}"
            ))),
        }
    }
}
