//! Where element (block, layer, head, token, dim) lies: the one place that knows.
//!
//! ```text
//! block    [layer][ K tiles | V tiles ] [layer][ K scales | V scales ]     tiles and scales: [tile][kv head]
//! K tile   [k_dim / STEP][16 tokens][STEP]       one load: STEP dimensions of 16 tokens
//! V tile   [16 / STEP tokens][width][STEP]       one load: 16 dimensions of STEP tokens
//! scales   int8, fp8 per token and head          f32 [16 tokens] for each tile
//!          int4                                  f16 [group][scale, minimum][16 tokens] for each tile
//!          others                                none
//! ```
//! STEP is 2 for the formats that bf16 dot products read (all but f32 and f16, which have 1). With tokens (K) or
//! dimensions (V) across the lanes there are no horizontal sums. `width` is v_dim rounded up to 16 lanes. An int4 byte
//! holds the two values of a step, the first in its low half.
//!
//! A tile is 16 tokens, a block one or more tiles. A block's bytes in all layers are one piece, so that copying, spilling
//! and saving a block are one slice each. A latent layout has K alone: V is the first v_dim dimensions of K.
//!
//! Memory is fast where it is read in order. That is why a tile's K of all heads lies together, and so does its V: decode
//! reads the one and, 256 tokens later, the other. Processors read ahead up to the end of a page, so that tiles which
//! straddle pages are read up to a quarter slower: scales lie behind all tiles instead of between them, and large blocks
//! begin at whole pages.
#![forbid(unsafe_code)]

use std::ops::Range;

use crate::formats::int4;
use crate::formats::{KvDtype, ScaleMode};
use crate::{Error, Result};

/// Tokens of a tile: the 16 lanes of the kernels.
pub const TILE: usize = 16;

/// The largest dimension of a head that is not latent.
pub const MAX_HEAD_DIM: usize = 256;

/// The largest dimension of a latent row.
pub const MAX_LATENT_DIM: usize = 576;

/// The largest block.
pub const MAX_BLOCK_SIZE: usize = 1024;

/// What a block size is expected to be, in words.
pub const BLOCK_SIZES: &str = "a multiple of 16 from 16 to 1024";

/// The shape of an arena. All sizes are checked once, by [`Layout::checked`], so that no later offset can overflow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Layers of the group.
    pub num_layers: usize,
    /// Blocks of the pool.
    pub num_blocks: usize,
    /// KV heads of a layer.
    pub num_kv_heads: usize,
    /// Dimensions of a head of K.
    pub k_dim: usize,
    /// Dimensions of a head of V.
    pub v_dim: usize,
    /// Whether V is the first `v_dim` dimensions of K (multi-head latent attention) instead of values of its own.
    pub latent: bool,
    /// Tokens of a block, a multiple of [`TILE`].
    pub block_size: usize,
    /// Format of the values.
    pub dtype: KvDtype,
    /// Where their scales come from.
    pub scale_mode: ScaleMode,
}

/// Where the parts of one layer lie in the arena.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places {
    /// The layer's tiles in the first block.
    tiles: usize,
    /// The layer's scales in the first block.
    scales: usize,
    /// From one block to the next.
    block: usize,
    num_kv_heads: usize,
    k_tile: usize,
    v_tile: usize,
    /// From the layer's K tiles to its V tiles.
    v: usize,
    k_tile_scales: usize,
    v_tile_scales: usize,
    /// From the layer's scales of K to those of V.
    v_scales: usize,
    /// Bytes of the tiles of all heads, and of their scales.
    all_tiles: usize,
    all_scales: usize,
}

/// Blocks of at least this many bytes begin at whole pages.
const LARGE_BLOCK: usize = 64 << 10;
const PAGE: usize = 4 << 10;
const CACHE_LINE: usize = 64;

