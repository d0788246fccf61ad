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
use super::product::{Task, Weights};
use super::quantized::{GROUP_INPUTS, Unpack, add_group};
use super::row_group::{RowGroup, SCALE, SUM, round_row};
use super::tiled::put;
use crate::simd::{Fours, LANES, Shaped, Simd, TILE_ROWS, Tiles, TwoTiles, Work};

/// Rows from which on a product of tiles with what is around it takes less time than products of vectors.
pub(super) const TILED_FROM: usize = 96;

/// Steps of a row up to which it does: codes, weights and rows of more are too much for the second-level cache.
pub(super) const TILED_STEPS: usize = 8192 / GROUP_INPUTS;

/// Fours of inputs in a step.
const FOURS: usize = GROUP_INPUTS / 4;

/// A step of 16 rows: their codes as a tile has them, then what [`RowGroup`] has beside them, the scales and the sums.
pub(super) type RowsStep = [i32; (FOURS + 2) * TILE_ROWS];
const SCALES: usize = FOURS * TILE_ROWS;
const SUMS: usize = SCALES + TILE_ROWS;

/// A step's codes of a group's panels.
type Codes = [[Fours; FOURS]; GROUP];
/// Values that they take up.
pub(super) const ROOM: usize = size_of::<Codes>() / size_of::<f32>();

/// Up to 16 rows; zeros behind the last.
#[inline(always)]
pub(super) fn round_rows<S: Simd, const MINIMA: bool>(s: S, x: &[f32], inputs: usize, out: &mut [RowsStep]) {
    let mut groups: Vec<RowGroup> = vec![bytemuck::Zeroable::zeroed(); out.len()];
    for m in 0..TILE_ROWS {
        match x.get(m * inputs..(m + 1) * inputs) {
            Some(x) => round_row::<S, MINIMA>(s, x, &mut groups),
            None => groups.fill(bytemuck::Zeroable::zeroed()),
        }
        for (group, out) in groups.iter().zip(&mut *out) {
            out[m * FOURS..][..FOURS].copy_from_slice(&group[..FOURS]);
            (out[SCALES + m], out[SUMS + m]) = (group[SCALE], group[SUM]);
        }
    }
}

/// Multiply a task's rows with its columns; `room`: [`ROOM`] values for each step.
#[inline(always)]
pub(super) fn run<S: Simd, F: Unpack + Weights<TileCoef = RowsStep>, const MINIMA: bool>(
    s: S,
    tiles: S::Tiles,
    task: Task<'_, F, RowsStep>,
    room: &mut [f32],
) {
    let codes = bytemuck::cast_slice_mut(room);
    // What is lent to others is compiled for the level only if it goes through `run`.
    tiles.shaped(TILE_ROWS, FOURS, |shape| s.run(Groups::<S, F, MINIMA> { shape, task, codes }));
}

struct Groups<'t, 'a, S: Simd, F: Unpack + Weights<TileCoef = RowsStep>, const MINIMA: bool> {
    shape: &'t <S::Tiles as Tiles>::Shaped,
    task: Task<'a, F, RowsStep>,
    /// Of each step.
    codes: &'t mut [Codes],
}

impl<S: Simd, F: Unpack + Weights<TileCoef = RowsStep>, const MINIMA: bool> Work<S> for Groups<'_, '_, S, F, MINIMA> {
    type Output = ();

    #[inline(always)]
    fn run(self, s: S) {
        let Self { shape, mut task, codes } = self;
        let (rows, steps, left) = (task.out.len(), task.steps, task.coefs);
        let mut sums = TwoTiles([[[0.0; LANES]; TILE_ROWS]; GROUP]);
        let mut whole = TwoTiles([[[0; LANES]; TILE_ROWS]; 2]);
        for group in 0..task.weights.len() / steps {
            let weights = &task.weights[group * steps..][..steps];
            for (raw, codes) in weights.iter().zip(&mut *codes) {
                for panel in 0..GROUP {
                    F::unpack(s, &raw[panel], &mut codes[panel]);
                }
            }
            let mut ahead = Ahead::of(weights, rows.div_ceil(TILE_ROWS));
            for (tile, left) in left.chunks_exact(task.stride).enumerate() {
                for panel in 0..GROUP {
                    let (left, whole) = (&left[..steps], &mut whole);
                    sums.0[panel] = multiply::<S, F, MINIMA>(s, shape, left, weights, codes, panel, whole, &mut ahead);
                }
                let first = tile * TILE_ROWS;
                put(s, &mut task, group, first, first..rows.min(first + TILE_ROWS), &sums);
            }
        }
    }
}

/// The sums of a tile of rows with one panel.
#[inline(always)]
#[allow(clippy::too_many_arguments)] // A register tile is its arguments; a struct would only rename them.
fn multiply<S: Simd, F: Unpack, const MINIMA: bool>(
    s: S,
    tiles: &impl Shaped,
    left: &[RowsStep],
    weights: &[[F::Raw; GROUP]],
    codes: &[Codes],
    panel: usize,
    whole: &mut TwoTiles<i32>,
    ahead: &mut Ahead,
) -> [[f32; LANES]; TILE_ROWS] {
    let mut sums = [s.splat(0.0); TILE_ROWS];
    let steps = left.len();
    for step in (0..steps).step_by(2) {
        // Two steps at a time; behind an odd number the last again, for nothing.
        let both = [step, (step + 1).min(steps - 1)];
        let lefts = both.map(|step| &left[step][..SCALES]);
        tiles.bytes(lefts, FOURS, both.map(|step| &codes[step][panel][..]), whole);
        for (step, whole) in (step..steps).zip(&whole.0) {
            ahead.step(s, size_of::<F::Raw>() / LINE);
            let rows: &[[f32; TILE_ROWS]; 2] =
                bytemuck::cast_ref(left[step][SCALES..].first_chunk::<{ 2 * TILE_ROWS }>().expect("two"));
            let scales = F::scales(s, &weights[step][panel]);
            for m in 0..TILE_ROWS {
                let products = s.to_f32(s.load_i32(&whole[m]));
                sums[m] = add_group::<S, MINIMA>(s, sums[m], products, scales, &rows[0][m], &rows[1][m]);
            }
        }
    }
    let mut out = [[0.0; LANES]; TILE_ROWS];
    for m in 0..TILE_ROWS {
        s.store(sums[m], &mut out[m]);
    }
    out
}
