//! One tile of queries against the context of one or more KV heads.
//!
//! ```text
//! for each chunk of 256 tokens (at fixed positions):
//!     scores[query][token] = q . k * scale               all queries of the tile against each K tile
//!     m = max(scores);  p = exp(scores - m);  l = sum(p)
//!     acc = sum over tokens of p * v
//!     running (m, l, acc) <- merge(running, this chunk's)   rescaled to the larger maximum
//! out = acc / l
//! ```
//! This is the online softmax of Milakov and Gimelshein (2018) by chunks, as in FlashAttention (Dao et al., 2022) and
//! its split-KV form for decoding. Within a chunk every sum runs over dimensions or tokens in order; a row takes part
//! in exactly the tokens it may see, so its bits do not depend on the rows beside it. Its first chunk is taken as it is,
//! later ones are merged in order. Slots that a row does not see are masked by selection (K and its scales) or not read
//! (V): they may hold NaN.
//!
//! Decode has few queries for each KV head, and waits for memory. So a tile takes as many heads as make up for it, and
//! goes through a window of some tokens of all of them before the next, which is in the order of memory; the next window
//! is asked for meanwhile. With many queries of one head products bind, and each register tile goes through the whole
//! chunk.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::ahead::{Ahead, MAX_TILES};
use super::chunk::{Buffers, CHUNK, Context, HeadChunk, TILES};
use super::lines::Lines;
use super::products::{Multiply, Shared, tiles_of};
use super::scoring::Scoring;
use super::softmax::{Merge, Plain, States, Weights};
use super::tree::Path;
use crate::paging::BlockId;
use crate::simd::{Format, Simd};
use crate::storage::{LayerView, TILE};

/// Tiles of a chunk that all heads of a tile go through before the next ones.
const WINDOW: usize = MAX_TILES;

/// Queries of a head up to which they wait for memory.
const FEW: usize = 8;

/// Bytes of K of all heads in 16 tokens that a tile should not exceed: two windows wait in the second-level cache.
const HEADS_BYTES: usize = 32 << 10;

/// Gets a query, the first token of a chunk, what of it the query sees (counted from that token), the chunk's scores, and
/// what they are to be multiplied by to be in base-2 units, as the softmax takes them.
pub trait Observe: FnMut(usize, usize, Range<usize>, &[f32; CHUNK], f32) {}
impl<T: FnMut(usize, usize, Range<usize>, &[f32; CHUNK], f32)> Observe for T {}

/// All query heads of one position.
#[derive(Clone, Debug)]
pub struct Row<'a> {
    /// Its position in its sequence.
    pub position: usize,
    /// The tokens that it sees.
    pub sees: Range<usize>,
    /// `[q heads, k_dim]`
    pub q: &'a [f32],
    /// Of a row of a tree: where its tokens are. Such a row is alone in a tile from the chunk on that the path begins in.
    pub path: Option<Path>,
}

impl Row<'_> {
    /// The chunks that it sees any token of.
    pub fn chunks(&self) -> Range<usize> {
        self.sees.start / CHUNK..self.sees.end.div_ceil(CHUNK)
    }
}

/// Rows that read the same tiles of some KV heads; a query is one of a head's query heads in one row. Queries are
/// counted head after head, within these row after row.
#[derive(Clone)]
pub struct QueryTile<'a> {
    /// K and V of the layer.
    pub view: LayerView<'a>,
    /// The rows' block table.
    pub blocks: &'a [BlockId],
    /// The KV heads; one alone where rows have a path, or rows are latent.
    pub heads: Range<usize>,
    /// Query heads for each KV head.
    pub group: usize,
    /// The rows.
    pub rows: &'a [Row<'a>],
    /// How scores become weights.
    pub scoring: &'a Scoring<'a>,
}

/// Softmax state of all queries of a tile over some tokens: maximum (of scores in base-2 units), sum of weights, and
/// weighted sum of V.
#[derive(Clone, Debug, Default)]
pub struct Partial {
    m: Vec<f32>,
    l: Vec<f32>,
    acc: Lines<f32>,
}

impl Partial {
    /// Room for `queries`, each `width` wide. What is in it may be anything.
    fn resize(&mut self, queries: usize, width: usize) {
        self.m.resize(queries, 0.0);
        self.l.resize(queries, 0.0);
        self.acc.resize(queries * width);
    }

    /// The states of some queries.
    fn some(&self, queries: Range<usize>, width: usize) -> States<'_> {
        let acc = &self.acc[queries.start * width..queries.end * width];
        States { m: &self.m[queries.clone()], l: &self.l[queries], acc }
    }

    /// One query's state.
    pub fn of(&self, query: usize, width: usize) -> State<'_> {
        State { m: self.m[query], l: self.l[query], acc: &self.acc[query * width..][..width] }
    }
}

