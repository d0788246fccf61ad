//! One layer of an arena, for attention.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::layout::{Layout, Places, TILE};
use crate::formats::{KvDtype, ScaleMode};
use crate::paging::BlockId;

/// One layer of an arena.
#[derive(Clone, Copy)]
pub struct LayerView<'a> {
    /// The shape of the arena.
    pub layout: Layout,
    pub(super) places: Places,
    pub(super) k_scales: &'a [f32],
    pub(super) v_scales: &'a [f32],
    /// The whole arena.
    pub(super) bytes: &'a [u8],
}

impl<'a> LayerView<'a> {
    /// A K tile's bytes.
    #[inline(always)]
    pub fn k_tile(&self, block: BlockId, head: usize, tile: usize) -> &'a [u8] {
        &self.bytes[self.places.k_tile(block.index(), head, tile)]
    }

    /// A V tile's bytes; a latent layout has none (V is the first dimensions of K).
    #[inline(always)]
    pub fn v_tile(&self, block: BlockId, head: usize, tile: usize) -> &'a [u8] {
        debug_assert!(!self.layout.latent, "V of a latent layout is in the K tile");
        &self.bytes[self.places.v_tile(block.index(), head, tile)]
    }

    /// The bytes of a tile's K of some heads, which lie side by side.
    #[inline(always)]
    pub fn k_tiles(&self, block: BlockId, heads: &Range<usize>, tile: usize) -> &'a [u8] {
        &self.bytes[self.places.k_tiles(block.index(), heads, tile)]
    }

    /// The same of V; a latent layout has none.
    #[inline(always)]
    pub fn v_tiles(&self, block: BlockId, heads: &Range<usize>, tile: usize) -> &'a [u8] {
        debug_assert!(!self.layout.latent, "V of a latent layout is in the K tile");
        &self.bytes[self.places.v_tiles(block.index(), heads, tile)]
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
        self.has_token_scales().then(|| token_scales(&self.bytes[self.places.k_tile_scales(block.index(), head, tile)]))
    }

    /// The same for a V tile; K's in a latent layout.
    #[inline(always)]
    pub fn v_token_scales(&self, block: BlockId, head: usize, tile: usize) -> Option<&'a [f32; TILE]> {
        if self.layout.latent {
            return self.k_token_scales(block, head, tile);
        }
        self.has_token_scales().then(|| token_scales(&self.bytes[self.places.v_tile_scales(block.index(), head, tile)]))
    }

    #[inline(always)]
    fn has_token_scales(&self) -> bool {
        self.layout.scale_mode == ScaleMode::PerTokenHead && self.layout.dtype != KvDtype::Int4
    }

    /// The groups of an int4 K tile: `[group][scale, minimum][16 tokens]`, halves as their bits.
    #[inline(always)]
    pub fn k_groups(&self, block: BlockId, head: usize, tile: usize) -> &'a [[[u16; TILE]; 2]] {
        bytemuck::cast_slice(&self.bytes[self.places.k_tile_scales(block.index(), head, tile)])
    }

    /// The groups of an int4 V tile.
    #[inline(always)]
    pub fn v_groups(&self, block: BlockId, head: usize, tile: usize) -> &'a [[[u16; TILE]; 2]] {
        bytemuck::cast_slice(&self.bytes[self.places.v_tile_scales(block.index(), head, tile)])
    }
}

fn token_scales(bytes: &[u8]) -> &[f32; TILE] {
    bytemuck::from_bytes(bytes)
}