impl Layout {
    /// Check the sizes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a size out of range, a scale mode that the format does not have, or an arena of
    /// more than `isize::MAX` bytes.
    pub fn checked(self) -> Result<Self> {
        let at_least_one =
            [("num_layers", self.num_layers), ("num_kv_heads", self.num_kv_heads), ("num_blocks", self.num_blocks)];
        for (name, value) in at_least_one {
            if value == 0 {
                return Err(Error::InvalidArgument(format!("{name}: expected at least 1, got 0")));
            }
        }
        let dims = if self.latent {
            [("latent row (rank + rope_dim)", self.k_dim, MAX_LATENT_DIM), ("rank", self.v_dim, self.k_dim)]
        } else {
            [("head_dim", self.k_dim, MAX_HEAD_DIM), ("v_head_dim", self.v_dim, MAX_HEAD_DIM)]
        };
        for (name, value, most) in dims {
            if !(2..=most).contains(&value) || !value.is_multiple_of(2) {
                return Err(Error::InvalidArgument(format!(
                    "{name}: expected an even number from 2 to {most}, got {value}"
                )));
            }
        }
        if self.latent && self.num_kv_heads != 1 {
            return Err(Error::InvalidArgument(format!(
                "num_kv_heads: expected 1 with latent attention, got {}",
                self.num_kv_heads
            )));
        }
        if !self.block_size.is_multiple_of(TILE) || !(TILE..=MAX_BLOCK_SIZE).contains(&self.block_size) {
            return Err(Error::InvalidArgument(format!("block_size: expected {BLOCK_SIZES}, got {}", self.block_size)));
        }
        if !self.dtype.scale_modes().contains(&self.scale_mode) {
            let modes: Vec<&str> = self.dtype.scale_modes().iter().map(|mode| mode.name()).collect();
            return Err(Error::InvalidArgument(format!(
                "scale_mode: expected {} for {}, got {}",
                modes.join(" or "),
                self.dtype,
                self.scale_mode
            )));
        }
        let bytes = self
            .num_kv_heads
            .checked_mul(self.head_bytes() + self.head_scale_bytes())
            .and_then(|n| n.checked_mul(self.num_layers))
            .and_then(|n| n.checked_next_multiple_of(PAGE))
            .and_then(|n| n.checked_mul(self.num_blocks))
            .filter(|&n| n <= isize::MAX as usize);
        if bytes.is_none() {
            return Err(Error::InvalidArgument(format!(
                "a pool of {} layers x {} blocks x {} KV heads x {} dimensions has more bytes than can be addressed",
                self.num_layers, self.num_blocks, self.num_kv_heads, self.k_dim
            )));
        }
        Ok(self)
    }

    /// Dimensions of a V row, padded to whole lanes.
    pub const fn width(&self) -> usize {
        self.v_dim.next_multiple_of(TILE)
    }

    /// Steps of a K tile: k_dim / STEP.
    pub const fn k_steps(&self) -> usize {
        self.k_dim / self.dtype.step()
    }

    /// Tiles of a block.
    pub const fn tiles(&self) -> usize {
        self.block_size / TILE
    }

    /// Bytes of a K tile, scales not counted.
    pub const fn k_tile_bytes(&self) -> usize {
        self.k_dim * TILE * self.dtype.bits() / 8
    }

    /// Bytes of a V tile, scales not counted.
    pub const fn v_tile_bytes(&self) -> usize {
        if self.latent { 0 } else { self.width() * TILE * self.dtype.bits() / 8 }
    }

    /// Bytes of one scale of a token, where tokens have scales.
    pub(super) const fn scale_bytes(&self) -> usize {
        if matches!(self.dtype, KvDtype::Int4) { size_of::<u16>() } else { size_of::<f32>() }
    }

    /// Bytes of the scales that belong to the tile of 16 tokens of a head with `dims` dimensions.
    const fn tile_scale_bytes(&self, dims: usize, group: usize) -> usize {
        match (self.dtype, self.scale_mode) {
            (KvDtype::Int4, _) => int4::groups(dims, group) * 2 * TILE * self.scale_bytes(),
            (_, ScaleMode::PerTokenHead) => TILE * self.scale_bytes(),
            (_, ScaleMode::Static) => 0,
        }
    }

    const fn k_tile_scale_bytes(&self) -> usize {
        self.tile_scale_bytes(self.k_dim, int4::K_GROUP)
    }

    const fn v_tile_scale_bytes(&self) -> usize {
        if self.latent { 0 } else { self.tile_scale_bytes(self.v_dim, int4::V_GROUP) }
    }

