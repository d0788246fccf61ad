//! The tiles of one chunk of the context, as the kernels read them.
//!
//! ```text
//! K and V in a format of the kernels    the blocks' own tiles; only their addresses are gathered
//! int4, or 8 bits for tile registers    each tile is expanded to bf16, in a buffer
//! latent                                V is the first v_dim dimensions of the K rows: K tiles are turned, in a buffer
//! ```
//! A buffer is filled once for all queries of a row tile. Tiles that no row sees are not looked up: their blocks need
//! not be there.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::gather::{Gathered, gather, leaves};
use super::lines::Lines;
use super::tree::Path;
use crate::paging::BlockId;
use crate::simd::{Format, LANES, Simd, Work};
use crate::storage::{LayerView, TILE, expand_k_tile, expand_v_tile};

/// Tokens of one chunk of the softmax.
pub const CHUNK: usize = 256;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Tiles that lie between the one that is expanded and the one that is asked for.
const AHEAD: usize = 2;

/// Tiles of a chunk.
pub const TILES: usize = CHUNK / TILE;

/// What some KV heads of a sequence have stored.
#[derive(Clone)]
pub struct Context<'a> {
    /// The layer's K and V.
    pub view: LayerView<'a>,
    /// The sequence's block table.
    pub blocks: &'a [BlockId],
    /// The KV heads; one alone where tiles are turned or gathered.
    pub heads: Range<usize>,
}

/// Room for a chunk's tiles where those of the blocks cannot be multiplied as they are.
pub struct Buffers<F: Format> {
    k: Lines<F::Raw>,
    v: Lines<F::Raw>,
    /// Tiles that a path leaves the order of the slots in; by tile.
    gathered: Vec<(usize, Gathered<F>)>,
}

impl<F: Format> Default for Buffers<F> {
    fn default() -> Self {
        Self { k: Lines::default(), v: Lines::default(), gathered: Vec::new() }
    }
}

/// The tiles of some heads in one chunk; empty where no row sees them.
pub struct Chunk<'a, F: Format> {
    /// Steps of one head's K tile and V tile.
    steps: (usize, usize),
    /// `[heads][k_dim / STEP]` steps of 16 tokens each.
    pub k: [&'a [F::Raw]; TILES],
    /// `[heads][16 / STEP][padded v_dim / 16]` steps of 16 dimensions each.
    pub v: [&'a [F::Raw]; TILES],
    /// Of each head, where the cache has scales for each token.
    scales: Vec<TokenScales<'a>>,
}

/// What one head has of a chunk.
pub struct HeadChunk<'a, F: Format> {
    chunk: &'a Chunk<'a, F>,
    head: usize,
}

impl<F: Format> Clone for HeadChunk<'_, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F: Format> Copy for HeadChunk<'_, F> {}

impl<F: Format> Chunk<'_, F> {
    /// What a head has, counted from the first.
    pub fn head(&self, head: usize) -> HeadChunk<'_, F> {
        HeadChunk { chunk: self, head }
    }
}

impl<'a, F: Format> HeadChunk<'a, F> {
    /// The K tile `t`: `[k_dim / STEP]` steps of 16 tokens each.
    #[inline(always)]
    pub fn k(&self, t: usize) -> &'a [F::Raw] {
        let steps = self.chunk.steps.0;
        &self.chunk.k[t][self.head * steps..][..steps]
    }

    /// The V tile `t`: `[16 / STEP][padded v_dim / 16]` steps of 16 dimensions each.
    #[inline(always)]
    pub fn v(&self, t: usize) -> &'a [F::Raw] {
        let steps = self.chunk.steps.1;
        &self.chunk.v[t][self.head * steps..][..steps]
    }

    /// Scales of each token, where the cache has them.
    pub fn scales(&self) -> Option<&'a TokenScales<'a>> {
        self.chunk.scales.get(self.head)
    }
}

