//! Sequences from sequences: forks, and the next beams.
#![forbid(unsafe_code)]

use kvcore::Result;
use kvcore::cache::KvCache;
use kvcore::paging::SeqId;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::PyKvCache;
use super::handles::{PySequence, seqs as seqs_of};
use crate::arrays::Size;
use crate::error::invalid;
use crate::ids::indices;

/// More children at once are a mistake.
const MAX_FORKS: usize = 1 << 16;

/// What Python holds of a sequence.
pub(super) fn sequence(cache: &KvCache, id: SeqId) -> Result<PySequence> {
    Ok(PySequence { id, num_cached_tokens: cache.manager().num_cached_tokens(id)? })
}

impl PyKvCache {
    /// One child, or a list of `n`.
    pub(super) fn fork_into<'py>(
        &self,
        py: Python<'py>,
        seq: SeqId,
        n: Option<Size<'_>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let Some(n) = n else {
            let child = self.change(py, |cache, _| {
                let id = cache.fork(seq)?;
                sequence(cache, id)
            })?;
            return Ok(Bound::new(py, child)?.into_any());
        };
        let n = n.get("n")?;
        if n > MAX_FORKS {
            return Err(invalid(format!("n: expected at most {MAX_FORKS}, got {n}")));
        }
        let children = self.change(py, |cache, _| {
            cache.manager().num_tokens(seq)?;
            let mut children = Vec::with_capacity(n);
            for _ in 0..n {
                match cache.fork(seq).and_then(|id| sequence(cache, id)) {
                    Ok(child) => children.push(child),
                    Err(error) => {
                        children.iter().try_for_each(|child: &PySequence| cache.free(child.id))?;
                        return Err(error);
                    }
                }
            }
            Ok(children)
        })?;
        let children: Vec<_> = children.into_iter().map(|child| Bound::new(py, child)).collect::<PyResult<_>>()?;
        Ok(PyList::new(py, children)?.into_any())
    }

    /// A child of each parent, in place of all of `seqs`.
    pub(super) fn beams(
        &self,
        py: Python<'_>,
        seqs: &Bound<'_, PyAny>,
        parents: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<PySequence>> {
        let seqs = seqs_of(seqs)?;
        let parents = indices("parents", parents, seqs.len(), MAX_FORKS)?;
        let parents: Vec<usize> = parents.into_iter().map(|parent| parent as usize).collect();
        self.change_now(py, |cache, _| {
            let ids = cache.reorder(&seqs, &parents)?;
            ids.into_iter().map(|id| sequence(cache, id)).collect()
        })
    }
}
