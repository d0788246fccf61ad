//! One sequence in a file.
//!
//! ```text
//! token_ids u32 [n]    computed u64 [1]    shared u8 [1]    key: salt, adapter, extra u8 [..], where there are
//! group.G.held u32 [m]         which entries of the block table there are (a sliding window returns early ones)
//! group.G.blocks u8 [m, bytes of a block]
//! cross.tokens u64 [1]   cross.written u8 [layers]   cross.blocks u8 [.., bytes of a block]
//! ```
#![forbid(unsafe_code)]

use std::path::Path;

use super::keys;
#[cfg(doc)]
use crate::Error;
use crate::Result;
use crate::cache::KvCache;
use crate::paging::{AddOptions, BlockId, OwnedKey, Restored, Saved, SeqId};
use crate::storage::Cleaner;
use crate::storage::persist::{self, Dtype, Reader, TensorSpec};
use crate::threads::ShouldStop;

const KIND: &str = "sequence";

/// What a file says of a sequence, besides the bytes of its blocks.
struct Contents {
    token_ids: Vec<u32>,
    computed: usize,
    /// For each group the first entry of the block table that the file has; it has all after that.
    first: Vec<usize>,
    cross_tokens: usize,
    /// Whether others may find it: what was private stays so.
    shared: bool,
    key: OwnedKey,
}

impl KvCache {
    /// Write a sequence's tokens and K and V to a file, atomically.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Checkpoint`] if the file cannot be written; [`Error::Interrupted`].
    pub fn save(&self, seq: SeqId, path: &Path, should_stop: ShouldStop<'_>) -> Result<()> {
        let token_ids = self.manager.token_ids(seq)?;
        let computed = self.manager.num_computed_tokens(seq)?;
        let (key, shared) = (self.manager.key(seq)?, self.manager.is_shared(seq)?);
        let num_blocks = computed.div_ceil(self.config.block_size);
        let mut specs = vec![
            TensorSpec::new("computed", Dtype::U64, [1]),
            TensorSpec::new("token_ids", Dtype::U32, [token_ids.len()]),
            TensorSpec::new("shared", Dtype::U8, [1]),
        ];
        let mut held = Vec::new();
        for (group, store) in self.stores.iter().enumerate() {
            let table = &self.manager.block_table(seq, group)?[..num_blocks];
            let entries: Vec<u32> =
                (0u32..).zip(table).filter(|&(_, &block)| block != BlockId::NONE).map(|(at, _)| at).collect();
            specs.push(TensorSpec::new(format!("group.{group}.held"), Dtype::U32, [entries.len()]));
            let shape = [entries.len(), store.layout().block_bytes()];
            specs.push(TensorSpec::new(format!("group.{group}.blocks"), Dtype::U8, shape));
            held.push(entries);
        }
        let (cross, cross_tokens) = self.manager.cross(seq)?;
        let cross = self.cross.as_ref().filter(|_| cross_tokens > 0).map(|store| (store, cross));
        if let Some((store, blocks)) = cross {
            specs.push(TensorSpec::new("cross.tokens", Dtype::U64, [1]));
            specs.push(TensorSpec::new("cross.written", Dtype::U8, [store.layout().num_layers]));
            specs.push(TensorSpec::new("cross.blocks", Dtype::U8, [blocks.len(), store.layout().block_bytes()]));
        }
        specs.extend(keys::specs("", key));
        persist::save(path, KIND, &self.fingerprint(), &specs, should_stop, |writer| {
            writer.values("computed", &[computed as u64])?;
            writer.values("token_ids", token_ids)?;
            writer.values("shared", &[u8::from(shared)])?;
            for (group, store) in self.stores.iter().enumerate() {
                let table = self.manager.block_table(seq, group)?;
                writer.values(&format!("group.{group}.held"), &held[group])?;
                let name = format!("group.{group}.blocks");
                let mut cleaner = Cleaner::new(store)?;
                for &at in &held[group] {
                    let tokens = computed - at as usize * self.config.block_size;
                    let bytes = store.block_bytes(table[at as usize]);
                    writer.write(&name, cleaner.clean(self.level, bytes, tokens))?;
                }
            }
            if let Some((store, blocks)) = cross {
                writer.values("cross.tokens", &[cross_tokens as u64])?;
                let written = self.cross_written.layers(blocks[0]).unwrap_or_default();
                writer.values("cross.written", &written.iter().map(|&w| u8::from(w)).collect::<Vec<_>>())?;
                let mut cleaner = Cleaner::new(store)?;
                for (at, &block) in blocks.iter().enumerate() {
                    let tokens = cross_tokens - at * self.config.block_size;
                    writer.write("cross.blocks", cleaner.clean(self.level, store.block_bytes(block), tokens))?;
                }
            }
            keys::write(writer, "", key)
        })
    }

