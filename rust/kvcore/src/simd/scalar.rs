//! The portable level: plain arrays that the compiler may vectorise for the baseline CPU. It is the twin that
//! every other level is tested against.
#![forbid(unsafe_code)]

use super::tiles::NoTiles;
use super::vector::{LANES, Simd, Work};
use crate::formats::fp8;
use crate::formats::half_float::{bf16_to_f32, f16_to_f32};

/// Runs on every CPU.
#[derive(Clone, Copy, Debug)]
pub struct Scalar;

type Lanes = [f32; LANES];

#[inline(always)]
fn zip(a: Lanes, b: Lanes, f: impl Fn(f32, f32) -> f32) -> Lanes {
    let mut out = [0.0; LANES];
    for i in 0..LANES {
        out[i] = f(a[i], b[i]);
    }
    out
}

#[inline(always)]
fn map(a: Lanes, f: impl Fn(f32) -> f32) -> Lanes {
    zip(a, a, |x, _| f(x))
}

/// 16 pairs, the first and the second of each.
#[inline(always)]
fn unzip<T: Copy>(x: &[T; 2 * LANES], widen: impl Fn(T) -> f32) -> (Lanes, Lanes) {
    let (mut a, mut b) = ([0.0; LANES], [0.0; LANES]);
    for i in 0..LANES {
        a[i] = widen(x[2 * i]);
        b[i] = widen(x[2 * i + 1]);
    }
    (a, b)
}

impl Simd for Scalar {
    const NAME: &'static str = "scalar";
    const ACCUMULATORS: usize = 1;
    type F32 = Lanes;
    type Pair = (Lanes, Lanes);
    type Factor = [f32; 2];
    type I32 = [i32; LANES];
    type Bytes = [u8; 4 * LANES];
    type Tiles = NoTiles;

    #[inline(never)]
    fn run<W: Work<Self>>(self, work: W) -> W::Output {
        work.run(self)
    }

    #[inline(always)]
    fn prefetch<T>(self, _: *const T) {}
    #[inline(always)]
    fn splat(self, x: f32) -> Lanes {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, x: &Lanes) -> Lanes {
        *x
    }
    #[inline(always)]
    fn store(self, x: Lanes, out: &mut Lanes) {
        *out = x;
    }
    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> Lanes {
        let mut out = [0.0; LANES];
        for i in 0..LANES {
            out[i] = f16_to_f32(x[i]);
        }
        out
    }
    #[inline(always)]
    fn add(self, a: Lanes, b: Lanes) -> Lanes {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Lanes, b: Lanes) -> Lanes {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Lanes, b: Lanes) -> Lanes {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Lanes, b: Lanes) -> Lanes {
        zip(a, b, |a, b| a / b)
    }
    // Two roundings: a fused product without the instruction is a slow library call.
    #[inline(always)]
    fn mul_add(self, a: Lanes, b: Lanes, c: Lanes) -> Lanes {
        let mut out = [0.0; LANES];
        for i in 0..LANES {
            out[i] = a[i] * b[i] + c[i];
        }
        out
    }
    #[inline(always)]
    fn max(self, a: Lanes, b: Lanes) -> Lanes {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn first_lanes(self, n: usize, a: Lanes, b: Lanes) -> Lanes {
        let mut out = b;
        let n = n.min(LANES);
        out[..n].copy_from_slice(&a[..n]);
        out
    }
    #[inline(always)]
    fn round(self, x: Lanes) -> Lanes {
        // Adding and taking away 1.5 * 2^23 rounds to even for |x| < 2^22, which is all that exp2 asks for.
        const MAGIC: f32 = 12_582_912.0;
        map(x, |x| (x + MAGIC) - MAGIC)
    }
    #[inline(always)]
    fn pow2(self, n: Lanes) -> Lanes {
        map(n, |n| f32::from_bits((((n as i32) + 127) << 23) as u32))
    }
    #[inline(always)]
    fn round_bf16(self, x: Lanes) -> Lanes {
        map(x, |x| half::bf16::from_f32(x).to_f32())
    }
    #[inline(always)]
    fn store_bf16(self, x: Lanes, out: &mut [u16; LANES]) {
        for i in 0..LANES {
            out[i] = (x[i].to_bits() >> 16) as u16;
        }
    }
    #[inline(always)]
    fn store_bf16_pairs(self, a: Lanes, b: Lanes, out: &mut [u16; 2 * LANES]) {
        for i in 0..LANES {
            out[2 * i] = (a[i].to_bits() >> 16) as u16;
            out[2 * i + 1] = (b[i].to_bits() >> 16) as u16;
        }
    }
    #[inline(always)]
    fn load_nibbles(self, x: &[u8; LANES]) -> (Lanes, Lanes) {
        let (mut low, mut high) = ([0.0; LANES], [0.0; LANES]);
        for i in 0..LANES {
            low[i] = f32::from(x[i] & 0x0f);
            high[i] = f32::from(x[i] >> 4);
        }
        (low, high)
    }

    #[inline(always)]
    fn pair_bf16(self, x: &[u16; 2 * LANES]) -> Self::Pair {
        unzip(x, bf16_to_f32)
    }
    #[inline(always)]
    fn pair_e4m3(self, x: &[u8; 2 * LANES]) -> Self::Pair {
        unzip(x, fp8::e4m3_to_f32)
    }
    #[inline(always)]
    fn pair_e5m2(self, x: &[u8; 2 * LANES]) -> Self::Pair {
        unzip(x, fp8::e5m2_to_f32)
    }
    #[inline(always)]
    fn pair_int8(self, x: &[i8; 2 * LANES]) -> Self::Pair {
        unzip(x, f32::from)
    }
    #[inline(always)]
    fn pair_first(self, x: Self::Pair) -> Self::Pair {
        (x.0, [0.0; LANES])
    }
    #[inline(always)]
    fn pair_second(self, x: Self::Pair) -> Self::Pair {
        ([0.0; LANES], x.1)
    }
    #[inline(always)]
    fn store_factors(self, x: Lanes, out: &mut [[f32; 2]; LANES / 2]) {
        self.store(x, bytemuck::cast_mut(out));
    }
    #[inline(always)]
    fn dot_pair(self, acc: Lanes, x: Self::Pair, q: &[f32; 2]) -> Lanes {
        self.mul_add(x.1, [q[1]; LANES], self.mul_add(x.0, [q[0]; LANES], acc))
    }
    #[inline(always)]
    fn load_bytes(self, x: &[u8; 4 * LANES]) -> Self::Bytes {
        *x
    }
    #[inline(always)]
    fn nibbles(self, x: Self::Bytes) -> (Self::Bytes, Self::Bytes) {
        (x.map(|x| x & 0x0f), x.map(|x| x >> 4))
    }
    #[inline(always)]
    fn store_bytes(self, x: Self::Bytes, out: &mut [u8; 4 * LANES]) {
        *out = x;
    }
    #[inline(always)]
    fn load_i32(self, x: &[i32; LANES]) -> Self::I32 {
        *x
    }
    #[inline(always)]
    fn splat_i32(self, x: i32) -> Self::I32 {
        [x; LANES]
    }
    #[inline(always)]
    fn dot_bytes(self, acc: Self::I32, w: Self::Bytes, a: &[i8; 4]) -> Self::I32 {
        let mut out = acc;
        for i in 0..LANES {
            for k in 0..4 {
                out[i] += i32::from(w[4 * i + k]) * i32::from(a[k]);
            }
        }
        out
    }
    #[inline(always)]
    fn to_f32(self, x: Self::I32) -> Lanes {
        x.map(|x| x as f32)
    }
}
