//! Each head of a row through a layer of its own: the absorbed products of multi-head latent attention.
#![forbid(unsafe_code)]

use super::Linear;
use crate::shape::{expect_len, rows_of};
use crate::simd::Level;
use crate::threads::{ShouldStop, Threads};
use crate::{Error, Result};

/// `out[row, h] = x[row, h] @ W_h.T + b_h`. `x`: `[rows, heads, inputs]`, `out`: `[rows, heads, outputs]`; all layers
/// have these sizes.
///
/// # Errors
/// As [`Linear::forward`], and [`Error::InvalidArgument`] for no layers or ones of different sizes.
pub fn per_head(
    level: Level,
    threads: &Threads,
    layers: &[&Linear],
    x: &[f32],
    out: &mut [f32],
    should_stop: ShouldStop<'_>,
) -> Result<()> {
    let sizes = layers.first().map_or((0, 0), |layer| (layer.inputs(), layer.outputs()));
    if let Some(other) = layers.iter().find(|layer| (layer.inputs(), layer.outputs()) != sizes) {
        return Err(Error::InvalidArgument(format!("linears: expected layers of equal sizes, got {other:?}")));
    }
    let (inputs, outputs) = sizes;
    let overflow = || Error::InvalidArgument(format!("linears: {} layers of {sizes:?} overflow", layers.len()));
    let x_width = inputs.checked_mul(layers.len()).ok_or_else(overflow)?;
    let out_width = outputs.checked_mul(layers.len()).ok_or_else(overflow)?;
    let rows = rows_of("x", x.len(), x_width)?;
    let expected = rows.checked_mul(out_width).ok_or_else(overflow)?;
    expect_len("out", &format!("shape [{rows}, {}, {outputs}]", layers.len()), expected, out.len())?;
    let (mut heads_in, mut heads_out) = (threads.scratch(rows * inputs)?, threads.scratch(rows * outputs)?);
    for (head, layer) in layers.iter().enumerate() {
        for (row, to) in x.chunks_exact(x_width).zip(heads_in.chunks_exact_mut(inputs)) {
            to.copy_from_slice(&row[head * inputs..][..inputs]);
        }
        layer.forward(level, threads, &heads_in, &mut heads_out, false, should_stop)?;
        for (row, from) in out.chunks_exact_mut(out_width).zip(heads_out.chunks_exact(outputs)) {
            row[head * outputs..][..outputs].copy_from_slice(from);
        }
    }
    Ok(())
}