/// One query's softmax state.
#[derive(Clone, Copy)]
pub struct State<'a> {
    /// The maximum.
    pub m: f32,
    /// The sum of weights.
    pub l: f32,
    /// The weighted sum of V.
    pub acc: &'a [f32],
}

impl State<'_> {
    /// As those of one query.
    pub fn as_states(&self) -> States<'_> {
        States { m: std::slice::from_ref(&self.m), l: std::slice::from_ref(&self.l), acc: self.acc }
    }
}

/// Buffers of one thread, for one tile after the other.
pub struct Scratch<S: Simd, F: Format> {
    /// The first query of each register tile, and how many it has.
    tiles: Vec<(usize, usize)>,
    /// Packed queries, register tile after register tile, each `[steps][M]`.
    queries: Lines<F::Coef<S>>,
    scores: Lines<[f32; CHUNK]>,
    weights: Lines<[F::Coef<S>; CHUNK]>,
    buffers: Buffers<F>,
    /// V of one head as the products take it.
    joined: Lines<F::Raw>,
    registers: Vec<RegisterTile>,
    /// What of a chunk each query sees.
    visible: Vec<Range<usize>>,
    running: Partial,
    partial: Partial,
}

impl<S: Simd, F: Format> Default for Scratch<S, F> {
    fn default() -> Self {
        Self {
            tiles: Vec::new(),
            queries: Lines::default(),
            scores: Lines::default(),
            weights: Lines::default(),
            buffers: Buffers::default(),
            joined: Lines::default(),
            registers: Vec::new(),
            visible: Vec::new(),
            running: Partial::default(),
            partial: Partial::default(),
        }
    }
}

/// Queries that go through the registers together, in one chunk.
struct RegisterTile {
    /// Their head, counted from the tile's first.
    head: usize,
    /// The first of them.
    first: usize,
    /// How many they are.
    m: usize,
    /// What of the chunk they see together.
    shared: Shared,
}

impl RegisterTile {
    /// The queries.
    fn queries(&self) -> Range<usize> {
        self.first..self.first + self.m
    }
}

/// The most KV heads that a tile of `rows` rows should have: as many as fill `queries`.
pub fn heads_of(view: &LayerView<'_>, rows: &[Row<'_>], group: usize, queries: usize) -> usize {
    let l = &view.layout;
    if l.latent || rows.iter().any(|row| row.path.is_some()) {
        return 1;
    }
    let within = (HEADS_BYTES / l.k_tile_bytes().max(1)).min(queries / (rows.len() * group).max(1));
    within.clamp(1, l.num_kv_heads)
}

