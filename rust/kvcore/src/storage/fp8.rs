//! fp8 e4m3 of the Open Compute Project ("OFP8", 2023): 1 sign, 4 exponent (bias 7) and 3 mantissa bits, no
//! infinities, NaN at 0x7f and 0xff, largest value 448. These scalar functions are the truth that the SIMD ones are
//! tested against.
//!
//! ```text
//! encode: |x| >= 464 saturates to 448; otherwise round to the nearest code, ties to even
//! decode: exact
//! ```
#![forbid(unsafe_code)]

/// The largest finite value.
pub const E4M3_MAX: f32 = 448.0;

/// The nearest e4m3 code, ties to even; finite values and infinities saturate to 448, NaN gives 0x7f with its sign.
pub const fn f32_to_e4m3(x: f32) -> u8 {
    let bits = x.to_bits();
    let sign = ((bits >> 24) & 0x80) as u8;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return sign | 0x7f;
    }
    if magnitude >= 448.0f32.to_bits() {
        return sign | 0x7e;
    }
    // Below 2^-6 codes are multiples of 2^-9: the nearest one comes out of the mantissa once 2^14 is added, whose
    // unit in the last place is 2^-9.
    if magnitude < 0x3c80_0000 {
        let shifted = f32::from_bits(magnitude) + 16384.0;
        return sign | (shifted.to_bits() - 16384.0f32.to_bits()) as u8;
    }
    let odd = (magnitude >> 20) & 1;
    let rounded = magnitude + 0x0007_ffff + odd;
    sign | ((rounded >> 20) - (120 << 3)) as u8
}

/// The bf16 bits of an e4m3 code; every code is exact in bf16.
pub const fn e4m3_to_bf16_bits(code: u8) -> u16 {
    (e4m3_to_f32(code).to_bits() >> 16) as u16
}

/// The value of an e4m3 code, exactly.
pub const fn e4m3_to_f32(code: u8) -> f32 {
    let magnitude = (code & 0x7f) as u32;
    let bits = if magnitude == 0x7f {
        0x7fc0_0000
    } else if magnitude < 8 {
        (magnitude as f32 * (1.0 / 512.0)).to_bits()
    } else {
        (magnitude << 20) + (120 << 23)
    };
    f32::from_bits(bits | ((code as u32 & 0x80) << 24))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_the_format() {
        let cases = [
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
        for (x, code) in cases {
            assert_eq!(f32_to_e4m3(x), code, "{x}");
        }
        assert_eq!(f32_to_e4m3(f32::NAN) & 0x7f, 0x7f);
        assert!(e4m3_to_f32(0x7f).is_nan() && e4m3_to_f32(0xff).is_nan());
    }

    #[test]
    fn every_finite_code_round_trips() {
        for code in 0..=255u8 {
            let value = e4m3_to_f32(code);
            if !value.is_nan() {
                assert_eq!(f32_to_e4m3(value), code);
                assert_eq!(half::bf16::from_bits(e4m3_to_bf16_bits(code)).to_f32(), value);
            }
        }
    }

    /// Against the definition: no other finite code is nearer, and of two equally near ones the even code is taken.
    #[test]
    fn encoding_is_the_nearest_code() {
        let mut state = 1u64;
        for i in 0..200_000u32 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let bits = if i % 4 == 0 { (state >> 32) as u32 } else { 0x3780_0000 + ((state >> 36) as u32) };
            let x = f32::from_bits(bits & 0x7fff_ffff);
            if x.is_nan() {
                continue;
            }
            let code = f32_to_e4m3(x);
            let distance = |c: u8| (f64::from(e4m3_to_f32(c)) - f64::from(x.min(E4M3_MAX))).abs();
            for other in [code.wrapping_sub(1), code + 1] {
                if other < 0x7f {
                    assert!(distance(code) <= distance(other), "{x} -> {code:#x}");
                    assert!(distance(code) < distance(other) || code & 1 == 0, "tie {x} -> {code:#x}");
                }
            }
            assert_eq!(f32_to_e4m3(-x), code | 0x80);
        }
    }
}
