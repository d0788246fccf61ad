//! A sequence begins with the longest prefix that is cached.
//!
//! ```text
//! path = nodes that have the prompt's whole blocks, then the child with the longest common beginning with the rest
//!        (at most all tokens but the last)
//! n    = the most tokens of it for which every group has what a query at n sees: all blocks, or those of its window,
//!        in a block or in the second tier, with blocks to be had for the latter
//!        more, if a child in blocks beside the path has them, from its end back to n
//! take references; the last block, if only its beginning matches, is borrowed; fetch what was spilled
//! one of these cannot be read: it is forgotten, the references are given back, and all begins anew
//! ```
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::block::BlockId;
use super::blocks::Blocks;
use super::config::AddOptions;
use super::events::Cause;
use super::group::Group;
use super::key::{Key, OwnedKey};
use super::manager::BlockManager;
use super::moves::Carrier;
use super::prefix::Link;
use super::retention::ClassId;
use super::room::{copied, room};
use super::sequence::{SeqId, Sequence, Table};
use super::transfer::Place;
use crate::{Error, Result};

/// Children of one node that are looked at when the nearest will not do.
const MAX_CHILDREN: usize = 128;
/// Of these, on all of a prompt's way, those behind which it is counted anew.
const MAX_TRIES: usize = 16;

/// What a prompt would find.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Tokens.
    pub num_tokens: usize,
    /// For each group the blocks that they are in, [`BlockId::NONE`] for those in the second tier and those before a
    /// window.
    pub tables: Vec<Vec<BlockId>>,
}

/// Nodes on the way of a prompt, and what is counted along it. Kept to allocate once.
#[derive(Debug, Default)]
pub(super) struct Trail {
    path: Vec<u32>,
    /// For each window group where its present run of blocks began.
    runs: Vec<usize>,
    /// For each position and group: blocks of the earlier ones that are in the second tier, and that are evictable.
    sums: Vec<(usize, usize)>,
}

impl BlockManager {
    /// Registers a sequence and takes references to the blocks of its longest cached prefix: at most all tokens but the
    /// last, and only under an equal key. Without `use_prefix` it neither reads nor publishes. What brings spilled blocks
    /// back goes to `carrier`.
    ///
    /// Errors: `InvalidArgument` without tokens, for a priority above 100, or for too many kinds of retention at once;
    /// `OutOfMemory`.
    pub fn add(&mut self, token_ids: &[u32], options: &AddOptions<'_>, carrier: &mut dyn Carrier) -> Result<SeqId> {
        let seq = self.begin(token_ids, options, carrier)?;
        let sequence = self.sequences.get(seq)?;
        if sequence.use_prefix {
            self.query_tokens += sequence.tokens.len() as u64;
            self.hit_tokens += sequence.cached as u64;
        }
        Ok(seq)
    }

    /// `add` but for its counts.
    pub(super) fn begin(
        &mut self,
        token_ids: &[u32],
        options: &AddOptions<'_>,
        carrier: &mut dyn Carrier,
    ) -> Result<SeqId> {
        if token_ids.is_empty() {
            return Err(Error::InvalidArgument("a sequence needs at least one token, got none".into()));
        }
        let tokens = copied(token_ids, "token ids")?;
        let mut tables = self.empty_tables(token_ids.len())?;
        self.sequences.make_room()?;
        let class = self.class_for(options)?;
        self.blocks.sweep();
        let use_prefix = options.use_prefix && self.config.enable_prefix_caching;
        let domain = self.domain(options.key);
        let least = options.min_prefix_tokens.unwrap_or(self.config.min_prefix_tokens);
        let found = loop {
            let found = match use_prefix {
                true => self.blocks.longest_prefix(&domain, token_ids, self.config.block_size, &mut self.trail),
                false => 0,
            };
            let found = if found < least { 0 } else { found };
            if self.hold(found, &mut tables, carrier)? {
                break found;
            }
        };
        let mut sequence = Sequence::new(tokens, tables, domain, class);
        (sequence.use_prefix, sequence.was_to_share, sequence.era) = (use_prefix, use_prefix, self.era);
        (sequence.computed, sequence.cached) = (found, found);
        sequence.borrowed = found % self.config.block_size != 0;
        sequence.chained = found / self.config.block_size;
        if let Some(last) = sequence.chained.checked_sub(1) {
            sequence.link = self.blocks.index.link(self.trail.path[last]);
        }
        if options.retention.is_some() && found > 0 {
            let last = self.trail.path[found.div_ceil(self.config.block_size) - 1];
            self.blocks.raise(last, class);
        }
        Ok(self.sequences.insert(sequence))
    }

