//! One tile of queries against the context of one KV head.
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
#![forbid(unsafe_code)]

use std::ops::Range;

use super::chunk::{Buffers, CHUNK, Chunk, Context, NEXT_TILES, TILES};
use super::scoring::Scoring;
use super::softmax::{Merge, Weights};
use super::tree::Path;
use crate::simd::{Format, LANES, Simd, Work, tile as kernel};
use crate::storage::TILE;

/// The largest number of queries that go through one register tile together.
const MAX_M: usize = 8;

/// Gets a query, the first token of a chunk, what of it the query sees (counted from that token), and the chunk's scores in
/// base-2 units as the softmax takes them.
pub trait Observe: FnMut(usize, usize, Range<usize>, &[f32; CHUNK]) {}
impl<T: FnMut(usize, usize, Range<usize>, &[f32; CHUNK])> Observe for T {}

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

/// Rows that read the same tiles of one KV head; a query is one of the head's query heads in one row.
#[derive(Clone, Copy)]
pub struct QueryTile<'a> {
    /// K and V of the head.
    pub context: Context<'a>,
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
    acc: Vec<f32>,
}

impl Partial {
    /// Room for `queries`, each `width` wide. What is in it may be anything.
    fn resize(&mut self, queries: usize, width: usize) {
        self.m.resize(queries, 0.0);
        self.l.resize(queries, 0.0);
        self.acc.resize(queries * width, 0.0);
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

/// Buffers of one thread, for one tile after the other.
pub struct Scratch<S: Simd, F: Format> {
    /// Packed queries, register tile after register tile, each `[steps][M]`.
    queries: Vec<F::Coef<S>>,
    scores: Vec<[f32; CHUNK]>,
    weights: Vec<[F::Coef<S>; CHUNK]>,
    buffers: Buffers<F>,
    running: Partial,
    partial: Partial,
}

impl<S: Simd, F: Format> Default for Scratch<S, F> {
    fn default() -> Self {
        Self {
            queries: Vec::new(),
            scores: vec![[0.0; CHUNK]; MAX_M],
            weights: vec![[bytemuck::Zeroable::zeroed(); CHUNK]; MAX_M],
            buffers: Buffers::default(),
            running: Partial::default(),
            partial: Partial::default(),
        }
    }
}

/// `$body` with constants M, B and D for the register tile of `$m` queries: B K tiles and D V vectors at a time, so
/// that the accumulators fill the registers and hide the latency of the products. A single query takes ONE V vectors.
macro_rules! with_tile {
    ($accumulators:expr, $m:expr, |$M:ident, $B:ident, $D:ident, $ONE:ident| $body:expr) => {
        match ($accumulators, $m) {
            (16, 8) => with_tile!(@ $M 8, $B 2, $D 2, $ONE 8, $body),
            (16, 6) => with_tile!(@ $M 6, $B 2, $D 2, $ONE 8, $body),
            (16, 4) => with_tile!(@ $M 4, $B 4, $D 4, $ONE 8, $body),
            (16, 3) => with_tile!(@ $M 3, $B 4, $D 4, $ONE 8, $body),
            (16, 2) => with_tile!(@ $M 2, $B 4, $D 4, $ONE 8, $body),
            (16, _) => with_tile!(@ $M 1, $B 8, $D 8, $ONE 8, $body),
            (4, 4) => with_tile!(@ $M 4, $B 1, $D 1, $ONE 4, $body),
            (4, 2) => with_tile!(@ $M 2, $B 2, $D 2, $ONE 4, $body),
            (4, _) => with_tile!(@ $M 1, $B 4, $D 4, $ONE 4, $body),
            _ => with_tile!(@ $M 1, $B 1, $D 1, $ONE 1, $body),
        }
    };
    (@ $M:ident $m:literal, $B:ident $b:literal, $D:ident $d:literal, $ONE:ident $one:literal, $body:expr) => {{
        const $M: usize = $m;
        const $B: usize = $b;
        const $D: usize = $d;
        const $ONE: usize = $one;
        $body
    }};
}

/// The next register tile for `left` queries.
fn tile_size<S: Simd>(left: usize) -> usize {
    let sizes: &[usize] = match S::ACCUMULATORS {
        16 => &[8, 6, 4, 3, 2, 1],
        4 => &[4, 2, 1],
        _ => &[1],
    };
    sizes.iter().copied().find(|&m| m <= left).unwrap_or(1)
}

impl QueryTile<'_> {
    /// The chunks that any row sees.
    pub fn chunks(&self) -> Range<usize> {
        let of = |row: &Row<'_>| row.chunks();
        let start = self.rows.iter().map(|row| of(row).start).min().unwrap_or(0);
        start..self.rows.iter().map(|row| of(row).end).max().unwrap_or(0)
    }

    fn num_queries(&self) -> usize {
        self.rows.len() * self.group
    }

    fn width(&self) -> usize {
        self.context.view.layout.width()
    }

    fn q_heads(&self) -> usize {
        self.group * self.context.view.layout.num_kv_heads
    }

    /// The row of a query, and its query head.
    fn query(&self, query: usize) -> (&Row<'_>, usize) {
        (&self.rows[query / self.group], self.context.head * self.group + query % self.group)
    }

    /// Attend over the whole context; `finish` gets each query's row, head within the group, and state.
    pub fn attend<S: Simd, F: Format>(
        &self,
        s: S,
        scratch: &mut Scratch<S, F>,
        mut finish: impl FnMut(usize, usize, State<'_>),
    ) {
        let mut running = std::mem::take(&mut scratch.running);
        self.run_of_chunks(s, scratch, self.chunks(), &mut running, |_, _, _, _| {});
        for query in 0..self.num_queries() {
            finish(query / self.group, query % self.group, running.of(query, self.width()));
        }
        scratch.running = running;
    }

    /// The state of every query over `chunks`, merged in order, from the first chunk that its row sees.
    pub fn run_of_chunks<S: Simd, F: Format>(
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
        for c in chunks.clone() {
            if c == chunks.start {
                self.chunk(s, scratch, c, running, &mut observe);
            } else {
                self.chunk(s, scratch, c, &mut partial, &mut observe);
                self.merge_chunk(s, c, running, &partial);
            }
        }
        scratch.partial = partial;
    }

    /// The partial results of the chunks from `first` on, one for each of `partials`.
    pub fn some_chunks<S: Simd, F: Format>(
        &self,
        s: S,
        scratch: &mut Scratch<S, F>,
        first: usize,
        partials: &mut [Partial],
    ) {
        self.pack(s, scratch);
        for (i, partial) in partials.iter_mut().enumerate() {
            partial.resize(self.num_queries(), self.width());
            self.chunk(s, scratch, first + i, partial, &mut |_, _, _, _| {});
        }
    }

    /// Pack the queries as the kernels read them.
    fn pack<S: Simd, F: Format>(&self, s: S, scratch: &mut Scratch<S, F>) {
        let (n, dim) = (self.num_queries(), self.context.view.layout.k_dim);
        let steps = dim / F::STEP;
        scratch.queries.resize(n * steps, bytemuck::Zeroable::zeroed());
        self.context.prepare(&mut scratch.buffers);
        let mut first = 0;
        while first < n {
            let m = tile_size::<S>(n - first);
            for query in 0..m {
                let (row, head) = self.query(first + query);
                let packed = &mut scratch.queries[first * steps..(first + m) * steps];
                s.run(Pack::<S, F> { q: &row.q[head * dim..][..dim], packed, m, query });
            }
            first += m;
        }
    }

    /// Tokens of chunk `c` that `query`'s row sees, counted within the chunk.
    fn visible(&self, c: usize, query: usize) -> Range<usize> {
        within(c, self.rows[query / self.group].sees.clone())
    }

    /// Softmax state of every query over the tokens of chunk `c` that its row sees; of no meaning where it sees none.
    fn chunk<S: Simd, F: Format>(
        &self,
        s: S,
        scratch: &mut Scratch<S, F>,
        c: usize,
        partial: &mut Partial,
        observe: &mut impl Observe,
    ) {
        let n = self.num_queries();
        let steps = self.context.view.layout.k_dim / F::STEP;
        let seen = self.rows.iter().map(|row| within(c, row.sees.clone())).filter(|v| !v.is_empty());
        let Some(seen) = seen.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)) else { return };
        let Scratch { queries, scores, weights, buffers, .. } = scratch;
        let path = match self.rows {
            [row] => row.path.as_ref(),
            _ => None,
        };
        let chunk = self.context.chunk(s, c, tiles_of(&seen), path, buffers);
        let mut first = 0;
        while first < n {
            let m = tile_size::<S>(n - first);
            with_tile!(S::ACCUMULATORS, m, |M, B, D, ONE| {
                let queries = queries[first * steps..(first + M) * steps].as_chunks::<M>().0;
                self.register_tile::<S, F, M, B, D, ONE>(s, &chunk, c, first, queries, scores, weights, partial);
                for m in 0..M {
                    observe(first + m, c * CHUNK, self.visible(c, first + m), &scores[m]);
                }
            });
            first += m;
        }
    }

