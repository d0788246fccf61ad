//! The scales of a cache: found by running sample text, and as Python sees them.
#![forbid(unsafe_code)]

use kvcore::threads::NEVER;
use numpy::PyArray2;
use pyo3::prelude::*;

use super::PyKvCache;
use super::access::closed;
use crate::arguments::wrong_type;
use crate::error::detached;

impl PyKvCache {
    pub(super) fn calibrate_by<'py>(&self, py: Python<'py>, run: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        if !run.is_callable() {
            return Err(wrong_type("run", "a callable that runs sample text", run));
        }
        self.change_now(py, |cache, _| cache.begin_calibration())?;
        let result = run.call0();
        if result.is_err() {
            // Also if that was Ctrl-C, and comes again.
            detached(py, |_| {
                self.cache.change(NEVER)?.as_mut().ok_or_else(closed)?.abort_calibration();
                Ok(())
            })?;
            return result;
        }
        self.change_now(py, |cache, _| cache.end_calibration())?;
        result
    }

    /// Scales of each layer and head, `[layers, heads]`, ones where a layer has fewer; one number if all are the same.
    pub(super) fn scales<'py>(
        &self,
        py: Python<'py>,
        of: fn(&kvcore::storage::Scales) -> &Vec<f32>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let config = self.look(py, |cache| Ok(cache.config().clone())).unwrap_or_else(|_| self.config.clone());
        let scales = |layer: usize| -> Vec<f32> {
            for spec in &config.groups {
                if let Some(at) = spec.layers.iter().position(|&l| l == layer) {
                    let all = spec.scales.as_ref().map(of);
                    let heads = spec.num_kv_heads;
                    return all.map_or_else(|| vec![1.0; heads], |all| all[at * heads..(at + 1) * heads].to_vec());
                }
            }
            Vec::new()
        };
        let rows: Vec<Vec<f32>> = (0..self.layouts.len()).map(scales).collect();
        let first = rows.iter().flatten().next().copied().unwrap_or(1.0);
        if rows.iter().flatten().all(|&scale| scale == first) {
            return Ok(first.into_pyobject(py)?.into_any());
        }
        let heads = rows.iter().map(Vec::len).max().unwrap_or(0);
        let padded: Vec<Vec<f32>> =
            rows.into_iter().map(|row| row.into_iter().chain(std::iter::repeat(1.0)).take(heads).collect()).collect();
        Ok(PyArray2::from_vec2(py, &padded)?.into_any())
    }
}
