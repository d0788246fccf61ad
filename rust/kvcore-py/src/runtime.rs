//! What calls run on: a pool of threads and a SIMD level.
#![forbid(unsafe_code)]

use std::sync::Arc;

use kvcore::simd::Level;
use kvcore::threads::Threads;
use pyo3::prelude::*;

use crate::error::to_python;

/// A pool of worker threads that calls share; the calling thread is one of them.
///
/// Workers start with the first parallel call, sleep when idle and are started anew after a fork.
#[pyclass(name = "Threads", module = "kvcore._kvcore", frozen)]
pub struct PyThreads {
    pub threads: Arc<Threads>,
}

#[pymethods]
impl PyThreads {
    /// A pool; None: as many threads as CPU affinity and cgroup quota allow.
    #[new]
    #[pyo3(signature = (num_threads = None))]
    fn new(num_threads: Option<usize>) -> PyResult<Self> {
        Ok(Self { threads: Arc::new(Threads::new(num_threads).map_err(to_python)?) })
    }

    /// Threads that a call may use, the calling one among them.
    #[getter]
    fn num_threads(&self) -> usize {
        self.threads.num_threads()
    }

    fn __repr__(&self) -> String {
        format!("Threads(num_threads={})", self.num_threads())
    }
}

/// The pool of `threads`, or a new one for all available CPUs.
pub fn threads_or_default(threads: Option<&PyThreads>) -> PyResult<Arc<Threads>> {
    match threads {
        Some(threads) => Ok(Arc::clone(&threads.threads)),
        None => Ok(Arc::new(Threads::new(None).map_err(to_python)?)),
    }
}

/// The level that `KVCORE_SIMD` asks for, or the best.
pub fn level() -> PyResult<Level> {
    Level::from_env().map_err(to_python)
}

/// Name of the SIMD level in use: what KVCORE_SIMD forces, or the best of this CPU.
#[pyfunction]
pub fn simd() -> PyResult<&'static str> {
    Ok(level()?.name())
}

/// Names of the SIMD levels that this CPU has, the best last.
#[pyfunction]
pub fn available_simd() -> Vec<&'static str> {
    Level::available().iter().map(Level::name).collect()
}
