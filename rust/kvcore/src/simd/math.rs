//! Elementary functions over the vector trait; the same polynomials, and so the same bits, on every level with FMA.
#![forbid(unsafe_code)]

use super::vector::Simd;

/// `2^x` for `x <= 128`, infinite from 127.5 on; underflows to 0 below -126.5; NaN stays NaN. Relative error below 2e-7.
///
/// Cody-Waite split into the nearest integer and a rest in [-0.5, 0.5], and a Taylor polynomial of degree 7 of
/// `2^rest`, whose truncation error is below 2^-27.
#[inline(always)]
pub fn exp2<S: Simd>(s: S, x: S::F32) -> S::F32 {
    // The clamp keeps a NaN, which `max` passes on from its second operand.
    let x = s.max(s.splat(-127.0), x);
    let n = s.round(x);
    let r = s.sub(x, n);
    let mut p = s.splat(1.525_273_4e-5);
    for c in [1.540_353e-4, 1.333_355_8e-3, 9.618_129e-3, 5.550_411e-2, 2.402_265e-1, 6.931_472e-1, 1.0] {
        p = s.mul_add(p, r, s.splat(c));
    }
    s.mul(p, s.pow2(n))
}

/// `x * sigmoid(x)`, also known as swish; exact limits at both ends (0 and x).
#[inline(always)]
pub fn silu<S: Simd>(s: S, x: S::F32) -> S::F32 {
    // exp2 takes exponents up to 128, where it is infinite and the quotient 0.
    let t = s.mul(x, s.splat(-std::f32::consts::LOG2_E));
    let bounded = s.sub(s.splat(0.0), s.max(s.splat(-128.0), s.sub(s.splat(0.0), t)));
    s.div(x, s.add(s.splat(1.0), exp2(s, bounded)))
}

/// The hyperbolic tangent; relative error below 4e-7, NaN stays NaN.
///
/// `tanh(x) = t / (t + 2)` with `t = e^2x - 1`, computed as `2^n (2^r - 1) + (2^n - 1)`, so that nothing cancels near 0.
#[inline(always)]
pub fn tanh<S: Simd>(s: S, x: S::F32) -> S::F32 {
    // Beyond 10 it is 1 in f32. Both bounds keep a NaN, which `max` passes on from its second operand.
    let x = s.max(s.splat(-10.0), x);
    let x = s.sub(s.splat(0.0), s.max(s.splat(-10.0), s.sub(s.splat(0.0), x)));
    let x = s.mul(x, s.splat(2.0 * std::f32::consts::LOG2_E));
    let n = s.round(x);
    let r = s.sub(x, n);
    let mut p = s.splat(1.525_273_4e-5);
    for c in [1.540_353e-4, 1.333_355_8e-3, 9.618_129e-3, 5.550_411e-2, 2.402_265e-1, 6.931_472e-1] {
        p = s.mul_add(p, r, s.splat(c));
    }
    let power = s.pow2(n);
    let t = s.mul_add(s.mul(p, r), power, s.sub(power, s.splat(1.0)));
    s.div(t, s.add(t, s.splat(2.0)))
}
