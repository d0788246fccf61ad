//! Root-mean-square normalisation.
//!
//! ```text
//! inv = 1 / sqrt(sum(x^2) / n + eps);  out = weight * (x * inv)
//! ```
//! The sum runs in 16 lanes, then over the lanes by halves.
#![forbid(unsafe_code)]

use super::rows_per_task;
use crate::shape::{expect_len, rows_of};
use crate::simd::{LANES, Level, Simd, Work};
use crate::threads::{ShouldStop, Threads};
use crate::{Error, Result};

/// `out = weight * (x / sqrt(mean(x^2) + eps))` for each row. `x`, `out`: `[rows, n]`, `weight`: `[n]`.
///
/// # Errors
/// [`Error::InvalidArgument`] if the shapes do not fit or `eps` is negative or not finite;
/// [`Error::Interrupted`](crate::Error::Interrupted) if `should_stop` said so.
pub fn rms_norm(
    level: Level,
    threads: &Threads,
    x: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
    should_stop: ShouldStop<'_>,
) -> Result<()> {
    let n = weight.len();
    let rows = rows_of("x", x.len(), n)?;
    expect_len("out", &format!("shape [{rows}, {n}]"), x.len(), out.len())?;
    if !(eps.is_finite() && eps >= 0.0) {
        return Err(Error::InvalidArgument(format!("eps: expected a finite number of at least 0, got {eps}")));
    }
    let each = rows_per_task(rows, n, threads) * n;
    let items = x.chunks(each).zip(out.chunks_mut(each)).map(|(x, out)| Norm { x, weight, eps, out }).collect();
    threads.for_each(items, should_stop, |item| level.dispatch(item))
}

struct Norm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl<S: Simd> Work<S> for Norm<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self, s: S) {
        let n = self.weight.len();
        let (weight, weight_rest) = self.weight.as_chunks::<LANES>();
        for (x, out) in self.x.chunks_exact(n).zip(self.out.chunks_exact_mut(n)) {
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
            let inv = 1.0 / (mean + self.eps).sqrt();
            for ((x, weight), out) in x.iter().zip(weight).zip(out) {
                s.store(s.mul(s.load(weight), s.mul(s.load(x), s.splat(inv))), out);
            }
            for ((x, weight), out) in x_rest.iter().zip(weight_rest).zip(out_rest) {
                *out = weight * (x * inv);
            }
        }
    }
}
