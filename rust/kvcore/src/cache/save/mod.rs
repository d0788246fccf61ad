//! The cache and files: one sequence, or all cached prefixes.
//!
//! ```text
//! save      tokens, key, and the raw blocks of each group; slots behind the last token are zeros, for what stands there
//!           may be somebody else's
//! load      all of the file is judged and all blocks are counted before anything changes; what is cached already is
//!           shared, other blocks are filled, then published
//! prefixes  the published blocks as a tree, parents before children; they come back as cached blocks
//! ```
#![forbid(unsafe_code)]

mod keys;
mod prefixes;
mod sequence;

use super::{GroupKind, KvCache};
use crate::storage::Scales;
use crate::storage::persist::Fingerprint;

impl KvCache {
    /// What a file's bytes depend on: a file with another one is refused.
    fn fingerprint(&self) -> Fingerprint {
        let mut fields = Fingerprint::new()
            .with("model", &self.config.fingerprint)
            .with("dtype", self.config.dtype.name())
            .with("scale_mode", self.config.scale_mode.name())
            .with("block_size", self.config.block_size.to_string())
            .with("num_layers", self.config.num_layers().to_string());
        let mut paged = self.stores.iter();
        for (number, spec) in self.config.groups.iter().enumerate() {
            let store = match spec.kind {
                GroupKind::None => None,
                GroupKind::Cross => self.cross.as_ref(),
                _ => paged.next(),
            };
            let window = spec.kind.window().map_or_else(String::new, |window| format!(" of {window}"));
            let shape = format!(
                "{}{window}, layers {:?}, {} KV heads x {} / {}",
                spec.kind.name(),
                spec.layers,
                spec.num_kv_heads,
                spec.head_dim,
                spec.v_head_dim
            );
            fields = fields.with(format!("group.{number}"), shape);
            if let Some(store) = store {
                fields = fields.with(format!("scales.{number}"), scales_name(store.scales()));
            }
        }
        fields
    }
}

/// Scales in a few characters: two tables differ if and only if (but for chance) their names do.
fn scales_name(scales: &Scales) -> String {
    if scales.k.iter().chain(&scales.v).all(|&scale| scale == 1.0) {
        return "1".into();
    }
    let bytes: Vec<u8> = scales.k.iter().chain(&scales.v).flat_map(|scale| scale.to_le_bytes()).collect();
    format!("{:032x}", xxhash_rust::xxh3::xxh3_128(&bytes))
}
