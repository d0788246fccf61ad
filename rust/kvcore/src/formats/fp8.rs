//! The two 8-bit floats of the Open Compute Project ("OFP8", 2023).
//!
//! ```text
//!         sign exponent (bias) mantissa   largest   smallest   infinity      NaN
//! e4m3    1    4 (7)           3          448       2^-9       none          0x7f, 0xff
//! e5m2    1    5 (15)          2          57344     2^-16      0x7c, 0xfc    0x7d to 0x7f, 0xfd to 0xff
//!
//! encode: the nearest code, ties to even; what is larger than the largest value, infinities included, becomes the
//!         largest value; NaN becomes 0x7f with its sign
//! decode: exact
//! ```
//! e5m2 has codes for infinities, which decode as such, but no encoding makes one: a cache with an infinity in it
//! would give NaN for every later token.
//!
//! The functions choose between results instead of branching, so that a loop over them becomes vector code.
#![forbid(unsafe_code)]

/// The largest finite e4m3 value.
pub const E4M3_MAX: f32 = 448.0;
/// The largest finite e5m2 value.
pub const E5M2_MAX: f32 = 57344.0;

const SIGN: u32 = 0x8000_0000;
const INFINITE: u32 = 0x7f80_0000;
const QUIET_NAN: u32 = 0x7fc0_0000;

/// The nearest e4m3 code, ties to even; finite values and infinities saturate to 448, NaN gives 0x7f with its sign.
#[inline(always)]
pub const fn f32_to_e4m3(x: f32) -> u8 {
    let bits = x.to_bits();
    let magnitude = bits & !SIGN;
    // Below 2^-6 codes are multiples of 2^-9: the nearest one comes out of the mantissa once 2^14 is added, whose
    // unit in the last place is 2^-9.
    let small = (f32::from_bits(magnitude) + 16384.0).to_bits().wrapping_sub(16384.0f32.to_bits());
    let odd = (magnitude >> 20) & 1;
    let normal = (magnitude.wrapping_add(0x0007_ffff + odd) >> 20).wrapping_sub(120 << 3);
    let code = if magnitude < 0x3c80_0000 { small } else { normal };
    let code = if magnitude >= E4M3_MAX.to_bits() { 0x7e } else { code };
    let code = if magnitude > INFINITE { 0x7f } else { code };
    (code | (bits & SIGN) >> 24) as u8
}

/// The value of an e4m3 code, exactly.
#[inline(always)]
pub const fn e4m3_to_f32(code: u8) -> f32 {
    let magnitude = (code & 0x7f) as u32;
    let small = (magnitude as i32 as f32 * (1.0 / 512.0)).to_bits();
    let normal = (magnitude << 20) + (120 << 23);
    let bits = if magnitude < 8 { small } else { normal };
    let bits = if magnitude == 0x7f { QUIET_NAN } else { bits };
    f32::from_bits(bits | ((code as u32 & 0x80) << 24))
}

/// The bf16 bits of an e4m3 code; every code is exact in bf16.
pub const fn e4m3_to_bf16_bits(code: u8) -> u16 {
    (e4m3_to_f32(code).to_bits() >> 16) as u16
}

/// The nearest e5m2 code, ties to even; finite values and infinities saturate to 57344, NaN gives 0x7f with its sign.
#[inline(always)]
pub const fn f32_to_e5m2(x: f32) -> u8 {
    let bits = x.to_bits();
    let magnitude = bits & !SIGN;
    // As for e4m3: below 2^-14 codes are multiples of 2^-16, the unit in the last place of 2^7.
    let small = (f32::from_bits(magnitude) + 128.0).to_bits().wrapping_sub(128.0f32.to_bits());
    let odd = (magnitude >> 21) & 1;
    let normal = (magnitude.wrapping_add(0x000f_ffff + odd) >> 21).wrapping_sub(112 << 2);
    let code = if magnitude < 0x3880_0000 { small } else { normal };
    let code = if magnitude >= E5M2_MAX.to_bits() { 0x7b } else { code };
    let code = if magnitude > INFINITE { 0x7f } else { code };
    (code | (bits & SIGN) >> 24) as u8
}

/// The value of an e5m2 code, exactly.
#[inline(always)]
pub const fn e5m2_to_f32(code: u8) -> f32 {
    let magnitude = (code & 0x7f) as u32;
    let small = (magnitude as i32 as f32 * (1.0 / 65536.0)).to_bits();
    let normal = (magnitude << 21) + (112 << 23);
    let bits = if magnitude < 4 { small } else { normal };
    let bits = if magnitude == 0x7c { INFINITE } else { bits };
    let bits = if magnitude > 0x7c { QUIET_NAN } else { bits };
    f32::from_bits(bits | ((code as u32 & 0x80) << 24))
}

