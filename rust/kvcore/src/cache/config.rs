//! What a cache is made of: groups of layers that keep their K and V in different ways.
#![forbid(unsafe_code)]

use std::time::Duration;

use crate::paging::{HashFn, Retention, hash_block};
use crate::storage::{KvDtype, Layout, ScaleMode, Scales};
use crate::{Error, Result};

/// How the layers of a group keep K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// All tokens.
    Full,
    /// A query at position p sees `p - window + 1 ..= p`; blocks wholly before that go back to the pool.
    SlidingWindow {
        /// Tokens that a query sees, its own among them.
        window: usize,
    },
    /// Multi-head latent attention (DeepSeek-V2, 2024): one row of `rank + rope_dim` values per token, of which the
    /// first `rank` are V, too.
    Latent {
        /// Width of the compressed vector.
        rank: usize,
        /// Width of the part that carries positions.
        rope_dim: usize,
    },
    /// K and V of an encoder's output: written once for a sequence, shared by its forks, seen whole by every query.
    Cross,
    /// Layers without K and V.
    None,
}

impl GroupKind {
    /// `full`, `sliding_window`, `latent`, `cross` or `none`.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::SlidingWindow { .. } => "sliding_window",
            Self::Latent { .. } => "latent",
            Self::Cross => "cross",
            Self::None => "none",
        }
    }

    /// The window of a sliding one.
    pub const fn window(&self) -> Option<usize> {
        match self {
            Self::SlidingWindow { window } => Some(*window),
            _ => None,
        }
    }
}

/// Layers that keep K and V in the same way, with a pool of blocks of their own.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupSpec {
    /// How.
    pub kind: GroupKind,
    /// Which layers, each once.
    pub layers: Vec<usize>,
    /// KV heads of a layer; 1 for latent ones.
    pub num_kv_heads: usize,
    /// Width of a head of K; for latent ones that of the whole row.
    pub head_dim: usize,
    /// Width of a head of V.
    pub v_head_dim: usize,
    /// Blocks of the pool.
    pub num_blocks: usize,
    /// Static scales of fp8, `[layers, KV heads]`; `None`: 1.
    pub scales: Option<Scales>,
}

impl GroupSpec {
    pub(super) fn layout(&self, config: &CacheConfig) -> Layout {
        Layout {
            num_layers: self.layers.len(),
            num_blocks: self.num_blocks,
            num_kv_heads: self.num_kv_heads,
            k_dim: self.head_dim,
            v_dim: self.v_head_dim,
            latent: matches!(self.kind, GroupKind::Latent { .. }),
            block_size: config.block_size,
            dtype: config.dtype,
            scale_mode: config.scale_mode,
        }
    }
}

/// What a cache is made of.
#[derive(Clone, Debug)]
pub struct CacheConfig {
    /// The groups; every layer from 0 to the last is in exactly one.
    pub groups: Vec<GroupSpec>,
    /// Tokens of a block.
    pub block_size: usize,
    /// Format of the values.
    pub dtype: KvDtype,
    /// Where scales come from.
    pub scale_mode: ScaleMode,
    /// Whether written tokens may be found by later sequences.
    pub enable_prefix_caching: bool,
    /// A cached prefix of fewer tokens is not reused.
    pub min_prefix_tokens: usize,
    /// Tokens that [`truncate`](super::KvCache::truncate) may take back from a sequence with sliding windows.
    pub max_rollback: usize,
    /// How long prefixes are kept, unless said otherwise for one.
    pub retention: Retention,
    /// Share of a group's blocks that may be pinned.
    pub max_pinned_fraction: f64,
    /// Events that are kept until they are asked for; 0 for none.
    pub max_events: usize,
    /// Bytes of the second tier; 0 for none.
    pub spill_bytes: usize,
    /// What the K and V depend on besides tokens and keys: the model. Saved files carry it.
    pub fingerprint: String,
    /// Hash of the prefix index; tests replace it.
    pub hash: HashFn,
}

impl CacheConfig {
    /// Full attention in all layers, with the usual settings.
    pub fn new(
        num_layers: usize,
        num_kv_heads: usize,
        head_dim: usize,
        num_blocks: usize,
        block_size: usize,
        dtype: KvDtype,
    ) -> Self {
        Self {
            groups: vec![GroupSpec {
                kind: GroupKind::Full,
                layers: (0..num_layers).collect(),
                num_kv_heads,
                head_dim,
                v_head_dim: head_dim,
                num_blocks,
                scales: None,
            }],
            block_size,
            dtype,
            scale_mode: dtype.default_scale_mode(),
            enable_prefix_caching: true,
            min_prefix_tokens: 0,
            max_rollback: 0,
            retention: Retention { ttl: Some(Duration::from_secs(300)), priority: 50 },
            max_pinned_fraction: 0.5,
            max_events: 0,
            spill_bytes: 0,
            fingerprint: String::new(),
            hash: hash_block,
        }
    }

    /// Layers of all groups.
    pub fn num_layers(&self) -> usize {
        self.groups.iter().map(|group| group.layers.len()).sum()
    }

    /// Which group each layer is in, and the how-manieth it is there.
    pub(super) fn places(&self) -> Result<Vec<(usize, usize)>> {
        let total = self.num_layers();
        if total == 0 {
            return Err(Error::InvalidArgument("num_layers: expected at least 1, got 0".into()));
        }
        let mut places = vec![None; total];
        for (group, spec) in self.groups.iter().enumerate() {
            if spec.layers.is_empty() {
                return Err(Error::InvalidArgument(format!("groups[{group}]: expected at least one layer, got none")));
            }
            if spec.kind == (GroupKind::SlidingWindow { window: 0 }) {
                return Err(Error::InvalidArgument(format!("groups[{group}]: window: expected at least 1, got 0")));
            }
            for (index, &layer) in spec.layers.iter().enumerate() {
                let Some(place) = places.get_mut(layer) else {
                    return Err(Error::InvalidArgument(format!(
                        "groups[{group}]: layer {layer}: expected every layer from 0 to {} in one group, {total} in all",
                        total - 1
                    )));
                };
                if place.replace((group, index)).is_some() {
                    return Err(Error::InvalidArgument(format!("groups[{group}]: layer {layer} is in two groups")));
                }
            }
        }
        if self.groups.iter().filter(|group| group.kind == GroupKind::Cross).count() > 1 {
            return Err(Error::InvalidArgument("groups: expected at most one of kind cross, got more".into()));
        }
        // As many places as layers, none of them taken twice: all are taken.
        Ok(places.into_iter().flatten().collect())
    }
}
