//! The small vector trait that every algorithm is written over.
#![forbid(unsafe_code)]

use super::tiles::Tiles;
use crate::formats::fp8;

/// Logical lanes of every level: a block of the cache has 16 tokens, a panel of weights 16 outputs.
pub const LANES: usize = 16;

/// Work on the level `S`: [`Simd::run`] compiles it with that level's features on.
/// Implementations are generic over `S`, and mark `run` and all they call per element `#[inline(always)]`, so that the
/// features reach them.
pub trait Work<S: Simd> {
    /// What the work returns.
    type Output;
    /// Do it with the vectors of `s`.
    fn run(self, s: S) -> Self::Output;
}

/// Sixteen lanes of f32, and pairs of bf16 that multiply and add into them.
pub trait Simd: Copy + Send + Sync + 'static {
    /// Name in messages and benches.
    const NAME: &'static str;
    /// Accumulators (of 16 lanes) that a register tile may hold without spilling.
    const ACCUMULATORS: usize;
    /// 16 lanes of f32.
    type F32: Copy;
    /// 16 pairs of bf16 values, widened or not as the level likes best.
    type Pair: Copy;
    /// What all 16 pairs are multiplied by: two bf16 values in memory, likewise widened or not.
    type Factor: bytemuck::Pod + Send + Sync;
    /// 16 lanes of i32.
    type I32: Copy;
    /// 16 lanes of four bytes.
    type Bytes: Copy;
    /// Its tile registers.
    type Tiles: Tiles;

    /// Proof that there are tile registers; products of weights, and attention over 16 bits and less, go through them then.
    #[inline(always)]
    fn tiles(self) -> Option<Self::Tiles> {
        None
    }

    /// Run `work` with this level's CPU features enabled, as a function of its own that is never inlined: kernels in
    /// many shapes inlined into one function would take the compiler minutes.
    fn run<W: Work<Self>>(self, work: W) -> W::Output;

    /// Ask for the cache line at `at`, which may be any address, into the second-level cache: a hint, without effect on
    /// any value.
    fn prefetch<T>(self, at: *const T);

    /// `x` in all lanes.
    fn splat(self, x: f32) -> Self::F32;
    /// Load 16 values.
    fn load(self, x: &[f32; LANES]) -> Self::F32;
    /// Store 16 values.
    fn store(self, x: Self::F32, out: &mut [f32; LANES]);
    /// Load 16 IEEE half-precision values, exactly widened.
    fn load_f16(self, x: &[u16; LANES]) -> Self::F32;
    /// `a + b`
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a - b`
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a * b`
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a / b`
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a * b + c`, rounded once.
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// The larger of each lane; a NaN in `b` is passed on.
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// Lanes below `n` from `a`, the others from `b`.
    fn first_lanes(self, n: usize, a: Self::F32, b: Self::F32) -> Self::F32;
    /// The nearest integer, ties to even.
    fn round(self, x: Self::F32) -> Self::F32;
    /// `2^n` for integral `n` in -127..=128; -127 gives 0 and 128 infinity.
    fn pow2(self, n: Self::F32) -> Self::F32;
    /// Round to the nearest bf16 value (ties to even), kept as f32; NaN stays NaN.
    fn round_bf16(self, x: Self::F32) -> Self::F32;
    /// Store the upper halves of 16 values that [`Self::round_bf16`] has rounded.
    fn store_bf16(self, x: Self::F32, out: &mut [u16; LANES]);
    /// Store 16 pairs: upper halves of values that [`Self::round_bf16`] has rounded, `a`'s and `b`'s in turn.
    fn store_bf16_pairs(self, a: Self::F32, b: Self::F32, out: &mut [u16; 2 * LANES]);
    /// The low halves of 16 bytes, and the high ones: integers from 0 to 15.
    fn load_nibbles(self, x: &[u8; LANES]) -> (Self::F32, Self::F32);

    /// Load 16 pairs of bf16.
    fn pair_bf16(self, x: &[u16; 2 * LANES]) -> Self::Pair;
    /// Load 16 pairs of fp8 e4m3, exactly widened to bf16.
    fn pair_e4m3(self, x: &[u8; 2 * LANES]) -> Self::Pair;
    /// Load 16 pairs of fp8 e5m2, exactly widened to bf16.
    fn pair_e5m2(self, x: &[u8; 2 * LANES]) -> Self::Pair;
    /// Load twice 16 pairs of fp8 e4m3.
    #[inline(always)]
    fn two_pairs_e4m3(self, x: &[u8; 4 * LANES]) -> [Self::Pair; 2] {
        let [a, b]: &[[u8; 2 * LANES]; 2] = bytemuck::cast_ref(x);
        [self.pair_e4m3(a), self.pair_e4m3(b)]
    }
    /// Load twice 16 pairs of fp8 e5m2.
    #[inline(always)]
    fn two_pairs_e5m2(self, x: &[u8; 4 * LANES]) -> [Self::Pair; 2] {
        let [a, b]: &[[u8; 2 * LANES]; 2] = bytemuck::cast_ref(x);
        [self.pair_e5m2(a), self.pair_e5m2(b)]
    }
    /// Fp8 e4m3 as bf16, exactly.
    #[inline(always)]
    fn widen_e4m3(self, x: &[u8; 4 * LANES], out: &mut [[u16; 2 * LANES]; 2]) {
        *out = bytemuck::cast(x.map(fp8::e4m3_to_bf16_bits));
    }
    /// Fp8 e5m2 as bf16, exactly.
    #[inline(always)]
    fn widen_e5m2(self, x: &[u8; 4 * LANES], out: &mut [[u16; 2 * LANES]; 2]) {
        *out = bytemuck::cast(x.map(fp8::e5m2_to_bf16_bits));
    }
    /// 8-bit integers as bf16, exactly.
    #[inline(always)]
    fn widen_int8(self, x: &[i8; 4 * LANES], out: &mut [[u16; 2 * LANES]; 2]) {
        *out = bytemuck::cast(x.map(|x| (f32::from(x).to_bits() >> 16) as u16));
    }
    /// Load 16 pairs of 8-bit integers, exactly widened to bf16.
    fn pair_int8(self, x: &[i8; 2 * LANES]) -> Self::Pair;
    /// The same pairs with the second value of each set to zero (an odd number of tokens; the other may be NaN).
    fn pair_first(self, x: Self::Pair) -> Self::Pair;
    /// The same pairs with the first value of each set to zero (a window that begins at an odd token).
    fn pair_second(self, x: Self::Pair) -> Self::Pair;
    /// Store 16 values that [`Self::round_bf16`] has rounded as 8 factors.
    fn store_factors(self, x: Self::F32, out: &mut [Self::Factor; LANES / 2]);
    /// Round 16 values between 0 and 1 to the nearest bf16 (ties either way), store them as 8 factors, and return them.
    #[inline(always)]
    fn store_weights(self, x: Self::F32, out: &mut [Self::Factor; LANES / 2]) -> Self::F32 {
        // Veltkamp's split: the upper 8 bits of 24.
        let c = self.mul(x, self.splat(65537.0));
        let x = self.sub(c, self.sub(c, x));
        self.store_factors(x, out);
        x
    }
    /// The same with two times 16 values, and their sum added to `sum`, in any order of each 32.
    #[inline(always)]
    fn add_two_weights(self, sum: Self::F32, x: [Self::F32; 2], out: &mut [Self::Factor; LANES]) -> Self::F32 {
        let (first, second) = out.split_at_mut(LANES / 2);
        let sum = self.add(sum, self.store_weights(x[0], first.first_chunk_mut().expect("8 factors")));
        self.add(sum, self.store_weights(x[1], second.first_chunk_mut().expect("8 factors")))
    }
    /// `acc + x.0 * q.0 + x.1 * q.1` per lane. By reference: broadcasts straight from memory cost no arithmetic port.
    fn dot_pair(self, acc: Self::F32, x: Self::Pair, q: &Self::Factor) -> Self::F32;

    /// Load 16 lanes of four bytes.
    fn load_bytes(self, x: &[u8; 4 * LANES]) -> Self::Bytes;
    /// The same, in the order of the program: a processor reads ahead of what is read upwards, and gives half of the
    /// memory's rate where a compiler has turned the order of some loads.
    #[inline(always)]
    fn stream_bytes(self, x: &[u8; 4 * LANES]) -> Self::Bytes {
        self.load_bytes(x)
    }
    /// The low half of each byte, and the high one.
    fn nibbles(self, x: Self::Bytes) -> (Self::Bytes, Self::Bytes);
    /// Store 16 lanes of four bytes.
    fn store_bytes(self, x: Self::Bytes, out: &mut [u8; 4 * LANES]);
    /// Load 16 numbers.
    fn load_i32(self, x: &[i32; LANES]) -> Self::I32;
    /// `x` in all lanes.
    fn splat_i32(self, x: i32) -> Self::I32;
    /// `acc + w.0 * a.0 + .. + w.3 * a.3` per lane, of unsigned `w` and signed `a`; exact.
    fn dot_bytes(self, acc: Self::I32, w: Self::Bytes, a: &[i8; 4]) -> Self::I32;
    /// The nearest f32.
    fn to_f32(self, x: Self::I32) -> Self::F32;

    /// The largest lane (any lane if one is NaN).
    #[inline(always)]
    fn reduce_max(self, x: Self::F32) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(x, &mut lanes);
        let mut width = LANES / 2;
        while width > 0 {
            for i in 0..width {
                lanes[i] = if lanes[i] > lanes[i + width] { lanes[i] } else { lanes[i + width] };
            }
            width /= 2;
        }
        lanes[0]
    }

    /// The sum of the lanes, by halves: the same order on every level.
    #[inline(always)]
    fn reduce_sum(self, x: Self::F32) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(x, &mut lanes);
        let mut width = LANES / 2;
        while width > 0 {
            for i in 0..width {
                lanes[i] += lanes[i + width];
            }
            width /= 2;
        }
        lanes[0]
    }

    /// The largest lane of each of 16 vectors, as [`Self::reduce_max`].
    #[inline(always)]
    fn max_of_each(self, x: [Self::F32; LANES]) -> Self::F32 {
        let mut lanes = [0.0; LANES];
        for i in 0..LANES {
            lanes[i] = self.reduce_max(x[i]);
        }
        self.load(&lanes)
    }

    /// The sum of each of 16 vectors' lanes, in any order.
    #[inline(always)]
    fn sum_of_each(self, x: [Self::F32; LANES]) -> Self::F32 {
        let mut lanes = [0.0; LANES];
        for i in 0..LANES {
            lanes[i] = self.reduce_sum(x[i]);
        }
        self.load(&lanes)
    }
}
