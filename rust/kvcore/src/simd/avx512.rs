//! AVX-512 without bf16 instructions (F, BW, DQ, VL, VNNI): bf16, fp8 and int8 pairs are widened to f32. (The first server
//! CPUs with AVX-512 lack the byte products of VNNI; they run on AVX2.)

use std::arch::x86_64::*;

use super::tiles::NoTiles;
use super::vector::{LANES, Simd, Work};
use crate::formats::fp8;

/// Proof that the CPU has AVX-512 F, BW, DQ, VL and VNNI, and FMA.
#[derive(Clone, Copy, Debug)]
pub struct Avx512(());

impl Avx512 {
    /// `None` if the CPU lacks a feature.
    pub fn new() -> Option<Self> {
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma");
        has.then_some(Self(()))
    }
}

/// A register's bytes at any address.
#[derive(Clone, Copy)]
#[repr(C, packed)]
pub(super) struct Unaligned(pub(super) __m512i);

/// The operations on 16 f32 lanes in one register, for both AVX-512 levels.
macro_rules! f32_in_one_register {
    () => {
        #[inline(always)]
        fn prefetch<T>(self, at: *const T) {
            // SAFETY: every x86-64 CPU has the instruction; it never faults, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
        }
        #[inline(always)]
        fn splat(self, x: f32) -> __m512 {
            // SAFETY: `self` proves the feature.
            unsafe { _mm512_set1_ps(x) }
        }
        #[inline(always)]
        fn load(self, x: &[f32; LANES]) -> __m512 {
            // SAFETY: `self` proves the feature; 16 floats are readable behind `x`, at any alignment.
            unsafe { _mm512_loadu_ps(x.as_ptr()) }
        }
        #[inline(always)]
        fn store(self, x: __m512, out: &mut [f32; LANES]) {
            // SAFETY: `self` proves the feature; 16 floats are writable behind `out`, at any alignment.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), x) }
        }
        #[inline(always)]
        fn load_f16(self, x: &[u16; LANES]) -> __m512 {
            // SAFETY: `self` proves the feature; 32 bytes are readable behind `x`, at any alignment.
            unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())) }
        }
        #[inline(always)]
        fn add(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: `self` proves the feature.
            unsafe { _mm512_add_ps(a, b) }
        }
        #[inline(always)]
        fn sub(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: `self` proves the feature.
            unsafe { _mm512_sub_ps(a, b) }
        }
        #[inline(always)]
        fn mul(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: `self` proves the feature.
            unsafe { _mm512_mul_ps(a, b) }
        }
        #[inline(always)]
        fn div(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: `self` proves the feature.
            unsafe { _mm512_div_ps(a, b) }
        }
        #[inline(always)]
        fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
            // SAFETY: `self` proves the feature.
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        fn max(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: `self` proves the feature.
            unsafe { _mm512_max_ps(a, b) }
        }
        #[inline(always)]
        fn first_lanes(self, n: usize, a: __m512, b: __m512) -> __m512 {
            let mask = if n >= LANES { u16::MAX } else { (1u16 << n) - 1 };
            // SAFETY: `self` proves the feature.
            unsafe { _mm512_mask_blend_ps(mask, b, a) }
        }
        #[inline(always)]
        fn round(self, x: __m512) -> __m512 {
            // SAFETY: `self` proves the feature.
            unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x) }
        }
        #[inline(always)]
        fn pow2(self, n: __m512) -> __m512 {
            // SAFETY: `self` proves the feature.
            unsafe {
                let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
                _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
            }
        }
        #[inline(always)]
        fn max_of_each(self, x: [__m512; LANES]) -> __m512 {
            // SAFETY: `self` proves the feature.
            unsafe { of_each!(x, _mm512_max_ps) }
        }
        #[inline(always)]
        fn sum_of_each(self, x: [__m512; LANES]) -> __m512 {
            // SAFETY: `self` proves the feature.
            unsafe { of_each!(x, _mm512_add_ps) }
        }
        #[inline(always)]
        fn round_bf16(self, x: __m512) -> __m512 {
            // SAFETY: `self` proves the feature.
            unsafe {
                let bits = _mm512_castps_si512(x);
                let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
                let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
                let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
                let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
                let kept = _mm512_mask_blend_epi32(nan, rounded, quiet);
                _mm512_castsi512_ps(_mm512_and_si512(kept, _mm512_set1_epi32(0xffff_0000_u32 as i32)))
            }
        }
        #[inline(always)]
        fn store_bf16(self, x: __m512, out: &mut [u16; LANES]) {
            // SAFETY: `self` proves the feature; 32 bytes are writable behind `out`, at any alignment.
            unsafe {
                let halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_castps_si512(x)));
                _mm256_storeu_si256(out.as_mut_ptr().cast(), halves);
            }
        }
        #[inline(always)]
        fn store_bf16_pairs(self, a: __m512, b: __m512, out: &mut [u16; 2 * LANES]) {
            // SAFETY: `self` proves the feature; 64 bytes are writable behind `out`, at any alignment.
            unsafe {
                // The lower halves of rounded values are zero.
                let pairs = _mm512_or_si512(_mm512_srli_epi32::<16>(_mm512_castps_si512(a)), _mm512_castps_si512(b));
                _mm512_storeu_si512(out.as_mut_ptr().cast(), pairs);
            }
        }
        #[inline(always)]
        fn load_bytes(self, x: &[u8; 4 * LANES]) -> __m512i {
            // SAFETY: `self` proves the feature; 64 bytes are readable behind `x`, at any alignment.
            unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
        }
        #[inline(always)]
        fn stream_bytes(self, x: &[u8; 4 * LANES]) -> __m512i {
            // The compiler keeps volatile loads in order.
            // SAFETY: `self` proves the feature; 64 bytes are readable behind `x`, at any alignment.
            unsafe { std::ptr::from_ref(x).cast::<Unaligned>().read_volatile().0 }
        }
        #[inline(always)]
        fn nibbles(self, x: __m512i) -> (__m512i, __m512i) {
            // SAFETY: `self` proves the feature.
            unsafe {
                let mask = _mm512_set1_epi8(0x0f);
                (_mm512_and_si512(x, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(x), mask))
            }
        }
        #[inline(always)]
        fn store_bytes(self, x: __m512i, out: &mut [u8; 4 * LANES]) {
            // SAFETY: `self` proves the feature; 64 bytes are writable behind `out`, at any alignment.
            unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), x) }
        }
        #[inline(always)]
        fn load_i32(self, x: &[i32; LANES]) -> __m512i {
            // SAFETY: `self` proves the feature; 64 bytes are readable behind `x`, at any alignment.
            unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
        }
        #[inline(always)]
        fn splat_i32(self, x: i32) -> __m512i {
            // SAFETY: `self` proves the feature.
            unsafe { _mm512_set1_epi32(x) }
        }
        #[inline(always)]
        fn dot_bytes(self, acc: __m512i, w: __m512i, a: &[i8; 4]) -> __m512i {
            // SAFETY: `self` proves the feature.
            unsafe { _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(i32::from_le_bytes(a.map(|a| a as u8)))) }
        }
        #[inline(always)]
        fn to_f32(self, x: __m512i) -> __m512 {
            // SAFETY: `self` proves the feature.
            unsafe { _mm512_cvtepi32_ps(x) }
        }
        #[inline(always)]
        fn load_nibbles(self, x: &[u8; LANES]) -> (__m512, __m512) {
            // SAFETY: `self` proves the feature; 16 bytes are readable behind `x`, at any alignment.
            unsafe {
                let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(x.as_ptr().cast()));
                let low = _mm512_and_si512(bytes, _mm512_set1_epi32(0x0f));
                (_mm512_cvtepi32_ps(low), _mm512_cvtepi32_ps(_mm512_srli_epi32::<4>(bytes)))
            }
        }
    };
}
pub(super) use f32_in_one_register;