    #[allow(clippy::too_many_arguments)] // As the kernels: a struct would only rename them.
    fn register_tile<S: Simd, F: Format, const M: usize, const B: usize, const D: usize, const ONE: usize>(
        &self,
        s: S,
        chunk: &Chunk<'_, F>,
        c: usize,
        first: usize,
        queries: &[[F::Coef<S>; M]],
        scores: &mut [[f32; CHUNK]],
        weights: &mut [[F::Coef<S>; CHUNK]],
        partial: &mut Partial,
    ) {
        let visible: [Range<usize>; M] = std::array::from_fn(|m| self.visible(c, first + m));
        let Some(Shared { any, all }) = shared(&visible) else { return };

        // Later queries find the tiles in the cache.
        let prefetch = first == 0;
        s.run(Scores::<S, F, M, B> { chunk, tiles: tiles_of(&any), queries, scores, prefetch });
        let k_scale = self.context.view.k_scale(self.context.head);
        for m in 0..M {
            if !visible[m].is_empty() {
                let (scores, weights) = (&mut scores[m], &mut weights[m]);
                let (row, head) = self.query(first + m);
                let bias = self.scoring.bias_of(head, self.q_heads());
                let (scale, softcap) = (self.scoring.scale * k_scale, self.scoring.softcap);
                let (first_token, position, visible) = (c * CHUNK, row.position, visible[m].clone());
                let weights =
                    Weights::<S, F> { chunk, scale, softcap, bias, first_token, position, visible, scores, weights };
                (partial.m[first + m], partial.l[first + m]) = s.run(weights);
            }
        }
        let weights: &[[F::Coef<S>; CHUNK]; M] = weights.first_chunk().expect("M rows of weights");
        let width = self.width();
        let acc = &mut partial.acc[first * width..(first + M) * width];
        acc.fill(0.0);
        // The tokens that all rows see go together; what lies before and behind, each row takes alone.
        for (m, acc) in acc.chunks_exact_mut(width).enumerate() {
            let own = std::array::from_ref(&weights[m]);
            let before = visible[m].start..visible[m].end.min(all.start);
            if !before.is_empty() {
                s.run(Mix::<S, F, 1, ONE> { chunk, tokens: before, width, weights: own, acc, prefetch: false });
            }
        }
        if !all.is_empty() {
            s.run(Mix::<S, F, M, D> { chunk, tokens: all.clone(), width, weights, acc, prefetch });
        }
        for (m, acc) in acc.chunks_exact_mut(width).enumerate() {
            let own = std::array::from_ref(&weights[m]);
            let behind = visible[m].start.max(all.end)..visible[m].end;
            if !behind.is_empty() {
                s.run(Mix::<S, F, 1, ONE> { chunk, tokens: behind, width, weights: own, acc, prefetch: false });
            }
        }
    }

