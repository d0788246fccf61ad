//! `KVCache` and its handles.
#![forbid(unsafe_code)]

use std::sync::{Arc, LockResult, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError, TryLockResult};

use kvcore::cache::{Batch, CacheConfig, KvCache};
use kvcore::paging::{SeqId, hash_block};
use kvcore::storage::{KvDtype, Layout, Scales};
use kvcore::threads::ShouldStop;
use kvcore::{Error, Result};
use numpy::{PyArray1, PyArray3, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::{PyNotImplementedError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

use crate::arrays::{Size, floats, token_ids, zeros};
use crate::error::{detached, in_signal_handler, invalid, to_python};
use crate::runtime::PyThreads;

/// A sequence in a KVCache.
#[pyclass(name = "Sequence", module = "kvcore._kvcore", frozen)]
pub struct PySequence {
    id: SeqId,
    /// Tokens whose K and V came from the prefix cache.
    #[pyo3(get)]
    num_cached_tokens: usize,
}

#[pymethods]
impl PySequence {
    fn __repr__(&self) -> String {
        format!("Sequence(num_cached_tokens={})", self.num_cached_tokens)
    }
}

/// Slots for the next tokens of some sequences: what KVCache.plan grants.
#[pyclass(name = "Batch", module = "kvcore._kvcore", frozen)]
pub struct PyBatch {
    batch: RwLock<Batch>,
    /// New tokens of all sequences: the rows that write and attend take.
    #[pyo3(get)]
    num_tokens: usize,
}

#[pymethods]
impl PyBatch {
    /// Position of each row in its sequence, int64 [num_tokens].
    #[getter]
    fn positions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        // Without the interpreter lock, as everything that waits: a call that holds the batch may ask for it.
        let positions = detached(py, |_| {
            let batch = self.look()?;
            Ok(batch.items().flat_map(|(_, start, len)| start as i64..(start + len) as i64).collect())
        })?;
        Ok(PyArray1::from_vec(py, positions))
    }

    fn __repr__(&self) -> String {
        format!("Batch(num_tokens={})", self.num_tokens)
    }
}

/// The paged KV cache of one model. See the stub file for the full documentation of each method.
///
/// Calls from several threads are safe: reads run side by side, changes one at a time.
#[pyclass(name = "KVCache", module = "kvcore._kvcore", frozen)]
pub struct PyKvCache {
    cache: RwLock<Option<KvCache>>,
    layout: Layout,
    k_scale: f32,
    v_scale: f32,
    threads: PyThreads,
}

impl PyKvCache {
    fn with<T>(&self, f: impl FnOnce(&KvCache) -> Result<T>) -> Result<T> {
        let cache = locked_or_busy(|| self.cache.read(), || self.cache.try_read())?;
        f(cache.as_ref().ok_or_else(closed)?)
    }

    fn with_mut<T>(&self, f: impl FnOnce(&mut KvCache) -> Result<T>) -> Result<T> {
        let mut cache = locked_or_busy(|| self.cache.write(), || self.cache.try_write())?;
        f(cache.as_mut().ok_or_else(closed)?)
    }

    fn look<T: Send>(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&KvCache, ShouldStop<'_>) -> Result<T> + Send,
    ) -> PyResult<T> {
        detached(py, |should_stop| self.with(|cache| f(cache, should_stop)))
    }

    fn change<T: Send>(&self, py: Python<'_>, f: impl FnOnce(&mut KvCache) -> Result<T> + Send) -> PyResult<T> {
        detached(py, |_| self.with_mut(f))
    }
}

/// Waits for a lock, except where that could never end.
fn locked_or_busy<G>(wait: impl FnOnce() -> LockResult<G>, attempt: impl FnOnce() -> TryLockResult<G>) -> Result<G> {
    if !in_signal_handler() {
        return Ok(wait().unwrap_or_else(PoisonError::into_inner));
    }
    match attempt() {
        Ok(guard) => Ok(guard),
        Err(TryLockError::Poisoned(guard)) => Ok(guard.into_inner()),
        Err(TryLockError::WouldBlock) => {
            Err(Error::InvalidState("in use by the call that this signal handler interrupts".into()))
        }
    }
}

fn closed() -> Error {
    Error::InvalidState("the cache is closed".into())
}

impl PyBatch {
    fn look(&self) -> Result<RwLockReadGuard<'_, Batch>> {
        locked_or_busy(|| self.batch.read(), || self.batch.try_read())
    }

    fn change(&self) -> Result<RwLockWriteGuard<'_, Batch>> {
        locked_or_busy(|| self.batch.write(), || self.batch.try_write())
    }
}

