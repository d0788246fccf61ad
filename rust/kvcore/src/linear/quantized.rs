//! Weights of 8 and of 4 bits: 32 inputs of an output share a scale, and with 4 bits a minimum.
//!
//! ```text
//! weight  = scale * code + minimum                  code 0..15; with 8 bits 0..255, and minimum = -128 scale
//! row     : for each 32 inputs  s = max |x| / 127,  a = round(x / s),  sum of a
//! product : for each 32 inputs  (scale * sum of code * a + minimum * sum of a) * s, added in order
//! ```
//! The sums of 32 products are whole numbers, exact on every level; what is added to each other is float32, group after group
//! in order. Codes of GGUF's blocks are taken as they are (blocks.rs). One scale for 32 inputs of a row, as
//! llama.cpp has, keeps a single large value from flattening all others.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};

use half::f16;

use super::WeightsIn;
use super::pack::{GROUP, GROUP_OUTPUTS};
use super::product::{Task, Weights};
use super::row_group::{RowGroup, SCALE, SUM, round_row};
use super::tiled_bytes::{self, ROOM, RowsStep, TILED_FROM, TILED_STEPS, round_rows};
use crate::simd::{Fours, LANES, Simd, TILE_ROWS};
use crate::threads::{NEVER, Threads};
use crate::{Error, Result};

/// Inputs that share a scale.
pub(super) const GROUP_INPUTS: usize = 32;

/// 4-bit weights: for 16 outputs four times the codes of inputs `4 c..` (low halves) and `16 + 4 c..` (high halves), then
/// 16 scales and 16 minima, as halves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Int4;

/// 8-bit weights: for 16 outputs eight times the codes of inputs `4 c..`, then 16 scales, as halves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Int8;

/// One group of one output, on its way into a panel.
pub(super) struct Codes {
    pub(super) codes: [u8; GROUP_INPUTS],
    pub(super) scale: f16,
    pub(super) minimum: f16,
}

/// A quantised format.
pub(super) trait Quantized: Weights {
    /// 32 weights as they come.
    fn of_values(x: &[f32; GROUP_INPUTS]) -> Codes;
    /// Put an output's codes into its lane.
    fn put(codes: &Codes, lane: usize, raw: &mut Self::Raw);
    /// What the codes in a lane stand for.
    fn values(raw: &Self::Raw, lane: usize) -> [f32; GROUP_INPUTS];
}

const INT4_CODES: usize = GROUP_INPUTS / 2 * LANES;
const INT8_CODES: usize = GROUP_INPUTS * LANES;
const HALVES: usize = 2 * LANES;

/// What both formats share: their steps differ in how they are unpacked alone.
macro_rules! groups_of_32 {
    ($name:ident, $bytes:expr, $minima:expr) => {
        impl Weights for $name {
            type Raw = [u8; $bytes];
            type Coef<S: Simd> = RowGroup;
            const STEP: usize = GROUP_INPUTS;
            // Their whole sums, and those that go on, fill 24 of 32 registers.
            const MOST_ROWS: usize = 6;
            type TileCoef = RowsStep;
            const TOGETHER: usize = TILE_ROWS;
            const TILE_STEPS: usize = 1;
            const TILED_FROM: usize = TILED_FROM;
            const TILED_STEPS: usize = TILED_STEPS;
            const ROOM: usize = ROOM;

            #[inline(always)]
            fn coefs<S: Simd>(s: S, x: &[f32], out: &mut [RowGroup]) {
                round_row::<S, $minima>(s, x, out);
            }

            #[inline(always)]
            fn add<S: Simd, const M: usize>(
                s: S,
                sums: &mut [[S::F32; GROUP]; M],
                weights: &[Self::Raw; GROUP],
                rows: [&RowGroup; M],
            ) {
                dot::<S, Self, M, $minima>(s, sums, weights, rows);
            }

            #[inline(always)]
            fn tile_coefs<S: Simd>(s: S, x: &[f32], inputs: usize, out: &mut [RowsStep]) {
                round_rows::<S, $minima>(s, x, inputs, out);
            }
            #[inline(always)]
            fn run_tiled<S: Simd>(s: S, tiles: S::Tiles, task: Task<'_, Self, RowsStep>, room: &mut [f32]) {
                tiled_bytes::run::<S, Self, $minima>(s, tiles, task, room);
            }
        }
    };
}
groups_of_32!(Int4, INT4_CODES + 2 * HALVES, true);
groups_of_32!(Int8, INT8_CODES + HALVES, false);

