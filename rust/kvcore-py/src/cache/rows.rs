//! Keys and values as arrays: written for the rows of a batch or for an encoder's output, and read back dense.
#![forbid(unsafe_code)]

use kvcore::paging::SeqId;
use numpy::{PyArray1, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::PyKvCache;
use super::handles::PyBatch;
use crate::arguments::text;
use crate::arrays::floats;
use crate::error::invalid;

impl PyKvCache {
    pub(super) fn write_rows(
        &self,
        py: Python<'_>,
        layer: usize,
        batch: &PyBatch,
        k: &Bound<'_, PyAny>,
        v: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let l = self.layout(layer)?;
        let k = floats("k", k, &[Some(batch.num_tokens), Some(l.num_kv_heads), Some(l.k_dim)])?;
        let v = match v {
            None if !l.latent => {
                return Err(invalid("v: expected an array, got None (only latent layers take none)".into()));
            }
            None => None,
            Some(v) => Some(floats("v", v, &[Some(batch.num_tokens), Some(l.num_kv_heads), Some(l.v_dim)])?),
        };
        let (k, v) = (k.as_slice()?, v.as_ref().map(|v| v.as_slice()).transpose()?);
        self.change(py, |cache, should_stop| cache.write(layer, &mut *batch.change(should_stop)?, k, v))
    }

    pub(super) fn write_cross_rows(
        &self,
        py: Python<'_>,
        layer: usize,
        seq: SeqId,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let l = self.layout(layer)?;
        let k = floats("k", k, &[None, Some(l.num_kv_heads), Some(l.k_dim)])?;
        let v = floats("v", v, &[Some(k.shape()[0]), Some(l.num_kv_heads), Some(l.v_dim)])?;
        let (k, v) = (k.as_slice()?, v.as_slice()?);
        self.change(py, |cache, _| cache.write_cross(layer, seq, k, v))
    }

    pub(super) fn read_rows<'py>(
        &self,
        py: Python<'py>,
        layer: usize,
        seq: SeqId,
        dtype: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        let l = self.layout(layer)?;
        let dense = self.look_long(py, |cache, _| cache.read(layer, seq))?;
        let array = |values: Vec<f32>, width: usize| -> PyResult<Bound<'py, PyAny>> {
            let array = PyArray1::from_vec(py, values).reshape([dense.tokens, l.num_kv_heads, width])?.into_any();
            match dtype {
                None => Ok(array),
                Some(dtype) => array.call_method1("astype", (numpy_dtype(dtype)?,)),
            }
        };
        Ok((array(dense.k, l.k_dim)?, array(dense.v, l.v_dim)?))
    }
}

/// A dtype by name, or as numpy takes it; those of ml_dtypes by their names, too.
fn numpy_dtype<'py>(dtype: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = dtype.py();
    if !dtype.is_instance_of::<PyString>() {
        return Ok(dtype.clone());
    }
    match text("dtype", dtype)? {
        "float32" | "f32" => py.import("numpy")?.getattr("float32"),
        "float16" | "f16" => py.import("numpy")?.getattr("float16"),
        "bfloat16" | "bf16" => py.import("ml_dtypes")?.getattr("bfloat16"),
        "fp8_e4m3" | "fp8" => py.import("ml_dtypes")?.getattr("float8_e4m3fn"),
        "fp8_e5m2" => py.import("ml_dtypes")?.getattr("float8_e5m2"),
        other => Err(invalid(format!(
            "dtype: expected float32, float16, bfloat16, fp8_e4m3, fp8_e5m2 or a numpy dtype, got {other:?}"
        ))),
    }
}
