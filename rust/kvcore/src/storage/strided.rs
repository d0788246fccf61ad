//! A tile as arrays: which shapes and strides show its tokens without a copy.
//!
//! ```text
//! STEP 1   K [tokens, kv heads, k_dim]              V [tokens, kv heads, v_dim]
//! STEP 2   K [tokens, kv heads, k_dim / 2, 2]       V [tokens / 2, 2, kv heads, v_dim], and for an odd last token
//!                                                     [kv heads, v_dim]
//! scales of each token and head                     [tokens, kv heads]
//! ```
//! With STEP 2 two dimensions of K lie side by side and then the next token's, so that a dimension has two strides; of V
//! it is the token that has two. Half of a pair of tokens cannot be cut off an array of pairs, hence the one of its own.
//! int4 has two values in a byte, which no stride can tell apart.
#![forbid(unsafe_code)]

use super::layout::{Layout, TILE};
use crate::formats::{KvDtype, ScaleMode};

/// An array within one layer's tiles, or scales, of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strided {
    /// Of the first element, in bytes.
    pub offset: usize,
    /// Elements along each axis.
    pub shape: Vec<usize>,
    /// Bytes from one element to the next along each axis.
    pub strides: Vec<usize>,
}

/// The arrays of the first tokens of a tile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TileArrays {
    /// K, or the rows of a latent layout.
    pub k: Strided,
    /// V; with STEP 2 the pairs of tokens. `None` in a latent layout.
    pub v: Option<Strided>,
    /// V of an odd last token with STEP 2.
    pub v_last: Option<Strided>,
    /// Scales of K, float32, where each token and head has its own: in the layer's scales.
    pub k_scales: Option<Strided>,
    /// Scales of V.
    pub v_scales: Option<Strided>,
}

impl Layout {
    /// The arrays of the first `tokens` tokens (at most [`TILE`]) of a tile; `None` for int4.
    pub fn tile_arrays(&self, tile: usize, tokens: usize) -> Option<TileArrays> {
        debug_assert!(tile < self.tiles() && tokens <= TILE);
        if self.dtype == KvDtype::Int4 {
            return None;
        }
        let s = self.places(0).within_parts();
        let (k_head, v_head) = (self.k_tile_bytes(), self.v_tile_bytes());
        let (bytes, step, heads) = (self.dtype.bits() / 8, self.dtype.step(), self.num_kv_heads);
        let mut k = Strided {
            offset: s.k_tile(0, 0, tile).start,
            shape: vec![tokens, heads, self.k_steps()],
            strides: vec![step * bytes, k_head, TILE * step * bytes],
        };
        if step > 1 {
            k.shape.push(step);
            k.strides.push(bytes);
        }
        let at = s.v_tile(0, 0, tile).start;
        let pair = self.width() * step * bytes;
        let (v, v_last) = match step {
            1 => {
                let (shape, strides) = (vec![tokens, heads, self.v_dim], vec![pair, v_head, bytes]);
                (Strided { offset: at, shape, strides }, None)
            }
            _ => {
                let pairs = tokens / step;
                let last = Strided {
                    offset: at + pairs * pair,
                    shape: vec![heads, self.v_dim],
                    strides: vec![v_head, step * bytes],
                };
                let shape = vec![pairs, step, heads, self.v_dim];
                let strides = vec![pair, bytes, v_head, step * bytes];
                (Strided { offset: at, shape, strides }, (!tokens.is_multiple_of(step)).then_some(last))
            }
        };
        let scales = |offset| Strided {
            offset,
            shape: vec![tokens, heads],
            strides: vec![size_of::<f32>(), TILE * size_of::<f32>()],
        };
        let has_scales = self.scale_mode == ScaleMode::PerTokenHead;
        Some(TileArrays {
            k,
            v: (!self.latent).then_some(v),
            v_last: v_last.filter(|_| !self.latent),
            k_scales: has_scales.then(|| scales(s.k_tile_scales(0, 0, tile).start)),
            v_scales: (has_scales && !self.latent).then(|| scales(s.v_tile_scales(0, 0, tile).start)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where element `index` lies.
    fn place(array: &Strided, index: &[usize]) -> usize {
        assert_eq!(array.shape.len(), index.len());
        assert!(index.iter().zip(&array.shape).all(|(i, n)| i < n), "{index:?} of {array:?}");
        array.offset + index.iter().zip(&array.strides).map(|(i, stride)| i * stride).sum::<usize>()
    }

    #[test]
    fn arrays_show_the_elements_of_the_layout() {
        for dtype in KvDtype::ALL {
            for &scale_mode in dtype.scale_modes() {
                for latent in [false, true] {
                    for tokens in 1..=TILE {
                        let num_kv_heads = if latent { 1 } else { 3 };
                        let l = Layout {
                            num_layers: 2,
                            num_blocks: 2,
                            num_kv_heads,
                            k_dim: 24,
                            v_dim: 10,
                            latent,
                            block_size: 48,
                            dtype,
                            scale_mode,
                        };
                        check(&l.checked().unwrap(), 1, tokens);
                    }
                }
            }
        }
    }

    fn check(l: &Layout, tile: usize, tokens: usize) {
        let Some(arrays) = l.tile_arrays(tile, tokens) else {
            assert_eq!(l.dtype, KvDtype::Int4);
            return;
        };
        let (s, step, bytes) = (l.places(0).within_parts(), l.dtype.step(), l.dtype.bits() / 8);
        assert_eq!((arrays.v.is_none(), arrays.v_scales.is_none()), (l.latent, l.latent || arrays.k_scales.is_none()));
        assert_eq!(arrays.v_last.is_some(), !l.latent && !tokens.is_multiple_of(step));
        for token in 0..tokens {
            for head in 0..l.num_kv_heads {
                for dim in 0..l.k_dim {
                    let split = [token, head, dim / step, dim % step];
                    let shown = place(&arrays.k, &split[..if step == 1 { 3 } else { 4 }]);
                    assert_eq!(shown, s.k_tile(0, head, tile).start + l.k_element(token, dim) * bytes);
                }
                for dim in 0..l.v_dim {
                    let shown = match (&arrays.v, &arrays.v_last) {
                        (None, _) => continue,
                        (Some(v), _) if step == 1 => place(v, &[token, head, dim]),
                        (_, Some(last)) if token + 1 == tokens => place(last, &[head, dim]),
                        (Some(v), _) => place(v, &[token / step, token % step, head, dim]),
                    };
                    assert_eq!(shown, s.v_tile(0, head, tile).start + l.v_element(token, dim) * bytes);
                }
                if let Some(scales) = &arrays.k_scales {
                    assert_eq!(place(scales, &[token, head]), s.k_tile_scales(0, head, tile).start + 4 * token);
                }
                if let Some(scales) = &arrays.v_scales {
                    assert_eq!(place(scales, &[token, head]), s.v_tile_scales(0, head, tile).start + 4 * token);
                }
            }
        }
    }
}
