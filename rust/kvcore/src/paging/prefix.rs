//! Which block holds which tokens: a tree of published blocks, found by chained hash, believed only by comparison.
//!
//! ```text
//! root(domain)  --tokens 0..B-->  node  --tokens B..2B-->  node ...        one node = one published block
//! hash(node) = H(hash(parent), tokens)
//! find(parent, tokens): the parent's newest child, if it has these tokens; else, over the chain of bucket hash: the
//!                       node with this hash AND this parent AND these tokens
//! remove(node): its descendants first, because without it nobody could reach them
//! ```
//!
//! A node knows its parent by slot and by an id that is never given twice, so a slot that was reused for another prefix
//! is not mistaken for the old one. Were every hash equal, answers would still be right (only slower).
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::Arc;

use super::block::{BlockId, NIL};
use super::hash::HashFn;
use super::key::OwnedKey as Domain;
use super::pool::filled_vec;
use crate::Result;

/// A node as others remember it: the slot may be reused, the id never is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Link {
    pub slot: u32,
    pub id: u64,
}

impl Link {
    /// No node: never alive.
    pub const NONE: Self = Self { slot: NIL, id: 0 };
}

/// A published block, or (without a block) the root of a domain. One cache line.
#[derive(Debug)]
struct Node {
    hash: u128,
    /// 0 while the slot is unused.
    id: u64,
    parent: Link,
    /// [`NIL`] for a root.
    block: u32,
    next_in_bucket: u32,
    first_child: u32,
    prev_sibling: u32,
    next_sibling: u32,
}

/// The tree of published blocks.
#[derive(Debug)]
pub(super) struct PrefixIndex {
    hash: HashFn,
    block_size: usize,
    /// First node per bucket. As many buckets as the pool has blocks (rounded up to a power of two): never rehashed.
    buckets: Vec<u32>,
    /// Nodes and, beside them, the tokens of each; these grow with use and their slots are reused.
    nodes: Vec<Node>,
    tokens: Vec<u32>,
    unused: Vec<u32>,
    roots: HashMap<Arc<Domain>, u32>,
    domains: HashMap<u32, Arc<Domain>>,
    last_id: u64,
}

impl PrefixIndex {
    pub fn new(num_blocks: usize, block_size: usize, hash: HashFn) -> Result<Self> {
        Ok(Self {
            hash,
            block_size,
            buckets: filled_vec(num_blocks.next_power_of_two(), NIL, "prefix index")?,
            nodes: Vec::new(),
            tokens: Vec::new(),
            unused: Vec::new(),
            roots: HashMap::new(),
            domains: HashMap::new(),
            last_id: 0,
        })
    }

    /// The root of a domain that has published blocks.
    pub fn root(&self, domain: &Domain) -> Option<Link> {
        self.roots.get(domain).map(|&slot| self.link(slot))
    }

    /// The root of a domain, made if need be. The caller inserts below a root that it made: roots are never childless.
    pub fn root_or_insert(&mut self, domain: &Arc<Domain>) -> Link {
        if let Some(root) = self.root(domain) {
            return root;
        }
        let root = self.new_node(domain.hash(&[]), Link::NONE, NIL);
        self.roots.insert(Arc::clone(domain), root.slot);
        self.domains.insert(root.slot, Arc::clone(domain));
        root
    }

    /// The node below `parent`, which must be alive, with exactly these tokens.
    pub fn find(&self, parent: Link, tokens: &[u32]) -> Option<Link> {
        let first = self.nodes[parent.slot as usize].first_child;
        if first == NIL {
            return None;
        }
        // Most chains do not branch: then neither the hash nor its bucket (a far access) is needed.
        if self.tokens(first) == tokens {
            return Some(self.link(first));
        }
        if self.nodes[first as usize].next_sibling == NIL {
            return None;
        }
        let hash = self.hash(parent, tokens);
        let mut slot = self.buckets[self.bucket(hash)];
        while slot != NIL {
            let node = &self.nodes[slot as usize];
            if node.hash == hash && node.parent == parent && self.tokens(slot) == tokens {
                return Some(self.link(slot));
            }
            slot = node.next_in_bucket;
        }
        None
    }

    /// Calls `found` with the blocks of the longest published prefix, whole blocks and at most all but the last token;
    /// the node of the last one, or [`Link::NONE`].
    pub fn longest_prefix(&self, domain: &Domain, token_ids: &[u32], mut found: impl FnMut(BlockId)) -> Link {
        let mut last = Link::NONE;
        let (Some(mut at), Some((_, before_last))) = (self.root(domain), token_ids.split_last()) else { return last };
        for tokens in before_last.chunks_exact(self.block_size) {
            let Some(next) = self.find(at, tokens) else { break };
            found(self.block(next));
            (at, last) = (next, next);
        }
        last
    }

