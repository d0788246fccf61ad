//! `KVCache`: one-line methods over the core's cache.
#![forbid(unsafe_code)]

mod group;
mod handles;
mod lock;
mod options;
mod report;
mod scores;
mod trees;
mod view;

use std::cell::Cell;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvcore::attention::Output;
use kvcore::cache::{CacheConfig, Ended, GroupKind, KvCache};
use kvcore::paging::{AddOptions, Key, PinId, Retention, SeqId, hash_block};
use kvcore::storage::{KvDtype, Layout, ScaleMode};
use kvcore::threads::{NEVER, ShouldStop};
use kvcore::{Error, Result};
use numpy::{PyArray1, PyArray2, PyArray3, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

pub use group::PyKvGroup;
pub use handles::{PyBatch, PyPin, PySequence};
use handles::{batch, pin, plan_items, seq};
pub use lock::forked;
pub use view::PyTileView;

use crate::arguments::{of, text, wrong_type};
use crate::arrays::{Size, floats};
use crate::error::{detached, invalid, to_python};
use crate::ids::{self, indices, room};
use crate::results;
use crate::runtime::PyThreads;
use group::Defaults;
use lock::Shared;
use options::{Ttl, block_size, key, retention, seconds, set_scales};
use report::{Counts, Snapshot, events, nbytes, table};
use scores::{ScoreArrays, chosen, queries};

/// The paged KV cache of one model. See the stub file for the full documentation of each method.
///
/// Calls from several threads are safe: reads run side by side, changes one at a time.
#[pyclass(name = "KVCache", module = "kvcore._kvcore", frozen)]
pub struct PyKvCache {
    cache: Shared<Option<KvCache>>,
    groups: Vec<PyKvGroup>,
    kinds: Vec<&'static str>,
    layouts: Vec<Option<Layout>>,
    config: CacheConfig,
    bytes_per_token: usize,
    nbytes: usize,
    threads: PyThreads,
    clock: Option<Py<PyAny>>,
    ended_views: Ended,
}

impl PyKvCache {
    /// What views have given up is free if that means no waiting; whoever takes blocks sees to it anyway.
    fn reclaim_views(&self) {
        if !self.ended_views.is_empty()
            && let Some(mut cache) = self.cache.try_change()
            && let Some(cache) = cache.as_mut()
        {
            cache.reclaim_views();
        }
    }

    /// A short read.
    fn look<T: Send>(&self, py: Python<'_>, f: impl FnOnce(&KvCache) -> Result<T> + Send) -> PyResult<T> {
        detached(py, |should_stop| {
            self.reclaim_views();
            f(self.cache.look(should_stop)?.as_ref().ok_or_else(closed)?)
        })
    }

    /// A read that may take long.
    fn look_long<T: Send>(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&KvCache, ShouldStop<'_>) -> Result<T> + Send,
    ) -> PyResult<T> {
        detached(py, |should_stop| {
            self.reclaim_views();
            f(self.cache.look_long(should_stop)?.as_ref().ok_or_else(closed)?, should_stop)
        })
    }

    /// A short read that would rather be a change, and is one if that means no waiting: then it is told what time it is.
    fn look_now<T: Send>(&self, py: Python<'_>, f: impl FnOnce(&KvCache) -> Result<T> + Send) -> PyResult<T> {
        let now = self.now(py)?;
        detached(py, |should_stop| {
            if let Some(mut cache) = self.cache.try_change()
                && let Some(cache) = cache.as_mut()
            {
                tell(cache, now);
                return f(cache);
            }
            f(self.cache.look(should_stop)?.as_ref().ok_or_else(closed)?)
        })
    }

    /// A change that takes no time into account.
    fn change<T: Send>(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&mut KvCache, ShouldStop<'_>) -> Result<T> + Send,
    ) -> PyResult<T> {
        detached(py, |should_stop| f(self.cache.change(should_stop)?.as_mut().ok_or_else(closed)?, should_stop))
    }

    /// A change before which the cache is told what time it is.
    fn change_now<T: Send>(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&mut KvCache, ShouldStop<'_>) -> Result<T> + Send,
    ) -> PyResult<T> {
        let now = self.now(py)?;
        self.change(py, |cache, should_stop| {
            tell(cache, now);
            f(cache, should_stop)
        })
    }

    /// What the caller's clock says; None for the system's, and where the clock itself uses the cache.
    fn now(&self, py: Python<'_>) -> PyResult<Option<Duration>> {
        let Some(clock) = &self.clock else { return Ok(None) };
        if ASKING.replace(true) {
            return Ok(None);
        }
        let said = clock.call0(py);
        ASKING.set(false);
        seconds("clock()", said?.bind(py)).map(Some)
    }

    fn layout(&self, layer: usize) -> PyResult<&Layout> {
        match self.layouts.get(layer) {
            Some(Some(layout)) => Ok(layout),
            Some(None) => Err(invalid(format!("layer {layer} is of kind none: it keeps no K and V"))),
            None => Err(invalid(format!("layer: expected 0 to {}, got {layer}", self.layouts.len() - 1))),
        }
    }

    fn group(&self, group: &Size<'_>) -> PyResult<usize> {
        let group = group.get("group")?;
        if group >= self.kinds.len() {
            return Err(invalid(format!("group: expected 0 to {}, got {group}", self.kinds.len() - 1)));
        }
        Ok(group)
    }

    fn retention(&self, ttl: &Ttl<'_>, priority: Option<Size<'_>>) -> PyResult<Option<Retention>> {
        retention("ttl", ttl, priority, self.config.retention)
    }

    fn make_sequence(cache: &KvCache, id: SeqId) -> Result<PySequence> {
        Ok(PySequence { id, num_cached_tokens: cache.manager().num_cached_tokens(id)? })
    }

    fn scales<'py>(
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

thread_local! {
    /// Whether this thread is asking a caller's clock.
    static ASKING: Cell<bool> = const { Cell::new(false) };
}

fn tell(cache: &mut KvCache, now: Option<Duration>) {
    match now {
        Some(now) => cache.set_now(now),
        None => cache.tick(),
    }
}

fn closed() -> Error {
    Error::InvalidState("the cache is closed".into())
}

/// A hash that is the same for everything, for tests of what happens when hashes collide.
fn equal_hashes(_: u128, _: &[u32]) -> u128 {
    7
}

#[pymethods]
impl PyKvCache {
    #[new]
    #[pyo3(signature = (*, num_layers = None, num_kv_heads = None, head_dim = None, num_blocks = None, block_size = 16,
        dtype = "bfloat16", k_scale = None, v_scale = None, scale_mode = None, groups = None, num_threads = None,
        threads = None, enable_prefix_caching = true, min_prefix_tokens = None, prefix_ttl = Ttl::Default,
        max_pinned_fraction = 0.5, max_rollback = None, max_events = None, spill_dir = None, spill_bytes = None,
        fingerprint = "", clock = None, _equal_hashes = false))]
    #[expect(clippy::too_many_arguments, reason = "the public signature")]
    fn new(
        num_layers: Option<Size<'_>>,
        num_kv_heads: Option<Size<'_>>,
        head_dim: Option<Size<'_>>,
        num_blocks: Option<Size<'_>>,
        #[pyo3(from_py_with = block_size)] block_size: usize,
        #[pyo3(from_py_with = of::dtype)] dtype: &str,
        k_scale: Option<&Bound<'_, PyAny>>,
        v_scale: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = of::scale_mode)] scale_mode: Option<&str>,
        groups: Option<&Bound<'_, PyAny>>,
        num_threads: Option<Size<'_>>,
        threads: Option<&PyThreads>,
        #[pyo3(from_py_with = of::enable_prefix_caching)] enable_prefix_caching: bool,
        min_prefix_tokens: Option<Size<'_>>,
        prefix_ttl: Ttl<'_>,
        #[pyo3(from_py_with = of::max_pinned_fraction)] max_pinned_fraction: f64,
        max_rollback: Option<Size<'_>>,
        max_events: Option<Size<'_>>,
        #[pyo3(from_py_with = of::spill_dir)] spill_dir: Option<PathBuf>,
        spill_bytes: Option<Size<'_>>,
        #[pyo3(from_py_with = of::fingerprint)] fingerprint: &str,
        clock: Option<Py<PyAny>>,
        _equal_hashes: bool,
    ) -> PyResult<Self> {
        let get = |name: &str, value: Option<Size<'_>>| value.map(|value| value.get(name)).transpose();
        let num_layers = get("num_layers", num_layers)?;
        let defaults = Defaults {
            num_kv_heads: get("num_kv_heads", num_kv_heads)?,
            head_dim: get("head_dim", head_dim)?,
            num_blocks: get("num_blocks", num_blocks)?,
        };
        let dtype: KvDtype = dtype.parse().map_err(to_python)?;
        let groups = match groups {
            Some(groups) => PyKvGroup::list(groups)?,
            None => vec![whole(num_layers, defaults)?],
        };
        let mut config = CacheConfig::new(0, 0, 0, 0, block_size, dtype);
        config.groups = groups.iter().enumerate().map(|(i, group)| group.spec(i, defaults)).collect::<PyResult<_>>()?;
        if let Some(expected) = num_layers.filter(|&n| n != config.num_layers()) {
            return Err(invalid(format!("num_layers: the groups have {} layers, got {expected}", config.num_layers())));
        }
        if let Some(mode) = scale_mode {
            config.scale_mode = mode.parse::<ScaleMode>().map_err(to_python)?;
        }
        config.enable_prefix_caching = enable_prefix_caching;
        config.min_prefix_tokens = get("min_prefix_tokens", min_prefix_tokens)?.unwrap_or(0);
        config.max_rollback = get("max_rollback", max_rollback)?.unwrap_or(0);
        config.max_events = get("max_events", max_events)?.unwrap_or(0);
        config.max_pinned_fraction = max_pinned_fraction;
        config.spill_bytes = match get("spill_bytes", spill_bytes)? {
            None if spill_dir.is_some() => {
                return Err(invalid("spill_bytes: expected the size of the file beside spill_dir, got None".into()));
            }
            bytes => bytes.unwrap_or(0),
        };
        config.fingerprint = fingerprint.into();
        if let Some(retention) = retention("prefix_ttl", &prefix_ttl, None, config.retention)? {
            config.retention = retention;
        }
        config.hash = if _equal_hashes { equal_hashes } else { hash_block };
        let threads = match (num_threads, threads) {
            (Some(_), Some(_)) => {
                return Err(invalid("num_threads, threads: expected at most one of them, got both".into()));
            }
            (Some(n), None) => PyThreads::make(Some(n.get("num_threads")?))?,
            (None, threads) => PyThreads::or_default(threads)?,
        };
        set_scales(&mut config, k_scale, v_scale)?;
        let cache = KvCache::new(config.clone(), spill_dir.as_deref(), threads.level, Arc::clone(&threads.threads))
            .map_err(to_python)?;
        Ok(Self {
            layouts: (0..config.num_layers())
                .map(|layer| cache.layout_of(layer))
                .collect::<Result<_>>()
                .map_err(to_python)?,
            kinds: cache.paged_groups().map(|spec| spec.kind.name()).collect(),
            bytes_per_token: cache.bytes_per_token(),
            nbytes: nbytes(&cache),
            ended_views: cache.ended_views().clone(),
            cache: Shared::new(Some(cache)),
            groups,
            config,
            threads,
            clock,
        })
    }

    #[pyo3(signature = (token_ids, salt = None, *, adapter = None, extra = None, use_prefix = true,
        min_prefix_tokens = None, ttl = Ttl::Default, priority = None))]
    #[expect(clippy::too_many_arguments, reason = "the public signature")]
    fn add(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        salt: Option<&Bound<'_, PyAny>>,
        adapter: Option<&Bound<'_, PyAny>>,
        extra: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = of::use_prefix)] use_prefix: bool,
        min_prefix_tokens: Option<Size<'_>>,
        ttl: Ttl<'_>,
        priority: Option<Size<'_>>,
    ) -> PyResult<PySequence> {
        let ids = ids::token_ids("token_ids", token_ids)?;
        let (salt, adapter, extra) = (key("salt", salt)?, key("adapter", adapter)?, key("extra", extra)?);
        let min_prefix_tokens = min_prefix_tokens.map(|n| n.get("min_prefix_tokens")).transpose()?;
        let retention = self.retention(&ttl, priority)?;
        self.change_now(py, |cache, _| {
            let key = Key { salt: salt.as_deref(), adapter: adapter.as_deref(), extra: extra.as_deref() };
            // Which encoder's output a decoder sees, only `extra` can say.
            let use_prefix = use_prefix && (cache.cross_store().is_none() || extra.is_some());
            let id = cache.add(&ids, &AddOptions { key, use_prefix, min_prefix_tokens, retention })?;
            Self::make_sequence(cache, id)
        })
    }

    fn append(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = seq)] seq: SeqId,
        token_ids: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let ids = ids::token_ids("token_ids", token_ids)?;
        self.change(py, |cache, _| cache.append(seq, &ids))
    }

    #[pyo3(signature = (items, parents = None))]
    fn plan(&self, py: Python<'_>, items: &Bound<'_, PyAny>, parents: Option<&Bound<'_, PyAny>>) -> PyResult<PyBatch> {
        let items = plan_items(items)?;
        let parents = parents.map(trees::parents).transpose()?;
        let plan = |cache: &mut KvCache| match parents {
            None => cache.plan(&items),
            Some(parents) => cache.plan_trees(&items, parents),
        };
        Ok(PyBatch::new(self.change_now(py, |cache, _| plan(cache))?))
    }

    #[pyo3(signature = (layer, batch, k, v = None))]
    fn write(
        &self,
        py: Python<'_>,
        layer: Size<'_>,
        #[pyo3(from_py_with = batch)] batch: Bound<'_, PyBatch>,
        k: &Bound<'_, PyAny>,
        v: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let batch = batch.get();
        let layer = layer.get("layer")?;
        let l = self.layout(layer)?;
        let k = floats("k", k, &[Some(batch.num_tokens), Some(l.num_kv_heads), Some(l.k_dim)])?;
        let v = match v {
            None if !l.latent => {
                return Err(invalid("v: expected an array, got None (only latent layers take none)".into()));
            }
            None => None,
            Some(v) => Some(floats("v", v, &[Some(batch.num_tokens), Some(l.num_kv_heads), Some(l.v_dim)])?),
        };
        let (k, v) = (k.as_slice()?, v.as_ref().map(|v| v.as_slice()).transpose()?);
        self.change(py, |cache, should_stop| cache.write(layer, &mut *batch.change(should_stop)?, k, v))
    }

    fn write_cross(
        &self,
        py: Python<'_>,
        layer: Size<'_>,
        #[pyo3(from_py_with = seq)] seq: SeqId,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let layer = layer.get("layer")?;
        let l = self.layout(layer)?;
        let k = floats("k", k, &[None, Some(l.num_kv_heads), Some(l.k_dim)])?;
        let v = floats("v", v, &[Some(k.shape()[0]), Some(l.num_kv_heads), Some(l.v_dim)])?;
        let (k, v) = (k.as_slice()?, v.as_slice()?);
        self.change(py, |cache, _| cache.write_cross(layer, seq, k, v))
    }

    fn share_cross(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = seq)] seq: SeqId,
        #[pyo3(from_py_with = seq)] source: SeqId,
    ) -> PyResult<()> {
        self.change(py, |cache, _| cache.share_cross(seq, source))
    }

    #[pyo3(signature = (layer, batch, q, scale = None, window = None, softcap = None, sinks = None, *, alibi_slopes = None,
        position_bias = None, bias_ahead = None, return_lse = false))]
    #[expect(clippy::too_many_arguments, reason = "the public signature")]
    fn attend<'py>(
        &self,
        py: Python<'py>,
        layer: Size<'_>,
        #[pyo3(from_py_with = batch)] batch: Bound<'_, PyBatch>,
        q: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = of::scale)] scale: Option<f32>,
        window: Option<Size<'py>>,
        #[pyo3(from_py_with = of::softcap)] softcap: Option<f32>,
        sinks: Option<&Bound<'py, PyAny>>,
        alibi_slopes: Option<&Bound<'py, PyAny>>,
        position_bias: Option<&Bound<'py, PyAny>>,
        bias_ahead: Option<Size<'py>>,
        return_lse: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let batch = batch.get();
        let layer = layer.get("layer")?;
        let l = self.layout(layer)?;
        let (q, heads) = queries(q, batch.num_tokens, l.k_dim)?;
        let scores = ScoreArrays::new(heads, scale, window, softcap, sinks, alibi_slopes, (position_bias, bias_ahead))?;
        let (q, options) = (q.as_slice()?, scores.options()?);
        let (out, lse) = self.look_long(py, |cache, should_stop| {
            let mut out = results::Output::new(&self.threads.threads, batch.num_tokens * heads, l.v_dim)?;
            let mut lse = if return_lse { Some(vec![0.0; batch.num_tokens * heads]) } else { None };
            let output = Output { out: &mut out, lse: lse.as_deref_mut() };
            cache.attend(layer, &*batch.look(should_stop)?, heads, options, q, output, should_stop)?;
            Ok((out, lse))
        })?;
        let out = out.into_array(py, [batch.num_tokens, heads, l.v_dim])?;
        match lse {
            None => Ok(out.into_any()),
            Some(lse) => (out, PyArray1::from_vec(py, lse).reshape([batch.num_tokens, heads])?).into_bound_py_any(py),
        }
    }

    #[pyo3(signature = (layer, batch, q, index = None, rows = None, heads = None, *, scale = None, window = None,
        softcap = None, sinks = None, alibi_slopes = None, position_bias = None, bias_ahead = None))]
    #[expect(clippy::too_many_arguments, reason = "the public signature")]
    fn attention_weights<'py>(
        &self,
        py: Python<'py>,
        layer: Size<'_>,
        #[pyo3(from_py_with = batch)] batch: Bound<'_, PyBatch>,
        q: &Bound<'py, PyAny>,
        index: Option<Size<'py>>,
        rows: Option<&Bound<'py, PyAny>>,
        heads: Option<&Bound<'py, PyAny>>,
        #[pyo3(from_py_with = of::scale)] scale: Option<f32>,
        window: Option<Size<'py>>,
        #[pyo3(from_py_with = of::softcap)] softcap: Option<f32>,
        sinks: Option<&Bound<'py, PyAny>>,
        alibi_slopes: Option<&Bound<'py, PyAny>>,
        position_bias: Option<&Bound<'py, PyAny>>,
        bias_ahead: Option<Size<'py>>,
    ) -> PyResult<Bound<'py, PyArray3<f32>>> {
        let batch = batch.get();
        let layer = layer.get("layer")?;
        let l = self.layout(layer)?;
        let (q, q_heads) = queries(q, batch.num_tokens, l.k_dim)?;
        let scores =
            ScoreArrays::new(q_heads, scale, window, softcap, sinks, alibi_slopes, (position_bias, bias_ahead))?;
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

    #[pyo3(signature = (batch, keep = None))]
    fn commit(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = batch)] batch: Bound<'_, PyBatch>,
        keep: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let batch = batch.get();
        let Some(keep) = keep else {
            return self.change_now(py, |cache, should_stop| cache.commit(&*batch.look(should_stop)?));
        };
        let keep = trees::rows(keep, batch.num_tokens)?;
        self.change_now(py, |cache, should_stop| {
            let keep: Vec<Option<&[usize]>> = keep.iter().map(Option::as_deref).collect();
            cache.commit_rows(&*batch.look(should_stop)?, &keep)
        })
    }

    #[pyo3(signature = (seq, n = None))]
    fn fork<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = seq)] seq: SeqId,
        n: Option<Size<'_>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let Some(n) = n else {
            let child = self.change(py, |cache, _| {
                let id = cache.fork(seq)?;
                Self::make_sequence(cache, id)
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
                match cache.fork(seq).and_then(|id| Self::make_sequence(cache, id)) {
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

    fn reorder(
        &self,
        py: Python<'_>,
        seqs: &Bound<'_, PyAny>,
        parents: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<PySequence>> {
        let seqs = handles::seqs(seqs)?;
        let parents = indices("parents", parents, seqs.len(), MAX_FORKS)?;
        let parents: Vec<usize> = parents.into_iter().map(|parent| parent as usize).collect();
        self.change_now(py, |cache, _| {
            let ids = cache.reorder(&seqs, &parents)?;
            ids.into_iter().map(|id| Self::make_sequence(cache, id)).collect()
        })
    }

    fn truncate(&self, py: Python<'_>, #[pyo3(from_py_with = seq)] seq: SeqId, num_tokens: Size<'_>) -> PyResult<()> {
        let n = num_tokens.get("num_tokens")?;
        self.change_now(py, |cache, _| cache.truncate(seq, n))
    }

    fn free(&self, py: Python<'_>, #[pyo3(from_py_with = seq)] seq: SeqId) -> PyResult<()> {
        self.change_now(py, |cache, _| cache.free(seq))
    }

    #[pyo3(signature = (seq, num_tokens = None, *, ttl = Ttl::Default, priority = None))]
    fn mark(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = seq)] seq: SeqId,
        num_tokens: Option<Size<'_>>,
        ttl: Ttl<'_>,
        priority: Option<Size<'_>>,
    ) -> PyResult<()> {
        let n = num_tokens.map(|n| n.get("num_tokens")).transpose()?;
        let retention = self.retention(&ttl, priority)?.unwrap_or(self.config.retention);
        self.change_now(py, |cache, _| {
            let n = n.map_or_else(|| cache.manager().num_tokens(seq), Ok)?;
            cache.mark(seq, n, retention)
        })
    }

    #[pyo3(signature = (seq, num_tokens = None))]
    fn pin(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = seq)] seq: SeqId,
        num_tokens: Option<Size<'_>>,
    ) -> PyResult<PyPin> {
        let n = num_tokens.map(|n| n.get("num_tokens")).transpose()?;
        self.change_now(py, |cache, _| {
            let num_tokens = n.map_or_else(|| cache.manager().num_computed_tokens(seq), Ok)?;
            Ok(PyPin { id: cache.pin(seq, num_tokens)?, num_tokens })
        })
    }

    fn unpin(&self, py: Python<'_>, #[pyo3(from_py_with = pin)] pin: PinId) -> PyResult<()> {
        self.change_now(py, |cache, _| cache.unpin(pin))
    }

    fn calibrate<'py>(&self, py: Python<'py>, run: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
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

    #[pyo3(signature = (layer, seq, dtype = None))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        layer: Size<'_>,
        #[pyo3(from_py_with = seq)] seq: SeqId,
        dtype: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        let layer = layer.get("layer")?;
        let l = self.layout(layer)?;
        let dense = self.look_long(py, |cache, _| cache.read(layer, seq))?;
        let array = |values: Vec<f32>, width: usize| -> PyResult<Bound<'py, PyAny>> {
            let array = PyArray1::from_vec(py, values).reshape([dense.tokens, l.num_kv_heads, width])?.into_any();
            match dtype {
                None => Ok(array),
                Some(dtype) => array.call_method1("astype", (numpy_dtype(dtype)?,)),
            }
        };
        Ok((array(dense.k, l.k_dim)?, array(dense.v, l.v_dim)?))
    }

    fn view(
        &self,
        py: Python<'_>,
        layer: Size<'_>,
        #[pyo3(from_py_with = seq)] seq: SeqId,
        index: Size<'_>,
    ) -> PyResult<PyTileView> {
        let (layer, index) = (layer.get("layer")?, index.get("index")?);
        self.layout(layer)?;
        let view = self.change_now(py, |cache, _| cache.view(layer, seq, index))?;
        PyTileView::new(py, view)
    }

    fn save(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = seq)] seq: SeqId,
        #[pyo3(from_py_with = of::path)] path: PathBuf,
    ) -> PyResult<()> {
        self.look_long(py, |cache, should_stop| cache.save(seq, &path, should_stop))
    }

    fn load(&self, py: Python<'_>, #[pyo3(from_py_with = of::path)] path: PathBuf) -> PyResult<PySequence> {
        self.change_now(py, |cache, should_stop| {
            let id = cache.load(&path, should_stop)?;
            Self::make_sequence(cache, id)
        })
    }

    fn save_prefixes(&self, py: Python<'_>, #[pyo3(from_py_with = of::folder)] folder: PathBuf) -> PyResult<usize> {
        self.change_now(py, |cache, should_stop| cache.save_prefixes(&folder, should_stop))
    }

    fn load_prefixes(&self, py: Python<'_>, #[pyo3(from_py_with = of::folder)] folder: PathBuf) -> PyResult<usize> {
        self.change_now(py, |cache, should_stop| cache.load_prefixes(&folder, should_stop))
    }

    #[pyo3(signature = (seq, group = None))]
    fn block_table(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = seq)] seq: SeqId,
        group: Option<Size<'_>>,
    ) -> PyResult<Vec<i64>> {
        let group = group.map(|group| self.group(&group)).transpose()?.unwrap_or(0);
        self.look(py, |cache| Ok(table(cache.block_table(seq, group)?)))
    }

    fn token_ids<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = seq)] seq: SeqId,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let ids = self.look(py, |cache| {
            let known = cache.manager().token_ids(seq)?;
            let mut ids = room(known.len(), "the result")?;
            ids.extend(known.iter().map(|&id| i64::from(id)));
            Ok(ids)
        })?;
        Ok(PyArray1::from_vec(py, ids))
    }

    fn num_tokens(&self, py: Python<'_>, #[pyo3(from_py_with = seq)] seq: SeqId) -> PyResult<usize> {
        self.look(py, |cache| cache.manager().num_tokens(seq))
    }

    fn num_computed_tokens(&self, py: Python<'_>, #[pyo3(from_py_with = seq)] seq: SeqId) -> PyResult<usize> {
        self.look(py, |cache| cache.manager().num_computed_tokens(seq))
    }

    fn reset_prefix_cache(&self, py: Python<'_>) -> PyResult<()> {
        self.change_now(py, |cache, _| cache.reset_prefix_cache())
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        // What has expired is swept if that means no waiting: a reader waits for no reader.
        let counts = self.look_now(py, Counts::of)?;
        counts.dict(py, &self.kinds)
    }

    fn events<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let taken = self.look_now(py, |cache| Ok(cache.take_events()))?;
        events(py, &taken)
    }

    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.look(py, Snapshot::of)?.dict(py, &self.kinds)
    }

    fn _repr_html_(slf: &Bound<'_, Self>) -> PyResult<String> {
        let map = slf.py().import("kvcore.viz")?.call_method1("block_map", (slf,))?;
        map.getattr("svg")?.extract()
    }

    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.look_long(py, |cache, _| cache.check())
    }

    /// Give the memory back. Every later call raises InvalidState.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, |should_stop| {
            drop(self.cache.change(should_stop)?.take());
            Ok(())
        })
    }

    /// Overwrite every stored value; tests poison the pool with it.
    fn _fill(&self, py: Python<'_>, value: f32) -> PyResult<()> {
        self.change(py, |cache, _| {
            cache.fill(value);
            Ok(())
        })
    }

    #[getter]
    fn num_layers(&self) -> usize {
        self.layouts.len()
    }
    #[getter]
    fn num_kv_heads(&self) -> usize {
        self.first_spec().num_kv_heads
    }
    #[getter]
    fn head_dim(&self) -> usize {
        self.first_spec().head_dim
    }
    #[getter]
    fn num_blocks(&self) -> usize {
        self.paged_specs().map(|spec| spec.num_blocks).min().unwrap_or(0)
    }
    #[getter]
    fn block_size(&self) -> usize {
        self.config.block_size
    }
    #[getter]
    fn dtype(&self) -> &'static str {
        self.config.dtype.name()
    }
    #[getter]
    fn scale_mode(&self) -> &'static str {
        self.config.scale_mode.name()
    }
    #[getter]
    fn k_scale<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.scales(py, |scales| &scales.k)
    }
    #[getter]
    fn v_scale<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.scales(py, |scales| &scales.v)
    }
    #[getter]
    fn groups(&self) -> Vec<PyKvGroup> {
        self.groups.clone()
    }
    #[getter]
    fn bytes_per_token(&self) -> usize {
        self.bytes_per_token
    }
    #[getter]
    fn nbytes(&self) -> usize {
        self.nbytes
    }
    #[getter]
    fn num_free_blocks(&self, py: Python<'_>) -> PyResult<usize> {
        self.look(py, |cache| Ok(cache.manager().num_free_blocks()))
    }
    #[getter]
    fn threads(&self) -> PyThreads {
        self.threads.clone()
    }

    fn __repr__(&self) -> String {
        let spec = self.first_spec();
        let groups = if self.groups.len() > 1 { format!(", {} groups", self.groups.len()) } else { String::new() };
        format!(
            "KVCache(num_layers={}, num_kv_heads={}, head_dim={}, num_blocks={}, block_size={}, dtype='{}'{groups})",
            self.layouts.len(),
            spec.num_kv_heads,
            spec.head_dim,
            spec.num_blocks,
            self.config.block_size,
            self.config.dtype
        )
    }
}