/// What each token's stored values are multiplied by.
pub struct TokenScales<'a> {
    /// For K.
    pub k: [&'a [f32; TILE]; TILES],
    /// For V.
    pub v: [&'a [f32; TILE]; TILES],
}

impl<'a> Context<'a> {
    /// Steps of a K tile and of a V tile.
    pub fn steps<F: Format>(&self) -> (usize, usize) {
        let l = &self.view.layout;
        (l.k_dim / F::STEP, TILE / F::STEP * l.width() / TILE)
    }

    /// Whether tiles are expanded before they are multiplied.
    pub fn expands<F: Format>(&self) -> bool {
        self.view.layout.dtype.bits() * F::STEP * LANES != 8 * size_of::<F::Raw>()
    }

    /// The block of tile `t` (16 tokens at `16 t`), and which of its tiles that is.
    fn place(&self, t: usize) -> (BlockId, usize) {
        let per_block = self.view.layout.block_size / TILE;
        (self.blocks[t / per_block], t % per_block)
    }

    /// The stored K of tile `t`.
    pub fn stored_k(&self, t: usize) -> &'a [u8] {
        let (block, tile) = self.place(t);
        self.view.k_tiles(block, &self.heads, tile)
    }

    /// The stored V of tile `t`; none if it is part of K.
    pub fn stored_v(&self, t: usize) -> &'a [u8] {
        let (block, tile) = self.place(t);
        if self.view.layout.latent { &[] } else { self.view.v_tiles(block, &self.heads, tile) }
    }

    /// Ask for all that tile `t` has stored.
    #[inline(always)]
    fn ask<S: Simd>(&self, s: S, t: usize) {
        for bytes in [self.stored_k(t), self.stored_v(t)] {
            for line in bytes.chunks(LINE) {
                s.prefetch(line.as_ptr());
            }
        }
    }

    /// Whether V is not read as it is stored.
    pub fn turns<F: Format>(&self) -> bool {
        self.expands::<F>() || self.view.layout.latent
    }

    /// Make room in `buffers` for [`Self::chunk`], or none if it needs none.
    pub fn prepare<F: Format>(&self, buffers: &mut Buffers<F>) {
        let (k, v) = self.steps::<F>();
        let room = |steps: usize, needed: bool| if needed { TILES * self.heads.len() * steps } else { 0 };
        buffers.k.resize(room(k, self.expands::<F>()));
        buffers.v.resize(room(v, self.turns::<F>()));
    }

    /// Tile `t` as the kernels read it.
    pub fn copy_tile<S: Simd, F: Format>(&self, s: S, t: usize, to: &mut Gathered<F>) {
        let (view, head) = (self.view, self.heads.start);
        let (block, tile) = self.place(t);
        let (k, v) = (&mut to.k[..], &mut to.v[..]);
        s.run(FillTile::<F> { context: self, head, block, tile, k: self.expands::<F>().then_some(&mut *k), v });
        if !self.expands::<F>() {
            k.copy_from_slice(bytemuck::cast_slice(view.k_tile(block, head, tile)));
        }
        if !self.turns::<F>() {
            v.copy_from_slice(bytemuck::cast_slice(view.v_tile(block, head, tile)));
        }
        let scales = (view.k_token_scales(block, head, tile), view.v_token_scales(block, head, tile));
        to.scales = scales.0.zip(scales.1).map(|(k, v)| [*k, *v]);
    }

    /// The tiles `tiles` of chunk `c` as they are stored; empty where the kernels cannot read them so.
    pub fn stored_chunk<F: Format>(&self, c: usize, tiles: Range<usize>) -> Chunk<'a, F> {
        let view = self.view;
        let mut chunk = Chunk { steps: self.steps::<F>(), k: [&[]; TILES], v: [&[]; TILES], scales: Vec::new() };
        for t in tiles {
            let (block, tile) = self.place(c * TILES + t);
            if !self.expands::<F>() {
                chunk.k[t] = bytemuck::cast_slice(view.k_tiles(block, &self.heads, tile));
            }
            if !self.turns::<F>() {
                chunk.v[t] = bytemuck::cast_slice(view.v_tiles(block, &self.heads, tile));
            }
            for (i, head) in self.heads.clone().enumerate() {
                let scales = (view.k_token_scales(block, head, tile), view.v_token_scales(block, head, tile));
                let (Some(k), Some(v)) = scales else { break };
                const ONES: &[f32; TILE] = &[1.0; TILE];
                if chunk.scales.len() == i {
                    chunk.scales.push(TokenScales { k: [ONES; TILES], v: [ONES; TILES] });
                }
                (chunk.scales[i].k[t], chunk.scales[i].v[t]) = (k, v);
            }
        }
        chunk
    }

    /// The tiles `tiles` of chunk `c`; those of `path`, if there is one.
    pub fn chunk<'b, S: Simd, F: Format>(
        &self,
        s: S,
        c: usize,
        tiles: Range<usize>,
        path: Option<&Path>,
        buffers: &'b mut Buffers<F>,
    ) -> Chunk<'b, F>
    where
        'a: 'b,
    {
        if !buffers.v.is_empty() {
            s.run(Fill { context: self, c, tiles: tiles.clone(), buffers });
        }
        buffers.gathered.clear();
        if let Some(path) = path {
            let position = |t: usize| (c * TILES + t) * TILE;
            let left = tiles.clone().filter(|&t| leaves(path, position(t)));
            buffers.gathered.extend(left.map(|t| (t, gather(s, self, path, position(t)))));
        }
        let buffers: &'b Buffers<F> = buffers;
        let mut chunk = self.stored_chunk(c, tiles.clone());
        let (k_steps, v_steps) = (chunk.steps.0 * self.heads.len(), chunk.steps.1 * self.heads.len());
        for t in tiles {
            if !buffers.k.is_empty() {
                chunk.k[t] = &buffers.k[t * k_steps..][..k_steps];
            }
            if !buffers.v.is_empty() {
                chunk.v[t] = &buffers.v[t * v_steps..][..v_steps];
            }
        }
        for (t, gathered) in &buffers.gathered {
            (chunk.k[*t], chunk.v[*t]) = (&gathered.k, &gathered.v);
            if let (Some(scales), Some([k, v])) = (chunk.scales.first_mut(), &gathered.scales) {
                (scales.k[*t], scales.v[*t]) = (k, v);
            }
        }
        chunk
    }
}

