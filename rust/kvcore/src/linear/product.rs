//! Products of packed weights with 1..N rows.
//!
//! ```text
//! for each group of 32 outputs: for each slice of its steps: for each tile of up to 12 rows (6 of bytes):
//!   sums[m][g] += coefs[row + m][i] * weights[i][g]    for i in the slice, in order
//! ```
//! Sums that wait for the next slice of inputs are stored and loaded again exactly, so slicing changes no bit.
//! Measured on two AVX-512 cores: tiles of 12 rows x 32 outputs reach 0.9 of the product peak, and a single stream
//! through weights on huge pages all of the read bandwidth, as two rows or one take no longer than the loads. While a slice
//! is multiplied with several rows, the one behind it is asked for.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::ahead::{Ahead, LINE, next_page};
use super::pack::{GROUP, GROUP_OUTPUTS};
use super::{tiled, tiled_row};
use crate::Result;
use crate::simd::{Dot, Format, LANES, Pairs, Simd, TILE_ROWS, TILE_WORDS, Work};
use crate::threads::{ShouldStop, Threads};

/// Bytes of a slice of a group that all row tiles pass over: it stays in the L2 cache.
const SLICE: usize = 256 << 10;
/// Rows up to which reading the weights takes longer than their products.
const FEW: usize = 4;
/// Bytes of the next layer that waiting threads ask for at most: what the L2 cache holds.
const EXPECTED: usize = 1 << 20;
/// Multiply-adds that are worth handing to another thread.
const TASK: usize = 1 << 18;
/// Rows of a task: their factors stay in the L2 or L3 cache while the weights stream past.
const TASK_ROWS: usize = 256;
/// Bytes of a task's factors for tile registers, which pass over them once for each group: what the L2 cache holds.
const TILED_BYTES: usize = 1 << 20;
/// Tasks per thread: enough that a thread that was held up does not hold up the others.
const TASKS_PER_THREAD: usize = 4;

/// What a product needs of packed weights.
pub(super) trait Weights: Copy + Send + Sync + 'static {
    /// One step of a panel: `STEP` inputs of 16 outputs.
    type Raw: bytemuck::Pod + Send + Sync;
    /// One step of a row, as it is multiplied.
    type Coef<S: Simd>: bytemuck::Pod + Send + Sync;
    /// Inputs of a step.
    const STEP: usize;
    /// Rows of the largest tile, where a level has many registers: with 12 its sums, a step's weights and a factor fill 32.
    const MOST_ROWS: usize = 12;

    /// One step of [`Self::TOGETHER`] rows, as tile registers multiply them.
    type TileCoef: bytemuck::Pod + Send + Sync;
    /// Rows whose steps lie side by side for these.
    const TOGETHER: usize;
    /// Steps that they take at once.
    const TILE_STEPS: usize;
    /// Rows from which on they multiply.
    const TILED_FROM: usize;
    /// Steps of a row up to which they do.
    const TILED_STEPS: usize;
    /// Values of memory that a task for them needs for each step.
    const ROOM: usize;

    /// A row's steps, the last filled up with zeros.
    fn coefs<S: Simd>(s: S, x: &[f32], out: &mut [Self::Coef<S>]);
    /// Add one step's products with `M` rows to their sums.
    fn add<S: Simd, const M: usize>(
        s: S,
        sums: &mut [[S::F32; GROUP]; M],
        weights: &[Self::Raw; GROUP],
        coefs: [&Self::Coef<S>; M],
    );

    /// The steps of up to [`Self::TOGETHER`] rows for tile registers; what is missing of rows and of the last step is zeros.
    fn tile_coefs<S: Simd>(s: S, x: &[f32], inputs: usize, out: &mut [Self::TileCoef]);
    /// A task by tile registers. Behind a row's steps are zeros up to a multiple of [`Self::TILE_STEPS`]. `room`: as much as
    /// [`Self::ROOM`] says, whatever it holds.
    fn run_tiled<S: Simd>(s: S, tiles: S::Tiles, task: Task<'_, Self, Self::TileCoef>, room: &mut [f32]);
}

impl<F: Dot<Raw: Send + Sync>> Weights for F {
    type Raw = <F as Format>::Raw;
    type Coef<S: Simd> = <F as Format>::Coef<S>;
    const STEP: usize = <F as Format>::STEP;
    type TileCoef = u32;
    const TOGETHER: usize = 1;
    const TILED_STEPS: usize = usize::MAX;
    const ROOM: usize = 0;
    const TILE_STEPS: usize = TILE_WORDS;
    // Pairs of bf16 alone; with one row as with many, since the bits of their sums are their own.
    const TILED_FROM: usize = if Self::STEP == 2 && size_of::<F::Raw>() == size_of::<Pairs>() { 1 } else { usize::MAX };

