//! The two products of a register tile with a chunk, scores and mixes of V: what they are to whoever asks for them, and how
//! vectors make them (tiled.rs: tile registers).
//!
//! ```text
//! scores   B K tiles at a time against M queries
//! mix      D vectors of V's dimensions at a time, over the tokens that all M queries see; what lies before and behind,
//!          each query takes alone
//! ```
//! Both may be called for some tiles of a chunk after the other: each sum goes on where it was, in the same order.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::ahead::Ahead;
use super::chunk::{CHUNK, HeadChunk};
use super::lines::Lines;
use crate::simd::{Dot, Format, LANES, Simd, Work, tile as kernel};
use crate::storage::TILE;

/// How the queries of a register tile are multiplied with a chunk: by vectors, or by tile registers (tiled.rs).
pub trait Multiply: Format {
    /// What all products of a pass share.
    type Shape<S: Simd>;
    /// Rows behind a register tile's queries and weights that must be there. They may hold anything, and count for nothing.
    const SLACK: usize;
    /// Queries of one row tile: enough that a K tile in a cache serves many of them, and whole register tiles in most groups.
    const QUERIES_PER_TILE: usize = 48;

    /// The next register tile for `left` queries.
    fn tile_size<S: Simd>(left: usize) -> usize;
    /// Pack one query among the `m` of a register tile.
    fn pack<S: Simd>(s: S, q: &[f32], packed: &mut [Self::Coef<S>], m: usize, query: usize);
    /// Run both products of some register tiles, cut from so many queries, with one shape if it serves both.
    fn with_both<S: Simd>(s: S, queries: usize, k_dim: usize, work: impl FnOnce(Option<&Self::Shape<S>>));
    /// Run [`Self::scores`] of them, with `both` if there is one.
    fn with_scores<S: Simd>(
        s: S,
        both: Option<&Self::Shape<S>>,
        queries: usize,
        k_dim: usize,
        work: impl FnOnce(&Self::Shape<S>),
    );
    /// Run [`Self::mix`] of them, likewise.
    fn with_mix<S: Simd>(s: S, both: Option<&Self::Shape<S>>, queries: usize, work: impl FnOnce(&Self::Shape<S>));
    /// `scores[m][token] = q . k` for the tiles `tiles` of a chunk; `queries` are packed, and `scores` has `m` rows. What is
    /// `ahead` is asked for as K is read.
    fn scores<S: Simd>(
        s: S,
        shape: &Self::Shape<S>,
        chunk: HeadChunk<'_, Self>,
        tiles: Range<usize>,
        queries: &[Self::Coef<S>],
        scores: &mut [[f32; CHUNK]],
        ahead: Option<&mut Ahead>,
    );
    /// V of the tiles `tiles` of a chunk as [`Self::mix`] takes it, where that is not as it lies; `seen`: tokens that any query sees.
    fn join<S: Simd>(
        _: S,
        _: HeadChunk<'_, Self>,
        _: &Range<usize>,
        _: &Range<usize>,
        _: usize,
        _: &mut Lines<Self::Raw>,
    ) {
    }
    /// Add `sum of weights[m][token] * v[token]` to `acc`, `[m, width]`, over those of `tokens` (of a chunk) that each query
    /// sees. `joined` is what [`Self::join`] made. What is `ahead` is asked for as V is read.
    #[allow(clippy::too_many_arguments)] // As the kernels: a struct would only rename them.
    fn mix<S: Simd>(
        s: S,
        shape: &Self::Shape<S>,
        chunk: HeadChunk<'_, Self>,
        joined: &[Self::Raw],
        tokens: &Range<usize>,
        visible: &[Range<usize>],
        shared: &Shared,
        weights: &mut [[Self::Coef<S>; CHUNK]],
        acc: &mut [f32],
        width: usize,
        ahead: Option<&mut Ahead>,
    );
    /// Make sums ready for the first [`Self::mix`] of a chunk.
    fn begin(acc: &mut [f32]) {
        acc.fill(0.0);
    }
    /// What is left to be done to sums of [`Self::mix`] behind the last token of a chunk.
    fn settle<S: Simd>(_: S, _: &mut [f32]) {}
    /// How often `m` queries' [`Self::scores`] of `tiles` tiles ask for what is ahead.
    fn score_steps<S: Simd>(m: usize, tiles: usize, k_dim: usize) -> usize;
    /// How often `m` queries' [`Self::mix`] of `tokens` tokens asks for what is ahead.
    fn mix_steps<S: Simd>(m: usize, tokens: usize, width: usize) -> usize;
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
            (16, _) => with_tile!(@ $M 1, $B 4, $D 8, $ONE 8, $body),
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

/// What several rows see of a chunk.
#[derive(Clone, Debug)]
pub struct Shared {
    /// From the first token that any row sees to the last.
    pub any: Range<usize>,
    /// Tokens that all rows see that see any. Where rows differ it ends at a tile's border, so that nobody's first or
    /// last tile is cut in two; `CHUNK..CHUNK` if there are none.
    pub all: Range<usize>,
}

impl Shared {
    /// `None` if no row sees any token.
    pub fn of(visible: &[Range<usize>]) -> Option<Self> {
        let mut seeing = visible.iter().filter(|v| !v.is_empty()).cloned();
        let first = seeing.next()?;
        let (mut any, mut all) = (first.clone(), first);
        for v in seeing {
            any = any.start.min(v.start)..any.end.max(v.end);
            all = all.start.max(v.start)..all.end.min(v.end);
        }
        let start = if any.start == all.start { all.start } else { all.start.next_multiple_of(TILE) };
        let end = if any.end == all.end { all.end } else { all.end / TILE * TILE };
        Some(Self { any, all: if start < end { start..end } else { CHUNK..CHUNK } })
    }
}

impl<F: Dot> Multiply for F {
    type Shape<S: Simd> = ();
    const SLACK: usize = 0;

