//! Blocks without what stands behind their last token: it may be another sequence's, and must not get into a file.
#![forbid(unsafe_code)]

use super::layout::Layout;
use super::store::KvStore;
use crate::Result;
use crate::paging::BlockId;
use crate::simd::Level;

/// An arena of one block, in which copies are cleaned.
pub struct Cleaner {
    store: KvStore,
    zeros: Vec<f32>,
}

impl Cleaner {
    /// For blocks of this store.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn new(of: &KvStore) -> Result<Self> {
        let layout = Layout { num_blocks: 1, ..*of.layout() };
        let row = layout.num_kv_heads * layout.k_dim.max(layout.v_dim);
        Ok(Self { store: KvStore::new(layout, of.scales().clone())?, zeros: vec![0.0; row * layout.block_size] })
    }

    /// A block's bytes with zeros behind its first `tokens` tokens.
    pub fn clean<'a>(&'a mut self, level: Level, bytes: &'a [u8], tokens: usize) -> &'a [u8] {
        let l = *self.store.layout();
        if tokens >= l.block_size {
            return bytes;
        }
        let block = BlockId::new(0);
        self.store.block_bytes_mut(block).copy_from_slice(bytes);
        let behind = l.block_size - tokens;
        let k = &self.zeros[..behind * l.num_kv_heads * l.k_dim];
        let v = (!l.latent).then(|| &self.zeros[..behind * l.num_kv_heads * l.v_dim]);
        for layer in 0..l.num_layers {
            self.store.write(level, layer, (tokens..l.block_size).map(|token| (block, token)), k, v);
        }
        self.store.block_bytes(block)
    }
}
