//! Operations without a state of their own.
#![forbid(unsafe_code)]

use kvcore::attention::{Mask, Scoring, reference::Dense};
use kvcore::ops::{self, Activation, HeadNorms, Norm, NormKind, Routing, Scoring as RouterScoring};
use kvcore::simd::Level;
use kvcore::storage::fp8;
use numpy::{PyArray1, PyArray2, PyArray3, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::prelude::*;

use crate::arguments::of;
use crate::arrays::{Size, floats, floats_in_place};
use crate::error::{detached, invalid, to_python};
use crate::results::Output;
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
    normalize(py, x, weight, None, (NormKind::Rms, eps), threads)
}

/// weight * (x - mean(x)) / sqrt(var(x) + eps) + bias for each row: x [rows, n], weight and bias [n].
#[pyfunction]
#[pyo3(signature = (x, weight, bias, eps, *, threads = None))]
pub fn layer_norm<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    eps: f32,
    threads: Option<&PyThreads>,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    normalize(py, x, weight, bias, (NormKind::Layer, eps), threads)
}

fn normalize<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    (kind, eps): (NormKind, f32),
    threads: Option<&PyThreads>,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let weight = floats("weight", weight, &[None])?;
    let bias = bias.map(|bias| floats("bias", bias, &[Some(weight.len())])).transpose()?;
    let x = floats("x", x, &[None, Some(weight.len())])?;
    let (PyThreads { level, threads }, rows) = (PyThreads::or_default(threads)?, x.shape()[0]);
    let bias = bias.as_ref().map(|bias| bias.as_slice()).transpose()?;
    let (x, weight) = (x.as_slice()?, weight.as_slice()?);
    let out = detached(py, |should_stop| {
        let mut out = Output::new(&threads, x.len(), 1)?;
        ops::normalize(level, &threads, x, Norm { kind, weight, bias, eps }, &mut out, should_stop)?;
        Ok(out)
    })?;
    out.into_array(py, [rows, weight.len()])
}

/// Which normalisation a name means.
pub fn norm_kind(name: &str) -> PyResult<NormKind> {
    match name {
        "rms" => Ok(NormKind::Rms),
        "layer" => Ok(NormKind::Layer),
        other => Err(invalid(format!("norm: expected rms or layer, got {other:?}"))),
    }
}

/// Split joint rows into q, k, v, normalise and rotate q and k. See the stub file.
#[pyfunction]
#[pyo3(signature = (qkv, cos, sin, num_heads, num_kv_heads, head_dim, *, interleaved = false, q_norm = None,
                    k_norm = None, norm = "rms", norm_eps = 1e-6, joint_norm = false, threads = None))]
