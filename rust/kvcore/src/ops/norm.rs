//! Normalisation of rows, or of the heads that a row is made of.
//!
//! ```text
//! rms:    inv = 1 / sqrt(sum(x^2) / n + eps);                             out = weight * (x * inv)
//! layer:  mean = sum(x) / n;  inv = 1 / sqrt(sum((x - mean)^2) / n + eps);  out = weight * ((x - mean) * inv) + bias
//! ```
//! Sums run in 16 lanes, then over the lanes by halves.
#![forbid(unsafe_code)]

use super::rows_per_task;
use crate::shape::{expect_len, rows_of};
use crate::simd::{LANES, Level, Simd, Work};
use crate::threads::{ShouldStop, Threads};
use crate::{Error, Result};

/// What is divided by, and whether the mean is taken off before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// By the root of the mean square (Zhang and Sennrich, 2019).
    Rms,
    /// By the standard deviation, after the mean is taken off (Ba et al., 2016).
    Layer,
}

/// A normalisation with its weights.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// Which.
    pub kind: NormKind,
    /// `[n]`
    pub weight: &'a [f32],
    /// `[n]`
    pub bias: Option<&'a [f32]>,
    /// Added to the mean square.
    pub eps: f32,
}

impl<'a> Norm<'a> {
    /// Root-mean-square normalisation without a bias.
    pub fn rms(weight: &'a [f32], eps: f32) -> Self {
        Self { kind: NormKind::Rms, weight, bias: None, eps }
    }

    /// That there are weights for `width` values.
    pub(super) fn check(&self, what: &str, width: usize) -> Result<()> {
        expect_len(what, &format!("shape [{width}]"), width, self.weight.len())?;
        if let Some(bias) = self.bias {
            expect_len("norm_bias", &format!("shape [{width}]"), width, bias.len())?;
        }
        if !(self.eps.is_finite() && self.eps >= 0.0) {
            let text = format!("eps: expected a finite number of at least 0, got {}", self.eps);
            return Err(Error::InvalidArgument(text));
        }
        Ok(())
    }

    /// Normalise a row in pieces of `span` values, which divides its length.
    #[inline(always)]
    pub(super) fn apply<S: Simd>(&self, s: S, x: &[f32], span: usize, out: &mut [f32]) {
        for (at, (x, out)) in x.chunks_exact(span).zip(out.chunks_exact_mut(span)).enumerate() {
            let weight = &self.weight[at * span..][..span];
            match (self.kind, self.bias) {
                (NormKind::Rms, None) => rms(s, x, weight, self.eps, out),
                (NormKind::Rms, Some(bias)) => {
                    rms(s, x, weight, self.eps, out);
                    out.iter_mut().zip(&bias[at * span..]).for_each(|(out, bias)| *out += bias);
                }
                (NormKind::Layer, bias) => layer(s, x, weight, bias.map(|bias| &bias[at * span..]), self.eps, out),
            }
        }
    }
}

/// Normalise each row. `x`, `out`: `[rows, n]`.
///
/// # Errors
/// [`Error::InvalidArgument`] if the shapes do not fit or `eps` is negative or not finite;
/// [`Error::Interrupted`](crate::Error::Interrupted) if `should_stop` said so.
pub fn normalize(
    level: Level,
    threads: &Threads,
    x: &[f32],
    norm: Norm<'_>,
    out: &mut [f32],
    should_stop: ShouldStop<'_>,
) -> Result<()> {
    let n = norm.weight.len();
    let rows = rows_of("x", x.len(), n)?;
    expect_len("out", &format!("shape [{rows}, {n}]"), x.len(), out.len())?;
    norm.check("weight", n)?;
    let each = rows_per_task(rows, n, threads) * n;
    let items = x.chunks(each).zip(out.chunks_mut(each)).map(|(x, out)| Rows { x, norm, out }).collect();
    threads.for_each(items, should_stop, |item| level.dispatch(item))
}

struct Rows<'a> {
    x: &'a [f32],
    norm: Norm<'a>,
    out: &'a mut [f32],
}

impl<S: Simd> Work<S> for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self, s: S) {
        let n = self.norm.weight.len();
        for (x, out) in self.x.chunks_exact(n).zip(self.out.chunks_exact_mut(n)) {
            self.norm.apply(s, x, n, out);
        }
    }
}

#[inline(always)]
fn rms<S: Simd>(s: S, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let n = x.len();
    let (weight, weight_rest) = weight.as_chunks::<LANES>();
    let (x, x_rest) = x.as_chunks::<LANES>();
    let (out, out_rest) = out.as_chunks_mut::<LANES>();
    let mut sum = s.splat(0.0);
    for x in x {
        let x = s.load(x);
        sum = s.mul_add(x, x, sum);
    }
    let mut lanes = [0.0; LANES];
    lanes[..x_rest.len()].copy_from_slice(x_rest);
    let last = s.load(&lanes);
    let mean = s.reduce_sum(s.mul_add(last, last, sum)) / n as f32;
    let inv = 1.0 / (mean + eps).sqrt();
    for ((x, weight), out) in x.iter().zip(weight).zip(out) {
        s.store(s.mul(s.load(weight), s.mul(s.load(x), s.splat(inv))), out);
    }
    for ((x, weight), out) in x_rest.iter().zip(weight_rest).zip(out_rest) {
        *out = weight * (x * inv);
    }
}

#[inline(always)]
fn layer<S: Simd>(s: S, x: &[f32], weight: &[f32], bias: Option<&[f32]>, eps: f32, out: &mut [f32]) {
    let n = x.len();
    let (whole, rest) = x.as_chunks::<LANES>();
    let mut sum = s.splat(0.0);
    for x in whole {
        sum = s.add(sum, s.load(x));
    }
    let mut lanes = [0.0; LANES];
    lanes[..rest.len()].copy_from_slice(rest);
    let mean = s.reduce_sum(s.add(sum, s.load(&lanes))) / n as f32;
    let mut squares = s.splat(0.0);
    for x in whole {
        let x = s.sub(s.load(x), s.splat(mean));
        squares = s.mul_add(x, x, squares);
    }
    lanes[..rest.len()].iter_mut().for_each(|x| *x -= mean);
    let last = s.load(&lanes);
    let inv = 1.0 / (s.reduce_sum(s.mul_add(last, last, squares)) / n as f32 + eps).sqrt();
    for (i, out) in out.iter_mut().enumerate() {
        *out = weight[i] * ((x[i] - mean) * inv);
    }
    if let Some(bias) = bias {
        out.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias);
    }
}
