//! The tasks of a call.
//!
//! ```text
//! segments (rows that read the same tiles over some chunks)  ->  tiles of some queries of some KV heads  ->  pieces
//!     a tile that is all its rows ever see                       done at once: straight to the output
//!     any other                                                  its states are kept: one for the piece that its rows
//!                                                                begin with, else one for each chunk
//! for each row and KV head with kept states: merge them in order, finish
//! ```
//! Pieces are cut so that each thread has a few, whatever the lengths: one long sequence uses all threads.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::cascade::{Entry, Segment, share};
use super::format::with_format;
use super::products::Multiply;
use super::softmax::{Finish, Merge};
use super::tile::{Partial, QueryTile, Row, Scratch, State, heads_of};
use super::tree;
use super::{Call, Mask, Output};
use crate::Result;
use crate::simd::{Level, Simd, Work};
use crate::threads::{ShouldStop, Threads};

/// Queries that the heads of a row tile may have together.
const QUERIES_OF_HEADS: usize = 48;

/// Below this many multiply-adds a call is not worth waking a thread for.
const SERIAL_WORK: usize = 300_000;

/// Pieces for each thread, so that no thread waits long for the last one.
const PIECES_PER_THREAD: usize = 4;

/// Run a checked call.
pub fn run(
    level: Level,
    threads: &Threads,
    call: &Call<'_>,
    output: Output<'_>,
    should_stop: ShouldStop<'_>,
) -> Result<()> {
    with_format!(level, &call.view.layout, |F| {
        level.dispatch(Run::<F> { threads, call, output, should_stop, format: std::marker::PhantomData })
    })
}

struct Run<'a, F> {
    threads: &'a Threads,
    call: &'a Call<'a>,
    output: Output<'a>,
    should_stop: ShouldStop<'a>,
    format: std::marker::PhantomData<F>,
}

/// Where the result of one row's queries of one KV head goes.
struct Slot<'a> {
    /// `[group, v_dim]`
    out: &'a mut [f32],
    /// `[group]`
    lse: Option<&'a mut [f32]>,
}

/// A tile over some chunks.
struct Piece<'a> {
    tile: QueryTile<'a>,
    result: PieceResult<'a>,
}

