//! Operations without a state of their own.
#![forbid(unsafe_code)]

use kvcore::attention::{Mask, Scoring, reference::Dense};
use kvcore::ops;
use kvcore::simd::Level;
use kvcore::storage::fp8;
use numpy::{PyArray1, PyArray2, PyArray3, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::prelude::*;

use crate::arrays::{Size, floats};
use crate::error::{detached, invalid, to_python};
use crate::runtime::PyThreads;

/// weight * x / sqrt(mean(x^2) + eps) for each row: x [rows, n], weight [n].
#[pyfunction]
#[pyo3(signature = (x, weight, eps, *, threads = None))]
pub fn rms_norm<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    eps: f32,
    threads: Option<&PyThreads>,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let weight = floats("weight", weight, &[None])?;
    let x = floats("x", x, &[None, Some(weight.len())])?;
    let (PyThreads { level, threads }, rows) = (PyThreads::or_default(threads)?, x.shape()[0]);
    let (x, weight) = (x.as_slice()?, weight.as_slice()?);
    let out = detached(py, |should_stop| {
        let mut out = vec![0.0; x.len()];
        ops::rms_norm(level, &threads, x, weight, eps, &mut out, should_stop)?;
        Ok(out)
    })?;
    PyArray1::from_vec(py, out).reshape([rows, weight.len()])
}

/// Split joint rows into q, k, v and rotate q and k. See the stub file.
#[pyfunction]
#[pyo3(signature = (qkv, cos, sin, num_heads, num_kv_heads, head_dim, *, threads = None))]
#[allow(clippy::too_many_arguments, clippy::type_complexity)]
pub fn rope_split<'py>(
    py: Python<'py>,
    qkv: &Bound<'py, PyAny>,
    cos: &Bound<'py, PyAny>,
    sin: &Bound<'py, PyAny>,
    num_heads: Size<'_>,
    num_kv_heads: Size<'_>,
    head_dim: Size<'_>,
    threads: Option<&PyThreads>,
) -> PyResult<(Bound<'py, PyArray3<f32>>, Bound<'py, PyArray3<f32>>, Bound<'py, PyArray3<f32>>)> {
    let (num_heads, num_kv_heads) = (num_heads.get("num_heads")?, num_kv_heads.get("num_kv_heads")?);
    let head_dim = head_dim.get("head_dim")?;
    let heads = num_kv_heads.checked_mul(2).and_then(|kv| kv.checked_add(num_heads));
    let Some(width) = heads.and_then(|heads| heads.checked_mul(head_dim)) else {
        return Err(invalid(format!("rope: {num_heads} + 2 * {num_kv_heads} heads of {head_dim} dims overflow")));
    };
    let qkv = floats("qkv", qkv, &[None, Some(width)])?;
    let rows = qkv.shape()[0];
    let cos = floats("cos", cos, &[Some(rows), None])?;
    let sin = floats("sin", sin, &[Some(rows), Some(cos.shape()[1])])?;
    let shape = ops::RopeShape { num_heads, num_kv_heads, head_dim, cos_width: cos.shape()[1] };
    let PyThreads { level, threads } = PyThreads::or_default(threads)?;
    let (qkv, cos, sin) = (qkv.as_slice()?, cos.as_slice()?, sin.as_slice()?);
    let (q, k, v) = detached(py, |should_stop| {
        let zeros = |heads: usize| vec![0.0; rows * heads * head_dim];
        let (mut q, mut k, mut v) = (zeros(num_heads), zeros(num_kv_heads), zeros(num_kv_heads));
        ops::rope_split(level, &threads, qkv, (cos, sin), shape, (&mut q, &mut k, &mut v), should_stop)?;
        Ok((q, k, v))
    })?;
    let array = |x: Vec<f32>, heads: usize| PyArray1::from_vec(py, x).reshape([rows, heads, head_dim]);
    Ok((array(q, num_heads)?, array(k, num_kv_heads)?, array(v, num_kv_heads)?))
}