impl QueryTile<'_> {
    /// The chunks that any row sees.
    pub fn chunks(&self) -> Range<usize> {
        let of = |row: &Row<'_>| row.chunks();
        let start = self.rows.iter().map(|row| of(row).start).min().unwrap_or(0);
        start..self.rows.iter().map(|row| of(row).end).max().unwrap_or(0)
    }

    fn num_queries(&self) -> usize {
        self.heads.len() * self.per_head()
    }

    /// Queries of one KV head.
    fn per_head(&self) -> usize {
        self.rows.len() * self.group
    }

    fn width(&self) -> usize {
        self.view.layout.width()
    }

    fn q_heads(&self) -> usize {
        self.group * self.view.layout.num_kv_heads
    }

    fn context(&self) -> Context<'_> {
        Context { view: self.view, blocks: self.blocks, heads: self.heads.clone() }
    }

    /// The row of a query.
    fn row(&self, query: usize) -> &Row<'_> {
        &self.rows[query % self.per_head() / self.group]
    }

    /// The rows of the queries from `first` on, within its head.
    fn rows_from(&self, first: usize) -> impl Iterator<Item = &Row<'_>> {
        let first = first % self.per_head();
        let (row, within) = (first / self.group, first % self.group);
        self.rows[row..].iter().flat_map(|row| std::iter::repeat_n(row, self.group)).skip(within)
    }

    /// The query head of a query.
    fn q_head(&self, query: usize) -> usize {
        (self.heads.start + query / self.per_head()) * self.group + query % self.group
    }

    /// Attend over the whole context; `finish` gets each query's row, query head, and state.
    pub fn attend<S: Simd, F: Multiply>(
        &self,
        s: S,
        scratch: &mut Scratch<S, F>,
        mut finish: impl FnMut(usize, usize, State<'_>),
    ) {
        let mut running = std::mem::take(&mut scratch.running);
        self.run_of_chunks(s, scratch, self.chunks(), &mut running, |_, _, _, _, _| {});
        for query in 0..self.num_queries() {
            finish(query % self.per_head() / self.group, self.q_head(query), running.of(query, self.width()));
        }
        scratch.running = running;
    }

    /// The state of every query over `chunks`, merged in order, from the first chunk that its row sees.
    pub fn run_of_chunks<S: Simd, F: Multiply>(
        &self,
        s: S,
        scratch: &mut Scratch<S, F>,
        chunks: Range<usize>,
        running: &mut Partial,
        mut observe: impl Observe,
    ) {
        self.pack(s, scratch);
        running.resize(self.num_queries(), self.width());
        let mut partial = std::mem::take(&mut scratch.partial);
        partial.resize(self.num_queries(), self.width());
        F::with_both(s, self.per_head(), self.view.layout.k_dim, |both| {
            for c in chunks.clone() {
                if c == chunks.start {
                    self.chunk(s, both, scratch, c, c + 1 < chunks.end, running, &mut observe);
                } else {
                    self.chunk(s, both, scratch, c, c + 1 < chunks.end, &mut partial, &mut observe);
                    self.merge_chunk(s, c, running, &partial);
                }
            }
        });
        scratch.partial = partial;
    }

    /// The partial results of the chunks from `first` on, one for each of `partials`.
    pub fn some_chunks<S: Simd, F: Multiply>(
        &self,
        s: S,
        scratch: &mut Scratch<S, F>,
        first: usize,
        partials: &mut [Partial],
    ) {
        let chunks = first..first + partials.len();
        self.pack(s, scratch);
        F::with_both(s, self.per_head(), self.view.layout.k_dim, |both| {
            for (c, partial) in chunks.clone().zip(partials) {
                partial.resize(self.num_queries(), self.width());
                self.chunk(s, both, scratch, c, c + 1 < chunks.end, partial, &mut |_, _, _, _, _| {});
            }
        });
    }

    /// Pack the queries as the kernels read them.
    fn pack<S: Simd, F: Multiply>(&self, s: S, scratch: &mut Scratch<S, F>) {
        let (n, dim) = (self.num_queries(), self.view.layout.k_dim);
        let steps = dim / F::STEP;
        scratch.queries.resize((n + F::SLACK) * steps);
        self.context().prepare(&mut scratch.buffers);
        scratch.tiles.clear();
        scratch.tiles.extend(self.register_tiles::<S, F>());
        for &(first, m) in &scratch.tiles {
            for (query, row) in self.rows_from(first).take(m).enumerate() {
                let head = self.q_head(first + query);
                let packed = &mut scratch.queries[first * steps..(first + m) * steps];
                F::pack(s, &row.q[head * dim..][..dim], packed, m, query);
            }
        }
    }

    /// The first query of each register tile, and how many it has. None spans heads.
    fn register_tiles<S: Simd, F: Multiply>(&self) -> impl Iterator<Item = (usize, usize)> {
        let per_head = self.per_head();
        (0..self.heads.len()).flat_map(move |head| {
            let mut next = 0;
            std::iter::from_fn(move || {
                let first = next;
                (first < per_head).then(|| {
                    let m = F::tile_size::<S>(per_head - first);
                    next += m;
                    (head * per_head + first, m)
                })
            })
        })
    }

    /// The tokens of chunk `c` that any row sees, counted within the chunk.
    fn seen(&self, c: usize) -> Option<Range<usize>> {
        let seen = self.rows.iter().map(|row| within(c, row.sees.clone())).filter(|v| !v.is_empty());
        seen.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end))
    }

    /// Softmax state of every query over the tokens of chunk `c` that its row sees; of no meaning where it sees none.
    /// `goes_on`: the next chunk comes next.
    #[allow(clippy::too_many_arguments)] // Where it runs, what it works on, and who looks on.
    fn chunk<S: Simd, F: Multiply>(
        &self,
        s: S,
        both: Option<&F::Shape<S>>,
        scratch: &mut Scratch<S, F>,
        c: usize,
        goes_on: bool,
        partial: &mut Partial,
        observe: &mut impl Observe,
    ) {
        let Some(all) = self.seen(c) else { return };
        let tiles = tiles_of(&all);
        let steps = self.view.layout.k_dim / F::STEP;
        let width = self.width();
        let Scratch { tiles: register_tiles, queries, scores, weights, buffers, joined, registers, visible, .. } =
            scratch;
        let path = match self.rows {
            [row] => row.path.as_ref(),
            _ => None,
        };
        let context = self.context();
        let chunk = context.chunk(s, c, tiles.clone(), path, buffers);
        visible.clear();
        for row in self.heads.clone().flat_map(|_| self.rows) {
            visible.extend(std::iter::repeat_n(within(c, row.sees.clone()), self.group));
        }
        registers.clear();
        registers.extend(register_tiles.iter().filter_map(|&(first, m)| {
            let shared = Shared::of(&visible[first..first + m])?;
            Some(RegisterTile { head: first / self.per_head(), first, m, shared })
        }));
        // Where many queries share a head products bind: each register tile goes through all of the chunk at once.
        let of = if self.per_head() > FEW { TILES } else { WINDOW };
        let windows = || windows(tiles.clone(), of);
        let next = if goes_on { self.seen(c + 1).map(|seen| tiles_of(&seen)) } else { None };
        // Tiles that are asked for while those of a window are read: the next ones; where tiles are expanded, and all of this chunk
        // are in their buffers, those of the next chunk as they are stored.
        let bytes = |tiles: &[&'_ [F::Raw]]| Ahead::of(tiles.iter().map(|tile| bytemuck::cast_slice(tile)));
        let of_next = |window: Range<usize>| {
            let next = next.clone()?;
            Some((window.start.max(next.start)..window.end.min(next.end)).map(|t| (c + 1) * TILES + t))
        };
        let ahead_of_k = |window: &Range<usize>| match window.end == tiles.end {
            _ if context.turns::<F>() => Ahead::of(of_next(window.clone())?.map(|t| context.stored_k(t))),
            false => bytes(&chunk.k[window.end..(window.end + WINDOW).min(tiles.end)]),
            true => bytes(&chunk.v[windows().next()?]),
        };
        let ahead_of_v = |window: &Range<usize>| match window.end == tiles.end {
            _ if context.turns::<F>() => Ahead::of(of_next(window.clone())?.map(|t| context.stored_v(t))),
            false => bytes(&chunk.v[window.end..(window.end + WINDOW).min(tiles.end)]),
            true => Ahead::of(of_next(self::windows(next.clone()?, of).next()?)?.map(|t| context.stored_k(t))),
        };
        let pass = if self.heads.len() > 1 { registers.len() } else { 1 };
        // Several passes are of one head in one window.
        let mut has_joined = None;
        for registers in registers.chunks(pass.max(1)) {
            let (start, end) = (registers[0].first, registers.last().map_or(0, |r| r.first + r.m));
            scores.resize(end - start);
            weights.resize(end - start + F::SLACK);
            let asks = of == WINDOW && start == 0;
            F::with_scores(s, both, self.per_head(), self.view.layout.k_dim, |shape| {
                for window in windows() {
                    let seen = |r: &RegisterTile| {
                        let any = tiles_of(&r.shared.any);
                        window.start.max(any.start)..window.end.min(any.end)
                    };
                    let mut ahead = if asks { ahead_of_k(&window) } else { None };
                    if let Some(ahead) = &mut ahead {
                        let steps = |r: &RegisterTile| F::score_steps::<S>(r.m, seen(r).len(), steps * F::STEP);
                        ahead.over(registers.iter().map(steps).sum());
                    }
                    for r in registers.iter().filter(|r| !seen(r).is_empty()) {
                        let queries = &queries[r.first * steps..(r.first + r.m + F::SLACK) * steps];
                        let scores = &mut scores[r.first - start..][..r.m];
                        F::scores(s, shape, chunk.head(r.head), seen(r), queries, scores, ahead.as_mut());
                    }
                }
            });
            for r in registers {
                let (queries, of) = (r.first..r.first + r.m, r.first - start..r.first - start + r.m);
                let unit = self.weigh(
                    s,
                    c,
                    r,
                    &visible[r.queries()],
                    chunk.head(r.head),
                    &mut scores[of.clone()],
                    &mut weights[of],
                    partial,
                );
                for (query, visible) in queries.zip(&visible[r.queries()]) {
                    observe(query, c * CHUNK, visible.clone(), &scores[query - start], unit);
                }
                F::begin(&mut partial.acc[r.first * width..(r.first + r.m) * width]);
            }
            F::with_mix(s, both, self.per_head(), |shape| {
                for window in windows() {
                    let seen = |r: &RegisterTile| {
                        let any = &r.shared.any;
                        any.start.max(window.start * TILE)..any.end.min(window.end * TILE)
                    };
                    let mut ahead = if asks { ahead_of_v(&window) } else { None };
                    if let Some(ahead) = &mut ahead {
                        let steps = |r: &RegisterTile| F::mix_steps::<S>(r.m, seen(r).len(), width);
                        ahead.over(registers.iter().map(steps).sum());
                    }
                    for r in registers {
                        if has_joined != Some((r.head, window.start)) {
                            F::join(s, chunk.head(r.head), &window, &all, width, joined);
                            has_joined = Some((r.head, window.start));
                        }
                        let tokens = seen(r);
                        if tokens.is_empty() {
                            continue;
                        }
                        let weights = &mut weights[r.first - start..][..r.m + F::SLACK];
                        let acc = &mut partial.acc[r.first * width..(r.first + r.m) * width];
                        let (chunk, ahead) = (chunk.head(r.head), ahead.as_mut());
                        let visible = &visible[r.queries()];
                        F::mix(s, shape, chunk, joined, &tokens, visible, &r.shared, weights, acc, width, ahead);
                    }
                }
            });
            for r in registers {
                F::settle(s, &mut partial.acc[r.first * width..(r.first + r.m) * width]);
            }
        }
    }

    /// The weights of a register tile from its scores (one row for each of its queries, as `weights` has), and with them the
    /// maxima and sums of `partial`. Returns what the scores are to be multiplied by to be in base-2 units.
    #[allow(clippy::too_many_arguments)] // A step of `chunk`, and what it works on.
    fn weigh<S: Simd, F: Multiply>(
        &self,
        s: S,
        c: usize,
        r: &RegisterTile,
        visible: &[Range<usize>],
        chunk: HeadChunk<'_, F>,
        scores: &mut [[f32; CHUNK]],
        weights: &mut [[F::Coef<S>; CHUNK]],
        partial: &mut Partial,
    ) -> f32 {
        let scale = self.scoring.scale * self.view.k_scale(self.heads.start + r.head);
        let queries = r.queries();
        if self.scoring.only_scales() && chunk.scales().is_none() && scale > 0.0 {
            let unit = scale * std::f32::consts::LOG2_E;
            let (max, sum) = (&mut partial.m[queries.clone()], &mut partial.l[queries]);
            s.run(Plain::<S, F> { unit, visible, scores, weights, max, sum });
            return unit;
        }
        for (i, (query, visible)) in queries.zip(visible).enumerate().filter(|(_, (_, seen))| !seen.is_empty()) {
            let weights = Weights::<S, F> {
                chunk,
                scale,
                softcap: self.scoring.softcap,
                bias: self.scoring.bias_of(self.q_head(query), self.q_heads()),
                first_token: c * CHUNK,
                position: self.row(query).position,
                visible: visible.clone(),
                scores: &mut scores[i],
                weights: &mut weights[i],
            };
            (partial.m[query], partial.l[query]) = s.run(weights);
        }
        1.0
    }

    /// Merge chunk `c` into the running state of the queries that see any of it.
    fn merge_chunk<S: Simd>(&self, s: S, c: usize, running: &mut Partial, chunk: &Partial) {
        let (width, rows) = (self.width(), self.rows.len());
        // Whether a row begins with the chunk; none if it does not see it.
        let begins = |row: usize| {
            let chunks = self.rows[row].chunks();
            chunks.contains(&c).then_some(chunks.start == c)
        };
        for head in 0..self.heads.len() {
            let mut next = 0;
            while next < rows {
                let (first, kind) = (next, begins(next));
                next += (first..rows).take_while(|&row| begins(row) == kind).count();
                let queries = (head * rows + first) * self.group..(head * rows + next) * self.group;
                let add = chunk.some(queries.clone(), width);
                let (m, l) = (&mut running.m[queries.clone()], &mut running.l[queries.clone()]);
                let acc = &mut running.acc[queries.start * width..queries.end * width];
                match kind {
                    None => {}
                    Some(true) => {
                        m.copy_from_slice(add.m);
                        l.copy_from_slice(add.l);
                        acc.copy_from_slice(add.acc);
                    }
                    Some(false) => s.run(Merge { m, l, acc, add }),
                }
            }
        }
    }
}

/// `tiles` by up to `of` at a time, cut at multiples of it.
fn windows(tiles: Range<usize>, of: usize) -> impl Iterator<Item = Range<usize>> {
    (tiles.start / of..tiles.end.div_ceil(of)).map(move |i| (i * of).max(tiles.start)..((i + 1) * of).min(tiles.end))
}

/// The part of `tokens` that lies in chunk `c`, counted from the chunk's first token; it may be empty.
pub fn within(c: usize, tokens: Range<usize>) -> Range<usize> {
    let place = |token: usize| token.saturating_sub(c * CHUNK).min(CHUNK);
    place(tokens.start)..place(tokens.end)
}