    fn tile_size<S: Simd>(left: usize) -> usize {
        let sizes: &[usize] = match S::ACCUMULATORS {
            16 => &[8, 6, 4, 3, 2, 1],
            4 => &[4, 2, 1],
            _ => &[1],
        };
        sizes.iter().copied().find(|&m| m <= left).unwrap_or(1)
    }

    fn pack<S: Simd>(s: S, q: &[f32], packed: &mut [F::Coef<S>], m: usize, query: usize) {
        s.run(Pack::<S, F> { q, packed, m, query });
    }

    fn with_both<S: Simd>(_: S, _: usize, _: usize, work: impl FnOnce(Option<&()>)) {
        work(Some(&()));
    }

    fn with_scores<S: Simd>(_: S, _: Option<&()>, _: usize, _: usize, work: impl FnOnce(&())) {
        work(&());
    }

    fn with_mix<S: Simd>(_: S, _: Option<&()>, _: usize, work: impl FnOnce(&())) {
        work(&());
    }

    fn scores<S: Simd>(
        s: S,
        (): &(),
        chunk: HeadChunk<'_, F>,
        tiles: Range<usize>,
        queries: &[F::Coef<S>],
        scores: &mut [[f32; CHUNK]],
        ahead: Option<&mut Ahead>,
    ) {
        with_tile!(S::ACCUMULATORS, scores.len(), |M, B, _D, _ONE| {
            s.run(Scores::<S, F, M, B> { chunk, tiles, queries: queries.as_chunks::<M>().0, scores, ahead });
        });
    }

    fn mix<S: Simd>(
        s: S,
        (): &(),
        chunk: HeadChunk<'_, F>,
        _: &[F::Raw],
        tokens: &Range<usize>,
        visible: &[Range<usize>],
        shared: &Shared,
        weights: &mut [[F::Coef<S>; CHUNK]],
        acc: &mut [f32],
        width: usize,
        ahead: Option<&mut Ahead>,
    ) {
        // Over the tokens that all M queries see together; what lies before and behind, each query takes alone.
        let part = |seen: Range<usize>| seen.start.max(tokens.start)..seen.end.min(tokens.end);
        let all = &shared.all;
        let together = part(all.clone());
        with_tile!(S::ACCUMULATORS, visible.len(), |M, _B, D, ONE| {
            let weights: &[[F::Coef<S>; CHUNK]; M] = weights.first_chunk().expect("M rows of weights");
            let alone = |acc: &mut [f32], seen: &dyn Fn(&Range<usize>) -> Range<usize>| {
                for (m, acc) in acc.chunks_exact_mut(width).enumerate() {
                    let tokens = part(seen(&visible[m]));
                    if !tokens.is_empty() {
                        let weights = std::array::from_ref(&weights[m]);
                        s.run(Mix::<S, F, 1, ONE> { chunk, tokens, width, weights, acc, ahead: None });
                    }
                }
            };
            if together == *tokens {
                let tokens = together;
                s.run(Mix::<S, F, M, D> { chunk, tokens, width, weights, acc, ahead });
                return;
            }
            alone(acc, &|seen| seen.start..seen.end.min(all.start));
            if !together.is_empty() {
                s.run(Mix::<S, F, M, D> { chunk, tokens: together, width, weights, acc: &mut *acc, ahead });
            }
            alone(acc, &|seen| seen.start.max(all.end)..seen.end);
        });
    }

