//! Reads without copies: a tile's bytes, kept as they are for as long as somebody looks at them.
//!
//! ```text
//! view:  the block gets a holder more (nobody writes into it, it is not evicted), its layer is frozen in the arena
//! drop:  the layer thaws at once; the hold is noted as ended, and whoever changes the cache next ends it
//! ```
//! A view may be dropped in any thread, also by a garbage collector in the middle of another call: it waits for no lock of
//! the cache. It keeps the arena's memory, whatever becomes of the cache.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError};

use super::{KvCache, Place};
use crate::paging::{HoldId, SeqId};
use crate::storage::{Frozen, KvDtype, ScaleMode, TILE, TileArrays};
use crate::{Error, Result};

/// Holds of views that are gone; shared by a cache and its views.
#[derive(Clone, Debug, Default)]
pub struct Ended(Arc<Mutex<Vec<HoldId>>>);

impl Ended {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    fn push(&self, hold: HoldId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(hold);
    }

    fn take(&self) -> Vec<HoldId> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The tokens of one tile in one layer, where they lie.
#[derive(Debug)]
pub struct TileView {
    // Before `_hold`, which is dropped after it: whoever gets the block then may write to it.
    tiles: Frozen,
    scales: Frozen,
    /// Where in the tiles (K and V) and in the scales is what.
    pub arrays: TileArrays,
    /// Format of K and V.
    pub dtype: KvDtype,
    /// Static scales of K and V for each head, where the format has them.
    pub static_scales: Option<(Vec<f32>, Vec<f32>)>,
    /// Position of the first token.
    pub start: usize,
    /// Tokens, 1 to [`TILE`].
    pub tokens: usize,
    _hold: Hold,
}

/// Ends a hold when it is dropped.
#[derive(Debug)]
struct Hold {
    id: HoldId,
    ended: Ended,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.ended.push(self.id);
    }
}

impl TileView {
    /// One layer's tiles of the block, in which K and V lie.
    pub fn tiles(&self) -> &[u8] {
        self.tiles.bytes()
    }

    /// Their scales, in which those of each token lie.
    pub fn scales(&self) -> &[u8] {
        self.scales.bytes()
    }
}

impl KvCache {
    /// Tokens `16 * index` to `16 * index + 15` of a sequence in one layer, as far as they are committed, without a copy.
    /// Their values stay until the view is dropped, whatever is done to the sequence and the cache; until then their block
    /// counts as used. In a cross layer they are the encoder's tokens.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::InvalidArgument`] for a layer that is not there or keeps nothing, an index
    /// without stored tokens, and int4; [`Error::InvalidState`] while a batch that is not committed writes into the block,
    /// and for a cross layer that is not written.
    pub fn view(&mut self, layer: usize, seq: SeqId, index: usize) -> Result<TileView> {
        self.tick();
        let place = self.place(layer)?;
        if self.config.dtype == KvDtype::Int4 {
            return Err(Error::InvalidArgument(
                "view: expected another format than int4, of which a byte has two values; read() gives a copy".into(),
            ));
        }
        let (block_size, tiles) = (self.config.block_size, self.config.block_size / TILE);
        let (block, tile) = (index / tiles, index % tiles);
        let (tokens, first) = match place {
            Place::Nowhere => {
                return Err(Error::InvalidArgument(format!("view: layer {layer} is of kind none")));
            }
            Place::Paged { group, .. } => {
                let returned = self.manager.block_table(seq, group)?.iter().take_while(|block| block.is_none()).count();
                (self.manager.num_computed_tokens(seq)?, returned * tiles)
            }
            Place::Cross { index } => {
                let (blocks, tokens) = self.manager.cross(seq)?;
                if !blocks.first().is_some_and(|&first| self.cross_written.has(first, index)) {
                    return Err(Error::InvalidState(format!("view: layer {layer} of this sequence is not written")));
                }
                (tokens, 0)
            }
        };
        let end = tokens.div_ceil(TILE);
        if !(first..end).contains(&index) {
            return Err(Error::InvalidArgument(match (first, end) {
                _ if first >= end => format!("index: the sequence has no stored tokens in layer {layer}, got {index}"),
                (0, _) => format!("index: expected 0 to {}, got {index}", end - 1),
                _ => format!("index: expected {first} to {}: a sliding window has passed; got {index}", end - 1),
            }));
        }
        let (held, store, index_in_group) = match (place, &mut self.cross) {
            (Place::Paged { group, index }, _) => {
                (self.manager.hold_block(seq, group, block)?, &mut self.stores[group], index)
            }
            (Place::Cross { index }, Some(store)) => (self.manager.hold_cross(seq, block)?, store, index),
            _ => return Err(super::rows::missing(layer)),
        };
        // From here on the hold ends with this, whatever happens.
        let hold = Hold { id: held.id, ended: self.ended_views.clone() };
        let l = *store.layout();
        let shown = (held.filled - tile * TILE).min(TILE);
        let Some(arrays) = l.tile_arrays(tile, shown) else {
            return Err(Error::InvalidArgument(format!("view: {} cannot be viewed", l.dtype)));
        };
        let heads = index_in_group * l.num_kv_heads..(index_in_group + 1) * l.num_kv_heads;
        let static_scales = (l.dtype.is_fp8() && l.scale_mode == ScaleMode::Static)
            .then(|| (store.scales().k[heads.clone()].to_vec(), store.scales().v[heads].to_vec()));
        let (tiles, scales) = store.freeze(held.block, index_in_group);
        Ok(TileView {
            tiles,
            scales,
            arrays,
            dtype: l.dtype,
            static_scales,
            start: block * block_size + tile * TILE,
            tokens: shown,
            _hold: hold,
        })
    }

    /// The list in which views note that they are gone.
    pub fn ended_views(&self) -> &Ended {
        &self.ended_views
    }

    /// Blocks of views that are gone are free. Every call that takes blocks or frees some does this first.
    pub fn reclaim_views(&mut self) {
        if self.manager.num_holds() > 0 {
            for hold in self.ended_views.take() {
                let ended = self.manager.unhold(hold);
                debug_assert!(ended.is_ok(), "{ended:?}");
            }
        }
    }
}
