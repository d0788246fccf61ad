//! K and V of an encoder's output: written once for a sequence, layer by layer, and shared by its forks.
#![forbid(unsafe_code)]

use std::collections::HashMap;

use super::{KvCache, Place};
use crate::paging::{BlockId, SeqId};
use crate::{Error, Result};

/// Which layers of an encoder's memory are written. The memory is named by its first block.
#[derive(Debug, Default)]
pub(super) struct Written(HashMap<BlockId, Vec<bool>>);

impl Written {
    /// Whether this layer of the memory that begins with `first` is written.
    pub fn has(&self, first: BlockId, index: usize) -> bool {
        self.0.get(&first).is_some_and(|layers| layers[index])
    }

    pub fn layers(&self, first: BlockId) -> Option<&[bool]> {
        self.0.get(&first).map(Vec::as_slice)
    }

    pub fn set(&mut self, first: BlockId, num_layers: usize, index: usize) {
        self.0.entry(first).or_insert_with(|| vec![false; num_layers])[index] = true;
    }

    /// A memory that begins with `first` begins anew.
    pub fn forget(&mut self, first: BlockId) {
        self.0.remove(&first);
    }
}

impl KvCache {
    /// Store an encoder's K and V in one layer of kind cross, `[encoder tokens, KV heads, head_dim]` each. The first
    /// layer that is written decides about the number of tokens and takes blocks for it, all or nothing.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another layer or shape, [`Error::InvalidHandle`], [`Error::OutOfBlocks`],
    /// [`Error::InvalidState`] for a layer that is written already.
    pub fn write_cross(&mut self, layer: usize, seq: SeqId, k: &[f32], v: &[f32]) -> Result<()> {
        self.reclaim_views();
        let (Place::Cross { index }, Some(store)) = (self.place(layer)?, &mut self.cross) else {
            return Err(Error::InvalidArgument(format!("write_cross: layer {layer} is not of kind cross")));
        };
        let l = *store.layout();
        let (k_row, v_row) = (l.num_kv_heads * l.k_dim, l.num_kv_heads * l.v_dim);
        let tokens = k.len() / k_row;
        if tokens == 0 || k.len() != tokens * k_row || v.len() != tokens * v_row {
            return Err(Error::InvalidArgument(format!(
                "k, v: expected at least one encoder token x {} KV heads x {} (K) and {} (V) dimensions, got {} and {} \
                 values",
                l.num_kv_heads,
                l.k_dim,
                l.v_dim,
                k.len(),
                v.len()
            )));
        }
        let (blocks, known) = self.manager.cross(seq)?;
        let blocks = if known == 0 {
            let blocks = self.manager.reserve_cross(seq, tokens)?.to_vec();
            self.cross_written.forget(blocks[0]);
            blocks
        } else if known != tokens {
            return Err(Error::InvalidArgument(format!(
                "k: expected the {known} encoder tokens of the layers before, got {tokens}"
            )));
        } else {
            blocks.to_vec()
        };
        if self.cross_written.has(blocks[0], index) {
            return Err(Error::InvalidState(format!("write_cross: layer {layer} of this sequence is written already")));
        }
        let slots = (0..tokens).map(|p| (blocks[p / l.block_size], p % l.block_size));
        store.write(self.level, index, slots, k, Some(v));
        self.cross_written.set(blocks[0], l.num_layers, index);
        Ok(())
    }

    /// Give a sequence the encoder's K and V of another one with the same encoder input, by reference, as forks have
    /// them. Errors, with nothing changed: [`Error::InvalidHandle`], [`Error::InvalidState`] if it has its own already,
    /// or the other has none.
    pub fn share_cross(&mut self, seq: SeqId, source: SeqId) -> Result<()> {
        self.reclaim_views();
        self.manager.share_cross(seq, source)
    }
}