    fn score_steps<S: Simd>(m: usize, tiles: usize, k_dim: usize) -> usize {
        let lines = (k_dim / F::STEP * size_of::<F::Raw>()).div_ceil(kernel::LINE);
        with_tile!(S::ACCUMULATORS, m, |_M, B, _D, _ONE| passes(tiles, B) * lines)
    }

    fn mix_steps<S: Simd>(m: usize, tokens: usize, width: usize) -> usize {
        with_tile!(S::ACCUMULATORS, m, |_M, _B, D, _ONE| passes(width / LANES, D) * tokens.div_ceil(F::STEP))
    }
}

// Each piece of work below is compiled once per level, format and tile size, as a function of its own.

/// One query among the `m` of a register tile.
struct Pack<'a, S: Simd, F: Dot> {
    q: &'a [f32],
    /// `[steps][m]`
    packed: &'a mut [F::Coef<S>],
    m: usize,
    query: usize,
}

impl<S: Simd, F: Dot> Work<S> for Pack<'_, S, F> {
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

struct Scores<'a, S: Simd, F: Dot, const M: usize, const B: usize> {
    chunk: HeadChunk<'a, F>,
    tiles: Range<usize>,
    queries: &'a [[F::Coef<S>; M]],
    scores: &'a mut [[f32; CHUNK]],
    ahead: Option<&'a mut Ahead>,
}

impl<S: Simd, F: Dot, const M: usize, const B: usize> Work<S> for Scores<'_, S, F, M, B> {
    type Output = ();

    #[inline(always)]
    fn run(mut self, s: S) {
        let mut t = self.tiles.start;
        while t + B <= self.tiles.end {
            let mut panels = [self.chunk.k(t); B];
            for b in 1..B {
                panels[b] = self.chunk.k(t + b);
            }
            let ahead = || self.ahead.iter_mut().for_each(|ahead| ahead.step(s));
            let acc = kernel::dot::<S, F, M, B>(s, panels, self.queries, ahead);
            for m in 0..M {
                for b in 0..B {
                    self.store(s, t + b, m, acc[m][b]);
                }
            }
            t += B;
        }
        while t < self.tiles.end {
            let ahead = || self.ahead.iter_mut().for_each(|ahead| ahead.step(s));
            let acc = kernel::dot::<S, F, M, 1>(s, [self.chunk.k(t)], self.queries, ahead);
            for m in 0..M {
                self.store(s, t, m, acc[m][0]);
            }
            t += 1;
        }
    }
}

impl<S: Simd, F: Dot, const M: usize, const B: usize> Scores<'_, S, F, M, B> {
    #[inline(always)]
    fn store(&mut self, s: S, t: usize, m: usize, x: S::F32) {
        s.store(x, self.scores[m][t * TILE..].first_chunk_mut().expect("16 scores"));
    }
}

struct Mix<'a, S: Simd, F: Dot, const M: usize, const D: usize> {
    chunk: HeadChunk<'a, F>,
    tokens: Range<usize>,
    width: usize,
    weights: &'a [[F::Coef<S>; CHUNK]; M],
    acc: &'a mut [f32],
    ahead: Option<&'a mut Ahead>,
}

/// How many steps of `d`, of 4 and of 1 go through `n`.
fn passes(n: usize, d: usize) -> usize {
    let rest = n % d;
    n / d + if d > 4 { rest / 4 + rest % 4 } else { rest }
}

impl<S: Simd, F: Dot, const M: usize, const D: usize> Work<S> for Mix<'_, S, F, M, D> {
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

impl<S: Simd, F: Dot, const M: usize, const D: usize> Mix<'_, S, F, M, D> {
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
            let rows = &self.chunk.v(t)[(first - t * TILE / F::STEP) * vectors + d..];
            let halves = (!start.is_multiple_of(F::STEP), !end.is_multiple_of(F::STEP));
            let ahead = || self.ahead.iter_mut().for_each(|ahead| ahead.step(s));
            kernel::mix::<S, F, M, N, CHUNK>(s, &mut sums, rows, vectors, self.weights, ahead, first, last, halves);
        }
        for m in 0..M {
            for i in 0..N {
                s.store(sums[m][i], self.acc[m * width + (d + i) * LANES..].first_chunk_mut().expect("16 lanes"));
            }
        }
    }
}

/// The tiles that `tokens` lie in.
pub fn tiles_of(tokens: &Range<usize>) -> Range<usize> {
    tokens.start / TILE..tokens.end.div_ceil(TILE)
}