#[allow(clippy::too_many_arguments, clippy::type_complexity)]
pub fn rope_split<'py>(
    py: Python<'py>,
    qkv: &Bound<'py, PyAny>,
    cos: &Bound<'py, PyAny>,
    sin: &Bound<'py, PyAny>,
    num_heads: Size<'_>,
    num_kv_heads: Size<'_>,
    head_dim: Size<'_>,
    #[pyo3(from_py_with = of::interleaved)] interleaved: bool,
    q_norm: Option<&Bound<'py, PyAny>>,
    k_norm: Option<&Bound<'py, PyAny>>,
    #[pyo3(from_py_with = of::norm)] norm: &str,
    norm_eps: f32,
    #[pyo3(from_py_with = of::joint_norm)] joint_norm: bool,
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
    let shape = ops::RopeShape { num_heads, num_kv_heads, head_dim, cos_width: cos.shape()[1], interleaved };
    let kind = norm_kind(norm)?;
    let weights = match (q_norm, k_norm) {
        (None, None) => None,
        (Some(q), Some(k)) => Some((
            floats("q_norm", q, &[Some(num_heads * head_dim)])?,
            floats("k_norm", k, &[Some(num_kv_heads * head_dim)])?,
        )),
        _ => return Err(invalid("q_norm, k_norm: expected both or none, got one".into())),
    };
    let norms = match &weights {
        None => None,
        Some((q, k)) => {
            let norm = |weight| Norm { kind, weight, bias: None, eps: norm_eps };
            Some(HeadNorms { q: norm(q.as_slice()?), k: norm(k.as_slice()?), joint: joint_norm })
        }
    };
    let PyThreads { level, threads } = PyThreads::or_default(threads)?;
    let (qkv, cos, sin) = (qkv.as_slice()?, cos.as_slice()?, sin.as_slice()?);
    let (q, k, v) = detached(py, |should_stop| {
        let output = |heads: usize| Output::new(&threads, rows, heads * head_dim);
        let (mut q, mut k, mut v) = (output(num_heads)?, output(num_kv_heads)?, output(num_kv_heads)?);
        ops::rope_split(level, &threads, qkv, (cos, sin), shape, norms, (&mut q, &mut k, &mut v), should_stop)?;
        Ok((q, k, v))
    })?;
    let array = |x: Output, heads: usize| x.into_array(py, [rows, heads, head_dim]);
    Ok((array(q, num_heads)?, array(k, num_kv_heads)?, array(v, num_kv_heads)?))
}

/// Rotate heads: x [rows, heads, dim], cos and sin [rows, w]. See the stub file.
#[pyfunction]
#[pyo3(signature = (x, cos, sin, *, interleaved = false, threads = None))]
pub fn rope<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    cos: &Bound<'py, PyAny>,
    sin: &Bound<'py, PyAny>,
    #[pyo3(from_py_with = of::interleaved)] interleaved: bool,
    threads: Option<&PyThreads>,
) -> PyResult<Bound<'py, PyArray3<f32>>> {
    let x = floats("x", x, &[None, None, None])?;
    let (rows, heads, dim) = (x.shape()[0], x.shape()[1], x.shape()[2]);
    let cos = floats("cos", cos, &[Some(rows), None])?;
    let sin = floats("sin", sin, &[Some(rows), Some(cos.shape()[1])])?;
    let PyThreads { level, threads } = PyThreads::or_default(threads)?;
    let (x, angles) = (x.as_slice()?, (cos.as_slice()?, sin.as_slice()?));
    let out = detached(py, |should_stop| {
        let mut out = Output::new(&threads, x.len(), 1)?;
        ops::rope(level, &threads, x, angles, (heads, dim), interleaved, &mut out, should_stop)?;
        Ok(out)
    })?;
    out.into_array(py, [rows, heads, dim])
}

/// Which activation a name means; `alpha` and `limit` are of clamped_swiglu.
pub fn activation(name: &str, alpha: f32, limit: f32) -> PyResult<Activation> {
    Ok(match name {
        "silu" => Activation::Silu,
        "gelu" => Activation::Gelu,
        "gelu_tanh" => Activation::GeluTanh,
        "relu" => Activation::Relu,
        "sigmoid" => Activation::Sigmoid,
        "clamped_swiglu" => Activation::ClampedSwiglu { alpha, limit },
        other => {
            let names = "silu, gelu, gelu_tanh, relu, sigmoid or clamped_swiglu";
            return Err(invalid(format!("activation: expected {names}, got {other:?}")));
        }
    })
}

