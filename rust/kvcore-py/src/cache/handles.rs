//! What a cache hands out: sequences, batches, pins.
#![forbid(unsafe_code)]

use std::sync::{RwLockReadGuard, RwLockWriteGuard};

use kvcore::Result;
use kvcore::cache::Batch;
use kvcore::paging::{PinId, SeqId};
use kvcore::threads::ShouldStop;
use numpy::PyArray1;
use pyo3::prelude::*;

use super::lock::Shared;
use crate::error::detached;

/// A sequence in a KVCache.
#[pyclass(name = "Sequence", module = "kvcore._kvcore", frozen)]
pub struct PySequence {
    pub id: SeqId,
    /// Tokens whose K and V came from the prefix cache.
    #[pyo3(get)]
    pub num_cached_tokens: usize,
}

#[pymethods]
impl PySequence {
    fn __repr__(&self) -> String {
        format!("Sequence(num_cached_tokens={})", self.num_cached_tokens)
    }
}

/// A prefix that KVCache.pin keeps.
#[pyclass(name = "Pin", module = "kvcore._kvcore", frozen)]
pub struct PyPin {
    pub id: PinId,
    /// Tokens of the prefix.
    #[pyo3(get)]
    pub num_tokens: usize,
}

#[pymethods]
impl PyPin {
    fn __repr__(&self) -> String {
        format!("Pin(num_tokens={})", self.num_tokens)
    }
}

/// Slots for the next tokens of some sequences: what KVCache.plan grants.
#[pyclass(name = "Batch", module = "kvcore._kvcore", frozen)]
pub struct PyBatch {
    batch: Shared<Batch>,
    /// New tokens of all sequences: the rows that write and attend take.
    #[pyo3(get)]
    pub num_tokens: usize,
}

impl PyBatch {
    pub fn new(batch: Batch) -> Self {
        Self { num_tokens: batch.num_tokens(), batch: Shared::new(batch) }
    }

    pub fn look(&self, should_stop: ShouldStop<'_>) -> Result<RwLockReadGuard<'_, Batch>> {
        self.batch.look(should_stop)
    }

    pub fn change(&self, should_stop: ShouldStop<'_>) -> Result<RwLockWriteGuard<'_, Batch>> {
        self.batch.change(should_stop)
    }
}

#[pymethods]
impl PyBatch {
    /// Position of each row in its sequence, int64 [num_tokens].
    #[getter]
    fn positions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        // Without the interpreter lock, as everything that waits: a call that holds the batch may ask for it.
        let positions = detached(py, |should_stop| {
            let batch = self.look(should_stop)?;
            Ok(batch.items().flat_map(|(_, start, len)| start as i64..(start + len) as i64).collect())
        })?;
        Ok(PyArray1::from_vec(py, positions))
    }

    fn __repr__(&self) -> String {
        format!("Batch(num_tokens={})", self.num_tokens)
    }
}