    /// What `add` would find for this prompt now, were there blocks for all that was spilled; nothing is taken or renewed.
    pub fn find_prefix(&self, token_ids: &[u32], key: Key<'_>) -> Found {
        let (block_size, mut trail) = (self.config.block_size, Trail::default());
        let mut num_tokens = 0;
        if self.config.enable_prefix_caching {
            num_tokens = self.blocks.longest_prefix(&self.domain(key), token_ids, block_size, &mut trail);
        }
        let table = |(at, group): (usize, &Group)| {
            let first = group.first_seen(num_tokens) / block_size;
            let block = |(position, &node): (usize, &u32)| match self.blocks.index.place(node, at) {
                Place::Block(block) if position >= first => block,
                _ => BlockId::NONE,
            };
            trail.path.iter().take(num_tokens.div_ceil(block_size)).enumerate().map(block).collect()
        };
        Found { num_tokens, tables: self.blocks.groups.iter().enumerate().map(table).collect() }
    }

    /// A use of the class that a sequence asks for.
    pub(super) fn class_for(&mut self, options: &AddOptions<'_>) -> Result<ClassId> {
        if let Some(retention) = options.retention {
            return self.blocks.classes.acquire(retention);
        }
        self.blocks.classes.hold(self.class);
        Ok(self.class)
    }

    /// A table of each group, with room for `len` tokens.
    fn empty_tables(&self, len: usize) -> Result<Vec<Table>> {
        let table = |_| Ok(Table { blocks: room(len.div_ceil(self.config.block_size), "block tables")?, returned: 0 });
        (0..self.blocks.groups.len()).map(table).collect()
    }

    /// Lets empty tables hold the first `found` tokens of the trail. False, and nothing held, if something spilled cannot
    /// be read: it is forgotten.
    fn hold(&mut self, found: usize, tables: &mut [Table], carrier: &mut dyn Carrier) -> Result<bool> {
        let Self { blocks, trail, config, .. } = self;
        let (block_size, count) = (config.block_size, found.div_ceil(config.block_size));
        let borrowed = !found.is_multiple_of(block_size);
        let mut spilled = false;
        for (number, table) in tables.iter_mut().enumerate() {
            let first = blocks.groups[number].first_seen(found) / block_size;
            table.returned = first;
            table.blocks.resize(first, BlockId::NONE);
            for &node in &trail.path[first..count] {
                let block = match blocks.index.place(node, number) {
                    Place::Block(block) => {
                        blocks.groups[number].pool.retain(block)?;
                        block
                    }
                    Place::Slot(slot) => {
                        spilled = true;
                        blocks.hold_slot(number, slot)?;
                        BlockId::NONE
                    }
                    Place::Nowhere => return Err(Error::InvalidState("a prefix was found that is not there".into())),
                };
                table.blocks.push(block);
            }
        }
        if spilled && let Some((node, number)) = blocks.fetch_path(&trail.path[..count], tables, carrier)? {
            blocks.let_go(&trail.path, tables)?;
            blocks.drop_place(node, number, Cause::Failed);
            tables.iter_mut().for_each(|table| table.blocks.clear());
            return Ok(false);
        }
        for (number, (group, table)) in blocks.groups.iter_mut().zip(tables.iter_mut()).enumerate() {
            // What a rollback could need is welcome if it is there.
            let least = group.first_seen(found.saturating_sub(config.max_rollback)) / block_size;
            while table.returned > least
                && let Place::Block(block) = blocks.index.place(trail.path[table.returned - 1], number)
            {
                group.pool.retain(block)?;
                table.returned -= 1;
                table.blocks[table.returned] = block;
            }
        }
        if borrowed {
            for (group, table) in blocks.groups.iter_mut().zip(tables.iter()) {
                group.pool.lend(table.blocks[count - 1]);
            }
        }
        Ok(true)
    }

    pub(super) fn domain(&self, key: Key<'_>) -> Arc<OwnedKey> {
        if key.is_empty() { Arc::clone(&self.no_key) } else { Arc::new(key.into()) }
    }
}

impl Blocks {
    /// Brings back what the tables hold in slots; the node and group of the first that cannot be read.
    fn fetch_path(
        &mut self,
        path: &[u32],
        tables: &mut [Table],
        carrier: &mut dyn Carrier,
    ) -> Result<Option<(u32, usize)>> {
        for (position, &node) in path.iter().enumerate() {
            for (number, table) in tables.iter_mut().enumerate() {
                if let Place::Slot(slot) = self.index.place(node, number)
                    && position >= table.returned
                {
                    match self.fetch(number, node, slot, carrier)? {
                        Some(block) => table.blocks[position] = block,
                        None => return Ok(Some((node, number))),
                    }
                }
            }
        }
        Ok(None)
    }

