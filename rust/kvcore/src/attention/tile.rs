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
//! in exactly the tokens it may see, so its bits do not depend on the rows beside it. Stale slots behind the last
//! token are masked by selection (K) or not read (V): they may hold NaN.
#![forbid(unsafe_code)]

use crate::paging::BlockId;
use crate::simd::{Format, LANES, Simd, Work, math, tile as kernel};
use crate::storage::{LayerView, TILE};

/// Tokens of one chunk of the softmax.
pub const CHUNK: usize = 256;

/// The largest number of queries that go through one register tile together.
const MAX_M: usize = 8;

/// Queries of consecutive rows that share one KV head.
#[derive(Clone, Copy)]
pub struct RowTile<'a> {
    /// The layer's K and V.
    pub view: LayerView<'a>,
    /// The sequence's block table.
    pub blocks: &'a [BlockId],
    /// The KV head.
    pub head: usize,
    /// Query heads for each KV head.
    pub group: usize,
    /// Position of the first row.
    pub start: usize,
    /// Number of rows.
    pub rows: usize,
    /// Multiplies the scores.
    pub scale: f32,
    /// `[rows, q heads, head_dim]`, all heads.
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
}

/// `$body` with constants M, B and D for the register tile of `$m` queries: B K tiles and D V vectors at a time, so
/// that the accumulators fill the registers and hide the latency of the products.
macro_rules! with_tile {
    ($accumulators:expr, $m:expr, |$M:ident, $B:ident, $D:ident| $body:expr) => {
        match ($accumulators, $m) {
            (16, 8) => with_tile!(@ $M 8, $B 2, $D 2, $body),
            (16, 6) => with_tile!(@ $M 6, $B 2, $D 2, $body),
            (16, 4) => with_tile!(@ $M 4, $B 4, $D 4, $body),
            (16, 3) => with_tile!(@ $M 3, $B 4, $D 4, $body),
            (16, 2) => with_tile!(@ $M 2, $B 4, $D 4, $body),
            (16, _) => with_tile!(@ $M 1, $B 8, $D 8, $body),
            (4, 4) => with_tile!(@ $M 4, $B 1, $D 1, $body),
            (4, 2) => with_tile!(@ $M 2, $B 2, $D 2, $body),
            (4, _) => with_tile!(@ $M 1, $B 4, $D 4, $body),
            _ => with_tile!(@ $M 1, $B 1, $D 1, $body),
        }
    };
    (@ $M:ident $m:literal, $B:ident $b:literal, $D:ident $d:literal, $body:expr) => {{
        const $M: usize = $m;
        const $B: usize = $b;
        const $D: usize = $d;
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
    /// One more than the last position that any row sees.
    pub fn end(&self) -> usize {
        self.start + self.rows
    }

    fn num_queries(&self) -> usize {
        self.rows * self.group
    }

    /// Attend over the whole context; `out` has one `[group, head_dim]` slice for each row.
    pub fn attend<S: Simd, F: Format>(&self, s: S, out: Vec<&mut [f32]>) {
        let mut scratch = self.scratch::<S, F>(s);
        let mut running = self.partial();
        let mut chunk = self.partial();
        self.chunk(s, &mut scratch, 0, &mut running);
        for c in 1..self.end().div_ceil(CHUNK) {
            self.chunk(s, &mut scratch, c, &mut chunk);
            self.merge_chunk(s, c, &mut running, &chunk);
        }
        self.finish(&running, out);
    }

    /// The partial results of the chunks from `first` on, one for each of `partials`.
    pub fn chunks<S: Simd, F: Format>(&self, s: S, first: usize, partials: &mut [Partial]) {
        let mut scratch = self.scratch::<S, F>(s);
        for (i, partial) in partials.iter_mut().enumerate() {
            *partial = self.partial();
            self.chunk(s, &mut scratch, first + i, partial);
        }
    }

    /// Merge the partial results of all chunks, in order, exactly as [`Self::attend`] does.
    pub fn merge<S: Simd>(&self, s: S, partials: Vec<Partial>, out: Vec<&mut [f32]>) {
        let mut partials = partials.into_iter();
        let Some(mut running) = partials.next() else { return };
        for (i, partial) in partials.enumerate() {
            self.merge_chunk(s, i + 1, &mut running, &partial);
        }
        self.finish(&running, out);
    }

    fn partial(&self) -> Partial {
        let n = self.num_queries();
        Partial { m: vec![0.0; n], l: vec![0.0; n], acc: vec![0.0; n * self.view.layout.width()] }
    }

    /// Pack the queries as the kernels read them.
    fn scratch<S: Simd, F: Format>(&self, _: S) -> Scratch<F> {
        let (n, dim) = (self.num_queries(), self.view.layout.k_dim);
        let row_width = self.q.len() / self.rows;
        let mut queries = Vec::with_capacity(n * dim / F::STEP);
        let mut first = 0;
        while first < n {
            let m = tile_size::<S>(n - first);
            for i in (0..dim).step_by(F::STEP) {
                for query in first..first + m {
                    let (row, head) = (query / self.group, self.head * self.group + query % self.group);
                    queries.push(F::coef(&self.q[row * row_width + head * dim + i..][..F::STEP]));
                }
            }
            first += m;
        }
        let zero: F::Coef = bytemuck::Zeroable::zeroed();
        Scratch { queries, scores: vec![[0.0; CHUNK]; MAX_M], weights: vec![[zero; CHUNK]; MAX_M] }
    }

    /// Tokens of chunk `c` that `query`'s row sees.
    fn visible(&self, c: usize, query: usize) -> usize {
        (self.start + query / self.group + 1).saturating_sub(c * CHUNK).min(CHUNK)
    }

    /// K tile `t` (16 tokens at `16 t`) of this head.
    fn k_tile<F: Format>(&self, t: usize) -> &[F::Raw] {
        let per_block = self.view.layout.block_size / TILE;
        bytemuck::cast_slice(self.view.k_tile(self.blocks[t / per_block], self.head, t % per_block))
    }

    /// V tile `t` of this head.
    fn v_tile<F: Format>(&self, t: usize) -> &[F::Raw] {
        let per_block = self.view.layout.block_size / TILE;
        bytemuck::cast_slice(self.view.v_tile(self.blocks[t / per_block], self.head, t % per_block))
    }

    /// Softmax state of every query over the tokens of chunk `c` that its row sees; untouched where it sees none.
    fn chunk<S: Simd, F: Format>(&self, s: S, scratch: &mut Scratch<F>, c: usize, partial: &mut Partial) {
        let n = self.num_queries();
        let steps = self.view.layout.k_dim / F::STEP;
        let mut first = 0;
        while first < n {
            let m = tile_size::<S>(n - first);
            with_tile!(S::ACCUMULATORS, m, |M, B, D| self
                .register_tile::<S, F, M, B, D>(s, scratch, c, first, steps, partial));
            first += m;
        }
    }

    fn register_tile<S: Simd, F: Format, const M: usize, const B: usize, const D: usize>(
        &self,
        s: S,
        scratch: &mut Scratch<F>,
        c: usize,
        first: usize,
        steps: usize,
        partial: &mut Partial,
    ) {
        let visible: [usize; M] = std::array::from_fn(|m| self.visible(c, first + m));
        // Rows ascend, so the last query sees most, and the first of those that see anything sees least.
        let most = visible[M - 1];
        if most == 0 {
            return;
        }
        let least = visible.iter().copied().find(|&v| v > 0).unwrap_or(most);

        let queries = scratch.queries[first * steps..(first + M) * steps].as_chunks::<M>().0;
        let tiles = most.div_ceil(TILE);
        s.run(Scores::<F, M, B> { tile: self, chunk: c, tiles, queries, scores: &mut scratch.scores });
        for m in 0..M {
            if visible[m] > 0 {
                let scale = self.scale * self.view.k_scale(self.head);
                let (scores, weights) = (&mut scratch.scores[m], &mut scratch.weights[m]);
                let (max, sum) = s.run(Weights::<F> { scale, visible: visible[m], scores, weights });
                partial.m[first + m] = max;
                partial.l[first + m] = sum;
            }
        }
        let weights: &[[F::Coef; CHUNK]; M] = scratch.weights.first_chunk().expect("M rows of weights");
        let width = self.view.layout.width();
        let acc = &mut partial.acc[first * width..(first + M) * width];
        acc.fill(0.0);
        if least == most {
            s.run(Mix::<F, M, D> { tile: self, chunk: c, from: 0, to: most, weights, acc });
        } else {
            // The tokens that all rows see together, then each row's own rest.
            let together = least / TILE * TILE;
            s.run(Mix::<F, M, D> { tile: self, chunk: c, from: 0, to: together, weights, acc });
            for (m, acc) in acc.chunks_exact_mut(width).enumerate() {
                let own = std::array::from_ref(&weights[m]);
                let to = visible[m].max(together);
                s.run(Mix::<F, 1, D> { tile: self, chunk: c, from: together, to, weights: own, acc });
            }
        }
    }

    /// Merge chunk `c` into the running state of the queries that see any of it.
    fn merge_chunk<S: Simd>(&self, s: S, c: usize, running: &mut Partial, chunk: &Partial) {
        let width = self.view.layout.width();
        for i in 0..self.num_queries() {
            if self.visible(c, i) > 0 {
                let (acc, add) = (&mut running.acc[i * width..][..width], &chunk.acc[i * width..][..width]);
                let (m, l) = (&mut running.m[i], &mut running.l[i]);
                s.run(Merge { m, l, acc, add_m: chunk.m[i], add_l: chunk.l[i], add });
            }
        }
    }

    /// `out = acc / l`, each row's queries side by side.
    fn finish(&self, state: &Partial, out: Vec<&mut [f32]>) {
        let (dim, width) = (self.view.layout.k_dim, self.view.layout.width());
        for (row, out) in out.into_iter().enumerate() {
            for (head, out) in out.chunks_exact_mut(dim).enumerate() {
                let i = row * self.group + head;
                for (out, acc) in out.iter_mut().zip(&state.acc[i * width..]) {
                    *out = acc / state.l[i] * self.view.v_scale(self.head);
                }
            }
        }
    }
}

// Each piece of work below is compiled once per level, format and tile size, as a function of its own.

/// `scores[m][token] = q . k` for the first `tiles` tiles of a chunk.
struct Scores<'a, F: Format, const M: usize, const B: usize> {
    tile: &'a RowTile<'a>,
    chunk: usize,
    tiles: usize,
    queries: &'a [[F::Coef; M]],
    scores: &'a mut [[f32; CHUNK]],
}

impl<F: Format, const M: usize, const B: usize> Work for Scores<'_, F, M, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let base = self.chunk * (CHUNK / TILE);
        let mut store = |t: usize, m: usize, x: S::F32| {
            s.store(x, self.scores[m][t * TILE..].first_chunk_mut().expect("16 scores"));
        };
        let mut t = 0;
        while t + B <= self.tiles {
            let mut panels = [self.tile.k_tile::<F>(base + t); B];
            for b in 1..B {
                panels[b] = self.tile.k_tile::<F>(base + t + b);
            }
            let acc = kernel::dot::<S, F, M, B>(s, panels, self.queries);
            for m in 0..M {
                for b in 0..B {
                    store(t + b, m, acc[m][b]);
                }
            }
            t += B;
        }
        while t < self.tiles {
            let acc = kernel::dot::<S, F, M, 1>(s, [self.tile.k_tile::<F>(base + t)], self.queries);
            for m in 0..M {
                store(t, m, acc[m][0]);
            }
            t += 1;
        }
    }
}