    /// Merge chunk `c` into the running state of the queries that see any of it.
    fn merge_chunk<S: Simd>(&self, s: S, c: usize, running: &mut Partial, chunk: &Partial) {
        let width = self.width();
        for i in 0..self.num_queries() {
            if !self.rows[i / self.group].chunks().contains(&c) {
                continue;
            }
            let (m, l, acc) = (&mut running.m[i], &mut running.l[i], &mut running.acc[i * width..][..width]);
            let add = chunk.of(i, width);
            if self.rows[i / self.group].chunks().start == c {
                (*m, *l) = (add.m, add.l);
                acc.copy_from_slice(add.acc);
            } else {
                s.run(Merge { m, l, acc, add });
            }
        }
    }
}

/// One query among the `m` of a register tile.
struct Pack<'a, S: Simd, F: Format> {
    q: &'a [f32],
    /// `[steps][m]`
    packed: &'a mut [F::Coef<S>],
    m: usize,
    query: usize,
}

impl<S: Simd, F: Format> Work<S> for Pack<'_, S, F> {
    type Output = ();

    #[inline(always)]
    fn run(self, s: S) {
        let steps = self.packed.chunks_exact_mut(self.m * LANES / F::STEP);
        let mut coefs = [bytemuck::Zeroable::zeroed(); LANES];
        let whole = steps.len();
        for (q, packed) in self.q.chunks_exact(LANES).zip(steps) {
            F::coefs(s, q, &mut coefs);
            for (i, &coef) in coefs[..LANES / F::STEP].iter().enumerate() {
                packed[i * self.m + self.query] = coef;
            }
        }
        let (q, packed) = (&self.q[whole * LANES..], &mut self.packed[whole * self.m * LANES / F::STEP..]);
        F::coefs(s, q, &mut coefs);
        for (i, &coef) in coefs[..q.len() / F::STEP].iter().enumerate() {
            packed[i * self.m + self.query] = coef;
        }
    }
}