    /// A sequence from a file: what is cached already is shared, the rest takes blocks. None of it counts as looked for
    /// or found.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] for a file that is damaged or not of this cache's model, dtype, layout and version;
    /// [`Error::OutOfBlocks`]. Nothing has changed then. [`Error::Interrupted`], or [`Error::Checkpoint`] for a file that
    /// was altered after it had been checked: no sequence is added, but cached prefixes may have given way to it.
    pub fn load(&mut self, path: &Path, should_stop: ShouldStop<'_>) -> Result<SeqId> {
        let mut reader = Reader::open(path, KIND, &self.fingerprint(), should_stop)?;
        let contents = self.contents(&mut reader)?;
        let key = &contents.key;
        let use_prefix = contents.shared && (self.cross.is_none() || key.extra.is_some());
        let options = AddOptions { key: key.as_key(), use_prefix, min_prefix_tokens: Some(0), retention: None };
        let saved = Saved {
            token_ids: &contents.token_ids,
            computed: contents.computed,
            first: &contents.first,
            cross_tokens: contents.cross_tokens,
        };
        self.tick();
        let (manager, mut bytes) = self.parts();
        let restored = manager.restore(&saved, &options, &mut bytes)?;
        match self.fill_restored(&restored, &contents, &mut reader) {
            Ok(()) => self.manager.finish_restore(restored),
            Err(error) => {
                self.free(restored.seq)?;
                Err(error)
            }
        }
    }

    /// What the file says, every shape of it checked.
    fn contents(&self, reader: &mut Reader<'_>) -> Result<Contents> {
        let token_ids = reader.values::<u32>("token_ids", &[None])?;
        let computed = reader.values::<u64>("computed", &[Some(1)])?[0];
        let computed = usize::try_from(computed).ok().filter(|&computed| computed <= token_ids.len());
        let computed = computed.filter(|_| !token_ids.is_empty() && !token_ids.contains(&u32::MAX));
        let Some(computed) = computed else { return Err(reader.error("more computed tokens than tokens")) };
        let num_blocks = computed.div_ceil(self.config.block_size);
        let mut firsts = Vec::new();
        for (group, spec) in self.paged_groups().enumerate() {
            let entries = reader.values::<u32>(&format!("group.{group}.held"), &[None])?;
            // A window's blocks are the last ones; everywhere else there are all.
            let first = num_blocks - entries.len().min(num_blocks);
            let needed =
                spec.kind.window().map_or(0, |window| (computed + 1).saturating_sub(window) / self.config.block_size);
            if entries.len() > num_blocks
                || first > needed
                || !(first..num_blocks).eq(entries.iter().map(|&e| e as usize))
            {
                return Err(reader.error(format!("group {group}: blocks are missing")));
            }
            let bytes = self.stores[group].layout().block_bytes();
            reader.tensor(&format!("group.{group}.blocks"), Dtype::U8, &[Some(entries.len()), Some(bytes)])?;
            firsts.push(first);
        }
        let mut cross_tokens = 0;
        if let Some(store) = &self.cross
            && reader.names().any(|name| name == "cross.tokens")
        {
            let tokens = reader.values::<u64>("cross.tokens", &[Some(1)])?[0];
            cross_tokens = usize::try_from(tokens).map_err(|_| reader.error("cross.tokens: too many"))?;
            let (count, bytes) = (cross_tokens.div_ceil(self.config.block_size), store.layout().block_bytes());
            reader.tensor("cross.written", Dtype::U8, &[Some(store.layout().num_layers)])?;
            reader.tensor("cross.blocks", Dtype::U8, &[Some(count), Some(bytes)])?;
        }
        let shared = reader.values::<u8>("shared", &[Some(1)])?[0] != 0;
        let key = keys::read(reader, "")?;
        Ok(Contents { token_ids, computed, first: firsts, cross_tokens, shared, key })
    }

    fn fill_restored(&mut self, restored: &Restored, contents: &Contents, reader: &mut Reader<'_>) -> Result<()> {
        for (group, entries) in restored.fill.iter().enumerate() {
            let store = &mut self.stores[group];
            let bytes = store.layout().block_bytes();
            let table = self.manager.block_table(restored.seq, group)?;
            let mut blocks = reader.tensor(&format!("group.{group}.blocks"), Dtype::U8, &[None, Some(bytes)])?;
            let mut next = contents.first[group];
            for &at in entries {
                blocks.skip((at - next) * bytes)?;
                blocks.read(store.block_bytes_mut(table[at]))?;
                next = at + 1;
            }
        }
        if contents.cross_tokens > 0 {
            self.fill_cross(restored.seq, reader)?;
        }
        Ok(())
    }

    fn fill_cross(&mut self, seq: SeqId, reader: &mut Reader<'_>) -> Result<()> {
        let Some(store) = &mut self.cross else { return Ok(()) };
        let (num_layers, bytes) = (store.layout().num_layers, store.layout().block_bytes());
        let written = reader.values::<u8>("cross.written", &[Some(num_layers)])?;
        let (table, _) = self.manager.cross(seq)?;
        let mut blocks = reader.tensor("cross.blocks", Dtype::U8, &[Some(table.len()), Some(bytes)])?;
        for &block in table {
            blocks.read(store.block_bytes_mut(block))?;
        }
        self.cross_written.forget(table[0]);
        for (index, _) in written.iter().enumerate().filter(|&(_, &w)| w != 0) {
            self.cross_written.set(table[0], num_layers, index);
        }
        Ok(())
    }
}
