//! Attention straight over block tables: softmax(Q K^T * scale) V with grouped query heads, causal, over a
//! sliding window, or over another sequence's tokens; on K and V of different widths, or on latent rows.
//!
//! ```text
//! check the shapes
//! cut the rows into tasks: (sequence, tile of rows, KV head), long ones further by chunks of the context
//! run the tasks on all threads; merge the partial results of split tasks in order
//! ```
//! One chunk of the context is 256 tokens at fixed positions; a row's result is the in-order merge of its chunks,
//! so neither batch, row tiles, task splits nor threads change a bit of it (see [`tile`]).
#![forbid(unsafe_code)]

mod chunk;
mod mask;
pub mod reference;
mod tile;

pub use mask::Mask;

use crate::paging::BlockId;
use crate::simd::{Bf16, F16, F32, Format, Fp8E4M3, Fp8E5M2, Int8, Level, Simd, Work};
use crate::storage::{KvDtype, LayerView};
use crate::threads::{ShouldStop, Threads};
use crate::{Error, Result};
use chunk::Context;
use tile::{Partial, RowTile};

/// Consecutive query rows of one sequence: row `i` is at position `start + i`.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// The sequence's block table. Blocks with none of the tokens that the mask shows are not looked at:
    /// [`BlockId::NONE`] may stand in their place.
    pub blocks: &'a [BlockId],
    /// Position of the first row.
    pub start: usize,
    /// Number of rows.
    pub len: usize,
    /// Which tokens each row sees.
    pub mask: Mask,
}

/// What one call computes: one layer's attention for the rows of some sequences.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    /// The layer's K and V.
    pub view: LayerView<'a>,
    /// The rows, sequence after sequence.
    pub rows: &'a [Rows<'a>],
    /// Query heads, a multiple of the cache's KV heads: head `h` reads KV head `h / (num_q_heads / num_kv_heads)`.
    pub num_q_heads: usize,
    /// Multiplies the scores.
    pub scale: f32,
    /// `[rows of all sequences, q heads, k_dim]`. For latent rows: queries that are absorbed, that is, multiplied by
    /// the part of the projection that would expand the latent row to K.
    pub q: &'a [f32],
}

/// Queries of one row tile: enough that a K tile in the first-level cache serves many of them.
const QUERIES_PER_TILE: usize = 32;

/// Below this many multiply-adds a call is not worth waking a thread for.
const SERIAL_WORK: usize = 300_000;

/// Attend: `out` is `[rows of all sequences, q heads, v_dim]`, float32.
///
/// K and V of all tokens that a row sees must have been written. Of latent rows V is the first `v_dim` dimensions.
///
/// With an f32 or f16 cache all is float32; with any other the queries and the softmax weights are rounded to bf16
/// (sums stay float32).
///
/// # Errors
/// [`Error::InvalidArgument`] for shapes that do not fit, [`Error::Interrupted`] if `should_stop` said so.
pub fn attend(
    level: Level,
    threads: &Threads,
    call: &Call<'_>,
    out: &mut [f32],
    should_stop: ShouldStop<'_>,
) -> Result<()> {
    call.check(out.len())?;
    match call.view.layout.dtype {
        KvDtype::F32 => call.run::<F32>(level, threads, out, should_stop),
        KvDtype::F16 => call.run::<F16>(level, threads, out, should_stop),
        // int4 tiles are expanded to bf16.
        KvDtype::Bf16 | KvDtype::Int4 => call.run::<Bf16>(level, threads, out, should_stop),
        KvDtype::Fp8E4M3 => call.run::<Fp8E4M3>(level, threads, out, should_stop),
        KvDtype::Fp8E5M2 => call.run::<Fp8E5M2>(level, threads, out, should_stop),
        KvDtype::Int8 => call.run::<Int8>(level, threads, out, should_stop),
    }
}

