//! The arena: one lazily reserved mapping that holds the blocks of one group of layers.
#![forbid(unsafe_code)]

use std::marker::PhantomData;

use super::arena::{Arena, Frozen};
use super::layout::{Layout, Places, TILE};
use super::rows;
use super::scales::Scales;
use super::token::Slot;
use super::view::LayerView;
use crate::formats::codec::{self, Codec, Extent};
use crate::formats::half_float::f32_to_f16;
use crate::formats::{KvDtype, ScaleMode};
use crate::paging::BlockId;
use crate::simd::{Level, Simd, Work};
use crate::{Error, Result};

/// The bytes of all blocks. Memory is reserved at once and becomes resident as blocks are first written.
pub struct KvStore {
    layout: Layout,
    scales: Scales,
    arena: Arena,
    observed: Option<Observed>,
}

/// The largest magnitudes of K and V for each layer and head that were written.
struct Observed {
    k: Vec<f32>,
    v: Vec<f32>,
}

/// `$body` with `$C` as the type of the format; int4, which stores no value by itself, is `$int4`.
macro_rules! with_codec {
    ($dtype:expr, |$C:ident| $body:expr, int4: $int4:expr) => {
        match $dtype {
            KvDtype::F32 => with_codec!(@ $C codec::F32, $body),
            KvDtype::F16 => with_codec!(@ $C codec::F16, $body),
            KvDtype::Bf16 => with_codec!(@ $C codec::Bf16, $body),
            KvDtype::Fp8E4M3 => with_codec!(@ $C codec::Fp8E4M3, $body),
            KvDtype::Fp8E5M2 => with_codec!(@ $C codec::Fp8E5M2, $body),
            KvDtype::Int8 => with_codec!(@ $C codec::Int8, $body),
            KvDtype::Int4 => $int4,
        }
    };
    (@ $C:ident $codec:ty, $body:expr) => {{
        type $C = $codec;
        $body
    }};
}

impl KvStore {
    /// Reserve an arena.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for bad sizes or scales, [`Error::OutOfMemory`] if the system refuses.
    pub fn new(layout: Layout, scales: Scales) -> Result<Self> {
        let layout = layout.checked()?;
        let bytes = layout.total_bytes();
        let arena = Arena::new(bytes).map_err(|e| Error::OutOfMemory {
            bytes,
            what: "the KV cache's blocks",
            reason: e.to_string(),
        })?;
        let scales = scales.checked(&layout)?;
        Ok(Self { layout, scales, arena, observed: None })
    }

    /// The shape.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The static scales of K and V.
    pub fn scales(&self) -> &Scales {
        &self.scales
    }

    /// Other static scales. What is stored already would be read with them: the caller sees to it that nothing is.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] as [`Scales::checked`]; nothing is changed then.
    pub fn set_scales(&mut self, scales: Scales) -> Result<()> {
        self.scales = scales.checked(&self.layout)?;
        Ok(())
    }

    /// Store K and V of new tokens in one layer.
    ///
    /// `slots` gives (block, token within the block) of each; `k` is `[tokens, kv heads, k_dim]`, `v` `[tokens, kv
    /// heads, v_dim]`, `None` in a latent layout. The caller has checked the sizes and owns the blocks alone.
    pub fn write(
        &mut self,
        level: Level,
        layer: usize,
        slots: impl Iterator<Item = (BlockId, usize)>,
        k: &[f32],
        v: Option<&[f32]>,
    ) {
        debug_assert_eq!(v.is_none(), self.layout.latent, "V of a latent layout is a part of K");
        if let Some(observed) = &mut self.observed {
            observed.see(&self.layout, layer, k, v);
        }
        let heads = self.layout.num_kv_heads;
        let target = Target {
            layout: self.layout,
            places: self.layout.places(layer),
            within: self.layout.places(layer).within_parts(),
            k_scales: &self.scales.k[layer * heads..(layer + 1) * heads],
            v_scales: &self.scales.v[layer * heads..(layer + 1) * heads],
        };
        let arena = &mut self.arena;
        with_codec!(
            self.layout.dtype,
            |C| level.dispatch(Write::<C, _> { arena, target, slots, k, v, codec: PhantomData }),
            int4: level.dispatch(WriteInt4 { arena, target, slots, k, v })
        );
    }

    /// Copy a block with all its layers.
    pub fn copy_block(&mut self, src: BlockId, dst: BlockId) {
        let dst = self.layout.block(dst.index()).start;
        self.arena.copy(self.layout.block(src.index()), dst);
    }

