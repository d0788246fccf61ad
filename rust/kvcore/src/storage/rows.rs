//! One token's values of one head, into its tile and out of it.
//!
//! ```text
//! put: encode a piece of the row into a small array (vector code), then spread it over the tile
//! get: the same backwards
//! ```
//! All of it is inlined into loops that run with the CPU's features enabled.
#![forbid(unsafe_code)]

use bytemuck::Zeroable;

use super::layout::TILE;
use crate::formats::codec::Codec;
use crate::formats::int4::{Group, K_GROUP, MAX_GROUP, V_GROUP};

/// Values that are encoded at a time.
const PIECE: usize = 64;

/// Store K of one token: `tile` is `[k_dim / STEP][16 tokens][STEP]`.
#[inline(always)]
pub fn put_k<C: Codec>(x: &[f32], scale: f32, tile: &mut [C::Elem], token: usize) {
    for (x, tile) in x.chunks(PIECE).zip(tile.chunks_mut(PIECE * TILE)) {
        let mut codes = [C::Elem::zeroed(); PIECE];
        for (code, &x) in codes.iter_mut().zip(x) {
            *code = C::encode(x, scale);
        }
        if C::DTYPE.step() == 2 {
            let places = tile.as_chunks_mut::<2>().0.iter_mut().skip(token).step_by(TILE);
            for (place, &pair) in places.zip(codes.as_chunks::<2>().0) {
                *place = pair;
            }
        } else {
            for (place, &code) in tile.iter_mut().skip(token).step_by(TILE).zip(&codes) {
                *place = code;
            }
        }
    }
}

/// Load K of one token.
#[inline(always)]
pub fn get_k<C: Codec>(tile: &[C::Elem], token: usize, scale: f32, out: &mut [f32]) {
    for (out, tile) in out.chunks_mut(PIECE).zip(tile.chunks(PIECE * TILE)) {
        let mut codes = [C::Elem::zeroed(); PIECE];
        if C::DTYPE.step() == 2 {
            let places = tile.as_chunks::<2>().0.iter().skip(token).step_by(TILE);
            for (pair, &place) in codes.as_chunks_mut::<2>().0.iter_mut().zip(places) {
                *pair = place;
            }
        } else {
            for (code, &place) in codes.iter_mut().zip(tile.iter().skip(token).step_by(TILE)) {
                *code = place;
            }
        }
        for (out, &code) in out.iter_mut().zip(&codes) {
            *out = C::decode(code, scale);
        }
    }
}

/// Store V of one token: `tile` is `[16 / STEP tokens][width][STEP]`.
#[inline(always)]
pub fn put_v<C: Codec>(x: &[f32], scale: f32, tile: &mut [C::Elem], width: usize, token: usize) {
    let step = C::DTYPE.step();
    let row = &mut tile[token / step * width * step..][..width * step];
    if step == 2 {
        let row = row.as_chunks_mut::<2>().0;
        if token.is_multiple_of(2) { put_half::<C, 0>(x, scale, row) } else { put_half::<C, 1>(x, scale, row) }
    } else {
        for (place, &x) in row.iter_mut().zip(x) {
            *place = C::encode(x, scale);
        }
    }
}

/// One token of a pair of tokens; the other one stays.
#[inline(always)]
fn put_half<C: Codec, const HALF: usize>(x: &[f32], scale: f32, row: &mut [[C::Elem; 2]]) {
    for (pair, &x) in row.iter_mut().zip(x) {
        let mut both = *pair;
        both[HALF] = C::encode(x, scale);
        *pair = both;
    }
}

/// Load V of one token.
#[inline(always)]
pub fn get_v<C: Codec>(tile: &[C::Elem], width: usize, token: usize, scale: f32, out: &mut [f32]) {
    let step = C::DTYPE.step();
    let row = &tile[token / step * width * step..][..width * step];
    for (out, place) in out.iter_mut().zip(row.chunks_exact(step)) {
        *out = C::decode(place[token % step], scale);
    }
}

/// Store K of one token as int4: `tile` is `[k_dim / 2][16 tokens]` bytes, `groups` `[group][scale, minimum][16 tokens]`.
#[inline(always)]
pub fn put_k_int4(x: &[f32], tile: &mut [u8], groups: &mut [u16], token: usize) {
    let tiles = tile.chunks_mut(K_GROUP / 2 * TILE);
    for ((x, tile), group) in x.chunks(K_GROUP).zip(tiles).zip(groups.chunks_exact_mut(2 * TILE)) {
        let (codes, fitted) = encode_group(x);
        (group[token], group[TILE + token]) = (fitted.scale, fitted.minimum);
        for (place, pair) in tile.iter_mut().skip(token).step_by(TILE).zip(codes.as_chunks::<2>().0) {
            *place = pair[0] | (pair[1] << 4);
        }
    }
}

/// Load K of one token from int4.
#[inline(always)]
pub fn get_k_int4(tile: &[u8], groups: &[u16], token: usize, out: &mut [f32]) {
    let tiles = tile.chunks(K_GROUP / 2 * TILE);
    for ((out, tile), group) in out.chunks_mut(K_GROUP).zip(tiles).zip(groups.chunks_exact(2 * TILE)) {
        let group = Group { scale: group[token], minimum: group[TILE + token] };
        for (out, &byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(tile.iter().skip(token).step_by(TILE)) {
            *out = [group.decode(byte & 0x0f), group.decode(byte >> 4)];
        }
    }
}

/// Store V of one token as int4: `tile` is `[8 pairs of tokens][width]` bytes, `groups` as for K.
#[inline(always)]
pub fn put_v_int4(x: &[f32], tile: &mut [u8], groups: &mut [u16], width: usize, token: usize) {
    let row = &mut tile[token / 2 * width..][..width];
    let (kept, shift) = if token.is_multiple_of(2) { (0xf0, 0) } else { (0x0f, 4) };
    for ((x, row), group) in x.chunks(V_GROUP).zip(row.chunks_mut(V_GROUP)).zip(groups.chunks_exact_mut(2 * TILE)) {
        let (codes, fitted) = encode_group(x);
        (group[token], group[TILE + token]) = (fitted.scale, fitted.minimum);
        for (place, &code) in row.iter_mut().zip(&codes[..x.len()]) {
            *place = (*place & kept) | (code << shift);
        }
    }
}

/// Load V of one token from int4.
#[inline(always)]
pub fn get_v_int4(tile: &[u8], groups: &[u16], width: usize, token: usize, out: &mut [f32]) {
    let row = &tile[token / 2 * width..][..width];
    let shift = token % 2 * 4;
    for ((out, row), group) in out.chunks_mut(V_GROUP).zip(row.chunks(V_GROUP)).zip(groups.chunks_exact(2 * TILE)) {
        let group = Group { scale: group[token], minimum: group[TILE + token] };
        for (out, byte) in out.iter_mut().zip(row) {
            *out = group.decode((byte >> shift) & 0x0f);
        }
    }
}

#[inline(always)]
fn encode_group(x: &[f32]) -> ([u8; MAX_GROUP], Group) {
    let group = Group::of(x);
    let mut codes = [0; MAX_GROUP];
    for (code, &x) in codes.iter_mut().zip(x) {
        *code = group.encode(x);
    }
    (codes, group)
}
