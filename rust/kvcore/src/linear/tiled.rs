//! Products of bf16 weights through tile registers.
//!
//! ```text
//! for each group of 32 outputs: for each two tiles of up to 16 rows:
//!   for each 16 steps:  sums[tile][panel] += rows[tile] x weights[panel]         four products of tiles
//! ```
//! A panel's steps are rows of a tile as they lie. A tile sums 32 inputs on its own before it adds them, so its bits differ from
//! those of other levels; and one row goes through tiles as well, so that they depend on the row alone.
#![forbid(unsafe_code)]

use super::ahead::{Ahead, LINE};
use super::pack::{GROUP, GROUP_OUTPUTS};
use super::product::{Task, Weights, finish};
use crate::simd::{LANES, Left, Pairs, Shaped, Simd, Sums, TILE_ROWS, TILE_WORDS, Tiles, TwoTiles, Work};

/// How many rows' tiles there are, and the rows of each: as equal as can be. The last begins where it ends with the rows, so
/// that some may be in two.
pub(super) fn tiles_of(rows: usize) -> (usize, usize) {
    let tiles = rows.div_ceil(TILE_ROWS);
    (tiles, rows.div_ceil(tiles))
}

/// Round a row to pairs of bf16; zeros behind its end.
#[inline(always)]
pub(super) fn round_row<S: Simd>(s: S, x: &[f32], out: &mut [u32]) {
    let (whole, rest) = x.as_chunks::<LANES>();
    let (pairs, behind) = out.split_at_mut(whole.len() * (LANES / 2));
    for (x, out) in whole.iter().zip(pairs.as_chunks_mut::<{ LANES / 2 }>().0) {
        s.store_bf16(s.round_bf16(s.load(x)), bytemuck::cast_mut(out));
    }
    behind.fill(0);
    if !rest.is_empty() {
        let (mut lanes, mut last) = ([0.0; LANES], [0u32; LANES / 2]);
        lanes[..rest.len()].copy_from_slice(rest);
        s.store_bf16(s.round_bf16(s.load(&lanes)), bytemuck::cast_mut(&mut last));
        let n = rest.len().div_ceil(2);
        behind[..n].copy_from_slice(&last[..n]);
    }
}

/// Multiply a task's rows with its columns.
#[inline(always)]
pub(super) fn run<S: Simd, F: Weights>(s: S, tiles: S::Tiles, task: Task<'_, F, u32>) {
    let (_, rows) = tiles_of(task.out.len());
    // What is lent to others is compiled for the level only if it goes through `run`.
    tiles.shaped(rows, TILE_WORDS, |shape| s.run(Groups { shape, task }));
}

struct Groups<'t, 'a, S: Simd, F: Weights> {
    shape: &'t <S::Tiles as Tiles>::Shaped,
    task: Task<'a, F, u32>,
}

impl<S: Simd, F: Weights> Work<S> for Groups<'_, '_, S, F> {
    type Output = ();

    #[inline(always)]
    fn run(self, s: S) {
        let Self { shape, mut task } = self;
        let (count, rows) = tiles_of(task.out.len());
        let whole = task.steps / TILE_WORDS * TILE_WORDS;
        let from = task.out.len() - rows;
        let first = |tile: usize| (tile * rows).min(from);
        let mut last = [[0; 2 * LANES]; GROUP * TILE_WORDS];
        let mut sums = [TwoTiles([[[0.0; LANES]; TILE_ROWS]; GROUP]); 2];
        for group in 0..task.weights.len() / task.steps {
            let weights: &[Pairs] = bytemuck::cast_slice(&task.weights[group * task.steps..][..task.steps]);
            let (weights, rest) = weights.split_at(GROUP * whole);
            last[..rest.len()].copy_from_slice(rest);
            let last = if rest.is_empty() { None } else { Some(&last[..]) };
            let mut ahead = Ahead::of(weights, count.div_ceil(2));
            let mut done = 0;
            for tile in (0..count).step_by(2) {
                if tile + 1 < count {
                    let firsts = [first(tile), first(tile + 1)];
                    multiply(s, shape, &task, firsts, weights, last, &mut sums, &mut ahead);
                } else {
                    let one = sums.first_chunk_mut::<1>().expect("a tile");
                    multiply(s, shape, &task, [first(tile)], weights, last, one, &mut ahead);
                }
                for (sums, tile) in sums.iter().zip(tile..count) {
                    put(s, &mut task, group, first(tile), done..first(tile) + rows, sums);
                    done = first(tile) + rows;
                }
            }
        }
    }
}

/// The sums of `R` tiles that begin at these rows.
#[inline(always)]
#[allow(clippy::too_many_arguments)] // A register tile is its arguments; a struct would only rename them.
fn multiply<S: Simd, F: Weights, const R: usize>(
    s: S,
    tiles: &impl Shaped,
    task: &Task<'_, F, u32>,
    firsts: [usize; R],
    weights: &[Pairs],
    last: Option<&[Pairs]>,
    sums: &mut [TwoTiles<f32>; R],
    ahead: &mut Ahead,
) {
    let left = Left { tiles: firsts.map(|first| &task.coefs[first * task.stride..]), stride: task.stride };
    let steps = weights.len() / (GROUP * TILE_WORDS);
    if steps > 0 {
        let right = |panel: usize, step: usize| {
            if panel == 0 {
                ahead.step(s, GROUP * TILE_WORDS * size_of::<Pairs>() / LINE);
            }
            &weights[step * GROUP * TILE_WORDS + panel..]
        };
        tiles.bf16(left, steps, GROUP, right, GROUP, true, Sums::of(sums), || ());
    }
    if let Some(last) = last {
        let left = Left { tiles: left.tiles.map(|left| &left[steps * TILE_WORDS..]), ..left };
        tiles.bf16(left, 1, GROUP, |panel, _| &last[panel..], GROUP, steps == 0, Sums::of(sums), || ());
    }
}

/// Write the sums of the rows `range` of a tile that begins at `first`.
#[inline(always)]
pub(super) fn put<S: Simd, F: Weights, C>(
    s: S,
    task: &mut Task<'_, F, C>,
    group: usize,
    first: usize,
    range: std::ops::Range<usize>,
    sums: &TwoTiles<f32>,
) {
    let column = group * GROUP_OUTPUTS;
    let rows = task.out[range.clone()].iter_mut().zip(range.start - first..);
    if task.add || task.bias.is_some() {
        for (out, m) in rows {
            for (panel, sums) in sums.0.iter().enumerate() {
                finish(s, s.load(&sums[m]), task.bias, column + panel * LANES, task.add, out);
            }
        }
    } else {
        for (out, m) in rows {
            if let Some(out) = out[column..].first_chunk_mut::<GROUP_OUTPUTS>() {
                let [low, high]: &mut [[f32; LANES]; GROUP] = bytemuck::cast_mut(out);
                s.store(s.load(&sums.0[0][m]), low);
                s.store(s.load(&sums.0[1][m]), high);
            } else {
                let n = out.len() - column;
                let lanes = [sums.0[0][m], sums.0[1][m]];
                out[column..].copy_from_slice(&lanes.as_flattened()[..n]);
            }
        }
    }
}
