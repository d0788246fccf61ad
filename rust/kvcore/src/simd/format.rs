//! Number formats as the kernels see them: how one step of a sum is loaded and multiplied.
//!
//! f32 and f16 take one value a step and 16 lanes; bf16, fp8 and int8 take two (a pair of dimensions, tokens or inputs
//! side by side), because bf16 dot-product instructions add two products at once.
#![forbid(unsafe_code)]

use super::math;
use super::vector::{LANES, Simd};

/// A stored number format. `STEP` values of the summed dimension lie side by side for each of the 16 lanes.
pub trait Format: Copy + Send + Sync + 'static {
    /// The bytes of one step: 16 lanes x `STEP` values.
    type Raw: bytemuck::Pod;
    /// The broadcast factor of one step: `STEP` values, as a level multiplies them.
    type Coef<S: Simd>: bytemuck::Pod + Send + Sync;
    /// Values of the summed dimension in one step.
    const STEP: usize;

    /// 16 factors rounded as the format multiplies, kept as f32.
    fn round_coefs<S: Simd>(s: S, x: S::F32) -> S::F32;
    /// `2^x` as in [`math::exp2`], as exactly as is worth it before it is rounded.
    fn exp2<S: Simd>(s: S, x: S::F32) -> S::F32;
    /// 16 factors between 0 and 1, rounded to as many bits as [`Self::round_coefs`] leaves, to the nearest, and stored as
    /// 16 / `STEP` coefficients; returns them rounded. In a few operations, where the general way takes many.
    fn store_weights<S: Simd>(s: S, x: S::F32, out: &mut [Self::Coef<S>]) -> S::F32;
    /// The same with two times 16, and their sum added to `sum`, in any order of each 32.
    #[inline(always)]
    fn add_two_weights<S: Simd>(s: S, sum: S::F32, x: [S::F32; 2], out: &mut [Self::Coef<S>]) -> S::F32 {
        let (first, second) = out.split_at_mut(LANES / Self::STEP);
        let sum = s.add(sum, Self::store_weights(s, x[0], first));
        s.add(sum, Self::store_weights(s, x[1], second))
    }
    /// Store 16 factors that [`Self::round_coefs`] has rounded as 16 / `STEP` coefficients.
    fn store_coefs<S: Simd>(s: S, x: S::F32, out: &mut [Self::Coef<S>]);

    /// Round and store any number of factors; an odd one is paired with zero.
    #[inline(always)]
    fn coefs<S: Simd>(s: S, x: &[f32], out: &mut [Self::Coef<S>]) {
        let per_load = LANES / Self::STEP;
        let (whole, rest) = x.as_chunks::<LANES>();
        for (x, out) in whole.iter().zip(out.chunks_exact_mut(per_load)) {
            Self::store_coefs(s, Self::round_coefs(s, s.load(x)), out);
        }
        if !rest.is_empty() {
            let mut lanes = [0.0; LANES];
            lanes[..rest.len()].copy_from_slice(rest);
            let mut last = [bytemuck::Zeroable::zeroed(); LANES];
            Self::store_coefs(s, Self::round_coefs(s, s.load(&lanes)), &mut last[..per_load]);
            let n = rest.len().div_ceil(Self::STEP);
            out[whole.len() * per_load..][..n].copy_from_slice(&last[..n]);
        }
    }
}

/// A format whose steps vectors load and multiply.
pub trait Dot: Format {
    /// A loaded step.
    type Loaded<S: Simd>: Copy;

    /// Load one step.
    fn load<S: Simd>(s: S, raw: &Self::Raw) -> Self::Loaded<S>;
    /// Load two steps that lie side by side.
    #[inline(always)]
    fn load_two<S: Simd>(s: S, raw: &[Self::Raw; 2]) -> [Self::Loaded<S>; 2] {
        [Self::load(s, &raw[0]), Self::load(s, &raw[1])]
    }
    /// A loaded step with all but the first value of each lane set to zero.
    fn first<S: Simd>(s: S, x: Self::Loaded<S>) -> Self::Loaded<S>;
    /// A loaded step with all but the last value of each lane set to zero.
    fn last<S: Simd>(s: S, x: Self::Loaded<S>) -> Self::Loaded<S>;
    /// `acc + x * coef`.
    fn dot<S: Simd>(s: S, acc: S::F32, x: Self::Loaded<S>, coef: &Self::Coef<S>) -> S::F32;
}

/// 32-bit floats; full f32 arithmetic.
#[derive(Clone, Copy, Debug)]
pub struct F32;
/// IEEE half precision, widened to f32.
#[derive(Clone, Copy, Debug)]
pub struct F16;
/// bfloat16 pairs; the other factor is rounded to bf16, sums are f32.
#[derive(Clone, Copy, Debug)]
pub struct Bf16;
/// OCP fp8 e4m3 pairs, exactly widened to bf16; the other factor is rounded to bf16, sums are f32.
#[derive(Clone, Copy, Debug)]
pub struct Fp8E4M3;

/// OCP fp8 e5m2 pairs, otherwise as e4m3.
#[derive(Clone, Copy, Debug)]
pub struct Fp8E5M2;
/// Pairs of 8-bit integers, exactly widened to bf16; their scales are the caller's affair.
#[derive(Clone, Copy, Debug)]
pub struct Int8;

