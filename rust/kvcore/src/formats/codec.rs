//! The formats that store each value by itself, as types: storage has one copy of its loops for each of them, in which
//! the format is a constant.
#![forbid(unsafe_code)]

use super::dtype::KvDtype;
use super::{fp8, half_float, int8};

/// How one value is stored, given its scale: stored = x / scale.
pub trait Codec: Copy + Send + Sync + 'static {
    /// A stored value.
    type Elem: bytemuck::Pod;
    /// Its name as a value.
    const DTYPE: KvDtype;
    /// The largest magnitude that can be stored; what a row's scale maps its largest value to.
    const MAX: f32;

    /// The scale for the values of one token in one head, in the mode where each has its own.
    fn row_scale(row: &[f32]) -> f32;
    /// Store a value.
    fn encode(x: f32, scale: f32) -> Self::Elem;
    /// What was stored, exactly, times the scale, rounded to f32.
    fn decode(stored: Self::Elem, scale: f32) -> f32;
}

/// What a row of values spans.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Extent {
    /// The largest magnitude that is a number; infinity counts.
    pub largest: f32,
    /// Whether any value is NaN.
    pub has_nan: bool,
}

impl Extent {
    /// Measure a row.
    #[inline(always)]
    pub fn of(row: &[f32]) -> Self {
        const INFINITE: u32 = 0x7f80_0000;
        // As integers magnitudes have the same order, and NaNs are above all numbers.
        let (mut number, mut any) = (0u32, 0u32);
        for x in row {
            let magnitude = x.to_bits() & 0x7fff_ffff;
            any = any.max(magnitude);
            number = number.max(if magnitude > INFINITE { 0 } else { magnitude });
        }
        Self { largest: f32::from_bits(number), has_nan: any > INFINITE }
    }
}

/// The scale that maps `largest` to `max`: 0 where that would not be a normal number, and `largest` bounded to 2^127,
/// so that `max * scale` is finite.
#[inline(always)]
pub fn row_scale(largest: f32, max: f32) -> f32 {
    const BOUND: f32 = f32::from_bits((127 + 127) << 23);
    let scale = (if largest > BOUND { BOUND } else { largest }) / max;
    if scale >= f32::MIN_POSITIVE { scale } else { 0.0 }
}

/// 32-bit floats, unchanged.
#[derive(Clone, Copy, Debug)]
pub struct F32;
/// IEEE half precision.
#[derive(Clone, Copy, Debug)]
pub struct F16;
/// bfloat16.
#[derive(Clone, Copy, Debug)]
pub struct Bf16;
/// fp8 e4m3.
#[derive(Clone, Copy, Debug)]
pub struct Fp8E4M3;
/// fp8 e5m2.
#[derive(Clone, Copy, Debug)]
pub struct Fp8E5M2;
/// 8-bit integers.
#[derive(Clone, Copy, Debug)]
pub struct Int8;

/// Formats that take no scale.
macro_rules! plain {
    ($name:ident, $elem:ty, $max:expr, |$x:ident| $encode:expr, |$e:ident| $decode:expr) => {
        impl Codec for $name {
            type Elem = $elem;
            const DTYPE: KvDtype = KvDtype::$name;
            const MAX: f32 = $max;

            #[inline(always)]
            fn row_scale(_: &[f32]) -> f32 {
                1.0
            }
            #[inline(always)]
            fn encode($x: f32, _: f32) -> $elem {
                $encode
            }
            #[inline(always)]
            fn decode($e: $elem, _: f32) -> f32 {
                $decode
            }
        }
    };
}
plain!(F32, f32, f32::MAX, |x| x, |e| e);
plain!(F16, u16, 65504.0, |x| half_float::f32_to_f16(x), |e| half_float::f16_to_f32(e));
plain!(Bf16, u16, f32::from_bits(0x7f7f_0000), |x| half_float::f32_to_bf16(x), |e| half_float::bf16_to_f32(e));

/// The fp8 formats. A row whose scale is 0 stores zeros, and its NaNs.
macro_rules! scaled {
    ($name:ident, $max:expr, $encode:path, $decode:path) => {
        impl Codec for $name {
            type Elem = u8;
            const DTYPE: KvDtype = KvDtype::$name;
            const MAX: f32 = $max;

            #[inline(always)]
            fn row_scale(row: &[f32]) -> f32 {
                row_scale(Extent::of(row).largest, $max)
            }
            #[inline(always)]
            fn encode(x: f32, scale: f32) -> u8 {
                $encode(if scale > 0.0 { x / scale } else { x * 0.0 })
            }
            #[inline(always)]
            fn decode(stored: u8, scale: f32) -> f32 {
                $decode(stored) * scale
            }
        }
    };
}
scaled!(Fp8E4M3, fp8::E4M3_MAX, fp8::f32_to_e4m3, fp8::e4m3_to_f32);
scaled!(Fp8E5M2, fp8::E5M2_MAX, fp8::f32_to_e5m2, fp8::e5m2_to_f32);

impl Codec for Int8 {
    type Elem = i8;
    const DTYPE: KvDtype = KvDtype::Int8;
    const MAX: f32 = int8::MAX_CODE;

    #[inline(always)]
    fn row_scale(row: &[f32]) -> f32 {
        int8::scale(row)
    }
    #[inline(always)]
    fn encode(x: f32, scale: f32) -> i8 {
        int8::encode(x, scale)
    }
    #[inline(always)]
    fn decode(stored: i8, scale: f32) -> f32 {
        int8::decode(stored, scale)
    }
}
