//! Counts, events and pictures of a cache as Python objects.
#![forbid(unsafe_code)]

use kvcore::cache::KvCache;
use kvcore::paging::{BlockId, BlockInfo, Event, Events, Occupancy, PagingStats, SeqId};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::ids::room;

/// Counts of a cache and of each of its paged groups.
pub struct Counts {
    pub all: PagingStats,
    pub groups: Vec<PagingStats>,
    pub block_bytes: Vec<usize>,
    pub nbytes: usize,
}

impl Counts {
    pub fn of(cache: &KvCache) -> kvcore::Result<Self> {
        let stores = cache.stores();
        Ok(Self {
            all: cache.stats(),
            groups: (0..stores.len())
                .map(|group| cache.manager().group_stats(group))
                .chain(cache.cross_store().map(|_| Ok(cache.manager().cross_stats())))
                .collect::<kvcore::Result<_>>()?,
            block_bytes: stores.iter().chain(cache.cross_store()).map(|store| store.layout().block_bytes()).collect(),
            nbytes: nbytes(cache),
        })
    }

    pub fn dict<'py>(&self, py: Python<'py>, kinds: &[&'static str]) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        fill(&dict, &self.all)?;
        let held = |used: fn(&PagingStats) -> usize| -> usize {
            self.groups.iter().zip(&self.block_bytes).map(|(stats, bytes)| used(stats) * bytes).sum()
        };
        dict.set_item("num_sequences", self.all.num_sequences)?;
        dict.set_item("hit_tokens", self.all.hit_tokens)?;
        dict.set_item("query_tokens", self.all.query_tokens)?;
        dict.set_item("bytes_total", self.nbytes)?;
        dict.set_item("bytes_used", held(|stats| stats.used))?;
        dict.set_item("bytes_cached", held(|stats| stats.cached))?;
        let groups = PyList::empty(py);
        for (stats, kind) in self.groups.iter().zip(kinds.iter().chain(&["cross"])) {
            let group = PyDict::new(py);
            group.set_item("kind", kind)?;
            fill(&group, stats)?;
            groups.append(group)?;
        }
        dict.set_item("groups", groups)?;
        Ok(dict)
    }
}

fn fill(dict: &Bound<'_, PyDict>, stats: &PagingStats) -> PyResult<()> {
    let utilisation = if stats.slots == 0 { 1.0 } else { stats.tokens as f64 / stats.slots as f64 };
    dict.set_item("total", stats.total)?;
    dict.set_item("free", stats.free)?;
    dict.set_item("cached", stats.cached)?;
    dict.set_item("used", stats.used)?;
    dict.set_item("pinned", stats.pinned)?;
    dict.set_item("spilled", stats.spilled)?;
    dict.set_item("tokens", stats.tokens)?;
    dict.set_item("slots", stats.slots)?;
    dict.set_item("utilisation", utilisation)?;
    dict.set_item("evictions", stats.evictions)?;
    dict.set_item("evicted_lru", stats.evicted_lru)?;
    dict.set_item("evicted_expired", stats.evicted_expired)?;
    dict.set_item("copies", stats.copies)?;
    dict.set_item("spills", stats.spills)?;
    dict.set_item("fetches", stats.fetches)
}

/// Bytes that are reserved, those of an encoder's memory among them.
pub fn nbytes(cache: &KvCache) -> usize {
    cache.stores().iter().chain(cache.cross_store()).map(|store| store.layout().total_bytes()).sum()
}

/// The events, and how many older ones were lost.
pub fn events<'py>(py: Python<'py>, events: &Events) -> PyResult<Bound<'py, PyDict>> {
    let list = PyList::empty(py);
    for event in &events.list {
        let dict = PyDict::new(py);
        match event {
            Event::Stored { block, group, hash, parent_hash, num_tokens } => {
                dict.set_item("type", "stored")?;
                dict.set_item("group", group)?;
                dict.set_item("block", block.index())?;
                dict.set_item("hash", format!("{hash:032x}"))?;
                dict.set_item("parent_hash", format!("{parent_hash:032x}"))?;
                dict.set_item("num_tokens", num_tokens)?;
            }
            Event::Removed { block, group, hash, cause } => {
                dict.set_item("type", "removed")?;
                dict.set_item("group", group)?;
                dict.set_item("block", block.index())?;
                dict.set_item("hash", format!("{hash:032x}"))?;
                dict.set_item("cause", cause.name())?;
            }
            Event::Copied { group, src, dst } => {
                dict.set_item("type", "copied")?;
                dict.set_item("group", group)?;
                dict.set_item("src", src.index())?;
                dict.set_item("dst", dst.index())?;
            }
            _ => continue,
        }
        list.append(dict)?;
    }
    let all = PyDict::new(py);
    all.set_item("events", list)?;
    all.set_item("dropped", events.dropped)?;
    Ok(all)
}

