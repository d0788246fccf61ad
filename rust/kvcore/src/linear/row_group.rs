//! Rows rounded to 8 bits: 32 inputs share a scale.
//!
//! ```text
//! for each 32 inputs   s = max |x| / 127,  a = round(x / s),  sum of a
//! ```
//! As many groups as there are lanes are rounded side by side: their largest values, and their sums, are then found by a tree
//! of shuffles, not group by group.
#![forbid(unsafe_code)]

use super::quantized::GROUP_INPUTS;
use crate::simd::{LANES, Simd};

/// A group of a row: its 32 integers; the bits of its scale; and their sum, as the bits of an f32 where it is to be multiplied by
/// minima, and -128 times it where all minima are -128 scales.
pub(super) type RowGroup = [i32; GROUP_INPUTS / 4 + 2];
/// Where the bits of the scale are.
pub(super) const SCALE: usize = GROUP_INPUTS / 4;
/// Where the sum is.
pub(super) const SUM: usize = SCALE + 1;

/// A row's groups; zeros behind its end.
#[inline(always)]
pub(super) fn round_row<S: Simd, const MINIMA: bool>(s: S, x: &[f32], out: &mut [RowGroup]) {
    let (groups, rest) = x.as_chunks::<GROUP_INPUTS>();
    let many = if S::ACCUMULATORS >= LANES { groups.len() / LANES * LANES } else { 0 };
    for (x, out) in groups[..many].as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        round_groups::<S, MINIMA>(s, x, out);
    }
    for (x, out) in groups.iter().zip(&mut *out).skip(many) {
        round_group::<S, MINIMA>(s, x, out);
    }
    if !rest.is_empty() {
        let mut last = [0.0; GROUP_INPUTS];
        last[..rest.len()].copy_from_slice(rest);
        round_group::<S, MINIMA>(s, &last, &mut out[groups.len()]);
    }
}

/// What is added to it becomes a whole number, ties to even, in the low bits.
const WHOLE: f32 = 1.5 * (1 << 23) as f32;

/// What the values of a group are multiplied by, from the largest of them, and what their codes stand for.
#[inline(always)]
fn row_scale(largest: f32) -> (f32, f32) {
    // Below that the reciprocal is infinite; such rows are zeros.
    let inverse = if largest >= f32::MIN_POSITIVE * 256.0 && largest.is_finite() { 127.0 / largest } else { 0.0 };
    (inverse, if inverse > 0.0 { largest / 127.0 } else { 0.0 })
}

#[inline(always)]
fn magnitude<S: Simd>(s: S, x: [S::F32; 2]) -> S::F32 {
    let zero = s.splat(0.0);
    s.max(s.max(x[0], s.sub(zero, x[0])), s.max(x[1], s.sub(zero, x[1])))
}

/// Codes of a group into `out`; returns the lanes of their sum, exact, and no numbers if any value is none or infinite.
#[inline(always)]
fn put_codes<S: Simd>(s: S, x: [S::F32; 2], inverse: f32, out: &mut RowGroup) -> S::F32 {
    let (low, high) = (s.mul(x[0], s.splat(inverse)), s.mul(x[1], s.splat(inverse)));
    let mut bits = [[0.0; LANES]; 2];
    s.store(s.add(low, s.splat(WHOLE)), &mut bits[0]);
    s.store(s.add(high, s.splat(WHOLE)), &mut bits[1]);
    let codes: &mut [i8; (SUM + 1) * 4] = bytemuck::cast_mut(out);
    for (code, bits) in codes.iter_mut().zip(bits.as_flattened()) {
        *code = bits.to_bits() as i8;
    }
    s.add(s.round(low), s.round(high))
}

#[inline(always)]
fn put_scale<const MINIMA: bool>(scale: f32, sum: f32, out: &mut RowGroup) {
    out[SCALE] = if sum.is_nan() { f32::NAN } else { scale }.to_bits() as i32;
    out[SUM] = if MINIMA { sum.to_bits() as i32 } else { -128 * sum as i32 };
}

/// As many groups as there are lanes: their largest values and their sums are found side by side.
#[inline(always)]
fn round_groups<S: Simd, const MINIMA: bool>(s: S, x: &[[f32; GROUP_INPUTS]; LANES], out: &mut [RowGroup; LANES]) {
    let load = |x: &[f32; GROUP_INPUTS]| {
        let halves: &[[f32; LANES]; 2] = bytemuck::cast_ref(x);
        [s.load(&halves[0]), s.load(&halves[1])]
    };
    let mut lanes = [s.splat(0.0); LANES];
    for i in 0..LANES {
        lanes[i] = magnitude(s, load(&x[i]));
    }
    let (mut largest, mut inverses, mut scales) = ([0.0; LANES], [0.0; LANES], [0.0; LANES]);
    s.store(s.max_of_each(lanes), &mut largest);
    for i in 0..LANES {
        (inverses[i], scales[i]) = row_scale(largest[i]);
    }
    for i in 0..LANES {
        lanes[i] = put_codes(s, load(&x[i]), inverses[i], &mut out[i]);
    }
    let mut sums = [0.0; LANES];
    s.store(s.sum_of_each(lanes), &mut sums);
    for i in 0..LANES {
        put_scale::<MINIMA>(scales[i], sums[i], &mut out[i]);
    }
}

#[inline(always)]
fn round_group<S: Simd, const MINIMA: bool>(s: S, x: &[f32; GROUP_INPUTS], out: &mut RowGroup) {
    let halves: &[[f32; LANES]; 2] = bytemuck::cast_ref(x);
    let x = [s.load(&halves[0]), s.load(&halves[1])];
    let (inverse, scale) = row_scale(s.reduce_max(magnitude(s, x)));
    let sum = s.reduce_sum(put_codes(s, x, inverse, out));
    put_scale::<MINIMA>(scale, sum, out);
}