enum PieceResult<'a> {
    /// All that the rows see; slots head after head.
    Whole(Vec<Slot<'a>>),
    /// The chunks that the rows begin with, merged.
    Begin { chunks: Range<usize>, state: &'a mut Partial },
    /// Chunks of which each is kept.
    Later { first: usize, states: &'a mut [Partial] },
}

/// Kept states of the rows `rows` (as places in the order of [`share`]) and some KV heads.
struct Kept {
    rows: Range<usize>,
    heads: Range<usize>,
    chunks: Range<usize>,
    /// One state for all chunks, else one for each.
    begin: bool,
    states: Vec<Partial>,
}

/// Tiles and how they are cut, before anything is allocated for them.
struct Tile {
    rows: Range<usize>,
    entry: usize,
    chunks: Range<usize>,
    /// Whether the rows see nothing else.
    whole: bool,
    /// Whether the rows begin with these chunks.
    begins: bool,
}

impl<S: Simd, F: Multiply> Work<S> for Run<'_, F> {
    type Output = Result<()>;

    #[inline(always)]
    fn run(self, s: S) -> Result<()> {
        let Self { threads, call, output, should_stop, .. } = self;
        let (entries, mut rows_of) = entries(call);
        let (order, segments) = share(&entries, call.view.layout.block_size);
        let counts: Vec<usize> = rows_of.iter().map(Vec::len).collect();
        let places = places(&counts, &order);
        let rows: Vec<Row> = order.iter().flat_map(|&entry| std::mem::take(&mut rows_of[entry])).collect();
        let kv_heads = call.view.layout.num_kv_heads;
        let tiles = tiles(call, F::QUERIES_PER_TILE, &order, &segments, &rows, &places);
        let group = call.num_q_heads / kv_heads;
        let serial = threads.num_threads() == 1 || work(call, &rows) < SERIAL_WORK;
        // What one thread would do together is cut where others would have nothing to do.
        let (mut most, wanted) = (kv_heads, if serial { 0 } else { PIECES_PER_THREAD * threads.num_threads() });
        let heads_of = |tile: &Tile, most: usize| {
            let heads = heads_of(&call.view, &rows[tile.rows.clone()], group, QUERIES_OF_HEADS).min(most);
            head_ranges(kv_heads, heads)
        };
        let units = |most| tiles.iter().map(|tile| tile.chunks.len() * heads_of(tile, most).len()).sum::<usize>();
        while most > 1 && units(most) < wanted {
            most = most.div_ceil(2);
        }
        let length = if serial { usize::MAX } else { units(most).div_ceil(wanted) };

        let mut kept: Vec<Kept> = Vec::new();
        for tile in tiles.iter().filter(|tile| !tile.whole || tile.chunks.len() > length) {
            for heads in heads_of(tile, most) {
                kept.extend(cut(tile, length).map(|(chunks, begin)| {
                    let states = vec![Partial::default(); if begin { 1 } else { chunks.len() }];
                    Kept { rows: tile.rows.clone(), heads: heads.clone(), chunks, begin, states }
                }));
            }
        }
        let mut slots = slots(call, output, &counts, &order, &places);
        let mut pieces = Vec::with_capacity(tiles.len());
        let mut rest = kept.iter_mut();
        for tile in &tiles {
            for heads in heads_of(tile, most) {
                let queries = || QueryTile {
                    view: call.view,
                    blocks: entries[tile.entry].blocks,
                    heads: heads.clone(),
                    group,
                    rows: &rows[tile.rows.clone()],
                    scoring: &call.scoring,
                };
                if tile.whole && tile.chunks.len() <= length {
                    let places = heads.clone().flat_map(|head| tile.rows.clone().map(move |row| row * kv_heads + head));
                    let taken = places.map(|place| slots[place].take().expect("one whole tile"));
                    pieces.push(Piece { tile: queries(), result: PieceResult::Whole(taken.collect()) });
                } else {
                    for kept in rest.by_ref().take(cut(tile, length).count()) {
                        let (chunks, states) = (kept.chunks.clone(), &mut kept.states);
                        let result = match kept.begin {
                            true => PieceResult::Begin { chunks, state: &mut states[0] },
                            false => PieceResult::Later { first: chunks.start, states },
                        };
                        pieces.push(Piece { tile: queries(), result });
                    }
                }
            }
        }
        let scratch = Scratch::<S, F>::default;
        let on = |scratch: &mut Scratch<S, F>, piece: Piece<'_>| s.run(On { piece, scratch });
        if serial {
            let mut scratch = scratch();
            for piece in pieces {
                if should_stop() {
                    return Err(crate::Error::Interrupted);
                }
                on(&mut scratch, piece);
            }
        } else {
            threads.for_each_with(pieces, should_stop, scratch, on)?;
        }
        if kept.is_empty() {
            return Ok(());
        }
        let merges = merges(call, &kept, &rows, slots);
        if serial || merged(call, &kept) < SERIAL_WORK {
            merges.into_iter().for_each(|merge| s.run(merge));
            Ok(())
        } else {
            threads.for_each(merges, should_stop, |merge| s.run(merge))
        }
    }
}

/// The rows of a call, entry after entry: a sequence is one, but in a tree each row is.
fn entries<'a>(call: &Call<'a>) -> (Vec<Entry<'a>>, Vec<Vec<Row<'a>>>) {
    let width = call.num_q_heads * call.view.layout.k_dim;
    let mut queries = call.q.chunks_exact(width.max(1));
    let (mut entries, mut rows_of) = (Vec::with_capacity(call.rows.len()), Vec::with_capacity(call.rows.len()));
    for of in call.rows {
        let row = |(position, path)| Row {
            position,
            sees: of.mask.sees(position),
            q: queries.next().expect("q is checked"),
            path,
        };
        let rows: Vec<Row> = tree::places(of).into_iter().map(row).collect();
        let mut push = |rows: Vec<Row<'a>>, own_from: usize| {
            let (Some(first), Some(last)) = (rows.first(), rows.last()) else { return };
            entries.push(Entry { blocks: of.blocks, sees: first.sees.start..last.sees.end, own_from });
            rows_of.push(rows);
        };
        match (of.parents, of.mask) {
            (None, _) => push(rows, usize::MAX),
            (Some(_), Mask::Cross { .. }) => rows.into_iter().for_each(|row| push(vec![row], usize::MAX)),
            (Some(_), _) => rows.into_iter().for_each(|row| push(vec![row], of.start)),
        }
    }
    (entries, rows_of)
}

