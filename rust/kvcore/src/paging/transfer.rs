//! Cached prefixes out of one manager and into another.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::Arc;

use super::block::{BlockId, SlotId};
use super::key::OwnedKey;
use super::manager::BlockManager;
use super::prefix::Link;
use super::retention::Retention;
use crate::{Error, Result};

/// Where the content of a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Nowhere: it was evicted while other groups keep theirs.
    Nowhere,
    /// In a block of the pool.
    Block(BlockId),
    /// In the second tier.
    Slot(SlotId),
}

/// One published block of every group, with the tokens that are in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixEntry {
    /// The entry before it in the prompt: an earlier position in the list; None for a prompt's first block.
    pub parent: Option<usize>,
    /// Key of the prompt.
    pub key: OwnedKey,
    /// Its tokens, 1 to `block_size`; fewer only in a last block.
    pub tokens: Vec<u32>,
    /// For each group, where its K and V are.
    pub places: Vec<Place>,
    /// How long it stays.
    pub retention: Retention,
    /// Chained hash of its tokens and all before them.
    pub hash: u128,
}

/// What is to be published; see [`PrefixEntry`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportEntry {
    /// The entry before it: an earlier position in the list.
    pub parent: Option<usize>,
    /// Key of the prompt; equal to the parent's.
    pub key: OwnedKey,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// For each group whether its K and V are there to be written. Groups that keep all tokens need them.
    pub present: Vec<bool>,
    /// How long it stays.
    pub retention: Retention,
}

impl BlockManager {
    /// Everything that is published, parents before children.
    pub fn export_prefixes(&self) -> Vec<PrefixEntry> {
        let (index, num_groups) = (&self.blocks.index, self.num_groups());
        let mut entries = Vec::new();
        for (root, key) in index.domains() {
            let mut open = vec![(root, None)];
            while let Some((node, parent)) = open.pop() {
                let mut at = parent;
                if !index.is_root(node) {
                    at = Some(entries.len());
                    entries.push(PrefixEntry {
                        parent,
                        key: OwnedKey::clone(key),
                        tokens: index.tokens(node).to_vec(),
                        places: (0..num_groups).map(|group| index.place(node, group)).collect(),
                        retention: self.blocks.classes.get(index.class(node)).retention(),
                        hash: index.hash_of(node),
                    });
                }
                index.children(node, |child| open.push((child, at)));
            }
        }
        entries
    }

    /// Publishes prefixes in vacant blocks, as used just now. For each entry and group the block that the caller has to
    /// fill before any other call (or to give up with `forget_block`); None where there is nothing to write: it is there
    /// already, it is not `present`, or no block is vacant in a group that needs one. In the last case what follows it is
    /// left out, too.
    ///
    /// Errors, with nothing changed: `InvalidArgument` for entries that cannot be a prefix tree of this cache, or too
    /// many kinds of retention; `InvalidState` if prefix caching is off.
    pub fn import_prefixes(&mut self, entries: &[ImportEntry]) -> Result<Vec<Vec<Option<BlockId>>>> {
        self.check_import(entries)?;
        let mut classes = Vec::with_capacity(entries.len());
        for entry in entries {
            match self.blocks.classes.acquire(entry.retention) {
                Ok(class) => classes.push(class),
                Err(error) => {
                    classes.into_iter().for_each(|class| self.blocks.classes.drop(class));
                    return Err(error);
                }
            }
        }
        let num_groups = self.num_groups();
        let mut links: Vec<Option<Link>> = Vec::with_capacity(entries.len());
        let mut result = Vec::with_capacity(entries.len());
        let mut domains: HashMap<&OwnedKey, Arc<OwnedKey>> = HashMap::new();
        for (entry, &class) in entries.iter().zip(&classes) {
            let mut blocks = vec![None; num_groups];
            let domain = domains.entry(&entry.key).or_insert_with(|| Arc::new(entry.key.clone()));
            let parent = match entry.parent {
                Some(parent) => links[parent],
                None => Some(self.blocks.index.root_or_insert(domain)),
            };
            let link = parent.and_then(|parent| self.import_entry(parent, entry, class, &mut blocks));
            if let (None, None, Some(root)) = (entry.parent, link, parent) {
                self.blocks.prune(root.slot);
            }
            links.push(link);
            result.push(blocks);
        }
        // A node that got no block is of use only if others hang below it.
        for link in links.into_iter().rev().flatten() {
            if self.blocks.index.is_alive(link) {
                self.blocks.prune(link.slot);
            }
        }
        // Leaves are the first to be evicted.
        for blocks in result.iter().rev() {
            for (group, block) in blocks.iter().enumerate().rev() {
                block.map_or(Ok(()), |block| self.blocks.groups[group].pool.release(block))?;
            }
        }
        classes.into_iter().for_each(|class| self.blocks.classes.drop(class));
        Ok(result)
    }