    pub(super) const fn head_bytes(&self) -> usize {
        self.tiles() * (self.k_tile_bytes() + self.v_tile_bytes())
    }

    pub(super) const fn head_scale_bytes(&self) -> usize {
        self.tiles() * (self.k_tile_scale_bytes() + self.v_tile_scale_bytes())
    }

    /// Bytes of one block in one layer, scales included.
    pub const fn layer_bytes(&self) -> usize {
        self.num_kv_heads * (self.head_bytes() + self.head_scale_bytes())
    }

    /// Bytes of one block in all layers.
    pub const fn block_bytes(&self) -> usize {
        self.num_layers * self.layer_bytes()
    }

    /// From one block's start to the next one's: a whole number of pages for large blocks.
    pub const fn block_stride(&self) -> usize {
        let bytes = self.block_bytes();
        bytes.next_multiple_of(if bytes >= LARGE_BLOCK { PAGE } else { CACHE_LINE })
    }

    /// Bytes of the whole arena, what lies between blocks included.
    pub const fn total_bytes(&self) -> usize {
        self.num_blocks * self.block_stride()
    }

    /// Bytes that one token takes in all layers, K and V, scales included; what lies between blocks is not.
    pub const fn bytes_per_token(&self) -> usize {
        self.block_bytes() / self.block_size
    }

    /// Where a block lies in the arena, with all its layers.
    pub const fn block(&self, block: usize) -> Range<usize> {
        let start = block * self.block_stride();
        start..start + self.block_bytes()
    }

    /// Where one layer's parts lie.
    pub(super) const fn places(&self, layer: usize) -> Places {
        let (tiles, k_tile, v_tile) = (self.tiles(), self.k_tile_bytes(), self.v_tile_bytes());
        let (k_tile_scales, v_tile_scales) = (self.k_tile_scale_bytes(), self.v_tile_scale_bytes());
        let heads = self.num_kv_heads;
        let (all_tiles, all_scales) = (heads * self.head_bytes(), heads * self.head_scale_bytes());
        Places {
            tiles: layer * all_tiles,
            scales: self.num_layers * all_tiles + layer * all_scales,
            block: self.block_stride(),
            num_kv_heads: heads,
            k_tile,
            v_tile,
            v: tiles * heads * k_tile,
            k_tile_scales,
            v_tile_scales,
            v_scales: tiles * heads * k_tile_scales,
            all_tiles,
            all_scales,
        }
    }

    /// Where a block's tiles of all layers lie, and where their scales do.
    pub(super) const fn parts(&self, block: usize) -> (Range<usize>, Range<usize>) {
        let all = self.block(block);
        let middle = all.start + self.num_layers * self.num_kv_heads * self.head_bytes();
        (all.start..middle, middle..all.end)
    }

    /// Which value of its K tile an element is.
    #[inline(always)]
    pub const fn k_element(&self, token: usize, dim: usize) -> usize {
        let step = self.dtype.step();
        (dim / step * TILE + token) * step + dim % step
    }

    /// Which value of its V tile an element is.
    #[inline(always)]
    pub const fn v_element(&self, token: usize, dim: usize) -> usize {
        let step = self.dtype.step();
        (token / step * self.width() + dim) * step + token % step
    }
}

impl Places {
    /// Where the layer's tiles lie, and where their scales do: in a block all that belongs to the layer.
    #[inline(always)]
    pub const fn parts(&self, block: usize) -> (Range<usize>, Range<usize>) {
        let (tiles, scales) = (self.tiles + block * self.block, self.scales + block * self.block);
        (tiles..tiles + self.all_tiles, scales..scales + self.all_scales)
    }

    /// The same places, counted from where the layer's tiles or its scales begin in a block.
    pub const fn within_parts(self) -> Self {
        Self { tiles: 0, scales: 0, ..self }
    }

    /// Where a K tile lies.
    #[inline(always)]
    pub const fn k_tile(&self, block: usize, head: usize, tile: usize) -> Range<usize> {
        let start = self.tiles + block * self.block + self.place(head, tile) * self.k_tile;
        start..start + self.k_tile
    }

