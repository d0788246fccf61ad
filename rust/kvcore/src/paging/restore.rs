//! A sequence that was computed before comes back, all or nothing.
//!
//! ```text
//! path = nodes that have its computed tokens                     what is in a slot is not fetched: its bytes are at hand
//! for each group, from the last block to the first that a query can see, and on while there are blocks to be had:
//!     a block of the path:  a reference; the last one, if it is not full, only if every group has it, and as borrowed
//!     none:                 a block to be filled
//! too few blocks in a group: an error, nothing changed
//! ```
//!
//! Nothing of it can be found before it is filled.
#![forbid(unsafe_code)]

use super::block::BlockId;
use super::config::AddOptions;
use super::key::OwnedKey;
use super::manager::BlockManager;
use super::moves::Carrier;
use super::plan::first_kept;
use super::room::copied;
use super::sequence::{SeqId, Sequence, Table};
use super::transfer::Place;
use crate::{Error, Result};

/// What is known of a sequence that was saved.
#[derive(Debug, Clone, Copy)]
pub struct Saved<'a> {
    /// Its tokens.
    pub token_ids: &'a [u32],
    /// How many of them have K and V.
    pub computed: usize,
    /// For each group the first entry of the block table that there is; all after it are there.
    pub first: &'a [usize],
    /// Tokens of its encoder; 0: none.
    pub cross_tokens: usize,
}

/// A sequence whose blocks wait for their content.
#[derive(Debug)]
#[must_use = "finish it, or free the sequence"]
pub struct Restored {
    /// The sequence.
    pub seq: SeqId,
    /// For each group the entries of its block table that are to be filled, ascending.
    pub fill: Vec<Vec<usize>>,
    use_prefix: bool,
}

/// The blocks in which the index has a sequence's tokens: for each group those of the path, [`BlockId::NONE`] for none.
type Shared = Vec<Vec<BlockId>>;

impl BlockManager {
    /// A sequence with what it had when it was saved; with more if the cache knows more of its tokens. The caller fills
    /// the blocks of `fill` and those of the encoder, then calls `finish_restore`; or it frees the sequence. Nothing of it
    /// is counted as a query or a hit.
    ///
    /// Errors, with nothing changed: `InvalidArgument` for what no sequence of this cache can be; `InvalidState` for an
    /// encoder's tokens in a cache without a pool for them; `OutOfBlocks` with the numbers of the group that lacks blocks;
    /// those of `add`.
    pub fn restore(
        &mut self,
        saved: &Saved<'_>,
        options: &AddOptions<'_>,
        carrier: &mut dyn Carrier,
    ) -> Result<Restored> {
        self.check_saved(saved)?;
        self.blocks.sweep();
        let use_prefix = options.use_prefix && self.config.enable_prefix_caching;
        let (block_size, domain) = (self.config.block_size, self.domain(options.key));
        if use_prefix
            && self.blocks.longest_prefix(&domain, saved.token_ids, block_size, &mut self.trail) > saved.computed
        {
            let seq = self.begin(saved.token_ids, options, carrier)?;
            if self.num_computed_tokens(seq)? >= saved.computed {
                self.restore_cross(seq, saved)?;
                return Ok(Restored { seq, fill: vec![Vec::new(); self.num_groups()], use_prefix });
            }
            // Something of it could not be fetched.
            self.free(seq)?;
        }
        let tokens = &saved.token_ids[..saved.computed];
        let path = if use_prefix { self.path_of(&domain, tokens) } else { Vec::new() };
        let (shared, borrowed) = self.shared_blocks(&path, saved.computed);
        let firsts: Vec<usize> = (0..self.num_groups())
            .map(|group| self.first_entry(group, &shared[group], saved))
            .collect::<Result<_>>()?;
        let known = copied(saved.token_ids, "token ids")?;
        self.sequences.make_room()?;
        // From here on nothing fails.
        let class = self.class_for(options)?;
        let (tables, fill) = self.restored_tables(&shared, &firsts, borrowed, saved.computed, carrier)?;
        let found = fill.iter().filter_map(|entries| entries.first().copied()).min().unwrap_or(path.len());
        let found = found.min(path.len());
        let mut sequence = Sequence::new(known, tables, domain, class);
        (sequence.computed, sequence.borrowed, sequence.era) = (saved.computed, borrowed, self.era);
        sequence.cached = (found * block_size).min(saved.computed);
        let seq = self.sequences.insert(sequence);
        self.restore_cross(seq, saved)?;
        Ok(Restored { seq, fill, use_prefix })
    }

    /// What was restored is filled: it can be found, unless it is private. Errors: `InvalidHandle`.
    pub fn finish_restore(&mut self, restored: Restored) -> Result<SeqId> {
        let sequence = self.sequences.get_mut(restored.seq)?;
        (sequence.use_prefix, sequence.was_to_share) = (restored.use_prefix, restored.use_prefix);
        // Who only borrows has nothing to tell of the last block; the next commit publishes the rest.
        if sequence.use_prefix && !sequence.borrowed {
            self.blocks.publish(sequence, self.config.block_size);
        }
        Ok(restored.seq)
    }

