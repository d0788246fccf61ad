//! Attention straight over block tables: softmax(Q K^T * scale) V with grouped query heads, causal, over a
//! sliding window, or over another sequence's tokens; on K and V of different widths, or on latent rows.
//!
//! ```text
//! check the shapes
//! find the rows that read the same blocks                                  [`cascade`]
//! cut them into tasks, run these on all threads, merge what was split      [`run`]
//! a task: some queries of one KV head over chunks of its context           [`tile`], [`chunk`], [`softmax`]
//! the weights of chosen rows, where they are asked for                     [`maps`]
//! ```
//! One chunk of the context is 256 tokens at fixed positions; a row's result is the in-order merge of its chunks,
//! so neither batch, shared prefixes, row tiles, task splits nor threads change a bit of it (see [`tile`]).
#![forbid(unsafe_code)]

mod ahead;
mod cascade;
mod chunk;
mod format;
mod gather;
mod lines;
mod maps;
mod mask;
mod products;
pub mod reference;
mod run;
mod scoring;
mod softmax;
mod tile;
mod tiled;
mod tree;

pub use maps::attention_weights;
pub use mask::Mask;
pub use scoring::{Bias, HeadBias, Scoring};
pub use tree::MAX_ROWS as MAX_TREE_ROWS;

use crate::paging::BlockId;
use crate::simd::Level;
use crate::storage::LayerView;
use crate::threads::{ShouldStop, Threads};
use crate::{Error, Result};

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
    /// Of rows that branch, such as the drafts of speculative decoding: the row that each follows, or none for one that
    /// follows the token before `start`. See [`Path`]. None: each follows the one before it. Where rows see another
    /// sequence's tokens, this says their positions alone.
    pub parents: Option<&'a [Option<usize>]>,
}

impl<'a> Rows<'a> {
    /// Rows that follow each other.
    pub fn new(blocks: &'a [BlockId], start: usize, len: usize, mask: Mask) -> Self {
        Self { blocks, start, len, mask, parents: None }
    }

    /// Tokens up to the last that any row sees.
    pub fn tokens(&self) -> usize {
        if self.len == 0 { 0 } else { self.mask.sees(self.start + self.len - 1).end }
    }
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
    /// How scores become weights.
    pub scoring: Scoring<'a>,
    /// `[rows of all sequences, q heads, k_dim]`. For latent rows: queries that are absorbed, that is, multiplied by
    /// the part of the projection that would expand the latent row to K.
    pub q: &'a [f32],
}

/// Where the results of a call go.
#[derive(Debug)]
pub struct Output<'a> {
    /// `[rows of all sequences, q heads, v_dim]`
    pub out: &'a mut [f32],
    /// `[rows of all sequences, q heads]`, if wanted: the logarithm of the sum of the exponentials of a query's scores
    /// (and of its sink), which merges attention over parts of a context.
    pub lse: Option<&'a mut [f32]>,
}

impl<'a> From<&'a mut [f32]> for Output<'a> {
    fn from(out: &'a mut [f32]) -> Self {
        Self { out, lse: None }
    }
}

/// Attend with the queries of a call.
///
/// K and V of all tokens that a row sees must have been written. Of latent rows V is the first `v_dim` dimensions.
/// Sequences whose tables begin with the same blocks read these together.
///
/// With an f32 or f16 cache all is float32; with any other the queries and the softmax weights are rounded to bf16
/// (sums stay float32).
///
/// # Errors
/// [`Error::InvalidArgument`] for shapes that do not fit, [`Error::Interrupted`] if `should_stop` said so.
pub fn attend<'a>(
    level: Level,
    threads: &Threads,
    call: &Call<'_>,
    output: impl Into<Output<'a>>,
    should_stop: ShouldStop<'_>,
) -> Result<()> {
    let output = output.into();
    call.check(&output)?;
    run::run(level, threads, call, output, should_stop)
}

impl Call<'_> {
    /// Shapes, masks and the blocks that will be read.
    fn check(&self, output: &Output<'_>) -> Result<()> {
        self.check_lengths(output.out.len(), output.lse.as_ref().map(|lse| lse.len()))
    }

    fn check_lengths(&self, out: usize, lse: Option<usize>) -> Result<()> {
        let l = &self.view.layout;
        let heads = self.num_q_heads;
        if heads == 0 || !heads.is_multiple_of(l.num_kv_heads) {
            return Err(Error::InvalidArgument(format!(
                "q heads: expected a multiple of the cache's {} KV heads, got {heads}",
                l.num_kv_heads
            )));
        }
        if heads.checked_mul(l.k_dim + l.v_dim).is_none() {
            // Without any rows no length of a slice would show it.
            return Err(Error::InvalidArgument(format!("q heads: expected fewer than memory can hold, got {heads}")));
        }
        self.scoring.check(heads)?;
        let rows = self.rows.iter().try_fold(0usize, |sum, s| sum.checked_add(s.len));
        let lse = lse.map(|len| ("lse", len, 1));
        for (name, len, dim) in [("q", self.q.len(), l.k_dim), ("out", out, l.v_dim)].into_iter().chain(lse) {
            let expected = rows.and_then(|rows| rows.checked_mul(heads)).and_then(|n| n.checked_mul(dim));
            if Some(len) != expected {
                return Err(Error::InvalidArgument(format!(
                    "{name}: expected {} rows x {heads} heads x {dim} dimensions, got {len} values",
                    rows.map_or("too many".into(), |n| n.to_string()),
                )));
            }
        }
        for seq in self.rows {
            if let Some(parents) = seq.parents {
                tree::check(parents, seq)?;
            }
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
}