/// Where the rows of each entry begin in the order of [`share`], with an end.
fn places(counts: &[usize], order: &[usize]) -> Vec<usize> {
    let mut places = Vec::with_capacity(order.len() + 1);
    places.push(0);
    let mut next = 0;
    places.extend(order.iter().map(|&entry| {
        next += counts[entry];
        next
    }));
    places
}

/// Multiply-adds of a call.
fn work(call: &Call<'_>, rows: &[Row<'_>]) -> usize {
    let l = &call.view.layout;
    let seen = rows.iter().fold(0usize, |sum, row| sum.saturating_add(row.sees.len()));
    seen.saturating_mul(call.num_q_heads * (l.k_dim + l.v_dim) / 2)
}

fn tiles(
    call: &Call<'_>,
    queries: usize,
    order: &[usize],
    segments: &[Segment],
    rows: &[Row<'_>],
    places: &[usize],
) -> Vec<Tile> {
    let group = call.num_q_heads / call.view.layout.num_kv_heads;
    let per_tile = (queries / group).max(1);
    let mut tiles = Vec::with_capacity(rows.len().div_ceil(per_tile) + segments.len());
    for segment in segments {
        let of = places[segment.entries.start]..places[segment.entries.end];
        for start in of.clone().step_by(per_tile) {
            let tile = start..(start + per_tile).min(of.end);
            let seen = rows[tile.clone()].iter().map(Row::chunks);
            let all = seen.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).expect("a row");
            let chunks = all.start.max(segment.chunks.start)..all.end.min(segment.chunks.end);
            if chunks.is_empty() {
                continue;
            }
            let (whole, begins) = (chunks == all, chunks.start == all.start);
            tiles.push(Tile { rows: tile, entry: order[segment.entries.start], chunks, whole, begins });
        }
    }
    tiles
}

/// The KV heads in ranges of at most `most`, as equal as may be.
fn head_ranges(kv_heads: usize, most: usize) -> impl ExactSizeIterator<Item = Range<usize>> {
    let each = kv_heads.div_ceil(kv_heads.div_ceil(most));
    (0..kv_heads.div_ceil(each)).map(move |i| i * each..((i + 1) * each).min(kv_heads))
}

/// Multiply-adds of the merges.
fn merged(call: &Call<'_>, kept: &[Kept]) -> usize {
    let l = &call.view.layout;
    let queries = |kept: &Kept| kept.rows.len() * kept.heads.len() * call.num_q_heads / l.num_kv_heads;
    kept.iter().map(|kept| queries(kept) * kept.states.len() * l.width()).sum()
}

/// Pieces of at most `length` chunks, and whether the piece is what its rows begin with.
fn cut(tile: &Tile, length: usize) -> impl Iterator<Item = (Range<usize>, bool)> {
    let (chunks, begins) = (tile.chunks.clone(), tile.begins);
    let end = chunks.end;
    let length = length.min(chunks.len());
    chunks
        .clone()
        .step_by(length)
        .map(move |start| (start..start.saturating_add(length).min(end), begins && start == chunks.start))
}

/// For each row in the order of [`share`] and each KV head.
fn slots<'a>(
    call: &Call<'_>,
    output: Output<'a>,
    counts: &[usize],
    order: &[usize],
    places: &[usize],
) -> Vec<Option<Slot<'a>>> {
    let l = &call.view.layout;
    let (kv_heads, group) = (l.num_kv_heads, call.num_q_heads / l.num_kv_heads);
    let count = output.out.len() / (group * l.v_dim);
    let mut outs = output.out.chunks_exact_mut(group * l.v_dim);
    let mut lses = output.lse.map(|lse| lse.chunks_exact_mut(group));
    let mut next = || Slot { out: outs.next().expect("out is checked"), lse: lses.as_mut().and_then(Iterator::next) };
    if order.is_sorted() {
        return std::iter::repeat_with(|| Some(next())).take(count).collect();
    }
    let mut slots: Vec<Option<Slot<'a>>> = std::iter::repeat_with(|| None).take(count).collect();
    let mut place_of = vec![0; counts.len()];
    for (&entry, &place) in order.iter().zip(places) {
        place_of[entry] = place;
    }
    for (entry, count) in counts.iter().enumerate() {
        let first = place_of[entry] * kv_heads;
        for slot in &mut slots[first..first + count * kv_heads] {
            *slot = Some(next());
        }
    }
    slots
}

