//! `Linear`: packed weights.
#![forbid(unsafe_code)]

use kvcore::linear::{Arena, Linear, WeightDtype, WeightsIn, activated_linear_add, norm_linear, per_head};
use kvcore::ops::{Activation, Norm};
use numpy::{PyArray2, PyArray3, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::arguments::of;
use crate::arrays::{Size, Weights, block_weights, floats, floats_in_place, weights};
use crate::error::{detached, invalid, to_python};
use crate::ids::{MAX_IDS, indices};
use crate::ops::{activation, norm_kind};
use crate::results::Output;
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
    fn add_activated(
        &self,
        py: Python<'_>,
        (name, x): (&str, &Bound<'_, PyAny>),
        residual: &Bound<'_, PyAny>,
        activation: Activation,
        gated: bool,
    ) -> PyResult<()> {
        let x = floats(name, x, &[None, self.linear.inputs().checked_mul(if gated { 2 } else { 1 })])?;
        let mut out = floats_in_place("residual", residual, &[Some(x.shape()[0]), Some(self.linear.outputs())])?;
        let (x, out) = (x.as_slice()?, out.as_slice_mut()?);
        let PyThreads { level, threads } = &self.runtime;
        detached(py, |should_stop| {
            activated_linear_add(*level, threads, &self.linear, activation, gated, x, out, should_stop)
        })
    }
}

fn weight_dtype(name: &str) -> PyResult<WeightDtype> {
    match name {
        "float32" | "f32" => Ok(WeightDtype::F32),
        "bfloat16" | "bf16" => Ok(WeightDtype::Bf16),
        "float16" | "f16" => Ok(WeightDtype::F16),
        "int8" => Ok(WeightDtype::Int8),
        "int4" => Ok(WeightDtype::Int4),
        other => Err(invalid(format!("dtype: expected float32, bfloat16, float16, int8 or int4, got {other:?}"))),
    }
}

/// Each head of a row through a layer of its own. See the stub file.
#[pyfunction]
pub fn linear_heads<'py>(
    py: Python<'py>,
    linears: &Bound<'py, PyList>,
    x: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyArray3<f32>>> {
    let linears = linears.iter().map(|linear| Ok(linear.cast_into::<PyLinear>()?)).collect::<PyResult<Vec<_>>>()?;
    let linears: Vec<&PyLinear> = linears.iter().map(Bound::get).collect();
    let Some(first) = linears.first() else {
        return Err(invalid("linears: expected at least one, got none".into()));
    };
    let x = floats("x", x, &[None, Some(linears.len()), Some(first.linear.inputs())])?;
    let (rows, outputs, x) = (x.shape()[0], first.linear.outputs(), x.as_slice()?);
    let runtime = first.runtime.clone();
    let heads: Vec<&Linear> = linears.iter().map(|linear| &linear.linear).collect();
    let out = detached(py, |should_stop| {
        let mut out = Output::new(&runtime.threads, rows, heads.len().saturating_mul(outputs))?;
        per_head(runtime.level, &runtime.threads, &heads, x, &mut out, should_stop)?;
        Ok(out)
    })?;
    out.into_array(py, [rows, linears.len(), outputs])
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
        let dtype = weight_dtype(dtype)?;
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
            Weights::Blocks(kind, x) => WeightsIn::Blocks(*kind, x.as_slice()?),
        };
        let runtime = PyThreads::or_default(threads)?;
        let own = Arena::new();
        let arena = arena.map_or(&own, |arena| &arena.0);
        let PyThreads { level, threads } = &runtime;
        let linear = detached(py, |_| arena.pack(*level, threads, values, outputs, inputs, dtype, bias))?;
        Ok(Self { linear, runtime })
    }

    #[staticmethod]
    #[pyo3(signature = (out_features, in_features, *, dtype = "float32", bias = false))]
    fn packed_nbytes(
        out_features: Size<'_>,
        in_features: Size<'_>,
        #[pyo3(from_py_with = of::dtype)] dtype: &str,
        bias: bool,
    ) -> PyResult<usize> {
        let (outputs, inputs) = (out_features.get("out_features")?, in_features.get("in_features")?);
        let packed = Linear::packed_bytes(outputs, inputs, weight_dtype(dtype)?).map_err(to_python)?;
        Ok(packed.saturating_add(if bias { outputs.saturating_mul(size_of::<f32>()) } else { 0 }))
    }

    fn __call__<'py>(&self, py: Python<'py>, x: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let x = floats("x", x, &[None, Some(self.linear.inputs())])?;
        let (rows, x) = (x.shape()[0], x.as_slice()?);
        let out = detached(py, |should_stop| {
            let mut out = Output::new(&self.runtime.threads, rows, self.linear.outputs())?;
            self.linear.forward(self.runtime.level, &self.runtime.threads, x, &mut out, false, should_stop)?;
            Ok(out)
        })?;
        out.into_array(py, [rows, self.linear.outputs()])
    }

    #[pyo3(signature = (x, norm_weight, eps, *, norm_bias = None, norm = "rms"))]
    fn norm_forward<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        norm_weight: &Bound<'py, PyAny>,
        eps: f32,
        norm_bias: Option<&Bound<'py, PyAny>>,
        #[pyo3(from_py_with = of::norm)] norm: &str,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let x = floats("x", x, &[None, Some(self.linear.inputs())])?;
        let weight = floats("norm_weight", norm_weight, &[Some(self.linear.inputs())])?;
        let bias = norm_bias.map(|bias| floats("norm_bias", bias, &[Some(self.linear.inputs())])).transpose()?;
        let bias = bias.as_ref().map(|bias| bias.as_slice()).transpose()?;
        let norm = Norm { kind: norm_kind(norm)?, weight: weight.as_slice()?, bias, eps };
        let (rows, x) = (x.shape()[0], x.as_slice()?);
        let out = detached(py, |should_stop| {
            let mut out = Output::new(&self.runtime.threads, rows, self.linear.outputs())?;
            norm_linear(self.runtime.level, &self.runtime.threads, &self.linear, x, norm, &mut out, should_stop)?;
            Ok(out)
        })?;
        out.into_array(py, [rows, self.linear.outputs()])
    }

    fn add_forward(&self, py: Python<'_>, x: &Bound<'_, PyAny>, residual: &Bound<'_, PyAny>) -> PyResult<()> {
        let x = floats("x", x, &[None, Some(self.linear.inputs())])?;
        let mut out = floats_in_place("residual", residual, &[Some(x.shape()[0]), Some(self.linear.outputs())])?;
        let (x, out) = (x.as_slice()?, out.as_slice_mut()?);
        detached(py, |should_stop| {
            self.linear.forward(self.runtime.level, &self.runtime.threads, x, out, true, should_stop)
        })
    }

    #[pyo3(signature = (gate_up, residual, activation = "silu", *, alpha = 1.702, limit = 7.0))]
    fn gated_add_forward(
        &self,
        py: Python<'_>,
        gate_up: &Bound<'_, PyAny>,
        residual: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = of::activation)] activation: &str,
        alpha: f32,
        limit: f32,
    ) -> PyResult<()> {
        let activation = self::activation(activation, alpha, limit)?;
        self.add_activated(py, ("gate_up", gate_up), residual, activation, true)
    }

    #[pyo3(signature = (x, residual, activation))]
    fn activated_add_forward(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        residual: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = of::activation)] activation: &str,
    ) -> PyResult<()> {
        self.add_activated(py, ("x", x), residual, self::activation(activation, 0.0, 0.0)?, false)
    }

    fn rows<'py>(&self, py: Python<'py>, ids: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let ids = indices("ids", ids, self.linear.outputs(), MAX_IDS)?;
        let out = detached(py, |should_stop| {
            let mut out = Output::new(&self.runtime.threads, ids.len(), self.linear.inputs())?;
            self.linear.rows(&self.runtime.threads, &ids, &mut out, should_stop)?;
            Ok(out)
        })?;
        out.into_array(py, [ids.len(), self.linear.inputs()])
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
