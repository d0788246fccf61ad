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

use xxhash_rust::xxh3::xxh3_128;

use super::block::{BlockId, NIL};
use super::pool::filled_vec;
use crate::Result;

/// Hash of a block: its parent's hash and its token ids. A parameter so that a test can make all of them equal.
pub type HashFn = fn(parent: u128, tokens: &[u32]) -> u128;

/// The hash that is used unless a test asks otherwise: XXH3-128 over the parent's 16 bytes and 4 bytes a token, all
/// little-endian. Unambiguous, because all blocks of a cache have the same number of tokens.
pub fn hash_block(parent: u128, tokens: &[u32]) -> u128 {
    // The buffer is on the stack for the usual sizes; its length is a constant so that filling it is a few moves.
    match tokens.len() {
        0..=16 => hash_on_stack::<80>(parent, tokens),
        17..=64 => hash_on_stack::<272>(parent, tokens),
        _ => {
            let mut bytes = vec![0; 16 + 4 * tokens.len()];
            hash_in(&mut bytes, parent, tokens)
        }
    }
}

fn hash_on_stack<const N: usize>(parent: u128, tokens: &[u32]) -> u128 {
    hash_in(&mut [0; N][..16 + 4 * tokens.len()], parent, tokens)
}

fn hash_in(bytes: &mut [u8], parent: u128, tokens: &[u32]) -> u128 {
    let (head, tail) = bytes.split_at_mut(16);
    head.copy_from_slice(&parent.to_le_bytes());
    for (bytes, token) in tail.chunks_exact_mut(4).zip(tokens) {
        bytes.copy_from_slice(&token.to_le_bytes());
    }
    xxh3_128(bytes)
}

/// What must be equal besides the tokens before anything is shared.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct Domain {
    salt: Option<Box<[u8]>>,
}

impl Domain {
    pub fn new(salt: Option<&[u8]>) -> Self {
        Self { salt: salt.map(Into::into) }
    }

    /// Start of the hash chain. The first byte tells no salt from an empty one.
    fn hash(&self) -> u128 {
        let mut bytes = vec![u8::from(self.salt.is_some())];
        bytes.extend_from_slice(self.salt.as_deref().unwrap_or_default());
        xxh3_128(&bytes)
    }
}

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
        let root = self.new_node(domain.hash(), Link::NONE, NIL);
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
    fn no_salt_and_empty_salt_start_different_chains() {
        let salts: [Option<&[u8]>; 4] = [None, Some(b""), Some(b"\0"), Some(b"\x01")];
        let hashes: std::collections::HashSet<u128> = salts.iter().map(|&salt| Domain::new(salt).hash()).collect();
        assert_eq!(hashes.len(), 4);
    }

    #[test]
    fn the_buffer_size_does_not_change_the_hash() {
        for len in [0, 1, 16, 17, 64, 65, 300] {
            let tokens: Vec<u32> = (0..len).map(|i: u32| i.wrapping_mul(0x0102_0304)).collect();
            let mut bytes = 7u128.to_le_bytes().to_vec();
            bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
            assert_eq!(hash_block(7, &tokens), xxh3_128(&bytes));
        }
    }

    #[test]
    fn a_node_is_found_only_below_its_own_parent_and_ids_do_not_come_back() {
        let mut index = PrefixIndex::new(8, 2, |_, _| 5).unwrap();
        let domain = Arc::new(Domain::new(None));
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