impl PyKvCache {
    fn paged_specs(&self) -> impl Iterator<Item = &kvcore::cache::GroupSpec> {
        self.config.groups.iter().filter(|spec| !matches!(spec.kind, GroupKind::None | GroupKind::Cross))
    }

    /// The group that the sizes of a cache with several are those of.
    fn first_spec(&self) -> &kvcore::cache::GroupSpec {
        self.paged_specs().next().unwrap_or(&self.config.groups[0])
    }
}

/// More children at once are a mistake.
const MAX_FORKS: usize = 1 << 16;

/// The one group of a cache whose layers are all alike.
fn whole(num_layers: Option<usize>, defaults: Defaults) -> PyResult<PyKvGroup> {
    let needed = [
        ("num_layers", num_layers),
        ("num_kv_heads", defaults.num_kv_heads),
        ("head_dim", defaults.head_dim),
        ("num_blocks", defaults.num_blocks),
    ];
    if let Some((name, _)) = needed.iter().find(|(_, value)| value.is_none()) {
        return Err(PyTypeError::new_err(format!("{name}: expected an integer (or groups beside it), got None")));
    }
    let num_layers = num_layers.unwrap_or(0);
    if num_layers == 0 || num_layers > 1 << 16 {
        return Err(invalid(format!("num_layers: expected 1 to {}, got {num_layers}", 1 << 16)));
    }
    Ok(PyKvGroup {
        kind: "full".into(),
        layers: (0..num_layers).collect(),
        num_kv_heads: defaults.num_kv_heads,
        head_dim: defaults.head_dim,
        v_head_dim: None,
        window: None,
        rank: None,
        rope_dim: None,
        num_blocks: defaults.num_blocks,
    })
}

/// A dtype by name, or as numpy takes it; those of ml_dtypes by their names, too.
fn numpy_dtype<'py>(dtype: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = dtype.py();
    if !dtype.is_instance_of::<PyString>() {
        return Ok(dtype.clone());
    }
    match text("dtype", dtype)? {
        "float32" | "f32" => py.import("numpy")?.getattr("float32"),
        "float16" | "f16" => py.import("numpy")?.getattr("float16"),
        "bfloat16" | "bf16" => py.import("ml_dtypes")?.getattr("bfloat16"),
        "fp8_e4m3" | "fp8" => py.import("ml_dtypes")?.getattr("float8_e4m3fn"),
        "fp8_e5m2" => py.import("ml_dtypes")?.getattr("float8_e5m2"),
        other => Err(invalid(format!(
            "dtype: expected float32, float16, bfloat16, fp8_e4m3, fp8_e5m2 or a numpy dtype, got {other:?}"
        ))),
    }
}
