//! The gated activation of llama-like decoders.
#![forbid(unsafe_code)]

use super::rows_per_task;
use crate::shape::{expect_len, rows_of};
use crate::simd::{LANES, Level, Simd, Work, math};
use crate::threads::{ShouldStop, Threads};
use crate::{Error, Result};

/// `out = silu(gate) * up`. `gate_up`: `[rows, 2 * n]`, each row all of gate, then all of up; `out`: `[rows, n]`.
///
/// # Errors
/// [`Error::InvalidArgument`] if the shapes do not fit;
/// [`Error::Interrupted`](crate::Error::Interrupted) if `should_stop` said so.
pub fn silu_mul(
    level: Level,
    threads: &Threads,
    gate_up: &[f32],
    n: usize,
    out: &mut [f32],
    should_stop: ShouldStop<'_>,
) -> Result<()> {
    let width = n.checked_mul(2).ok_or_else(|| Error::InvalidArgument(format!("n: 2 * {n} overflows")))?;
    let rows = rows_of("gate_up", gate_up.len(), width)?;
    expect_len("out", &format!("shape [{rows}, {n}]"), rows * n, out.len())?;
    // exp2 and a division make an element cost about 16 elementary steps of a lane.
    let each = rows_per_task(rows, n.saturating_mul(8), threads);
    let items = gate_up
        .chunks(each * width)
        .zip(out.chunks_mut(each * n))
        .map(|(gate_up, out)| Gated { gate_up, n, out })
        .collect();
    threads.for_each(items, should_stop, |item| level.dispatch(item))
}

struct Gated<'a> {
    gate_up: &'a [f32],
    n: usize,
    out: &'a mut [f32],
}

impl<S: Simd> Work<S> for Gated<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self, s: S) {
        for (row, out) in self.gate_up.chunks_exact(2 * self.n).zip(self.out.chunks_exact_mut(self.n)) {
            let (gate, up) = row.split_at(self.n);
            let (gate, gate_rest) = gate.as_chunks::<LANES>();
            let (up, up_rest) = up.as_chunks::<LANES>();
            let (out, out_rest) = out.as_chunks_mut::<LANES>();
            for ((gate, up), out) in gate.iter().zip(up).zip(out) {
                s.store(s.mul(math::silu(s, s.load(gate)), s.load(up)), out);
            }
            if !gate_rest.is_empty() {
                let (mut gate, mut up) = ([0.0; LANES], [0.0; LANES]);
                gate[..gate_rest.len()].copy_from_slice(gate_rest);
                up[..up_rest.len()].copy_from_slice(up_rest);
                let mut last = [0.0; LANES];
                s.store(s.mul(math::silu(s, s.load(&gate)), s.load(&up)), &mut last);
                out_rest.copy_from_slice(&last[..out_rest.len()]);
            }
        }
    }
}
