//! Linear layers: `y = x @ W.T + b` over packed weights, for one row (decode) or thousands (prefill).
//!
//! ```text
//! pack:     weights [out, in] -> groups of 32 outputs [out/32][in/STEP][2][16][STEP], zeros behind the edges
//! forward:  cut [rows, out] into row blocks x column ranges; each task:
//!             for every group of its columns: for every slice of the inputs: for every tile of rows:
//!               sums[row][output] += x[row][i] * w[i][output], i in order; the last slice adds bias and writes
//! ```
//! An output's sum runs over the inputs in order in one lane of one accumulator, whatever the number of rows, the
//! tiling or the threads: its bits depend on its own row and weights alone. A task reads its weights as one
//! contiguous stream, which is what decode, bound by memory, asks for; a slice of a group stays in the L2 cache
//! while all row tiles pass over it, which is what prefill asks for.
#![deny(unsafe_code)]

mod ahead;
mod blocks;
#[allow(unsafe_code, reason = "memory for many layers in one mapping")]
mod buffer;
mod fused;
mod heads;
mod pack;
mod product;
mod quantized;
mod row_group;
mod rows;
mod tiled;
mod tiled_bytes;
mod tiled_row;

use crate::shape::{expect_len, rows_of};
use crate::simd::{Bf16, F16, F32, Format, Level};
use crate::threads::{ShouldStop, Threads};
use crate::{Error, Result};
use buffer::Buffer;
use pack::GROUP_OUTPUTS;
use product::Weights;
use quantized::{GROUP_INPUTS, Int4, Int8};

pub use blocks::Blocks;
pub use buffer::Arena;
pub use fused::{activated_linear_add, norm_linear};
pub use heads::per_head;

/// What packed weights are held in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightDtype {
    /// 32-bit floats: full f32 arithmetic.
    F32,
    /// bfloat16: inputs are rounded to bf16 (ties to even), sums are f32.
    Bf16,
    /// IEEE half precision: weights are widened to f32, inputs stay f32, sums are f32.
    F16,
    /// 8-bit integers with a scale for each 32 inputs of an output; rows are rounded to 8 bits, 32 inputs at a time.
    Int8,
    /// 4-bit integers with a scale and a minimum for each 32 inputs of an output; rows as with [`Self::Int8`].
    Int4,
}

impl WeightDtype {
    /// As it is written in options.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }

    /// Inputs of a step, and bytes of a step of a panel.
    const fn step(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, size_of::<<F32 as Format>::Raw>()),
            Self::Bf16 => (2, size_of::<<Bf16 as Format>::Raw>()),
            Self::F16 => (1, size_of::<<F16 as Format>::Raw>()),
            Self::Int8 => (GROUP_INPUTS, size_of::<<Int8 as Weights>::Raw>()),
            Self::Int4 => (GROUP_INPUTS, size_of::<<Int4 as Weights>::Raw>()),
        }
    }
}

/// Weights as they come, row-major `[out, in]`. 16-bit formats are given as their bits.
#[derive(Clone, Copy, Debug)]
pub enum WeightsIn<'a> {
    /// 32-bit floats.
    F32(&'a [f32]),
    /// IEEE half precision.
    F16(&'a [u16]),
    /// bfloat16.
    Bf16(&'a [u16]),
    /// GGUF's blocks of this kind, for [`Blocks::dtype`] alone.
    Blocks(Blocks, &'a [u8]),
}

impl WeightsIn<'_> {
    /// Values; of blocks whole ones alone count.
    fn len(&self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::F16(x) | Self::Bf16(x) => x.len(),
            Self::Blocks(kind, x) => x.len() / kind.bytes() * kind.weights(),
        }
    }

    /// Values from `at` on, widened. Not of blocks.
    fn read(&self, at: usize, out: &mut [f32]) {
        let wide = |bits: &u16| f32::from_bits(u32::from(*bits) << 16);
        match self {
            Self::F32(x) => out.copy_from_slice(&x[at..][..out.len()]),
            Self::F16(x) => out.iter_mut().zip(&x[at..]).for_each(|(out, x)| *out = half::f16::from_bits(*x).to_f32()),
            Self::Bf16(x) => out.iter_mut().zip(&x[at..]).for_each(|(out, x)| *out = wide(x)),
            Self::Blocks(..) => out.fill(f32::NAN),
        }
    }
}

/// A linear layer `y = x @ W.T + b` with packed weights `[out, in]` and an optional bias `[out]`.
pub struct Linear {
    weights: Buffer,
    bias: Option<Vec<f32>>,
    inputs: usize,
    outputs: usize,
    dtype: WeightDtype,
}

impl std::fmt::Debug for Linear {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Linear({} -> {}, {:?}, bias: {})", self.inputs, self.outputs, self.dtype, self.bias.is_some())
    }
}

fn too_large(outputs: usize, inputs: usize) -> Error {
    Error::InvalidArgument(format!("weight: shape [{outputs}, {inputs}] overflows"))
}

