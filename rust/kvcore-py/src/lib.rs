//! Python bindings: an export list only.
#![forbid(unsafe_code)]

mod arguments;
mod arrays;
mod cache;
mod error;
mod ids;
mod linear;
mod ops;
mod results;
mod runtime;

use pyo3::prelude::*;

/// The native core of kvcore.
#[pymodule]
mod _kvcore {
    #[pymodule_export]
    use super::cache::{PyBatch, PyKvCache, PyKvGroup, PyPin, PySequence, PyTileView};
    #[pymodule_export]
    use super::linear::{PyArena, PyLinear, linear_heads};
    #[pymodule_export]
    use super::ops::{
        activate, argmax, e4m3_decode, e4m3_encode, layer_norm, reference_attention, rms_norm, rope, rope_split, route,
        softcap,
    };
    #[pymodule_export]
    use super::runtime::{PyThreads, available_simd, simd};

    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        runtime::watch_forks(module.py())
    }
}
