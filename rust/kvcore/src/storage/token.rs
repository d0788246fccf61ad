//! What is stored of one token in one layer: its bytes, out of one slot and into another. Nothing is rounded again, so
//! a token that moves keeps its bits.
//!
//! ```text
//! K       in every step of its tile one run of STEP values
//! V       in its row of the tile every STEP-th value; of int4 half of every byte
//! scales  one of each row of 16: a scale, or for each group of int4 a scale and a minimum
//! ```
#![forbid(unsafe_code)]

use std::ops::Range;

use super::layout::{Layout, Places, TILE};

/// A token's slot in a layer of a block.
pub(super) struct Slot<'a> {
    layout: &'a Layout,
    /// Counted from where the layer's tiles and its scales begin in the block.
    within: Places,
    tile: usize,
    lane: usize,
}

/// Where some of the token's bytes are.
enum Piece {
    /// In the tiles.
    Values(Range<usize>),
    /// Half of a byte of the tiles, at this bit; the other half is another token's.
    Half(usize, usize),
    /// In the scales.
    Scale(Range<usize>),
}

impl<'a> Slot<'a> {
    /// The token `token` of a block.
    pub fn new(layout: &'a Layout, places: Places, token: usize) -> Self {
        Self { layout, within: places.within_parts(), tile: token / TILE, lane: token % TILE }
    }

    /// Append the token's bytes, read from the layer's tiles and scales.
    pub fn take(&self, (tiles, scales): (&[u8], &[u8]), token: &mut Vec<u8>) {
        for piece in self.pieces() {
            match piece {
                Piece::Values(range) => token.extend_from_slice(&tiles[range]),
                Piece::Half(at, bit) => token.push((tiles[at] >> bit) & 0x0f),
                Piece::Scale(range) => token.extend_from_slice(&scales[range]),
            }
        }
    }

    /// Overwrite the slot with bytes that [`Self::take`] has read from another one.
    pub fn put(&self, token: &[u8], (tiles, scales): (&mut [u8], &mut [u8])) {
        let mut rest = token;
        let mut next = |len: usize| {
            let (own, behind) = rest.split_at(len);
            rest = behind;
            own
        };
        for piece in self.pieces() {
            match piece {
                Piece::Values(range) => tiles[range.clone()].copy_from_slice(next(range.len())),
                Piece::Half(at, bit) => tiles[at] = (tiles[at] & !(0x0f << bit)) | (next(1)[0] << bit),
                Piece::Scale(range) => scales[range.clone()].copy_from_slice(next(range.len())),
            }
        }
    }

    fn pieces(&self) -> impl Iterator<Item = Piece> + '_ {
        let heads = 0..self.layout.num_kv_heads;
        heads.flat_map(|head| self.k(head).chain(self.v(head)).chain(self.scales(head)))
    }

    fn k(&self, head: usize) -> impl Iterator<Item = Piece> + '_ {
        let (l, tile) = (self.layout, self.within.k_tile(0, head, self.tile));
        let (step, bits) = (l.dtype.step(), l.dtype.bits());
        (0..l.k_dim).step_by(step).map(move |dim| {
            let start = tile.start + l.k_element(self.lane, dim) * bits / 8;
            Piece::Values(start..start + step * bits / 8)
        })
    }

    fn v(&self, head: usize) -> impl Iterator<Item = Piece> + '_ {
        let (l, tile) = (self.layout, self.within.v_tile(0, head, self.tile));
        let bits = l.dtype.bits();
        (0..if l.latent { 0 } else { l.v_dim }).map(move |dim| {
            let bit = l.v_element(self.lane, dim) * bits;
            let start = tile.start + bit / 8;
            if bits < 8 { Piece::Half(start, bit % 8) } else { Piece::Values(start..start + bits / 8) }
        })
    }

    fn scales(&self, head: usize) -> impl Iterator<Item = Piece> + '_ {
        let (k, v) = (self.within.k_tile_scales(0, head, self.tile), self.within.v_tile_scales(0, head, self.tile));
        let size = self.layout.scale_bytes();
        [k, v].into_iter().flat_map(move |all| {
            all.step_by(TILE * size).map(move |row| {
                let start = row + self.lane * size;
                Piece::Scale(start..start + size)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::KvDtype;

    /// The slots of a layer have each of its bits once, but for V's padding, and no other bits.
    #[test]
    fn the_slots_share_nothing() {
        for dtype in KvDtype::ALL {
            for &scale_mode in dtype.scale_modes() {
                for latent in [false, true] {
                    let heads = if latent { 1 } else { 2 };
                    let l = Layout {
                        num_layers: 2,
                        num_blocks: 1,
                        num_kv_heads: heads,
                        k_dim: 40,
                        v_dim: 32,
                        latent,
                        block_size: 32,
                        dtype,
                        scale_mode,
                    };
                    check(&l.checked().unwrap());
                }
            }
        }
    }

    fn check(l: &Layout) {
        let places = l.places(1);
        let (tiles, scales) = places.parts(0);
        let mut left = (vec![0xffu8; tiles.len()], vec![0xffu8; scales.len()]);
        for token in 0..l.block_size {
            let slot = Slot::new(l, places, token);
            let (mut bits, mut zeros) = (Vec::new(), Vec::new());
            slot.take((&left.0, &left.1), &mut bits);
            let all_ones = |&byte: &u8| byte == 0xff || (l.dtype == KvDtype::Int4 && byte == 0x0f);
            assert!(bits.iter().all(all_ones), "{l:?} {token}");
            zeros.resize(bits.len(), 0);
            slot.put(&zeros, (&mut left.0, &mut left.1));
            // What was put is what is taken.
            bits.iter_mut().enumerate().for_each(|(i, byte)| *byte &= i as u8);
            slot.put(&bits, (&mut left.0, &mut left.1));
            let mut again = Vec::new();
            slot.take((&left.0, &left.1), &mut again);
            assert_eq!(bits, again, "{l:?} {token}");
            slot.put(&zeros, (&mut left.0, &mut left.1));
        }
        assert!(left.0.iter().chain(&left.1).all(|&byte| byte == 0), "{l:?}: no padding here, yet something is left");
    }
}