/// Which block holds what, at one moment.
pub struct Snapshot {
    block_size: usize,
    groups: Vec<(Vec<usize>, Option<usize>, Vec<BlockInfo>)>,
    sequences: Vec<SequenceInfo>,
    copies: Vec<(usize, usize, usize)>,
}

struct SequenceInfo {
    id: u64,
    num_tokens: usize,
    num_computed: usize,
    num_cached: usize,
    token_ids: Vec<u32>,
    tables: Vec<Vec<i64>>,
    cross: Vec<i64>,
    cross_tokens: usize,
}

impl Snapshot {
    pub fn of(cache: &KvCache) -> kvcore::Result<Self> {
        let manager = cache.manager();
        let groups = cache.paged_groups().enumerate();
        Ok(Self {
            block_size: manager.block_size(),
            groups: groups
                .map(|(group, spec)| (spec.layers.clone(), spec.kind.window(), manager.group_snapshot(group)))
                .collect(),
            sequences: manager
                .seq_ids()
                .into_iter()
                .map(|seq| SequenceInfo::of(cache, seq))
                .collect::<Result<_, _>>()?,
            copies: cache.recent_copies().map(|(group, src, dst)| (group, src.index(), dst.index())).collect(),
        })
    }

    pub fn dict<'py>(&self, py: Python<'py>, kinds: &[&'static str]) -> PyResult<Bound<'py, PyDict>> {
        let groups = PyList::empty(py);
        for ((layers, window, blocks), kind) in self.groups.iter().zip(kinds) {
            let group = PyDict::new(py);
            group.set_item("kind", kind)?;
            group.set_item("layers", layers)?;
            group.set_item("window", window)?;
            group.set_item("num_blocks", blocks.len())?;
            let column = |value: fn(&BlockInfo) -> i32| PyArray1::from_iter(py, blocks.iter().map(value));
            group.set_item("refs", column(|block| block.refs as i32))?;
            group.set_item("filled", column(|block| block.filled as i32))?;
            group.set_item("pins", column(|block| i32::from(block.pinned)))?;
            let state = |block: &BlockInfo| match block.state {
                Occupancy::Vacant => 0u8,
                Occupancy::Used => 1,
                Occupancy::Cached => 2,
                Occupancy::Pinned => 3,
            };
            group.set_item("state", PyArray1::from_iter(py, blocks.iter().map(state)))?;
            groups.append(group)?;
        }
        let sequences = PyList::empty(py);
        for info in &self.sequences {
            let sequence = PyDict::new(py);
            sequence.set_item("id", info.id)?;
            sequence.set_item("num_tokens", info.num_tokens)?;
            sequence.set_item("num_computed", info.num_computed)?;
            sequence.set_item("num_cached", info.num_cached)?;
            sequence.set_item("token_ids", &info.token_ids)?;
            sequence.set_item("tables", &info.tables)?;
            sequence.set_item("cross", &info.cross)?;
            sequence.set_item("cross_tokens", info.cross_tokens)?;
            sequences.append(sequence)?;
        }
        let dict = PyDict::new(py);
        dict.set_item("block_size", self.block_size)?;
        dict.set_item("groups", groups)?;
        dict.set_item("sequences", sequences)?;
        dict.set_item("copies", PyList::new(py, self.copies.iter().map(|&(group, src, dst)| [group, src, dst]))?)?;
        Ok(dict)
    }
}

impl SequenceInfo {
    fn of(cache: &KvCache, seq: SeqId) -> kvcore::Result<Self> {
        let manager = cache.manager();
        let (cross, cross_tokens) = manager.cross(seq)?;
        let known = manager.token_ids(seq)?;
        let mut token_ids = room(known.len(), "the result")?;
        token_ids.extend_from_slice(known);
        let tables = (0..cache.stores().len()).map(|group| Ok(table(manager.block_table(seq, group)?)));
        Ok(Self {
            id: seq.serial(),
            num_tokens: manager.num_tokens(seq)?,
            num_computed: manager.num_computed_tokens(seq)?,
            num_cached: manager.num_cached_tokens(seq)?,
            tables: tables.collect::<kvcore::Result<_>>()?,
            token_ids,
            cross: table(cross),
            cross_tokens,
        })
    }
}

/// Block ids, -1 for a block that was returned.
pub fn table(blocks: &[BlockId]) -> Vec<i64> {
    blocks.iter().map(|&block| if block == BlockId::NONE { -1 } else { block.index() as i64 }).collect()
}
