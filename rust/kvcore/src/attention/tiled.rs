//! The two products of a register tile with a chunk by tile registers.
//!
//! ```text
//! join     two tiles of V, 32 tokens, side by side; zeros for what no query of any register tile sees
//! scores   16 queries' dimensions x 16 tokens of K, 32 dimensions a step
//! mix      16 queries' weights x 16 dimensions of V, 32 tokens a step; weights of what a query does not see are zeros
//! ```
//! A product of tiles takes as long for 16 tokens as for 32, and V's blocks have 16: so V is copied, once for all register tiles of
//! a head. A step is summed on its own before it is added, so bits differ from those of other levels; steps are at fixed dimensions
//! and tokens. What one query sees and another does not is multiplied by zero, which adds nothing as long as it is a number: where V
//! has others that some see, each of the queries there is multiplied for itself. All that such a product may change is the sign of a
//! zero (products of no size keep theirs), so at last every zero is given the same.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::ahead::Ahead;
use super::chunk::{CHUNK, HeadChunk, TILES};
use super::lines::Lines;
use super::products::{Multiply, Shared, tiles_of};
use crate::simd::{
    Format, LANES, Left, Pairs, Shaped, Simd, Sums, TILE_ROWS, TILE_WORDS, TiledBf16, Tiles, TwoTiles, Work,
};
use crate::storage::TILE;

/// Queries of a register tile: two tiles of them go with each tile of K or V.
const QUERIES: usize = 2 * TILE_ROWS;
/// Tokens of a step of V, and pairs of them.
const STEP: usize = 2 * TILE;
const TOKEN_PAIRS: usize = STEP / 2;
/// Steps of V in a chunk.
const STEPS: usize = CHUNK / STEP;

/// The steps of V that `tokens` lie in.
fn steps_of(tokens: &Range<usize>) -> Range<usize> {
    tokens.start / STEP..tokens.end.div_ceil(STEP)
}

/// Pairs of dimensions that a step sums.
fn words(pairs: usize) -> usize {
    if pairs.is_multiple_of(TILE_WORDS) { TILE_WORDS } else { TILE_WORDS / 2 }
}

fn tiles<S: Simd>(s: S) -> S::Tiles {
    s.tiles().expect("the format is chosen where there are tile registers")
}

/// `$work` with `$R` tiles for the queries of a register tile.
macro_rules! by_tiles {
    ($s:ident, $queries:expr, |$R:ident| $work:expr) => {
        if $queries > TILE_ROWS {
            const $R: usize = 2;
            $s.run($work);
        } else {
            const $R: usize = 1;
            $s.run($work);
        }
    };
}

impl Multiply for TiledBf16 {
    type Shape<S: Simd> = <S::Tiles as Tiles>::Shaped;
    const SLACK: usize = QUERIES;
    const QUERIES_PER_TILE: usize = 3 * QUERIES;

    fn tile_size<S: Simd>(left: usize) -> usize {
        left.min(QUERIES)
    }

    fn pack<S: Simd>(s: S, q: &[f32], packed: &mut [S::Factor], m: usize, query: usize) {
        let pairs = packed.len() / m;
        s.run(Pack::<S> { q, packed: &mut packed[query * pairs..][..pairs] });
    }

    fn with_both<S: Simd>(s: S, queries: usize, k_dim: usize, work: impl FnOnce(Option<&Self::Shape<S>>)) {
        if words(k_dim / 2) == TOKEN_PAIRS {
            tiles(s).shaped(queries.min(TILE_ROWS), TOKEN_PAIRS, |shape| work(Some(shape)));
        } else {
            work(None);
        }
    }

    fn with_scores<S: Simd>(
        s: S,
        both: Option<&Self::Shape<S>>,
        queries: usize,
        k_dim: usize,
        work: impl FnOnce(&Self::Shape<S>),
    ) {
        match both {
            Some(shape) => work(shape),
            None => tiles(s).shaped(queries.min(TILE_ROWS), words(k_dim / 2), work),
        }
    }

    fn with_mix<S: Simd>(s: S, both: Option<&Self::Shape<S>>, queries: usize, work: impl FnOnce(&Self::Shape<S>)) {
        match both {
            Some(shape) => work(shape),
            None => tiles(s).shaped(queries.min(TILE_ROWS), TOKEN_PAIRS, work),
        }
    }

