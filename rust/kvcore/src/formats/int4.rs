//! 4-bit integers in groups of dimensions, asymmetric: a scale and a minimum for each group of one token in one head.
//!
//! ```text
//! x       = the group's values, each bounded to -65504 ..= 65504 (infinities too)
//! minimum = f16(smallest x)
//! scale   = f16((largest x - minimum) / 15)
//! code    = round((x - minimum) / scale), ties to even, bounded to 0 ..= 15; 0 if the scale is 0
//! value   = bf16(minimum + code * scale)
//! ```
//! `f16` and `bf16` round to the nearest, ties to even. A group is [`K_GROUP`] or [`V_GROUP`] neighbouring dimensions; the
//! last one of a head may be smaller. A few dimensions of K are much larger than the others: they set the step of all that
//! share their group, so K has smaller groups. Scale and minimum are rounded first and the codes fitted to what they
//! became. A code has 4 bits and a scale 11, so that the product is exact in f32 and the sum rounds once: fused or not, on
//! every CPU. Values are bf16 because attention expands a tile to bf16 before it multiplies.
//!
//! A group that has a NaN has a NaN as its minimum, and all its values are NaN.
#![forbid(unsafe_code)]

use super::half_float::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

/// Dimensions of a group of K, whose channels differ most.
pub const K_GROUP: usize = 8;

/// Dimensions of a group of V.
pub const V_GROUP: usize = 32;

/// Dimensions of the larger of the two.
pub const MAX_GROUP: usize = V_GROUP;

/// The largest code.
pub const MAX_CODE: f32 = 15.0;

/// The largest magnitude of a value before rounding, that of a half.
const LARGEST: f32 = 65504.0;

/// What the codes of one group stand for, two halves as their bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// The distance of two neighbouring codes' values.
    pub scale: u16,
    /// The value of code 0.
    pub minimum: u16,
}

/// Groups of `group` dimensions in a head with `dims`.
pub const fn groups(dims: usize, group: usize) -> usize {
    dims.div_ceil(group)
}

#[inline(always)]
fn bounded(x: f32) -> f32 {
    let x = if x > LARGEST { LARGEST } else { x };
    if x < -LARGEST { -LARGEST } else { x }
}

impl Group {
    /// Fit a group to its values.
    #[inline(always)]
    pub fn of(values: &[f32]) -> Self {
        let (mut low, mut high, mut nan) = (LARGEST, -LARGEST, false);
        for &x in values {
            let x = bounded(x);
            low = if x < low { x } else { low };
            high = if x > high { x } else { high };
            nan |= x.is_nan();
        }
        if nan {
            return Self { scale: 0, minimum: f32_to_f16(f32::NAN) };
        }
        let minimum = f32_to_f16(low);
        // Where the minimum was rounded up above all values, there is nothing left to divide.
        let range = high - f16_to_f32(minimum);
        Self { scale: if range > 0.0 { f32_to_f16(range / MAX_CODE) } else { 0 }, minimum }
    }

    /// The code of a value.
    #[inline(always)]
    pub fn encode(self, x: f32) -> u8 {
        let (scale, minimum) = (f16_to_f32(self.scale), f16_to_f32(self.minimum));
        let quotient = if scale > 0.0 { (bounded(x) - minimum) / scale } else { 0.0 };
        let quotient = if quotient < MAX_CODE { quotient } else { MAX_CODE };
        let quotient = if quotient > 0.0 { quotient } else { 0.0 };
        // 1.5 * 2^23 has 1 as the unit in its last place: the sum rounds to an integer, ties to even.
        (quotient + 12_582_912.0).to_bits() as u8 & 0x0f
    }

    /// The value of a code, as the bits of a bf16.
    #[inline(always)]
    pub fn decode_bits(self, code: u8) -> u16 {
        f32_to_bf16(f16_to_f32(self.minimum) + f32::from(code) * f16_to_f32(self.scale))
    }

    /// The value of a code.
    #[inline(always)]
    pub fn decode(self, code: u8) -> f32 {
        bf16_to_f32(self.decode_bits(code))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_even_steps_are_exact() {
        let values: Vec<f32> = (0..16).map(|i| 0.25 * i as f32 - 1.5).collect();
        let group = Group::of(&values);
        for (i, &x) in values.iter().enumerate() {
            assert_eq!((group.encode(x), group.decode(i as u8)), (i as u8, x));
        }
    }

    #[test]
    fn values_are_within_half_a_step() {
        let mut state = 9u64;
        for _ in 0..20_000 {
            let mut next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as f32 / (1 << 23) as f32 - 1.0
            };
            let (center, spread) = (next() * 10.0, next().abs() * 5.0 + 0.01);
            let values: Vec<f32> = (0..MAX_GROUP).map(|_| center + spread * next()).collect();
            let group = Group::of(&values);
            let step = f16_to_f32(group.scale);
            for &x in &values {
                let value = group.decode(group.encode(x));
                let rounding = 15.0 * step / 1024.0 + (x.abs() + 1.0) / 256.0;
                assert!((value - x).abs() <= 0.5 * step + rounding, "{x} -> {value}, step {step}");
            }
        }
    }

    #[test]
    fn groups_at_the_edges() {
        // One value many times: the minimum alone.
        for x in [0.0, -0.0, 3.0, -7.5, 1e-9, 65504.0] {
            let group = Group::of(&[x; MAX_GROUP]);
            assert!((group.decode(group.encode(x)) - x).abs() <= x.abs() / 256.0 + 1e-7, "{x}");
        }
        // Infinities and large values saturate.
        let group = Group::of(&[f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 0.0]);
        assert!((group.decode(group.encode(f32::INFINITY)) - 65504.0).abs() < 500.0);
        assert!((group.decode(group.encode(f32::NEG_INFINITY)) + 65504.0).abs() < 500.0);
        assert!((0..16).all(|code| group.decode(code).is_finite()));
        // One NaN makes the group NaN.
        let group = Group::of(&[1.0, f32::NAN, f32::INFINITY]);
        assert!((0..16).all(|code| group.decode(code).is_nan()));
        assert!(group.encode(1.0) < 16 && group.encode(f32::NAN) < 16);
    }

    #[test]
    fn groups_of_a_head() {
        assert_eq!([2, 24, 32, 34, 64, 80, 128, 576].map(|dims| groups(dims, 32)), [1, 1, 1, 2, 2, 3, 4, 18]);
    }
}