macro_rules! single {
    ($name:ident, $elem:ty, $load:ident) => {
        impl Format for $name {
            type Raw = [$elem; LANES];
            type Coef<S: Simd> = f32;
            const STEP: usize = 1;

            #[inline(always)]
            fn round_coefs<S: Simd>(_: S, x: S::F32) -> S::F32 {
                x
            }
            #[inline(always)]
            fn exp2<S: Simd>(s: S, x: S::F32) -> S::F32 {
                math::exp2(s, x)
            }
            #[inline(always)]
            fn store_weights<S: Simd>(s: S, x: S::F32, out: &mut [f32]) -> S::F32 {
                Self::store_coefs(s, x, out);
                x
            }
            #[inline(always)]
            fn store_coefs<S: Simd>(s: S, x: S::F32, out: &mut [f32]) {
                s.store(x, out.first_chunk_mut().expect("16 coefficients"));
            }
        }

        impl Dot for $name {
            type Loaded<S: Simd> = S::F32;

            #[inline(always)]
            fn load<S: Simd>(s: S, raw: &Self::Raw) -> S::F32 {
                s.$load(raw)
            }
            #[inline(always)]
            fn first<S: Simd>(_: S, x: S::F32) -> S::F32 {
                x
            }
            #[inline(always)]
            fn last<S: Simd>(_: S, x: S::F32) -> S::F32 {
                x
            }
            #[inline(always)]
            fn dot<S: Simd>(s: S, acc: S::F32, x: S::F32, coef: &f32) -> S::F32 {
                s.mul_add(x, s.splat(*coef), acc)
            }
        }
    };
}
single!(F32, f32, load);
single!(F16, u16, load_f16);

macro_rules! paired {
    ($name:ident, $elem:ty, $load:ident $(, $load_two:ident)?) => {
        impl Format for $name {
            type Raw = [$elem; 2 * LANES];
            type Coef<S: Simd> = S::Factor;
            const STEP: usize = 2;

            #[inline(always)]
            fn round_coefs<S: Simd>(s: S, x: S::F32) -> S::F32 {
                s.round_bf16(x)
            }
            #[inline(always)]
            fn exp2<S: Simd>(s: S, x: S::F32) -> S::F32 {
                math::exp2_short(s, x)
            }
            #[inline(always)]
            fn store_weights<S: Simd>(s: S, x: S::F32, out: &mut [S::Factor]) -> S::F32 {
                s.store_weights(x, out.first_chunk_mut().expect("8 factors"))
            }
            #[inline(always)]
            fn add_two_weights<S: Simd>(s: S, sum: S::F32, x: [S::F32; 2], out: &mut [S::Factor]) -> S::F32 {
                s.add_two_weights(sum, x, out.first_chunk_mut().expect("16 factors"))
            }
            #[inline(always)]
            fn store_coefs<S: Simd>(s: S, x: S::F32, out: &mut [S::Factor]) {
                s.store_factors(x, out.first_chunk_mut().expect("8 factors"));
            }
        }

        impl Dot for $name {
            type Loaded<S: Simd> = S::Pair;

            #[inline(always)]
            fn load<S: Simd>(s: S, raw: &Self::Raw) -> S::Pair {
                s.$load(raw)
            }
            $(#[inline(always)]
            fn load_two<S: Simd>(s: S, raw: &[Self::Raw; 2]) -> [S::Pair; 2] {
                s.$load_two(bytemuck::cast_ref(raw))
            })?
            #[inline(always)]
            fn first<S: Simd>(s: S, x: S::Pair) -> S::Pair {
                s.pair_first(x)
            }
            #[inline(always)]
            fn last<S: Simd>(s: S, x: S::Pair) -> S::Pair {
                s.pair_second(x)
            }
            #[inline(always)]
            fn dot<S: Simd>(s: S, acc: S::F32, x: S::Pair, coef: &S::Factor) -> S::F32 {
                s.dot_pair(acc, x, coef)
            }
        }
    };
}
paired!(Bf16, u16, pair_bf16);
paired!(Fp8E4M3, u8, pair_e4m3, two_pairs_e4m3);
paired!(Fp8E5M2, u8, pair_e5m2, two_pairs_e5m2);
paired!(Int8, i8, pair_int8);

/// As [`Bf16`], for tile registers: they load and multiply steps themselves.
#[derive(Clone, Copy, Debug)]
pub struct TiledBf16;

impl Format for TiledBf16 {
    type Raw = [u16; 2 * LANES];
    type Coef<S: Simd> = S::Factor;
    const STEP: usize = 2;

    #[inline(always)]
    fn round_coefs<S: Simd>(s: S, x: S::F32) -> S::F32 {
        Bf16::round_coefs(s, x)
    }
    #[inline(always)]
    fn exp2<S: Simd>(s: S, x: S::F32) -> S::F32 {
        Bf16::exp2(s, x)
    }
    #[inline(always)]
    fn store_weights<S: Simd>(s: S, x: S::F32, out: &mut [S::Factor]) -> S::F32 {
        Bf16::store_weights(s, x, out)
    }
    #[inline(always)]
    fn add_two_weights<S: Simd>(s: S, sum: S::F32, x: [S::F32; 2], out: &mut [S::Factor]) -> S::F32 {
        Bf16::add_two_weights(s, sum, x, out)
    }
    #[inline(always)]
    fn store_coefs<S: Simd>(s: S, x: S::F32, out: &mut [S::Factor]) {
        Bf16::store_coefs(s, x, out);
    }
}
