//! A cache from the arguments of its constructor.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::sync::Arc;

use kvcore::Result;
use kvcore::cache::{CacheConfig, KvCache};
use kvcore::paging::hash_block;
use kvcore::storage::{KvDtype, ScaleMode};
use pyo3::prelude::*;

use super::PyKvCache;
use super::group::{Defaults, PyKvGroup};
use super::lock::Shared;
use super::options::{Ttl, retention, set_scales};
use super::report::nbytes;
use crate::arrays::Size;
use crate::error::{invalid, to_python};
use crate::runtime::PyThreads;

/// As the stub file documents them.
pub struct Arguments<'a, 'py> {
    pub num_layers: Option<Size<'py>>,
    pub num_kv_heads: Option<Size<'py>>,
    pub head_dim: Option<Size<'py>>,
    pub num_blocks: Option<Size<'py>>,
    pub block_size: usize,
    pub dtype: &'a str,
    pub k_scale: Option<&'a Bound<'py, PyAny>>,
    pub v_scale: Option<&'a Bound<'py, PyAny>>,
    pub scale_mode: Option<&'a str>,
    pub groups: Option<&'a Bound<'py, PyAny>>,
    pub num_threads: Option<Size<'py>>,
    pub threads: Option<&'a PyThreads>,
    pub enable_prefix_caching: bool,
    pub min_prefix_tokens: Option<Size<'py>>,
    pub prefix_ttl: Ttl<'py>,
    pub max_pinned_fraction: f64,
    pub max_rollback: Option<Size<'py>>,
    pub max_events: Option<Size<'py>>,
    pub spill_dir: Option<PathBuf>,
    pub spill_bytes: Option<Size<'py>>,
    pub fingerprint: &'a str,
    pub clock: Option<Py<PyAny>>,
    pub equal_hashes: bool,
}

impl Arguments<'_, '_> {
    pub fn make(self) -> PyResult<PyKvCache> {
        let get = |name: &str, value: Option<Size<'_>>| value.map(|value| value.get(name)).transpose();
        let num_layers = get("num_layers", self.num_layers)?;
        let defaults = Defaults {
            num_kv_heads: get("num_kv_heads", self.num_kv_heads)?,
            head_dim: get("head_dim", self.head_dim)?,
            num_blocks: get("num_blocks", self.num_blocks)?,
        };
        let dtype: KvDtype = self.dtype.parse().map_err(to_python)?;
        let groups = match self.groups {
            Some(groups) => PyKvGroup::list(groups)?,
            None => vec![PyKvGroup::whole(num_layers, defaults)?],
        };
        let mut config = CacheConfig::new(0, 0, 0, 0, self.block_size, dtype);
        config.groups = groups.iter().enumerate().map(|(i, group)| group.spec(i, defaults)).collect::<PyResult<_>>()?;
        if let Some(expected) = num_layers.filter(|&n| n != config.num_layers()) {
            return Err(invalid(format!("num_layers: the groups have {} layers, got {expected}", config.num_layers())));
        }
        if let Some(mode) = self.scale_mode {
            config.scale_mode = mode.parse::<ScaleMode>().map_err(to_python)?;
        }
        config.enable_prefix_caching = self.enable_prefix_caching;
        config.min_prefix_tokens = get("min_prefix_tokens", self.min_prefix_tokens)?.unwrap_or(0);
        config.max_rollback = get("max_rollback", self.max_rollback)?.unwrap_or(0);
        config.max_events = get("max_events", self.max_events)?.unwrap_or(0);
        config.max_pinned_fraction = self.max_pinned_fraction;
        config.spill_bytes = match get("spill_bytes", self.spill_bytes)? {
            None if self.spill_dir.is_some() => {
                return Err(invalid("spill_bytes: expected the size of the file beside spill_dir, got None".into()));
            }
            bytes => bytes.unwrap_or(0),
        };
        config.fingerprint = self.fingerprint.into();
        if let Some(retention) = retention("prefix_ttl", &self.prefix_ttl, None, config.retention)? {
            config.retention = retention;
        }
        config.hash = if self.equal_hashes { equal_hashes } else { hash_block };
        let threads = match (self.num_threads, self.threads) {
            (Some(_), Some(_)) => {
                return Err(invalid("num_threads, threads: expected at most one of them, got both".into()));
            }
            (Some(n), None) => PyThreads::make(Some(n.get("num_threads")?))?,
            (None, threads) => PyThreads::or_default(threads)?,
        };
        set_scales(&mut config, self.k_scale, self.v_scale)?;
        let cache =
            KvCache::new(config.clone(), self.spill_dir.as_deref(), threads.level, Arc::clone(&threads.threads))
                .map_err(to_python)?;
        Ok(PyKvCache {
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
            clock: self.clock,
        })
    }
}

/// A hash that is the same for everything, for tests of what happens when hashes collide.
fn equal_hashes(_: u128, _: &[u32]) -> u128 {
    7
}