/// How a format's steps are unpacked.
pub(super) trait Unpack: Weights {
    /// Codes of a step that lie side by side, unpacked together.
    type Codes<S: Simd>: Copy;
    /// How many there are.
    const PARTS: usize;

    fn codes<S: Simd>(s: S, raw: &Self::Raw, part: usize) -> Self::Codes<S>;
    /// Add the products of a part's codes with a row.
    fn add_row<S: Simd>(s: S, sum: S::I32, codes: Self::Codes<S>, part: usize, row: &RowGroup) -> S::I32;
    /// All codes of a step, as signed numbers for tile registers: four inputs of each output side by side. What 8 bits take
    /// away from a code is taken away here.
    fn unpack<S: Simd>(s: S, raw: &Self::Raw, out: &mut [Fours; GROUP_INPUTS / 4]);
    /// Scales, and minima where they are not all -128 scales.
    fn scales<S: Simd>(s: S, raw: &Self::Raw) -> (S::F32, S::F32);
}

#[inline(always)]
fn factors(row: &RowGroup, inputs: usize) -> &[i8; 4] {
    bytemuck::cast_ref(&row[inputs])
}

impl Unpack for Int4 {
    type Codes<S: Simd> = (S::Bytes, S::Bytes);
    const PARTS: usize = GROUP_INPUTS / 8;

    #[inline(always)]
    fn codes<S: Simd>(s: S, raw: &Self::Raw, part: usize) -> Self::Codes<S> {
        s.nibbles(s.stream_bytes(raw[part * 4 * LANES..].first_chunk().expect("64 codes")))
    }
    #[inline(always)]
    fn add_row<S: Simd>(s: S, sum: S::I32, codes: Self::Codes<S>, part: usize, row: &RowGroup) -> S::I32 {
        let sum = s.dot_bytes(sum, codes.0, factors(row, part));
        s.dot_bytes(sum, codes.1, factors(row, part + Self::PARTS))
    }
    #[inline(always)]
    fn unpack<S: Simd>(s: S, raw: &Self::Raw, out: &mut [Fours; GROUP_INPUTS / 4]) {
        for part in 0..Self::PARTS {
            let (low, high) = Self::codes(s, raw, part);
            s.store_bytes(low, &mut out[part]);
            s.store_bytes(high, &mut out[part + Self::PARTS]);
        }
    }
    #[inline(always)]
    fn scales<S: Simd>(s: S, raw: &Self::Raw) -> (S::F32, S::F32) {
        (half_lanes(s, &raw[INT4_CODES..][..HALVES]), half_lanes(s, &raw[INT4_CODES + HALVES..]))
    }
}

impl Unpack for Int8 {
    type Codes<S: Simd> = S::Bytes;
    const PARTS: usize = GROUP_INPUTS / 4;

    #[inline(always)]
    fn codes<S: Simd>(s: S, raw: &Self::Raw, part: usize) -> Self::Codes<S> {
        s.stream_bytes(raw[part * 4 * LANES..].first_chunk().expect("64 codes"))
    }
    #[inline(always)]
    fn add_row<S: Simd>(s: S, sum: S::I32, codes: Self::Codes<S>, part: usize, row: &RowGroup) -> S::I32 {
        s.dot_bytes(sum, codes, factors(row, part))
    }
    #[inline(always)]
    fn unpack<S: Simd>(_: S, raw: &Self::Raw, out: &mut [Fours; GROUP_INPUTS / 4]) {
        // From 0..255 to -128..127.
        for (codes, out) in raw.as_chunks::<{ 4 * LANES }>().0.iter().zip(out) {
            *out = codes.map(|code| code ^ 0x80);
        }
    }
    #[inline(always)]
    fn scales<S: Simd>(s: S, raw: &Self::Raw) -> (S::F32, S::F32) {
        let scale = half_lanes(s, &raw[INT8_CODES..]);
        (scale, scale)
    }
}

