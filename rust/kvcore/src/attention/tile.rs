//! One tile of query rows against the context of one KV head.
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

use super::chunk::{Buffers, CHUNK, Chunk, Context};
use super::mask::Mask;
use crate::simd::{Format, LANES, Simd, Work, math, tile as kernel};
use crate::storage::TILE;

/// The largest number of queries that go through one register tile together.
const MAX_M: usize = 8;

/// Queries of consecutive rows that share one KV head.
#[derive(Clone, Copy)]
pub struct RowTile<'a> {
    /// K and V of the head.
    pub context: Context<'a>,
    /// Query heads for each KV head.
    pub group: usize,
    /// Position of the first row.
    pub start: usize,
    /// Number of rows.
    pub rows: usize,
    /// Which tokens each row sees.
    pub mask: Mask,
    /// Multiplies the scores.
    pub scale: f32,
    /// `[rows, q heads, k_dim]`, all heads.
    pub q: &'a [f32],
}

/// Softmax state of all queries of a tile over some tokens: maximum, sum of weights and weighted sum of V.
#[derive(Clone, Default)]
pub struct Partial {
    m: Vec<f32>,
    l: Vec<f32>,
    acc: Vec<f32>,
}

/// Buffers of one task.
struct Scratch<F: Format> {
    /// Packed queries, register tile after register tile, each `[steps][M]`.
    queries: Vec<F::Coef>,
    scores: Vec<[f32; CHUNK]>,
    weights: Vec<[F::Coef; CHUNK]>,
    buffers: Buffers<F>,
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

impl RowTile<'_> {
    /// All tokens that any row sees.
    pub fn sees(&self) -> Range<usize> {
        self.mask.sees(self.start).start..self.mask.sees(self.start + self.rows - 1).end
    }

    /// The chunks of these tokens.
    pub fn chunks(&self) -> Range<usize> {
        let sees = self.sees();
        sees.start / CHUNK..sees.end.div_ceil(CHUNK)
    }

    fn num_queries(&self) -> usize {
        self.rows * self.group
    }

    fn width(&self) -> usize {
        self.context.view.layout.width()
    }

    /// Attend over the whole context; `out` has one `[group, v_dim]` slice for each row.
    pub fn attend<S: Simd, F: Format>(&self, s: S, out: Vec<&mut [f32]>) {
        let mut scratch = self.scratch::<S, F>(s);
        let mut running = self.partial();
        let mut partial = self.partial();
        let chunks = self.chunks();
        self.chunk(s, &mut scratch, chunks.start, &mut running);
        for c in chunks.skip(1) {
            self.chunk(s, &mut scratch, c, &mut partial);
            self.merge_chunk(s, c, &mut running, &partial);
        }
        self.finish(&running, out);
    }

    /// The partial results of the chunks from `first` on, one for each of `partials`.
    pub fn some_chunks<S: Simd, F: Format>(&self, s: S, first: usize, partials: &mut [Partial]) {
        let mut scratch = self.scratch::<S, F>(s);
        for (i, partial) in partials.iter_mut().enumerate() {
            *partial = self.partial();
            self.chunk(s, &mut scratch, first + i, partial);
        }
    }

    /// Merge the partial results of all chunks, in order, exactly as [`Self::attend`] does.
    pub fn merge<S: Simd>(&self, s: S, partials: Vec<Partial>, out: Vec<&mut [f32]>) {
        let mut chunks = self.chunks().zip(partials);
        let Some((_, mut running)) = chunks.next() else { return };
        for (c, partial) in chunks {
            self.merge_chunk(s, c, &mut running, &partial);
        }
        self.finish(&running, out);
    }

    fn partial(&self) -> Partial {
        let n = self.num_queries();
        Partial { m: vec![0.0; n], l: vec![0.0; n], acc: vec![0.0; n * self.width()] }
    }

