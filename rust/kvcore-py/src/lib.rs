//! Python bindings: an export list only.
#![forbid(unsafe_code)]

use pyo3::prelude::*;

/// The native core of kvcore.
#[pymodule]
mod _kvcore {
    #[pymodule_export]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
