//! AVX2 with FMA and F16C: 16 lanes in two registers; bf16, fp8 and int8 pairs are widened to f32.

use std::arch::x86_64::*;

use super::tiles::NoTiles;
use super::vector::{LANES, Simd, Work};

/// Proof that the CPU has AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub struct Avx2(());

impl Avx2 {
    /// `None` if the CPU lacks a feature.
    pub fn new() -> Option<Self> {
        let has =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        has.then_some(Self(()))
    }
}

/// Lanes 0..8 and 8..16.
type Lanes = (__m256, __m256);

/// The same binary intrinsic on both halves.
macro_rules! both {
    ($op:ident, $a:expr, $b:expr) => {
        // SAFETY: the method's `self` proves the feature.
        unsafe { ($op($a.0, $b.0), $op($a.1, $b.1)) }
    };
}

/// e4m3 codes, in the upper byte of each word, as f32.
///
/// With the code's bits behind a half's sign and highest exponent bit the half is 2^-8 of the value, subnormal where
/// the code is; only NaN has to be told apart.
///
/// # Safety
/// The CPU must have AVX2 and F16C.
#[inline(always)]
unsafe fn widen_e4m3(codes: __m256i) -> Lanes {
    // SAFETY: the caller's promise.
    unsafe {
        let magnitude = _mm256_and_si256(codes, _mm256_set1_epi16(0x7f00));
        let sign = _mm256_and_si256(codes, _mm256_set1_epi16(i16::MIN));
        let is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f00));
        let half = _mm256_or_si256(sign, _mm256_srli_epi16::<1>(_mm256_or_si256(magnitude, is_nan)));
        let widen = |half| _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0));
        (widen(_mm256_castsi256_si128(half)), widen(_mm256_extracti128_si256::<1>(half)))
    }
}

/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
unsafe fn round_bf16(x: __m256) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = _mm256_castps_si256(x);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
        let kept = _mm256_blendv_epi8(rounded, quiet, nan);
        _mm256_castsi256_ps(_mm256_and_si256(kept, _mm256_set1_epi32(0xffff_0000_u32 as i32)))
    }
}

impl Simd for Avx2 {
    const NAME: &'static str = "avx2";
    const ACCUMULATORS: usize = 4;
    type F32 = Lanes;
    type Pair = (Lanes, Lanes);
    type Factor = [f32; 2];
    type I32 = (__m256i, __m256i);
    type Bytes = (__m256i, __m256i);
    type Tiles = NoTiles;

