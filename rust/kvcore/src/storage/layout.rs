//! Where element (layer, block, head, token, dim) lies: the one place that knows.
//!
//! ```text
//! arena  [layer][block][kv head][ K tiles | V tiles ]        a tile is 16 tokens, a block one or more tiles
//! K tile [head_dim / STEP][16 tokens][STEP]                  one load: STEP dimensions of 16 tokens
//! V tile [16 / STEP tokens][width][STEP]                     one load: 16 dimensions of STEP tokens
//! ```
//! STEP is 2 for the formats that bf16 dot products read (bf16, fp8) and 1 for the others. With tokens (K) or
//! dimensions (V) across the lanes there are no horizontal sums. `width` is head_dim rounded up to 16 lanes.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::dtype::KvDtype;
use crate::{Error, Result};

/// Tokens of a tile: the 16 lanes of the kernels.
pub const TILE: usize = 16;

/// The largest head_dim.
pub const MAX_HEAD_DIM: usize = 256;

/// The shape of an arena. All sizes are checked once, here, so that no later offset can overflow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Layers that have a cache.
    pub num_layers: usize,
    /// Blocks of the pool.
    pub num_blocks: usize,
    /// KV heads of a layer.
    pub num_kv_heads: usize,
    /// Dimensions of a head.
    pub head_dim: usize,
    /// Tokens of a block, a multiple of [`TILE`].
    pub block_size: usize,
    /// Format of the values.
    pub dtype: KvDtype,
}

impl Layout {
    /// Check the sizes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a size out of range, or an arena of more than `isize::MAX` bytes.
    pub fn checked(self) -> Result<Self> {
        let at_least_one = [
            ("num_layers", self.num_layers),
            ("num_kv_heads", self.num_kv_heads),
            ("num_blocks", self.num_blocks),
            ("block_size", self.block_size),
        ];
        for (name, value) in at_least_one {
            if value == 0 {
                return Err(Error::InvalidArgument(format!("{name}: expected at least 1, got 0")));
            }
        }
        if !(2..=MAX_HEAD_DIM).contains(&self.head_dim) || !self.head_dim.is_multiple_of(2) {
            return Err(Error::InvalidArgument(format!(
                "head_dim: expected an even number from 2 to {MAX_HEAD_DIM}, got {}",
                self.head_dim
            )));
        }
        if !self.block_size.is_multiple_of(TILE) || self.block_size > 1024 {
            return Err(Error::InvalidArgument(format!(
                "block_size: expected a multiple of {TILE} up to 1024, got {}",
                self.block_size
            )));
        }
        let bytes = self
            .num_kv_heads
            .checked_mul(self.head_bytes())
            .and_then(|n| n.checked_mul(self.num_blocks))
            .and_then(|n| n.checked_mul(self.num_layers))
            .filter(|&n| n <= isize::MAX as usize);
        if bytes.is_none() {
            return Err(Error::InvalidArgument(format!(
                "a pool of {} layers x {} blocks x {} KV heads x {} dimensions has more bytes than can be addressed",
                self.num_layers, self.num_blocks, self.num_kv_heads, self.head_dim
            )));
        }
        Ok(self)
    }

    /// Dimensions of a V row, padded to whole lanes.
    pub const fn width(&self) -> usize {
        self.head_dim.next_multiple_of(TILE)
    }

    /// Steps of a K tile: head_dim / STEP.
    pub const fn k_steps(&self) -> usize {
        self.head_dim / self.dtype.step()
    }

    const fn k_tile_bytes(&self) -> usize {
        self.head_dim * TILE * self.dtype.size()
    }

    const fn v_tile_bytes(&self) -> usize {
        self.width() * TILE * self.dtype.size()
    }

    const fn tiles(&self) -> usize {
        self.block_size / TILE
    }

    const fn head_bytes(&self) -> usize {
        self.tiles() * (self.k_tile_bytes() + self.v_tile_bytes())
    }

    /// Bytes of one block in one layer.
    pub const fn block_bytes(&self) -> usize {
        self.num_kv_heads * self.head_bytes()
    }

    /// Bytes of one layer.
    pub const fn layer_bytes(&self) -> usize {
        self.num_blocks * self.block_bytes()
    }

    /// Bytes of the whole arena.
    pub const fn total_bytes(&self) -> usize {
        self.num_layers * self.layer_bytes()
    }

    /// Bytes that one token takes in all layers, K and V, padding included.
    pub const fn bytes_per_token(&self) -> usize {
        self.num_layers * self.block_bytes() / self.block_size
    }

    /// Where a block lies within its layer.
    pub const fn block(&self, block: usize) -> Range<usize> {
        block * self.block_bytes()..(block + 1) * self.block_bytes()
    }

    /// Where a K tile lies within its layer.
    #[inline(always)]
    pub const fn k_tile(&self, block: usize, head: usize, tile: usize) -> Range<usize> {
        let start = block * self.block_bytes() + head * self.head_bytes() + tile * self.k_tile_bytes();
        start..start + self.k_tile_bytes()
    }

    /// Where a V tile lies within its layer.
    #[inline(always)]
    pub const fn v_tile(&self, block: usize, head: usize, tile: usize) -> Range<usize> {
        let start = block * self.block_bytes()
            + head * self.head_bytes()
            + self.tiles() * self.k_tile_bytes()
            + tile * self.v_tile_bytes();
        start..start + self.v_tile_bytes()
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

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(head_dim: usize, block_size: usize, dtype: KvDtype) -> Layout {
        Layout { num_layers: 2, num_blocks: 3, num_kv_heads: 2, head_dim, block_size, dtype }
    }

    #[test]
    fn llama_3_8b_takes_128_kib_a_token_in_16_bits_and_half_in_8() {
        let llama = |dtype| {
            Layout { num_layers: 32, num_blocks: 8, num_kv_heads: 8, head_dim: 128, block_size: 16, dtype }
                .checked()
                .unwrap()
                .bytes_per_token()
        };
        assert_eq!(llama(KvDtype::Bf16), 128 << 10);
        assert_eq!(llama(KvDtype::Fp8E4M3), 64 << 10);
    }

    #[test]
    fn no_two_elements_share_a_place() {
        for dtype in KvDtype::ALL {
            for (head_dim, block_size) in [(2, 16), (24, 16), (16, 48)] {
                let l = layout(head_dim, block_size, dtype).checked().unwrap();
                let mut seen = vec![false; l.layer_bytes() / dtype.size()];
                for block in 0..l.num_blocks {
                    for head in 0..l.num_kv_heads {
                        for token in 0..block_size {
                            for dim in 0..head_dim {
                                let k = l.k_tile(block, head, token / TILE).start / dtype.size();
                                let v = l.v_tile(block, head, token / TILE).start / dtype.size();
                                for place in [k + l.k_element(token % TILE, dim), v + l.v_element(token % TILE, dim)] {
                                    assert!(!std::mem::replace(&mut seen[place], true), "{l:?}");
                                }
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn sizes_are_checked() {
        for (head_dim, block_size) in [(0, 16), (1, 16), (7, 16), (258, 16), (64, 0), (64, 8), (64, 20), (64, 2048)] {
            assert!(layout(head_dim, block_size, KvDtype::F32).checked().is_err(), "{head_dim} {block_size}");
        }
        let huge = Layout { num_blocks: usize::MAX / 2, ..layout(64, 16, KvDtype::F32) };
        assert!(huge.checked().is_err());
    }
}