/// 16 vectors, each reduced by `$op` to a lane of one: what two vectors have side by side is brought below each other, so that
/// each step halves the vectors.
macro_rules! of_each {
    ($x:ident, $op:ident) => {{
        let mut two = [$x[0]; 8];
        for i in 0..8 {
            let (a, b) = ($x[2 * i], $x[2 * i + 1]);
            two[i] = $op(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        }
        let mut four = [$x[0]; 4];
        for i in 0..4 {
            let (a, b) = (_mm512_castps_pd(two[2 * i]), _mm512_castps_pd(two[2 * i + 1]));
            let (low, high) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
            four[i] = $op(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
        }
        let mut eight = [$x[0]; 2];
        for i in 0..2 {
            let (a, b) = (four[2 * i], four[2 * i + 1]);
            eight[i] = $op(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
        }
        let [a, b] = eight;
        $op(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b))
    }};
}
pub(super) use of_each;

/// The first and the second of 16 pairs of 8-bit integers, as f32.
///
/// # Safety
/// The CPU must have AVX-512 F.
#[inline(always)]
pub(super) unsafe fn widen_int8(pairs: &[i8; 2 * LANES]) -> (__m512, __m512) {
    // SAFETY: the caller's promise; 32 bytes are readable behind `pairs`, at any alignment.
    unsafe {
        let pairs = _mm512_cvtepi16_epi32(_mm256_loadu_si256(pairs.as_ptr().cast()));
        let first = _mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(pairs));
        (_mm512_cvtepi32_ps(first), _mm512_cvtepi32_ps(_mm512_srai_epi32::<8>(pairs)))
    }
}

/// 16 pairs of bf16 as f32.
///
/// # Safety
/// The CPU must have AVX-512 F.
#[inline(always)]
unsafe fn widen_pairs(pairs: __m512i) -> (__m512, __m512) {
    // SAFETY: the caller's promise.
    unsafe {
        let second = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
        (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(second))
    }
}

/// bf16 bits of the magnitudes that are not `8 <= magnitude < 0x7f`, by their lowest five bits: the subnormals, and NaN.
static E4M3_SPECIAL: [u16; 32] = {
    let mut table = [0; 32];
    let mut code = 0;
    while code < 8 {
        table[code] = fp8::e4m3_to_bf16_bits(code as u8);
        code += 1;
    }
    table[0x7f & 31] = fp8::e4m3_to_bf16_bits(0x7f);
    table
};

/// 32 e4m3 codes as bf16: exponent and mantissa are moved to their place, and what that gets wrong is looked up.
///
/// # Safety
/// The CPU must have AVX-512 F and BW.
#[inline(always)]
unsafe fn e4m3_to_bf16(codes: &[u8; 2 * LANES]) -> __m512i {
    // SAFETY: the caller's promise; 32 bytes are readable behind `codes` and 64 behind the table.
    unsafe {
        let codes = _mm512_cvtepi8_epi16(_mm256_loadu_si256(codes.as_ptr().cast()));
        let magnitude = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
        // The bias is 7 here and 127 there.
        let value = _mm512_add_epi16(_mm512_slli_epi16::<4>(magnitude), _mm512_set1_epi16(120 << 7));
        let from_8 = _mm512_sub_epi16(magnitude, _mm512_set1_epi16(8));
        let special = _mm512_cmpgt_epu16_mask(from_8, _mm512_set1_epi16(0x7e - 8));
        let table = _mm512_loadu_si512(E4M3_SPECIAL.as_ptr().cast());
        let value = _mm512_mask_permutexvar_epi16(value, special, magnitude, table);
        // value | (codes & sign)
        _mm512_ternarylogic_epi32::<0xf8>(value, codes, _mm512_set1_epi16(i16::MIN))
    }
}

impl Simd for Avx512 {
    const NAME: &'static str = "avx512f";
    const ACCUMULATORS: usize = 16;
    type F32 = __m512;
    type Pair = (__m512, __m512);
    type Factor = [f32; 2];
    type I32 = __m512i;
    type Bytes = __m512i;
    type Tiles = NoTiles;

    #[inline]
    fn run<W: Work<Self>>(self, work: W) -> W::Output {
        #[inline(never)]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
        fn enabled<W: Work<Avx512>>(s: Avx512, work: W) -> W::Output {
            work.run(s)
        }
        // SAFETY: `self` proves the features.
        unsafe { enabled(self, work) }
    }

    f32_in_one_register!();

    #[inline(always)]
    fn pair_bf16(self, x: &[u16; 2 * LANES]) -> Self::Pair {
        // SAFETY: `self` proves the feature; 64 bytes are readable behind `x`, at any alignment.
        unsafe { widen_pairs(_mm512_loadu_si512(x.as_ptr().cast())) }
    }
    #[inline(always)]
    fn pair_e4m3(self, x: &[u8; 2 * LANES]) -> Self::Pair {
        // SAFETY: `self` proves the feature; 32 bytes are readable behind `x`, at any alignment.
        unsafe { widen_pairs(e4m3_to_bf16(x)) }
    }
    #[inline(always)]
    fn pair_e5m2(self, x: &[u8; 2 * LANES]) -> Self::Pair {
        // SAFETY: `self` proves the features; 32 bytes are readable behind `x`, at any alignment.
        unsafe {
            // e5m2 is the upper byte of a half.
            let pairs = _mm256_loadu_si256(x.as_ptr().cast());
            let second = _mm256_and_si256(pairs, _mm256_set1_epi16(0xff00_u16 as i16));
            (_mm512_cvtph_ps(_mm256_slli_epi16::<8>(pairs)), _mm512_cvtph_ps(second))
        }
    }
    #[inline(always)]
    fn pair_int8(self, x: &[i8; 2 * LANES]) -> Self::Pair {
        // SAFETY: `self` proves the feature.
        unsafe { widen_int8(x) }
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
    fn store_factors(self, x: __m512, out: &mut [[f32; 2]; LANES / 2]) {
        self.store(x, bytemuck::cast_mut(out));
    }
    #[inline(always)]
    fn dot_pair(self, acc: __m512, x: Self::Pair, q: &[f32; 2]) -> __m512 {
        self.mul_add(x.1, self.splat(q[1]), self.mul_add(x.0, self.splat(q[0]), acc))
    }
}
