//! The two 16-bit floats: IEEE half precision (f16) and bfloat16.
//!
//! ```text
//! encode: the nearest value, ties to even; finite values beyond the largest one (65504, 3.39e38) become the largest
//!         one, infinities stay infinite, NaN stays NaN
//! decode: exact
//! ```
//! Rounding to the nearest alone would turn a large finite value into an infinity, and that into NaN for every later
//! token. The functions choose between results instead of branching, so that a loop over them becomes vector code.
#![forbid(unsafe_code)]

const SIGN: u32 = 0x8000_0000;
const INFINITE: u32 = 0x7f80_0000;

/// The nearest half, as its bits.
#[inline(always)]
pub const fn f32_to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let magnitude = bits & !SIGN;
    // Below 2^-14 halves are multiples of 2^-24, the unit in the last place of 0.5.
    let small = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let odd = (magnitude >> 13) & 1;
    let normal = (magnitude.wrapping_add(0x0fff + odd) >> 13).wrapping_sub(112 << 10);
    let half = if magnitude < 0x3880_0000 { small } else { normal };
    let half = if magnitude >= 65504.0f32.to_bits() { 0x7bff } else { half };
    let half = if magnitude == INFINITE { 0x7c00 } else { half };
    let half = if magnitude > INFINITE { 0x7e00 } else { half };
    (half | (bits & SIGN) >> 16) as u16
}

/// The value of a half, exactly.
#[inline(always)]
pub const fn f16_to_f32(bits: u16) -> f32 {
    let magnitude = (bits & 0x7fff) as u32;
    // Exponents are 112 apart; the product is exact for subnormals, too.
    let finite = (f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23)).to_bits();
    let special = (magnitude << 13) | INFINITE;
    let value = if magnitude >= 0x7c00 { special } else { finite };
    f32::from_bits(value | ((bits & 0x8000) as u32) << 16)
}

/// The nearest bf16, as its bits.
#[inline(always)]
pub const fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let magnitude = bits & !SIGN;
    let odd = (magnitude >> 16) & 1;
    let rounded = magnitude.wrapping_add(0x7fff + odd) >> 16;
    // Only finite values can have become 0x7f80 by rounding.
    let largest = if rounded > 0x7f7f { 0x7f7f } else { rounded };
    let half = if magnitude == INFINITE { 0x7f80 } else { largest };
    let half = if magnitude > INFINITE { (magnitude >> 16) | 0x0040 } else { half };
    (half | (bits & SIGN) >> 16) as u16
}

/// The value of a bf16, exactly.
#[inline(always)]
pub const fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against the `half` crate, where nothing saturates.
    #[test]
    fn the_nearest_half_and_bfloat() {
        let mut state = 3u64;
        for i in 0..500_000u32 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let bits = match i % 4 {
                0 => (state >> 32) as u32,
                1 => 0x3300_0000 + (state >> 36) as u32, // around the range of halves
                2 => ((state >> 32) as u32 & 0xffff_f000) + (i / 4 % 3) - 1,
                _ => ((state >> 32) as u32 & 0xffff_8000) + (i / 4 % 3) - 1,
            };
            let x = f32::from_bits(bits);
            let (half, bfloat) = (half::f16::from_f32(x), half::bf16::from_f32(x));
            let (ours, ours_bf) = (half::f16::from_bits(f32_to_f16(x)), half::bf16::from_bits(f32_to_bf16(x)));
            if x.is_nan() {
                assert!(ours.is_nan() && ours_bf.is_nan());
                assert!(ours.is_sign_negative() == x.is_sign_negative());
                continue;
            }
            let finite = half::f16::MAX.to_f32().copysign(x);
            assert_eq!(ours.to_f32(), if x.is_finite() && half.is_infinite() { finite } else { half.to_f32() }, "{x}");
            let finite = half::bf16::MAX.to_f32().copysign(x);
            let expected = if x.is_finite() && bfloat.is_infinite() { finite } else { bfloat.to_f32() };
            assert_eq!(ours_bf.to_f32(), expected, "{x}");
            assert_eq!(ours_bf.is_sign_negative(), x.is_sign_negative());
        }
        assert_eq!(f32_to_f16(f32::MAX), 0x7bff);
        assert_eq!(f32_to_bf16(f32::MIN), 0xff7f);
        assert_eq!((f32_to_f16(f32::INFINITY), f32_to_bf16(f32::NEG_INFINITY)), (0x7c00, 0xff80));
    }

    #[test]
    fn every_code_round_trips() {
        for bits in 0..=u16::MAX {
            let x = f16_to_f32(bits);
            assert!(x.is_nan() || x == half::f16::from_bits(bits).to_f32() && f32_to_f16(x) == bits, "{bits:#x}");
            assert_eq!(x.is_nan(), half::f16::from_bits(bits).is_nan());
            let x = bf16_to_f32(bits);
            assert!(x.is_nan() && half::bf16::from_bits(f32_to_bf16(x)).is_nan() || f32_to_bf16(x) == bits);
        }
    }
}
