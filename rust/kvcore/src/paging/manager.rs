//! Sequences over one pool of blocks: the only place that decides who holds which block.
//!
//! ```text
//! add(tokens):    take references to the longest published prefix of whole blocks, at most all but the last token
//! plan(seq, n):   count what all sequences need (new blocks, copies of shared last blocks); too much: an error, nothing changed
//!                 last block partly filled and held by others too: a copy;  held alone but published: unpublished
//! commit(batch):  planned tokens count as computed; blocks that became full are published below their parents
//! fork(seq):      a reference to every block
//! free(seq):      references dropped from the last block to the first
//! ```
//!
//! Two sequences that compute the same block at the same time both keep their own; the first to commit publishes it, the
//! second hangs its later blocks below the first's. Should the first's be evicted, the second publishes its own when its
//! next block is full.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::batch::{Batch, BatchSeq};
use super::block::{BlockCopy, BlockId};
use super::config::{AddOptions, ManagerConfig};
use super::key::{Key, OwnedKey as Domain};
use super::moves::Move;
use super::pool::BlockPool;
use super::prefix::{Link, PrefixIndex};
use super::sequence::{SeqId, Sequence, SequenceTable};
use super::stats::PagingStats;
use crate::{Error, Result};

/// Serial numbers of managers, so that a handle shows whose it is. Nothing else is shared between them.
static NEXT_MANAGER: AtomicU64 = AtomicU64::new(1);

/// Owner of all blocks and sequences of one cache. See the module's pseudocode.
#[derive(Debug)]
pub struct BlockManager {
    pub(super) id: u64,
    pub(super) config: ManagerConfig,
    pub(super) blocks: Blocks,
    pub(super) sequences: SequenceTable,
    no_salt: Arc<Domain>,
    /// Calls of `plan` so far: the serial number of the next batch.
    plans: u64,
    /// Resets of the prefix cache so far.
    era: u64,
    hit_tokens: u64,
    query_tokens: u64,
    copies: u64,
    /// Shared last blocks of the plan that is being counted; kept to allocate once.
    shared: Vec<BlockId>,
}

/// The pool and the index that publishes its blocks: always changed together.
#[derive(Debug)]
pub(super) struct Blocks {
    pub pool: BlockPool,
    pub index: PrefixIndex,
    evictions: u64,
}