/// An activation of each value, or of a gate times the rest of a row. See the stub file.
#[pyfunction]
#[pyo3(signature = (x, activation = "silu", *, gated = false, alpha = 1.702, limit = 7.0, threads = None))]
pub fn activate<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    #[pyo3(from_py_with = of::activation)] activation: &str,
    #[pyo3(from_py_with = of::gated)] gated: bool,
    alpha: f32,
    limit: f32,
    threads: Option<&PyThreads>,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let x = floats("x", x, &[None, None])?;
    let (rows, width) = (x.shape()[0], x.shape()[1]);
    if gated && width % 2 != 0 {
        return Err(invalid(format!("x: expected an even number of columns, got {width}")));
    }
    let n = if gated { width / 2 } else { width };
    let activation = self::activation(activation, alpha, limit)?;
    let (PyThreads { level, threads }, x) = (PyThreads::or_default(threads)?, x.as_slice()?);
    let out = detached(py, |should_stop| {
        let mut out = Output::new(&threads, rows, n)?;
        ops::activate(level, &threads, activation, gated, x, n, &mut out, should_stop)?;
        Ok(out)
    })?;
    out.into_array(py, [rows, n])
}

/// cap * tanh(x / cap), in place: x [rows, n].
#[pyfunction]
#[pyo3(signature = (x, cap, *, threads = None))]
pub fn softcap(py: Python<'_>, x: &Bound<'_, PyAny>, cap: f32, threads: Option<&PyThreads>) -> PyResult<()> {
    let mut x = floats_in_place("x", x, &[None, None])?;
    let (PyThreads { level, threads }, x) = (PyThreads::or_default(threads)?, x.as_slice_mut()?);
    detached(py, |should_stop| ops::softcap(level, &threads, x, cap, should_stop))
}

/// Which experts each row goes to. See the stub file.
#[pyfunction]
#[pyo3(signature = (logits, bias = None, *, top_k, scoring = "softmax", groups = None, top_groups = None,
                    group_best = None, renormalize = false, scale = 1.0, threads = None))]
#[allow(clippy::too_many_arguments, clippy::type_complexity)]
pub fn route<'py>(
    py: Python<'py>,
    logits: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    top_k: Size<'_>,
    #[pyo3(from_py_with = of::scoring)] scoring: &str,
    groups: Option<Size<'_>>,
    top_groups: Option<Size<'_>>,
    group_best: Option<Size<'_>>,
    #[pyo3(from_py_with = of::renormalize)] renormalize: bool,
    scale: f32,
    threads: Option<&PyThreads>,
) -> PyResult<(Bound<'py, PyArray2<i64>>, Bound<'py, PyArray2<f32>>)> {
    let logits = floats("logits", logits, &[None, None])?;
    let (rows, experts) = (logits.shape()[0], logits.shape()[1]);
    let bias = bias.map(|bias| floats("bias", bias, &[Some(experts)])).transpose()?;
    let bias = bias.as_ref().map(|bias| bias.as_slice()).transpose()?;
    let scoring = match scoring {
        "softmax" => RouterScoring::Softmax,
        "sigmoid" => RouterScoring::Sigmoid,
        other => return Err(invalid(format!("scoring: expected softmax or sigmoid, got {other:?}"))),
    };
    let or_one = |size: Option<Size<'_>>, name: &str| size.map_or(Ok(1), |size| size.get(name));
    let (top_k, groups) = (top_k.get("top_k")?, or_one(groups, "groups")?);
    let (top_groups, group_best) = (or_one(top_groups, "top_groups")?, or_one(group_best, "group_best")?);
    if top_k > experts {
        return Err(invalid(format!("top_k: expected at most {experts} (all experts), got {top_k}")));
    }
    let routing = Routing { scoring, top_k, groups, top_groups, group_best, renormalize, scale };
    let (PyThreads { threads, .. }, logits) = (PyThreads::or_default(threads)?, logits.as_slice()?);
    let (ids, weights) = detached(py, |should_stop| {
        let (mut ids, mut weights) = (vec![0; rows * top_k], vec![0.0; rows * top_k]);
        ops::route(&threads, logits, experts, bias, routing, &mut ids, &mut weights, should_stop)?;
        Ok((ids, weights))
    })?;
    let ids = ids.into_iter().map(i64::from).collect();
    Ok((PyArray1::from_vec(py, ids).reshape([rows, top_k])?, PyArray1::from_vec(py, weights).reshape([rows, top_k])?))
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