#[inline(always)]
fn half_lanes<S: Simd>(s: S, halves: &[u8]) -> S::F32 {
    s.load_f16(&bytemuck::pod_read_unaligned(halves))
}

/// Add one group's products with `M` rows to their sums. Codes are unpacked once for all rows, and a factor is loaded once for
/// both panels.
#[inline(always)]
fn dot<S: Simd, F: Unpack, const M: usize, const MINIMA: bool>(
    s: S,
    sums: &mut [[S::F32; GROUP]; M],
    weights: &[F::Raw; GROUP],
    rows: [&RowGroup; M],
) {
    let mut whole = [[s.splat_i32(0); GROUP]; M];
    if !MINIMA {
        for m in 0..M {
            whole[m] = [s.splat_i32(rows[m][SUM]); GROUP];
        }
    }
    for part in 0..F::PARTS {
        let codes = [F::codes(s, &weights[0], part), F::codes(s, &weights[1], part)];
        for m in 0..M {
            for p in 0..GROUP {
                whole[m][p] = F::add_row(s, whole[m][p], codes[p], part, rows[m]);
            }
        }
    }
    for p in 0..GROUP {
        let scales = F::scales(s, &weights[p]);
        for m in 0..M {
            let [factor, sum]: &[f32; 2] =
                bytemuck::cast_ref(rows[m][SCALE..].first_chunk::<2>().expect("scale and sum"));
            sums[m][p] = add_group::<S, MINIMA>(s, sums[m][p], s.to_f32(whole[m][p]), scales, factor, sum);
        }
    }
}

/// A group's whole products with a row of this scale and sum, as what they stand for, added to their sum.
#[inline(always)]
pub(super) fn add_group<S: Simd, const MINIMA: bool>(
    s: S,
    sum: S::F32,
    whole: S::F32,
    (scale, minimum): (S::F32, S::F32),
    factor: &f32,
    row_sum: &f32,
) -> S::F32 {
    let group = if MINIMA { s.mul_add(scale, whole, s.mul(minimum, s.splat(*row_sum))) } else { s.mul(scale, whole) };
    s.mul_add(group, s.splat(*factor), sum)
}

/// The smallest half that is not below `x`: codes of a scale that was rounded down would not reach the ends.
fn not_below(x: f32) -> f16 {
    let half = f16::from_f32(x);
    if half.to_f32() < x { f16::from_bits(half.to_bits() + 1) } else { half }
}

/// What a group with a value that is no number stands for.
const NOTHING: Codes = Codes { codes: [0; GROUP_INPUTS], scale: f16::NAN, minimum: f16::NAN };

impl Quantized for Int4 {
    fn of_values(x: &[f32; GROUP_INPUTS]) -> Codes {
        if x.iter().any(|x| x.is_nan()) {
            return NOTHING;
        }
        let (low, high) = x.iter().fold((0.0f32, 0.0f32), |(low, high), &x| (low.min(x), high.max(x)));
        let minimum = f16::from_f32(low);
        let scale = not_below((high - minimum.to_f32()).max(0.0) / 15.0);
        let inverse = if scale.to_f32() > 0.0 { 1.0 / scale.to_f32() } else { 0.0 };
        let codes = x.map(|x| ((x - minimum.to_f32()) * inverse).round().clamp(0.0, 15.0) as u8);
        Codes { codes, scale, minimum }
    }

