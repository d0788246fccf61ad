//! Two steps of a decoder layer in one call each.
#![forbid(unsafe_code)]

use super::Linear;
use crate::ops::{Activation, Norm, activate, normalize};
use crate::shape::{expect_len, rows_of};
use crate::simd::Level;
use crate::threads::{ShouldStop, Threads};
use crate::{Error, Result};

/// `out = norm(x) @ W.T + b`. `x`: `[rows, inputs]`, the norm's weights: `[inputs]`, `out`: `[rows, outputs]`.
///
/// # Errors
/// As [`normalize`] and [`Linear::forward`].
pub fn norm_linear(
    level: Level,
    threads: &Threads,
    linear: &Linear,
    x: &[f32],
    norm: Norm<'_>,
    out: &mut [f32],
    should_stop: ShouldStop<'_>,
) -> Result<()> {
    expect_len("norm_weight", &format!("shape [{}]", linear.inputs()), linear.inputs(), norm.weight.len())?;
    let rows = rows_of("x", x.len(), linear.inputs())?;
    check_out(rows, linear, out)?;
    let mut normed = threads.scratch(x.len())?;
    normalize(level, threads, x, norm, &mut normed, should_stop)?;
    linear.forward(level, threads, &normed, out, false, should_stop)
}

/// `residual += f(x) @ W.T + b`, `f` being a plain activation of `x` (`[rows, inputs]`), or a gated one (`[rows, 2 *
/// inputs]`, each row all of gate, then all of up); `residual`: `[rows, outputs]`.
///
/// # Errors
/// As [`activate`] and [`Linear::forward`].
#[expect(clippy::too_many_arguments, reason = "two operations' arguments")]
pub fn activated_linear_add(
    level: Level,
    threads: &Threads,
    linear: &Linear,
    activation: Activation,
    gated: bool,
    x: &[f32],
    residual: &mut [f32],
    should_stop: ShouldStop<'_>,
) -> Result<()> {
    let inputs = linear.inputs();
    let parts = if gated { 2 } else { 1 };
    let width = inputs.checked_mul(parts).ok_or_else(|| Error::InvalidArgument(format!("2 * {inputs} overflows")))?;
    let rows = rows_of("x", x.len(), width)?;
    check_out(rows, linear, residual)?;
    let mut active = threads.scratch(x.len() / parts)?;
    activate(level, threads, activation, gated, x, inputs, &mut active, should_stop)?;
    linear.forward(level, threads, &active, residual, true, should_stop)
}

/// Before any work is done.
fn check_out(rows: usize, linear: &Linear, out: &[f32]) -> Result<()> {
    let outputs = linear.outputs();
    let overflow = || Error::InvalidArgument(format!("out: shape [{rows}, {outputs}] overflows"));
    expect_len("out", &format!("shape [{rows}, {outputs}]"), rows.checked_mul(outputs).ok_or_else(overflow)?, out.len())
}