    /// Where the K tiles of some heads lie.
    #[inline(always)]
    pub const fn k_tiles(&self, block: usize, heads: &Range<usize>, tile: usize) -> Range<usize> {
        let start = self.k_tile(block, heads.start, tile).start;
        start..start + (heads.end - heads.start) * self.k_tile
    }

    /// Where the V tiles of some heads lie.
    #[inline(always)]
    pub const fn v_tiles(&self, block: usize, heads: &Range<usize>, tile: usize) -> Range<usize> {
        let start = self.v_tile(block, heads.start, tile).start;
        start..start + (heads.end - heads.start) * self.v_tile
    }

    /// Where a V tile lies.
    #[inline(always)]
    pub const fn v_tile(&self, block: usize, head: usize, tile: usize) -> Range<usize> {
        let start = self.tiles + block * self.block + self.v + self.place(head, tile) * self.v_tile;
        start..start + self.v_tile
    }

    /// Where the scales of a K tile lie.
    #[inline(always)]
    pub const fn k_tile_scales(&self, block: usize, head: usize, tile: usize) -> Range<usize> {
        let start = self.scales + block * self.block + self.place(head, tile) * self.k_tile_scales;
        start..start + self.k_tile_scales
    }

    /// Where the scales of a V tile lie.
    #[inline(always)]
    pub const fn v_tile_scales(&self, block: usize, head: usize, tile: usize) -> Range<usize> {
        let start = self.scales + block * self.block + self.v_scales + self.place(head, tile) * self.v_tile_scales;
        start..start + self.v_tile_scales
    }