    #[inline(always)]
    fn coefs<S: Simd>(s: S, x: &[f32], out: &mut [Self::Coef<S>]) {
        <F as Format>::coefs(s, x, out);
    }

    #[inline(always)]
    fn add<S: Simd, const M: usize>(
        s: S,
        sums: &mut [[S::F32; GROUP]; M],
        weights: &[Self::Raw; GROUP],
        coefs: [&Self::Coef<S>; M],
    ) {
        let loaded: [F::Loaded<S>; GROUP] = std::array::from_fn(|g| F::load(s, &weights[g]));
        for m in 0..M {
            for g in 0..GROUP {
                sums[m][g] = F::dot(s, sums[m][g], loaded[g], coefs[m]);
            }
        }
    }

    #[inline(always)]
    fn tile_coefs<S: Simd>(s: S, x: &[f32], _: usize, out: &mut [u32]) {
        tiled::round_row(s, x, out);
    }
    #[inline(always)]
    fn run_tiled<S: Simd>(s: S, tiles: S::Tiles, task: Task<'_, Self, u32>, _: &mut [f32]) {
        if task.out.len() == 1 {
            tiled_row::run::<S, F>(s, tiles, task);
        } else {
            tiled::run(s, tiles, task);
        }
    }
}

/// Packed weights `[groups][steps]` and what belongs to them.
pub(super) struct Layer<'a, F: Weights> {
    pub(super) weights: &'a [[F::Raw; GROUP]],
    pub(super) bias: Option<&'a [f32]>,
    pub(super) steps: usize,
    /// From one row of factors to the next.
    pub(super) stride: usize,
    pub(super) outputs: usize,
    /// Addresses of the weights that will probably be needed next.
    pub(super) behind: Range<usize>,
}

impl<F: Weights> Layer<'_, F> {
    /// `out = coefs @ W.T + b` or `out +=` it, by tasks of up to `task_rows` rows; `coefs`: `[rows / together, stride]`, for so many
    /// rows each.
    #[allow(clippy::too_many_arguments)] // What a caller gave, and how it is multiplied.
    fn forward<C: bytemuck::Pod + Send + Sync>(
        &self,
        threads: &Threads,
        (coefs, together): (&[C], usize),
        out: &mut [f32],
        add: bool,
        task_rows: usize,
        should_stop: ShouldStop<'_>,
        run: impl Fn(Task<'_, F, C>) + Sync,
    ) -> Result<()> {
        let (rows, units) = (out.len() / self.outputs, coefs.len() / self.stride);
        if rows <= FEW {
            let Range { start, end } = self.behind;
            threads.expect(start.max(end.saturating_sub(EXPECTED))..end);
        }
        let blocks = units.div_ceil(task_rows / together);
        let groups = self.weights.len() / self.steps;
        let work = rows.saturating_mul(self.weights.len()).saturating_mul(F::STEP * GROUP_OUTPUTS);
        let tasks = work.div_ceil(TASK).clamp(1, TASKS_PER_THREAD * threads.num_threads());
        // Ranges of one size (the last may be smaller), so that threads end together.
        let width = groups.div_ceil(tasks.div_ceil(blocks));
        let ranges = groups.div_ceil(width);

        // [row block][column range], each a task with a slice of every row of its block.
        let mut items = Vec::with_capacity(blocks * ranges);
        for block in 0..blocks {
            let (start, end) = (units * block / blocks, units * (block + 1) / blocks);
            for range in 0..ranges {
                let (first, last) = (width * range, (width * (range + 1)).min(groups));
                let columns = first * GROUP_OUTPUTS..(last * GROUP_OUTPUTS).min(self.outputs);
                items.push(Task::<F, C> {
                    weights: &self.weights[first * self.steps..last * self.steps],
                    bias: self.bias.map(|bias| &bias[columns]),
                    steps: self.steps,
                    stride: self.stride,
                    coefs: &coefs[start * self.stride..end * self.stride],
                    out: Vec::with_capacity((end - start) * together),
                    add,
                });
            }
        }
        for (row, out) in out.chunks_exact_mut(self.outputs).enumerate() {
            // The block with units * block / blocks <= unit < units * (block + 1) / blocks.
            let block = ((row / together + 1) * blocks - 1) / units;
            let mut rest = out;
            for range in 0..ranges {
                let (columns, behind) = rest.split_at_mut((width * GROUP_OUTPUTS).min(rest.len()));
                items[block * ranges + range].out.push(columns);
                rest = behind;
            }
        }
        threads.for_each(items, should_stop, run)
    }
}

