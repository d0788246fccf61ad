//! What a cache hands out: sequences, batches, pins.
#![forbid(unsafe_code)]

use std::sync::{RwLockReadGuard, RwLockWriteGuard};

use kvcore::Result;
use kvcore::cache::Batch;
use kvcore::paging::{PinId, SeqId};
use kvcore::threads::ShouldStop;
use numpy::PyArray1;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::lock::Shared;
use crate::arguments::{type_name, wrong_type};
use crate::arrays::Size;
use crate::error::{detached, invalid};

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
            Ok(batch.positions().map(|position| position as i64).collect())
        })?;
        Ok(PyArray1::from_vec(py, positions))
    }

    fn __repr__(&self) -> String {
        format!("Batch(num_tokens={})", self.num_tokens)
    }
}

/// The most pairs of a plan and beams of a reorder. An iterator that never ends must not take all memory.
pub const MAX_ITEMS: usize = 1 << 20;

/// The argument `seq`.
pub fn seq(value: &Bound<'_, PyAny>) -> PyResult<SeqId> {
    seq_in("seq", "a Sequence", value)
}

/// The argument `batch`.
pub fn batch<'py>(value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBatch>> {
    value.cast().cloned().map_err(|_| wrong_type("batch", "a Batch", value))
}

/// The argument `pin`.
pub fn pin(value: &Bound<'_, PyAny>) -> PyResult<PinId> {
    Ok(value.cast::<PyPin>().map_err(|_| wrong_type("pin", "a Pin", value))?.get().id)
}

/// The argument `seqs`.
pub fn seqs(value: &Bound<'_, PyAny>) -> PyResult<Vec<SeqId>> {
    items("seqs", "a list of sequences", value, |item| {
        seq_in("seqs", "a list of sequences with nothing else in it", item)
    })
}

/// The argument `items` of a plan: pairs of a sequence and how many of its tokens.
pub fn plan_items(value: &Bound<'_, PyAny>) -> PyResult<Vec<(SeqId, usize)>> {
    items("plan", "a list of (sequence, new tokens) pairs", value, |pair| {
        // A tuple is what every step of a model gives.
        let (seq, n) = match pair.cast::<PyTuple>() {
            Ok(pair) if pair.len() == 2 => (pair.get_item(0)?, pair.get_item(1)?),
            _ => match pair.len() {
                Ok(2) => (pair.get_item(0)?, pair.get_item(1)?),
                Ok(n) => {
                    let got =
                        format!("plan: expected (sequence, new tokens) pairs, got {} of length {n}", type_name(pair));
                    return Err(PyTypeError::new_err(got));
                }
                Err(e) if e.is_instance_of::<PyTypeError>(pair.py()) => {
                    return Err(wrong_type("plan", "(sequence, new tokens) pairs", pair));
                }
                Err(e) => return Err(e),
            },
        };
        let seq = seq_in("plan", "a Sequence before the number of new tokens", &seq)?;
        let n = n.extract::<Size<'_>>().unwrap_or_else(|never| match never {});
        Ok((seq, n.get("plan: new tokens")?))
    })
}

fn seq_in(name: &str, expected: &str, value: &Bound<'_, PyAny>) -> PyResult<SeqId> {
    Ok(value.cast::<PySequence>().map_err(|_| wrong_type(name, expected, value))?.get().id)
}

/// Item by item: a `Vec` argument would reserve whatever length an object claims to have.
fn items<'py, T>(
    name: &str,
    expected: &str,
    value: &Bound<'py, PyAny>,
    get: impl Fn(&Bound<'py, PyAny>) -> PyResult<T>,
) -> PyResult<Vec<T>> {
    let mut items = Vec::new();
    for item in value.try_iter().map_err(|_| wrong_type(name, expected, value))? {
        if items.len() == MAX_ITEMS {
            return Err(invalid(format!("{name}: expected {expected} of at most {MAX_ITEMS}, got more")));
        }
        items.push(get(&item?)?);
    }
    Ok(items)
}
