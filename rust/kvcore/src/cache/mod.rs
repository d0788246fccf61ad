//! The KV cache: block manager and stores joined, so that no caller can forget a copy or read what was not written.
//!
//! ```text
//! seq = add(tokens)                      references to the longest cached prefix
//! batch = plan([(seq, n)])               slots for the next n tokens; copies that sharing demands are carried out
//! for each layer: write(k, v); attend(q)
//! commit(batch)                          what was written becomes findable, once every layer is written
//! ```
//!
//! `config.rs` says what groups of layers there are, `rows.rs` writes and reads K and V, `cross.rs` those of an
//! encoder, `tree.rs` plans drafts that branch and commits a path of them, `views.rs` lends K and V without a copy,
//! `moves.rs` carries out what the manager decides about bytes, `calibrate.rs` finds static scales, `save.rs` joins the
//! cache with files.
#![forbid(unsafe_code)]

mod batch;
mod calibrate;
mod config;
mod cross;
mod moves;
mod rows;
mod save;
mod tree;
mod views;

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use batch::Batch;
pub use config::{CacheConfig, GroupKind, GroupSpec};
pub use rows::{AttendOptions, Dense};
pub use tree::MAX_ROWS_OF_TREES;
pub use views::{Ended, TileView};

use crate::paging::{
    AddOptions, BlockId, BlockManager, Events, GroupConfig, ManagerConfig, PagingStats, PinId, Retention, SeqId,
};
use crate::simd::Level;
use crate::storage::{KvStore, SpillFile};
use crate::threads::Threads;
use crate::{Error, Result};
use cross::Written;

/// Where a layer's K and V are.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// In a group that the manager pages.
    Paged { group: usize, index: usize },
    /// In the encoder's memory.
    Cross { index: usize },
    /// Nowhere.
    Nowhere,
}

/// What time it is: the system's, or what a test says.
#[derive(Clone, Copy, Debug)]
enum Clock {
    Since(Instant),
    Given,
}

/// One cache for one model.
pub struct KvCache {
    config: CacheConfig,
    manager: BlockManager,
    /// One for each group that the manager pages, in its order.
    stores: Vec<KvStore>,
    cross: Option<KvStore>,
    cross_written: Written,
    places: Vec<Place>,
    spill: Option<SpillFile>,
    clock: Clock,
    level: Level,
    threads: Arc<Threads>,
    /// A block on its way back from the second tier. Kept to allocate once.
    staged: Vec<u8>,
    /// The last copies, for those who look on.
    copies: VecDeque<(usize, BlockId, BlockId)>,
    ended_views: Ended,
}

/// Copies that are remembered.
const MAX_COPIES: usize = 64;

impl KvCache {
    /// Reserve the pools. `spill_dir` is where the second tier's file lies, if `config.spill_bytes` asks for one.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for sizes or scales out of range, [`Error::OutOfMemory`] if the system refuses,
    /// [`Error::Checkpoint`] if the spill file cannot be made.
    pub fn new(config: CacheConfig, spill_dir: Option<&Path>, level: Level, threads: Arc<Threads>) -> Result<Self> {
        let (mut stores, mut cross, mut paged) = (Vec::new(), None, Vec::new());
        // Of each group, the place of its first layer.
        let mut first = Vec::new();
        let places = config.places()?;
        for spec in &config.groups {
            if spec.kind == GroupKind::None {
                first.push(Place::Nowhere);
                continue;
            }
            let layout = spec.layout(&config);
            let scales = spec.scales.clone().unwrap_or_else(|| crate::storage::Scales::unit(&layout));
            let store = KvStore::new(layout, scales)?;
            if spec.kind == GroupKind::Cross {
                cross = Some(store);
                first.push(Place::Cross { index: 0 });
            } else {
                first.push(Place::Paged { group: stores.len(), index: 0 });
                paged.push(GroupConfig { num_blocks: spec.num_blocks, window: spec.kind.window() });
                stores.push(store);
            }
        }
        if stores.is_empty() {
            return Err(Error::InvalidArgument(
                "groups: expected at least one of kind full, sliding_window or latent, got none".into(),
            ));
        }
        let places = places
            .into_iter()
            .map(|(group, index)| match first[group] {
                Place::Nowhere => Place::Nowhere,
                Place::Cross { .. } => Place::Cross { index },
                Place::Paged { group, .. } => Place::Paged { group, index },
            })
            .collect();
        let (spill, spill_slots) = Self::spill_file(&config, spill_dir, &stores)?;
        let manager = BlockManager::new(manager_config(&config, paged, spill_slots, &stores, cross.as_ref()))?;
        Ok(Self {
            config,
            manager,
            stores,
            cross,
            cross_written: Written::default(),
            places,
            spill,
            clock: Clock::Since(Instant::now()),
            level,
            threads,
            staged: Vec::new(),
            copies: VecDeque::with_capacity(MAX_COPIES),
            ended_views: Ended::default(),
        })
    }

    /// What the cache was made of; static scales are those in use.
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// The arenas of the paged groups, in the order of the block tables.
    pub fn stores(&self) -> &[KvStore] {
        &self.stores
    }