/// silu(gate) * up for joint rows: gate_up [rows, 2 n], each all of gate, then all of up; the result is [rows, n].
#[pyfunction]
#[pyo3(signature = (gate_up, *, threads = None))]
pub fn silu_mul<'py>(
    py: Python<'py>,
    gate_up: &Bound<'py, PyAny>,
    threads: Option<&PyThreads>,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let gate_up = floats("gate_up", gate_up, &[None, None])?;
    let (rows, width) = (gate_up.shape()[0], gate_up.shape()[1]);
    if width % 2 != 0 {
        return Err(invalid(format!("gate_up: expected an even number of columns, got {width}")));
    }
    let (PyThreads { level, threads }, x) = (PyThreads::or_default(threads)?, gate_up.as_slice()?);
    let out = detached(py, |should_stop| {
        let mut out = vec![0.0; x.len() / 2];
        ops::silu_mul(level, &threads, x, width / 2, &mut out, should_stop)?;
        Ok(out)
    })?;
    PyArray1::from_vec(py, out).reshape([rows, width / 2])
}

/// Index of the largest value of a row, the lowest of equal ones: row [n].
#[pyfunction]
pub fn argmax(py: Python<'_>, row: &Bound<'_, PyAny>) -> PyResult<usize> {
    let (level, row) = (Level::from_env().map_err(to_python)?, floats("row", row, &[None])?);
    let row = row.as_slice()?;
    detached(py, |_| ops::argmax(level, row))
}

/// fp8 e4m3 codes of float32 values, uint8 [n]: nearest, ties to even, saturating at 448; NaN stays NaN.
#[pyfunction]
#[pyo3(signature = (values, scale = 1.0))]
pub fn e4m3_encode<'py>(py: Python<'py>, values: &Bound<'py, PyAny>, scale: f64) -> PyResult<Bound<'py, PyArray1<u8>>> {
    let scale = fp8_scale(scale)?;
    let values = floats("values", values, &[None])?;
    let codes = values.as_slice()?.iter().map(|x| fp8::f32_to_e4m3(x / scale)).collect();
    Ok(PyArray1::from_vec(py, codes))
}

/// The float32 values of fp8 e4m3 codes: uint8 [n].
#[pyfunction]
#[pyo3(signature = (codes, scale = 1.0))]
pub fn e4m3_decode<'py>(
    py: Python<'py>,
    codes: numpy::PyReadonlyArray1<'py, u8>,
    scale: f64,
) -> PyResult<Bound<'py, PyArray1<f32>>> {
    let scale = fp8_scale(scale)?;
    let values = codes.as_array().iter().map(|&code| fp8::e4m3_to_f32(code) * scale).collect();
    Ok(PyArray1::from_vec(py, values))
}

fn fp8_scale(scale: f64) -> PyResult<f32> {
    kvcore::storage::check_scale("scale", scale).map_err(to_python)
}

/// The naive oracle, causal: q [rows, q heads, d] are the last rows of k, v [tokens, kv heads, d]; sums in float64.
#[pyfunction]
#[pyo3(signature = (q, k, v, scale = None))]
pub fn reference_attention<'py>(
    py: Python<'py>,
    q: &Bound<'py, PyAny>,
    k: &Bound<'py, PyAny>,
    v: &Bound<'py, PyAny>,
    scale: Option<f32>,
) -> PyResult<Bound<'py, PyArray3<f32>>> {
    let q = floats("q", q, &[None, None, None])?;
    let (rows, heads, dim) = (q.shape()[0], q.shape()[1], q.shape()[2]);
    let k = floats("k", k, &[None, None, Some(dim)])?;
    let (tokens, kv_heads) = (k.shape()[0], k.shape()[1]);
    let v = floats("v", v, &[Some(tokens), Some(kv_heads), Some(dim)])?;
    if rows > tokens || kv_heads == 0 || dim == 0 || heads == 0 || heads % kv_heads != 0 {
        return Err(invalid(format!(
            "expected at most as many query rows as tokens, and a multiple of the KV heads as query heads, got {rows} \
             rows of {heads} heads and {tokens} tokens of {kv_heads} heads"
        )));
    }
    let scale = scale.unwrap_or_else(|| (dim as f32).sqrt().recip());
    let (q, k, v) = (q.as_slice()?, k.as_slice()?, v.as_slice()?);
    let dense = Dense { k, v: v.into(), num_kv_heads: kv_heads, k_dim: dim, v_dim: dim };
    let (out, _) = detached(py, |_| Ok(dense.attend(q, heads, &Scoring::plain(scale), Mask::Causal, tokens - rows)))?;
    PyArray1::from_vec(py, out).reshape([rows, heads, dim])
}
