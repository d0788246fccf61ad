//! Packing: row-major weights into the panels that products stream over.
//!
//! ```text
//! for each panel of 16 outputs, for each chunk of 16 steps:
//!   tile[output][step] = 16 rows' chunks, converted       (whole cache lines read)
//!   packed[step][output] = tile transposed                (whole cache lines written)
//! ```
#![forbid(unsafe_code)]

use half::slice::HalfFloatSliceExt;

use super::WeightsIn;
use crate::Result;
use crate::simd::{Bf16, Dot, F16, F32, LANES, Level, Simd, Work};
use crate::threads::{NEVER, Threads};

/// Panels of 16 outputs that lie interleaved in one group: one stream of memory feeds them all.
pub(super) const GROUP: usize = 2;
/// Outputs of a group.
pub(super) const GROUP_OUTPUTS: usize = GROUP * LANES;

/// A format that weights are held in.
pub(super) trait Stored: Dot<Raw: Send + Sync> {
    /// One value.
    type Elem: bytemuck::Pod;
    /// One step's values of one output, as one number.
    type Unit: bytemuck::Pod + Send;

    /// Round 16 values.
    fn narrow<S: Simd>(s: S, x: S::F32, out: &mut [Self::Elem; LANES]);
    /// `source[at..][..out.len()]` if it is already in this format.
    fn copy(source: WeightsIn<'_>, at: usize, out: &mut [Self::Elem]) -> bool;
}

impl Stored for F32 {
    type Elem = f32;
    type Unit = f32;

    #[inline(always)]
    fn narrow<S: Simd>(s: S, x: S::F32, out: &mut [f32; LANES]) {
        s.store(x, out);
    }
    #[inline(always)]
    fn copy(source: WeightsIn<'_>, at: usize, out: &mut [f32]) -> bool {
        let WeightsIn::F32(source) = source else { return false };
        out.copy_from_slice(&source[at..][..out.len()]);
        true
    }
}

impl Stored for Bf16 {
    type Elem = u16;
    type Unit = u32;

    #[inline(always)]
    fn narrow<S: Simd>(s: S, x: S::F32, out: &mut [u16; LANES]) {
        s.store_bf16(s.round_bf16(x), out);
    }
    #[inline(always)]
    fn copy(source: WeightsIn<'_>, at: usize, out: &mut [u16]) -> bool {
        let WeightsIn::Bf16(source) = source else { return false };
        out.copy_from_slice(&source[at..][..out.len()]);
        true
    }
}

impl Stored for F16 {
    type Elem = u16;
    type Unit = u16;

    #[inline(always)]
    fn narrow<S: Simd>(s: S, x: S::F32, out: &mut [u16; LANES]) {
        let mut wide = [0.0; LANES];
        s.store(x, &mut wide);
        bytemuck::cast_mut::<_, [half::f16; LANES]>(out).convert_from_f32_slice(&wide);
    }
    #[inline(always)]
    fn copy(source: WeightsIn<'_>, at: usize, out: &mut [u16]) -> bool {
        let WeightsIn::F16(source) = source else { return false };
        out.copy_from_slice(&source[at..][..out.len()]);
        true
    }
}

/// Up to 16 values of `source` from `at` on, widened; zeros behind them.
#[inline(always)]
fn widen<S: Simd>(s: S, source: WeightsIn<'_>, at: usize, len: usize) -> S::F32 {
    #[inline(always)]
    fn lanes<T: Copy + Default>(x: &[T]) -> [T; LANES] {
        let mut out = [T::default(); LANES];
        out[..x.len()].copy_from_slice(x);
        out
    }
    match source {
        WeightsIn::F32(x) => s.load(&lanes(&x[at..][..len])),
        WeightsIn::F16(x) => s.load_f16(&lanes(&x[at..][..len])),
        WeightsIn::Bf16(x) => s.load(&lanes(&x[at..][..len]).map(|bits| f32::from_bits(u32::from(bits) << 16))),
        // Refused before.
        WeightsIn::Blocks(..) => s.splat(f32::NAN),
    }
}

/// Some consecutive groups of a matrix.
struct Groups<'a, F: Stored> {
    source: WeightsIn<'a>,
    inputs: usize,
    first_output: usize,
    packed: &'a mut [[F::Raw; GROUP]],
}

impl<S: Simd, F: Stored> Work<S> for Groups<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run(self, s: S) {
        let steps = self.inputs.div_ceil(F::STEP);
        let outputs = self.source.len() / self.inputs;
        for (g, group) in self.packed.chunks_exact_mut(steps).enumerate() {
            for panel in 0..GROUP {
                let first = self.first_output + g * GROUP_OUTPUTS + panel * LANES;
                let rows = outputs.saturating_sub(first).min(LANES);
                for start in (0..steps).step_by(LANES) {
                    let mut tile = [[<F::Unit as bytemuck::Zeroable>::zeroed(); LANES]; LANES];
                    let len = (self.inputs - start * F::STEP).min(LANES * F::STEP);
                    for (r, row) in tile.iter_mut().enumerate().take(rows) {
                        let at = (first + r) * self.inputs + start * F::STEP;
                        let row: &mut [F::Elem] = bytemuck::cast_slice_mut(row);
                        if !F::copy(self.source, at, &mut row[..len]) {
                            for (i, lanes) in row.as_chunks_mut().0.iter_mut().enumerate() {
                                let from = (i * LANES).min(len);
                                F::narrow(s, widen(s, self.source, at + from, (len - from).min(LANES)), lanes);
                            }
                        }
                    }
                    for (i, step) in group[start..].iter_mut().take(LANES).enumerate() {
                        let lanes: &mut [F::Unit] = bytemuck::cast_slice_mut(std::slice::from_mut(&mut step[panel]));
                        for (lane, row) in lanes.iter_mut().zip(&tile) {
                            *lane = row[i];
                        }
                    }
                }
            }
        }
    }
}

/// Pack `source` (`[outputs, inputs]`) into zeroed `packed` (`[groups][steps]`).
pub(super) fn pack<F: Stored>(
    level: Level,
    threads: &Threads,
    source: WeightsIn<'_>,
    inputs: usize,
    packed: &mut [[F::Raw; GROUP]],
) -> Result<()> {
    /// Bytes that are worth a task of their own.
    const TASK: usize = 1 << 20;
    let steps = inputs.div_ceil(F::STEP);
    let groups = (TASK / (steps * size_of::<[F::Raw; GROUP]>())).max(1);
    let items: Vec<_> = packed
        .chunks_mut(groups * steps)
        .enumerate()
        .map(|(i, packed)| Groups::<F> { source, inputs, first_output: i * groups * GROUP_OUTPUTS, packed })
        .collect();
    threads.for_each(items, NEVER, |item| level.dispatch(item))
}
