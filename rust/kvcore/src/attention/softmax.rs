//! From scores to weights, and the merge of partial softmaxes.
//!
//! ```text
//! plain     m = max(score);  w = 2^((score - m) * scale), rounded;  l = sum(w);  m = m * scale
//! weights   x = score * scale [* K's scale of the token]; softcap; bias;  m = max(x);  w = 2^(x - m), rounded;  l = sum(w)
//! merge     m' = max(m, m2);  l' = l 2^(m - m') + l2 2^(m2 - m');  acc likewise
//! sink      l' = l + 2^(sink - m), with m the larger of both
//! ```
//! All in base 2: x is in units of log2(e), so that one `exp2` is enough.
#![forbid(unsafe_code)]

use std::f32::consts::LOG2_E;
use std::ops::Range;

use super::chunk::{CHUNK, HeadChunk, TokenScales};
use super::products::tiles_of;
use super::scoring::HeadBias;
use super::tile::State;
use crate::simd::{Format, LANES, Simd, Work, math};
use crate::storage::TILE;

/// Lanes of tile `t` that are `visible` from `x`, the others from `other`.
#[inline(always)]
fn visible_lanes<S: Simd>(s: S, visible: &Range<usize>, t: usize, x: S::F32, other: S::F32) -> S::F32 {
    let x = s.first_lanes(visible.end - t * TILE, x, other);
    if t * TILE < visible.start { s.first_lanes(visible.start - t * TILE, other, x) } else { x }
}

/// Scores of some queries that are only scaled to weights, as [`Weights`], in two passes over all of them: no query waits for
/// another's maximum or sum. The scores stay as they are.
pub struct Plain<'a, S: Simd, F: Format> {
    /// Multiplies the scores, to base-2 units; more than 0.
    pub unit: f32,
    /// Tokens of the chunk that each query sees.
    pub visible: &'a [Range<usize>],
    /// `q . k` of each query.
    pub scores: &'a mut [[f32; CHUNK]],
    /// The weights.
    pub weights: &'a mut [[F::Coef<S>; CHUNK]],
    /// Where the maxima go, in base-2 units.
    pub max: &'a mut [f32],
    /// Where the sums go.
    pub sum: &'a mut [f32],
}

impl<S: Simd, F: Format> Work<S> for Plain<'_, S, F> {
    type Output = ();

    #[inline(always)]
    fn run(self, s: S) {
        let Self { unit, visible, scores, weights, max, sum } = self;
        let seeing = || visible.iter().enumerate().filter(|(_, visible)| !visible.is_empty());
        for (query, visible) in seeing() {
            max[query] = largest(s, visible, &mut scores[query]);
        }
        for (query, visible) in seeing() {
            let tiles = tiles_of(visible);
            let scores = &scores[query].as_chunks::<LANES>().0[tiles.clone()];
            let mut outs = weights[query][tiles.start * TILE / F::STEP..].chunks_exact_mut(TILE / F::STEP * 2);
            // The largest is 0 exactly, whatever its size: scaled before it is subtracted it would be so only if both are rounded.
            let (factor, largest, mut lanes) = (s.splat(unit), s.splat(max[query]), s.splat(0.0));
            max[query] *= unit;
            let (pairs, last) = scores.as_chunks::<2>();
            for ([a, b], out) in pairs.iter().zip(&mut outs) {
                let a = F::exp2(s, s.mul(s.sub(s.load(a), largest), factor));
                let b = F::exp2(s, s.mul(s.sub(s.load(b), largest), factor));
                lanes = F::add_two_weights(s, lanes, [a, b], out);
            }
            if let [last] = last {
                let x = F::exp2(s, s.mul(s.sub(s.load(last), largest), factor));
                let out = &mut weights[query][(tiles.end - 1) * TILE / F::STEP..][..TILE / F::STEP];
                lanes = s.add(lanes, F::store_weights(s, x, out));
            }
            sum[query] = s.reduce_sum(lanes);
        }
    }
}

/// The largest of the scores that are seen; those beside them, in the first tile and the last, become minus infinity.
#[inline(always)]
fn largest<S: Simd>(s: S, visible: &Range<usize>, scores: &mut [f32; CHUNK]) -> f32 {
    let (tiles, lowest) = (tiles_of(visible), s.splat(f32::NEG_INFINITY));
    let scores = &mut scores.as_chunks_mut::<LANES>().0[tiles.clone()];
    for t in [tiles.start, tiles.end - 1] {
        let scores = &mut scores[t - tiles.start];
        s.store(visible_lanes(s, visible, t, s.load(scores), lowest), scores);
    }
    let (fours, rest) = scores.as_chunks::<4>();
    let mut max = [lowest; 4];
    for four in fours {
        for i in 0..4 {
            max[i] = s.max(max[i], s.load(&four[i]));
        }
    }
    for scores in rest {
        max[0] = s.max(max[0], s.load(scores));
    }
    s.reduce_max(s.max(s.max(max[0], max[1]), s.max(max[2], max[3])))
}