    fn put(codes: &Codes, lane: usize, raw: &mut Self::Raw) {
        for (i, &code) in codes.codes.iter().enumerate() {
            let (input, shift) = (i % 16, 4 * (i / 16));
            raw[(input / 4 * LANES + lane) * 4 + input % 4] |= code << shift;
        }
        put_half(&mut raw[INT4_CODES..], lane, codes.scale);
        put_half(&mut raw[INT4_CODES + HALVES..], lane, codes.minimum);
    }

    fn values(raw: &Self::Raw, lane: usize) -> [f32; GROUP_INPUTS] {
        let (scale, minimum) = (take_half(&raw[INT4_CODES..], lane), take_half(&raw[INT4_CODES + HALVES..], lane));
        std::array::from_fn(|i| {
            let (input, shift) = (i % 16, 4 * (i / 16));
            let code = raw[(input / 4 * LANES + lane) * 4 + input % 4] >> shift & 15;
            scale * f32::from(code) + minimum
        })
    }
}

impl Quantized for Int8 {
    fn of_values(x: &[f32; GROUP_INPUTS]) -> Codes {
        if x.iter().any(|x| x.is_nan()) {
            return NOTHING;
        }
        let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        let scale = not_below(largest / 127.0);
        let inverse = if scale.to_f32() > 0.0 { 1.0 / scale.to_f32() } else { 0.0 };
        let codes = x.map(|x| ((x * inverse).round().clamp(-127.0, 127.0) as i16 + 128) as u8);
        Codes { codes, scale, minimum: f16::ZERO }
    }

    fn put(codes: &Codes, lane: usize, raw: &mut Self::Raw) {
        for (i, &code) in codes.codes.iter().enumerate() {
            raw[(i / 4 * LANES + lane) * 4 + i % 4] = code;
        }
        put_half(&mut raw[INT8_CODES..], lane, codes.scale);
    }

    fn values(raw: &Self::Raw, lane: usize) -> [f32; GROUP_INPUTS] {
        let scale = take_half(&raw[INT8_CODES..], lane);
        std::array::from_fn(|i| scale * (f32::from(raw[(i / 4 * LANES + lane) * 4 + i % 4]) - 128.0))
    }
}

fn put_half(halves: &mut [u8], lane: usize, x: f16) {
    halves[2 * lane..][..2].copy_from_slice(&x.to_ne_bytes());
}

fn take_half(halves: &[u8], lane: usize) -> f32 {
    f16::from_ne_bytes([halves[2 * lane], halves[2 * lane + 1]]).to_f32()
}

/// Pack `source` (`[outputs, inputs]`) into zeroed `packed` (`[groups][steps]`).
pub(super) fn pack<F: Quantized>(
    threads: &Threads,
    source: WeightsIn<'_>,
    inputs: usize,
    packed: &mut [[F::Raw; GROUP]],
) -> Result<()> {
    let (steps, outputs) = (inputs.div_ceil(GROUP_INPUTS), source.len() / inputs);
    let items: Vec<_> = packed.chunks_mut(steps).enumerate().collect();
    let too_large = AtomicBool::new(false);
    threads.for_each(items, NEVER, |(g, group)| {
        for lane in 0..GROUP_OUTPUTS.min(outputs - g * GROUP_OUTPUTS) {
            let output = g * GROUP_OUTPUTS + lane;
            for (step, raw) in group.iter_mut().enumerate() {
                let codes = if let WeightsIn::Blocks(kind, blocks) = source {
                    kind.group(blocks, output * steps + step)
                } else {
                    let mut values = [0.0; GROUP_INPUTS];
                    let from = step * GROUP_INPUTS;
                    source.read(output * inputs + from, &mut values[..GROUP_INPUTS.min(inputs - from)]);
                    F::of_values(&values)
                };
                if codes.scale.is_infinite() || codes.minimum.is_infinite() {
                    too_large.store(true, Ordering::Relaxed);
                }
                F::put(&codes, lane % LANES, &mut raw[lane / LANES]);
            }
        }
    })?;
    if too_large.into_inner() {
        let text = "weight: expected values whose scales and minima are float16 (at most 65504), got larger ones";
        return Err(Error::InvalidArgument(text.into()));
    }
    Ok(())
}
