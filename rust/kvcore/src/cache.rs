//! The KV cache: block manager and store joined, so that no caller can forget a copy or read what was not written.
//!
//! ```text
//! seq = add(tokens)                      references to the longest cached prefix
//! batch = plan([(seq, n)])               slots for the next n tokens; copies that sharing demands are carried out
//! for each layer: write(k, v); attend(q)
//! commit(batch)                          full blocks become findable, once every layer is written
//! ```
#![forbid(unsafe_code)]

use std::sync::Arc;

use crate::attention::{self, Call, Mask, Rows};
use crate::paging::{self, BlockCopy, BlockId, BlockManager, HashFn, ManagerConfig, PagingStats, SeqId};
use crate::simd::Level;
use crate::storage::{KvDtype, KvStore, Layout, Scales};
use crate::threads::{ShouldStop, Threads};
use crate::{Error, Result};

/// What a cache is made of.
#[derive(Clone, Debug)]
pub struct CacheConfig {
    /// Shape and format of the blocks.
    pub layout: Layout,
    /// Scales of fp8 values.
    pub scales: Scales,
    /// Whether full blocks may be found by later sequences.
    pub enable_prefix_caching: bool,
    /// Hash of the prefix index; tests replace it.
    pub hash: HashFn,
}

/// A planned batch: the slots of its new tokens, and which layers have been written.
#[derive(Clone, Debug)]
pub struct Batch {
    plan: paging::Batch,
    written: Vec<bool>,
}

impl Batch {
    /// New tokens of all sequences: the rows that write and attend take.
    pub fn num_tokens(&self) -> usize {
        self.plan.num_tokens()
    }

    /// For each sequence of the plan: its handle, the position of its first new token, and their number.
    pub fn items(&self) -> impl Iterator<Item = (SeqId, usize, usize)> + '_ {
        self.plan.rows.iter().map(|row| (row.seq, row.start, row.len))
    }
}

/// One cache for one model.
pub struct KvCache {
    manager: BlockManager,
    store: KvStore,
    level: Level,
    threads: Arc<Threads>,
    /// Kept between plans, so that a decode step allocates nothing for it.
    copies: Vec<BlockCopy>,
}

impl KvCache {
    /// Reserve the pool.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for sizes or scales out of range, [`Error::OutOfMemory`] if the system refuses.
    pub fn new(config: CacheConfig, level: Level, threads: Arc<Threads>) -> Result<Self> {
        let store = KvStore::new(config.layout, config.scales)?;
        let manager = BlockManager::new(ManagerConfig {
            num_blocks: config.layout.num_blocks,
            block_size: config.layout.block_size,
            enable_prefix_caching: config.enable_prefix_caching,
            hash: config.hash,
        })?;
        Ok(Self { manager, store, level, threads, copies: Vec::new() })
    }

    /// Shape and format.
    pub fn layout(&self) -> &Layout {
        self.store.layout()
    }