/// A hash that is the same for everything, for tests of what happens when hashes collide.
fn equal_hashes(_: u128, _: &[u32]) -> u128 {
    7
}

#[pymethods]
impl PyKvCache {
    #[new]
    #[pyo3(signature = (*, num_layers, num_kv_heads, head_dim, num_blocks, block_size = 16, dtype = "bfloat16",
        k_scale = None, v_scale = None, groups = None, num_threads = None, threads = None,
        enable_prefix_caching = true, _equal_hashes = false))]
    #[expect(clippy::too_many_arguments, reason = "the public signature")]
    fn new(
        num_layers: Size<'_>,
        num_kv_heads: Size<'_>,
        head_dim: Size<'_>,
        num_blocks: Size<'_>,
        block_size: i64,
        dtype: &str,
        k_scale: Option<f64>,
        v_scale: Option<f64>,
        groups: Option<&Bound<'_, PyAny>>,
        num_threads: Option<Size<'_>>,
        threads: Option<&PyThreads>,
        enable_prefix_caching: bool,
        _equal_hashes: bool,
    ) -> PyResult<Self> {
        if groups.is_some() {
            return Err(PyNotImplementedError::new_err(
                "groups: layers of different kinds are not supported yet; expected None",
            ));
        }
        let dtype: KvDtype = dtype.parse().map_err(to_python)?;
        // A float64 that float32 cannot hold becomes 0 or infinity here, which the check of the scales refuses.
        let (k_scale, v_scale) = (k_scale.unwrap_or(1.0) as f32, v_scale.unwrap_or(1.0) as f32);
        let head_dim = head_dim.get("head_dim")?;
        let layout = Layout {
            num_layers: num_layers.get("num_layers")?,
            num_blocks: num_blocks.get("num_blocks")?,
            num_kv_heads: num_kv_heads.get("num_kv_heads")?,
            k_dim: head_dim,
            v_dim: head_dim,
            latent: false,
            block_size: usize::try_from(block_size)
                .map_err(|_| invalid(format!("block_size: expected at least 16, got {block_size}")))?,
            dtype,
            scale_mode: dtype.default_scale_mode(),
        };
        let scales = Scales::uniform(&layout, k_scale, v_scale);
        let threads = match (num_threads, threads) {
            (Some(_), Some(_)) => {
                return Err(invalid("num_threads, threads: expected at most one of them, got both".into()));
            }
            (Some(n), None) => PyThreads::make(Some(n.get("num_threads")?))?,
            (None, threads) => PyThreads::or_default(threads)?,
        };
        let hash = if _equal_hashes { equal_hashes } else { hash_block };
        let config = CacheConfig { layout, scales, enable_prefix_caching, hash };
        let cache = KvCache::new(config, threads.level, Arc::clone(&threads.threads)).map_err(to_python)?;
        Ok(Self { cache: RwLock::new(Some(cache)), layout, k_scale, v_scale, threads })
    }

    #[pyo3(signature = (token_ids, salt = None, *, use_prefix = true))]
    fn add(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        salt: Option<&Bound<'_, PyAny>>,
        use_prefix: bool,
    ) -> PyResult<PySequence> {
        let ids = self::token_ids("token_ids", token_ids)?;
        let salt = salt.map(salt_bytes).transpose()?;
        self.change(py, |cache| {
            let id = cache.add(&ids, salt.as_deref(), use_prefix)?;
            Ok(PySequence { id, num_cached_tokens: cache.manager().num_cached_tokens(id)? })
        })
    }

    fn append(&self, py: Python<'_>, seq: &PySequence, token_ids: &Bound<'_, PyAny>) -> PyResult<()> {
        let ids = self::token_ids("token_ids", token_ids)?;
        self.change(py, |cache| cache.append(seq.id, &ids))
    }

    fn plan(&self, py: Python<'_>, items: &Bound<'_, PyAny>) -> PyResult<PyBatch> {
        // Item by item: a Vec argument would reserve whatever length an object claims to have.
        let pairs = items.try_iter().map_err(|_| {
            let got = items.get_type().name().map_or_else(|_| "something else".into(), |n| n.to_string());
            PyTypeError::new_err(format!("plan: expected a list of (sequence, new tokens) pairs, got {got}"))
        })?;
        let items: Vec<(SeqId, usize)> = pairs
            .map(|pair| {
                let pair = pair?;
                let (seq, n): (PyRef<'_, PySequence>, Size<'_>) = pair.extract().map_err(|e| match pair.len() {
                    Ok(2) => e,
                    _ => PyTypeError::new_err(format!("plan: expected (sequence, new tokens) pairs: {e}")),
                })?;
                Ok((seq.id, n.get("plan: new tokens")?))
            })
            .collect::<PyResult<_>>()?;
        let batch = self.change(py, |cache| cache.plan(&items))?;
        Ok(PyBatch { num_tokens: batch.num_tokens(), batch: RwLock::new(batch) })
    }

    fn write(
        &self,
        py: Python<'_>,
        layer: Size<'_>,
        batch: &PyBatch,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let layer = layer.get("layer")?;
        let shape = [Some(batch.num_tokens), Some(self.layout.num_kv_heads), Some(self.layout.k_dim)];
        let (k, v) = (floats("k", k, &shape)?, floats("v", v, &shape)?);
        let (k, v) = (k.as_slice()?, v.as_slice()?);
        self.change(py, |cache| cache.write(layer, &mut *batch.change()?, k, v))
    }

    #[pyo3(signature = (layer, batch, q, scale = None, window = None, softcap = None, sinks = None))]
    #[expect(clippy::too_many_arguments, reason = "the public signature")]
    fn attend<'py>(
        &self,
        py: Python<'py>,
        layer: Size<'_>,
        batch: &PyBatch,
        q: &Bound<'py, PyAny>,
        scale: Option<f64>,
        window: Option<&Bound<'py, PyAny>>,
        softcap: Option<&Bound<'py, PyAny>>,
        sinks: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyArray3<f32>>> {
        let layer = layer.get("layer")?;
        for (name, value) in [("window", window), ("softcap", softcap), ("sinks", sinks)] {
            if value.is_some() {
                return Err(PyNotImplementedError::new_err(format!("{name}: not supported yet; expected None")));
            }
        }
        let heads = match q.cast::<PyUntypedArray>() {
            Ok(array) if array.ndim() == 3 => array.shape()[1],
            _ => 0,
        };
        let q = floats("q", q, &[Some(batch.num_tokens), None, Some(self.layout.k_dim)])?;
        let q = q.as_slice()?;
        let out = self.look(py, |cache, should_stop| {
            let mut out = zeros(1, q.len())?;
            cache.attend(layer, &*batch.look()?, heads, scale.map(|s| s as f32), q, &mut out, should_stop)?;
            Ok(out)
        })?;
        PyArray1::from_vec(py, out).reshape([batch.num_tokens, heads, self.layout.k_dim])
    }

    fn commit(&self, py: Python<'_>, batch: &PyBatch) -> PyResult<()> {
        self.change(py, |cache| cache.commit(&*batch.look()?))
    }

    fn fork(&self, py: Python<'_>, seq: &PySequence) -> PyResult<PySequence> {
        self.change(py, |cache| {
            let id = cache.fork(seq.id)?;
            Ok(PySequence { id, num_cached_tokens: cache.manager().num_cached_tokens(id)? })
        })
    }

    fn truncate(&self, py: Python<'_>, seq: &PySequence, num_tokens: Size<'_>) -> PyResult<()> {
        let n = num_tokens.get("num_tokens")?;
        self.change(py, |cache| cache.truncate(seq.id, n))
    }

    fn free(&self, py: Python<'_>, seq: &PySequence) -> PyResult<()> {
        self.change(py, |cache| cache.free(seq.id))
    }

    #[allow(clippy::type_complexity)]
    fn read<'py>(
        &self,
        py: Python<'py>,
        layer: Size<'_>,
        seq: &PySequence,
    ) -> PyResult<(Bound<'py, PyArray3<f32>>, Bound<'py, PyArray3<f32>>)> {
        let layer = layer.get("layer")?;
        let (tokens, k, v) = self.look(py, |cache, _| cache.read(layer, seq.id))?;
        let shape = [tokens, self.layout.num_kv_heads, self.layout.k_dim];
        Ok((PyArray1::from_vec(py, k).reshape(shape)?, PyArray1::from_vec(py, v).reshape(shape)?))
    }

    fn block_table(&self, py: Python<'_>, seq: &PySequence) -> PyResult<Vec<usize>> {
        self.look(py, |cache, _| Ok(cache.block_table(seq.id)?.iter().map(|b| b.index()).collect()))
    }

    fn token_ids<'py>(&self, py: Python<'py>, seq: &PySequence) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let ids =
            self.look(py, |cache, _| Ok(cache.manager().token_ids(seq.id)?.iter().map(|&id| i64::from(id)).collect()))?;
        Ok(PyArray1::from_vec(py, ids))
    }

    fn num_tokens(&self, py: Python<'_>, seq: &PySequence) -> PyResult<usize> {
        self.look(py, |cache, _| cache.manager().num_tokens(seq.id))
    }

    fn num_computed_tokens(&self, py: Python<'_>, seq: &PySequence) -> PyResult<usize> {
        self.look(py, |cache, _| cache.manager().num_computed_tokens(seq.id))
    }

    fn reset_prefix_cache(&self, py: Python<'_>) -> PyResult<()> {
        self.change(py, KvCache::reset_prefix_cache)
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.look(py, |cache, _| Ok(cache.stats()))?;
        let dict = PyDict::new(py);
        dict.set_item("total", stats.total)?;
        dict.set_item("free", stats.free)?;
        dict.set_item("cached", stats.cached)?;
        dict.set_item("used", stats.used)?;
        dict.set_item("num_sequences", stats.num_sequences)?;
        dict.set_item("tokens", stats.tokens)?;
        dict.set_item("hit_tokens", stats.hit_tokens)?;
        dict.set_item("query_tokens", stats.query_tokens)?;
        dict.set_item("evictions", stats.evictions)?;
        dict.set_item("copies", stats.copies)?;
        Ok(dict)
    }

    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.look(py, |cache, _| cache.check())
    }

    /// Give the memory back. Every later call raises InvalidState.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, |_| {
            let mut cache = locked_or_busy(|| self.cache.write(), || self.cache.try_write())?;
            drop(cache.take());
            Ok(())
        })
    }

    /// Overwrite every stored value; tests poison the pool with it.
    fn _fill(&self, py: Python<'_>, value: f32) -> PyResult<()> {
        self.change(py, |cache| {
            cache.fill(value);
            Ok(())
        })
    }

    #[getter]
    fn num_layers(&self) -> usize {
        self.layout.num_layers
    }
    #[getter]
    fn num_kv_heads(&self) -> usize {
        self.layout.num_kv_heads
    }
    #[getter]
    fn head_dim(&self) -> usize {
        self.layout.k_dim
    }
    #[getter]
    fn num_blocks(&self) -> usize {
        self.layout.num_blocks
    }
    #[getter]
    fn block_size(&self) -> usize {
        self.layout.block_size
    }
    #[getter]
    fn dtype(&self) -> &'static str {
        self.layout.dtype.name()
    }
    #[getter]
    fn k_scale(&self) -> f32 {
        self.k_scale
    }
    #[getter]
    fn v_scale(&self) -> f32 {
        self.v_scale
    }
    #[getter]
    fn bytes_per_token(&self) -> usize {
        self.layout.bytes_per_token()
    }
    #[getter]
    fn nbytes(&self) -> usize {
        self.layout.total_bytes()
    }
    #[getter]
    fn num_free_blocks(&self, py: Python<'_>) -> PyResult<usize> {
        self.look(py, |cache, _| Ok(cache.manager().num_free_blocks()))
    }
    #[getter]
    fn threads(&self) -> PyThreads {
        self.threads.clone()
    }

    fn __repr__(&self) -> String {
        let l = &self.layout;
        format!(
            "KVCache(num_layers={}, num_kv_heads={}, head_dim={}, num_blocks={}, block_size={}, dtype='{}')",
            l.num_layers, l.num_kv_heads, l.k_dim, l.num_blocks, l.block_size, l.dtype
        )
    }
}

fn salt_bytes(salt: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    if let Ok(text) = salt.cast::<PyString>() {
        return Ok(text.to_str()?.as_bytes().to_vec());
    }
    if let Ok(bytes) = salt.cast::<PyBytes>() {
        return Ok(bytes.as_bytes().to_vec());
    }
    Err(PyTypeError::new_err(format!("salt: expected str, bytes or None, got {}", salt.get_type().name()?)))
}