    #[inline(always)]
    const fn place(&self, head: usize, tile: usize) -> usize {
        tile * self.num_kv_heads + head
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(k_dim: usize, v_dim: usize, block_size: usize, dtype: KvDtype) -> Layout {
        let scale_mode = dtype.default_scale_mode();
        Layout {
            num_layers: 2,
            num_blocks: 3,
            num_kv_heads: 2,
            k_dim,
            v_dim,
            latent: false,
            block_size,
            dtype,
            scale_mode,
        }
    }

    fn latent(layout: Layout) -> Layout {
        Layout { latent: true, num_kv_heads: 1, ..layout }
    }

    #[test]
    fn bytes_of_a_token() {
        let llama = |dtype: KvDtype, scale_mode| {
            Layout { num_layers: 32, num_kv_heads: 8, scale_mode, ..layout(128, 128, 16, dtype) }
                .checked()
                .unwrap()
                .bytes_per_token()
        };
        assert_eq!(llama(KvDtype::Bf16, ScaleMode::Static), 128 << 10);
        assert_eq!(llama(KvDtype::Fp8E4M3, ScaleMode::Static), 64 << 10);
        assert_eq!(llama(KvDtype::Fp8E5M2, ScaleMode::Static), 64 << 10);
        // A float32 for K and for V in each of 32 x 8 heads.
        assert_eq!(llama(KvDtype::Fp8E4M3, ScaleMode::PerTokenHead), (64 << 10) + 2048);
        assert_eq!(llama(KvDtype::Int8, ScaleMode::PerTokenHead), (64 << 10) + 2048);
        // Four bits a value, and four bytes for each 32 values.
        assert_eq!(llama(KvDtype::Int4, ScaleMode::PerTokenHead), 52 << 10);
        let deepseek_v3 = Layout { num_layers: 61, ..latent(layout(576, 512, 16, KvDtype::Bf16)) };
        assert_eq!(deepseek_v3.checked().unwrap().bytes_per_token(), 70_272);
    }

    #[test]
    fn no_two_elements_share_a_place() {
        for dtype in KvDtype::ALL {
            for &scale_mode in dtype.scale_modes() {
                for (k_dim, v_dim, block_size) in [(2, 2, 16), (24, 40, 16), (16, 2, 48), (34, 32, 32)] {
                    let l = Layout { scale_mode, ..layout(k_dim, v_dim, block_size, dtype) };
                    no_overlap(l.checked().unwrap());
                }
                no_overlap(latent(Layout { scale_mode, ..layout(40, 34, 32, dtype) }).checked().unwrap());
            }
        }
    }

    fn no_overlap(l: Layout) {
        // One mark for each half byte.
        let mut seen = vec![false; l.total_bytes() * 2];
        let mark = |seen: &mut [bool], from: usize, halves: usize| {
            for place in &mut seen[from..from + halves] {
                assert!(!std::mem::replace(place, true), "{l:?}");
            }
        };
        let halves = l.dtype.bits() / 4;
        for block in 0..l.num_blocks {
            for layer in 0..l.num_layers {
                let places = l.places(layer);
                for (head, tile) in (0..l.num_kv_heads).flat_map(|head| (0..l.tiles()).map(move |tile| (head, tile))) {
                    let (k, v) = (places.k_tile(block, head, tile).start, places.v_tile(block, head, tile).start);
                    for token in 0..TILE {
                        for dim in 0..l.k_dim {
                            mark(&mut seen, k * 2 + l.k_element(token, dim) * halves, halves);
                        }
                        for dim in 0..if l.latent { 0 } else { l.v_dim } {
                            mark(&mut seen, v * 2 + l.v_element(token, dim) * halves, halves);
                        }
                    }
                    let scales = [places.k_tile_scales(block, head, tile), places.v_tile_scales(block, head, tile)];
                    for scales in scales {
                        mark(&mut seen, scales.start * 2, scales.len() * 2);
                    }
                }
            }
            // All of it within the block; all of the block but V's padding and what lies behind.
            let own = l.block(block);
            assert!(!seen[own.end * 2..].iter().any(|&used| used), "{l:?}");
            if l.latent || l.width() == l.v_dim {
                assert!(seen[own.start * 2..own.end * 2].iter().all(|&used| used), "{l:?}");
            }
        }
    }

    #[test]
    fn blocks_begin_at_whole_pages_if_they_are_large() {
        let stride = |num_layers, dtype: KvDtype| {
            Layout { num_layers, ..layout(64, 64, 16, dtype) }.checked().unwrap().block_stride()
        };
        assert_eq!(stride(1, KvDtype::Int8), 2 * (2048 + 128));
        assert_eq!(stride(30, KvDtype::Int8), 131_072); // 130,560 bytes
        assert_eq!(stride(32, KvDtype::Bf16), 256 << 10);
    }

    #[test]
    fn sizes_are_checked() {
        let refused = |l: Layout, word: &str| {
            let message = l.checked().unwrap_err().to_string();
            assert!(message.contains(word), "{message}");
        };
        let good = layout(64, 64, 16, KvDtype::F32);
        for dim in [0, 1, 7, 258] {
            refused(Layout { k_dim: dim, ..good }, "head_dim: expected an even number");
            refused(Layout { v_dim: dim, ..good }, "v_head_dim: expected an even number");
        }
        for block_size in [0, 8, 20, 2048] {
            refused(Layout { block_size, ..good }, "block_size");
        }
        for (num_layers, num_blocks, num_kv_heads) in [(0, 1, 1), (1, 0, 1), (1, 1, 0)] {
            refused(Layout { num_layers, num_blocks, num_kv_heads, ..good }, "expected at least 1");
        }
        for (num_layers, num_blocks, num_kv_heads) in
            [(2, usize::MAX / 2, 2), (usize::MAX / 3, 1, 1), (1, 1, usize::MAX / 5)]
        {
            refused(Layout { num_layers, num_blocks, num_kv_heads, ..good }, "can be addressed");
        }
        assert!(latent(layout(576, 512, 16, KvDtype::F32)).checked().is_ok());
        refused(latent(layout(578, 512, 16, KvDtype::F32)), "latent row");
        refused(latent(layout(64, 66, 16, KvDtype::F32)), "rank: expected an even number from 2 to 64");
        refused(Layout { num_kv_heads: 2, ..latent(good) }, "num_kv_heads");
        refused(Layout { scale_mode: ScaleMode::PerTokenHead, ..good }, "expected static for float32");
        refused(
            Layout { scale_mode: ScaleMode::Static, dtype: KvDtype::Int8, ..good },
            "expected per_token_head for int8",
        );
    }
}