    /// Copy what is stored of one token, its scales too, to another (block, token within the block), in all layers. The
    /// caller owns the block that is written alone.
    pub fn copy_token(&mut self, from: (BlockId, usize), to: (BlockId, usize)) {
        let mut token = Vec::new();
        for layer in 0..self.layout.num_layers {
            let places = self.layout.places(layer);
            token.clear();
            let (bytes, (tiles, scales)) = (self.arena.bytes(), places.parts(from.0.index()));
            Slot::new(&self.layout, places, from.1).take((&bytes[tiles], &bytes[scales]), &mut token);
            let (tiles, scales) = places.parts(to.0.index());
            Slot::new(&self.layout, places, to.1).put(&token, self.arena.get_two_mut(tiles, scales));
        }
    }

    /// A block's bytes in all layers, as they are stored: what another arena of the same layout can take over.
    pub fn block_bytes(&self, block: BlockId) -> &[u8] {
        &self.arena.bytes()[self.layout.block(block.index())]
    }

    /// A block's bytes in all layers, to be overwritten as a whole.
    pub fn block_bytes_mut(&mut self, block: BlockId) -> &mut [u8] {
        self.arena.get_mut(self.layout.block(block.index()))
    }

    /// Keep the tiles and the scales of one layer of a block as they are, and their memory, for a reader who outlives
    /// this borrow.
    pub fn freeze(&mut self, block: BlockId, layer: usize) -> (Frozen, Frozen) {
        let (tiles, scales) = self.layout.places(layer).parts(block.index());
        (self.arena.freeze(tiles), self.arena.freeze(scales))
    }

    /// One layer's bytes, for attention.
    pub fn layer(&self, layer: usize) -> LayerView<'_> {
        let heads = self.layout.num_kv_heads;
        LayerView {
            layout: self.layout,
            places: self.layout.places(layer),
            k_scales: &self.scales.k[layer * heads..(layer + 1) * heads],
            v_scales: &self.scales.v[layer * heads..(layer + 1) * heads],
            bytes: self.arena.bytes(),
        }
    }

    /// Dense copies of the first `num_tokens` tokens of a block table: K `[tokens, kv heads, k_dim]` and V `[tokens, kv
    /// heads, v_dim]`. All blocks must be valid ones.
    pub fn read(&self, level: Level, layer: usize, blocks: &[BlockId], num_tokens: usize) -> (Vec<f32>, Vec<f32>) {
        let l = &self.layout;
        let mut k = vec![0.0; num_tokens * l.num_kv_heads * l.k_dim];
        let mut v = vec![0.0; num_tokens * l.num_kv_heads * l.v_dim];
        self.read_into(level, layer, blocks, &mut k, &mut v);
        (k, v)
    }

    /// [`Self::read`] into the caller's memory, whose length says how many tokens.
    pub fn read_into(&self, level: Level, layer: usize, blocks: &[BlockId], k: &mut [f32], v: &mut [f32]) {
        let view = self.layer(layer);
        with_codec!(
            self.layout.dtype,
            |C| level.dispatch(Read::<C> { view, blocks, k, v, codec: PhantomData }),
            int4: level.dispatch(ReadInt4 { view, blocks, k, v })
        );
    }

    /// Begin to observe what is written, from nothing, or stop.
    pub fn observe(&mut self, on: bool) {
        let zeros = || vec![0.0; self.layout.num_layers * self.layout.num_kv_heads];
        self.observed = on.then(|| Observed { k: zeros(), v: zeros() });
    }

    /// The largest |k| and |v| of each layer and head, `[num_layers, num_kv_heads]`, that were written since
    /// `observe(true)`, and an end to it; `None` if nothing was observed. NaNs do not count, infinities do. V's in a
    /// latent layout are K's.
    pub fn take_observed(&mut self) -> Option<(Vec<f32>, Vec<f32>)> {
        let latent = self.layout.latent;
        self.observed.take().map(|seen| if latent { (seen.k.clone(), seen.k) } else { (seen.k, seen.v) })
    }

    /// Overwrite all values and scales of the arena, written or not, so that `value` is read everywhere (as far as the
    /// format has it), but for blocks of which something is frozen: tests poison it, to show that nothing unwritten is
    /// read.
    #[doc(hidden)]
    pub fn fill(&mut self, value: f32) {
        let l = self.layout;
        let per_token = l.scale_mode == ScaleMode::PerTokenHead;
        for block in 0..l.num_blocks {
            if self.arena.is_frozen(&l.block(block)) {
                continue;
            }
            let (tiles, scales) = l.parts(block);
            let (tiles, scales) = self.arena.get_two_mut(tiles, scales);
            with_codec!(
                l.dtype,
                |C| {
                    let code = C::encode(if per_token { 1.0 } else { value }, 1.0);
                    bytemuck::cast_slice_mut::<_, <C as Codec>::Elem>(tiles).fill(code);
                    bytemuck::cast_slice_mut::<_, f32>(scales).fill(value);
                },
                int4: {
                    tiles.fill(0x55);
                    for group in scales.chunks_exact_mut(4 * TILE) {
                        let group: &mut [u16] = bytemuck::cast_slice_mut(group);
                        group[..TILE].fill(0);
                        group[TILE..].fill(if value.is_infinite() { 0x7c00 } else { f32_to_f16(value) });
                    }
                }
            );
        }
    }
}