    /// The node of an entry, which is there already or now; None if there is no room for it. Its blocks are held.
    fn import_entry(
        &mut self,
        parent: Link,
        entry: &ImportEntry,
        class: u16,
        blocks: &mut [Option<BlockId>],
    ) -> Option<Link> {
        let index = &self.blocks.index;
        if let Some(found) = index.starting_with(parent.slot, &entry.tokens) {
            // Partial ones that others have gone on from are of no use.
            self.blocks.raise(found, class);
            return Some(self.blocks.index.link(found));
        }
        let (less, _) = index.neighbours(parent.slot, &entry.tokens);
        let room = |number: usize| self.blocks.groups[number].pool.has_vacant();
        let is_full = |number: usize| self.blocks.groups[number].window.is_none();
        if (0..blocks.len()).any(|group| is_full(group) && !room(group)) {
            return None;
        }
        self.blocks.classes.hold(class);
        let node = self.blocks.index.insert(parent, &entry.tokens, class);
        for (group, block) in blocks.iter_mut().enumerate().filter(|(group, _)| entry.present[*group]) {
            *block = self.blocks.groups[group].pool.allocate();
            if let Some(block) = *block {
                self.blocks.groups[group].pool.set_filled(block, entry.tokens.len());
                self.blocks.set_block(node.slot, group, block);
            }
        }
        if !self.blocks.index.is_root(parent.slot) {
            self.blocks.raise(parent.slot, class);
        }
        self.blocks.replace_if_beginning(less, node.slot);
        Some(node)
    }

    fn check_import(&self, entries: &[ImportEntry]) -> Result<()> {
        if !self.config.enable_prefix_caching {
            return Err(Error::InvalidState("this cache keeps no prefixes".into()));
        }
        let (block_size, num_groups) = (self.config.block_size, self.num_groups());
        let needed = |group: usize| self.config.groups[group].window.is_none();
        for (number, entry) in entries.iter().enumerate() {
            let wrong = |what: String| Err(Error::InvalidArgument(format!("entry {number}: {what}")));
            if entry.tokens.is_empty() || entry.tokens.len() > block_size {
                return wrong(format!("expected 1 to {block_size} tokens, got {}", entry.tokens.len()));
            }
            if entry.present.len() != num_groups {
                return wrong(format!("expected {num_groups} groups, got {}", entry.present.len()));
            }
            if let Some(group) = (0..num_groups).find(|&group| needed(group) && !entry.present[group]) {
                return wrong(format!("group {group} keeps all tokens, but not those of this entry"));
            }
            let Some(parent) = entry.parent else { continue };
            if parent >= number {
                return wrong(format!("expected a parent before it, got entry {parent}"));
            }
            let parent = &entries[parent];
            if parent.tokens.len() != block_size || parent.key != entry.key {
                return wrong("expected a parent with a whole block of tokens and the same key".into());
            }
        }
        Ok(())
    }
}
