//! GGUF's blocks of quantised weights, as far as packed weights can hold their codes.
//!
//! ```text
//! Q4_0   d * (q - 8)               4 bits, 32 weights
//! Q4_1   d * q + m                 4 bits, 32 weights
//! Q4_K   (d * s) * q - (dmin * t)  4 bits, 256 weights; s, t: 6 bits for each 32
//! Q5_0   d * (q - 16)              5 bits, 32 weights
//! Q8_0   d * q                     8 bits, 32 weights
//! ```
//! All but Q4_K are held exactly. The products d * s and dmin * t are rounded to halves there, by one part in 2,048.
//! Source: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>, and the struct definitions of ggml-common.h.
#![forbid(unsafe_code)]

use half::f16;

use super::WeightDtype;
use super::quantized::{Codes, GROUP_INPUTS};

/// A kind of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types, reason = "GGUF's names")]
pub enum Blocks {
    /// A scale, 4 bits each.
    Q4_0,
    /// A scale, a minimum, 4 bits each.
    Q4_1,
    /// 4 bits each, in groups of 32 whose scale and minimum are 6 bits of the block's.
    Q4_K,
    /// A scale, 5 bits each.
    Q5_0,
    /// A scale, 8 bits each.
    Q8_0,
}

impl Blocks {
    /// All kinds.
    pub const ALL: [Self; 5] = [Self::Q4_0, Self::Q4_1, Self::Q4_K, Self::Q5_0, Self::Q8_0];

    /// GGUF's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q4_K => "Q4_K",
            Self::Q5_0 => "Q5_0",
            Self::Q8_0 => "Q8_0",
        }
    }

    /// Bytes of a block.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q4_K => 144,
            Self::Q5_0 => 22,
            Self::Q8_0 => 34,
        }
    }

    /// Weights of a block.
    pub const fn weights(self) -> usize {
        if matches!(self, Self::Q4_K) { 256 } else { GROUP_INPUTS }
    }

    /// What they are packed into.
    pub const fn dtype(self) -> WeightDtype {
        match self {
            Self::Q4_0 | Self::Q4_1 | Self::Q4_K => WeightDtype::Int4,
            Self::Q5_0 | Self::Q8_0 => WeightDtype::Int8,
        }
    }

    /// The 32 weights `at` of blocks of this kind, as [`Self::dtype`] holds them: 8-bit codes stand for themselves less 128.
    pub(super) fn group(self, blocks: &[u8], at: usize) -> Codes {
        let groups = self.weights() / GROUP_INPUTS;
        let block = &blocks[at / groups * self.bytes()..][..self.bytes()];
        let scale = half(block);
        match self {
            Self::Q4_0 => {
                let minimum = f16::from_f32(-8.0 * scale.to_f32());
                Codes { codes: nibbles(&block[2..]), scale, minimum }
            }
            Self::Q4_1 => Codes { codes: nibbles(&block[4..]), scale, minimum: half(&block[2..]) },
            Self::Q4_K => {
                let (packed, group) = (&block[4..16], at % groups);
                let six = |i: usize| packed[i] & 63;
                let (s, t) = if group < 4 {
                    (six(group), six(group + 4))
                } else {
                    // The upper two bits lie above those of the first four groups.
                    let low = packed[group + 4];
                    (low & 15 | packed[group - 4] >> 6 << 4, low >> 4 | packed[group] >> 6 << 4)
                };
                let codes = &block[16 + group / 2 * GROUP_INPUTS..][..GROUP_INPUTS];
                Codes {
                    codes: std::array::from_fn(|i| codes[i] >> (group % 2 * 4) & 15),
                    scale: f16::from_f32(scale.to_f32() * f32::from(s)),
                    minimum: f16::from_f32(-(half(&block[2..]).to_f32() * f32::from(t))),
                }
            }
            Self::Q5_0 => {
                let high = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
                let low = nibbles(&block[6..]);
                let codes = std::array::from_fn(|i| (low[i] | ((high >> i & 1) as u8) << 4) + (128 - 16));
                Codes { codes, scale, minimum: f16::ZERO }
            }
            Self::Q8_0 => Codes { codes: std::array::from_fn(|i| block[2 + i] ^ 0x80), scale, minimum: f16::ZERO },
        }
    }
}

/// GGUF is little-endian.
fn half(bytes: &[u8]) -> f16 {
    f16::from_le_bytes([bytes[0], bytes[1]])
}

/// The low halves of 16 bytes, then the high ones.
fn nibbles(packed: &[u8]) -> [u8; GROUP_INPUTS] {
    std::array::from_fn(|i| if i < 16 { packed[i] & 15 } else { packed[i - 16] >> 4 })
}