impl Arena {
    /// Pack `weights` (`[outputs, inputs]`, row-major) into `dtype`: exactly where it can hold them, else rounded
    /// once (ties to even). `bias`: `[outputs]`. Panels are packed in parallel.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a size is 0 or a slice does not have `outputs * inputs` (or `outputs`) values;
    /// [`Error::OutOfMemory`] if the packed form cannot be held.
    #[expect(clippy::too_many_arguments, reason = "a layer's parts, each of its own type")]
    pub fn pack(
        &self,
        level: Level,
        threads: &Threads,
        weights: WeightsIn<'_>,
        outputs: usize,
        inputs: usize,
        dtype: WeightDtype,
        bias: Option<&[f32]>,
    ) -> Result<Linear> {
        let bytes = Linear::packed_bytes(outputs, inputs, dtype)?;
        let len = outputs.checked_mul(inputs).ok_or_else(|| too_large(outputs, inputs))?;
        expect_len("weight", &format!("shape [{outputs}, {inputs}]"), len, weights.len())?;
        if let Some(bias) = bias {
            expect_len("bias", &format!("shape [{outputs}]"), outputs, bias.len())?;
        }
        if let WeightsIn::Blocks(kind, _) = weights
            && (dtype != kind.dtype() || !inputs.is_multiple_of(kind.weights()))
        {
            let (blocks, only) = (kind.name(), kind.dtype().name());
            return Err(Error::InvalidArgument(format!(
                "dtype: expected {only} for blocks of {blocks}, in rows of a multiple of {} inputs, got {} and {inputs} inputs",
                kind.weights(),
                dtype.name()
            )));
        }
        let mut packed = self.zeroed(bytes)?;
        match dtype {
            WeightDtype::F32 => pack::pack::<F32>(level, threads, weights, inputs, packed.groups_mut()),
            WeightDtype::Bf16 => pack::pack::<Bf16>(level, threads, weights, inputs, packed.groups_mut()),
            WeightDtype::F16 => pack::pack::<F16>(level, threads, weights, inputs, packed.groups_mut()),
            WeightDtype::Int8 => quantized::pack::<Int8>(threads, weights, inputs, packed.groups_mut()),
            WeightDtype::Int4 => quantized::pack::<Int4>(threads, weights, inputs, packed.groups_mut()),
        }?;
        Ok(Linear { weights: packed, bias: bias.map(<[f32]>::to_vec), inputs, outputs, dtype })
    }
}

impl Linear {
    /// [`Arena::pack`] into memory of its own.
    ///
    /// # Errors
    /// As there.
    pub fn pack(
        level: Level,
        threads: &Threads,
        weights: WeightsIn<'_>,
        outputs: usize,
        inputs: usize,
        dtype: WeightDtype,
        bias: Option<&[f32]>,
    ) -> Result<Self> {
        Arena::new().pack(level, threads, weights, outputs, inputs, dtype, bias)
    }

    /// Bytes that weights of this shape take once they are packed into `dtype`, with their padding; a bias of f32 comes
    /// on top.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a size is 0 or the product overflows.
    pub fn packed_bytes(outputs: usize, inputs: usize, dtype: WeightDtype) -> Result<usize> {
        if outputs == 0 || inputs == 0 {
            return Err(Error::InvalidArgument(format!(
                "weight: expected at least one output and one input, got shape [{outputs}, {inputs}]"
            )));
        }
        let (step_inputs, step_bytes) = dtype.step();
        let group = (pack::GROUP * step_bytes).checked_mul(inputs.div_ceil(step_inputs));
        let bytes = group.and_then(|n| n.checked_mul(outputs.div_ceil(GROUP_OUTPUTS)));
        bytes.ok_or_else(|| too_large(outputs, inputs))
    }

    /// Values of an input row.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Values of an output row.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// What the weights are held in.
    pub fn dtype(&self) -> WeightDtype {
        self.dtype
    }

    /// Bytes held: packed weights with their padding, and the bias.
    pub fn nbytes(&self) -> usize {
        self.weights.len() + self.bias.as_ref().map_or(0, |bias| size_of_val(bias.as_slice()))
    }

    /// `out = x @ W.T + b`, or with `add` `out += x @ W.T + b` (the whole sum first, then one addition).
    /// `x`: `[rows, inputs]`, `out`: `[rows, outputs]`; `rows` may be 0.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the shapes do not fit; [`Error::Interrupted`] if `should_stop` said so (`out`
    /// is then partly written).
    pub fn forward(
        &self,
        level: Level,
        threads: &Threads,
        x: &[f32],
        out: &mut [f32],
        add: bool,
        should_stop: ShouldStop<'_>,
    ) -> Result<()> {
        let rows = rows_of("x", x.len(), self.inputs)?;
        let expected = rows
            .checked_mul(self.outputs)
            .ok_or_else(|| Error::InvalidArgument(format!("out: shape [{rows}, {}] overflows", self.outputs)))?;
        expect_len("out", &format!("shape [{rows}, {}]", self.outputs), expected, out.len())?;
        if rows == 0 {
            return Ok(());
        }
        match self.dtype {
            WeightDtype::F32 => self.product::<F32>(level, threads, x, out, add, should_stop),
            WeightDtype::Bf16 => self.product::<Bf16>(level, threads, x, out, add, should_stop),
            WeightDtype::F16 => self.product::<F16>(level, threads, x, out, add, should_stop),
            WeightDtype::Int8 => self.product::<Int8>(level, threads, x, out, add, should_stop),
            WeightDtype::Int4 => self.product::<Int4>(level, threads, x, out, add, should_stop),
        }
    }

    fn product<F: Weights>(
        &self,
        level: Level,
        threads: &Threads,
        x: &[f32],
        out: &mut [f32],
        add: bool,
        should_stop: ShouldStop<'_>,
    ) -> Result<()> {
        let steps = self.inputs.div_ceil(F::STEP);
        let layer = product::Layer::<F> {
            weights: self.weights.groups(),
            bias: self.bias.as_deref(),
            steps,
            stride: product::stride(x.len() / self.inputs, steps),
            outputs: self.outputs,
            behind: self.weights.behind(),
        };
        level.dispatch(product::Forward { layer, threads, x, inputs: self.inputs, out, add, should_stop })
    }
}
