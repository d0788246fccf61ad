//! The arena: one lazily reserved mapping that holds every layer's blocks.
#![forbid(unsafe_code)]

use memmap2::MmapMut;

use super::dtype::KvDtype;
use super::layout::{Layout, TILE};
use crate::paging::{BlockCopy, BlockId};
use crate::{Error, Result};

/// What stored values are multiplied by: stored = value / scale. Static, so a stored value depends on nothing but
/// its token and position. Only fp8 takes scales other than 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scales {
    /// For K.
    pub k: f32,
    /// For V.
    pub v: f32,
}

impl Scales {
    /// No scaling.
    pub const UNIT: Scales = Scales { k: 1.0, v: 1.0 };

    /// Check that both are positive, finite, normal numbers, and 1 unless `dtype` is fp8.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] that names the scale.
    pub fn checked(self, dtype: KvDtype) -> Result<Self> {
        for (name, scale) in [("k_scale", self.k), ("v_scale", self.v)] {
            // The quotient must be finite as well, which a subnormal scale would not give.
            if !(scale.is_normal() && scale > 0.0 && (1.0 / scale).is_normal()) {
                return Err(Error::InvalidArgument(format!(
                    "{name}: expected a positive, finite, normal float32, got {scale:e}"
                )));
            }
            if scale != 1.0 && dtype != KvDtype::Fp8E4M3 {
                return Err(Error::InvalidArgument(format!("{name}: {dtype} takes no scale but 1, got {scale}")));
            }
        }
        Ok(self)
    }
}

/// The bytes of all blocks. Memory is reserved at once and becomes resident as blocks are first written.
pub struct KvStore {
    layout: Layout,
    scales: Scales,
    arena: MmapMut,
}

impl KvStore {
    /// Reserve an arena.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for bad sizes or scales, [`Error::OutOfMemory`] if the system refuses.
    pub fn new(layout: Layout, scales: Scales) -> Result<Self> {
        let layout = layout.checked()?;
        let scales = scales.checked(layout.dtype)?;
        let bytes = layout.total_bytes();
        let arena = MmapMut::map_anon(bytes).map_err(|e| Error::OutOfMemory {
            bytes,
            what: "the KV cache's blocks",
            reason: e.to_string(),
        })?;
        // Fewer TLB misses on long contexts; a system without huge pages says no, which is no error.
        #[cfg(target_os = "linux")]
        let _ = arena.advise(memmap2::Advice::HugePage);
        Ok(Self { layout, scales, arena })
    }

    /// The shape.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The scales of K and V.
    pub fn scales(&self) -> Scales {
        self.scales
    }

    /// Store K and V of new tokens in one layer.
    ///
    /// `slots` gives (block, token within the block) of each; `k` and `v` are `[tokens, kv heads, head_dim]`.
    /// The caller has checked the sizes and owns the blocks alone.
    pub fn write(&mut self, layer: usize, slots: impl Iterator<Item = (BlockId, usize)>, k: &[f32], v: &[f32]) {
        // One copy of the loop for each format, so that the format is a constant within it.
        match self.layout.dtype {
            KvDtype::F32 => self.write_as::<4>(KvDtype::F32, layer, slots, k, v),
            KvDtype::F16 => self.write_as::<2>(KvDtype::F16, layer, slots, k, v),
            KvDtype::Bf16 => self.write_as::<2>(KvDtype::Bf16, layer, slots, k, v),
            KvDtype::Fp8E4M3 => self.write_as::<1>(KvDtype::Fp8E4M3, layer, slots, k, v),
        }
    }