/// The part of `tokens` that lies in chunk `c`, counted from the chunk's first token; it may be empty.
pub fn within(c: usize, tokens: Range<usize>) -> Range<usize> {
    let place = |token: usize| token.saturating_sub(c * CHUNK).min(CHUNK);
    place(tokens.start)..place(tokens.end)
}

/// The tiles that `tokens` lie in.
pub fn tiles_of(tokens: &Range<usize>) -> Range<usize> {
    tokens.start / TILE..tokens.end.div_ceil(TILE)
}

/// What several rows see of a chunk.
struct Shared {
    /// From the first token that any row sees to the last.
    any: Range<usize>,
    /// Tokens that all rows see that see any. Where rows differ it ends at a tile's border, so that nobody's first or
    /// last tile is cut in two; `CHUNK..CHUNK` if there are none.
    all: Range<usize>,
}

/// `None` if no row sees any token.
fn shared(visible: &[Range<usize>]) -> Option<Shared> {
    let mut seeing = visible.iter().filter(|v| !v.is_empty()).cloned();
    let first = seeing.next()?;
    let (mut any, mut all) = (first.clone(), first);
    for v in seeing {
        any = any.start.min(v.start)..any.end.max(v.end);
        all = all.start.max(v.start)..all.end.min(v.end);
    }
    let start = if any.start == all.start { all.start } else { all.start.next_multiple_of(TILE) };
    let end = if any.end == all.end { all.end } else { all.end / TILE * TILE };
    Some(Shared { any, all: if start < end { start..end } else { CHUNK..CHUNK } })
}

// Each piece of work below is compiled once per level, format and tile size, as a function of its own.

/// `scores[m][token] = q . k` for the tiles `tiles` of a chunk.
struct Scores<'a, S: Simd, F: Format, const M: usize, const B: usize> {
    chunk: &'a Chunk<'a, F>,
    tiles: Range<usize>,
    queries: &'a [[F::Coef<S>; M]],
    scores: &'a mut [[f32; CHUNK]],
    prefetch: bool,
}

impl<S: Simd, F: Format, const M: usize, const B: usize> Work<S> for Scores<'_, S, F, M, B> {
    type Output = ();

    #[inline(always)]
    fn run(mut self, s: S) {
        let mut t = self.tiles.start;
        while t + B <= self.tiles.end {
            let panels = self.chunk.k[t..].first_chunk().expect("B panels");
            let acc = kernel::dot::<S, F, M, B>(s, *panels, self.queries, self.ahead(t + B));
            for m in 0..M {
                for b in 0..B {
                    self.store(s, t + b, m, acc[m][b]);
                }
            }
            t += B;
        }
        while t < self.tiles.end {
            let acc = kernel::dot::<S, F, M, 1>(s, [self.chunk.k[t]], self.queries, self.ahead(t + 1));
            for m in 0..M {
                self.store(s, t, m, acc[m][0]);
            }
            t += 1;
        }
    }
}