    /// The scales of K and V.
    pub fn scales(&self) -> &Scales {
        self.store.scales()
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

    /// Register a sequence; it starts with the longest cached prefix. See [`BlockManager::add`].
    ///
    /// # Errors
    /// As [`BlockManager::add`].
    pub fn add(&mut self, token_ids: &[u32], salt: Option<&[u8]>, use_prefix: bool) -> Result<SeqId> {
        self.manager.add(token_ids, salt, use_prefix)
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
        self.copies.clear();
        let plan = self.manager.plan(items, &mut self.copies)?;
        for &copy in &self.copies {
            self.store.copy_block(copy.src, copy.dst);
        }
        Ok(Batch { plan, written: vec![false; self.store.layout().num_layers] })
    }

    /// Store K and V of the planned tokens in one layer: `[new tokens, kv heads, head_dim]` each, in the plan's order.
    /// May be called again for a layer until the batch is committed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a layer or shape that does not fit, [`Error::StaleBatch`],
    /// [`Error::InvalidState`] after the commit.
    pub fn write(&mut self, layer: usize, batch: &mut Batch, k: &[f32], v: &[f32]) -> Result<()> {
        self.check_layer(layer)?;
        self.manager.validate(&batch.plan)?;
        if self.manager.is_committed(&batch.plan) {
            return Err(Error::InvalidState("write: the batch is committed, its blocks may be shared".into()));
        }
        let l = *self.store.layout();
        let expected = batch.num_tokens() * l.num_kv_heads * l.k_dim;
        for (name, len) in [("k", k.len()), ("v", v.len())] {
            if len != expected {
                return Err(Error::InvalidArgument(format!(
                    "{name}: expected {} new tokens x {} KV heads x {} dimensions = {expected} values, got {len}",
                    batch.num_tokens(),
                    l.num_kv_heads,
                    l.k_dim
                )));
            }
        }
        let slots =
            batch.plan.rows.iter().flat_map(|row| {
                (row.start..row.start + row.len).map(|p| (row.blocks[p / l.block_size], p % l.block_size))
            });
        self.store.write(self.level, layer, slots, k, Some(v));
        batch.written[layer] = true;
        Ok(())
    }

    /// Attend with the planned tokens' queries in one layer: `q` and `out` are `[new tokens, q heads, head_dim]`; a
    /// row sees its own token and everything before it. `scale`: `None` for 1 / sqrt(head_dim).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for what does not fit, [`Error::StaleBatch`], [`Error::InvalidState`] if the layer
    /// is not written, [`Error::Interrupted`].
    #[expect(clippy::too_many_arguments, reason = "the call that everything else exists for")]
    pub fn attend(
        &self,
        layer: usize,
        batch: &Batch,
        num_q_heads: usize,
        scale: Option<f32>,
        q: &[f32],
        out: &mut [f32],
        should_stop: ShouldStop<'_>,
    ) -> Result<()> {
        self.check_layer(layer)?;
        self.manager.validate(&batch.plan)?;
        if !batch.written[layer] {
            return Err(Error::InvalidState(format!(
                "attend: layer {layer} of this batch is not written; call write({layer}, batch, k, v) first"
            )));
        }
        let scale = scale.unwrap_or_else(|| (self.store.layout().k_dim as f32).sqrt().recip());
        let rows: Vec<Rows<'_>> = batch
            .plan
            .rows
            .iter()
            .map(|r| Rows { blocks: &r.blocks, start: r.start, len: r.len, mask: Mask::Causal })
            .collect();
        let call = Call { view: self.store.layer(layer), rows: &rows, num_q_heads, scale, q };
        attention::attend(self.level, &self.threads, &call, out, should_stop)
    }

    /// Mark the planned tokens as computed and make their full blocks findable.
    ///
    /// # Errors
    /// [`Error::InvalidState`] if a layer was not written or the batch is committed, [`Error::StaleBatch`].
    pub fn commit(&mut self, batch: &Batch) -> Result<()> {
        self.manager.validate(&batch.plan)?;
        if let Some(layer) = batch.written.iter().position(|&w| !w)
            && !self.manager.is_committed(&batch.plan)
        {
            let missing = batch.written.iter().filter(|&&w| !w).count();
            return Err(Error::InvalidState(format!(
                "commit: expected K and V in all {} layers, {missing} not written (the first is layer {layer})",
                batch.written.len()
            )));
        }
        self.manager.commit(&batch.plan)
    }

    /// A second sequence with the same tokens that shares all blocks until one of them is written.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn fork(&mut self, seq: SeqId) -> Result<SeqId> {
        self.manager.fork(seq)
    }

    /// Keep the first `num_tokens` tokens.
    ///
    /// # Errors
    /// As [`BlockManager::truncate`].
    pub fn truncate(&mut self, seq: SeqId, num_tokens: usize) -> Result<()> {
        self.manager.truncate(seq, num_tokens)
    }

    /// End a sequence; its full blocks stay findable until their space is needed.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] for a handle that was freed or belongs to another cache.
    pub fn free(&mut self, seq: SeqId) -> Result<()> {
        self.manager.free(seq)
    }

    /// Forget all cached prefixes; running sequences keep their blocks.
    ///
    /// # Errors
    /// As [`BlockManager::reset_prefix_cache`].
    pub fn reset_prefix_cache(&mut self) -> Result<()> {
        self.manager.reset_prefix_cache()
    }

    /// Dense copies of a sequence's stored K and V in one layer, `[computed tokens, kv heads, head_dim]`, and the
    /// number of tokens.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`], [`Error::InvalidArgument`] for a layer that is not there.
    pub fn read(&self, layer: usize, seq: SeqId) -> Result<(usize, Vec<f32>, Vec<f32>)> {
        self.check_layer(layer)?;
        let tokens = self.manager.num_computed_tokens(seq)?;
        let (k, v) = self.store.read(self.level, layer, self.manager.block_table(seq)?, tokens);
        Ok((tokens, k, v))
    }

    /// The blocks of a sequence, in the order of its tokens.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn block_table(&self, seq: SeqId) -> Result<&[BlockId]> {
        self.manager.block_table(seq)
    }

    /// Counts.
    pub fn stats(&self) -> PagingStats {
        self.manager.stats()
    }

    /// Verify every invariant; says which one is broken.
    ///
    /// # Errors
    /// [`Error::InvalidState`].
    pub fn check(&self) -> Result<()> {
        self.manager.check().map_err(|broken| Error::InvalidState(format!("check: {broken}")))
    }

    /// Overwrite all stored values: tests poison the pool with it, to show that nothing unwritten is read.
    #[doc(hidden)]
    pub fn fill(&mut self, value: f32) {
        self.store.fill(value);
    }

    /// K's and V's format.
    pub fn dtype(&self) -> KvDtype {
        self.store.layout().dtype
    }

    fn check_layer(&self, layer: usize) -> Result<()> {
        let layers = self.store.layout().num_layers;
        if layer >= layers {
            return Err(Error::InvalidArgument(format!("layer: expected 0 to {}, got {layer}", layers - 1)));
        }
        Ok(())
    }
}