/// Scores to softmax weights `exp(scale * score - max)` for the first `visible` tokens. Returns the maximum (of the
/// scores in base-2 units) and the sum of the weights as they are multiplied, that is, after rounding.
struct Weights<'a, F: Format> {
    scale: f32,
    visible: usize,
    scores: &'a mut [f32; CHUNK],
    weights: &'a mut [F::Coef; CHUNK],
}

impl<F: Format> Work for Weights<'_, F> {
    type Output = (f32, f32);

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> (f32, f32) {
        let scale = s.splat(self.scale * std::f32::consts::LOG2_E);
        let lowest = s.splat(f32::NEG_INFINITY);
        let tiles = self.visible.div_ceil(TILE);
        let scores = &mut self.scores.as_chunks_mut::<LANES>().0[..tiles];
        let mut max = lowest;
        for (t, score) in scores.iter_mut().enumerate() {
            let x = s.first_lanes(self.visible - t * TILE, s.mul(s.load(score), scale), lowest);
            max = s.max(max, x);
            s.store(x, score);
        }
        let max = s.reduce_max(max);
        let mut sum = s.splat(0.0);
        for (score, out) in scores.iter().zip(self.weights.chunks_exact_mut(TILE / F::STEP)) {
            let x = F::round_coefs(s, math::exp2(s, s.sub(s.load(score), s.splat(max))));
            sum = s.add(sum, x);
            F::store_coefs(s, x, out);
        }
        (max, s.reduce_sum(sum))
    }
}