    /// Gives back what the tables hold of the path, blocks and slots.
    fn let_go(&mut self, path: &[u32], tables: &[Table]) -> Result<()> {
        for (number, table) in tables.iter().enumerate() {
            for (position, &block) in table.blocks.iter().enumerate().skip(table.returned).rev() {
                match self.index.place(path[position], number) {
                    Place::Slot(slot) if block.is_none() => self.unhold_slot(number, slot)?,
                    _ => self.groups[number].pool.release(block)?,
                }
            }
        }
        Ok(())
    }

    /// How many tokens of a prompt can be reused; their nodes are the beginning of the trail's path.
    pub(super) fn longest_prefix(
        &self,
        domain: &OwnedKey,
        token_ids: &[u32],
        block_size: usize,
        trail: &mut Trail,
    ) -> usize {
        trail.path.clear();
        let (Some(root), Some((_, before_last))) = (self.index.root(domain), token_ids.split_last()) else { return 0 };
        let mut at: Link = root;
        for tokens in before_last.chunks_exact(block_size) {
            let Some(next) = self.index.find(at, tokens) else { break };
            trail.path.push(next.slot);
            at = next;
        }
        let whole = trail.path.len();
        let places = |node| (0..self.groups.len()).map(move |group| self.index.place(node, group));
        let is_somewhere = |node| places(node).all(|place| place != Place::Nowhere);
        let best = self.index.best_match(at.slot, chunk(before_last, whole, block_size), is_somewhere);
        let found = self.reachable_with(best, whole, block_size, trail);
        if self.is_plain() {
            return found;
        }
        let depth = found / block_size;
        let parent = |depth: usize, trail: &Trail| depth.checked_sub(1).map_or(root.slot, |last| trail.path[last]);
        let rest = |depth: usize| chunk(before_last, depth, block_size);
        if depth == whole {
            let most = self.index.best_match(at.slot, rest(depth), |_| true).map_or(0, |(_, common)| common);
            if found == depth * block_size + most {
                return found;
            }
        }
        // Where it ends, or further on, another child may have what a window or the first tier lacks of those that have more tokens.
        let is_here = |node| places(node).all(|place| matches!(place, Place::Block(_)));
        let mut tries = MAX_TRIES;
        for depth in (depth..=whole).rev() {
            let other = self.index.best_match_among(parent(depth, trail), rest(depth), MAX_CHILDREN, is_here);
            if other.is_none_or(|(_, common)| depth * block_size + common <= found) {
                continue;
            }
            let more = self.reachable_with(other, depth, block_size, trail);
            tries -= 1;
            if more > found {
                return more;
            }
            if tries == 0 {
                break;
            }
        }
        self.reachable_with(best.filter(|_| depth == whole), depth, block_size, trail)
    }

    /// Whether every group keeps all blocks in the first tier.
    fn is_plain(&self) -> bool {
        self.groups.iter().all(|group| group.window.is_none() && group.tier.is_none())
    }

    /// With this child behind the first `whole` nodes of the trail.
    fn reachable_with(&self, child: Option<(u32, usize)>, whole: usize, block_size: usize, trail: &mut Trail) -> usize {
        trail.path.truncate(whole);
        let (node, common) = child.unzip();
        trail.path.extend(node);
        self.reachable(whole * block_size + common.unwrap_or(0), block_size, trail)
    }

    /// The most of `found` tokens for which every group has what it needs.
    fn reachable(&self, found: usize, block_size: usize, trail: &mut Trail) -> usize {
        let num_groups = self.groups.len();
        if self.is_plain() {
            return found;
        }
        let Trail { path, runs, sums } = trail;
        runs.clear();
        runs.resize(num_groups, 0);
        sums.clear();
        sums.resize(num_groups, (0, 0));
        let mut reachable = 0;
        for (position, &node) in path.iter().enumerate() {
            let end = ((position + 1) * block_size).min(found);
            let mut good = true;
            for (number, group) in self.groups.iter().enumerate() {
                let (mut spilled, mut evictable) = sums[position * num_groups + number];
                match self.index.place(node, number) {
                    Place::Nowhere => runs[number] = position + 1,
                    Place::Slot(_) => spilled += 1,
                    Place::Block(block) => {
                        evictable += usize::from(group.pool.ref_count(block) == 0 && group.pool.pin_count(block) == 0);
                    }
                }
                sums.push((spilled, evictable));
                let first = group.first_seen(end) / block_size;
                let before = sums[first.min(position + 1) * num_groups + number];
                let (needed, kept) = (spilled - before.0, evictable - before.1);
                good &= first >= runs[number] && (needed == 0 || needed + kept <= group.pool.num_free());
            }
            if good {
                reachable = end;
            }
        }
        reachable
    }
}

/// The tokens of the block at `position`, as far as there are some.
fn chunk(tokens: &[u32], position: usize, block_size: usize) -> &[u32] {
    let rest = &tokens[position * block_size..];
    &rest[..rest.len().min(block_size)]
}