    /// Publishes a block below `parent`, where no node with these tokens may be.
    pub fn insert(&mut self, parent: Link, tokens: &[u32], block: BlockId) -> Link {
        let hash = self.hash(parent, tokens);
        let link = self.new_node(hash, parent, block.raw());
        let slot = link.slot;
        self.tokens[slot as usize * self.block_size..][..self.block_size].copy_from_slice(tokens);
        let bucket = self.bucket(hash);
        self.nodes[slot as usize].next_in_bucket = std::mem::replace(&mut self.buckets[bucket], slot);
        let next = std::mem::replace(&mut self.nodes[parent.slot as usize].first_child, slot);
        self.nodes[slot as usize].next_sibling = next;
        if next != NIL {
            self.nodes[next as usize].prev_sibling = slot;
        }
        link
    }

    /// Whether the node that this link was made for is still there.
    pub fn is_alive(&self, link: Link) -> bool {
        self.nodes.get(link.slot as usize).is_some_and(|node| node.id == link.id && link.id != 0)
    }

    /// The block of a node that is alive and not a root.
    pub fn block(&self, link: Link) -> BlockId {
        BlockId::new(self.nodes[link.slot as usize].block)
    }

    /// `steps` nodes up from a node that is at least as deep; [`Link::NONE`] if it is gone.
    pub fn ancestor(&self, mut link: Link, steps: usize) -> Link {
        if !self.is_alive(link) {
            return Link::NONE;
        }
        for _ in 0..steps {
            link = self.nodes[link.slot as usize].parent;
        }
        link
    }

    /// Removes a node and everything below it, leaves first; `removed` hears of every block. A root that loses its
    /// last child goes too.
    pub fn remove(&mut self, top: u32, mut removed: impl FnMut(BlockId)) {
        let mut at = top;
        loop {
            let Node { first_child, parent, block, .. } = self.nodes[at as usize];
            if first_child != NIL {
                at = first_child;
                continue;
            }
            self.remove_leaf(at);
            if block != NIL {
                removed(BlockId::new(block));
            }
            if at == top {
                if let Some(node) = self.nodes.get(parent.slot as usize)
                    && node.block == NIL
                    && node.first_child == NIL
                {
                    self.remove_leaf(parent.slot);
                }
                return;
            }
            at = parent.slot;
        }
    }

    /// Removes everything. O(published blocks).
    pub fn clear(&mut self, mut removed: impl FnMut(BlockId)) {
        let roots: Vec<u32> = self.domains.keys().copied().collect();
        for root in roots {
            self.remove(root, &mut removed);
        }
    }

    fn remove_leaf(&mut self, slot: u32) {
        let Node { hash, parent, block, next_in_bucket, prev_sibling, next_sibling, .. } = self.nodes[slot as usize];
        if block == NIL {
            if let Some(domain) = self.domains.remove(&slot) {
                self.roots.remove(&domain);
            }
        } else {
            let bucket = self.bucket(hash);
            let mut at = self.buckets[bucket];
            if at == slot {
                self.buckets[bucket] = next_in_bucket;
            } else {
                while self.nodes[at as usize].next_in_bucket != slot {
                    at = self.nodes[at as usize].next_in_bucket;
                }
                self.nodes[at as usize].next_in_bucket = next_in_bucket;
            }
            match prev_sibling {
                NIL => self.nodes[parent.slot as usize].first_child = next_sibling,
                prev => self.nodes[prev as usize].next_sibling = next_sibling,
            }
            if next_sibling != NIL {
                self.nodes[next_sibling as usize].prev_sibling = prev_sibling;
            }
        }
        self.nodes[slot as usize].id = 0;
        self.unused.push(slot);
    }

    fn new_node(&mut self, hash: u128, parent: Link, block: u32) -> Link {
        self.last_id += 1;
        let id = self.last_id;
        let node = Node {
            hash,
            id,
            parent,
            block,
            next_in_bucket: NIL,
            first_child: NIL,
            prev_sibling: NIL,
            next_sibling: NIL,
        };
        let slot = match self.unused.pop() {
            Some(slot) => {
                self.nodes[slot as usize] = node;
                slot
            }
            None => {
                self.nodes.push(node);
                self.tokens.resize(self.nodes.len() * self.block_size, 0);
                (self.nodes.len() - 1) as u32
            }
        };
        Link { slot, id }
    }

    /// Hash of the block with these tokens below `parent`, which must be alive.
    fn hash(&self, parent: Link, tokens: &[u32]) -> u128 {
        (self.hash)(self.nodes[parent.slot as usize].hash, tokens)
    }