    /// Pack the queries as the kernels read them.
    fn scratch<S: Simd, F: Format>(&self, _: S) -> Scratch<F> {
        let (n, dim) = (self.num_queries(), self.context.view.layout.k_dim);
        let row_width = self.q.len() / self.rows;
        let mut queries = Vec::with_capacity(n * dim / F::STEP);
        let mut first = 0;
        while first < n {
            let m = tile_size::<S>(n - first);
            for i in (0..dim).step_by(F::STEP) {
                for query in first..first + m {
                    let (row, head) = (query / self.group, self.context.head * self.group + query % self.group);
                    queries.push(F::coef(&self.q[row * row_width + head * dim + i..][..F::STEP]));
                }
            }
            first += m;
        }
        let zero: F::Coef = bytemuck::Zeroable::zeroed();
        Scratch {
            queries,
            scores: vec![[0.0; CHUNK]; MAX_M],
            weights: vec![[zero; CHUNK]; MAX_M],
            buffers: self.context.buffers(),
        }
    }

    /// Tokens of chunk `c` that `query`'s row sees, counted within the chunk.
    fn visible(&self, c: usize, query: usize) -> Range<usize> {
        within(c, self.mask.sees(self.start + query / self.group))
    }

    /// Softmax state of every query over the tokens of chunk `c` that its row sees; of no meaning where it sees none.
    fn chunk<S: Simd, F: Format>(&self, s: S, scratch: &mut Scratch<F>, c: usize, partial: &mut Partial) {
        let n = self.num_queries();
        let steps = self.context.view.layout.k_dim / F::STEP;
        let tiles = tiles_of(&within(c, self.sees()));
        let Scratch { queries, scores, weights, buffers } = scratch;
        let chunk = self.context.chunk(s, c, tiles, buffers);
        let mut first = 0;
        while first < n {
            let m = tile_size::<S>(n - first);
            with_tile!(S::ACCUMULATORS, m, |M, B, D, ONE| {
                let queries = queries[first * steps..(first + M) * steps].as_chunks::<M>().0;
                self.register_tile::<S, F, M, B, D, ONE>(s, &chunk, c, first, queries, scores, weights, partial);
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
        queries: &[[F::Coef; M]],
        scores: &mut [[f32; CHUNK]],
        weights: &mut [[F::Coef; CHUNK]],
        partial: &mut Partial,
    ) {
        let visible: [Range<usize>; M] = std::array::from_fn(|m| self.visible(c, first + m));
        let Some(Shared { any, all }) = shared(&visible) else { return };

        s.run(Scores::<F, M, B> { chunk, tiles: tiles_of(&any), queries, scores });
        let scale = self.scale * self.context.view.k_scale(self.context.head);
        for m in 0..M {
            if !visible[m].is_empty() {
                let (scores, weights) = (&mut scores[m], &mut weights[m]);
                let (max, sum) = s.run(Weights { chunk, scale, visible: visible[m].clone(), scores, weights });
                partial.m[first + m] = max;
                partial.l[first + m] = sum;
            }
        }
        let weights: &[[F::Coef; CHUNK]; M] = weights.first_chunk().expect("M rows of weights");
        let width = self.width();
        let acc = &mut partial.acc[first * width..(first + M) * width];
        acc.fill(0.0);
        // The tokens that all rows see go together; what lies before and behind, each row takes alone.
        for (m, acc) in acc.chunks_exact_mut(width).enumerate() {
            let own = std::array::from_ref(&weights[m]);
            let before = visible[m].start..visible[m].end.min(all.start);
            if !before.is_empty() {
                s.run(Mix::<F, 1, ONE> { chunk, tokens: before, width, weights: own, acc });
            }
        }
        if !all.is_empty() {
            s.run(Mix::<F, M, D> { chunk, tokens: all.clone(), width, weights, acc });
        }
        for (m, acc) in acc.chunks_exact_mut(width).enumerate() {
            let own = std::array::from_ref(&weights[m]);
            let behind = visible[m].start.max(all.end)..visible[m].end;
            if !behind.is_empty() {
                s.run(Mix::<F, 1, ONE> { chunk, tokens: behind, width, weights: own, acc });
            }
        }
    }

    /// Merge chunk `c` into the running state of the queries that see any of it.
    fn merge_chunk<S: Simd>(&self, s: S, c: usize, running: &mut Partial, chunk: &Partial) {
        let width = self.width();
        for i in 0..self.num_queries() {
            let sees = self.mask.sees(self.start + i / self.group);
            if within(c, sees.clone()).is_empty() {
                continue;
            }
            let (acc, add) = (&mut running.acc[i * width..][..width], &chunk.acc[i * width..][..width]);
            let (m, l) = (&mut running.m[i], &mut running.l[i]);
            if sees.start / CHUNK == c {
                (*m, *l) = (chunk.m[i], chunk.l[i]);
                acc.copy_from_slice(add);
            } else {
                s.run(Merge { m, l, acc, add_m: chunk.m[i], add_l: chunk.l[i], add });
            }
        }
    }

    /// `out = acc / l`, each row's queries side by side.
    fn finish(&self, state: &Partial, out: Vec<&mut [f32]>) {
        let (view, width) = (self.context.view, self.width());
        let scale = view.v_scale(self.context.head);
        for (row, out) in out.into_iter().enumerate() {
            for (head, out) in out.chunks_exact_mut(view.layout.v_dim).enumerate() {
                let i = row * self.group + head;
                for (out, acc) in out.iter_mut().zip(&state.acc[i * width..]) {
                    *out = acc / state.l[i] * scale;
                }
            }
        }
    }
}

/// The part of `tokens` that lies in chunk `c`, counted from the chunk's first token; it may be empty.
fn within(c: usize, tokens: Range<usize>) -> Range<usize> {
    let place = |token: usize| token.saturating_sub(c * CHUNK).min(CHUNK);
    place(tokens.start)..place(tokens.end)
}

/// The tiles that `tokens` lie in.
fn tiles_of(tokens: &Range<usize>) -> Range<usize> {
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

/// `None` if no row sees any token. Both ends ascend with the rows.
fn shared(visible: &[Range<usize>]) -> Option<Shared> {
    let mut seeing = visible.iter().filter(|v| !v.is_empty());
    let first = seeing.next()?;
    let last = seeing.next_back().unwrap_or(first);
    let start = if first.start == last.start { first.start } else { last.start.next_multiple_of(TILE) };
    let end = if first.end == last.end { first.end } else { first.end / TILE * TILE };
    Some(Shared { any: first.start..last.end, all: if start < end { start..end } else { CHUNK..CHUNK } })
}

// Each piece of work below is compiled once per level, format and tile size, as a function of its own.

/// `scores[m][token] = q . k` for the tiles `tiles` of a chunk.
struct Scores<'a, F: Format, const M: usize, const B: usize> {
    chunk: &'a Chunk<'a, F>,
    tiles: Range<usize>,
    queries: &'a [[F::Coef; M]],
    scores: &'a mut [[f32; CHUNK]],
}

impl<F: Format, const M: usize, const B: usize> Work for Scores<'_, F, M, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut store = |t: usize, m: usize, x: S::F32| {
            s.store(x, self.scores[m][t * TILE..].first_chunk_mut().expect("16 scores"));
        };
        let mut t = self.tiles.start;
        while t + B <= self.tiles.end {
            let panels = self.chunk.k[t..].first_chunk().expect("B panels");
            let acc = kernel::dot::<S, F, M, B>(s, *panels, self.queries);
            for m in 0..M {
                for b in 0..B {
                    store(t + b, m, acc[m][b]);
                }
            }
            t += B;
        }
        while t < self.tiles.end {
            let acc = kernel::dot::<S, F, M, 1>(s, [self.chunk.k[t]], self.queries);
            for m in 0..M {
                store(t, m, acc[m][0]);
            }
            t += 1;
        }
    }
}

