//! Tiles of 4 bits as tiles of a bf16 layout, which is how attention reads them; of 8 bits where tile registers multiply them.
//!
//! ```text
//! 8 bits   value for value, exactly, in their order
//! 4 bits
//! K   for each pair of dimensions: 16 bytes, one for each token      values = minimum + code * scale, each lane its token's
//! V   for each pair of tokens: a byte for each dimension             the same, scale and minimum equal in all lanes
//! ```
//! The products are exact and the sums round once (see [`crate::formats::int4`]), so that the bits are the same on every
//! CPU and equal to what [`super::KvStore::read`] gives.
#![forbid(unsafe_code)]

use super::KvDtype;
use super::layout::TILE;
use super::view::LayerView;
use crate::formats::int4::{K_GROUP, V_GROUP};
use crate::paging::BlockId;
use crate::simd::{LANES, Level, Simd, Work};

const _: () = assert!(V_GROUP.is_multiple_of(LANES), "a vector of V lies in one group");

/// A K tile of 8 or 4 bits as a bf16 one: `[k_dim / 2][16 tokens][2]`, which `out` must have place for.
#[inline(always)]
pub fn expand_k_tile<S: Simd>(s: S, view: &LayerView<'_>, block: BlockId, head: usize, tile: usize, out: &mut [u16]) {
    if view.layout.dtype != KvDtype::Int4 {
        widen(s, view.layout.dtype, view.k_tile(block, head, tile), out);
        return;
    }
    let pairs = view.k_tile(block, head, tile).as_chunks::<TILE>().0;
    let groups = view.k_groups(block, head, tile);
    let steps = pairs.chunks(K_GROUP / 2).zip(out.as_chunks_mut::<{ 2 * LANES }>().0.chunks_mut(K_GROUP / 2));
    for ((pairs, out), [scale, minimum]) in steps.zip(groups) {
        let (scale, minimum) = (s.load_f16(scale), s.load_f16(minimum));
        let value = |code: S::F32| s.round_bf16(s.mul_add(code, scale, minimum));
        for (codes, out) in pairs.iter().zip(out) {
            let (first, second) = s.load_nibbles(codes);
            s.store_bf16_pairs(value(first), value(second), out);
        }
    }
}

/// A V tile of 8 or 4 bits as a bf16 one: `[8 pairs of tokens][width][2]`, which `out` must have place for. What lies beyond
/// v_dim may be anything.
#[inline(always)]
pub fn expand_v_tile<S: Simd>(s: S, view: &LayerView<'_>, block: BlockId, head: usize, tile: usize, out: &mut [u16]) {
    if view.layout.dtype != KvDtype::Int4 {
        widen(s, view.layout.dtype, view.v_tile(block, head, tile), out);
        return;
    }
    let vectors = view.layout.width() / LANES;
    let codes = view.v_tile(block, head, tile).as_chunks::<LANES>().0;
    let out = out.as_chunks_mut::<{ 2 * LANES }>().0;
    for (g, [scales, minima]) in view.v_groups(block, head, tile).iter().enumerate() {
        let (mut scale, mut minimum) = ([0.0; LANES], [0.0; LANES]);
        s.store(s.load_f16(scales), &mut scale);
        s.store(s.load_f16(minima), &mut minimum);
        for pair in 0..TILE / 2 {
            let group = |token: usize| (s.splat(scale[token]), s.splat(minimum[token]));
            let (even, odd) = (group(2 * pair), group(2 * pair + 1));
            let value = |code: S::F32, (scale, minimum)| s.round_bf16(s.mul_add(code, scale, minimum));
            for d in g * (V_GROUP / LANES)..((g + 1) * (V_GROUP / LANES)).min(vectors) {
                let (first, second) = s.load_nibbles(&codes[pair * vectors + d]);
                s.store_bf16_pairs(value(first, even), value(second, odd), &mut out[pair * vectors + d]);
            }
        }
    }
}

/// Values of 8 bits as bf16, in their order; their scales are the caller's affair.
#[inline(always)]
fn widen<S: Simd>(s: S, dtype: KvDtype, values: &[u8], out: &mut [u16]) {
    let out = out.as_chunks_mut::<{ 2 * LANES }>().0.as_chunks_mut::<2>().0;
    let steps = values.as_chunks::<{ 4 * LANES }>().0.iter().zip(out);
    // Loops, since the level's features do not reach into closures that others call.
    match dtype {
        KvDtype::Fp8E4M3 => {
            for (x, out) in steps {
                s.widen_e4m3(x, out);
            }
        }
        KvDtype::Fp8E5M2 => {
            for (x, out) in steps {
                s.widen_e5m2(x, out);
            }
        }
        _ => {
            for (x, out) in steps {
                s.widen_int8(bytemuck::cast_ref(x), out);
            }
        }
    }
}

/// [`expand_k_tile`] as a call of its own.
pub fn expand_int4_k_tile(
    level: Level,
    view: &LayerView<'_>,
    block: BlockId,
    head: usize,
    tile: usize,
    out: &mut [u16],
) {
    level.dispatch(Expand { view, block, head, tile, out, is_v: false });
}

/// [`expand_v_tile`] as a call of its own.
pub fn expand_int4_v_tile(
    level: Level,
    view: &LayerView<'_>,
    block: BlockId,
    head: usize,
    tile: usize,
    out: &mut [u16],
) {
    level.dispatch(Expand { view, block, head, tile, out, is_v: true });
}

struct Expand<'a> {
    view: &'a LayerView<'a>,
    block: BlockId,
    head: usize,
    tile: usize,
    out: &'a mut [u16],
    is_v: bool,
}

impl<S: Simd> Work<S> for Expand<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self, s: S) {
        match self.is_v {
            false => expand_k_tile(s, self.view, self.block, self.head, self.tile, self.out),
            true => expand_v_tile(s, self.view, self.block, self.head, self.tile, self.out),
        }
    }
}
