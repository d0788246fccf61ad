//! Tiles put together token by token, for paths through a tree of drafts.
//!
//! ```text
//! for each token of the tile, by position: copy it from the tile and the lane of its slot
//! ```
//! The copy has the stored values themselves (or what they expand to), so products with it have the bits that they would
//! have if the path had been written in order.
#![forbid(unsafe_code)]

use super::chunk::Context;
use super::tree::Path;
use crate::simd::{Format, Simd};
use crate::storage::TILE;

/// One tile of K and V, and the scales of its tokens where the cache has them.
pub struct Gathered<F: Format> {
    pub k: Vec<F::Raw>,
    pub v: Vec<F::Raw>,
    pub scales: Option<[[f32; TILE]; 2]>,
}

/// Whether a path leaves the order of the slots in the tile that begins at `position`.
pub fn leaves(path: &Path, position: usize) -> bool {
    (position..position + TILE).any(|p| path.slot(p) != p)
}

/// The tile of the tokens `position..position + 16` of a path. What lies behind the path's end may be anything.
pub fn gather<S: Simd, F: Format>(s: S, context: &Context<'_>, path: &Path, position: usize) -> Gathered<F> {
    let (k_steps, v_steps) = context.steps::<F>();
    let zeros = |n: usize| vec![bytemuck::Zeroable::zeroed(); n];
    let mut to = Gathered::<F> { k: zeros(k_steps), v: zeros(v_steps), scales: None };
    let mut from = Gathered::<F> { k: zeros(k_steps), v: zeros(v_steps), scales: None };
    let mut copied = None;
    for lane in 0..TILE.min(path.end().saturating_sub(position)) {
        let slot = path.slot(position + lane);
        if copied.replace(slot / TILE) != Some(slot / TILE) {
            context.copy_tile(s, slot / TILE, &mut from);
        }
        copy_k::<F>(&from.k, slot % TILE, &mut to.k, lane);
        copy_v::<F>(&from.v, slot % TILE, &mut to.v, lane);
        if let Some(scales) = from.scales {
            let to = to.scales.get_or_insert([[1.0; TILE]; 2]);
            for (to, scales) in to.iter_mut().zip(scales) {
                to[lane] = scales[slot % TILE];
            }
        }
    }
    to
}

/// Bytes of one value.
const fn size<F: Format>() -> usize {
    size_of::<F::Raw>() / TILE / F::STEP
}

/// One token of a K tile: `[steps][16 tokens][STEP]`.
fn copy_k<F: Format>(from: &[F::Raw], from_lane: usize, to: &mut [F::Raw], to_lane: usize) {
    let bytes = F::STEP * size::<F>();
    for (from, to) in from.iter().zip(to) {
        let token = &bytemuck::bytes_of(from)[from_lane * bytes..][..bytes];
        bytemuck::bytes_of_mut(to)[to_lane * bytes..][..bytes].copy_from_slice(token);
    }
}

/// One token of a V tile: `[16 / STEP][vectors][16 dimensions][STEP]`.
fn copy_v<F: Format>(from: &[F::Raw], from_lane: usize, to: &mut [F::Raw], to_lane: usize) {
    let (size, vectors) = (size::<F>(), from.len() / (TILE / F::STEP));
    let row = |lane: usize| lane / F::STEP * vectors..(lane / F::STEP + 1) * vectors;
    for (from, to) in from[row(from_lane)].iter().zip(&mut to[row(to_lane)]) {
        let (from, to) = (bytemuck::bytes_of(from), bytemuck::bytes_of_mut(to));
        for dim in 0..TILE {
            let place = |lane: usize| (dim * F::STEP + lane % F::STEP) * size;
            to[place(to_lane)..][..size].copy_from_slice(&from[place(from_lane)..][..size]);
        }
    }
}
