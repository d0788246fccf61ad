//! AVX-512 with dot products of bf16 and byte permutes (BF16, VBMI): fp8 widens to bf16 by table look-up.

use std::arch::x86_64::*;

use super::amx::Amx;
use super::avx512::{Avx512, Unaligned, f32_in_one_register, of_each, widen_int8};
use super::vector::{LANES, Simd, Work};
use crate::formats::fp8;

/// Proof that the CPU has what [`Avx512`] asks for, and AVX-512 BF16 and VBMI; and tile registers, if they are to be used.
#[derive(Clone, Copy, Debug)]
pub struct Avx512Bf16(Option<Amx>);

impl Avx512Bf16 {
    /// `None` if the CPU lacks a feature.
    pub fn new() -> Option<Self> {
        let has = is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512vbmi");
        Avx512::new().filter(|_| has).map(|_| Self(None))
    }

    /// The same with tile registers: `None` if the CPU lacks them.
    pub fn with_amx() -> Option<Self> {
        Self::new().and_then(|_| Amx::new()).map(|amx| Self(Some(amx)))
    }

    /// Whether this CPU multiplies no more bf16 pairs a second than f32 values would give, so that it gains by widening,
    /// which [`Avx512`] does. Measured: 42 of 85 GMAC/s on Intel's Emerald Rapids, 116 of 58 on AMD's Zen 4; others are
    /// taken for their vendor's. Told by the vendor, never by a clock: a level's bits are its own.
    pub fn is_slow(self) -> bool {
        // SAFETY: a CPU with AVX-512 has the instruction.
        #[allow(unused_unsafe, reason = "safe from Rust 1.93 on")]
        let vendor = unsafe { __cpuid(0) };
        [vendor.ebx, vendor.edx, vendor.ecx] == [*b"Genu", *b"ineI", *b"ntel"].map(u32::from_le_bytes)
    }
}

/// bf16 bits of the 128 non-negative codes of an 8-bit float: their low and high bytes.
type Table = [[u8; 128]; 2];

static E4M3: Table = {
    let mut table = [[0; 128]; 2];
    let mut code = 0;
    while code < 128 {
        [table[0][code], table[1][code]] = fp8::e4m3_to_bf16_bits(code as u8).to_le_bytes();
        code += 1;
    }
    table
};

static E5M2: Table = {
    let mut table = [[0; 128]; 2];
    let mut code = 0;
    while code < 128 {
        [table[0][code], table[1][code]] = fp8::e5m2_to_bf16_bits(code as u8).to_le_bytes();
        code += 1;
    }
    table
};

/// 0, 0, 1, 1, .. 31, 31: every byte twice.
static TWICE: [u8; 64] = {
    let mut index = [0; 64];
    let mut i = 0;
    while i < 64 {
        index[i] = (i / 2) as u8;
        i += 1;
    }
    index
};

/// 32 codes of an 8-bit float as bf16.
///
/// # Safety
/// The CPU must have AVX-512 F, BW and VBMI.
#[inline(always)]
unsafe fn look_up(table: &Table, codes: &[u8; 2 * LANES]) -> __m512i {
    // The look-ups use the low seven bits of a code; its sign bit lands on the word's by itself, since the upper byte of
    // each doubled code is the code.
    // SAFETY: the caller's promise; 32 bytes are readable behind `codes` and 64 behind each table part.
    unsafe {
        let part = |half: usize, part: usize| _mm512_loadu_si512(table[half].as_ptr().add(64 * part).cast());
        let codes = _mm512_castsi256_si512(_mm256_loadu_si256(codes.as_ptr().cast()));
        let codes = _mm512_permutexvar_epi8(_mm512_loadu_si512(TWICE.as_ptr().cast()), codes);
        let low = _mm512_permutex2var_epi8(part(0, 0), codes, part(0, 1));
        let high = _mm512_permutex2var_epi8(part(1, 0), codes, part(1, 1));
        let value = _mm512_mask_blend_epi8(0xaaaa_aaaa_aaaa_aaaa, low, high);
        // value | (codes & sign)
        _mm512_ternarylogic_epi32::<0xf8>(value, codes, _mm512_set1_epi16(i16::MIN))
    }
}

/// The eights of 64 bytes in the order whose lower and upper halves of 16 hold the first 32 bytes and the second.
static IN_TURN: [u64; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Twice 32 codes of an 8-bit float as bf16, in half the operations for each.
///
/// # Safety
/// The CPU must have AVX-512 F, BW and VBMI.
#[inline(always)]
unsafe fn look_up_two(table: &Table, codes: &[u8; 4 * LANES]) -> [__m512i; 2] {
    // SAFETY: the caller's promise; 64 bytes are readable behind `codes`, `IN_TURN` and each table part.
    unsafe {
        let part = |half: usize, part: usize| _mm512_loadu_si512(table[half].as_ptr().add(64 * part).cast());
        let codes = _mm512_loadu_si512(codes.as_ptr().cast());
        let codes = _mm512_permutexvar_epi64(_mm512_loadu_si512(IN_TURN.as_ptr().cast()), codes);
        let low = _mm512_permutex2var_epi8(part(0, 0), codes, part(0, 1));
        let high = _mm512_permutex2var_epi8(part(1, 0), codes, part(1, 1));
        // high | (codes & sign)
        let high = _mm512_ternarylogic_epi32::<0xf8>(high, codes, _mm512_set1_epi8(i8::MIN));
        [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)]
    }
}

impl Simd for Avx512Bf16 {
    const NAME: &'static str = "avx512bf16";
    const ACCUMULATORS: usize = 16;
    type F32 = __m512;
    type Pair = __m512i;
    type Factor = u32;
    type I32 = __m512i;
    type Bytes = __m512i;
    type Tiles = Amx;