impl Observed {
    fn see(&mut self, layout: &Layout, layer: usize, k: &[f32], v: Option<&[f32]>) {
        let heads = layout.num_kv_heads;
        for (seen, rows, dim) in [(&mut self.k, k, layout.k_dim), (&mut self.v, v.unwrap_or(&[]), layout.v_dim)] {
            for (i, row) in rows.chunks_exact(dim).enumerate() {
                let seen = &mut seen[layer * heads + i % heads];
                *seen = seen.max(Extent::of(row).largest);
            }
        }
    }
}

/// One layer of an arena, to be written block by block.
struct Target<'a> {
    layout: Layout,
    /// Where the layer's parts lie in the arena, and where things lie within these.
    places: Places,
    within: Places,
    k_scales: &'a [f32],
    v_scales: &'a [f32],
}

/// The tiles of one layer of a block, and their scales.
type Parts<'a> = (&'a mut [u8], &'a mut [u8]);

impl Target<'_> {
    /// Store one token's row of K or V in one head: beside it goes its scale, where each row has its own.
    #[inline(always)]
    fn put<C: Codec>(&self, (tiles, scales): &mut Parts<'_>, head: usize, token: usize, row: &[f32], is_v: bool) {
        let (s, tile, token) = (&self.within, token / TILE, token % TILE);
        let (place, scale_place, scale) = match is_v {
            false => (s.k_tile(0, head, tile), s.k_tile_scales(0, head, tile), self.k_scales[head]),
            true => (s.v_tile(0, head, tile), s.v_tile_scales(0, head, tile), self.v_scales[head]),
        };
        let scale = match self.layout.scale_mode {
            ScaleMode::Static => scale,
            ScaleMode::PerTokenHead => {
                let scale = C::row_scale(row);
                bytemuck::cast_slice_mut::<_, f32>(&mut scales[scale_place])[token] = scale;
                scale
            }
        };
        let tile: &mut [C::Elem] = bytemuck::cast_slice_mut(&mut tiles[place]);
        match is_v {
            false => rows::put_k::<C>(row, scale, tile, token),
            true => rows::put_v::<C>(row, scale, tile, self.layout.width(), token),
        }
    }

    /// The same as int4.
    #[inline(always)]
    fn put_int4(&self, (tiles, scales): &mut Parts<'_>, head: usize, token: usize, row: &[f32], is_v: bool) {
        let (s, tile, token) = (&self.within, token / TILE, token % TILE);
        let (place, groups) = match is_v {
            false => (s.k_tile(0, head, tile), s.k_tile_scales(0, head, tile)),
            true => (s.v_tile(0, head, tile), s.v_tile_scales(0, head, tile)),
        };
        let groups: &mut [u16] = bytemuck::cast_slice_mut(&mut scales[groups]);
        match is_v {
            false => rows::put_k_int4(row, &mut tiles[place], groups, token),
            true => rows::put_v_int4(row, &mut tiles[place], groups, self.layout.width(), token),
        }
    }
}

/// Store rows in a format of single values.
struct Write<'a, C, I> {
    arena: &'a mut Arena,
    target: Target<'a>,
    slots: I,
    k: &'a [f32],
    v: Option<&'a [f32]>,
    codec: PhantomData<C>,
}