/// `acc[m] += sum of weights[m][token] * v[token]` over tokens `from..to` of a chunk, `from` at a tile's start;
/// `acc` is `[M, width]`.
struct Mix<'a, F: Format, const M: usize, const D: usize> {
    tile: &'a RowTile<'a>,
    chunk: usize,
    from: usize,
    to: usize,
    weights: &'a [[F::Coef; CHUNK]; M],
    acc: &'a mut [f32],
}

impl<F: Format, const M: usize, const D: usize> Work for Mix<'_, F, M, D> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let vectors = self.tile.view.layout.width() / LANES;
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
        let width = self.tile.view.layout.width();
        let vectors = width / LANES;
        let mut sums = [[s.splat(0.0); N]; M];
        for m in 0..M {
            for i in 0..N {
                sums[m][i] = s.load(self.acc[m * width + (d + i) * LANES..].first_chunk().expect("16 lanes"));
            }
        }
        for t in self.from / TILE..self.to.div_ceil(TILE) {
            let rows = &self.tile.v_tile::<F>(self.chunk * (CHUNK / TILE) + t)[d..];
            let end = self.to.min((t + 1) * TILE);
            let (first, last) = (t * TILE / F::STEP, end.div_ceil(F::STEP));
            let half_last = !end.is_multiple_of(F::STEP);
            kernel::mix::<S, F, M, N, CHUNK>(s, &mut sums, rows, vectors, self.weights, first, last, half_last);
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
