//! 8-bit integers, symmetric: one scale for the values of one token in one head.
//!
//! ```text
//! largest = the largest |x| of the row, at most 2^127
//! scale   = largest / 127                       0 if that is not a normal float (the row is as good as zero)
//! code    = round(x / scale), ties to even      -127 ..= 127; what is beyond, infinities included, saturates
//! value   = code * scale
//! ```
//! A row that has a NaN has the scale NaN and decodes as NaN as a whole: integers have no code for it, and a NaN in
//! K or V is a fault that has to stay visible. The bound of 2^127 keeps `127 * scale` finite.
#![forbid(unsafe_code)]

use super::codec::{Extent, row_scale};

/// The largest code.
pub const MAX_CODE: f32 = 127.0;

/// The scale of a row.
#[inline(always)]
pub fn scale(row: &[f32]) -> f32 {
    let extent = Extent::of(row);
    if extent.has_nan { f32::NAN } else { row_scale(extent.largest, MAX_CODE) }
}

/// 1.5 * 2^23, whose unit in the last place is 1: a sum with it rounds to an integer, ties to even.
const ROUND: f32 = 12_582_912.0;

/// The code of a value in a row with this scale; 0 if the scale is 0 or NaN.
#[inline(always)]
pub fn encode(x: f32, scale: f32) -> i8 {
    let quotient = if scale > 0.0 { x / scale } else { 0.0 };
    let bounded = if quotient > MAX_CODE { MAX_CODE } else { quotient };
    let bounded = if bounded < -MAX_CODE { -MAX_CODE } else { bounded };
    (bounded + ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as i8
}

/// The value of a code.
#[inline(always)]
pub fn decode(code: i8, scale: f32) -> f32 {
    f32::from(code) * scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_integer_of_a_scaled_row() {
        let row = [0.0, 1.0, -2.54, 0.01, 0.03, -0.05, 2.0];
        let scale = scale(&row);
        assert_eq!(scale, 2.54 / 127.0);
        let codes: Vec<i8> = row.iter().map(|&x| encode(x, scale)).collect();
        assert_eq!(codes, [0, 50, -127, 0, 2, -2, 100]);
        for (x, &code) in row.iter().zip(&codes) {
            assert!((decode(code, scale) - x).abs() <= scale * 0.500_001);
        }
        for code in -127..=127i8 {
            assert_eq!(encode(decode(code, scale), scale), code);
        }
    }

    #[test]
    fn rows_at_the_edges() {
        // Zeros, and what cannot be told from them.
        for x in [0.0, -0.0, 1e-40, 1e-37] {
            let scale = scale(&[x, -x]);
            assert_eq!((scale, encode(x, scale), decode(0, scale)), (0.0, 0, 0.0));
        }
        // Infinities saturate; the largest value stays finite.
        for row in [[f32::INFINITY, 1.0], [f32::NEG_INFINITY, 1.0], [f32::MAX, -f32::MAX]] {
            let scale = scale(&row);
            let code = encode(row[0], scale);
            assert_eq!(f32::from(code), 127.0f32.copysign(row[0]));
            assert!(decode(code, scale).is_finite());
        }
        // One NaN makes the row NaN.
        let scale = scale(&[1.0, f32::NAN, f32::INFINITY]);
        assert!(scale.is_nan() && decode(encode(1.0, scale), scale).is_nan());
    }
}
