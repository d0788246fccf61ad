//! Static scales from what a model really writes.
//!
//! ```text
//! begin:  the cache must be empty; from now on the largest |K| and |V| of each layer and head are noted
//! (the caller runs sample text through the model)
//! end:    scale = largest / largest value of the format;  everything that was written is forgotten
//! ```
#![forbid(unsafe_code)]

use super::{GroupKind, KvCache, manager_config};
use crate::paging::{BlockManager, GroupConfig};
use crate::storage::{KvDtype, ScaleMode, Scales, fp8};
use crate::{Error, Result};

impl KvCache {
    /// Note the largest values from now on.
    ///
    /// # Errors
    /// [`Error::InvalidState`] if sequences or cached prefixes are there, or if the format takes no static scales.
    pub fn begin_calibration(&mut self) -> Result<()> {
        if self.config.scale_mode != ScaleMode::Static || !self.config.dtype.is_fp8() {
            return Err(Error::InvalidState(format!(
                "calibrate: expected an fp8 cache with static scales, this one is {} with {} scales",
                self.config.dtype, self.config.scale_mode
            )));
        }
        self.tick();
        let stats = self.stats();
        if stats.num_sequences + stats.cached + stats.used + stats.spilled > 0 {
            return Err(Error::InvalidState(format!(
                "calibrate: expected an empty cache, got {} sequences and {} cached blocks: what is stored would change \
                 its meaning (free the sequences and reset the prefix cache)",
                stats.num_sequences, stats.cached
            )));
        }
        self.stores.iter_mut().chain(&mut self.cross).for_each(|store| store.observe(true));
        Ok(())
    }

    /// Stop noting without a change of scales.
    pub fn abort_calibration(&mut self) {
        self.stores.iter_mut().chain(&mut self.cross).for_each(|store| store.observe(false));
    }

    /// Scales from what was noted; the cache is empty afterwards. Heads that wrote nothing keep scale 1.
    ///
    /// # Errors
    /// [`Error::InvalidState`] if sequences or views are still there or nothing was written; nothing has changed then.
    pub fn end_calibration(&mut self) -> Result<()> {
        self.reclaim_views();
        if self.manager.num_holds() > 0 {
            self.abort_calibration();
            return Err(Error::InvalidState(format!(
                "calibrate: expected no views of what was written, there are {}",
                self.manager.num_holds()
            )));
        }
        let stats = self.stats();
        if stats.num_sequences > 0 {
            self.abort_calibration();
            return Err(Error::InvalidState(format!(
                "calibrate: expected all sequences to be freed, {} are not",
                stats.num_sequences
            )));
        }
        let largest_code = if self.config.dtype == KvDtype::Fp8E5M2 { fp8::E5M2_MAX } else { fp8::E4M3_MAX };
        let scale = |largest: f32| match largest / largest_code {
            scale if scale.is_normal() && scale.recip().is_normal() => scale,
            _ => 1.0,
        };
        let mut found = Vec::new();
        for store in self.stores.iter_mut().chain(&mut self.cross) {
            let (k, v) = store.take_observed().unwrap_or_default();
            store.observe(false);
            found.push(Scales { k: k.into_iter().map(scale).collect(), v: v.into_iter().map(scale).collect() });
        }
        if found.iter().flat_map(|scales| scales.k.iter().chain(&scales.v)).all(|&scale| scale == 1.0) {
            return Err(Error::InvalidState(
                "calibrate: nothing was written, so there is nothing to learn from".into(),
            ));
        }
        for (store, scales) in self.stores.iter_mut().chain(&mut self.cross).zip(found) {
            store.set_scales(scales)?;
        }
        let mut paged = self.stores.iter();
        for spec in &mut self.config.groups {
            let store = match spec.kind {
                GroupKind::None => None,
                GroupKind::Cross => self.cross.as_ref(),
                _ => paged.next(),
            };
            spec.scales = store.map(|store| store.scales().clone());
        }
        self.forget_everything()
    }

    /// A manager without memory of what was: its keys carry the new scales.
    fn forget_everything(&mut self) -> Result<()> {
        let groups = self
            .stores
            .iter()
            .zip(self.paged_groups())
            .map(|(store, spec)| GroupConfig { num_blocks: store.layout().num_blocks, window: spec.kind.window() });
        let config = manager_config(
            &self.config,
            groups.collect(),
            self.spill.as_ref().map_or(0, |spill| spill.slots()),
            &self.stores,
            self.cross.as_ref(),
        );
        self.manager = BlockManager::new(config)?;
        self.tick();
        Ok(())
    }
}
