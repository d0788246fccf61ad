//! The activations of decoders' MLPs, plain and gated.
//!
//! ```text
//! plain:  out = f(x)
//! gated:  out = f(gate) * up                                  each row all of gate, then all of up
//! gpt-oss: gate = min(gate, limit);  up = clamp(up, -limit, limit)
//!          out = (up + 1) * gate * sigmoid(alpha * gate)
//! ```
//! Rests of a row go through the same vector code as whole lanes, so a value's bits do not depend on where it stands.
#![forbid(unsafe_code)]

use super::rows_per_task;
use crate::shape::{expect_len, rows_of};
use crate::simd::{LANES, Level, Simd, Work, math};
use crate::threads::{ShouldStop, Threads};
use crate::{Error, Result};

/// A function of one value, or of a gate and a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `x * sigmoid(x)`
    Silu,
    /// `x * Phi(x)`, Phi being the normal distribution (Hendrycks and Gimpel, 2016).
    Gelu,
    /// The approximation of it by tanh.
    GeluTanh,
    /// `max(x, 0)`
    Relu,
    /// `1 / (1 + e^-x)`
    Sigmoid,
    /// gpt-oss's, which is gated only.
    ClampedSwiglu {
        /// Factor inside of the sigmoid.
        alpha: f32,
        /// Bound of the gate from above, and of the other part on both sides.
        limit: f32,
    },
}

/// `out = f(x)`, or if `gated` `f(gate) * up`. `out`: `[rows, n]`; `x`: `[rows, n]`, or `[rows, 2 * n]`, each row all of
/// gate, then all of up.
///
/// # Errors
/// [`Error::InvalidArgument`] if the shapes do not fit, or a gated activation is to do without a gate;
/// [`Error::Interrupted`] if `should_stop` said so.
#[expect(clippy::too_many_arguments, reason = "an operation, its sizes, and where it runs")]
pub fn activate(
    level: Level,
    threads: &Threads,
    activation: Activation,
    gated: bool,
    x: &[f32],
    n: usize,
    out: &mut [f32],
    should_stop: ShouldStop<'_>,
) -> Result<()> {
    if !gated && matches!(activation, Activation::ClampedSwiglu { .. }) {
        return Err(Error::InvalidArgument(format!("activation: expected one without a gate, got {activation:?}")));
    }
    if let Activation::ClampedSwiglu { alpha, limit } = activation
        && !(alpha.is_finite() && limit.is_finite() && limit >= 0.0)
    {
        let text = format!("expected finite numbers and a limit of at least 0, got alpha {alpha} and limit {limit}");
        return Err(Error::InvalidArgument(format!("activation: {text}")));
    }
    let parts = if gated { 2 } else { 1 };
    let width = n.checked_mul(parts).ok_or_else(|| Error::InvalidArgument(format!("n: {parts} * {n} overflows")))?;
    let rows = rows_of("x", x.len(), width)?;
    expect_len("out", &format!("shape [{rows}, {n}]"), rows * n, out.len())?;
    // exp2 and a division make an element cost about 16 elementary steps of a lane.
    let each = rows_per_task(rows, n.saturating_mul(8), threads);
    let items = x
        .chunks(each * width)
        .zip(out.chunks_mut(each * n))
        .map(|(x, out)| Rows { activation, gated, x, n, out })
        .collect();
    threads.for_each(items, should_stop, |item| level.dispatch(item))
}

struct Rows<'a> {
    activation: Activation,
    gated: bool,
    x: &'a [f32],
    n: usize,
    out: &'a mut [f32],
}

impl<S: Simd> Work<S> for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self, s: S) {
        let (x, n, out) = (self.x, self.n, self.out);
        // A loop for each function: none is chosen inside.
        macro_rules! loops {
            ($($name:ident: $function:expr),*) => {
                match self.activation {
                    $(Activation::$name if self.gated => each_gated(s, x, n, out, |gate, up| {
                        s.mul($function(s, gate), up)
                    }),
                    Activation::$name => each(s, x, out, |x| $function(s, x)),)*
                    Activation::ClampedSwiglu { alpha, limit } => {
                        let (zero, limit) = (s.splat(0.0), s.splat(limit));
                        let most = |x| s.sub(zero, s.max(s.sub(zero, limit), s.sub(zero, x)));
                        each_gated(s, x, n, out, |gate, up| {
                            let (gate, up) = (most(gate), s.max(s.sub(zero, limit), most(up)));
                            let swish = s.mul(gate, math::sigmoid(s, s.mul(s.splat(alpha), gate)));
                            s.mul(s.add(up, s.splat(1.0)), swish)
                        });
                    }
                }
            };
        }
        loops!(
            Silu: math::silu,
            Gelu: math::gelu,
            GeluTanh: math::gelu_tanh,
            Relu: math::relu,
            Sigmoid: math::sigmoid
        );
    }
}

#[inline(always)]
fn each<S: Simd>(s: S, x: &[f32], out: &mut [f32], f: impl Fn(S::F32) -> S::F32) {
    for (x, out) in x.chunks(LANES).zip(out.chunks_mut(LANES)) {
        store(s, f(load(s, x)), out);
    }
}

#[inline(always)]
fn each_gated<S: Simd>(s: S, x: &[f32], n: usize, out: &mut [f32], f: impl Fn(S::F32, S::F32) -> S::F32) {
    for (row, out) in x.chunks_exact(2 * n).zip(out.chunks_exact_mut(n)) {
        let (gate, up) = row.split_at(n);
        for ((gate, up), out) in gate.chunks(LANES).zip(up.chunks(LANES)).zip(out.chunks_mut(LANES)) {
            store(s, f(load(s, gate), load(s, up)), out);
        }
    }
}

#[inline(always)]
pub(super) fn load<S: Simd>(s: S, x: &[f32]) -> S::F32 {
    if let Some(x) = x.first_chunk() {
        return s.load(x);
    }
    let mut lanes = [0.0; LANES];
    lanes[..x.len()].copy_from_slice(x);
    s.load(&lanes)
}

#[inline(always)]
pub(super) fn store<S: Simd>(s: S, x: S::F32, out: &mut [f32]) {
    if let Some(out) = out.first_chunk_mut() {
        return s.store(x, out);
    }
    let mut lanes = [0.0; LANES];
    s.store(x, &mut lanes);
    out.copy_from_slice(&lanes[..out.len()]);
}