    /// The arena of the encoder's K and V.
    pub fn cross_store(&self) -> Option<&KvStore> {
        self.cross.as_ref()
    }

    /// The SIMD level in use.
    pub fn level(&self) -> Level {
        self.level
    }

    /// The pool of threads in use.
    pub fn threads(&self) -> &Arc<Threads> {
        &self.threads
    }

    /// Who owns which block; read-only.
    pub fn manager(&self) -> &BlockManager {
        &self.manager
    }

    /// From now on it is what the caller says: time since any fixed point, for tests of what expires.
    pub fn set_now(&mut self, now: Duration) {
        self.reclaim_views();
        self.clock = Clock::Given;
        self.manager.set_now(now);
    }

    /// Lets the manager know what time it is: whatever has expired is gone afterwards, and so are ended views.
    pub fn tick(&mut self) {
        self.reclaim_views();
        if let Clock::Since(start) = self.clock {
            self.manager.set_now(start.elapsed());
        }
    }

    /// Register a sequence; it starts with the longest cached prefix. See [`BlockManager::add`].
    ///
    /// # Errors
    /// As [`BlockManager::add`].
    pub fn add(&mut self, token_ids: &[u32], options: &AddOptions<'_>) -> Result<SeqId> {
        self.tick();
        let (manager, mut bytes) = self.parts();
        manager.add(token_ids, options, &mut bytes)
    }

    /// Add token ids that have no K and V yet.
    ///
    /// # Errors
    /// As [`BlockManager::append`].
    pub fn append(&mut self, seq: SeqId, token_ids: &[u32]) -> Result<()> {
        self.manager.append(seq, token_ids)
    }

    /// Take slots for the next tokens of each sequence and carry out the copies that sharing demands.
    ///
    /// # Errors
    /// As [`BlockManager::plan`]; nothing is changed then.
    pub fn plan(&mut self, items: &[(SeqId, usize)]) -> Result<Batch> {
        self.tick();
        let (manager, mut bytes) = self.parts();
        let plan = manager.plan(items, &mut bytes)?;
        let written = self.places.iter().map(|place| !matches!(place, Place::Paged { .. })).collect();
        Ok(Batch { plan, written, trees: Vec::new() })
    }

    /// Mark the planned tokens as computed and make them findable.
    ///
    /// # Errors
    /// [`Error::InvalidState`] if a layer was not written or the batch is committed, [`Error::StaleBatch`],
    /// [`Error::InvalidArgument`] for a batch with trees, which [`Self::commit_rows`] commits.
    pub fn commit(&mut self, batch: &Batch) -> Result<()> {
        self.tick();
        self.manager.validate(&batch.plan)?;
        if let Some(item) = batch.trees.iter().position(Option::is_some) {
            return Err(tree::no_path(item));
        }
        if !self.manager.is_committed(&batch.plan) {
            self.check_written(batch)?;
        }
        self.manager.commit(&batch.plan)
    }

    /// Whether all layers of the batch are written.
    fn check_written(&self, batch: &Batch) -> Result<()> {
        let Some(layer) = batch.written.iter().position(|&w| !w) else { return Ok(()) };
        let missing = batch.written.iter().filter(|&&w| !w).count();
        Err(Error::InvalidState(format!(
            "commit: expected K and V in all {} layers, {missing} not written (the first is layer {layer})",
            batch.written.len()
        )))
    }

