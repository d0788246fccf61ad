//! How a manager is made, and how a sequence is added.
#![forbid(unsafe_code)]

use super::hash::{HashFn, hash_block};
use super::key::Key;
use super::retention::Retention;
use crate::{Error, Result};

/// One group of layers: a pool of blocks of its own, and a block table of its own in every sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupConfig {
    /// Blocks of the pool, 1..2^31.
    pub num_blocks: usize,
    /// A query at position p sees `p - window + 1..=p`; None: it sees everything.
    pub window: Option<usize>,
}

/// How a manager is made.
#[derive(Debug, Clone)]
pub struct ManagerConfig {
    /// At least one.
    pub groups: Vec<GroupConfig>,
    /// Blocks of the pool for K and V of encoders; 0 if no layer needs them.
    pub cross_blocks: usize,
    /// Tokens of a block, at least 1.
    pub block_size: usize,
    /// Whether prefixes are found and published at all.
    pub enable_prefix_caching: bool,
    /// Hash of a block.
    pub hash: HashFn,
    /// A hit of fewer tokens counts as none.
    pub min_prefix_tokens: usize,
    /// Tokens that a truncate may take back although a window's blocks are returned.
    pub max_rollback: usize,
    /// Share of every group's pool that may be pinned, 0..=1.
    pub max_pinned_fraction: f64,
    /// For prefixes that ask for nothing else.
    pub retention: Retention,
    /// Events kept between two calls of `take_events`; 0: none are noted.
    pub max_events: usize,
    /// Slots of the second tier of every group; 0: there is none.
    pub spill_slots: usize,
    /// What K and V of every prompt of this cache depend on, as scales.
    pub key: Vec<u8>,
}

impl ManagerConfig {
    /// One group that keeps all tokens, prefix caching with the usual hash, and nothing of the rest.
    pub fn new(num_blocks: usize, block_size: usize) -> Self {
        Self {
            groups: vec![GroupConfig { num_blocks, window: None }],
            cross_blocks: 0,
            block_size,
            enable_prefix_caching: true,
            hash: hash_block,
            min_prefix_tokens: 0,
            max_rollback: 0,
            max_pinned_fraction: 0.5,
            retention: Retention::default(),
            max_events: 0,
            spill_slots: 0,
            key: Vec::new(),
        }
    }

    pub(super) fn validate(&self) -> Result<()> {
        let wrong = |what: String| Err(Error::InvalidArgument(what));
        let Self { groups, block_size, max_pinned_fraction, .. } = self;
        if groups.is_empty() || groups.len() > usize::from(u16::MAX) {
            return wrong(format!("groups: expected 1 to 65535, got {}", groups.len()));
        }
        let largest = groups.iter().map(|group| group.num_blocks).max().unwrap_or(0).max(self.cross_blocks);
        if *block_size == 0 || u32::try_from(*block_size).is_err() || largest.checked_mul(*block_size).is_none() {
            return wrong(format!("block_size must be 1 or more and addressable, got {block_size}"));
        }
        if let Some(group) = groups.iter().position(|group| group.window == Some(0)) {
            return wrong(format!("the window of group {group}: expected 1 token or more, got 0"));
        }
        if !(0.0..=1.0).contains(max_pinned_fraction) {
            return wrong(format!("max_pinned_fraction: expected 0 to 1, got {max_pinned_fraction:?}"));
        }
        Ok(())
    }
}

/// How a sequence is added.
#[derive(Debug, Clone, Copy)]
pub struct AddOptions<'a> {
    /// What must be equal besides the tokens.
    pub key: Key<'a>,
    /// False: the sequence neither reads nor leaves prefixes.
    pub use_prefix: bool,
    /// In place of the cache's own.
    pub min_prefix_tokens: Option<usize>,
    /// At least this for the prefix that is found and what is published after it; None: what is found keeps its own,
    /// what is published gets the cache's.
    pub retention: Option<Retention>,
}

impl Default for AddOptions<'_> {
    fn default() -> Self {
        Self { key: Key::default(), use_prefix: true, min_prefix_tokens: None, retention: None }
    }
}

impl<'a> AddOptions<'a> {
    /// The usual ones, under a salt.
    pub fn salted(salt: Option<&'a [u8]>) -> Self {
        Self { key: Key { salt, ..Key::default() }, ..Self::default() }
    }
}