/// `out = x @ W.T + b`, or with `add` `out +=` it.
pub(super) struct Forward<'a, F: Weights> {
    pub(super) layer: Layer<'a, F>,
    pub(super) threads: &'a Threads,
    /// `[rows, inputs]`
    pub(super) x: &'a [f32],
    pub(super) inputs: usize,
    /// `[rows, outputs]`
    pub(super) out: &'a mut [f32],
    pub(super) add: bool,
    pub(super) should_stop: ShouldStop<'a>,
}

impl<S: Simd, F: Weights> Work<S> for Forward<'_, F> {
    type Output = Result<()>;

    #[inline(always)]
    fn run(self, s: S) -> Result<()> {
        let rows = self.x.len() / self.inputs;
        if let Some(tiles) = s.tiles().filter(|_| rows >= F::TILED_FROM && self.layer.steps <= F::TILED_STEPS) {
            return self.tiled(s, tiles, rows);
        }
        let Self { layer, threads, x, inputs, out, add, should_stop } = self;
        let run = |task: Task<'_, F, F::Coef<S>>| s.run(task);
        if F::STEP == 1 && layer.stride == inputs {
            return layer.forward(threads, (bytemuck::cast_slice(x), 1), out, add, TASK_ROWS, should_stop, run);
        }
        let len = rows * layer.stride;
        let mut scratch = threads.scratch(len * (size_of::<F::Coef<S>>() / size_of::<f32>()))?;
        let coefs = bytemuck::cast_slice_mut(&mut scratch);
        round::<S, F, ForVectors>(s, threads, x, inputs, layer.stride, coefs, should_stop)?;
        layer.forward(threads, (coefs, 1), out, add, TASK_ROWS, should_stop, run)
    }
}

impl<F: Weights> Forward<'_, F> {
    /// By tile registers.
    #[inline(always)]
    fn tiled<S: Simd>(self, s: S, tiles: S::Tiles, rows: usize) -> Result<()> {
        let Self { layer, threads, x, inputs, out, add, should_stop } = self;
        let layer = Layer { stride: stride(rows, layer.steps.next_multiple_of(F::TILE_STEPS)), ..layer };
        let row_bytes = layer.stride * size_of::<F::TileCoef>();
        let (len, each) = (rows.div_ceil(F::TOGETHER) * row_bytes / size_of::<f32>(), layer.steps * F::ROOM);
        let mut scratch = threads.scratch(len + each * threads.num_threads() + LINE / size_of::<f32>())?;
        // A tile's rows begin at cache lines.
        let before = scratch.as_ptr().addr().next_multiple_of(LINE) - scratch.as_ptr().addr();
        let (coefs, mut rooms) = scratch[before / size_of::<f32>()..].split_at_mut(len);
        let coefs = bytemuck::cast_slice_mut(coefs);
        round::<S, F, ForTiles>(s, threads, x, inputs, layer.stride, coefs, should_stop)?;
        let room = |_| rooms.split_off_mut(..each).expect("room for each thread");
        let rooms: Mutex<Vec<_>> = Mutex::new((0..threads.num_threads()).map(room).collect());
        let task_rows = (TILED_BYTES * F::TOGETHER / row_bytes).next_multiple_of(TILE_ROWS).clamp(TILE_ROWS, TASK_ROWS);
        let run = |task: Task<'_, F, F::TileCoef>| {
            let free = || rooms.lock().unwrap_or_else(PoisonError::into_inner);
            let room = free().pop().expect("as many as threads");
            s.run(Tiled { tiles, task, room: &mut *room });
            free().push(room);
        };
        layer.forward(threads, (coefs, F::TOGETHER), out, add, task_rows, should_stop, run)
    }
}

struct Tiled<'a, S: Simd, F: Weights> {
    tiles: S::Tiles,
    task: Task<'a, F, F::TileCoef>,
    room: &'a mut [f32],
}

impl<S: Simd, F: Weights> Work<S> for Tiled<'_, S, F> {
    type Output = ();

    #[inline(always)]
    fn run(self, s: S) {
        F::run_tiled(s, self.tiles, self.task, self.room);
    }
}