/// Scores to softmax weights `exp(scale * score - max)` for the `visible` tokens. Returns the maximum (of the scores in
/// base-2 units) and the sum of the weights as they are multiplied, that is, after rounding. Where tokens have scales,
/// K's multiply the scores and V's the weights, which are rounded with them; the sum is that of the weights alone.
pub struct Weights<'a, S: Simd, F: Format> {
    /// For the scales of tokens.
    pub chunk: HeadChunk<'a, F>,
    /// Multiplies the scores.
    pub scale: f32,
    /// Bends them.
    pub softcap: Option<f32>,
    /// Is added to them.
    pub bias: HeadBias<'a>,
    /// Of the chunk.
    pub first_token: usize,
    /// Of the query.
    pub position: usize,
    /// Tokens of the chunk that the query sees, at least one.
    pub visible: Range<usize>,
    /// `q . k`; afterwards in base-2 units.
    pub scores: &'a mut [f32; CHUNK],
    /// The weights.
    pub weights: &'a mut [F::Coef<S>; CHUNK],
}

impl<S: Simd, F: Format> Work<S> for Weights<'_, S, F> {
    type Output = (f32, f32);

    #[inline(always)]
    fn run(mut self, s: S) -> (f32, f32) {
        let max = match (self.softcap, self.bias, self.chunk.scales()) {
            (None, HeadBias::None, Some(scales)) => {
                let scale = s.splat(self.scale * LOG2_E);
                self.scaled(s, |t, x| s.mul(s.mul(x, scale), s.load(scales.k[t])))
            }
            _ => {
                let bent =
                    Bent { scale: self.scale, softcap: self.softcap, bias: self.bias, scales: self.chunk.scales() };
                let (first_token, position) = (self.first_token, self.position);
                self.scaled(s, |t, x| bent.of(s, t, first_token + t * TILE, position, x))
            }
        };
        let (visible, tiles) = (&self.visible, tiles_of(&self.visible));
        let scores = &self.scores.as_chunks::<LANES>().0[tiles.clone()];
        let outs = self.weights.chunks_exact_mut(TILE / F::STEP).skip(tiles.start);
        let (mut sum, zero, max_lanes) = (s.splat(0.0), s.splat(0.0), s.splat(max));
        match self.chunk.scales() {
            None => {
                for (scores, out) in scores.iter().zip(outs) {
                    let x = F::exp2(s, s.sub(s.load(scores), max_lanes));
                    sum = s.add(sum, F::store_weights(s, x, out));
                }
            }
            Some(scales) => {
                for ((t, scores), out) in tiles.zip(scores).zip(outs) {
                    let x = F::exp2(s, s.sub(s.load(scores), max_lanes));
                    sum = s.add(sum, x);
                    // Zero times the scale of a stale slot, which may be anything, is not zero.
                    let scaled = visible_lanes(s, visible, t, s.mul(x, s.load(scales.v[t])), zero);
                    F::store_coefs(s, F::round_coefs(s, scaled), out);
                }
            }
        }
        (max, s.reduce_sum(sum))
    }
}

impl<S: Simd, F: Format> Weights<'_, S, F> {
    /// Pass each tile's scores through `scale`, hide what is not seen, and return the maximum.
    #[inline(always)]
    fn scaled(&mut self, s: S, scale: impl Fn(usize, S::F32) -> S::F32) -> f32 {
        let (visible, tiles, lowest) = (&self.visible, tiles_of(&self.visible), s.splat(f32::NEG_INFINITY));
        let last = tiles.end - 1;
        let mut max = lowest;
        for (t, scores) in tiles.clone().zip(&mut self.scores.as_chunks_mut::<LANES>().0[tiles.clone()]) {
            let mut x = scale(t, s.load(scores));
            if t == tiles.start || t == last {
                x = visible_lanes(s, visible, t, x, lowest);
            }
            max = s.max(max, x);
            s.store(x, scores);
        }
        s.reduce_max(max)
    }
}

/// All that may be done to scores.
struct Bent<'a> {
    scale: f32,
    softcap: Option<f32>,
    bias: HeadBias<'a>,
    scales: Option<&'a TokenScales<'a>>,
}

impl Bent<'_> {
    #[inline(always)]
    fn of<S: Simd>(&self, s: S, t: usize, token: usize, position: usize, x: S::F32) -> S::F32 {
        // Bent scores are scaled to their cap first and to base 2 behind it.
        let mut x = s.mul(x, s.splat(self.scale * self.softcap.map_or(LOG2_E, f32::recip)));
        if let Some(scales) = self.scales {
            x = s.mul(x, s.load(scales.k[t]));
        }
        if let Some(cap) = self.softcap {
            x = s.mul(math::tanh(s, x), s.splat(cap * LOG2_E));
        }
        if !matches!(self.bias, HeadBias::None) {
            let bias: [f32; LANES] = std::array::from_fn(|i| self.bias.at(token + i, position));
            x = s.mul_add(s.load(&bias), s.splat(LOG2_E), x);
        }
        x
    }
}

