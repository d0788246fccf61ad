//! Products of 8- and 4-bit weights through tile registers.
//!
//! ```text
//! for each group of 32 outputs:  unpack the codes of all its steps, once
//!   for each tile of up to 16 rows: for each step (32 inputs):
//!     whole[row][output] = codes x row           a product of tiles, exact
//!     sums[row][output] += (scale * whole + minimum * sum of the row) * the row's scale    without the minimum if all are -128 scales
//! ```
//! The same operations on floats as without tile registers, and whole numbers between them: the same bits.
#![forbid(unsafe_code)]

use super::ahead::{Ahead, LINE};
use super::pack::GROUP;
use super::product::Task;
use super::quantized::{GROUP_INPUTS, Unpack, add_group};
use super::row_group::{RowGroup, SCALE, SUM};
use super::tiled::put;
use crate::simd::{Fours, LANES, Shaped, Simd, TILE_ROWS, Tiles, TwoTiles};

/// Rows from which on a product of tiles with what is around it takes less time than products of vectors.
pub(super) const TILED_FROM: usize = 24;

/// Fours of inputs in a step.
const FOURS: usize = GROUP_INPUTS / 4;

/// A step of 16 rows: their codes as a tile has them, and what [`RowGroup`] has beside them.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Left {
    codes: [[i32; FOURS]; TILE_ROWS],
    scales: [f32; TILE_ROWS],
    sums: [f32; TILE_ROWS],
}

/// A step's codes of a group's panels.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Right([[Fours; FOURS]; GROUP]);

/// So many of `x`; `None` where there is no memory for them.
fn filled<T: Copy>(x: T, len: usize) -> Option<Vec<T>> {
    let mut values = Vec::new();
    values.try_reserve_exact(len).ok()?;
    values.resize(len, x);
    Some(values)
}

/// The rows of a task, tile after tile, each `[steps]`; zeros behind the last row.
fn left(coefs: &[RowGroup], stride: usize, steps: usize) -> Option<Vec<Left>> {
    let none = Left { codes: [[0; FOURS]; TILE_ROWS], scales: [0.0; TILE_ROWS], sums: [0.0; TILE_ROWS] };
    let rows = coefs.len() / stride;
    let mut left = filled(none, rows.div_ceil(TILE_ROWS) * steps)?;
    for (row, coefs) in coefs.chunks_exact(stride).enumerate() {
        let (tile, m) = (row / TILE_ROWS, row % TILE_ROWS);
        for (left, coefs) in left[tile * steps..].iter_mut().zip(&coefs[..steps]) {
            left.codes[m].copy_from_slice(&coefs[..FOURS]);
            left.scales[m] = f32::from_bits(coefs[SCALE] as u32);
            left.sums[m] = f32::from_bits(coefs[SUM] as u32);
        }
    }
    Some(left)
}

/// Multiply a task's rows with its columns. Where there is no memory for that the task comes back: vectors need none.
#[inline(always)]
pub(super) fn run<'a, S: Simd, F: Unpack, const MINIMA: bool>(
    s: S,
    tiles: S::Tiles,
    mut task: Task<'a, F, RowGroup>,
) -> Option<Task<'a, F, RowGroup>> {
    let (rows, steps) = (task.out.len(), task.steps);
    let left = left(task.coefs, task.stride, steps);
    let codes = filled(Right([[[0; 4 * LANES]; FOURS]; GROUP]), steps);
    let (Some(left), Some(mut codes)) = (left, codes) else { return Some(task) };
    tiles.shaped(TILE_ROWS, FOURS, |tiles| {
        let mut sums = TwoTiles([[[0.0; LANES]; TILE_ROWS]; GROUP]);
        for group in 0..task.weights.len() / steps {
            let weights = &task.weights[group * steps..][..steps];
            for (raw, codes) in weights.iter().zip(&mut codes) {
                for panel in 0..GROUP {
                    F::unpack(s, &raw[panel], &mut codes.0[panel]);
                }
            }
            let mut ahead = Ahead::of(weights, left.len() / steps);
            for (tile, left) in left.chunks_exact(steps).enumerate() {
                for panel in 0..GROUP {
                    let ask = || ahead.step(s, size_of::<F::Raw>() / LINE);
                    sums.0[panel] = multiply::<S, F, MINIMA>(s, tiles, left, weights, &codes, panel, ask);
                }
                let first = tile * TILE_ROWS;
                put(s, &mut task, group, first, first..rows.min(first + TILE_ROWS), &sums);
            }
        }
    });
    None
}

/// The sums of a tile of rows with one panel.
#[inline(always)]
fn multiply<S: Simd, F: Unpack, const MINIMA: bool>(
    s: S,
    tiles: &impl Shaped,
    left: &[Left],
    weights: &[[F::Raw; GROUP]],
    codes: &[Right],
    panel: usize,
    mut ahead: impl FnMut(),
) -> [[f32; LANES]; TILE_ROWS] {
    let mut sums = [s.splat(0.0); TILE_ROWS];
    let mut whole = TwoTiles([[[0; LANES]; TILE_ROWS]; 2]);
    let steps = left.len();
    for step in (0..steps).step_by(2) {
        // Two steps at a time; behind an odd number the last again, for nothing.
        let both = [step, (step + 1).min(steps - 1)];
        let lefts = both.map(|step| left[step].codes.as_flattened());
        tiles.bytes(lefts, FOURS, both.map(|step| &codes[step].0[panel][..]), &mut whole);
        for (step, whole) in (step..steps).zip(&whole.0) {
            ahead();
            let (left, scales) = (&left[step], F::scales(s, &weights[step][panel]));
            for m in 0..TILE_ROWS {
                let products = s.to_f32(s.load_i32(&whole[m]));
                sums[m] = add_group::<S, MINIMA>(s, sums[m], products, scales, &left.scales[m], &left.sums[m]);
            }
        }
    }
    let mut out = [[0.0; LANES]; TILE_ROWS];
    for m in 0..TILE_ROWS {
        s.store(sums[m], &mut out[m]);
    }
    out
}
