//! One sequence in a file.
//!
//! ```text
//! token_ids u32 [n]    computed u64 [1]    key: salt, adapter, extra u8 [..], where there are
//! group.G.held u32 [m]         which entries of the block table there are (a sliding window returns early ones)
//! group.G.blocks u8 [m, bytes of a block]
//! cross.tokens u64 [1]   cross.written u8 [layers]   cross.blocks u8 [.., bytes of a block]
//! ```
#![forbid(unsafe_code)]

use std::ops::Range;
use std::path::Path;

use super::keys;
#[cfg(doc)]
use crate::Error;
use crate::Result;
use crate::cache::{Batch, KvCache};
use crate::paging::{AddOptions, BlockId, SeqId};
use crate::storage::Cleaner;
use crate::storage::persist::{self, Dtype, Reader, TensorSpec};
use crate::threads::ShouldStop;

const KIND: &str = "sequence";

/// What a file says of a sequence, besides the bytes of its blocks.
struct Contents {
    token_ids: Vec<u32>,
    computed: usize,
    /// For each group the entries of the block table that the file has, ascending.
    held: Vec<Vec<u32>>,
    cross_tokens: usize,
}

impl KvCache {
    /// Write a sequence's tokens and K and V to a file, atomically.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Checkpoint`] if the file cannot be written; [`Error::Interrupted`].
    pub fn save(&self, seq: SeqId, path: &Path, should_stop: ShouldStop<'_>) -> Result<()> {
        let token_ids = self.manager.token_ids(seq)?;
        let computed = self.manager.num_computed_tokens(seq)?;
        let key = self.manager.key(seq)?;
        let num_blocks = computed.div_ceil(self.config.block_size);
        let mut specs = vec![
            TensorSpec::new("computed", Dtype::U64, [1]),
            TensorSpec::new("token_ids", Dtype::U32, [token_ids.len()]),
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

    /// A sequence from a file: what is cached already is shared, the rest takes blocks.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] for a file that is damaged or not of this cache's model, dtype, layout and version;
    /// [`Error::OutOfBlocks`]; [`Error::Interrupted`]. No sequence is added then.
    pub fn load(&mut self, path: &Path, should_stop: ShouldStop<'_>) -> Result<SeqId> {
        let mut reader = Reader::open(path, KIND, &self.fingerprint(), should_stop)?;
        let contents = self.contents(&mut reader)?;
        let key = keys::read(&mut reader, "")?;
        let use_prefix = self.cross.is_none() || key.extra.is_some();
        let options = AddOptions { key: key.as_key(), use_prefix, min_prefix_tokens: Some(0), retention: None };
        let seq = self.add_whole_blocks(&contents, &options)?;
        match self.fill_sequence(seq, &contents, &mut reader) {
            Ok(()) => Ok(seq),
            Err(error) => {
                self.free(seq)?;
                Err(error)
            }
        }
    }

    /// Adds the tokens, and lets go of a block that is shared up to its middle: the file's bytes go into whole blocks,
    /// and what others read of this one must stay as it is.
    fn add_whole_blocks(&mut self, contents: &Contents, options: &AddOptions<'_>) -> Result<SeqId> {
        let block_size = self.config.block_size;
        let seq = self.add(&contents.token_ids, options)?;
        let cached = self.manager.num_computed_tokens(seq)?;
        let whole = cached / block_size * block_size;
        if whole == cached || cached >= contents.computed {
            return Ok(seq);
        }
        if whole == 0 || self.truncate(seq, whole).is_err() {
            // Nothing is left of it, or a window has passed what would be left: as if nothing were cached.
            self.free(seq)?;
            return self.add(&contents.token_ids, &AddOptions { min_prefix_tokens: Some(usize::MAX), ..*options });
        }
        self.append(seq, &contents.token_ids[whole..])?;
        Ok(seq)
    }

    fn contents(&self, reader: &mut Reader<'_>) -> Result<Contents> {
        let token_ids = reader.values::<u32>("token_ids", &[None])?;
        let computed = reader.values::<u64>("computed", &[Some(1)])?[0];
        let computed = usize::try_from(computed).ok().filter(|&computed| computed <= token_ids.len());
        let computed = computed.filter(|_| !token_ids.is_empty() && !token_ids.contains(&u32::MAX));
        let Some(computed) = computed else { return Err(reader.error("more computed tokens than tokens")) };
        let num_blocks = computed.div_ceil(self.config.block_size);
        let mut held = Vec::new();
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
            held.push(entries);
        }
        let mut cross_tokens = 0;
        if self.cross.is_some() && reader.names().any(|name| name == "cross.tokens") {
            let tokens = reader.values::<u64>("cross.tokens", &[Some(1)])?[0];
            cross_tokens = usize::try_from(tokens).map_err(|_| reader.error("cross.tokens: too many"))?;
        }
        Ok(Contents { token_ids, computed, held, cross_tokens })
    }

    fn fill_sequence(&mut self, seq: SeqId, contents: &Contents, reader: &mut Reader<'_>) -> Result<()> {
        if contents.cross_tokens > 0 {
            self.fill_cross(seq, contents.cross_tokens, reader)?;
        }
        let mut start = self.manager.num_computed_tokens(seq)?;
        // A window's group may have no room for blocks that the window has passed: then it goes block by block.
        let has_window = self.paged_groups().any(|spec| spec.kind.window().is_some());
        let step = if has_window { self.config.block_size } else { usize::MAX };
        while start < contents.computed {
            let n = step.min(contents.computed - start);
            let batch = self.plan(&[(seq, n)])?;
            let first = start / self.config.block_size;
            self.fill_planned(&batch, first..(start + n).div_ceil(self.config.block_size), contents, reader)?;
            self.manager.commit(&batch.plan)?;
            start += n;
        }
        Ok(())
    }

    /// Fills blocks of a plan, which are the sequence's own: these entries of its tables.
    fn fill_planned(
        &mut self,
        batch: &Batch,
        entries: Range<usize>,
        contents: &Contents,
        reader: &mut Reader<'_>,
    ) -> Result<()> {
        let row = &batch.plan.rows[0];
        for (group, held) in contents.held.iter().enumerate() {
            let store = &mut self.stores[group];
            let bytes = store.layout().block_bytes();
            let mut blocks =
                reader.tensor(&format!("group.{group}.blocks"), Dtype::U8, &[Some(held.len()), Some(bytes)])?;
            // What the file has are the last entries of the table.
            let first_held = held.first().map_or(entries.end, |&at| at as usize);
            blocks.skip(entries.start.saturating_sub(first_held) * bytes)?;
            for at in entries.start.max(first_held)..entries.end {
                blocks.read(store.block_bytes_mut(row.tables[group][at]))?;
            }
            // What the file lacks was planned but means nothing: no query sees it, and nobody may find it.
            let missing = first_held.min(entries.end);
            if missing > entries.start {
                self.manager.return_blocks(row.seq, group, missing)?;
            }
        }
        Ok(())
    }

    fn fill_cross(&mut self, seq: SeqId, tokens: usize, reader: &mut Reader<'_>) -> Result<()> {
        let Some(store) = &mut self.cross else {
            return Err(reader.error("it has an encoder's K and V, this cache has no cross layers"));
        };
        let (num_layers, bytes) = (store.layout().num_layers, store.layout().block_bytes());
        let count = tokens.div_ceil(self.config.block_size);
        let written = reader.values::<u8>("cross.written", &[Some(num_layers)])?;
        if reader.shape("cross.blocks")? != [count, bytes] {
            return Err(reader.error("cross.blocks: not as many as cross.tokens say"));
        }
        let table = self.manager.reserve_cross(seq, tokens)?.to_vec();
        let mut blocks = reader.tensor("cross.blocks", Dtype::U8, &[Some(count), Some(bytes)])?;
        for &block in &table {
            blocks.read(store.block_bytes_mut(block))?;
        }
        self.cross_written.forget(table[0]);
        for (index, _) in written.iter().enumerate().filter(|&(_, &w)| w != 0) {
            self.cross_written.set(table[0], num_layers, index);
        }
        Ok(())
    }
}