    #[inline]
    fn run<W: Work<Self>>(self, work: W) -> W::Output {
        #[inline(never)]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn enabled<W: Work<Avx2>>(s: Avx2, work: W) -> W::Output {
            work.run(s)
        }
        // SAFETY: `self` proves the features.
        unsafe { enabled(self, work) }
    }

    #[inline(always)]
    fn prefetch<T>(self, at: *const T) {
        // SAFETY: every x86-64 CPU has the instruction; it never faults, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Lanes {
        // SAFETY: `self` proves the feature.
        let v = unsafe { _mm256_set1_ps(x) };
        (v, v)
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Lanes {
        // SAFETY: `self` proves the feature; 16 floats are readable behind `x`, at any alignment.
        unsafe { (_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))) }
    }
    #[inline(always)]
    fn store(self, x: Lanes, out: &mut [f32; LANES]) {
        // SAFETY: `self` proves the feature; 16 floats are writable behind `out`, at any alignment.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), x.0);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), x.1);
        }
    }
    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> Lanes {
        // SAFETY: `self` proves the feature; 32 bytes are readable behind `x`, at any alignment.
        unsafe {
            let p: *const __m128i = x.as_ptr().cast();
            (_mm256_cvtph_ps(_mm_loadu_si128(p)), _mm256_cvtph_ps(_mm_loadu_si128(p.add(1))))
        }
    }
    #[inline(always)]
    fn add(self, a: Lanes, b: Lanes) -> Lanes {
        both!(_mm256_add_ps, a, b)
    }
    #[inline(always)]
    fn sub(self, a: Lanes, b: Lanes) -> Lanes {
        both!(_mm256_sub_ps, a, b)
    }
    #[inline(always)]
    fn mul(self, a: Lanes, b: Lanes) -> Lanes {
        both!(_mm256_mul_ps, a, b)
    }
    #[inline(always)]
    fn div(self, a: Lanes, b: Lanes) -> Lanes {
        both!(_mm256_div_ps, a, b)
    }
    #[inline(always)]
    fn mul_add(self, a: Lanes, b: Lanes, c: Lanes) -> Lanes {
        // SAFETY: `self` proves the feature.
        unsafe { (_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1)) }
    }
    #[inline(always)]
    fn max(self, a: Lanes, b: Lanes) -> Lanes {
        both!(_mm256_max_ps, a, b)
    }
    #[inline(always)]
    fn first_lanes(self, n: usize, a: Lanes, b: Lanes) -> Lanes {
        // SAFETY: `self` proves the feature.
        unsafe {
            let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let n = n.min(LANES) as i32;
            let mask = |n: i32| _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane));
            (_mm256_blendv_ps(b.0, a.0, mask(n)), _mm256_blendv_ps(b.1, a.1, mask(n - 8)))
        }
    }
    #[inline(always)]
    fn round(self, x: Lanes) -> Lanes {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        // SAFETY: `self` proves the feature.
        unsafe { (_mm256_round_ps::<NEAREST>(x.0), _mm256_round_ps::<NEAREST>(x.1)) }
    }
    #[inline(always)]
    fn pow2(self, n: Lanes) -> Lanes {
        // SAFETY: `self` proves the feature.
        unsafe {
            let pow2 = |n| {
                let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
            };
            (pow2(n.0), pow2(n.1))
        }
    }
    #[inline(always)]
    fn round_bf16(self, x: Lanes) -> Lanes {
        // SAFETY: `self` proves the feature.
        unsafe { (round_bf16(x.0), round_bf16(x.1)) }
    }
    #[inline(always)]
    fn store_bf16(self, x: Lanes, out: &mut [u16; LANES]) {
        // SAFETY: `self` proves the feature; 32 bytes are writable behind `out`, at any alignment.
        unsafe {
            let halves = |x| _mm256_srli_epi32::<16>(_mm256_castps_si256(x));
            let packed = _mm256_packus_epi32(halves(x.0), halves(x.1));
            _mm256_storeu_si256(out.as_mut_ptr().cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(packed));
        }
    }
    #[inline(always)]
    fn store_bf16_pairs(self, a: Lanes, b: Lanes, out: &mut [u16; 2 * LANES]) {
        // SAFETY: `self` proves the feature; 64 bytes are writable behind `out`, at any alignment.
        unsafe {
            // The lower halves of rounded values are zero.
            let pairs = |a, b| _mm256_or_si256(_mm256_srli_epi32::<16>(_mm256_castps_si256(a)), _mm256_castps_si256(b));
            let p: *mut __m256i = out.as_mut_ptr().cast();
            _mm256_storeu_si256(p, pairs(a.0, b.0));
            _mm256_storeu_si256(p.add(1), pairs(a.1, b.1));
        }
    }
    #[inline(always)]
    fn load_nibbles(self, x: &[u8; LANES]) -> (Lanes, Lanes) {
        // SAFETY: `self` proves the feature; 16 bytes are readable behind `x`, at any alignment.
        unsafe {
            let bytes = _mm_loadu_si128(x.as_ptr().cast());
            let nibble = _mm_set1_epi8(0x0f);
            let wide = |v| {
                let part = |v| _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(v));
                (part(v), part(_mm_srli_si128::<8>(v)))
            };
            (wide(_mm_and_si128(bytes, nibble)), wide(_mm_and_si128(_mm_srli_epi16::<4>(bytes), nibble)))
        }
    }

    #[inline(always)]
    fn pair_bf16(self, x: &[u16; 2 * LANES]) -> Self::Pair {
        // SAFETY: `self` proves the feature; 64 bytes are readable behind `x`, at any alignment.
        unsafe {
            let p: *const __m256i = x.as_ptr().cast();
            let (a, b) = (_mm256_loadu_si256(p), _mm256_loadu_si256(p.add(1)));
            let first = |v| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(v));
            let second = |v| _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(0xffff_0000_u32 as i32)));
            ((first(a), first(b)), (second(a), second(b)))
        }
    }
    #[inline(always)]
    fn pair_e4m3(self, x: &[u8; 2 * LANES]) -> Self::Pair {
        // SAFETY: `self` proves the features; 32 bytes are readable behind `x`, at any alignment.
        unsafe {
            let codes = _mm256_loadu_si256(x.as_ptr().cast());
            (widen_e4m3(_mm256_slli_epi16::<8>(codes)), widen_e4m3(codes))
        }
    }
    #[inline(always)]
    fn pair_e5m2(self, x: &[u8; 2 * LANES]) -> Self::Pair {
        // SAFETY: `self` proves the features; 32 bytes are readable behind `x`, at any alignment.
        unsafe {
            // e5m2 is the upper byte of a half.
            let p: *const __m128i = x.as_ptr().cast();
            let (a, b) = (_mm_loadu_si128(p), _mm_loadu_si128(p.add(1)));
            let first = |v| _mm256_cvtph_ps(_mm_slli_epi16::<8>(v));
            let second = |v| _mm256_cvtph_ps(_mm_and_si128(v, _mm_set1_epi16(0xff00_u16 as i16)));
            ((first(a), first(b)), (second(a), second(b)))
        }
    }
    #[inline(always)]
    fn pair_int8(self, x: &[i8; 2 * LANES]) -> Self::Pair {
        // SAFETY: `self` proves the feature; 32 bytes are readable behind `x`, at any alignment.
        unsafe {
            let p: *const __m128i = x.as_ptr().cast();
            let (a, b) = (_mm256_cvtepi16_epi32(_mm_loadu_si128(p)), _mm256_cvtepi16_epi32(_mm_loadu_si128(p.add(1))));
            let first = |v| _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(_mm256_slli_epi32::<24>(v)));
            let second = |v| _mm256_cvtepi32_ps(_mm256_srai_epi32::<8>(v));
            ((first(a), first(b)), (second(a), second(b)))
        }
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
        // SAFETY: `self` proves the feature; 64 bytes are readable behind `x`, at any alignment.
        unsafe { (_mm256_loadu_si256(x.as_ptr().cast()), _mm256_loadu_si256(x[32..].as_ptr().cast())) }
    }
    #[inline(always)]
    fn nibbles(self, x: Self::Bytes) -> (Self::Bytes, Self::Bytes) {
        // SAFETY: `self` proves the feature.
        unsafe {
            let mask = _mm256_set1_epi8(0x0f);
            let low = |x| _mm256_and_si256(x, mask);
            let high = |x| _mm256_and_si256(_mm256_srli_epi16::<4>(x), mask);
            ((low(x.0), low(x.1)), (high(x.0), high(x.1)))
        }
    }
    #[inline(always)]
    fn store_bytes(self, x: Self::Bytes, out: &mut [u8; 4 * LANES]) {
        // SAFETY: `self` proves the feature; 64 bytes are writable behind `out`, at any alignment.
        unsafe {
            _mm256_storeu_si256(out.as_mut_ptr().cast(), x.0);
            _mm256_storeu_si256(out[32..].as_mut_ptr().cast(), x.1);
        }
    }
    #[inline(always)]
    fn load_i32(self, x: &[i32; LANES]) -> Self::I32 {
        // SAFETY: `self` proves the feature; 64 bytes are readable behind `x`, at any alignment.
        unsafe { (_mm256_loadu_si256(x.as_ptr().cast()), _mm256_loadu_si256(x[8..].as_ptr().cast())) }
    }
    #[inline(always)]
    fn splat_i32(self, x: i32) -> Self::I32 {
        // SAFETY: `self` proves the feature.
        unsafe { (_mm256_set1_epi32(x), _mm256_set1_epi32(x)) }
    }
    #[inline(always)]
    fn dot_bytes(self, acc: Self::I32, w: Self::Bytes, a: &[i8; 4]) -> Self::I32 {
        // SAFETY: `self` proves the feature.
        unsafe {
            // Bytes in even and in odd places, as 16 bits: products of 8 bits added in pairs would not fit into 16.
            let a = _mm256_set1_epi32(i32::from_le_bytes(a.map(|a| a as u8)));
            let (even, odd) = (_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(a)), _mm256_srai_epi16::<8>(a));
            let add = |acc, w| {
                let low = _mm256_and_si256(w, _mm256_set1_epi16(0x00ff));
                let sum = _mm256_madd_epi16(_mm256_srli_epi16::<8>(w), odd);
                _mm256_add_epi32(acc, _mm256_add_epi32(_mm256_madd_epi16(low, even), sum))
            };
            (add(acc.0, w.0), add(acc.1, w.1))
        }
    }
    #[inline(always)]
    fn to_f32(self, x: Self::I32) -> Lanes {
        // SAFETY: `self` proves the feature.
        unsafe { (_mm256_cvtepi32_ps(x.0), _mm256_cvtepi32_ps(x.1)) }
    }
}