impl<S: Simd, C: Codec, I: Iterator<Item = (BlockId, usize)>> Work<S> for Write<'_, C, I> {
    type Output = ();

    #[inline(always)]
    fn run(self, _: S) {
        let l = self.target.layout;
        let mut k = self.k.chunks_exact(l.k_dim);
        let mut v = self.v.map(|v| v.chunks_exact(l.v_dim));
        for (block, token) in self.slots {
            let (tiles, scales) = self.target.places.parts(block.index());
            let mut parts = self.arena.get_two_mut(tiles, scales);
            for head in 0..l.num_kv_heads {
                if let Some(row) = k.next() {
                    self.target.put::<C>(&mut parts, head, token, row, false);
                }
                if let Some(row) = v.as_mut().and_then(Iterator::next) {
                    self.target.put::<C>(&mut parts, head, token, row, true);
                }
            }
        }
    }
}

/// Store rows as int4.
struct WriteInt4<'a, I> {
    arena: &'a mut Arena,
    target: Target<'a>,
    slots: I,
    k: &'a [f32],
    v: Option<&'a [f32]>,
}

impl<S: Simd, I: Iterator<Item = (BlockId, usize)>> Work<S> for WriteInt4<'_, I> {
    type Output = ();

    #[inline(always)]
    fn run(self, _: S) {
        let l = self.target.layout;
        let mut k = self.k.chunks_exact(l.k_dim);
        let mut v = self.v.map(|v| v.chunks_exact(l.v_dim));
        for (block, token) in self.slots {
            let (tiles, scales) = self.target.places.parts(block.index());
            let mut parts = self.arena.get_two_mut(tiles, scales);
            for head in 0..l.num_kv_heads {
                if let Some(row) = k.next() {
                    self.target.put_int4(&mut parts, head, token, row, false);
                }
                if let Some(row) = v.as_mut().and_then(Iterator::next) {
                    self.target.put_int4(&mut parts, head, token, row, true);
                }
            }
        }
    }
}

/// Load rows in a format of single values.
struct Read<'a, C> {
    view: LayerView<'a>,
    blocks: &'a [BlockId],
    k: &'a mut [f32],
    v: &'a mut [f32],
    codec: PhantomData<C>,
}

impl<S: Simd, C: Codec> Work<S> for Read<'_, C> {
    type Output = ();

    #[inline(always)]
    fn run(self, _: S) {
        let (view, l) = (self.view, self.view.layout);
        let rows = self.k.chunks_exact_mut(l.k_dim).zip(self.v.chunks_exact_mut(l.v_dim));
        for (i, (k, v)) in rows.enumerate() {
            let (position, head) = (i / l.num_kv_heads, i % l.num_kv_heads);
            let block = self.blocks[position / l.block_size];
            let (tile, token) = (position % l.block_size / TILE, position % TILE);
            let scale = view.k_token_scales(block, head, tile).map_or(view.k_scale(head), |scales| scales[token]);
            rows::get_k::<C>(bytemuck::cast_slice(view.k_tile(block, head, tile)), token, scale, k);
            if l.latent {
                v.copy_from_slice(&k[..l.v_dim]);
            } else {
                let scale = view.v_token_scales(block, head, tile).map_or(view.v_scale(head), |scales| scales[token]);
                let stored = bytemuck::cast_slice(view.v_tile(block, head, tile));
                rows::get_v::<C>(stored, l.width(), token, scale, v);
            }
        }
    }
}

/// Load rows from int4.
struct ReadInt4<'a> {
    view: LayerView<'a>,
    blocks: &'a [BlockId],
    k: &'a mut [f32],
    v: &'a mut [f32],
}

impl<S: Simd> Work<S> for ReadInt4<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self, _: S) {
        let (view, l) = (self.view, self.view.layout);
        let rows = self.k.chunks_exact_mut(l.k_dim).zip(self.v.chunks_exact_mut(l.v_dim));
        for (i, (k, v)) in rows.enumerate() {
            let (position, head) = (i / l.num_kv_heads, i % l.num_kv_heads);
            let block = self.blocks[position / l.block_size];
            let (tile, token) = (position % l.block_size / TILE, position % TILE);
            let groups = view.k_groups(block, head, tile).as_flattened().as_flattened();
            rows::get_k_int4(view.k_tile(block, head, tile), groups, token, k);
            if l.latent {
                v.copy_from_slice(&k[..l.v_dim]);
            } else {
                let groups = view.v_groups(block, head, tile).as_flattened().as_flattened();
                rows::get_v_int4(view.v_tile(block, head, tile), groups, l.width(), token, v);
            }
        }
    }
}
