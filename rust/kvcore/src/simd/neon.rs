//! NEON: 16 lanes in four registers; bf16, fp8 and int8 pairs are widened to f32.

use std::arch::aarch64::*;

use super::tiles::NoTiles;
use super::vector::{LANES, Simd, Work};

/// Proof that the CPU has NEON.
#[derive(Clone, Copy, Debug)]
pub struct Neon(());

impl Neon {
    /// `None` if the CPU lacks the feature.
    pub fn new() -> Option<Self> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Self(()))
    }
}

/// Lanes 0..4, 4..8, 8..12 and 12..16.
type Lanes = [float32x4_t; 4];

/// One expression for each of the four registers.
macro_rules! each {
    (|$i:ident| $body:expr) => {
        // SAFETY: the method's `self` proves the feature; what is read or written lies within 16-lane arrays.
        unsafe {
            [
                {
                    const $i: usize = 0;
                    $body
                },
                {
                    const $i: usize = 1;
                    $body
                },
                {
                    const $i: usize = 2;
                    $body
                },
                {
                    const $i: usize = 3;
                    $body
                },
            ]
        }
    };
}

/// e4m3 codes, one in each 32-bit lane, as f32.
///
/// # Safety
/// The CPU must have NEON.
#[inline(always)]
unsafe fn widen_e4m3(codes: uint32x4_t) -> float32x4_t {
    // SAFETY: the caller's promise.
    unsafe {
        let magnitude = vandq_u32(codes, vdupq_n_u32(0x7f));
        let normal = vaddq_u32(vshlq_n_u32::<20>(magnitude), vdupq_n_u32(120 << 23));
        let tiny = vreinterpretq_u32_f32(vmulq_n_f32(vcvtq_f32_u32(magnitude), 1.0 / 512.0));
        let value = vbslq_u32(vcltq_u32(magnitude, vdupq_n_u32(8)), tiny, normal);
        let value = vbslq_u32(vceqq_u32(magnitude, vdupq_n_u32(0x7f)), vdupq_n_u32(0x7fc0_0000), value);
        let sign = vshlq_n_u32::<24>(vandq_u32(codes, vdupq_n_u32(0x80)));
        vreinterpretq_f32_u32(vorrq_u32(value, sign))
    }
}

/// e5m2 codes, one in each 32-bit lane, as f32.
///
/// # Safety
/// The CPU must have NEON.
#[inline(always)]
unsafe fn widen_e5m2(codes: uint32x4_t) -> float32x4_t {
    // SAFETY: the caller's promise.
    unsafe {
        let magnitude = vandq_u32(codes, vdupq_n_u32(0x7f));
        let shifted = vshlq_n_u32::<21>(magnitude);
        let tiny = vreinterpretq_u32_f32(vmulq_n_f32(vcvtq_f32_u32(magnitude), 1.0 / 65536.0));
        let normal = vaddq_u32(shifted, vdupq_n_u32(112 << 23));
        let value = vbslq_u32(vcltq_u32(magnitude, vdupq_n_u32(4)), tiny, normal);
        let special = vorrq_u32(shifted, vdupq_n_u32(0x7f80_0000));
        let value = vbslq_u32(vcgeq_u32(magnitude, vdupq_n_u32(0x7c)), special, value);
        let sign = vshlq_n_u32::<24>(vandq_u32(codes, vdupq_n_u32(0x80)));
        vreinterpretq_f32_u32(vorrq_u32(value, sign))
    }
}

/// # Safety
/// The CPU must have NEON.
#[inline(always)]
unsafe fn round_bf16(x: float32x4_t) -> float32x4_t {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = vreinterpretq_u32_f32(x);
        let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
        let kept = vbslq_u32(vceqq_f32(x, x), rounded, quiet);
        vreinterpretq_f32_u32(vandq_u32(kept, vdupq_n_u32(0xffff_0000)))
    }
}

impl Simd for Neon {
    const NAME: &'static str = "neon";
    const ACCUMULATORS: usize = 4;
    type F32 = Lanes;
    type Pair = (Lanes, Lanes);
    type Factor = [f32; 2];
    type I32 = [int32x4_t; 4];
    type Bytes = [uint8x16_t; 4];
    type Tiles = NoTiles;

    #[inline]
    fn run<W: Work<Self>>(self, work: W) -> W::Output {
        #[inline(never)]
        #[target_feature(enable = "neon")]
        fn enabled<W: Work<Neon>>(s: Neon, work: W) -> W::Output {
            work.run(s)
        }
        // SAFETY: `self` proves the feature.
        unsafe { enabled(self, work) }
    }

