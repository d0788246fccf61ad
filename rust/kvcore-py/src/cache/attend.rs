//! Attention over a cache as a call from Python: arrays in, arrays out.
#![forbid(unsafe_code)]

use kvcore::attention::Output;
use numpy::{PyArray1, PyArray3, PyArrayMethods};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;

use super::PyKvCache;
use super::handles::PyBatch;
use super::scores::{ScoreArguments, ScoreArrays, chosen, queries};
use crate::arrays::Size;
use crate::results;

/// Which sequence of a batch, which of its rows, which query heads.
type Chosen<'a, 'py> = (Option<Size<'py>>, Option<&'a Bound<'py, PyAny>>, Option<&'a Bound<'py, PyAny>>);

impl PyKvCache {
    pub(super) fn attend_rows<'py>(
        &self,
        py: Python<'py>,
        layer: usize,
        batch: &PyBatch,
        q: &Bound<'py, PyAny>,
        scores: ScoreArguments<'_, 'py>,
        return_lse: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let l = self.layout(layer)?;
        let (q, heads) = queries(q, batch.num_tokens, l.k_dim)?;
        let scores = ScoreArrays::new(heads, scores)?;
        let (q, options) = (q.as_slice()?, scores.options()?);
        let (out, lse) = self.look_long(py, |cache, should_stop| {
            let results = |width| results::Output::new(&self.threads.threads, batch.num_tokens * heads, width);
            let mut out = results(l.v_dim)?;
            let mut lse = return_lse.then(|| results(1)).transpose()?;
            let output = Output { out: &mut out, lse: lse.as_deref_mut() };
            cache.attend(layer, &*batch.look(should_stop)?, heads, options, q, output, should_stop)?;
            Ok((out, lse))
        })?;
        let out = out.into_array(py, [batch.num_tokens, heads, l.v_dim])?;
        match lse {
            None => Ok(out.into_any()),
            Some(lse) => (out, lse.into_array(py, [batch.num_tokens, heads])?).into_bound_py_any(py),
        }
    }

    pub(super) fn weights_of_rows<'py>(
        &self,
        py: Python<'py>,
        layer: usize,
        batch: &PyBatch,
        q: &Bound<'py, PyAny>,
        (index, rows, heads): Chosen<'_, 'py>,
        scores: ScoreArguments<'_, 'py>,
    ) -> PyResult<Bound<'py, PyArray3<f32>>> {
        let l = self.layout(layer)?;
        let (q, q_heads) = queries(q, batch.num_tokens, l.k_dim)?;
        let scores = ScoreArrays::new(q_heads, scores)?;
        let (q, options) = (q.as_slice()?, scores.options()?);
        let index = index.map_or(Ok(0), |index| index.get("index"))?;
        let rows = chosen("rows", rows)?;
        let heads = chosen("heads", heads)?.unwrap_or_else(|| (0..q_heads).collect());
        let (count, tokens, weights) = self.look_long(py, |cache, should_stop| {
            let batch = batch.look(should_stop)?;
            let rows = rows.unwrap_or_else(|| (0..batch.num_tokens_of(index)).collect());
            let chosen = (index, &rows[..], &heads[..]);
            let (tokens, weights) = cache.attention_weights(layer, &batch, q_heads, options, q, chosen, should_stop)?;
            Ok((rows.len(), tokens, weights))
        })?;
        PyArray1::from_vec(py, weights).reshape([count, heads.len(), tokens])
    }
}
