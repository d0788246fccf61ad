//! Soft caps of logits.
#![forbid(unsafe_code)]

use super::activation::{load, store};
use super::rows_per_task;
use crate::simd::{LANES, Level, Simd, Work, math};
use crate::threads::{ShouldStop, Threads};
use crate::{Error, Result};

/// `x = cap * tanh(x / cap)` for each value (Gemma 2), in place.
///
/// # Errors
/// [`Error::InvalidArgument`] if `cap` is not a finite number above 0;
/// [`Error::Interrupted`] if `should_stop` said so (`x` is then partly written).
pub fn softcap(level: Level, threads: &Threads, x: &mut [f32], cap: f32, should_stop: ShouldStop<'_>) -> Result<()> {
    if !(cap.is_finite() && cap > 0.0) {
        return Err(Error::InvalidArgument(format!("cap: expected a finite number above 0, got {cap}")));
    }
    let each = rows_per_task(x.len().div_ceil(LANES), 8 * LANES, threads) * LANES;
    let items = x.chunks_mut(each).map(|x| Capped { x, cap }).collect();
    threads.for_each(items, should_stop, |item| level.dispatch(item))
}

struct Capped<'a> {
    x: &'a mut [f32],
    cap: f32,
}

impl<S: Simd> Work<S> for Capped<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self, s: S) {
        let cap = s.splat(self.cap);
        for x in self.x.chunks_mut(LANES) {
            store(s, s.mul(cap, math::tanh(s, s.div(load(s, x), cap))), x);
        }
    }
}