/// Lanes of tile `t` that are `visible` from `x`, the others from `other`.
#[inline(always)]
fn visible_lanes<S: Simd>(s: S, visible: &Range<usize>, t: usize, x: S::F32, other: S::F32) -> S::F32 {
    let x = s.first_lanes(visible.end - t * TILE, x, other);
    if t * TILE < visible.start { s.first_lanes(visible.start - t * TILE, other, x) } else { x }
}

/// Scores to softmax weights `exp(scale * score - max)` for the `visible` tokens. Returns the maximum (of the scores in
/// base-2 units) and the sum of the weights as they are multiplied, that is, after rounding. Where tokens have scales,
/// K's multiply the scores and V's the weights, which are rounded with them; the sum is that of the weights alone.
struct Weights<'a, F: Format> {
    chunk: &'a Chunk<'a, F>,
    scale: f32,
    visible: Range<usize>,
    scores: &'a mut [f32; CHUNK],
    weights: &'a mut [F::Coef; CHUNK],
}

impl<F: Format> Work for Weights<'_, F> {
    type Output = (f32, f32);

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> (f32, f32) {
        let scale = s.splat(self.scale * std::f32::consts::LOG2_E);
        let (zero, lowest) = (s.splat(0.0), s.splat(f32::NEG_INFINITY));
        let (visible, tiles) = (&self.visible, tiles_of(&self.visible));
        let scores = self.scores.as_chunks_mut::<LANES>().0;
        let scales = self.chunk.scales.as_ref();
        let mut max = lowest;
        for t in tiles.clone() {
            let mut x = s.mul(s.load(&scores[t]), scale);
            if let Some(scales) = scales {
                x = s.mul(x, s.load(scales.k[t]));
            }
            x = visible_lanes(s, visible, t, x, lowest);
            max = s.max(max, x);
            s.store(x, &mut scores[t]);
        }
        let max = s.reduce_max(max);
        let mut sum = zero;
        let outs = self.weights.chunks_exact_mut(TILE / F::STEP).skip(tiles.start);
        for (t, out) in tiles.zip(outs) {
            let mut x = math::exp2(s, s.sub(s.load(&scores[t]), s.splat(max)));
            if let Some(scales) = scales {
                sum = s.add(sum, x);
                // Zero times the scale of a stale slot, which may be anything, is not zero.
                x = F::round_coefs(s, visible_lanes(s, visible, t, s.mul(x, s.load(scales.v[t])), zero));
            } else {
                x = F::round_coefs(s, x);
                sum = s.add(sum, x);
            }
            F::store_coefs(s, x, out);
        }
        (max, s.reduce_sum(sum))
    }
}