/// Some columns of some rows.
pub(super) struct Task<'a, F: Weights, C> {
    pub(super) weights: &'a [[F::Raw; GROUP]],
    pub(super) bias: Option<&'a [f32]>,
    pub(super) steps: usize,
    pub(super) stride: usize,
    pub(super) coefs: &'a [C],
    pub(super) out: Vec<&'a mut [f32]>,
    pub(super) add: bool,
}

impl<S: Simd, F: Weights> Work<S> for Task<'_, F, F::Coef<S>> {
    type Output = ();

    #[inline(always)]
    fn run(mut self, s: S) {
        let rows = self.out.len();
        let tiles = rows.div_ceil(max_rows::<S, F>());
        let slice = (SLICE / size_of::<[F::Raw; GROUP]>()).min(self.steps);
        let mut waiting = vec![[[0.0; LANES]; GROUP]; if slice < self.steps { rows } else { 0 }];
        for group in 0..self.weights.len() / self.steps {
            for start in (0..self.steps).step_by(slice) {
                let end = (start + slice).min(self.steps);
                let mut ahead = Ahead::of(&self.weights[group * self.steps..][start..end], tiles);
                for t in 0..tiles {
                    let (row, next) = (rows * t / tiles, rows * (t + 1) / tiles);
                    let ahead = &mut ahead;
                    let tile = Tile { task: &mut self, waiting: &mut waiting, group, row, start, end, ahead };
                    tile.run(s, next - row);
                }
            }
        }
    }
}

/// Rows of the largest tile.
const fn max_rows<S: Simd, F: Weights>() -> usize {
    if S::ACCUMULATORS >= 16 { F::MOST_ROWS } else { 2 }
}

/// One register tile: rows from `row` on, 32 outputs, steps from `start` to `end`.
struct Tile<'t, 'a, S: Simd, F: Weights> {
    task: &'t mut Task<'a, F, F::Coef<S>>,
    waiting: &'t mut [[[f32; LANES]; GROUP]],
    group: usize,
    row: usize,
    start: usize,
    end: usize,
    ahead: &'t mut Ahead,
}

impl<S: Simd, F: Weights> Tile<'_, '_, S, F> {
    #[inline(always)]
    fn run(self, s: S, rows: usize) {
        macro_rules! by_rows {
            ($($m:literal)*) => {
                match rows {
                    $($m => s.run(TileOf::<S, F, $m>(self)),)*
                    _ => unreachable!("a tile of {rows} rows"),
                }
            };
        }
        match max_rows::<S, F>() {
            6 => by_rows!(1 2 3 4 5 6),
            12 => by_rows!(1 2 3 4 5 6 7 8 9 10 11 12),
            _ => by_rows!(1 2),
        }
    }
}

/// A tile with its number of rows known when it is compiled: a function of its own, with its sums in registers.
struct TileOf<'t, 'a, S: Simd, F: Weights, const M: usize>(Tile<'t, 'a, S, F>);

impl<S: Simd, F: Weights, const M: usize> Work<S> for TileOf<'_, '_, S, F, M> {
    type Output = ();

    #[inline(always)]
    fn run(self, s: S) {
        let Tile { task, waiting, group, row, start, end, ahead } = self.0;
        let steps = task.steps;
        let weights = &task.weights[group * steps..][start..end];
        let coefs: [&[F::Coef<S>]; M] = std::array::from_fn(|m| &task.coefs[(row + m) * task.stride..][start..end]);

        let mut sums = [[s.splat(0.0); GROUP]; M];
        if start > 0 {
            for m in 0..M {
                for g in 0..GROUP {
                    sums[m][g] = s.load(&waiting[row + m][g]);
                }
            }
        }
        let sums = accumulate::<S, F, M>(s, sums, weights, coefs, ahead);
        for m in 0..M {
            for g in 0..GROUP {
                if end < steps {
                    s.store(sums[m][g], &mut waiting[row + m][g]);
                } else {
                    finish(s, sums[m][g], task.bias, group * GROUP_OUTPUTS + g * LANES, task.add, task.out[row + m]);
                }
            }
        }
    }
}

#[inline(always)]
fn accumulate<S: Simd, F: Weights, const M: usize>(
    s: S,
    mut sums: [[S::F32; GROUP]; M],
    weights: &[[F::Raw; GROUP]],
    coefs: [&[F::Coef<S>]; M],
    ahead: &mut Ahead,
) -> [[S::F32; GROUP]; M] {
    let coefs = coefs.map(|c| &c[..weights.len()]);
    for (i, weights) in weights.iter().enumerate() {
        if M > 1 {
            ahead.step(s, size_of_val(weights) / LINE);
        } else {
            next_page(s, weights);
        }
        F::add(s, &mut sums, weights, std::array::from_fn(|m| &coefs[m][i]));
    }
    sums
}

