//! `KVCache`: one-line methods over the core's cache.
#![forbid(unsafe_code)]

mod access;
mod attend;
mod forks;
mod group;
mod handles;
mod lock;
mod make;
mod options;
mod report;
mod rows;
mod scales;
mod scores;
mod trees;
mod view;

use std::path::PathBuf;

use kvcore::cache::{CacheConfig, Ended, GroupKind, KvCache};
use kvcore::paging::{AddOptions, Key, PinId, Retention, SeqId};
use kvcore::storage::Layout;
use numpy::{PyArray1, PyArray3};
use pyo3::prelude::*;
use pyo3::types::PyDict;

pub use group::PyKvGroup;
pub use handles::{PyBatch, PyPin, PySequence};
use handles::{batch, pin, plan_items, seq};
pub use lock::forked;
pub use view::PyTileView;

use crate::arguments::of;
use crate::arrays::Size;
use crate::error::{detached, invalid};
use crate::ids::{self, room};
use crate::runtime::PyThreads;
use forks::sequence;
use lock::Shared;
use make::Arguments;
use options::{Ttl, block_size, key, retention};
use report::{Counts, Snapshot, events, table};
use scores::ScoreArguments;

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
        Arguments {
            num_layers,
            num_kv_heads,
            head_dim,
            num_blocks,
            block_size,
            dtype,
            k_scale,
            v_scale,
            scale_mode,
            groups,
            num_threads,
            threads,
            enable_prefix_caching,
            min_prefix_tokens,
            prefix_ttl,
            max_pinned_fraction,
            max_rollback,
            max_events,
            spill_dir,
            spill_bytes,
            fingerprint,
            clock,
            equal_hashes: _equal_hashes,
        }
        .make()
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
            sequence(cache, id)
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
        self.write_rows(py, layer.get("layer")?, batch.get(), k, v)
    }

    fn write_cross(
        &self,
        py: Python<'_>,
        layer: Size<'_>,
        #[pyo3(from_py_with = seq)] seq: SeqId,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.write_cross_rows(py, layer.get("layer")?, seq, k, v)
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
        let scores = ScoreArguments { scale, window, softcap, sinks, alibi_slopes, position_bias, bias_ahead };
        self.attend_rows(py, layer.get("layer")?, batch.get(), q, scores, return_lse)
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
        let scores = ScoreArguments { scale, window, softcap, sinks, alibi_slopes, position_bias, bias_ahead };
        self.weights_of_rows(py, layer.get("layer")?, batch.get(), q, (index, rows, heads), scores)
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
        self.fork_into(py, seq, n)
    }

    fn reorder(
        &self,
        py: Python<'_>,
        seqs: &Bound<'_, PyAny>,
        parents: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<PySequence>> {
        self.beams(py, seqs, parents)
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
        self.calibrate_by(py, run)
    }

    #[pyo3(signature = (layer, seq, dtype = None))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        layer: Size<'_>,
        #[pyo3(from_py_with = seq)] seq: SeqId,
        dtype: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        self.read_rows(py, layer.get("layer")?, seq, dtype)
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
            sequence(cache, id)
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