/// `acc[m] += sum of weights[m][token] * v[token]` over `tokens` of a chunk; `acc` is `[M, width]`.
struct Mix<'a, F: Format, const M: usize, const D: usize> {
    chunk: &'a Chunk<'a, F>,
    tokens: Range<usize>,
    width: usize,
    weights: &'a [[F::Coef; CHUNK]; M],
    acc: &'a mut [f32],
}

impl<F: Format, const M: usize, const D: usize> Work for Mix<'_, F, M, D> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let vectors = self.width / LANES;
        let mut d = 0;
        while d + D <= vectors {
            self.columns::<S, D>(s, d);
            d += D;
        }
        while D > 4 && d + 4 <= vectors {
            self.columns::<S, 4>(s, d);
            d += 4;
        }
        while d < vectors {
            self.columns::<S, 1>(s, d);
            d += 1;
        }
    }
}

impl<F: Format, const M: usize, const D: usize> Mix<'_, F, M, D> {
    /// The vectors `d..d + N` of the head's dimensions.
    #[inline(always)]
    fn columns<S: Simd, const N: usize>(&mut self, s: S, d: usize) {
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
            kernel::mix::<S, F, M, N, CHUNK>(s, &mut sums, rows, vectors, self.weights, first, last, halves);
        }
        for m in 0..M {
            for i in 0..N {
                s.store(sums[m][i], self.acc[m * width + (d + i) * LANES..].first_chunk_mut().expect("16 lanes"));
            }
        }
    }
}

/// One query's running state with one more chunk: both rescaled to the larger maximum.
struct Merge<'a> {
    m: &'a mut f32,
    l: &'a mut f32,
    acc: &'a mut [f32],
    add_m: f32,
    add_l: f32,
    add: &'a [f32],
}

impl Work for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let max = if self.add_m > *self.m { self.add_m } else { *self.m };
        let mut differences = [0.0; LANES];
        (differences[0], differences[1]) = (*self.m - max, self.add_m - max);
        let mut factors = [0.0; LANES];
        s.store(math::exp2(s, s.load(&differences)), &mut factors);
        let (old, new) = (factors[0], factors[1]);
        *self.m = max;
        *self.l = *self.l * old + self.add_l * new;
        for (acc, add) in self.acc.as_chunks_mut::<LANES>().0.iter_mut().zip(self.add.as_chunks::<LANES>().0) {
            let kept = s.mul(s.load(acc), s.splat(old));
            s.store(s.mul_add(s.load(add), s.splat(new), kept), acc);
        }
    }
}