/// Write (or add) up to 16 sums from `column` on: what lies behind the row's end is padding.
#[inline(always)]
pub(super) fn finish<S: Simd>(s: S, sum: S::F32, bias: Option<&[f32]>, column: usize, add: bool, out: &mut [f32]) {
    let Some(out) = out.get_mut(column..) else { return };
    let bias = bias.map(|bias| &bias[column..]);
    if let Some(out) = out.first_chunk_mut::<LANES>() {
        let mut sum = sum;
        if let Some(bias) = bias.and_then(|bias| bias.first_chunk()) {
            sum = s.add(sum, s.load(bias));
        }
        if add {
            sum = s.add(s.load(out), sum);
        }
        s.store(sum, out);
    } else {
        let mut lanes = [0.0; LANES];
        s.store(sum, &mut lanes);
        for (i, out) in out.iter_mut().enumerate() {
            let sum = bias.map_or(lanes[i], |bias| lanes[i] + bias[i]);
            *out = if add { *out + sum } else { sum };
        }
    }
}

/// From one row of factors to the next. A tile reads up to 12 rows side by side, and rows a power of two apart would
/// push each other out of the one set of the L1 cache that they share.
pub(super) fn stride(rows: usize, steps: usize) -> usize {
    /// Factors of a cache line, and of half a page: what is that far apart falls into one or two sets.
    const LINE: usize = 16;
    const HALF_PAGE: usize = 512;
    if rows > 2 && steps.is_multiple_of(HALF_PAGE) { steps + LINE } else { steps }
}

/// How rows are rounded: for what is to multiply them.
trait RowsFor<S: Simd, F: Weights>: Send + Sync {
    type Coef: bytemuck::Pod + Send + Sync;
    /// Rows that are rounded together.
    const TOGETHER: usize;
    fn rows(s: S, x: &[f32], inputs: usize, coefs: &mut [Self::Coef]);
}

struct ForVectors;

impl<S: Simd, F: Weights> RowsFor<S, F> for ForVectors {
    type Coef = F::Coef<S>;
    const TOGETHER: usize = 1;
    #[inline(always)]
    fn rows(s: S, x: &[f32], _: usize, coefs: &mut [F::Coef<S>]) {
        F::coefs(s, x, coefs);
    }
}

struct ForTiles;

impl<S: Simd, F: Weights> RowsFor<S, F> for ForTiles {
    type Coef = F::TileCoef;
    const TOGETHER: usize = F::TOGETHER;
    #[inline(always)]
    fn rows(s: S, x: &[f32], inputs: usize, coefs: &mut [F::TileCoef]) {
        F::tile_coefs(s, x, inputs, coefs);
    }
}

/// The factors of `x` (`[rows, inputs]`), rounded for what multiplies them: `[rows / together, stride]`.
fn round<S: Simd, F: Weights, R: RowsFor<S, F>>(
    s: S,
    threads: &Threads,
    x: &[f32],
    inputs: usize,
    stride: usize,
    coefs: &mut [R::Coef],
    should_stop: ShouldStop<'_>,
) -> Result<()> {
    /// Values that are worth handing to another thread.
    const TASK: usize = 1 << 15;
    let tasks = (x.len() / TASK).clamp(1, threads.num_threads());
    let units = (x.len() / inputs).div_ceil(R::TOGETHER).div_ceil(tasks);
    let items: Vec<_> = x
        .chunks(units * R::TOGETHER * inputs)
        .zip(coefs.chunks_mut(units * stride))
        .map(|(x, coefs)| Round::<S, F, R> { x, inputs, stride, coefs })
        .collect();
    threads.for_each(items, should_stop, |item| s.run(item))
}

struct Round<'a, S: Simd, F: Weights, R: RowsFor<S, F>> {
    x: &'a [f32],
    inputs: usize,
    stride: usize,
    coefs: &'a mut [R::Coef],
}

impl<S: Simd, F: Weights, R: RowsFor<S, F>> Work<S> for Round<'_, S, F, R> {
    type Output = ();

    #[inline(always)]
    fn run(self, s: S) {
        let rows = self.x.chunks(R::TOGETHER * self.inputs);
        for (x, coefs) in rows.zip(self.coefs.chunks_exact_mut(self.stride)) {
            R::rows(s, x, self.inputs, coefs);
        }
    }
}
