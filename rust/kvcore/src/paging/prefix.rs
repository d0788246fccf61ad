//! Which block holds which tokens: a tree of published blocks, found by chained hash, believed only by comparison.
//!
//! ```text
//! root(domain)  --tokens 0..B-->  node  --tokens B..2B-->  node --some tokens--> partial node     one node = one
//! hash(node) = H(hash(parent), tokens)                                                  published block per group
//! find(parent, tokens): the parent's topmost child, if it has these tokens; else, over the chain of bucket hash: the
//!                       node with this hash AND this parent AND these tokens
//! best_match(parent, tokens): see siblings.rs
//! remove(node): its descendants first, because without it nobody could reach them; then parents that have become
//!               useless, that is without a child and without a block
//! ```
//!
//! A node knows its parent by slot and by an id that is never given twice, so a slot that was reused for another prefix
//! is not mistaken for the old one. Were every hash equal, answers would still be right (only slower). A node with fewer
//! tokens than a block is a leaf and in no bucket. As a rule no node's tokens are the beginning of a sibling's; they
//! never are equal.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use super::block::{BlockId, NIL, SlotId};
use super::hash::HashFn;
use super::key::OwnedKey;
use super::pool::filled_vec;
use super::retention::ClassId;
use super::siblings::CHILDREN;
use super::transfer::Place;
use crate::Result;

/// Tells the slots of the second tier from blocks.
const SLOT: u32 = 1 << 31;

fn decode(place: u32) -> Place {
    match place {
        NIL => Place::Nowhere,
        slot if slot & SLOT != 0 => Place::Slot(SlotId::new(slot & !SLOT)),
        block => Place::Block(BlockId::new(block)),
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

/// A published block of every group, or (without tokens) the root of a domain. One cache line.
#[derive(Debug)]
struct Node {
    /// Only of roots and full nodes.
    hash: u128,
    /// 0 while the slot is unused.
    id: u64,
    parent: Link,
    next_in_bucket: u32,
    /// See `siblings.rs`.
    links: [u32; 3],
    /// Tokens of it; 0 for a root.
    filled: u32,
    class: ClassId,
}

/// What `remove` tells of a node that went.
pub(super) struct Gone<'a> {
    places: &'a [u32],
    pub class: ClassId,
    /// 0 unless it was asked for.
    pub hash: u128,
}

impl Gone<'_> {
    /// Where its blocks were, group by group.
    pub fn places(&self) -> impl Iterator<Item = Place> + '_ {
        self.places.iter().map(|&place| decode(place))
    }
}

/// The tree of published blocks.
#[derive(Debug)]
pub(super) struct PrefixIndex {
    hash: HashFn,
    block_size: usize,
    num_groups: usize,
    seed: u64,
    /// First node per bucket. As many buckets as the largest pool has blocks (rounded up to a power of two): never
    /// rehashed.
    buckets: Vec<u32>,
    /// Nodes and, beside them, the tokens and places of each; these grow with use and their slots are reused.
    nodes: Vec<Node>,
    tokens: Vec<u32>,
    places: Vec<u32>,
    unused: Vec<u32>,
    /// What all keys share.
    base: Vec<u8>,
    roots: HashMap<Arc<OwnedKey>, u32>,
    domains: HashMap<u32, Arc<OwnedKey>>,
    last_id: u64,
}

impl PrefixIndex {
    pub fn new(num_buckets: usize, block_size: usize, num_groups: usize, hash: HashFn, base: Vec<u8>) -> Result<Self> {
        Ok(Self {
            hash,
            block_size,
            num_groups,
            seed: RandomState::new().hash_one(0),
            buckets: filled_vec(num_buckets.next_power_of_two(), NIL, "prefix index")?,
            nodes: Vec::new(),
            tokens: Vec::new(),
            places: Vec::new(),
            unused: Vec::new(),
            base,
            roots: HashMap::new(),
            domains: HashMap::new(),
            last_id: 0,
        })
    }