    fn bucket(&self, hash: u128) -> usize {
        hash as usize & (self.buckets.len() - 1)
    }

    fn link(&self, slot: u32) -> Link {
        Link { slot, id: self.nodes[slot as usize].id }
    }

    pub(super) fn tokens(&self, slot: u32) -> &[u32] {
        &self.tokens[slot as usize * self.block_size..][..self.block_size]
    }

    /// Slots of the nodes from a live one up to the first block of its chain, and the domain of the chain.
    pub(super) fn path(&self, mut slot: u32) -> (Vec<u32>, Option<&Domain>) {
        let mut slots = Vec::new();
        while self.nodes[slot as usize].block != NIL {
            slots.push(slot);
            slot = self.nodes[slot as usize].parent.slot;
        }
        (slots, self.domains.get(&slot).map(Arc::as_ref))
    }

    /// Every invariant of the tree alone; `visit(slot, block)` sees each published block. O(buckets + nodes).
    pub fn check(&self, mut visit: impl FnMut(u32, BlockId) -> Result<(), String>) -> Result<(), String> {
        let mut in_bucket = vec![false; self.nodes.len()];
        for (bucket, &first) in self.buckets.iter().enumerate() {
            let mut slot = first;
            while slot != NIL {
                let node = &self.nodes[slot as usize];
                if node.id == 0 || self.bucket(node.hash) != bucket || in_bucket[slot as usize] {
                    return Err(format!("node {slot} is in the wrong bucket: {node:?}"));
                }
                in_bucket[slot as usize] = true;
                slot = node.next_in_bucket;
            }
        }
        let mut num_children = 0;
        let mut num_blocks = 0;
        for slot in 0..self.nodes.len() as u32 {
            let node = &self.nodes[slot as usize];
            if in_bucket[slot as usize] != (node.id != 0 && node.block != NIL) {
                return Err(format!("node {slot} cannot be found by its hash: {node:?}"));
            }
            if node.id == 0 {
                continue;
            }
            if node.block == NIL {
                if node.first_child == NIL || self.domains.get(&slot).and_then(|d| self.roots.get(d)) != Some(&slot) {
                    return Err(format!("root {slot} is childless or not listed"));
                }
            } else {
                if !self.is_alive(node.parent) {
                    return Err(format!("node {slot} is an orphan: {node:?}"));
                }
                if node.hash != self.hash(node.parent, self.tokens(slot)) {
                    return Err(format!("node {slot} has a hash that its tokens do not have"));
                }
                num_blocks += 1;
                visit(slot, BlockId::new(node.block))?;
            }
            let (mut child, mut prev) = (node.first_child, NIL);
            while child != NIL {
                let below = &self.nodes[child as usize];
                if below.id == 0 || below.parent != self.link(slot) || below.prev_sibling != prev {
                    return Err(format!("node {child} is not a child of node {slot}: {below:?}"));
                }
                num_children += 1;
                (prev, child) = (child, below.next_sibling);
            }
        }
        let live = num_blocks + self.roots.len();
        if num_children != num_blocks || self.roots.len() != self.domains.len() {
            return Err(format!("{num_blocks} nodes have a parent, {num_children} are children"));
        }
        if live + self.unused.len() != self.nodes.len() {
            return Err(format!("{live} nodes live, {} slots unused, of {}", self.unused.len(), self.nodes.len()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_found_only_below_its_own_parent_and_ids_do_not_come_back() {
        let mut index = PrefixIndex::new(8, 2, |_, _| 5).unwrap();
        let domain = Arc::new(Domain::default());
        let root = index.root_or_insert(&domain);
        let a = index.insert(root, &[1, 2], BlockId::new(0));
        let b = index.insert(a, &[1, 2], BlockId::new(1));
        let c = index.insert(root, &[3, 4], BlockId::new(2));
        assert_eq!(index.find(root, &[1, 2]), Some(a));
        assert_eq!(index.find(a, &[1, 2]), Some(b));
        assert_eq!((index.find(b, &[1, 2]), index.find(c, &[1, 2])), (None, None));
        index.check(|_, _| Ok(())).unwrap();
        let mut gone = Vec::new();
        index.remove(a.slot, |block| gone.push(block.index()));
        assert_eq!(gone, [1, 0]);
        let again = index.insert(root, &[1, 2], BlockId::new(3));
        assert!(!index.is_alive(a) && !index.is_alive(b) && index.is_alive(again));
        assert_eq!(index.find(again, &[1, 2]), None);
        index.check(|_, _| Ok(())).unwrap();
        index.clear(|_| ());
        assert_eq!(index.root(&domain), None);
        index.check(|_, _| Ok(())).unwrap();
    }
}