impl BlockManager {
    /// An empty manager. O(num_blocks). Errors: `InvalidArgument` for sizes out of range, `OutOfMemory` when the tables
    /// (24 to 28 bytes a block) cannot be had.
    pub fn new(config: ManagerConfig) -> Result<Self> {
        config.validate()?;
        let (num_blocks, block_size, hash) = (config.groups[0].num_blocks, config.block_size, config.hash);
        let pool = BlockPool::new(num_blocks)?;
        let index = PrefixIndex::new(num_blocks, block_size, hash)?;
        let id = NEXT_MANAGER.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            id,
            config,
            blocks: Blocks { pool, index, evictions: 0 },
            sequences: SequenceTable::new(id),
            no_salt: Arc::new(Domain::default()),
            plans: 0,
            era: 0,
            hit_tokens: 0,
            query_tokens: 0,
            copies: 0,
            shared: Vec::new(),
        })
    }

    /// Registers a sequence and takes references to the blocks of its longest cached prefix: whole blocks, at most all
    /// but the last token, and only under the same salt (no salt differs from an empty one). With `use_prefix` false it
    /// neither reads nor publishes. Errors: `InvalidArgument` without tokens.
    pub fn add(&mut self, token_ids: &[u32], options: &AddOptions<'_>, _moves: &mut Vec<Move>) -> Result<SeqId> {
        if token_ids.is_empty() {
            return Err(Error::InvalidArgument("a sequence needs at least one token, got none".into()));
        }
        let use_prefix = options.use_prefix && self.config.enable_prefix_caching;
        let domain = self.domain(options.key);
        let mut table = Vec::with_capacity(token_ids.len().div_ceil(self.config.block_size));
        let mut link = Link::NONE;
        if use_prefix {
            link = self.blocks.index.longest_prefix(&domain, token_ids, |block| table.push(block));
            self.blocks.retain_all(&table)?;
        }
        let mut sequence = Sequence::new(token_ids.to_vec(), table, domain, use_prefix, self.era);
        sequence.chained = sequence.blocks.len();
        sequence.link = link;
        sequence.computed = sequence.chained * self.config.block_size;
        sequence.cached = sequence.computed;
        if use_prefix {
            self.query_tokens += token_ids.len() as u64;
            self.hit_tokens += sequence.cached as u64;
        }
        Ok(self.sequences.insert(sequence))
    }

    /// What `add` would find for this prompt now; nothing is taken or renewed.
    pub fn find_prefix(&self, token_ids: &[u32], key: Key<'_>) -> Found {
        let mut found = Vec::new();
        if self.config.enable_prefix_caching {
            self.blocks.index.longest_prefix(&self.domain(key), token_ids, |block| found.push(block));
        }
        Found { num_tokens: found.len() * self.config.block_size, tables: vec![found] }
    }

    /// Adds token ids that have no K and V yet. Batches stay valid. Errors: `InvalidHandle`.
    pub fn append(&mut self, seq: SeqId, token_ids: &[u32]) -> Result<()> {
        self.sequences.get_mut(seq)?.tokens.extend_from_slice(token_ids);
        Ok(())
    }

    /// Gets slots for the next `n` tokens of each sequence that have no K and V yet, all or nothing. Appends to `moves`
    /// the block copies that sharing demands; the caller carries them out before it writes anything. Earlier batches of
    /// these sequences become stale, and what they planned but did not commit is forgotten.
    ///
    /// Errors, with nothing changed: `InvalidArgument` without items, for `n` of 0 or more than the tokens known, or a
    /// sequence named twice; `InvalidHandle`; `OutOfBlocks`.
    pub fn plan(&mut self, items: &[(SeqId, usize)], moves: &mut Vec<Move>) -> Result<Batch> {
        self.plans += 1;
        self.count(items)?;
        let Self { config, blocks, sequences, .. } = self;
        let block_size = config.block_size;
        // Blocks of forgotten plans first: they were counted as available.
        for &(seq, n) in items {
            let sequence = sequences.get_mut(seq)?;
            let want = (sequence.computed + n).div_ceil(block_size);
            blocks.release_from(&mut sequence.blocks, want)?;
        }
        let mut rows = Vec::with_capacity(items.len());
        for &(seq, n) in items {
            let sequence = sequences.get_mut(seq)?;
            let (start, filled) = (sequence.computed, sequence.computed % block_size);
            if filled != 0 {
                let last = &mut sequence.blocks[start / block_size];
                if let Some(copy) = blocks.make_writable(last)? {
                    moves.push(Move::Copy { group: 0, src: copy.src, dst: copy.dst });
                    self.copies += 1;
                }
                blocks.pool.set_filled(*last, filled);
            }
            while sequence.blocks.len() < (start + n).div_ceil(block_size) {
                sequence.blocks.push(blocks.take()?);
            }
            if start == 0 {
                sequence.era = self.era;
            }
            sequence.planned = n;
            sequence.batch = self.plans;
            sequence.committed = false;
            rows.push(BatchSeq {
                seq,
                start,
                len: n,
                tables: vec![sequence.blocks.clone()],
                cross: Vec::new(),
                cross_tokens: 0,
            });
        }
        Ok(Batch { rows, manager: self.id, serial: self.plans })
    }

    /// First half of `plan`: is everything in order, and are there enough blocks?
    fn count(&mut self, items: &[(SeqId, usize)]) -> Result<()> {
        if items.is_empty() {
            return Err(Error::InvalidArgument("a plan needs at least one sequence, got none".into()));
        }
        let block_size = self.config.block_size;
        let pool = &self.blocks.pool;
        let (mut needed, mut available) = (0, pool.num_free());
        self.shared.clear();
        for (row, &(seq, n)) in items.iter().enumerate() {
            let sequence = self.sequences.get_mut(seq)?;
            if std::mem::replace(&mut sequence.seen, self.plans) == self.plans {
                return Err(Error::InvalidArgument(format!("item {row} of the plan names a sequence a second time")));
            }
            let open = sequence.tokens.len() - sequence.computed;
            if n == 0 || n > open {
                return Err(Error::InvalidArgument(match open {
                    0 => format!("item {row} plans {n} tokens, but every token of the sequence has K and V already"),
                    _ => format!("item {row} plans {n} tokens: expected 1 to {open}, those without K and V"),
                }));
            }
            let (have, want) = (sequence.blocks.len(), (sequence.computed + n).div_ceil(block_size));
            needed += want.saturating_sub(have);
            available += have.saturating_sub(want);
            if sequence.computed % block_size != 0 {
                let last = sequence.blocks[sequence.computed / block_size];
                if pool.ref_count(last) > 1 {
                    self.shared.push(last);
                }
            }
        }
        // Of a block's holders all but one copy it: if all of them are in this plan, the last writes in place.
        self.shared.sort_unstable();
        for group in self.shared.chunk_by(|a, b| a == b) {
            needed += group.len().min(pool.ref_count(group[0]) - 1);
        }
        if needed > available {
            return Err(Error::OutOfBlocks { needed, available, total: pool.num_blocks() });
        }
        Ok(())
    }

    /// Whether the batch may be attended, and (unless committed) written. Errors: `StaleBatch` after a newer plan, a
    /// fork, truncate or free of any of its sequences; `InvalidHandle` for another cache's batch.
    pub fn validate(&self, batch: &Batch) -> Result<()> {
        if batch.manager != self.id {
            return Err(Error::InvalidHandle("the batch belongs to another cache".into()));
        }
        for (row, of) in batch.rows.iter().enumerate() {
            match self.sequences.get(of.seq) {
                Err(_) => return Err(Error::StaleBatch(format!("the sequence of row {row} was freed"))),
                Ok(sequence) if sequence.batch != batch.serial => {
                    let why = "was planned again, forked or truncated";
                    return Err(Error::StaleBatch(format!("the sequence of row {row} {why}")));
                }
                Ok(_) => {}
            }
        }
        Ok(())
    }

    /// Whether the batch was committed. False for a batch all of whose sequences have gone on: ask `validate` first.
    pub fn is_committed(&self, batch: &Batch) -> bool {
        let committed =
            |row: &BatchSeq| self.sequences.get(row.seq).is_ok_and(|s| s.batch == batch.serial && s.committed);
        batch.manager == self.id && batch.rows.iter().any(committed)
    }

    /// Counts the planned tokens as computed and publishes the blocks that became full. The caller has written K and V
    /// of every layer. Errors, with nothing changed: those of `validate`, `InvalidState` for a batch committed before,
    /// `InvalidArgument` for one whose rows are not those of the plan.
    pub fn commit(&mut self, batch: &Batch) -> Result<()> {
        self.validate(batch)?;
        if self.is_committed(batch) {
            return Err(Error::InvalidState("the batch was committed already".into()));
        }
        for (row, of) in batch.rows.iter().enumerate() {
            let sequence = self.sequences.get(of.seq)?;
            if (of.start, of.len) != (sequence.computed, sequence.planned) {
                return Err(Error::InvalidArgument(format!("row {row} of the batch was altered after the plan")));
            }
        }
        let block_size = self.config.block_size;
        for row in &batch.rows {
            let sequence = self.sequences.get_mut(row.seq)?;
            let end = sequence.computed + sequence.planned;
            for index in sequence.computed / block_size..sequence.blocks.len() {
                self.blocks.pool.set_filled(sequence.blocks[index], block_size.min(end - index * block_size));
            }
            sequence.computed = end;
            sequence.planned = 0;
            sequence.committed = true;
            if sequence.use_prefix && sequence.era == self.era {
                self.blocks.publish(sequence, block_size);
            }
        }
        Ok(())
    }

    /// A second sequence with the same tokens that shares every computed block by reference. What the first has planned
    /// but not committed is forgotten. Errors: `InvalidHandle`.
    pub fn fork(&mut self, seq: SeqId) -> Result<SeqId> {
        let sequence = self.sequences.get_mut(seq)?;
        let child = {
            let computed_blocks = sequence.computed.div_ceil(self.config.block_size);
            self.blocks.retain_all(&sequence.blocks[..computed_blocks])?;
            self.blocks.release_from(&mut sequence.blocks, computed_blocks)?;
            sequence.planned = 0;
            sequence.batch = 0;
            sequence.clone()
        };
        Ok(self.sequences.insert(child))
    }

    /// Keeps the first `num_tokens` tokens and releases the blocks wholly beyond them. What is planned but not committed
    /// is forgotten. Errors: `InvalidHandle`; `InvalidArgument` unless `num_tokens` is 1 to the tokens known.
    pub fn truncate(&mut self, seq: SeqId, num_tokens: usize) -> Result<()> {
        let block_size = self.config.block_size;
        let Blocks { pool, index, .. } = &mut self.blocks;
        let sequence = self.sequences.get_mut(seq)?;
        let known = sequence.tokens.len();
        if num_tokens == 0 || num_tokens > known {
            return Err(Error::InvalidArgument(format!("num_tokens: expected 1 to {known}, got {num_tokens}")));
        }
        sequence.tokens.truncate(num_tokens);
        sequence.computed = sequence.computed.min(num_tokens);
        sequence.planned = 0;
        sequence.batch = 0;
        let chained = sequence.chained.min(sequence.computed / block_size);
        sequence.link = match chained {
            0 => Link::NONE,
            _ => index.ancestor(sequence.link, sequence.chained - chained),
        };
        sequence.chained = chained;
        let filled = sequence.computed % block_size;
        if filled != 0 {
            // The last block is cut. Only `plan` makes it writable; but nobody reads what its only holder gave up.
            let last = sequence.blocks[sequence.computed / block_size];
            if pool.ref_count(last) == 1 && pool.node(last).is_none() {
                pool.set_filled(last, filled);
            }
        }
        self.blocks.release_from(&mut sequence.blocks, sequence.computed.div_ceil(block_size))
    }

    /// Ends a sequence. Its blocks are released from the last to the first, so that of its published blocks the leaves
    /// are evicted before their parents. Errors: `InvalidHandle`, also the second time.
    pub fn free(&mut self, seq: SeqId) -> Result<()> {
        let sequence = self.sequences.remove(seq)?;
        self.blocks.pool.release_all(&sequence.blocks)
    }

    /// Forgets every cached prefix. Sequences keep their blocks, but what they computed before, and what they compute
    /// after it, is not published any more.
    pub fn reset_prefix_cache(&mut self) -> Result<()> {
        let Blocks { pool, index, .. } = &mut self.blocks;
        self.era += 1;
        index.clear(|block| pool.set_node(block, None));
        Ok(())
    }

    /// The blocks of a sequence, those of an uncommitted plan included. Errors: `InvalidHandle`.
    pub fn block_table(&self, seq: SeqId, group: usize) -> Result<&[BlockId]> {
        if group > 0 {
            return Err(Error::InvalidArgument(format!("group: expected 0, got {group}")));
        }
        Ok(&self.sequences.get(seq)?.blocks)
    }

    /// The token ids of a sequence, those without K and V included. Errors: `InvalidHandle`.
    pub fn token_ids(&self, seq: SeqId) -> Result<&[u32]> {
        Ok(&self.sequences.get(seq)?.tokens)
    }

    /// Tokens known. Errors: `InvalidHandle`.
    pub fn num_tokens(&self, seq: SeqId) -> Result<usize> {
        Ok(self.sequences.get(seq)?.tokens.len())
    }

    /// Leading tokens whose K and V are stored. Errors: `InvalidHandle`.
    pub fn num_computed_tokens(&self, seq: SeqId) -> Result<usize> {
        Ok(self.sequences.get(seq)?.computed)
    }

    /// Tokens that `add` found in the cache; a fork inherits the number, nothing changes it. Errors: `InvalidHandle`.
    pub fn num_cached_tokens(&self, seq: SeqId) -> Result<usize> {
        Ok(self.sequences.get(seq)?.cached)
    }

    /// Blocks that a plan can get: free ones, and cached ones that nobody holds.
    pub fn num_free_blocks(&self) -> usize {
        self.blocks.pool.num_free()
    }

    /// Blocks of the pool.
    pub fn num_blocks(&self) -> usize {
        self.config.groups[0].num_blocks
    }

    /// Tokens of a block.
    pub fn block_size(&self) -> usize {
        self.config.block_size
    }

    /// All counts. O(1).
    pub fn stats(&self) -> PagingStats {
        let pool = &self.blocks.pool;
        PagingStats {
            total: pool.num_blocks(),
            free: pool.num_free() - pool.num_evictable(),
            cached: pool.num_evictable(),
            used: pool.num_blocks() - pool.num_free(),
            num_sequences: self.sequences.len(),
            tokens: pool.stored_tokens(),
            hit_tokens: self.hit_tokens,
            query_tokens: self.query_tokens,
            evictions: self.blocks.evictions,
            copies: self.copies,
            slots: (pool.num_blocks() - pool.num_free()) * self.config.block_size,
            ..PagingStats::default()
        }
    }

    fn domain(&self, key: Key<'_>) -> Arc<Domain> {
        if key.is_empty() { Arc::clone(&self.no_salt) } else { Arc::new(key.into()) }
    }
}

