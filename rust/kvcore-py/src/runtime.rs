//! What calls run on: a pool of threads and a SIMD level.
#![forbid(unsafe_code)]

use std::sync::Arc;

use kvcore::simd::Level;
use kvcore::threads::Threads;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyCFunction};

use crate::arrays::Size;
use crate::error::to_python;

/// A pool of worker threads that calls share, and the SIMD level that they run on.
///
/// Workers start with the first parallel call, sleep when idle and are started anew after a fork.
#[pyclass(name = "Threads", module = "kvcore._kvcore", frozen)]
#[derive(Clone)]
pub struct PyThreads {
    pub threads: Arc<Threads>,
    pub level: Level,
}

impl PyThreads {
    /// A pool, and the level that `KVCORE_SIMD` asks for.
    pub fn make(num_threads: Option<usize>) -> PyResult<Self> {
        let threads = Arc::new(Threads::new(num_threads).map_err(to_python)?);
        Ok(Self { threads, level: Level::from_env().map_err(to_python)? })
    }

    /// `threads`, or a new pool for all available CPUs.
    pub fn or_default(threads: Option<&Self>) -> PyResult<Self> {
        threads.map_or_else(|| Self::make(None), |threads| Ok(threads.clone()))
    }
}

#[pymethods]
impl PyThreads {
    /// A pool; None: as many threads as CPU affinity and cgroup quota allow.
    #[new]
    #[pyo3(signature = (num_threads = None))]
    fn new(num_threads: Option<Size<'_>>) -> PyResult<Self> {
        Self::make(num_threads.map(|n| n.get("num_threads")).transpose()?)
    }

    /// Threads that a call may use, the calling one among them.
    #[getter]
    fn num_threads(&self) -> usize {
        self.threads.num_threads()
    }

    /// Name of the SIMD level.
    #[getter]
    fn simd(&self) -> &'static str {
        self.level.name()
    }

    fn __repr__(&self) -> String {
        format!("Threads(num_threads={}, simd='{}')", self.num_threads(), self.simd())
    }
}

/// Name of the SIMD level in use: what KVCORE_SIMD forces, or the best of this CPU.
#[pyfunction]
pub fn simd() -> PyResult<&'static str> {
    Ok(Level::from_env().map_err(to_python)?.name())
}

/// Names of the SIMD levels that this CPU has, the best last.
#[pyfunction]
pub fn available_simd() -> Vec<&'static str> {
    Level::available().iter().map(Level::name).collect()
}

/// Locks learn of forks from Python, whose business they are: asking the system at every call would take longer than the
/// calls.
pub fn watch_forks(py: Python<'_>) -> PyResult<()> {
    // Windows has none.
    let Some(register) = py.import("os")?.getattr_opt("register_at_fork")? else { return Ok(()) };
    let forked = PyCFunction::new_closure(py, None, None, |_, _| crate::cache::forked())?;
    register.call((), Some(&[("after_in_child", forked)].into_py_dict(py)?))?;
    Ok(())
}
