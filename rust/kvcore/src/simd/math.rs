//! Elementary functions over the vector trait; the same polynomials, and so the same bits, on every level with FMA.
#![forbid(unsafe_code)]

use super::vector::Simd;

/// `2^x` for `x <= 128`, infinite from 127.5 on; underflows to 0 below -126.5; NaN stays NaN. Relative error below 2e-7.
///
/// Cody-Waite split into the nearest integer and a rest in [-0.5, 0.5], and a Taylor polynomial of degree 7 of
/// `2^rest`, whose truncation error is below 2^-27.
#[inline(always)]
pub fn exp2<S: Simd>(s: S, x: S::F32) -> S::F32 {
    exp2_by(
        s,
        x,
        [1.525_273_4e-5, 1.540_353e-4, 1.333_355_8e-3, 9.618_129e-3, 5.550_411e-2, 2.402_265e-1, 6.931_472e-1],
    )
}

/// [`exp2`] for what is rounded to bf16 (relative error 2e-3): relative error below 4e-6, and exact for whole numbers.
///
/// The polynomial of degree 4 with the smallest largest error among those that are 1 at 0.
#[inline(always)]
pub fn exp2_short<S: Simd>(s: S, x: S::F32) -> S::F32 {
    exp2_by(s, x, [9.582_853e-3, 5.590_643e-2, 2.402_41e-1, 6.931_242e-1])
}

/// By the coefficients of a polynomial, from the highest to the first; the last is 1.
#[inline(always)]
fn exp2_by<S: Simd, const N: usize>(s: S, x: S::F32, coefficients: [f32; N]) -> S::F32 {
    // The clamp keeps a NaN, which `max` passes on from its second operand.
    let x = s.max(s.splat(-127.0), x);
    let n = s.round(x);
    let r = s.sub(x, n);
    let mut p = s.splat(coefficients[0]);
    for c in &coefficients[1..] {
        p = s.mul_add(p, r, s.splat(*c));
    }
    s.mul(s.mul_add(p, r, s.splat(1.0)), s.pow2(n))
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

/// `max(x, 0)`; NaN stays NaN.
#[inline(always)]
pub fn relu<S: Simd>(s: S, x: S::F32) -> S::F32 {
    s.max(s.splat(0.0), x)
}

/// `1 / (1 + e^-x)`; exact limits at both ends.
#[inline(always)]
pub fn sigmoid<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let t = s.mul(x, s.splat(-std::f32::consts::LOG2_E));
    let bounded = s.sub(s.splat(0.0), s.max(s.splat(-128.0), s.sub(s.splat(0.0), t)));
    s.div(s.splat(1.0), s.add(s.splat(1.0), exp2(s, bounded)))
}

/// `x * Phi(x)` with the normal distribution `Phi(x) = erfc(-x / sqrt(2)) / 2`; NaN stays NaN.
///
/// `erfc(z) = e^(-z^2) P(1 / (1 + 0.41 z))` for `z >= 0`, the form of Abramowitz and Stegun 7.1.26. P is of degree 8,
/// fitted by least squares to an absolute error of 2e-9.
#[inline(always)]
pub fn gelu<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let zero = s.splat(0.0);
    let z = s.mul(x, s.splat(std::f32::consts::FRAC_1_SQRT_2));
    // Beyond 13 erfc is 0 in f32; the bound keeps a NaN, which `max` passes on from its second operand.
    let size = s.max(s.sub(zero, z), z);
    let size = s.sub(zero, s.max(s.splat(-13.0), s.sub(zero, size)));
    let t = s.div(s.splat(1.0), s.mul_add(size, s.splat(0.41), s.splat(1.0)));
    let mut p = s.splat(0.071_449_38);
    for c in ERFC {
        p = s.mul_add(p, t, s.splat(c));
    }
    let power = exp2(s, s.mul(s.mul(size, size), s.splat(-std::f32::consts::LOG2_E)));
    // half of erfc(|z|): Phi below 0, and what Phi lacks to 1 above
    let tail = s.mul(s.mul(power, s.mul(p, t)), s.splat(0.5));
    // x * Phi(x) = max(x, 0) - |x| * tail on both sides; where |x| is bounded the tail is 0
    let absolute = s.max(s.sub(zero, x), x);
    let absolute = s.sub(zero, s.max(s.splat(-20.0), s.sub(zero, absolute)));
    s.sub(s.max(zero, x), s.mul(absolute, tail))
}

const ERFC: [f32; 7] =
    [-0.348_425_57, 0.530_789_7, -0.204_028_87, 0.301_092_36, 0.183_521_78, 0.234_399_02, 0.231_202_23];

/// `x * Phi(x)`, Phi approximated by tanh: `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
#[inline(always)]
pub fn gelu_tanh<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let cube = s.mul(s.mul(x, x), x);
    let inner = s.mul(s.splat(0.797_884_6), s.mul_add(cube, s.splat(0.044_715), x));
    s.mul(s.mul(x, s.splat(0.5)), s.add(s.splat(1.0), tanh(s, inner)))
}