/// What a prompt would find.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Tokens.
    pub num_tokens: usize,
    /// For each group the blocks that they are in, [`BlockId::NONE`] for those in the second tier and those before a
    /// window.
    pub tables: Vec<Vec<BlockId>>,
}

impl Blocks {
    /// A block with one reference and no content; evicts the prefix that was not used for the longest time if it must.
    fn take(&mut self) -> Result<BlockId> {
        if let Some(victim) = self.pool.next_victim() {
            self.evictions += self.unpublish(victim);
        }
        self.pool.allocate().ok_or_else(|| Error::InvalidState("a plan was granted more blocks than are free".into()))
    }

    /// Makes a block and all that follow it unfindable; how many these were.
    fn unpublish(&mut self, block: BlockId) -> u64 {
        let Self { pool, index, .. } = self;
        let mut count = 0;
        if let Some(node) = pool.node(block) {
            index.remove(node, |block| {
                pool.set_node(block, None);
                count += 1;
            });
        }
        count
    }

    /// Before a write to a partly filled block: nobody else may hold it, nor the index publish it.
    fn make_writable(&mut self, block: &mut BlockId) -> Result<Option<BlockCopy>> {
        if self.pool.ref_count(*block) == 1 {
            // The only holder was truncated into a full block. Unpublishing it, instead of copying, keeps the promise
            // that a lone sequence never needs more than ceil(tokens / block_size) blocks.
            self.unpublish(*block);
            return Ok(None);
        }
        let dst = self.take()?;
        let src = std::mem::replace(block, dst);
        self.pool.release(src)?; // Others hold it, so it cannot be taken again before the copy is done.
        Ok(Some(BlockCopy { src, dst }))
    }