/// The bf16 bits of an e5m2 code; every code is exact in bf16.
pub const fn e5m2_to_bf16_bits(code: u8) -> u16 {
    (e5m2_to_f32(code).to_bits() >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_the_formats() {
        let e4m3 = [
            (256.0, 0x78),
            (300.0, 0x79),
            (304.0, 0x7a),
            (448.0, 0x7e),
            (449.0, 0x7e),
            (1000.0, 0x7e),
            (f32::INFINITY, 0x7e),
            (1.0625, 0x38),
            (1.1875, 0x3a),
            (1.0 / 512.0, 0x01),
            (1.0 / 1024.0, 0x00),
            (-0.0, 0x80),
            (f32::NEG_INFINITY, 0xfe),
        ];
        for (x, code) in e4m3 {
            assert_eq!(f32_to_e4m3(x), code, "e4m3 {x}");
        }
        let e5m2 = [
            (1.0, 0x3c),
            (1.125, 0x3c),
            (1.375, 0x3e),
            (57344.0, 0x7b),
            (61440.0, 0x7b),
            (65536.0, 0x7b),
            (f32::MAX, 0x7b),
            (f32::INFINITY, 0x7b),
            (1.0 / 65536.0, 0x01),
            (0.5 / 65536.0, 0x00),
            (1.5 / 65536.0, 0x02),
            (1.0 / 16384.0, 0x04),
            (1e-40, 0x00),
            (-0.0, 0x80),
            (f32::NEG_INFINITY, 0xfb),
        ];
        for (x, code) in e5m2 {
            assert_eq!(f32_to_e5m2(x), code, "e5m2 {x}");
        }
        for nan in [f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(0xffff_ffff)] {
            let sign = (nan.to_bits() >> 24) as u8 & 0x80;
            assert_eq!((f32_to_e4m3(nan), f32_to_e5m2(nan)), (0x7f | sign, 0x7f | sign));
        }
        assert!([0x7f, 0xff].iter().all(|&c| e4m3_to_f32(c).is_nan()));
        assert!([0x7d, 0x7e, 0x7f, 0xfd, 0xff].iter().all(|&c| e5m2_to_f32(c).is_nan()));
        assert_eq!((e5m2_to_f32(0x7c), e5m2_to_f32(0xfc)), (f32::INFINITY, f32::NEG_INFINITY));
    }

    #[test]
    fn every_finite_code_round_trips() {
        for code in 0..=255u8 {
            let value = e4m3_to_f32(code);
            if !value.is_nan() {
                assert_eq!(f32_to_e4m3(value), code);
                assert_eq!(half::bf16::from_bits(e4m3_to_bf16_bits(code)).to_f32(), value);
            }
            // e5m2 is the upper byte of a half.
            let value = e5m2_to_f32(code);
            let half = half::f16::from_bits(u16::from(code) << 8).to_f32();
            assert!(value.to_bits() == half.to_bits() || value.is_nan() && half.is_nan(), "{code:#x}");
            if value.is_finite() {
                assert_eq!(f32_to_e5m2(value), code);
                assert_eq!(half::bf16::from_bits(e5m2_to_bf16_bits(code)).to_f32(), value);
            }
        }
    }

    /// Against the definition: no other finite code is nearer, and of two equally near ones the even code is taken.
    #[test]
    fn encoding_is_the_nearest_code() {
        struct Float8(fn(f32) -> u8, fn(u8) -> f32, f32, u8);
        let formats =
            [Float8(f32_to_e4m3, e4m3_to_f32, E4M3_MAX, 0x7e), Float8(f32_to_e5m2, e5m2_to_f32, E5M2_MAX, 0x7b)];
        for Float8(encode, decode, max, last) in formats {
            let mut state = 1u64;
            for i in 0..300_000u32 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                // All floats; those that are in range; and points half way between two codes, with their neighbours.
                let x = match i % 3 {
                    0 => f32::from_bits((state >> 32) as u32 & !SIGN),
                    1 => f32::from_bits(0x3680_0000 + ((state >> 36) as u32)),
                    _ => {
                        let code = (state >> 40) as u8 % last;
                        let middle = (decode(code) + decode(code + 1)) / 2.0;
                        f32::from_bits(middle.to_bits() + i / 3 % 3 - 1)
                    }
                };
                if x.is_nan() {
                    continue;
                }
                let code = encode(x);
                let distance = |c: u8| (f64::from(decode(c)) - f64::from(x.min(max))).abs();
                for other in [code.wrapping_sub(1), code + 1] {
                    if other <= last {
                        assert!(distance(code) <= distance(other), "{x} -> {code:#x}");
                        assert!(distance(code) < distance(other) || code & 1 == 0, "tie {x} -> {code:#x}");
                    }
                }
                assert_eq!(encode(-x), code | 0x80);
            }
        }
    }
}