    #[inline(always)]
    fn prefetch<T>(self, at: *const T) {
        // SAFETY: a hint that never faults and writes neither memory nor registers.
        unsafe {
            std::arch::asm!("prfm pldl2keep, [{at}]", at = in(reg) at, options(nostack, preserves_flags, readonly))
        }
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Lanes {
        // SAFETY: `self` proves the feature.
        unsafe { [vdupq_n_f32(x); 4] }
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Lanes {
        each!(|I| vld1q_f32(x.as_ptr().add(4 * I)))
    }
    #[inline(always)]
    fn store(self, x: Lanes, out: &mut [f32; LANES]) {
        each!(|I| vst1q_f32(out.as_mut_ptr().add(4 * I), x[I]));
    }
    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> Lanes {
        // The f16 vector types are not in every stable compiler, so the conversion goes value by value.
        let mut wide = [0.0; LANES];
        for i in 0..LANES {
            wide[i] = half::f16::from_bits(x[i]).to_f32();
        }
        self.load(&wide)
    }
    #[inline(always)]
    fn add(self, a: Lanes, b: Lanes) -> Lanes {
        each!(|I| vaddq_f32(a[I], b[I]))
    }
    #[inline(always)]
    fn sub(self, a: Lanes, b: Lanes) -> Lanes {
        each!(|I| vsubq_f32(a[I], b[I]))
    }
    #[inline(always)]
    fn mul(self, a: Lanes, b: Lanes) -> Lanes {
        each!(|I| vmulq_f32(a[I], b[I]))
    }
    #[inline(always)]
    fn div(self, a: Lanes, b: Lanes) -> Lanes {
        each!(|I| vdivq_f32(a[I], b[I]))
    }
    #[inline(always)]
    fn mul_add(self, a: Lanes, b: Lanes, c: Lanes) -> Lanes {
        each!(|I| vfmaq_f32(c[I], a[I], b[I]))
    }
    #[inline(always)]
    fn max(self, a: Lanes, b: Lanes) -> Lanes {
        each!(|I| vmaxq_f32(a[I], b[I]))
    }
    #[inline(always)]
    fn first_lanes(self, n: usize, a: Lanes, b: Lanes) -> Lanes {
        const LANE: [u32; LANES] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
        each!(|I| {
            let below = vcltq_u32(vld1q_u32(LANE.as_ptr().add(4 * I)), vdupq_n_u32(n as u32));
            vbslq_f32(below, a[I], b[I])
        })
    }
    #[inline(always)]
    fn round(self, x: Lanes) -> Lanes {
        each!(|I| vrndnq_f32(x[I]))
    }
    #[inline(always)]
    fn pow2(self, n: Lanes) -> Lanes {
        each!(|I| {
            let biased = vaddq_s32(vcvtq_s32_f32(n[I]), vdupq_n_s32(127));
            vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased))
        })
    }
    #[inline(always)]
    fn round_bf16(self, x: Lanes) -> Lanes {
        each!(|I| round_bf16(x[I]))
    }
    #[inline(always)]
    fn store_bf16(self, x: Lanes, out: &mut [u16; LANES]) {
        each!(|I| {
            let halves = vshrn_n_u32::<16>(vreinterpretq_u32_f32(x[I]));
            vst1_u16(out.as_mut_ptr().add(4 * I), halves)
        });
    }
    #[inline(always)]
    fn store_bf16_pairs(self, a: Lanes, b: Lanes, out: &mut [u16; 2 * LANES]) {
        each!(|I| {
            // The lower halves of rounded values are zero.
            let pairs = vorrq_u32(vshrq_n_u32::<16>(vreinterpretq_u32_f32(a[I])), vreinterpretq_u32_f32(b[I]));
            vst1q_u16(out.as_mut_ptr().add(8 * I), vreinterpretq_u16_u32(pairs))
        });
    }
    #[inline(always)]
    fn load_nibbles(self, x: &[u8; LANES]) -> (Lanes, Lanes) {
        // SAFETY: `self` proves the feature; 16 bytes are readable behind `x`.
        unsafe {
            let bytes = vld1q_u8(x.as_ptr());
            let wide = |v: uint8x16_t| {
                let (a, b) = (vmovl_u8(vget_low_u8(v)), vmovl_u8(vget_high_u8(v)));
                [vget_low_u16(a), vget_high_u16(a), vget_low_u16(b), vget_high_u16(b)]
                    .map(|v| vcvtq_f32_u32(vmovl_u16(v)))
            };
            (wide(vandq_u8(bytes, vdupq_n_u8(0x0f))), wide(vshrq_n_u8::<4>(bytes)))
        }
    }