    fn begin(_: &mut [f32]) {
        // The first step does not add.
    }

    fn scores<S: Simd>(
        s: S,
        shape: &Self::Shape<S>,
        chunk: HeadChunk<'_, Self>,
        tiles: Range<usize>,
        queries: &[S::Factor],
        scores: &mut [[f32; CHUNK]],
        ahead: Option<&mut Ahead>,
    ) {
        let queries = bytemuck::cast_slice(queries);
        by_tiles!(s, scores.len(), |R| Scores::<S, R> { shape, chunk, tiles, queries, scores, ahead });
    }

    fn join<S: Simd>(
        s: S,
        chunk: HeadChunk<'_, Self>,
        tiles: &Range<usize>,
        seen: &Range<usize>,
        width: usize,
        joined: &mut Lines<Pairs>,
    ) {
        let vectors = width / LANES;
        joined.resize(STEPS * TOKEN_PAIRS * vectors);
        for step in steps_of(&(tiles.start * TILE..tiles.end * TILE)) {
            let out = &mut joined[step * TOKEN_PAIRS * vectors..][..TOKEN_PAIRS * vectors];
            for half in 0..2 {
                let t = 2 * step + half;
                let v = if tiles_of(seen).contains(&t) { chunk.v(t) } else { &[] };
                s.run(Join { v, out: &mut *out, first: half * TILE / 2 });
            }
            // What is stale may be no number, which would send each query its own way.
            hide(out, step * STEP, seen);
        }
    }

    fn mix<S: Simd>(
        s: S,
        shape: &Self::Shape<S>,
        _: HeadChunk<'_, Self>,
        joined: &[Pairs],
        tokens: &Range<usize>,
        visible: &[Range<usize>],
        shared: &Shared,
        weights: &mut [[S::Factor; CHUNK]],
        acc: &mut [f32],
        width: usize,
        ahead: Option<&mut Ahead>,
    ) {
        // Where there are tile registers a factor is two bf16 values as they are.
        let weights = bytemuck::cast_slice_mut(weights);
        let steps = steps_of(tokens);
        by_tiles!(s, visible.len(), |R| {
            Mix::<S, R> { shape, joined, steps, shared, visible, weights, acc, vectors: width / LANES, ahead }
        });
    }

    fn settle<S: Simd>(s: S, acc: &mut [f32]) {
        s.run(Settle(acc));
    }

    fn score_steps<S: Simd>(_: usize, tiles: usize, k_dim: usize) -> usize {
        tiles.div_ceil(2) * (k_dim / 2)
    }

    fn mix_steps<S: Simd>(_: usize, tokens: usize, width: usize) -> usize {
        (width / LANES).div_ceil(2) * tokens.div_ceil(STEP) * TOKEN_PAIRS
    }
}

/// A tile of V, or zeros, as half of a step.
struct Join<'a> {
    /// `[TILE / 2][vectors]`; none for zeros.
    v: &'a [Pairs],
    /// `[vectors][TOKEN_PAIRS]`
    out: &'a mut [Pairs],
    /// The first of its pairs there.
    first: usize,
}

impl<S: Simd> Work<S> for Join<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self, _: S) {
        let columns = self.out.as_chunks_mut::<TOKEN_PAIRS>().0;
        let half = self.first..self.first + TILE / 2;
        if self.v.is_empty() {
            columns.iter_mut().for_each(|out| out[half.clone()].fill([0; 2 * LANES]));
            return;
        }
        for (pair, row) in half.zip(self.v.chunks_exact(columns.len())) {
            for (out, v) in columns.iter_mut().zip(row) {
                out[pair] = *v;
            }
        }
    }
}

/// Zeros for those tokens of a step, which begins at token `first`, that are not `seen`.
fn hide(v: &mut [Pairs], first: usize, seen: &Range<usize>) {
    for token in (first..first + STEP).filter(|token| !seen.contains(token)) {
        for column in v.as_chunks_mut::<TOKEN_PAIRS>().0 {
            column[(token - first) / 2].iter_mut().skip((token - first) % 2).step_by(2).for_each(|bits| *bits = 0);
        }
    }
}

struct Pack<'a, S: Simd> {
    q: &'a [f32],
    packed: &'a mut [S::Factor],
}

impl<S: Simd> Work<S> for Pack<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run(self, s: S) {
        TiledBf16::coefs(s, self.q, self.packed);
    }
}