    fn check_saved(&self, saved: &Saved<'_>) -> Result<()> {
        let wrong = |what: String| Err(Error::InvalidArgument(what));
        let (known, num_groups, block_size) = (saved.token_ids.len(), self.num_groups(), self.config.block_size);
        if known == 0 || saved.computed > known {
            return wrong(format!(
                "computed: expected 0 to {known}, the tokens of the sequence, got {}",
                saved.computed
            ));
        }
        if saved.first.len() != num_groups {
            return wrong(format!("first: expected {num_groups} groups, got {}", saved.first.len()));
        }
        for (number, (group, &first)) in self.blocks.groups.iter().zip(saved.first).enumerate() {
            let least = group.first_seen(saved.computed).min(saved.computed) / block_size;
            if first > least {
                return wrong(format!("first of group {number}: expected {least} or less, got {first}"));
            }
        }
        if saved.cross_tokens > 0 {
            let Some(pool) = &self.cross else {
                return Err(Error::InvalidState("this cache has no layers for cross attention".into()));
            };
            let (needed, available) = (saved.cross_tokens.div_ceil(block_size), pool.num_free());
            if needed > available {
                return Err(Error::OutOfBlocks { needed, available, total: pool.num_blocks() });
            }
        }
        Ok(())
    }

    /// The nodes that have these tokens, from the first block on.
    fn path_of(&self, domain: &OwnedKey, tokens: &[u32]) -> Vec<u32> {
        let index = &self.blocks.index;
        let mut path = Vec::new();
        let Some(mut at) = index.root(domain) else { return path };
        let chunks = tokens.chunks_exact(self.config.block_size);
        let rest = chunks.remainder();
        for whole in chunks {
            let Some(next) = index.find(at, whole) else { return path };
            path.push(next.slot);
            at = next;
        }
        if !rest.is_empty() {
            path.extend(index.starting_with(at.slot, rest));
        }
        path
    }

    /// What is there of a path, and whether the last block is there in every group and has other tokens behind.
    fn shared_blocks(&self, path: &[u32], computed: usize) -> (Shared, bool) {
        let (whole, count) = (computed / self.config.block_size, computed.div_ceil(self.config.block_size));
        let block = |node: u32, group: usize| match self.blocks.index.place(node, group) {
            Place::Block(block) => block,
            _ => BlockId::NONE,
        };
        let groups = 0..self.num_groups();
        let borrowed =
            whole < count && path.get(whole).is_some_and(|&last| groups.clone().all(|at| !block(last, at).is_none()));
        let path = &path[..path.len().min(if borrowed { count } else { whole })];
        let of_group = |group| {
            let mut blocks: Vec<BlockId> = path.iter().map(|&node| block(node, group)).collect();
            blocks.resize(count, BlockId::NONE);
            blocks
        };
        (groups.map(of_group).collect(), borrowed)
    }

    /// From where on a group takes the sequence's blocks: all that there are, or as many as it has room for, but those
    /// at least that the next plan would not return.
    fn first_entry(&self, group: usize, shared: &[BlockId], saved: &Saved<'_>) -> Result<usize> {
        let of = &self.blocks.groups[group];
        let least = first_kept(of, saved.computed, self.config.max_rollback, self.config.block_size);
        let least = least.max(saved.first[group]).min(shared.len());
        let (mut needed, mut kept) = (0, 0);
        for (position, &block) in shared.iter().enumerate().skip(saved.first[group]).rev() {
            // A block that nobody holds is one less for others.
            match block.is_none() {
                true => needed += 1,
                false => kept += usize::from(of.pool.ref_count(block) == 0 && of.pool.pin_count(block) == 0),
            }
            if needed + kept > of.pool.num_free() && position >= least {
                let rest = shared[least..position].iter();
                return Err(Error::OutOfBlocks {
                    needed: needed + rest.filter(|block| block.is_none()).count(),
                    available: of.pool.num_free() - kept.min(of.pool.num_free()),
                    total: of.pool.num_blocks(),
                });
            }
            if needed + kept > of.pool.num_free() {
                return Ok(position + 1);
            }
        }
        Ok(saved.first[group].min(shared.len()))
    }

    /// Block tables with a reference to what is shared, and the entries that got a block without content.
    fn restored_tables(
        &mut self,
        shared: &Shared,
        firsts: &[usize],
        borrowed: bool,
        computed: usize,
        carrier: &mut dyn Carrier,
    ) -> Result<(Vec<Table>, Vec<Vec<usize>>)> {
        let (blocks, block_size) = (&mut self.blocks, self.config.block_size);
        let mut tables = Vec::with_capacity(shared.len());
        // First of all groups: what is taken may make unfindable what is shared.
        for (group, (entries, &first)) in blocks.groups.iter_mut().zip(shared.iter().zip(firsts)) {
            let mut table = Table { blocks: entries.clone(), returned: first };
            table.blocks[..first].fill(BlockId::NONE);
            for &block in table.held().iter().filter(|block| !block.is_none()) {
                group.pool.retain(block)?;
            }
            if let (true, Some(&last)) = (borrowed, table.blocks.last()) {
                group.pool.lend(last);
            }
            tables.push(table);
        }
        let mut fill = Vec::with_capacity(shared.len());
        for (group, table) in tables.iter_mut().enumerate() {
            let is_open = |position: &usize| table.blocks[*position].is_none();
            let open: Vec<usize> = (table.returned..table.blocks.len()).filter(is_open).collect();
            for &position in &open {
                let block = blocks.take(group, carrier)?;
                blocks.groups[group].pool.set_filled(block, block_size.min(computed - position * block_size));
                table.blocks[position] = block;
            }
            fill.push(open);
        }
        Ok((tables, fill))
    }

    fn restore_cross(&mut self, seq: SeqId, saved: &Saved<'_>) -> Result<()> {
        if saved.cross_tokens > 0 {
            self.reserve_cross(seq, saved.cross_tokens)?;
        }
        Ok(())
    }
}
