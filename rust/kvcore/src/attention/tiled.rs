//! The two products of a register tile with a chunk by tile registers.
//!
//! ```text
//! scores   16 queries' dimensions x 16 tokens of K, 32 dimensions a step
//! mix      16 queries' weights x 16 dimensions of V, 16 tokens a step; weights of what a query does not see are zeros
//! ```
//! A step is summed on its own before it is added, so bits differ from those of other levels; steps are at fixed dimensions and
//! tokens. What one query sees and another does not is multiplied by zero, which adds nothing as long as it is a number: V that
//! nobody sees is taken as zeros, and where V that some see has none, each of the queries there is multiplied for itself. All that
//! such a product may change is the sign of a zero (products of no size keep theirs), so at last every zero is given the same.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::ahead::Ahead;
use super::chunk::{CHUNK, HeadChunk, TILES};
use super::products::{Multiply, Shared, tiles_of};
use crate::simd::{
    Format, LANES, Pairs, Shaped, Simd, TILE_ROWS, TILE_VALUES, TILE_WORDS, TiledBf16, Tiles, TwoTiles, Work,
};
use crate::storage::TILE;

/// Queries of a register tile: two tiles of them go with each tile of K or V.
const QUERIES: usize = 2 * TILE_ROWS;
/// Pairs of tokens in a tile of V.
const TOKEN_PAIRS: usize = TILE / 2;

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

    fn tile_size<S: Simd>(left: usize) -> usize {
        left.min(QUERIES)
    }

    fn pack<S: Simd>(s: S, q: &[f32], packed: &mut [S::Factor], m: usize, query: usize) {
        let pairs = packed.len() / m;
        s.run(Pack::<S> { q, packed: &mut packed[query * pairs..][..pairs] });
    }

    fn with_scores<S: Simd>(s: S, queries: usize, k_dim: usize, work: impl FnOnce(&Self::Shape<S>)) {
        tiles(s).shaped(queries.min(TILE_ROWS), words(k_dim / 2), work);
    }

    fn with_mix<S: Simd>(s: S, queries: usize, work: impl FnOnce(&Self::Shape<S>)) {
        tiles(s).shaped(queries.min(TILE_ROWS), TOKEN_PAIRS, work);
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

    fn mix<S: Simd>(
        s: S,
        shape: &Self::Shape<S>,
        chunk: HeadChunk<'_, Self>,
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
        let (tiles, any) = (tiles_of(tokens), &shared.any);
        by_tiles!(s, visible.len(), |R| {
            Mix::<S, R> { shape, chunk, tiles, any, visible, weights, acc, vectors: width / LANES, ahead }
        });
    }

    fn settle<S: Simd>(s: S, acc: &mut [f32]) {
        s.run(Settle(acc));
    }

    fn score_steps<S: Simd>(_: usize, tiles: usize, k_dim: usize) -> usize {
        tiles.div_ceil(2) * (k_dim / 2)
    }

    fn mix_steps<S: Simd>(_: usize, tokens: usize, width: usize) -> usize {
        (width / LANES).div_ceil(2) * tokens.div_ceil(TILE) * TOKEN_PAIRS
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
        let mut multiply = |two: [usize; 2], sums: [&mut [f32]; R], stride, panel| {
            let k = two.map(|t| chunk.k(t));
            let pairs = k[0].len();
            let words = words(pairs);
            let left: [&[u32]; R] = std::array::from_fn(|r| &queries[r * TILE_ROWS * pairs..]);
            let right = |step: usize| k.map(|k| &k[step * words..]);
            shape.bf16(left, pairs, pairs / words, right, 1, true, sums, stride, panel);
            ask(s, &mut ahead, pairs);
        };
        // Behind an odd number the last again, for nothing.
        let twos = tiles.clone().step_by(2).map(|t| [t, (t + 1).min(tiles.end - 1)]);
        if scores.len() == R * shape.rows() {
            for two in twos {
                let rows = parts(scores.as_flattened_mut(), shape.rows() * CHUNK, two[0] * TILE);
                multiply(two, rows, CHUNK, (two[1] - two[0]) * TILE);
            }
            return;
        }
        let mut sums = [TwoTiles([[[0.0; LANES]; TILE_ROWS]; 2]); R];
        for two in twos {
            multiply(two, sums.each_mut().map(TwoTiles::values_mut), LANES, TILE_VALUES);
            for (scores, sums) in scores.chunks_mut(TILE_ROWS).zip(&sums) {
                for (m, scores) in scores.iter_mut().enumerate() {
                    for (t, sums) in two.into_iter().zip(&sums.0) {
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
    chunk: HeadChunk<'a, TiledBf16>,
    tiles: Range<usize>,
    /// Tokens that any query sees.
    any: &'a Range<usize>,
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
        for (weights, visible) in self.weights.iter_mut().zip(self.visible) {
            let (start, end) = (self.tiles.start * TILE, self.tiles.end * TILE);
            let weights: &mut [u16] = bytemuck::cast_slice_mut(&mut weights[..CHUNK / 2]);
            weights[start..visible.start.clamp(start, end)].fill(0);
            weights[visible.end.clamp(start, end)..end].fill(0);
        }
        let edges: Vec<Edge> = self.tiles.clone().filter_map(|t| self.edge(t, self.any)).collect();
        if edges.iter().all(Edge::is_finite) {
            self.multiply(s, &edges, None);
            return;
        }
        for query in 0..self.visible.len() {
            let alone = edges.iter().filter_map(|edge| self.edge(edge.t, &self.visible[query])).collect::<Vec<_>>();
            self.multiply(s, &alone, Some(query));
        }
    }
}

/// A tile of V of which not all queries see all, with zeros for what none sees.
struct Edge {
    t: usize,
    v: Vec<Pairs>,
}

impl Edge {
    fn is_finite(&self) -> bool {
        const INFINITE: u16 = 0x7f80;
        self.v.as_flattened().iter().all(|bits| bits & INFINITE != INFINITE)
    }
}

impl<S: Simd, const R: usize> Mix<'_, S, R> {
    /// Tile `t` with what lies outside of `seen` as zeros; `None` if all queries see all of it.
    fn edge(&self, t: usize, seen: &Range<usize>) -> Option<Edge> {
        let (start, end) = (t * TILE, (t + 1) * TILE);
        if self.visible.iter().all(|visible| visible.start <= start && visible.end >= end) {
            return None;
        }
        let mut v = self.chunk.v(t).to_vec();
        for (pair, row) in v.chunks_exact_mut(self.vectors).enumerate() {
            for (half, token) in [start + 2 * pair, start + 2 * pair + 1].into_iter().enumerate() {
                if !seen.contains(&token) {
                    row.as_flattened_mut().iter_mut().skip(half).step_by(2).for_each(|bits| *bits = 0);
                }
            }
        }
        Some(Edge { t, v })
    }

    /// Add the products of all queries, or of one.
    #[inline(always)]
    fn multiply(&mut self, s: S, edges: &[Edge], only: Option<usize>) {
        let Self { shape, chunk, tiles, visible, weights, acc, vectors, ahead, .. } = self;
        let (vectors, first, width) = (*vectors, tiles.start, *vectors * LANES);
        let mut v = [&[][..]; TILES];
        for t in tiles.clone() {
            v[t] = chunk.v(t);
        }
        for edge in edges {
            v[edge.t] = &edge.v;
        }
        let left: [&[u32]; R] =
            std::array::from_fn(|r| &weights[r * TILE_ROWS..].as_flattened()[first * TOKEN_PAIRS..]);
        let mut multiply = |columns: [usize; 2], sums: [&mut [f32]; R], stride, panel| {
            let right = |step: usize| columns.map(|d| &v[first + step][d..]);
            shape.bf16(left, CHUNK, tiles.len(), right, vectors, false, sums, stride, panel);
            ask(s, ahead, tiles.len() * TOKEN_PAIRS);
        };
        // Behind an odd number the last again, for nothing.
        let twos = (0..vectors).step_by(2).map(|d| [d, (d + 1).min(vectors - 1)]);
        if only.is_none() && visible.len() == R * shape.rows() {
            for two in twos {
                let rows = parts(acc, shape.rows() * width, two[0] * LANES);
                multiply(two, rows, width, (two[1] - two[0]) * LANES);
            }
            return;
        }
        let mut sums = [TwoTiles([[[0.0; LANES]; TILE_ROWS]; 2]); R];
        let rows = only.map_or(0..visible.len(), |only| only..only + 1);
        for two in twos {
            for row in rows.clone() {
                let acc = acc[row * width..][..width].as_chunks::<LANES>().0;
                for (d, sums) in two.into_iter().zip(&mut sums[row / TILE_ROWS].0) {
                    s.store(s.load(&acc[d]), &mut sums[row % TILE_ROWS]);
                }
            }
            multiply(two, sums.each_mut().map(TwoTiles::values_mut), LANES, TILE_VALUES);
            for row in rows.clone() {
                let acc = acc[row * width..][..width].as_chunks_mut::<LANES>().0;
                for (d, sums) in two.into_iter().zip(&sums[row / TILE_ROWS].0) {
                    s.store(s.load(&sums[row % TILE_ROWS]), &mut acc[d]);
                }
            }
        }
    }
}