/// Zeros without a sign; every other value stays.
struct Settle<'a>(&'a mut [f32]);

impl<S: Simd> Work<S> for Settle<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self, s: S) {
        for x in self.0.as_chunks_mut::<LANES>().0 {
            s.store(s.add(s.load(x), s.splat(0.0)), x);
        }
    }
}

struct Scores<'a, S: Simd, const R: usize> {
    shape: &'a <TiledBf16 as Multiply>::Shape<S>,
    chunk: HeadChunk<'a, TiledBf16>,
    tiles: Range<usize>,
    /// `[m][pairs]`
    queries: &'a [u32],
    scores: &'a mut [[f32; CHUNK]],
    ahead: Option<&'a mut Ahead>,
}

impl<S: Simd, const R: usize> Work<S> for Scores<'_, S, R> {
    type Output = ();

    #[inline(always)]
    fn run(self, s: S) {
        let Self { shape, chunk, tiles, queries, scores, mut ahead } = self;
        let mut k = [&[][..]; TILES];
        for t in tiles.clone() {
            k[t] = chunk.k(t);
        }
        let (k, pairs) = (&k[tiles.clone()], k[tiles.start].len());
        let words = words(pairs);
        let left = Left { tiles: std::array::from_fn(|r| &queries[r * TILE_ROWS * pairs..]), stride: pairs };
        let steps = pairs / words;
        if scores.len() == R * shape.rows() {
            let sums = Sums {
                tiles: parts(scores.as_flattened_mut(), shape.rows() * CHUNK, tiles.start * TILE),
                stride: CHUNK,
                panel: TILE,
            };
            let right = |t: usize, step: usize| &k[t][step * words..];
            shape.bf16(left, steps, k.len(), right, 1, true, sums, || ask(s, &mut ahead, pairs));
            return;
        }
        let mut sums = [TwoTiles([[[0.0; LANES]; TILE_ROWS]; 2]); R];
        for (two, k) in k.chunks(2).enumerate() {
            let right = |t: usize, step: usize| &k[t][step * words..];
            shape.bf16(left, steps, k.len(), right, 1, true, Sums::of(&mut sums), || ask(s, &mut ahead, pairs));
            let first = tiles.start + 2 * two;
            for (scores, sums) in scores.chunks_mut(TILE_ROWS).zip(&sums) {
                for (m, scores) in scores.iter_mut().enumerate() {
                    for (t, sums) in (first..first + k.len()).zip(&sums.0) {
                        s.store(s.load(&sums[m]), &mut scores.as_chunks_mut().0[t]);
                    }
                }
            }
        }
    }
}

/// Ask for what is ahead, as much as in so many steps. Behind a product: before it, hints would hold up what it reads itself.
#[inline(always)]
fn ask<S: Simd>(s: S, ahead: &mut Option<&mut Ahead>, steps: usize) {
    if let Some(ahead) = ahead {
        (0..steps).for_each(|_| ahead.step(s));
    }
}

/// The tiles of rows in `x`, each of `size` values, from the value `at` on.
#[inline(always)]
fn parts<const R: usize>(x: &mut [f32], size: usize, at: usize) -> [&mut [f32]; R] {
    let mut parts = x.chunks_mut(size);
    std::array::from_fn(|_| &mut parts.next().expect("a tile of rows")[at..])
}

struct Mix<'a, S: Simd, const R: usize> {
    shape: &'a <TiledBf16 as Multiply>::Shape<S>,
    /// `[STEPS][vectors][TOKEN_PAIRS]`
    joined: &'a [Pairs],
    steps: Range<usize>,
    shared: &'a Shared,
    /// Tokens that each sees.
    visible: &'a [Range<usize>],
    weights: &'a mut [[u32; CHUNK]],
    /// `[m, vectors * 16]`
    acc: &'a mut [f32],
    vectors: usize,
    ahead: Option<&'a mut Ahead>,
}