    /// A second sequence with the same tokens that shares all blocks until one of them is written.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn fork(&mut self, seq: SeqId) -> Result<SeqId> {
        self.manager.fork(seq)
    }

    /// What a step of beam search needs. See [`BlockManager::reorder`].
    ///
    /// # Errors
    /// As [`BlockManager::reorder`]; nothing is changed then.
    pub fn reorder(&mut self, seqs: &[SeqId], parents: &[usize]) -> Result<Vec<SeqId>> {
        self.tick();
        self.manager.reorder(seqs, parents)
    }

    /// Keep the first `num_tokens` tokens.
    ///
    /// # Errors
    /// As [`BlockManager::truncate`].
    pub fn truncate(&mut self, seq: SeqId, num_tokens: usize) -> Result<()> {
        self.tick();
        self.manager.truncate(seq, num_tokens)
    }

    /// End a sequence; what it wrote stays findable until it expires or its space is needed.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] for a handle that was freed or belongs to another cache.
    pub fn free(&mut self, seq: SeqId) -> Result<()> {
        self.tick();
        self.manager.free(seq)
    }

    /// How long the prefix of `num_tokens` tokens is kept once nobody uses it. See [`BlockManager::mark`].
    ///
    /// # Errors
    /// As [`BlockManager::mark`].
    pub fn mark(&mut self, seq: SeqId, num_tokens: usize, retention: Retention) -> Result<()> {
        self.tick();
        self.manager.mark(seq, num_tokens, retention)
    }

    /// Keep the prefix of `num_tokens` tokens until it is unpinned. See [`BlockManager::pin`].
    ///
    /// # Errors
    /// As [`BlockManager::pin`].
    pub fn pin(&mut self, seq: SeqId, num_tokens: usize) -> Result<PinId> {
        self.tick();
        self.manager.pin(seq, num_tokens)
    }

    /// End a pin.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] for a pin that was ended or belongs to another cache.
    pub fn unpin(&mut self, pin: PinId) -> Result<()> {
        self.tick();
        self.manager.unpin(pin)
    }

    /// What happened to blocks since the last call.
    pub fn take_events(&self) -> Events {
        self.manager.take_events()
    }

    /// Forget all cached prefixes but pinned ones; running sequences keep their blocks.
    ///
    /// # Errors
    /// As [`BlockManager::reset_prefix_cache`].
    pub fn reset_prefix_cache(&mut self) -> Result<()> {
        self.manager.reset_prefix_cache()
    }

    /// The blocks of a sequence in a paged group, in the order of its tokens; [`BlockId::NONE`] where a sliding
    /// window has passed.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`], [`Error::InvalidArgument`] for a group that is not there.
    pub fn block_table(&self, seq: SeqId, group: usize) -> Result<&[BlockId]> {
        self.manager.block_table(seq, group)
    }

    /// Counts.
    pub fn stats(&self) -> PagingStats {
        self.manager.stats()
    }

    /// The last block copies, oldest first: group, source, destination.
    pub fn recent_copies(&self) -> impl Iterator<Item = (usize, BlockId, BlockId)> + '_ {
        self.copies.iter().copied()
    }

    /// The groups that are paged, in the order of the block tables.
    pub fn paged_groups(&self) -> impl Iterator<Item = &GroupSpec> {
        self.config.groups.iter().filter(|spec| !matches!(spec.kind, GroupKind::None | GroupKind::Cross))
    }

    /// Bytes that a token takes in all layers, without those of the encoder.
    pub fn bytes_per_token(&self) -> usize {
        self.stores.iter().map(|store| store.layout().bytes_per_token()).sum()
    }

    /// Verify every invariant; says which one is broken.
    ///
    /// # Errors
    /// [`Error::InvalidState`].
    pub fn check(&self) -> Result<()> {
        self.manager.check().map_err(|broken| Error::InvalidState(format!("check: {broken}")))
    }

    /// Overwrite all stored values: tests poison the pools with it, to show that nothing unwritten is read.
    #[doc(hidden)]
    pub fn fill(&mut self, value: f32) {
        self.stores.iter_mut().chain(&mut self.cross).for_each(|store| store.fill(value));
    }

    fn place(&self, layer: usize) -> Result<Place> {
        self.places.get(layer).copied().ok_or_else(|| {
            Error::InvalidArgument(format!("layer: expected 0 to {}, got {layer}", self.places.len() - 1))
        })
    }

    /// The second tier's file and its slots in each group.
    fn spill_file(config: &CacheConfig, dir: Option<&Path>, stores: &[KvStore]) -> Result<(Option<SpillFile>, usize)> {
        let dir = match (dir, config.spill_bytes) {
            (None, 0) => return Ok((None, 0)),
            (None, _) => {
                return Err(Error::InvalidArgument("spill_bytes: expected a spill_dir beside it, got none".into()));
            }
            (Some(dir), _) => dir,
        };
        let sizes: Vec<usize> = stores.iter().map(|store| store.layout().block_bytes()).collect();
        let slots = SpillFile::slots_within(config.spill_bytes as u64, &sizes);
        if slots == 0 {
            return Err(Error::InvalidArgument(format!(
                "spill_bytes: expected room for a block of each group ({} bytes and some padding), got {}",
                sizes.iter().sum::<usize>(),
                config.spill_bytes
            )));
        }
        std::fs::create_dir_all(dir)
            .map_err(|e| Error::Checkpoint(format!("spill_dir: {}: cannot be made: {e}", dir.display())))?;
        Ok((Some(SpillFile::create(dir, &sizes, slots)?), slots))
    }
}

fn manager_config(
    config: &CacheConfig,
    groups: Vec<GroupConfig>,
    spill_slots: usize,
    stores: &[KvStore],
    cross: Option<&KvStore>,
) -> ManagerConfig {
    ManagerConfig {
        groups,
        cross_blocks: cross.map_or(0, |store| store.layout().num_blocks),
        block_size: config.block_size,
        enable_prefix_caching: config.enable_prefix_caching,
        hash: config.hash,
        min_prefix_tokens: config.min_prefix_tokens,
        max_rollback: config.max_rollback,
        max_pinned_fraction: config.max_pinned_fraction,
        retention: config.retention,
        max_events: config.max_events,
        spill_slots,
        key: scale_key(stores),
    }
}

/// Values stored with other scales are other values: scales are part of every block's key.
fn scale_key(stores: &[KvStore]) -> Vec<u8> {
    let mut key = Vec::new();
    for store in stores {
        let scales = store.scales();
        if scales.k.iter().chain(&scales.v).any(|&scale| scale != 1.0) {
            key.extend(scales.k.iter().chain(&scales.v).flat_map(|scale| scale.to_le_bytes()));
        }
    }
    key
}