/// Expand or turn the tiles of a chunk into the buffers.
struct Fill<'a, F: Format> {
    context: &'a Context<'a>,
    c: usize,
    tiles: Range<usize>,
    buffers: &'a mut Buffers<F>,
}

impl<S: Simd, F: Format> Work<S> for Fill<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run(self, s: S) {
        let ((k_steps, v_steps), heads) = (self.context.steps::<F>(), &self.context.heads);
        for t in self.tiles.clone() {
            let (block, tile) = self.context.place(self.c * TILES + t);
            if t + AHEAD < self.tiles.end {
                self.context.ask(s, self.c * TILES + t + AHEAD);
            }
            for head in heads.clone() {
                let place = t * heads.len() + head - heads.start;
                let v = &mut self.buffers.v[place * v_steps..][..v_steps];
                let k = self.buffers.k.get_mut(place * k_steps..(place + 1) * k_steps);
                FillTile::<F> { context: self.context, head, block, tile, k, v }.run(s);
            }
        }
    }
}

/// Expand or turn one tile; nothing where the kernels read the block's own.
struct FillTile<'a, F: Format> {
    context: &'a Context<'a>,
    head: usize,
    block: BlockId,
    tile: usize,
    /// Where formats are expanded.
    k: Option<&'a mut [F::Raw]>,
    v: &'a mut [F::Raw],
}