impl<S: Simd, const R: usize> Work<S> for Mix<'_, S, R> {
    type Output = ();

    #[inline(always)]
    fn run(mut self, s: S) {
        let (start, end) = (self.steps.start * STEP, self.steps.end * STEP);
        for (weights, visible) in self.weights.iter_mut().zip(self.visible) {
            let weights: &mut [u16] = bytemuck::cast_slice_mut(&mut weights[..CHUNK / 2]);
            weights[start..visible.start.clamp(start, end)].fill(0);
            weights[visible.end.clamp(start, end)..end].fill(0);
        }
        let all = &self.shared.all;
        let mut edges = self.steps.clone().filter(|step| all.start > step * STEP || all.end < (step + 1) * STEP);
        if edges.all(|step| is_finite(self.step(step))) {
            self.multiply(s, &[], None);
            return;
        }
        for query in 0..self.visible.len() {
            let seen = &self.visible[query];
            let hidden: Vec<_> = self.steps.clone().filter_map(|step| self.hidden(step, seen)).collect();
            self.multiply(s, &hidden, Some(query));
        }
    }
}

/// Whether all values are numbers.
#[inline(always)]
fn is_finite(v: &[Pairs]) -> bool {
    const INFINITE: u16 = 0x7f80;
    !v.iter().any(|v| v.iter().fold(false, |any, bits| any | (bits & INFINITE == INFINITE)))
}

impl<S: Simd, const R: usize> Mix<'_, S, R> {
    /// V of a step.
    fn step(&self, step: usize) -> &[Pairs] {
        &self.joined[step * TOKEN_PAIRS * self.vectors..][..TOKEN_PAIRS * self.vectors]
    }

    /// A step with zeros for what is not `seen`; `None` if all of it is.
    fn hidden(&self, step: usize, seen: &Range<usize>) -> Option<(usize, Vec<Pairs>)> {
        if seen.start <= step * STEP && seen.end >= (step + 1) * STEP {
            return None;
        }
        let mut v = self.step(step).to_vec();
        hide(&mut v, step * STEP, seen);
        Some((step, v))
    }

    /// Add the products of all queries, or of one, for which some steps are others.
    #[inline(always)]
    fn multiply(&mut self, s: S, others: &[(usize, Vec<Pairs>)], only: Option<usize>) {
        let Self { shape, joined, steps, shared, visible, weights, acc, vectors, ahead } = self;
        let (vectors, first, width) = (*vectors, steps.start, *vectors * LANES);
        // Of the chunk's first step there is nothing yet to add to.
        let anew = first == shared.any.start / STEP;
        let mut v = [&[][..]; STEPS];
        for step in steps.clone() {
            v[step] = &joined[step * TOKEN_PAIRS * vectors..][..TOKEN_PAIRS * vectors];
        }
        for (step, other) in others {
            v[*step] = other;
        }
        let (v, asks) = (&v[steps.clone()], steps.len() * TOKEN_PAIRS);
        let rows = |r: usize| &weights[r * TILE_ROWS..].as_flattened()[first * TOKEN_PAIRS..];
        let left = Left { tiles: std::array::from_fn(rows), stride: CHUNK };
        let right = |d: usize, step: usize| &v[step][d * TOKEN_PAIRS..];
        if only.is_none() && visible.len() == R * shape.rows() {
            let sums = Sums { tiles: parts(acc, shape.rows() * width, 0), stride: width, panel: LANES };
            shape.bf16(left, v.len(), vectors, right, 1, anew, sums, || ask(s, ahead, asks));
            return;
        }
        let mut sums = [TwoTiles([[[0.0; LANES]; TILE_ROWS]; 2]); R];
        let rows = only.map_or(0..visible.len(), |only| only..only + 1);
        for two in (0..vectors).step_by(2) {
            let columns = two..(two + 2).min(vectors);
            for row in rows.clone().filter(|_| !anew) {
                let acc = acc[row * width..][..width].as_chunks::<LANES>().0;
                for (d, sums) in columns.clone().zip(&mut sums[row / TILE_ROWS].0) {
                    s.store(s.load(&acc[d]), &mut sums[row % TILE_ROWS]);
                }
            }
            let right = |d: usize, step: usize| right(two + d, step);
            shape.bf16(left, v.len(), columns.len(), right, 1, anew, Sums::of(&mut sums), || ask(s, ahead, asks));
            for row in rows.clone() {
                let acc = acc[row * width..][..width].as_chunks_mut::<LANES>().0;
                for (d, sums) in columns.clone().zip(&sums[row / TILE_ROWS].0) {
                    s.store(s.load(&sums[row % TILE_ROWS]), &mut acc[d]);
                }
            }
        }
    }
}
