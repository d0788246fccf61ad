//! Attention straight over block tables: softmax(Q K^T * scale) V, causal, with grouped query heads.
//!
//! ```text
//! check the shapes
//! cut the rows into tasks: (sequence, tile of rows, KV head), long ones further by chunks of the context
//! run the tasks on all threads; merge the partial results of split tasks in order
//! ```
//! One chunk of the context is 256 tokens at fixed positions; a row's result is the in-order merge of its chunks,
//! so neither batch, row tiles, task splits nor threads change a bit of it (see [`tile`]).
#![forbid(unsafe_code)]

pub mod reference;
pub mod tile;

use crate::paging::BlockId;
use crate::simd::{Bf16, F16, F32, Format, Fp8E4M3, Level, Simd, Work};
use crate::storage::{KvDtype, LayerView, ScaleMode};
use crate::threads::{ShouldStop, Threads};
use crate::{Error, Result};
use tile::{CHUNK, Partial, RowTile};

/// Consecutive query rows of one sequence: row `i` is at position `start + i` and sees positions up to its own.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// The sequence's block table; covers positions `0..start + len`.
    pub blocks: &'a [BlockId],
    /// Position of the first row.
    pub start: usize,
    /// Number of rows.
    pub len: usize,
}

/// Queries of one row tile: enough that a K tile in the first-level cache serves many of them.
const QUERIES_PER_TILE: usize = 32;

/// Below this many multiply-adds a call is not worth waking a thread for.
const SERIAL_WORK: usize = 300_000;

/// Attend: `q` and `out` are `[rows of all sequences, q heads, head_dim]`, float32, rows in the order of `seqs`.
///
/// K and V must have been written up to each row's own position. `scale` multiplies the scores; `num_q_heads` must
/// be a multiple of the cache's KV heads: query head `h` reads KV head `h / (num_q_heads / num_kv_heads)`.
///
/// With a bf16 or fp8 cache the queries and the softmax weights are rounded to bf16 (sums stay float32); with an
/// f32 or f16 cache all is float32.
///
/// # Errors
/// [`Error::InvalidArgument`] for shapes that do not fit, [`Error::Interrupted`] if `should_stop` said so.
#[allow(clippy::too_many_arguments)] // The kernels' one doorway: each argument is a thing of its own.
pub fn attend(
    level: Level,
    threads: &Threads,
    view: LayerView<'_>,
    seqs: &[Rows<'_>],
    num_q_heads: usize,
    scale: f32,
    q: &[f32],
    out: &mut [f32],
    should_stop: ShouldStop<'_>,
) -> Result<()> {
    let l = view.layout;
    if num_q_heads == 0 || !num_q_heads.is_multiple_of(l.num_kv_heads) {
        return Err(Error::InvalidArgument(format!(
            "q heads: expected a multiple of the cache's {} KV heads, got {num_q_heads}",
            l.num_kv_heads
        )));
    }
    if !scale.is_finite() {
        return Err(Error::InvalidArgument(format!("scale: expected a finite number, got {scale}")));
    }
    let width = num_q_heads * l.k_dim;
    let rows: usize = seqs.iter().map(|s| s.len).sum();
    for (name, len) in [("q", q.len()), ("out", out.len())] {
        if Some(len) != rows.checked_mul(width) {
            return Err(Error::InvalidArgument(format!(
                "{name}: expected {rows} rows x {num_q_heads} heads x {} dimensions, got {len} values",
                l.k_dim
            )));
        }
    }
    for seq in seqs {
        let covered = seq.blocks.len().saturating_mul(l.block_size);
        if seq.start.checked_add(seq.len).is_none_or(|end| end > covered)
            || seq.blocks.iter().any(|b| b.index() >= l.num_blocks)
        {
            return Err(Error::InvalidArgument(format!(
                "block table: expected {} valid blocks for positions {} to {}, got {}",
                seq.start.saturating_add(seq.len).div_ceil(l.block_size),
                seq.start,
                seq.start.saturating_add(seq.len),
                seq.blocks.len()
            )));
        }
    }
    if l.latent || l.v_dim != l.k_dim || l.scale_mode != ScaleMode::Static {
        return Err(Error::InvalidArgument("attention: expected K and V of one width, with static scales".into()));
    }
    match l.dtype {
        KvDtype::F32 => run::<F32>(level, threads, view, seqs, num_q_heads, scale, q, out, should_stop),
        KvDtype::F16 => run::<F16>(level, threads, view, seqs, num_q_heads, scale, q, out, should_stop),
        KvDtype::Bf16 => run::<Bf16>(level, threads, view, seqs, num_q_heads, scale, q, out, should_stop),
        KvDtype::Fp8E4M3 => run::<Fp8E4M3>(level, threads, view, seqs, num_q_heads, scale, q, out, should_stop),
        other => Err(Error::InvalidArgument(format!("attention: {other} is not read yet"))),
    }
}

/// One row tile of one KV head: all of its context, or some of its chunks.
enum Task<'a> {
    Whole { tile: RowTile<'a>, out: Vec<&'a mut [f32]> },
    Chunks { tile: RowTile<'a>, first: usize, partials: &'a mut [Partial] },
}

