//! One layer of an arena, for attention.
#![forbid(unsafe_code)]

use super::layout::{Layout, Strides, TILE};
use crate::formats::int4::Group;
use crate::formats::{KvDtype, ScaleMode};
use crate::paging::BlockId;
use crate::simd::Level;

/// One layer of an arena.
#[derive(Clone, Copy)]
pub struct LayerView<'a> {
    /// The shape of the arena.
    pub layout: Layout,
    pub(super) strides: Strides,
    pub(super) k_scales: &'a [f32],
    pub(super) v_scales: &'a [f32],
    /// From the layer's start in the first block to the arena's end.
    pub(super) bytes: &'a [u8],
}

impl<'a> LayerView<'a> {
    /// A K tile's bytes.
    #[inline(always)]
    pub fn k_tile(&self, block: BlockId, head: usize, tile: usize) -> &'a [u8] {
        &self.bytes[self.strides.k_tile(block.index(), head, tile)]
    }

    /// A V tile's bytes; a latent layout has none (V is the first dimensions of K).
    #[inline(always)]
    pub fn v_tile(&self, block: BlockId, head: usize, tile: usize) -> &'a [u8] {
        debug_assert!(!self.layout.latent, "V of a latent layout is in the K tile");
        &self.bytes[self.strides.v_tile(block.index(), head, tile)]
    }

    /// The static scale of K: stored values are multiplied by it.
    #[inline(always)]
    pub fn k_scale(&self, head: usize) -> f32 {
        self.k_scales[head]
    }

    /// The static scale of V; K's in a latent layout.
    #[inline(always)]
    pub fn v_scale(&self, head: usize) -> f32 {
        if self.layout.latent { self.k_scales[head] } else { self.v_scales[head] }
    }

    /// The scales of the 16 tokens of a K tile, where each token has its own and it is one number: not for int4, whose
    /// tiles are expanded instead. Those of tokens that were never written may be anything.
    #[inline(always)]
    pub fn k_token_scales(&self, block: BlockId, head: usize, tile: usize) -> Option<&'a [f32; TILE]> {
        self.has_token_scales()
            .then(|| token_scales(&self.bytes[self.strides.k_tile_scales(block.index(), head, tile)]))
    }

    /// The same for a V tile; K's in a latent layout.
    #[inline(always)]
    pub fn v_token_scales(&self, block: BlockId, head: usize, tile: usize) -> Option<&'a [f32; TILE]> {
        if self.layout.latent {
            return self.k_token_scales(block, head, tile);
        }
        self.has_token_scales()
            .then(|| token_scales(&self.bytes[self.strides.v_tile_scales(block.index(), head, tile)]))
    }

    #[inline(always)]
    fn has_token_scales(&self) -> bool {
        self.layout.scale_mode == ScaleMode::PerTokenHead && self.layout.dtype != KvDtype::Int4
    }

    /// The groups of an int4 K tile: `[group][scale, minimum][16 tokens]`, halves as their bits.
    #[inline(always)]
    pub fn k_groups(&self, block: BlockId, head: usize, tile: usize) -> &'a [[[u16; TILE]; 2]] {
        bytemuck::cast_slice(&self.bytes[self.strides.k_tile_scales(block.index(), head, tile)])
    }

    /// The groups of an int4 V tile.
    #[inline(always)]
    pub fn v_groups(&self, block: BlockId, head: usize, tile: usize) -> &'a [[[u16; TILE]; 2]] {
        bytemuck::cast_slice(&self.bytes[self.strides.v_tile_scales(block.index(), head, tile)])
    }
}

fn token_scales(bytes: &[u8]) -> &[f32; TILE] {
    bytemuck::from_bytes(bytes)
}

/// An int4 K tile as the K tile of a bf16 layout: `[k_dim / 2][16 tokens][2]`, `16 * k_dim` values.
pub fn expand_int4_k_tile(_: Level, view: &LayerView<'_>, block: BlockId, head: usize, tile: usize, out: &mut [u16]) {
    let groups = view.k_groups(block, head, tile);
    for (i, (&byte, out)) in view.k_tile(block, head, tile).iter().zip(out.as_chunks_mut::<2>().0).enumerate() {
        let (dim, token) = (i / TILE * 2, i % TILE);
        let [scale, minimum] = groups[dim / crate::formats::int4::GROUP].map(|tokens| tokens[token]);
        let group = Group { scale, minimum };
        *out = [group.decode_bits(byte & 0x0f), group.decode_bits(byte >> 4)];
    }
}

/// An int4 V tile as the V tile of a bf16 layout: `[8 pairs of tokens][width][2]`, `16 * width` values. What lies beyond
/// v_dim may be anything.
pub fn expand_int4_v_tile(_: Level, view: &LayerView<'_>, block: BlockId, head: usize, tile: usize, out: &mut [u16]) {
    let groups = view.v_groups(block, head, tile);
    let width = view.layout.width();
    for (i, (&byte, out)) in view.v_tile(block, head, tile).iter().zip(out.as_chunks_mut::<2>().0).enumerate() {
        let (pair, dim) = (i / width, i % width);
        let [scales, minima] = &groups[dim / crate::formats::int4::GROUP];
        let group = |token: usize| Group { scale: scales[token], minimum: minima[token] };
        *out = [group(2 * pair).decode_bits(byte & 0x0f), group(2 * pair + 1).decode_bits(byte >> 4)];
    }
}
