//! Rows of packed weights, read back: the embedding of a model whose output matrix is the same one.
//!
//! ```text
//! row r: lane r % 16 of panel r / 16 % 2 in group r / 32, one step after the other, widened to f32
//! ```
#![forbid(unsafe_code)]

use super::pack::{GROUP, GROUP_OUTPUTS, Stored};
use super::quantized::{GROUP_INPUTS, Int4, Int8, Quantized};
use super::{Linear, WeightDtype};
use crate::shape::expect_len;
use crate::simd::{Bf16, F16, F32, LANES};
use crate::threads::{ShouldStop, Threads};
use crate::{Error, Result};

impl Linear {
    /// The weights of the outputs `ids` as they are held, without the bias: `out` is `[ids, inputs]`. 8-bit weights are
    /// `scale * code`, 4-bit ones `scale * code + minimum`, each operation rounded to f32.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if an id is no output, or `out` has another size; [`Error::Interrupted`] if
    /// `should_stop` said so (`out` is then partly written).
    pub fn rows(&self, threads: &Threads, ids: &[u32], out: &mut [f32], should_stop: ShouldStop<'_>) -> Result<()> {
        if let Some(id) = ids.iter().find(|&&id| id as usize >= self.outputs) {
            let last = self.outputs - 1;
            return Err(Error::InvalidArgument(format!("ids: expected ids from 0 to {last}, got {id}")));
        }
        let expected = ids
            .len()
            .checked_mul(self.inputs)
            .ok_or_else(|| Error::InvalidArgument(format!("out: shape [{}, {}] overflows", ids.len(), self.inputs)))?;
        expect_len("out", &format!("shape [{}, {}]", ids.len(), self.inputs), expected, out.len())?;
        let items: Vec<_> = ids.iter().map(|&id| id as usize).zip(out.chunks_exact_mut(self.inputs)).collect();
        threads.for_each(items, should_stop, |(id, out)| match self.dtype {
            WeightDtype::F32 => self.plain::<F32>(id, out, |x| x),
            WeightDtype::Bf16 => self.plain::<Bf16>(id, out, |bits| half::bf16::from_bits(bits).to_f32()),
            WeightDtype::F16 => self.plain::<F16>(id, out, |bits| half::f16::from_bits(bits).to_f32()),
            WeightDtype::Int8 => self.quantized::<Int8>(id, out),
            WeightDtype::Int4 => self.quantized::<Int4>(id, out),
        })
    }

    fn plain<F: Stored>(&self, id: usize, out: &mut [f32], widen: impl Fn(F::Elem) -> f32) {
        for (raw, out) in self.steps::<F::Raw>(id, F::STEP).zip(out.chunks_mut(F::STEP)) {
            let lanes: &[F::Elem] = bytemuck::cast_slice(std::slice::from_ref(raw));
            for (out, x) in out.iter_mut().zip(&lanes[id % LANES * F::STEP..]) {
                *out = widen(*x);
            }
        }
    }

    fn quantized<F: Quantized>(&self, id: usize, out: &mut [f32]) {
        for (raw, out) in self.steps::<F::Raw>(id, GROUP_INPUTS).zip(out.chunks_mut(GROUP_INPUTS)) {
            out.copy_from_slice(&F::values(raw, id % LANES)[..out.len()]);
        }
    }

    /// The steps of the panel that has this output.
    fn steps<Raw: bytemuck::Pod>(&self, id: usize, step: usize) -> impl Iterator<Item = &Raw> {
        let (steps, panel) = (self.inputs.div_ceil(step), id % GROUP_OUTPUTS / LANES);
        let groups: &[[Raw; GROUP]] = self.weights.groups();
        groups[id / GROUP_OUTPUTS * steps..][..steps].iter().map(move |step| &step[panel])
    }
}
