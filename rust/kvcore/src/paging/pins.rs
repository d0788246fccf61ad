//! Prefixes that stay: marks give a prefix a longer retention, pins keep it whatever else needs its space.
//!
//! ```text
//! pin(seq, n): everything that is computed is published first; then the blocks of its first n tokens get a pin each
//! unpin(pin):  blocks without pins and holders count as just used
//! ```
#![forbid(unsafe_code)]

use super::block::{BlockId, NIL};
use super::blocks::Blocks;
use super::manager::BlockManager;
use super::prefix::Link;
use super::retention::Retention;
use super::sequence::{Mark, SeqId, Sequence};
use super::transfer::Place;
use crate::{Error, Result};

/// Handle of a pin. Never given twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PinId {
    manager: u64,
    serial: u64,
    index: u32,
}

/// All pins of one manager.
#[derive(Debug)]
pub(super) struct PinTable {
    manager: u64,
    entries: Vec<Option<Pin>>,
    unused: Vec<u32>,
    last_serial: u64,
}

#[derive(Debug)]
struct Pin {
    serial: u64,
    /// Group and block.
    blocks: Vec<(usize, BlockId)>,
}

impl PinTable {
    pub fn new(manager: u64) -> Self {
        Self { manager, entries: Vec::new(), unused: Vec::new(), last_serial: 0 }
    }

    fn insert(&mut self, blocks: Vec<(usize, BlockId)>) -> PinId {
        self.last_serial += 1;
        let index = self.unused.pop().unwrap_or_else(|| {
            self.entries.push(None);
            (self.entries.len() - 1) as u32
        });
        self.entries[index as usize] = Some(Pin { serial: self.last_serial, blocks });
        PinId { manager: self.manager, serial: self.last_serial, index }
    }

    fn remove(&mut self, id: PinId) -> Result<Vec<(usize, BlockId)>> {
        if id.manager != self.manager {
            return Err(Error::InvalidHandle("the pin belongs to another cache".into()));
        }
        let entry = self.entries.get_mut(id.index as usize);
        let pin = entry.and_then(|entry| entry.take_if(|pin| pin.serial == id.serial));
        let pin = pin.ok_or_else(|| Error::InvalidHandle("the pin was undone already".into()))?;
        self.unused.push(id.index);
        Ok(pin.blocks)
    }

    /// Every pinned block of every pin.
    pub fn blocks(&self) -> impl Iterator<Item = (usize, BlockId)> + '_ {
        self.entries.iter().flatten().flat_map(|pin| pin.blocks.iter().copied())
    }
}

impl BlockManager {
    /// A breakpoint: the prefix of that many tokens gets at least this retention, now as far as it is published and
    /// otherwise when it is. A mark in the middle of a block holds for the whole block. Errors: `InvalidHandle`;
    /// `InvalidArgument` unless `num_tokens` is 1 to the tokens known, for a priority above 100, or for too many kinds of
    /// retention at once; `InvalidState` for a sequence that was added without prefixes.
    pub fn mark(&mut self, seq: SeqId, num_tokens: usize, retention: Retention) -> Result<()> {
        let sequence = self.sequences.get_mut(seq)?;
        let known = sequence.tokens.len();
        if num_tokens == 0 || num_tokens > known {
            return Err(Error::InvalidArgument(format!("num_tokens: expected 1 to {known}, got {num_tokens}")));
        }
        if !sequence.was_to_share {
            return Err(Error::InvalidState("the sequence does not share its prefix: there is nothing to mark".into()));
        }
        let class = self.blocks.classes.acquire(retention)?;
        // Marks that this one makes needless.
        let Blocks { classes, .. } = &mut self.blocks;
        sequence.marks.retain(|mark| {
            let needed = mark.num_tokens > num_tokens || !classes.covers(class, mark.class);
            if !needed {
                classes.drop(mark.class);
            }
            needed
        });
        if sequence.marks.iter().any(|mark| mark.num_tokens > num_tokens && classes.covers(mark.class, class)) {
            classes.drop(class);
            return Ok(());
        }
        sequence.marks.push(Mark { num_tokens, class });
        if sequence.use_prefix && sequence.era == self.era {
            let path = self.blocks.published_path(sequence, num_tokens, self.config.block_size);
            if let Some(&last) = path.last() {
                self.blocks.raise(last, class);
            }
        }
        Ok(())
    }

