//! Read-only numpy arrays on the memory of a cache.
//!
//! numpy makes them itself, from `__array_interface__`: an address, a shape and strides. It keeps the object that has
//! this attribute (a `Memory`) as the array's base and, through it, the view that keeps the bytes as they are. Nothing
//! here is `unsafe`, but everything depends on it that the arrays lie within the view's bytes: the core computes both.
#![forbid(unsafe_code)]

use std::sync::Arc;

use kvcore::cache::TileView;
use kvcore::storage::{KvDtype, Strided};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

/// The tokens of one tile of a sequence in one layer, where they lie. See the stub file.
#[pyclass(name = "TileView", module = "kvcore._kvcore", frozen, get_all)]
pub struct PyTileView {
    pub k: Py<PyAny>,
    pub v: Option<Py<PyAny>>,
    pub v_last: Option<Py<PyAny>>,
    pub k_scale: Option<Py<PyAny>>,
    pub v_scale: Option<Py<PyAny>>,
    pub start: usize,
    pub num_tokens: usize,
}

/// What an array has as its base.
#[pyclass(name = "_Memory", module = "kvcore._kvcore", frozen)]
struct Memory {
    view: Arc<TileView>,
    array: Strided,
    /// Whether the array lies in the scales, otherwise in the tiles.
    is_scale: bool,
    typestr: &'static str,
}

#[pymethods]
impl Memory {
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        let bytes = if self.is_scale { self.view.scales() } else { self.view.tiles() };
        let address = bytes[self.array.offset..].as_ptr().expose_provenance();
        dict.set_item("version", 3)?;
        // The address, and that it is not to be written to.
        dict.set_item("data", (address, true))?;
        dict.set_item("typestr", self.typestr)?;
        dict.set_item("shape", PyTuple::new(py, &self.array.shape)?)?;
        dict.set_item("strides", PyTuple::new(py, &self.array.strides)?)?;
        Ok(dict)
    }
}

/// How numpy names a number that the CPU reads as it lies.
macro_rules! native {
    ($kind:literal) => {
        if cfg!(target_endian = "little") { concat!("<", $kind) } else { concat!(">", $kind) }
    };
}

const FLOAT32: &str = native!("f4");

/// The type that the bytes are given, and that of ml_dtypes as which they are shown.
fn types(dtype: KvDtype) -> (&'static str, Option<&'static str>) {
    match dtype {
        KvDtype::F32 => (FLOAT32, None),
        KvDtype::F16 => (native!("f2"), None),
        KvDtype::Bf16 => (native!("u2"), Some("bfloat16")),
        KvDtype::Fp8E4M3 => ("|u1", Some("float8_e4m3fn")),
        KvDtype::Fp8E5M2 => ("|u1", Some("float8_e5m2")),
        KvDtype::Int8 => ("|i1", None),
        // Never viewed.
        KvDtype::Int4 => ("|u1", None),
    }
}

impl PyTileView {
    pub fn new(py: Python<'_>, view: TileView) -> PyResult<Self> {
        let numpy = py.import("numpy")?;
        let (arrays, view) = (view.arrays.clone(), Arc::new(view));
        let array = |array: Strided, is_scale: bool, typestr: &'static str| -> PyResult<Bound<'_, PyAny>> {
            let memory = Bound::new(py, Memory { view: Arc::clone(&view), array, is_scale, typestr })?;
            numpy.call_method1("asarray", (memory,))
        };
        let (typestr, shown) = types(view.dtype);
        let shown = shown.map(|name| py.import("ml_dtypes")?.getattr(name)).transpose()?;
        let values = |values: Strided| -> PyResult<Py<PyAny>> {
            let array = array(values, false, typestr)?;
            Ok(match &shown {
                Some(dtype) => array.call_method1("view", (dtype,))?.unbind(),
                None => array.unbind(),
            })
        };
        // Of each token, in the arena; or one for all tokens, which may change when there is no view: a copy.
        let scale = |own: Option<Strided>, shared: Option<&Vec<f32>>| -> PyResult<Option<Py<PyAny>>> {
            match (own, shared) {
                (Some(own), _) => Ok(Some(array(own, true, FLOAT32)?.unbind())),
                (None, Some(shared)) => {
                    let array = PyArray1::from_slice(py, shared).into_any();
                    array.call_method1("setflags", (false,))?;
                    Ok(Some(array.unbind()))
                }
                (None, None) => Ok(None),
            }
        };
        let has_v = arrays.v.is_some();
        let (k_shared, v_shared) = view.static_scales.as_ref().map(|(k, v)| (k, v)).unzip();
        Ok(Self {
            k: values(arrays.k)?,
            v: arrays.v.map(&values).transpose()?,
            v_last: arrays.v_last.map(&values).transpose()?,
            k_scale: scale(arrays.k_scales, k_shared)?,
            v_scale: scale(arrays.v_scales, v_shared.filter(|_| has_v))?,
            start: view.start,
            num_tokens: view.tokens,
        })
    }
}

#[pymethods]
impl PyTileView {
    fn __repr__(&self) -> String {
        format!("TileView(start={}, num_tokens={})", self.start, self.num_tokens)
    }
}