/// One piece with the buffers of its thread.
struct On<'a, 'b, S: Simd, F: Multiply> {
    piece: Piece<'a>,
    scratch: &'b mut Scratch<S, F>,
}

impl<S: Simd, F: Multiply> Work<S> for On<'_, '_, S, F> {
    type Output = ();

    #[inline(always)]
    fn run(self, s: S) {
        let Piece { tile, result } = self.piece;
        match result {
            PieceResult::Whole(mut slots) => tile.attend(s, self.scratch, |row, q_head, state| {
                let slot = (q_head / tile.group - tile.heads.start) * tile.rows.len() + row;
                finish(s, &tile, q_head, state, &mut slots[slot]);
            }),
            PieceResult::Begin { chunks, state } => {
                tile.run_of_chunks(s, self.scratch, chunks, state, |_, _, _, _, _| {})
            }
            PieceResult::Later { first, states } => tile.some_chunks(s, self.scratch, first, states),
        }
    }
}

/// Write one query's result.
fn finish<S: Simd>(s: S, tile: &QueryTile<'_>, q_head: usize, state: State<'_>, slot: &mut Slot<'_>) {
    let (v_dim, i) = (tile.view.layout.v_dim, q_head % tile.group);
    s.run(Finish {
        state,
        sink: tile.scoring.sinks.map(|sinks| sinks[q_head]),
        scale: tile.view.v_scale(q_head / tile.group),
        out: &mut slot.out[i * v_dim..][..v_dim],
        lse: slot.lse.as_mut().map(|lse| &mut lse[i]),
    });
}

/// One row and KV head whose states are kept in pieces, in order.
struct MergeRow<'a> {
    tile: QueryTile<'a>,
    row: usize,
    kept: Vec<&'a Kept>,
    slot: Slot<'a>,
}

/// What is left to merge: the rows whose slots no whole tile has taken.
fn merges<'a>(
    call: &'a Call<'a>,
    kept: &'a [Kept],
    rows: &'a [Row<'a>],
    slots: Vec<Option<Slot<'a>>>,
) -> Vec<MergeRow<'a>> {
    let kv_heads = call.view.layout.num_kv_heads;
    let mut of: Vec<Vec<&Kept>> = vec![Vec::new(); slots.len()];
    for kept in kept {
        for (row, head) in kept.rows.clone().flat_map(|row| kept.heads.clone().map(move |head| (row, head))) {
            of[row * kv_heads + head].push(kept);
        }
    }
    let left = slots.into_iter().zip(of).enumerate();
    left.filter_map(|(i, (slot, mut kept))| {
        kept.sort_unstable_by_key(|kept| kept.chunks.start);
        let (row, head) = (i / kv_heads, i % kv_heads);
        let tile = QueryTile {
            view: call.view,
            blocks: &[],
            heads: head..head + 1,
            group: call.num_q_heads / kv_heads,
            rows: &rows[row..=row],
            scoring: &call.scoring,
        };
        slot.map(|slot| MergeRow { tile, row, kept, slot })
    })
    .collect()
}

impl<S: Simd> Work<S> for MergeRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self, s: S) {
        let width = self.tile.view.layout.width();
        let kv_head = self.tile.heads.start;
        let first = self.tile.rows[0].chunks().start;
        let last = self.tile.rows[0].chunks().end;
        let mut acc = vec![0.0; width];
        for i in 0..self.tile.group {
            let (mut m, mut l) = (0.0, 0.0);
            for kept in &self.kept {
                let row = (kv_head - kept.heads.start) * kept.rows.len() + self.row - kept.rows.start;
                let query = row * self.tile.group + i;
                for (i, state) in kept.states.iter().enumerate() {
                    let chunk = kept.chunks.start + i;
                    // A row may see none of a chunk that others of its tile see.
                    let until = if kept.begin { kept.chunks.end } else { chunk + 1 };
                    if until <= first || chunk >= last {
                        continue;
                    }
                    let add = state.of(query, width);
                    if chunk <= first {
                        (m, l) = (add.m, add.l);
                        acc.copy_from_slice(add.acc);
                    } else {
                        let (m, l) = (std::slice::from_mut(&mut m), std::slice::from_mut(&mut l));
                        s.run(Merge { m, l, acc: &mut acc, add: add.as_states() });
                    }
                }
            }
            finish(s, &self.tile, kv_head * self.tile.group + i, State { m, l, acc: &acc }, &mut self.slot);
        }
    }
}