impl Call<'_> {
    /// Shapes, masks and the blocks that will be read.
    fn check(&self, out_len: usize) -> Result<()> {
        let l = &self.view.layout;
        let heads = self.num_q_heads;
        if heads == 0 || !heads.is_multiple_of(l.num_kv_heads) {
            return Err(Error::InvalidArgument(format!(
                "q heads: expected a multiple of the cache's {} KV heads, got {heads}",
                l.num_kv_heads
            )));
        }
        if !self.scale.is_finite() {
            return Err(Error::InvalidArgument(format!("scale: expected a finite float32, got {:?}", self.scale)));
        }
        let rows = self.rows.iter().try_fold(0usize, |sum, s| sum.checked_add(s.len));
        for (name, len, dim) in [("q", self.q.len(), l.k_dim), ("out", out_len, l.v_dim)] {
            let expected = rows.and_then(|rows| rows.checked_mul(heads)).and_then(|n| n.checked_mul(dim));
            if Some(len) != expected {
                return Err(Error::InvalidArgument(format!(
                    "{name}: expected {} rows x {heads} heads x {dim} dimensions, got {len} values",
                    rows.map_or("too many".into(), |n| n.to_string()),
                )));
            }
        }
        for seq in self.rows {
            let sees = seq.mask.checked(seq.start, seq.len)?;
            let blocks = sees.start / l.block_size..sees.end.div_ceil(l.block_size);
            let valid = |blocks: &[BlockId]| blocks.iter().all(|b| b.index() < l.num_blocks);
            if !seq.blocks.get(blocks.clone()).is_some_and(valid) {
                return Err(Error::InvalidArgument(format!(
                    "block table: expected valid blocks at {} to {} for tokens {} to {}, got a table of {}",
                    blocks.start,
                    blocks.end.saturating_sub(1),
                    sees.start,
                    sees.end.saturating_sub(1),
                    seq.blocks.len()
                )));
            }
        }
        Ok(())
    }

    fn run<F: Format>(
        &self,
        level: Level,
        threads: &Threads,
        out: &mut [f32],
        should_stop: ShouldStop<'_>,
    ) -> Result<()> {
        let (tiles, outs, work) = self.tiles(out);
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
        let chunks: usize = tiles.iter().map(|t| t.chunks().len()).sum();
        let piece = chunks.div_ceil(4 * threads.num_threads());
        let mut partials: Vec<Vec<Partial>> = tiles
            .iter()
            .map(|t| match t.chunks().len() {
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
                    tasks.push(Task::Chunks { tile, first: tile.chunks().start + i * piece, partials: part });
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

    /// Row tiles of all KV heads, for each the parts of `out` that are its own, and the multiply-adds of all.
    fn tiles<'a>(&'a self, out: &'a mut [f32]) -> (Vec<RowTile<'a>>, Vec<Vec<&'a mut [f32]>>, usize) {
        let l = &self.view.layout;
        let group = self.num_q_heads / l.num_kv_heads;
        let rows_per_tile = (QUERIES_PER_TILE / group).max(1);
        let (q_width, out_width) = (self.num_q_heads * l.k_dim, self.num_q_heads * l.v_dim);

        let mut tiles = Vec::new();
        let mut outs: Vec<Vec<&mut [f32]>> = Vec::new();
        let mut rest = out;
        let mut row = 0;
        let mut work = 0usize;
        for seq in self.rows {
            for first in (0..seq.len).step_by(rows_per_tile) {
                let rows = rows_per_tile.min(seq.len - first);
                let (these, after) = std::mem::take(&mut rest).split_at_mut(rows * out_width);
                rest = after;
                let base = outs.len();
                for head in 0..l.num_kv_heads {
                    let tile = RowTile {
                        context: Context { view: self.view, blocks: seq.blocks, head },
                        group,
                        start: seq.start + first,
                        rows,
                        mask: seq.mask,
                        scale: self.scale,
                        q: &self.q[row * q_width..(row + rows) * q_width],
                    };
                    work = work.saturating_add(rows * group * (l.k_dim + l.v_dim) / 2 * tile.sees().len());
                    tiles.push(tile);
                    outs.push(Vec::with_capacity(rows));
                }
                for one_row in these.chunks_exact_mut(out_width) {
                    for (head, part) in one_row.chunks_exact_mut(group * l.v_dim).enumerate() {
                        outs[base + head].push(part);
                    }
                }
                row += rows;
            }
        }
        (tiles, outs, work)
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
                    Task::Chunks { tile, first, partials } => tile.some_chunks::<S, F>(s, first, partials),
                }
            }
        }
        level.dispatch(On::<F>(self, std::marker::PhantomData));
    }
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
