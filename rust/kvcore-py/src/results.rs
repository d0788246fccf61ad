//! Memory for what calls return: large arrays take that of arrays which nobody has any more.
//!
//! As in `cache/view.rs`, numpy makes the array itself from an address (`__array_interface__`), and keeps the object that
//! has it, here a `Piece`, as its base: when the last array on it is gone, the memory goes back to the pool's.
#![forbid(unsafe_code)]

use std::sync::{Arc, Weak};

use kvcore::threads::Threads;
use numpy::ndarray::{Dimension, IntoDimension};
use numpy::{PyArray, PyArray1, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

/// Values below which a new array costs less than to have numpy look at a piece.
const LARGE: usize = 1 << 14;

/// The values of a result, to be filled: at first they mean nothing.
pub struct Output {
    piece: Piece,
    len: usize,
}

impl Output {
    /// `rows * width` values.
    ///
    /// # Errors
    /// [`kvcore::Error::OutOfMemory`].
    pub fn new(threads: &Arc<Threads>, rows: usize, width: usize) -> kvcore::Result<Self> {
        let len = rows.saturating_mul(width);
        let values = threads.memory().take(len)?;
        Ok(Self { piece: Piece { values, address: 0, shape: Vec::new(), threads: Arc::downgrade(threads) }, len })
    }

    /// As an array of this shape, which has as many values.
    pub fn into_array<'py, S: IntoDimension>(
        self,
        py: Python<'py>,
        shape: S,
    ) -> PyResult<Bound<'py, PyArray<f32, S::Dim>>> {
        let (mut piece, len, shape) = (self.piece, self.len, shape.into_dimension());
        if len < LARGE {
            piece.values.truncate(len);
            return PyArray1::from_vec(py, std::mem::take(&mut piece.values)).reshape(shape);
        }
        (piece.address, piece.shape) = (piece.values.as_mut_ptr().expose_provenance(), shape.slice().to_vec());
        let array = py.import("numpy")?.call_method1("asarray", (Bound::new(py, piece)?,))?;
        Ok(array.cast_into()?)
    }
}

impl std::ops::Deref for Output {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.piece.values[..self.len]
    }
}

impl std::ops::DerefMut for Output {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.piece.values[..self.len]
    }
}

/// What a large array has as its base. Whoever has the object without an array sees its address, as of any numpy array.
#[pyclass(name = "_Piece", module = "kvcore._kvcore", frozen)]
struct Piece {
    values: Vec<f32>,
    address: usize,
    shape: Vec<usize>,
    /// Which a result does not keep alive.
    threads: Weak<Threads>,
}

impl Drop for Piece {
    fn drop(&mut self) {
        if let Some(threads) = self.threads.upgrade() {
            threads.memory().give(std::mem::take(&mut self.values));
        }
    }
}

#[pymethods]
impl Piece {
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("version", 3)?;
        // The address, and that it may be written to: by numpy alone, since nothing here looks at the values again.
        dict.set_item("data", (self.address, false))?;
        dict.set_item("typestr", if cfg!(target_endian = "little") { "<f4" } else { ">f4" })?;
        dict.set_item("shape", PyTuple::new(py, &self.shape)?)?;
        Ok(dict)
    }
}