impl<S: Simd, F: Format, const M: usize, const B: usize> Scores<'_, S, F, M, B> {
    #[inline(always)]
    fn store(&mut self, s: S, t: usize, m: usize, x: S::F32) {
        s.store(x, self.scores[m][t * TILE..].first_chunk_mut().expect("16 scores"));
    }

    /// What is read after this: the K tiles from `next` on, and behind the last one V.
    #[inline(always)]
    fn ahead<const N: usize>(&self, next: usize) -> Option<[*const F::Raw; N]> {
        let (k, v) = (&self.chunk.k[..self.tiles.end], &self.chunk.v[self.tiles.start..self.tiles.end]);
        let tile = |i: usize| k.get(next + i).or_else(|| v.get(i)).map_or(std::ptr::null(), |tile| tile.as_ptr());
        self.prefetch.then(|| std::array::from_fn(tile))
    }
}

/// `acc[m] += sum of weights[m][token] * v[token]` over `tokens` of a chunk; `acc` is `[M, width]`.
struct Mix<'a, S: Simd, F: Format, const M: usize, const D: usize> {
    chunk: &'a Chunk<'a, F>,
    tokens: Range<usize>,
    width: usize,
    weights: &'a [[F::Coef<S>; CHUNK]; M],
    acc: &'a mut [f32],
    prefetch: bool,
}

impl<S: Simd, F: Format, const M: usize, const D: usize> Work<S> for Mix<'_, S, F, M, D> {
    type Output = ();

    #[inline(always)]
    fn run(mut self, s: S) {
        let vectors = self.width / LANES;
        let mut d = 0;
        while d + D <= vectors {
            self.columns::<D>(s, d);
            d += D;
        }
        while D > 4 && d + 4 <= vectors {
            self.columns::<4>(s, d);
            d += 4;
        }
        while d < vectors {
            self.columns::<1>(s, d);
            d += 1;
        }
    }
}

impl<S: Simd, F: Format, const M: usize, const D: usize> Mix<'_, S, F, M, D> {
    /// The vectors `d..d + N` of the head's dimensions.
    #[inline(always)]
    fn columns<const N: usize>(&mut self, s: S, d: usize) {
        let (width, vectors) = (self.width, self.width / LANES);
        let mut sums = [[s.splat(0.0); N]; M];
        for m in 0..M {
            for i in 0..N {
                sums[m][i] = s.load(self.acc[m * width + (d + i) * LANES..].first_chunk().expect("16 lanes"));
            }
        }
        for t in tiles_of(&self.tokens) {
            let (start, end) = (self.tokens.start.max(t * TILE), self.tokens.end.min((t + 1) * TILE));
            let (first, last) = (start / F::STEP, end.div_ceil(F::STEP));
            let rows = &self.chunk.v[t][(first - t * TILE / F::STEP) * vectors + d..];
            let halves = (!start.is_multiple_of(F::STEP), !end.is_multiple_of(F::STEP));
            let ahead = self.ahead(t, d, N);
            kernel::mix::<S, F, M, N, CHUNK>(s, &mut sums, rows, vectors, self.weights, ahead, first, last, halves);
            if self.prefetch && d + N >= vectors {
                self.next_chunk(s, t);
            }
        }
        for m in 0..M {
            for i in 0..N {
                s.store(sums[m][i], self.acc[m * width + (d + i) * LANES..].first_chunk_mut().expect("16 lanes"));
            }
        }
    }

    /// What is read after tile `t` of the vectors `d..d + n`: the same vectors of the next tile, and behind the last tile
    /// the next vectors of the first.
    #[inline(always)]
    fn ahead(&self, t: usize, d: usize, n: usize) -> Option<*const F::Raw> {
        let tiles = tiles_of(&self.tokens);
        let (tile, d) = if t + 1 < tiles.end { (t + 1, d) } else { (tiles.start, d + n) };
        self.prefetch.then(|| self.chunk.v[tile].as_ptr().wrapping_add(d))
    }

    /// Ask for a sixteenth of the next chunk's first K tiles.
    #[inline(always)]
    fn next_chunk(&self, s: S, t: usize) {
        const PARTS: usize = TILES / NEXT_TILES;
        let tile = self.chunk.next_k[t / PARTS];
        for line in tile.chunks(tile.len().div_ceil(PARTS).max(1)).nth(t % PARTS).into_iter().flatten() {
            s.prefetch(line);
        }
    }
}