/// Running states of some queries with one more chunk: both rescaled to the larger maximum.
pub struct Merge<'a> {
    /// The running maxima.
    pub m: &'a mut [f32],
    /// The running sums of weights.
    pub l: &'a mut [f32],
    /// The running sums of V, `[queries, width]`.
    pub acc: &'a mut [f32],
    /// What comes to them, in the same order.
    pub add: States<'a>,
}

/// States of some queries.
#[derive(Clone, Copy)]
pub struct States<'a> {
    /// The maxima.
    pub m: &'a [f32],
    /// The sums of weights.
    pub l: &'a [f32],
    /// The weighted sums of V, `[queries, width]`.
    pub acc: &'a [f32],
}

impl<S: Simd> Work<S> for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self, s: S) {
        let width = self.acc.len() / self.m.len();
        let queries = self.m.chunks_mut(LANES).zip(self.l.chunks_mut(LANES)).zip(self.acc.chunks_mut(LANES * width));
        let adds = self.add.m.chunks(LANES).zip(self.add.l.chunks(LANES)).zip(self.add.acc.chunks(LANES * width));
        for (((m, l), acc), ((add_m, add_l), add_acc)) in queries.zip(adds) {
            let lanes = |x: &[f32]| {
                let mut lanes = [0.0; LANES];
                lanes[..x.len()].copy_from_slice(x);
                s.load(&lanes)
            };
            let (before, other) = (lanes(m), lanes(add_m));
            let max = s.max(other, before);
            let (mut old, mut new, mut sums, mut maxima) = ([0.0; LANES], [0.0; LANES], [0.0; LANES], [0.0; LANES]);
            let (keep, take) = (math::exp2(s, s.sub(before, max)), math::exp2(s, s.sub(other, max)));
            s.store(keep, &mut old);
            s.store(take, &mut new);
            s.store(s.add(s.mul(lanes(l), keep), s.mul(lanes(add_l), take)), &mut sums);
            s.store(max, &mut maxima);
            m.copy_from_slice(&maxima[..m.len()]);
            l.copy_from_slice(&sums[..l.len()]);
            let rows = acc.chunks_exact_mut(width).zip(add_acc.chunks_exact(width));
            for ((acc, add), (old, new)) in rows.zip(old.into_iter().zip(new)) {
                let (old, new) = (s.splat(old), s.splat(new));
                for (acc, add) in acc.as_chunks_mut::<LANES>().0.iter_mut().zip(add.as_chunks::<LANES>().0) {
                    s.store(s.mul_add(s.load(add), new, s.mul(s.load(acc), old)), acc);
                }
            }
        }
    }
}

/// One query's result: `out = acc / l * scale`.
pub struct Finish<'a> {
    /// The state over all tokens.
    pub state: State<'a>,
    /// A logit (in natural units) that has a weight and no value.
    pub sink: Option<f32>,
    /// V's scale.
    pub scale: f32,
    /// `v_dim` values.
    pub out: &'a mut [f32],
    /// Where the logarithm of the sum of all exponentials goes, the sink's among them, in natural units.
    pub lse: Option<&'a mut f32>,
}

impl<S: Simd> Work<S> for Finish<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self, s: S) {
        let State { mut m, mut l, acc } = self.state;
        let mut kept = 1.0;
        if let Some(sink) = self.sink {
            let sink = sink * LOG2_E;
            let max = if sink > m { sink } else { m };
            let mut factors = [0.0; LANES];
            (factors[0], factors[1]) = (m - max, sink - max);
            // Minus infinity is a head without a sink.
            s.store(math::exp2(s, s.load(&factors)), &mut factors);
            (m, l, kept) = (max, l * factors[0] + factors[1], factors[0]);
        }
        let (acc, scale) = (acc.as_chunks::<LANES>().0, s.splat(self.scale));
        let kept = self.sink.map(|_| s.splat(kept));
        let (whole, rest) = self.out.as_chunks_mut::<LANES>();
        for (out, acc) in whole.iter_mut().zip(acc) {
            s.store(divide(s, acc, kept, l, scale), out);
        }
        if !rest.is_empty() {
            let mut lanes = [0.0; LANES];
            s.store(divide(s, &acc[whole.len()], kept, l, scale), &mut lanes);
            rest.copy_from_slice(&lanes[..rest.len()]);
        }
        if let Some(lse) = self.lse {
            *lse = (f64::from(m) * std::f64::consts::LN_2 + f64::from(l).ln()) as f32;
        }
    }
}

/// `acc`, of which a sink leaves the share `kept`, divided by `l`.
#[inline(always)]
fn divide<S: Simd>(s: S, acc: &[f32; LANES], kept: Option<S::F32>, l: f32, scale: S::F32) -> S::F32 {
    let acc = kept.map_or(s.load(acc), |kept| s.mul(s.load(acc), kept));
    s.mul(s.div(acc, s.splat(l)), scale)
}