    #[inline(always)]
    fn tiles(self) -> Option<Amx> {
        self.0
    }

    #[inline]
    fn run<W: Work<Self>>(self, work: W) -> W::Output {
        #[inline(never)]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx512vnni,avx2,fma")]
        fn enabled<W: Work<Avx512Bf16>>(s: Avx512Bf16, work: W) -> W::Output {
            work.run(s)
        }
        // SAFETY: `self` proves the features.
        unsafe { enabled(self, work) }
    }

    f32_in_one_register!();

    #[inline(always)]
    fn pair_bf16(self, x: &[u16; 2 * LANES]) -> __m512i {
        // SAFETY: `self` proves the feature; 64 bytes are readable behind `x`, at any alignment.
        unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
    }
    #[inline(always)]
    fn pair_e4m3(self, x: &[u8; 2 * LANES]) -> __m512i {
        // SAFETY: `self` proves the features.
        unsafe { look_up(&E4M3, x) }
    }
    #[inline(always)]
    fn pair_e5m2(self, x: &[u8; 2 * LANES]) -> __m512i {
        // SAFETY: `self` proves the features.
        unsafe { look_up(&E5M2, x) }
    }
    #[inline(always)]
    fn two_pairs_e4m3(self, x: &[u8; 4 * LANES]) -> [__m512i; 2] {
        // SAFETY: `self` proves the features.
        unsafe { look_up_two(&E4M3, x) }
    }
    #[inline(always)]
    fn two_pairs_e5m2(self, x: &[u8; 4 * LANES]) -> [__m512i; 2] {
        // SAFETY: `self` proves the features.
        unsafe { look_up_two(&E5M2, x) }
    }
    #[inline(always)]
    fn widen_e4m3(self, x: &[u8; 4 * LANES], out: &mut [[u16; 2 * LANES]; 2]) {
        for (x, out) in self.two_pairs_e4m3(x).into_iter().zip(out) {
            // SAFETY: `self` proves the feature; 64 bytes are writable behind `out`, at any alignment.
            unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), x) }
        }
    }
    #[inline(always)]
    fn widen_e5m2(self, x: &[u8; 4 * LANES], out: &mut [[u16; 2 * LANES]; 2]) {
        for (x, out) in self.two_pairs_e5m2(x).into_iter().zip(out) {
            // SAFETY: `self` proves the feature; 64 bytes are writable behind `out`, at any alignment.
            unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), x) }
        }
    }
    #[inline(always)]
    fn widen_int8(self, x: &[i8; 4 * LANES], out: &mut [[u16; 2 * LANES]; 2]) {
        for (x, out) in x.as_chunks().0.iter().zip(out) {
            let pairs = self.pair_int8(x);
            // SAFETY: `self` proves the feature; 64 bytes are writable behind `out`, at any alignment.
            unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), pairs) }
        }
    }
    #[inline(always)]
    fn pair_int8(self, x: &[i8; 2 * LANES]) -> __m512i {
        // SAFETY: `self` proves the features.
        unsafe {
            // Integers of 8 bits are exact in bf16: the lower halves of the f32 are zero.
            let (first, second) = widen_int8(x);
            _mm512_or_si512(_mm512_srli_epi32::<16>(_mm512_castps_si512(first)), _mm512_castps_si512(second))
        }
    }
    #[inline(always)]
    fn pair_first(self, x: __m512i) -> __m512i {
        // SAFETY: `self` proves the feature.
        unsafe { _mm512_and_si512(x, _mm512_set1_epi32(0xffff)) }
    }
    #[inline(always)]
    fn pair_second(self, x: __m512i) -> __m512i {
        // SAFETY: `self` proves the feature.
        unsafe { _mm512_and_si512(x, _mm512_set1_epi32(0xffff_0000_u32 as i32)) }
    }
    #[inline(always)]
    fn store_factors(self, x: __m512, out: &mut [u32; LANES / 2]) {
        self.store_bf16(x, bytemuck::cast_mut(out));
    }
    #[inline(always)]
    fn store_weights(self, x: __m512, out: &mut [u32; LANES / 2]) -> __m512 {
        // SAFETY: `self` proves the features; 32 bytes are writable behind `out`, at any alignment.
        unsafe {
            let halves: __m256i = std::mem::transmute(_mm512_cvtneps_pbh(x));
            _mm256_storeu_si256(out.as_mut_ptr().cast(), halves);
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
        }
    }
    #[inline(always)]
    fn add_two_weights(self, sum: __m512, x: [__m512; 2], out: &mut [u32; LANES]) -> __m512 {
        // SAFETY: `self` proves the features; 64 bytes are writable behind `out`, at any alignment; all types are 512 plain bits.
        unsafe {
            let pairs = _mm512_cvtne2ps_pbh(x[1], x[0]);
            let bits: __m512i = std::mem::transmute(pairs);
            _mm512_storeu_si512(out.as_mut_ptr().cast(), bits);
            let ones: __m512bh = std::mem::transmute(_mm512_set1_epi32(0x3f80_3f80));
            _mm512_dpbf16_ps(sum, pairs, ones)
        }
    }
    #[inline(always)]
    fn dot_pair(self, acc: __m512, x: __m512i, q: &u32) -> __m512 {
        // SAFETY: `self` proves the feature; both types are 512 plain bits.
        unsafe {
            let x: __m512bh = std::mem::transmute(x);
            let q: __m512bh = std::mem::transmute(_mm512_set1_epi32(*q as i32));
            _mm512_dpbf16_ps(acc, x, q)
        }
    }
}