    #[inline(always)]
    fn write_as<const SIZE: usize>(
        &mut self,
        dtype: KvDtype,
        layer: usize,
        slots: impl Iterator<Item = (BlockId, usize)>,
        k: &[f32],
        v: &[f32],
    ) {
        let layout = Layout { dtype, ..self.layout };
        let bytes = layout.layer_bytes();
        let arena = &mut self.arena[layer * bytes..(layer + 1) * bytes];
        let row = layout.num_kv_heads * layout.head_dim;
        let scales = self.scales;
        for ((block, token), (k, v)) in slots.zip(k.chunks_exact(row).zip(v.chunks_exact(row))) {
            let (tile, token) = (token / TILE, token % TILE);
            let heads = k.chunks_exact(layout.head_dim).zip(v.chunks_exact(layout.head_dim)).enumerate();
            for (head, (k, v)) in heads {
                let out = &mut arena[layout.k_tile(block.index(), head, tile)];
                for (dim, &x) in k.iter().enumerate() {
                    let at = layout.k_element(token, dim) * SIZE;
                    dtype.encode(x / scales.k, &mut out[at..at + SIZE]);
                }
                let out = &mut arena[layout.v_tile(block.index(), head, tile)];
                for (dim, &x) in v.iter().enumerate() {
                    let at = layout.v_element(token, dim) * SIZE;
                    dtype.encode(x / scales.v, &mut out[at..at + SIZE]);
                }
            }
        }
    }

    /// Copy a block in every layer.
    pub fn copy_block(&mut self, copy: BlockCopy) {
        for layer in 0..self.layout.num_layers {
            let start = layer * self.layout.layer_bytes();
            let src = self.layout.block(copy.src.index());
            let dst = self.layout.block(copy.dst.index()).start;
            self.arena.copy_within(start + src.start..start + src.end, start + dst);
        }
    }

    /// One layer's bytes, for attention.
    pub fn layer(&self, layer: usize) -> LayerView<'_> {
        let bytes = self.layout.layer_bytes();
        LayerView { layout: self.layout, scales: self.scales, bytes: &self.arena[layer * bytes..(layer + 1) * bytes] }
    }

    /// Dense copies of the first `num_tokens` tokens of a block table: K and V, `[tokens, kv heads, head_dim]`.
    pub fn read(&self, layer: usize, blocks: &[BlockId], num_tokens: usize) -> (Vec<f32>, Vec<f32>) {
        let view = self.layer(layer);
        let l = self.layout;
        let len = num_tokens * l.num_kv_heads * l.head_dim;
        let (mut k, mut v) = (Vec::with_capacity(len), Vec::with_capacity(len));
        for position in 0..num_tokens {
            let block = blocks[position / l.block_size];
            for head in 0..l.num_kv_heads {
                for dim in 0..l.head_dim {
                    let (key, value) = view.element(block, head, position % l.block_size, dim);
                    k.push(key);
                    v.push(value);
                }
            }
        }
        (k, v)
    }

    /// Overwrite every byte of the arena: tests poison it, to show that nothing unwritten is read.
    #[doc(hidden)]
    pub fn fill(&mut self, value: f32) {
        let size = self.layout.dtype.size();
        for chunk in self.arena.chunks_exact_mut(size) {
            self.layout.dtype.encode(value, chunk);
        }
    }
}

/// One layer of an arena.
#[derive(Clone, Copy)]
pub struct LayerView<'a> {
    /// The shape.
    pub layout: Layout,
    /// The scales of K and V.
    pub scales: Scales,
    bytes: &'a [u8],
}

impl<'a> LayerView<'a> {
    /// A K tile's bytes.
    #[inline(always)]
    pub fn k_tile(&self, block: BlockId, head: usize, tile: usize) -> &'a [u8] {
        &self.bytes[self.layout.k_tile(block.index(), head, tile)]
    }

    /// A V tile's bytes.
    #[inline(always)]
    pub fn v_tile(&self, block: BlockId, head: usize, tile: usize) -> &'a [u8] {
        &self.bytes[self.layout.v_tile(block.index(), head, tile)]
    }

    /// K and V of one element, `token` counted within the block.
    pub fn element(&self, block: BlockId, head: usize, token: usize, dim: usize) -> (f32, f32) {
        let l = &self.layout;
        let value = |tile: &[u8], at: usize| l.dtype.decode(&tile[at * l.dtype.size()..]);
        let (tile, token) = (token / TILE, token % TILE);
        let k = value(self.k_tile(block, head, tile), l.k_element(token, dim)) * self.scales.k;
        let v = value(self.v_tile(block, head, tile), l.v_element(token, dim)) * self.scales.v;
        (k, v)
    }
}
