//! `Linear`: packed weights.
#![forbid(unsafe_code)]

use kvcore::linear::{Arena, Linear, WeightDtype, WeightsIn, gated_linear_add, norm_linear};
use numpy::{PyArray1, PyArray2, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::prelude::*;

use crate::arguments::of;
use crate::arrays::{Weights, block_weights, floats, floats_in_place, weights, zeros};
use crate::error::{detached, invalid};
use crate::runtime::PyThreads;

/// Memory that the weights of one model share. See the stub file.
#[pyclass(name = "Arena", module = "kvcore._kvcore", frozen)]
#[derive(Default)]
pub struct PyArena(Arena);

#[pymethods]
impl PyArena {
    #[new]
    fn new() -> Self {
        Self::default()
    }
}

/// A linear layer y = x @ W.T + b over packed weights. See the stub file for the methods.
#[pyclass(name = "Linear", module = "kvcore._kvcore", frozen)]
pub struct PyLinear {
    linear: Linear,
    runtime: PyThreads,
}

impl PyLinear {
    fn rows<'py>(&self, py: Python<'py>, out: Vec<f32>, rows: usize) -> PyResult<Bound<'py, PyArray2<f32>>> {
        PyArray1::from_vec(py, out).reshape([rows, self.linear.outputs()])
    }
}

#[pymethods]
impl PyLinear {
    #[new]
    #[pyo3(signature = (weight, bias = None, *, dtype = "float32", blocks = None, threads = None, arena = None))]
    fn new(
        py: Python<'_>,
        weight: &Bound<'_, PyAny>,
        bias: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = of::dtype)] dtype: &str,
        blocks: Option<&str>,
        threads: Option<&PyThreads>,
        arena: Option<&PyArena>,
    ) -> PyResult<Self> {
        let dtype = match dtype {
            "float32" | "f32" => WeightDtype::F32,
            "bfloat16" | "bf16" => WeightDtype::Bf16,
            "float16" | "f16" => WeightDtype::F16,
            "int8" => WeightDtype::Int8,
            "int4" => WeightDtype::Int4,
            other => {
                let text = format!("dtype: expected float32, bfloat16, float16, int8 or int4, got {other:?}");
                return Err(invalid(text));
            }
        };
        let (weight, outputs, inputs) = match blocks {
            None => weights("weight", weight)?,
            Some(blocks) => block_weights("weight", weight, blocks)?,
        };
        let bias = bias.map(|bias| floats("bias", bias, &[Some(outputs)])).transpose()?;
        let bias = bias.as_ref().map(|bias| bias.as_slice()).transpose()?;
        let values = match &weight {
            Weights::F32(x) => WeightsIn::F32(x.as_slice()?),
            Weights::F16(x) => WeightsIn::F16(x.as_slice()?),
            Weights::Bf16(x) => WeightsIn::Bf16(x.as_slice()?),
            Weights::Q4_0(x) => WeightsIn::Q4_0(x.as_slice()?),
            Weights::Q4_1(x) => WeightsIn::Q4_1(x.as_slice()?),
            Weights::Q8_0(x) => WeightsIn::Q8_0(x.as_slice()?),
        };
        let runtime = PyThreads::or_default(threads)?;
        let own = Arena::new();
        let arena = arena.map_or(&own, |arena| &arena.0);
        let PyThreads { level, threads } = &runtime;
        let linear = detached(py, |_| arena.pack(*level, threads, values, outputs, inputs, dtype, bias))?;
        Ok(Self { linear, runtime })
    }

    fn __call__<'py>(&self, py: Python<'py>, x: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let x = floats("x", x, &[None, Some(self.linear.inputs())])?;
        let (rows, x) = (x.shape()[0], x.as_slice()?);
        let out = detached(py, |should_stop| {
            let mut out = zeros(rows, self.linear.outputs())?;
            self.linear.forward(self.runtime.level, &self.runtime.threads, x, &mut out, false, should_stop)?;
            Ok(out)
        })?;
        self.rows(py, out, rows)
    }

    fn norm_forward<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        norm_weight: &Bound<'py, PyAny>,
        eps: f32,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let x = floats("x", x, &[None, Some(self.linear.inputs())])?;
        let norm = floats("norm_weight", norm_weight, &[Some(self.linear.inputs())])?;
        let (rows, x, norm) = (x.shape()[0], x.as_slice()?, norm.as_slice()?);
        let out = detached(py, |should_stop| {
            let mut out = zeros(rows, self.linear.outputs())?;
            norm_linear(self.runtime.level, &self.runtime.threads, &self.linear, x, norm, eps, &mut out, should_stop)?;
            Ok(out)
        })?;
        self.rows(py, out, rows)
    }

    fn add_forward(&self, py: Python<'_>, x: &Bound<'_, PyAny>, residual: &Bound<'_, PyAny>) -> PyResult<()> {
        let x = floats("x", x, &[None, Some(self.linear.inputs())])?;
        let mut out = floats_in_place("residual", residual, &[Some(x.shape()[0]), Some(self.linear.outputs())])?;
        let (x, out) = (x.as_slice()?, out.as_slice_mut()?);
        detached(py, |should_stop| {
            self.linear.forward(self.runtime.level, &self.runtime.threads, x, out, true, should_stop)
        })
    }

    fn gated_add_forward(
        &self,
        py: Python<'_>,
        gate_up: &Bound<'_, PyAny>,
        residual: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let x = floats("gate_up", gate_up, &[None, self.linear.inputs().checked_mul(2)])?;
        let mut out = floats_in_place("residual", residual, &[Some(x.shape()[0]), Some(self.linear.outputs())])?;
        let (x, out) = (x.as_slice()?, out.as_slice_mut()?);
        detached(py, |should_stop| {
            gated_linear_add(self.runtime.level, &self.runtime.threads, &self.linear, x, out, should_stop)
        })
    }

    #[getter]
    fn in_features(&self) -> usize {
        self.linear.inputs()
    }
    #[getter]
    fn out_features(&self) -> usize {
        self.linear.outputs()
    }
    #[getter]
    fn dtype(&self) -> &'static str {
        self.linear.dtype().name()
    }
    #[getter]
    fn nbytes(&self) -> usize {
        self.linear.nbytes()
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.linear)
    }
}