    /// A reference to each, or an error and no reference to any.
    fn retain_all(&mut self, blocks: &[BlockId]) -> Result<()> {
        for (done, &block) in blocks.iter().enumerate() {
            if let Err(error) = self.pool.retain(block) {
                self.pool.release_all(&blocks[..done])?;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Shortens a block table to `len`.
    fn release_from(&mut self, table: &mut Vec<BlockId>, len: usize) -> Result<()> {
        if len < table.len() {
            self.pool.release_all(&table[len..])?;
            table.truncate(len);
        }
        Ok(())
    }

    /// Publishes the full blocks of a sequence that are new since the last time. A block whose tokens are published
    /// already stays private, and the chain goes on below the other's node. If the chain so far was evicted meanwhile, it
    /// starts again at the root.
    fn publish(&mut self, sequence: &mut Sequence, block_size: usize) {
        let full = sequence.computed / block_size;
        if sequence.chained == full {
            return;
        }
        let (mut from, mut at) = (sequence.chained, sequence.link);
        if from == 0 || !self.index.is_alive(at) {
            (from, at) = (0, self.index.root_or_insert(&sequence.domain));
        }
        let blocks = sequence.tokens.chunks_exact(block_size).zip(&sequence.blocks);
        for (tokens, &block) in blocks.take(full).skip(from) {
            at = self.index.find(at, tokens).unwrap_or_else(|| {
                debug_assert!(self.pool.node(block).is_none());
                let link = self.index.insert(at, tokens, block);
                self.pool.set_node(block, Some(link.slot));
                link
            });
        }
        (sequence.chained, sequence.link) = (full, at);
    }
}