impl<S: Simd, F: Format> Work<S> for FillTile<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run(self, s: S) {
        let Self { context: Context { view, .. }, head, block, tile, k, v } = self;
        let expands = k.is_some();
        let k: &[F::Raw] = match k {
            Some(k) => {
                expand_k_tile(s, view, block, head, tile, bytemuck::cast_slice_mut(k));
                k
            }
            None => bytemuck::cast_slice(view.k_tile(block, head, tile)),
        };
        if view.layout.latent {
            turn::<F>(k, view.layout.v_dim, v);
        } else if expands {
            expand_v_tile(s, view, block, head, tile, bytemuck::cast_slice_mut(v));
        }
    }
}

/// A K tile `[dims / STEP][16 tokens][STEP]` as the V tile `[16 / STEP][width][STEP]` of its first `dims` dimensions.
#[inline(always)]
fn turn<F: Format>(k: &[F::Raw], dims: usize, v: &mut [F::Raw]) {
    match size_of::<F::Raw>() / TILE / F::STEP {
        1 => turn_as::<u8>(F::STEP, bytemuck::cast_slice(k), dims, bytemuck::cast_slice_mut(v)),
        2 => turn_as::<u16>(F::STEP, bytemuck::cast_slice(k), dims, bytemuck::cast_slice_mut(v)),
        _ => turn_as::<u32>(F::STEP, bytemuck::cast_slice(k), dims, bytemuck::cast_slice_mut(v)),
    }
}

#[inline(always)]
fn turn_as<E: Copy>(step: usize, k: &[E], dims: usize, v: &mut [E]) {
    let width = v.len() / TILE;
    if step == 1 {
        for (d, tokens) in k.as_chunks::<TILE>().0[..dims].iter().enumerate() {
            for (t, &x) in tokens.iter().enumerate() {
                v[t * width + d] = x;
            }
        }
        return;
    }
    // Two tokens' pairs of dimensions become two dimensions' pairs of tokens.
    for (pair, v) in v.chunks_exact_mut(2 * width).enumerate() {
        let dims = k.as_chunks::<{ 2 * TILE }>().0[..dims / 2].iter();
        for (k, v) in dims.zip(v.as_chunks_mut::<4>().0) {
            let k = &k[4 * pair..4 * pair + 4];
            *v = [k[0], k[2], k[1], k[3]];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Bf16, F32, Fp8E4M3};

    fn check<F: Format, E: bytemuck::Pod + PartialEq + std::fmt::Debug>(dims: usize, name: impl Fn(usize, usize) -> E) {
        let width = dims.next_multiple_of(TILE);
        let mut k: Vec<F::Raw> = vec![bytemuck::Zeroable::zeroed(); (dims + 4) / F::STEP];
        let mut v: Vec<F::Raw> = vec![bytemuck::Zeroable::zeroed(); TILE / F::STEP * width / TILE];
        let values: &mut [E] = bytemuck::cast_slice_mut(&mut k);
        for token in 0..TILE {
            for dim in 0..dims + 4 {
                values[(dim / F::STEP * TILE + token) * F::STEP + dim % F::STEP] = name(token, dim);
            }
        }
        turn::<F>(&k, dims, &mut v);
        let turned: &[E] = bytemuck::cast_slice(&v);
        for token in 0..TILE {
            for dim in 0..width {
                let x = turned[(token / F::STEP * width + dim) * F::STEP + token % F::STEP];
                let expected = if dim < dims { name(token, dim) } else { bytemuck::Zeroable::zeroed() };
                assert_eq!(x, expected, "token {token} dim {dim} of {dims}");
            }
        }
    }

    #[test]
    fn a_turned_k_tile_is_a_v_tile() {
        for dims in [2, 16, 22, 512] {
            check::<F32, f32>(dims, |t, d| (1 + t + 16 * d) as f32);
            check::<Bf16, u16>(dims, |t, d| (1 + t + 16 * d) as u16);
            check::<Fp8E4M3, u8>(dims, |t, d| (1 + t + 7 * d) as u8);
        }
    }
}