    #[inline(always)]
    fn pair_bf16(self, x: &[u16; 2 * LANES]) -> Self::Pair {
        let pairs = each!(|I| vreinterpretq_u32_u16(vld1q_u16(x.as_ptr().add(8 * I))));
        let first = each!(|I| vreinterpretq_f32_u32(vshlq_n_u32::<16>(pairs[I])));
        let second = each!(|I| vreinterpretq_f32_u32(vandq_u32(pairs[I], vdupq_n_u32(0xffff_0000))));
        (first, second)
    }
    #[inline(always)]
    fn pair_e4m3(self, x: &[u8; 2 * LANES]) -> Self::Pair {
        let pairs = each!(|I| vmovl_u16(vreinterpret_u16_u8(vld1_u8(x.as_ptr().add(8 * I)))));
        (each!(|I| widen_e4m3(pairs[I])), each!(|I| widen_e4m3(vshrq_n_u32::<8>(pairs[I]))))
    }
    #[inline(always)]
    fn pair_e5m2(self, x: &[u8; 2 * LANES]) -> Self::Pair {
        let pairs = each!(|I| vmovl_u16(vreinterpret_u16_u8(vld1_u8(x.as_ptr().add(8 * I)))));
        (each!(|I| widen_e5m2(pairs[I])), each!(|I| widen_e5m2(vshrq_n_u32::<8>(pairs[I]))))
    }
    #[inline(always)]
    fn pair_int8(self, x: &[i8; 2 * LANES]) -> Self::Pair {
        let pairs = each!(|I| vmovl_s16(vreinterpret_s16_s8(vld1_s8(x.as_ptr().add(8 * I)))));
        let first = each!(|I| vcvtq_f32_s32(vshrq_n_s32::<24>(vshlq_n_s32::<24>(pairs[I]))));
        (first, each!(|I| vcvtq_f32_s32(vshrq_n_s32::<8>(pairs[I]))))
    }
    #[inline(always)]
    fn pair_first(self, x: Self::Pair) -> Self::Pair {
        (x.0, self.splat(0.0))
    }
    #[inline(always)]
    fn pair_second(self, x: Self::Pair) -> Self::Pair {
        (self.splat(0.0), x.1)
    }
    #[inline(always)]
    fn store_factors(self, x: Lanes, out: &mut [[f32; 2]; LANES / 2]) {
        self.store(x, bytemuck::cast_mut(out));
    }
    #[inline(always)]
    fn dot_pair(self, acc: Lanes, x: Self::Pair, q: &[f32; 2]) -> Lanes {
        self.mul_add(x.1, self.splat(q[1]), self.mul_add(x.0, self.splat(q[0]), acc))
    }
    #[inline(always)]
    fn load_bytes(self, x: &[u8; 4 * LANES]) -> Self::Bytes {
        each!(|I| vld1q_u8(x.as_ptr().add(16 * I)))
    }
    #[inline(always)]
    fn nibbles(self, x: Self::Bytes) -> (Self::Bytes, Self::Bytes) {
        (each!(|I| vandq_u8(x[I], vdupq_n_u8(0x0f))), each!(|I| vshrq_n_u8::<4>(x[I])))
    }
    #[inline(always)]
    fn store_bytes(self, x: Self::Bytes, out: &mut [u8; 4 * LANES]) {
        for (x, out) in x.into_iter().zip(out.as_chunks_mut::<16>().0) {
            // SAFETY: `self` proves the feature; 16 bytes are writable behind `out`.
            unsafe { vst1q_u8(out.as_mut_ptr(), x) }
        }
    }
    #[inline(always)]
    fn load_i32(self, x: &[i32; LANES]) -> Self::I32 {
        each!(|I| vld1q_s32(x.as_ptr().add(4 * I)))
    }
    #[inline(always)]
    fn splat_i32(self, x: i32) -> Self::I32 {
        each!(|_I| vdupq_n_s32(x))
    }
    #[inline(always)]
    fn dot_bytes(self, acc: Self::I32, w: Self::Bytes, a: &[i8; 4]) -> Self::I32 {
        // A product of 8 unsigned and 8 signed bits fits into 16.
        each!(|I| {
            let a = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(i32::from_le_bytes(a.map(|a| a as u8)))));
            let low = vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(w[I]))), a);
            let high = vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(w[I]))), a);
            vaddq_s32(acc[I], vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)))
        })
    }
    #[inline(always)]
    fn to_f32(self, x: Self::I32) -> Lanes {
        each!(|I| vcvtq_f32_s32(x[I]))
    }
}