    /// The root of a domain that has published blocks.
    pub fn root(&self, domain: &OwnedKey) -> Option<Link> {
        self.roots.get(domain).map(|&slot| self.link(slot))
    }

    /// The root of a domain, made if need be. The caller inserts below a root that it made, or prunes it: roots are never
    /// childless.
    pub fn root_or_insert(&mut self, domain: &Arc<OwnedKey>) -> Link {
        if let Some(root) = self.root(domain) {
            return root;
        }
        let root = self.new_node(Link::NONE, &[], 0);
        self.nodes[root.slot as usize].hash = domain.hash(&self.base);
        self.roots.insert(Arc::clone(domain), root.slot);
        self.domains.insert(root.slot, Arc::clone(domain));
        root
    }

    /// The node below `parent`, which must be alive, with exactly these tokens: as many as a block has.
    pub fn find(&self, parent: Link, tokens: &[u32]) -> Option<Link> {
        let first = self.nodes[parent.slot as usize].links[CHILDREN];
        if first == NIL {
            return None;
        }
        // Most chains do not branch: then neither the hash nor its bucket (a far access) is needed.
        if self.tokens(first) == tokens {
            return Some(self.link(first));
        }
        if self.nodes[first as usize].links[..CHILDREN] == [NIL, NIL] {
            return None;
        }
        let hash = self.hash(parent.slot, tokens);
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

    /// Publishes 1 to `block_size` tokens below `parent`, where no node with equal tokens may be. Its blocks are set with
    /// `set_place`.
    pub fn insert(&mut self, parent: Link, tokens: &[u32], class: ClassId) -> Link {
        let link = self.new_node(parent, tokens, class);
        self.attach(parent.slot, link.slot);
        self.hash_if_full(link.slot);
        link
    }

    /// Gives a partial node more tokens, which begin with those that it has.
    pub fn extend(&mut self, slot: u32, tokens: &[u32]) {
        let parent = self.nodes[slot as usize].parent.slot;
        self.detach(parent, slot);
        self.set_tokens(slot, tokens);
        self.attach(parent, slot);
        self.hash_if_full(slot);
    }

    /// Whether the node that this link was made for is still there.
    pub fn is_alive(&self, link: Link) -> bool {
        self.nodes.get(link.slot as usize).is_some_and(|node| node.id == link.id && link.id != 0)
    }

    /// The link to what is in this slot now.
    pub fn link(&self, slot: u32) -> Link {
        Link { slot, id: self.nodes[slot as usize].id }
    }

    /// The parent of a live node; [`Link::NONE`] for a root.
    pub fn parent(&self, slot: u32) -> Link {
        self.nodes[slot as usize].parent
    }

    /// Whether the slot holds a root.
    pub fn is_root(&self, slot: u32) -> bool {
        self.nodes[slot as usize].filled == 0
    }

    /// Whether a live node has children.
    pub fn has_children(&self, slot: u32) -> bool {
        self.nodes[slot as usize].links[CHILDREN] != NIL
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

    /// Where the node's block of a group is.
    pub fn place(&self, slot: u32, group: usize) -> Place {
        decode(self.places[slot as usize * self.num_groups + group])
    }

    /// Says where the node's block of a group is.
    pub fn set_place(&mut self, slot: u32, group: usize, place: Place) {
        self.places[slot as usize * self.num_groups + group] = match place {
            Place::Nowhere => NIL,
            Place::Block(block) => block.raw(),
            Place::Slot(slot) => slot.raw() | SLOT,
        };
    }

    /// The retention of a node.
    pub fn class(&self, slot: u32) -> ClassId {
        self.nodes[slot as usize].class
    }

    /// Changes the retention of a node.
    pub fn set_class(&mut self, slot: u32, class: ClassId) {
        self.nodes[slot as usize].class = class;
    }

    /// The tokens of a node.
    pub fn tokens(&self, slot: u32) -> &[u32] {
        &self.tokens[slot as usize * self.block_size..][..self.nodes[slot as usize].filled as usize]
    }

    /// Chained hash of a live node, of a partial one too.
    pub fn hash_of(&self, slot: u32) -> u128 {
        let node = &self.nodes[slot as usize];
        if node.filled == 0 || node.filled as usize == self.block_size {
            return node.hash;
        }
        self.hash(node.parent.slot, self.tokens(slot))
    }

    /// Slots that were ever in use: every live node is in `0..` this.
    pub fn num_slots(&self) -> u32 {
        self.nodes.len() as u32
    }

    /// Whether a node is in this slot.
    pub fn is_used(&self, slot: u32) -> bool {
        self.nodes[slot as usize].id != 0
    }

    /// Removes a node and everything below it, leaves first, then what is useless above it; `removed` hears of every
    /// node that is not a root.
    pub fn remove(&mut self, top: u32, hashes: bool, mut removed: impl FnMut(&Gone<'_>)) {
        let parent = self.nodes[top as usize].parent.slot;
        let mut at = top;
        loop {
            let Node { parent, links, .. } = self.nodes[at as usize];
            if links[CHILDREN] != NIL {
                at = links[CHILDREN];
                continue;
            }
            self.remove_leaf(at, hashes, &mut removed);
            if at == top {
                break;
            }
            at = parent.slot;
        }
        self.prune(parent, removed);
    }

    /// Removes a node that has neither blocks nor children, and then its parents that have none.
    pub fn prune(&mut self, mut slot: u32, mut removed: impl FnMut(&Gone<'_>)) {
        while let Some(&Node { id, parent, links, .. }) = self.nodes.get(slot as usize)
            && id != 0
            && links[CHILDREN] == NIL
            && self.places[slot as usize * self.num_groups..][..self.num_groups].iter().all(|&place| place == NIL)
        {
            self.remove_leaf(slot, false, &mut removed);
            slot = parent.slot;
        }
    }

    fn remove_leaf(&mut self, slot: u32, hashes: bool, removed: &mut impl FnMut(&Gone<'_>)) {
        let Node { hash, parent, next_in_bucket, filled, class, .. } = self.nodes[slot as usize];
        if filled == 0 {
            if let Some(domain) = self.domains.remove(&slot) {
                self.roots.remove(&domain);
            }
        } else {
            let told = if hashes { self.hash_of(slot) } else { 0 };
            self.detach(parent.slot, slot);
            if filled as usize == self.block_size {
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
            }
            let places = &self.places[slot as usize * self.num_groups..][..self.num_groups];
            removed(&Gone { places, class, hash: told });
        }
        self.nodes[slot as usize].id = 0;
        self.unused.push(slot);
    }

    fn new_node(&mut self, parent: Link, tokens: &[u32], class: ClassId) -> Link {
        self.last_id += 1;
        let id = self.last_id;
        let node = Node { hash: 0, id, parent, next_in_bucket: NIL, links: [NIL; 3], filled: 0, class };
        let slot = match self.unused.pop() {
            Some(slot) => {
                self.nodes[slot as usize] = node;
                slot
            }
            None => {
                self.nodes.push(node);
                self.tokens.resize(self.nodes.len() * self.block_size, 0);
                self.places.resize(self.nodes.len() * self.num_groups, NIL);
                (self.nodes.len() - 1) as u32
            }
        };
        self.places[slot as usize * self.num_groups..][..self.num_groups].fill(NIL);
        self.set_tokens(slot, tokens);
        Link { slot, id }
    }

    fn set_tokens(&mut self, slot: u32, tokens: &[u32]) {
        self.tokens[slot as usize * self.block_size..][..tokens.len()].copy_from_slice(tokens);
        self.nodes[slot as usize].filled = tokens.len() as u32;
    }

    /// Puts a node that has all its tokens into its bucket.
    fn hash_if_full(&mut self, slot: u32) {
        if self.tokens(slot).len() == self.block_size {
            let hash = self.hash(self.nodes[slot as usize].parent.slot, self.tokens(slot));
            let bucket = self.bucket(hash);
            let next = std::mem::replace(&mut self.buckets[bucket], slot);
            let node = &mut self.nodes[slot as usize];
            (node.hash, node.next_in_bucket) = (hash, next);
        }
    }

    /// Hash of these tokens below `parent`, a live root or full node.
    fn hash(&self, parent: u32, tokens: &[u32]) -> u128 {
        (self.hash)(self.nodes[parent as usize].hash, tokens)
    }

    fn bucket(&self, hash: u128) -> usize {
        hash as usize & (self.buckets.len() - 1)
    }

    pub(super) fn link_of(&self, (slot, side): (u32, usize)) -> u32 {
        self.nodes[slot as usize].links[side]
    }

    pub(super) fn set_link(&mut self, (slot, side): (u32, usize), to: u32) {
        self.nodes[slot as usize].links[side] = to;
    }

    /// A number that looks random and never changes while the node lives (the finaliser of SplitMix64).
    pub(super) fn priority(&self, slot: u32) -> u64 {
        let mut x = self.nodes[slot as usize].id ^ self.seed;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    /// Roots and their domains.
    pub(super) fn domains(&self) -> impl Iterator<Item = (u32, &Arc<OwnedKey>)> {
        self.domains.iter().map(|(&slot, domain)| (slot, domain))
    }

    /// Slots of the nodes from a live one up to the first block of its chain, and the domain of the chain.
    pub(super) fn path(&self, mut slot: u32) -> (Vec<u32>, Option<&OwnedKey>) {
        let mut slots = Vec::new();
        while !self.is_root(slot) {
            slots.push(slot);
            slot = self.nodes[slot as usize].parent.slot;
        }
        (slots, self.domains.get(&slot).map(Arc::as_ref))
    }

    /// Every invariant of the tree alone; `visit(slot)` sees each node that is not a root. O(buckets + nodes).
    pub fn check(&self, mut visit: impl FnMut(u32) -> Result<(), String>) -> Result<(), String> {
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
        let (mut num_children, mut num_nodes) = (0, 0);
        for slot in 0..self.num_slots() {
            let node = &self.nodes[slot as usize];
            let full = node.filled as usize == self.block_size;
            if in_bucket[slot as usize] != (node.id != 0 && full) {
                return Err(format!("node {slot} cannot be found by its hash: {node:?}"));
            }
            if node.id == 0 {
                continue;
            }
            if node.filled == 0 {
                if !self.has_children(slot) || self.domains.get(&slot).and_then(|d| self.roots.get(d)) != Some(&slot) {
                    return Err(format!("root {slot} is childless or not listed"));
                }
            } else {
                if !self.is_alive(node.parent) {
                    return Err(format!("node {slot} is an orphan: {node:?}"));
                }
                if full && node.hash != self.hash(node.parent.slot, self.tokens(slot)) {
                    return Err(format!("node {slot} has a hash that its tokens do not have"));
                }
                if !full && self.has_children(slot) {
                    return Err(format!("node {slot} has children but not all its tokens: {node:?}"));
                }
                num_nodes += 1;
                visit(slot)?;
            }
            num_children += self.check_children(slot)?;
            let mut strangers = 0;
            self.children(slot, |child| strangers += usize::from(self.parent(child) != self.link(slot)));
            if strangers > 0 {
                return Err(format!("{strangers} children of node {slot} have another parent"));
            }
        }
        let live = num_nodes + self.roots.len();
        if num_children != num_nodes || self.roots.len() != self.domains.len() {
            return Err(format!("{num_nodes} nodes have a parent, {num_children} are children"));
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

    fn index(hash: HashFn, block_size: usize) -> (PrefixIndex, Link, Arc<OwnedKey>) {
        let mut index = PrefixIndex::new(8, block_size, 1, hash, Vec::new()).unwrap();
        let domain = Arc::new(OwnedKey::default());
        let root = index.root_or_insert(&domain);
        (index, root, domain)
    }

    fn insert(index: &mut PrefixIndex, parent: Link, tokens: &[u32], block: u32) -> Link {
        let link = index.insert(parent, tokens, 0);
        index.set_place(link.slot, 0, Place::Block(BlockId::new(block)));
        link
    }

    #[test]
    fn a_node_is_found_only_below_its_own_parent_and_ids_do_not_come_back() {
        let (mut index, root, domain) = index(|_, _| 5, 2);
        let a = insert(&mut index, root, &[1, 2], 0);
        let b = insert(&mut index, a, &[1, 2], 1);
        let c = insert(&mut index, root, &[3, 4], 2);
        assert_eq!(index.find(root, &[1, 2]), Some(a));
        assert_eq!(index.find(a, &[1, 2]), Some(b));
        assert_eq!((index.find(b, &[1, 2]), index.find(c, &[1, 2])), (None, None));
        index.check(|_| Ok(())).unwrap();
        let mut gone = Vec::new();
        index.remove(a.slot, false, |node| gone.extend(node.places()));
        assert_eq!(gone, [1, 0].map(|block| Place::Block(BlockId::new(block))));
        let again = insert(&mut index, root, &[1, 2], 3);
        assert!(!index.is_alive(a) && !index.is_alive(b) && index.is_alive(again));
        assert_eq!(index.find(again, &[1, 2]), None);
        index.check(|_| Ok(())).unwrap();
        index.remove(again.slot, false, |_| ());
        index.remove(c.slot, false, |_| ());
        assert_eq!(index.root(&domain), None);
        index.check(|_| Ok(())).unwrap();
    }

    #[test]
    fn the_sibling_with_the_longest_common_beginning_is_found_among_many() {
        let (mut index, root, _) = index(|_, _| 5, 3);
        let mut nodes = Vec::new();
        // All words of 1 to 3 letters below 5, inserted in an order that jumps about.
        let words: Vec<Vec<u32>> = (0..125)
            .map(|i: u32| i * 47 % 125)
            .map(|i| vec![i % 5, i / 5 % 5, i / 25][..1 + i as usize % 3].to_vec())
            .collect();
        for (i, word) in words.iter().enumerate() {
            if index.neighbours(root.slot, word).1 == NIL || index.tokens(index.neighbours(root.slot, word).1) != word {
                nodes.push((insert(&mut index, root, word, i as u32), word.clone()));
            }
            if i % 3 == 2 {
                let (link, _) = nodes.swap_remove(i * 7 % nodes.len());
                index.remove(link.slot, false, |_| ());
            }
            index.check(|_| Ok(())).unwrap();
            for query in &words {
                let common = |word: &[u32]| word.iter().zip(query).take_while(|(a, b)| a == b).count();
                let best = nodes.iter().map(|(_, word)| common(word)).max().unwrap();
                let found = index.best_match(root.slot, query, |_| true);
                assert_eq!(found.map_or(0, |(_, len)| len), best);
                assert!(found.is_none_or(|(slot, len)| common(index.tokens(slot)) == len));
                let starts = nodes.iter().any(|(_, word)| word.starts_with(query));
                assert_eq!(index.starting_with(root.slot, query).is_some(), starts);
            }
        }
    }

    #[test]
    fn a_partial_node_grows_until_it_is_found_by_its_hash() {
        let (mut index, root, _) = index(super::super::hash::hash_block, 3);
        let other = insert(&mut index, root, &[1, 9, 9], 1);
        let node = insert(&mut index, root, &[1], 0);
        for len in 2..=3 {
            assert_eq!(index.find(root, &[1, 2, 3]), None);
            index.extend(node.slot, &[1, 2, 3][..len]);
            index.check(|_| Ok(())).unwrap();
        }
        assert_eq!((index.find(root, &[1, 2, 3]), index.find(root, &[1, 9, 9])), (Some(node), Some(other)));
    }
}