impl Task<'_> {
    fn run<F: Format>(self, level: Level) {
        struct On<'a, F>(Task<'a>, std::marker::PhantomData<F>);
        impl<F: Format> Work for On<'_, F> {
            type Output = ();
            #[inline(always)]
            fn run<S: Simd>(self, s: S) {
                match self.0 {
                    Task::Whole { tile, out } => tile.attend::<S, F>(s, out),
                    Task::Chunks { tile, first, partials } => tile.chunks::<S, F>(s, first, partials),
                }
            }
        }
        level.dispatch(On::<F>(self, std::marker::PhantomData));
    }
}

#[allow(clippy::too_many_arguments)]
fn run<F: Format>(
    level: Level,
    threads: &Threads,
    view: LayerView<'_>,
    seqs: &[Rows<'_>],
    num_q_heads: usize,
    scale: f32,
    q: &[f32],
    out: &mut [f32],
    should_stop: ShouldStop<'_>,
) -> Result<()> {
    let l = view.layout;
    let group = num_q_heads / l.num_kv_heads;
    let rows_per_tile = (QUERIES_PER_TILE / group).max(1);
    let (head_width, row_width) = (group * l.k_dim, num_q_heads * l.k_dim);

    let mut tiles = Vec::new();
    let mut outs: Vec<Vec<&mut [f32]>> = Vec::new();
    let mut rest = out;
    let mut row = 0;
    let mut work = 0;
    for seq in seqs {
        for first in (0..seq.len).step_by(rows_per_tile) {
            let rows = rows_per_tile.min(seq.len - first);
            let (these, after) = std::mem::take(&mut rest).split_at_mut(rows * row_width);
            rest = after;
            let base = outs.len();
            for head in 0..l.num_kv_heads {
                let tile = RowTile {
                    view,
                    blocks: seq.blocks,
                    head,
                    group,
                    start: seq.start + first,
                    rows,
                    scale,
                    q: &q[row * row_width..(row + rows) * row_width],
                };
                work += rows * group * l.k_dim * tile.end();
                tiles.push(tile);
                outs.push(Vec::with_capacity(rows));
            }
            for one_row in these.chunks_exact_mut(row_width) {
                for (head, part) in one_row.chunks_exact_mut(head_width).enumerate() {
                    outs[base + head].push(part);
                }
            }
            row += rows;
        }
    }

    if threads.num_threads() == 1 || work < SERIAL_WORK {
        for (tile, out) in tiles.into_iter().zip(outs) {
            if should_stop() {
                return Err(Error::Interrupted);
            }
            Task::Whole { tile, out }.run::<F>(level);
        }
        return Ok(());
    }

    // A few pieces for each thread, so that no thread waits long for the last one.
    let chunks: usize = tiles.iter().map(|t| t.end().div_ceil(CHUNK)).sum();
    let piece = chunks.div_ceil(4 * threads.num_threads());
    let mut partials: Vec<Vec<Partial>> = tiles
        .iter()
        .map(|t| match t.end().div_ceil(CHUNK) {
            n if n > piece => vec![Partial::default(); n],
            _ => Vec::new(),
        })
        .collect();
    let mut tasks = Vec::with_capacity(tiles.len());
    let mut split = Vec::new();
    for ((tile, out), partials) in tiles.into_iter().zip(outs).zip(&mut partials) {
        if partials.is_empty() {
            tasks.push(Task::Whole { tile, out });
        } else {
            for (i, part) in partials.chunks_mut(piece).enumerate() {
                tasks.push(Task::Chunks { tile, first: i * piece, partials: part });
            }
            split.push((tile, out));
        }
    }
    threads.for_each(tasks, should_stop, |task| task.run::<F>(level))?;
    let split_partials = partials.into_iter().filter(|p| !p.is_empty());
    for ((tile, out), partials) in split.into_iter().zip(split_partials) {
        level.dispatch(Merge { tile, partials, out });
    }
    Ok(())
}

/// The in-order merge of a split task.
struct Merge<'a> {
    tile: RowTile<'a>,
    partials: Vec<Partial>,
    out: Vec<&'a mut [f32]>,
}

impl Work for Merge<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.tile.merge(s, self.partials, self.out);
    }
}