    /// Keeps the prefix of that many committed tokens until `unpin`, also after the sequence has ended. Errors, with
    /// nothing changed: `InvalidHandle`; `InvalidArgument` unless `num_tokens` is 1 to the tokens committed;
    /// `InvalidState` for a sequence that publishes nothing, and if a window's blocks of that prefix are gone; `PinLimit`
    /// with the numbers of the group.
    pub fn pin(&mut self, seq: SeqId, num_tokens: usize) -> Result<PinId> {
        let block_size = self.config.block_size;
        let sequence = self.sequences.get_mut(seq)?;
        let computed = sequence.computed;
        if num_tokens == 0 || num_tokens > computed {
            return Err(Error::InvalidArgument(match computed {
                0 => format!(
                    "num_tokens: nothing of the sequence is computed yet, so there is nothing to pin, got {num_tokens}"
                ),
                _ => format!("num_tokens: expected 1 to {computed}, the tokens with K and V, got {num_tokens}"),
            }));
        }
        let nothing = || Error::InvalidState("the sequence does not share its prefix: there is nothing to pin".into());
        if sequence.use_prefix && sequence.era == self.era {
            // From the root, so that others' nodes on the way get this sequence's blocks for what they have lost.
            (sequence.chained, sequence.link) = (0, Link::NONE);
            self.blocks.publish(sequence, block_size);
        }
        if !sequence.use_prefix || sequence.era != self.era {
            return Err(nothing());
        }
        let mut path = self.blocks.published_path(sequence, num_tokens, block_size);
        if path.len() < num_tokens.div_ceil(block_size) {
            return Err(nothing());
        }
        if let Some(last) = path.last_mut() {
            self.blocks.bring_home(sequence, last, block_size);
        }
        let mut blocks = Vec::new();
        for (number, group) in self.blocks.groups.iter().enumerate() {
            for &node in path.get(group.first_seen(num_tokens) / block_size..).unwrap_or_default() {
                let Place::Block(block) = self.blocks.index.place(node, number) else {
                    return Err(Error::InvalidState(format!(
                        "a window's blocks of the first {num_tokens} tokens were given back"
                    )));
                };
                blocks.push((number, block));
            }
        }
        if blocks.is_empty() {
            // No window reaches back to it, but without any block there would be no node.
            let place = |group| Some(self.blocks.index.place(*path.last()?, group));
            blocks.extend((0..self.blocks.groups.len()).find_map(|group| match place(group)? {
                Place::Block(block) => Some((group, block)),
                _ => None,
            }));
        }
        if blocks.is_empty() {
            return Err(nothing());
        }
        for (number, group) in self.blocks.groups.iter().enumerate() {
            let mine = || blocks.iter().filter(|(of, _)| *of == number);
            let needed = mine().filter(|(_, block)| group.pool.pin_count(*block) == 0).count();
            let (pinned, total) = (group.pool.num_pinned(), group.pool.num_blocks());
            let limit = (self.config.max_pinned_fraction * total as f64) as usize;
            if mine().next().is_some() && pinned + needed > limit {
                return Err(Error::PinLimit { needed, pinned, limit, total });
            }
        }
        for &(group, block) in &blocks {
            self.blocks.groups[group].pool.pin(block);
        }
        Ok(self.pins.insert(blocks))
    }

    /// Ends a pin: its time to live starts anew. Errors: `InvalidHandle` for another cache's pin, and the second time.
    pub fn unpin(&mut self, pin: PinId) -> Result<()> {
        let blocks = self.pins.remove(pin)?;
        for &(group, block) in blocks.iter().rev() {
            self.blocks.groups[group].pool.unpin(block);
        }
        Ok(())
    }
}

impl Blocks {
    /// The last, partial block of a sequence may be found in the second tier only, behind more tokens: then the
    /// sequence's own block gets a node beside it.
    fn bring_home(&mut self, sequence: &Sequence, last: &mut u32, block_size: usize) {
        let position = sequence.chained;
        let parent = self.index.parent(*last);
        let is_here = (0..self.groups.len()).all(|group| matches!(self.index.place(*last, group), Place::Block(_)));
        if is_here || parent.slot != self.chain_end(sequence) || position * block_size >= sequence.computed {
            return;
        }
        let tokens = &sequence.tokens[position * block_size..sequence.computed];
        let own = self.blocks_at(sequence, position).find_map(|(group, block)| self.groups[group].pool.node(block));
        let node = match own {
            Some(own) if self.index.parent(own) == parent && tokens.starts_with(self.index.tokens(own)) => {
                self.grow(sequence, position, own, tokens, block_size);
                own
            }
            None if self.index.tokens(*last).len() > tokens.len() => {
                let class = self.index.class(*last);
                self.classes.hold(class);
                self.index.insert(parent, tokens, class).slot
            }
            _ => return,
        };
        for (group, table) in sequence.tables.iter().enumerate() {
            if self.index.place(node, group) == Place::Nowhere {
                self.set_block(node, group, table.blocks[position]);
            }
        }
        *last = node;
    }

    /// The node below which a sequence's last, partial block belongs.
    fn chain_end(&self, sequence: &Sequence) -> u32 {
        match sequence.chained {
            0 => self.index.root(&sequence.domain).map_or(NIL, |root| root.slot),
            _ => sequence.link.slot,
        }
    }

    /// Nodes of the first `num_tokens` tokens of a sequence, as far as it has published them.
    fn published_path(&self, sequence: &Sequence, num_tokens: usize, block_size: usize) -> Vec<u32> {
        let num_tokens = num_tokens.min(sequence.computed);
        let chained = sequence.chained.min(num_tokens.div_ceil(block_size));
        let mut at = match sequence.chained {
            0 => self.index.root(&sequence.domain).unwrap_or(Link::NONE),
            all => self.index.ancestor(sequence.link, all - chained),
        };
        let mut path = Vec::new();
        if !self.index.is_alive(at) {
            return path;
        }
        let rest = sequence.tokens.get(chained * block_size..num_tokens).unwrap_or_default();
        if !rest.is_empty() {
            let rest = &rest[..rest.len().min(block_size)];
            let has_all = |node: &u32| self.index.parent(*node) == at && self.index.tokens(*node).starts_with(rest);
            let own = self.blocks_at(sequence, chained).find_map(|(group, block)| self.groups[group].pool.node(block));
            path.extend(own.filter(has_all).or_else(|| self.index.starting_with(at.slot, rest)));
        }
        while !self.index.is_root(at.slot) {
            path.push(at.slot);
            at = self.index.parent(at.slot);
        }
        path.reverse();
        path
    }
}
