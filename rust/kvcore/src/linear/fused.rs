//! Two steps of a decoder layer in one call each.
#![forbid(unsafe_code)]

use super::Linear;
use crate::ops::{rms_norm, silu_mul};
use crate::shape::{expect_len, rows_of};
use crate::simd::Level;
use crate::threads::{ShouldStop, Threads};
use crate::{Error, Result};

/// `out = rms_norm(x) @ W.T + b`. `x`: `[rows, inputs]`, `norm_weight`: `[inputs]`, `out`: `[rows, outputs]`.
///
/// # Errors
/// As [`rms_norm`] and [`Linear::forward`].
#[expect(clippy::too_many_arguments, reason = "two operations' arguments")]
pub fn norm_linear(
    level: Level,
    threads: &Threads,
    linear: &Linear,
    x: &[f32],
    norm_weight: &[f32],
    eps: f32,
    out: &mut [f32],
    should_stop: ShouldStop<'_>,
) -> Result<()> {
    expect_len("norm_weight", &format!("shape [{}]", linear.inputs()), linear.inputs(), norm_weight.len())?;
    let rows = rows_of("x", x.len(), linear.inputs())?;
    check_out(rows, linear, out)?;
    let mut normed = vec![0.0; x.len()];
    rms_norm(level, threads, x, norm_weight, eps, &mut normed, should_stop)?;
    linear.forward(level, threads, &normed, out, false, should_stop)
}

/// `residual += (silu(gate) * up) @ W.T + b`. `gate_up`: `[rows, 2 * inputs]`, each row all of gate, then all of up;
/// `residual`: `[rows, outputs]`.
///
/// # Errors
/// As [`silu_mul`] and [`Linear::forward`].
pub fn gated_linear_add(
    level: Level,
    threads: &Threads,
    linear: &Linear,
    gate_up: &[f32],
    residual: &mut [f32],
    should_stop: ShouldStop<'_>,
) -> Result<()> {
    let inputs = linear.inputs();
    let width = inputs.checked_mul(2).ok_or_else(|| Error::InvalidArgument(format!("2 * {inputs} overflows")))?;
    let rows = rows_of("gate_up", gate_up.len(), width)?;
    check_out(rows, linear, residual)?;
    let mut gated = vec![0.0; gate_up.len() / 2];
    silu_mul(level, threads, gate_up, inputs, &mut gated, should_stop)?;
    linear.forward(level, threads, &gated, residual, true, should_stop)
}

/// Before any work is done.
fn check_out(rows: usize, linear: &Linear, out: &[f32]) -> Result<()> {
    let outputs = linear.outputs();
    let overflow = || Error::InvalidArgument(format!("out: shape [{rows}, {outputs}] overflows"));
    expect_len("out", &format!("shape [{rows}, {outputs}]"), rows.checked_mul(outputs).ok_or_else(overflow)?, out.len())
}
