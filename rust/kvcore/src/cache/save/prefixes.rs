//! All cached prefixes in a file.
//!
//! ```text
//! parents i64 [n]    index of the block before, which comes earlier, or -1     keys u32 [n]    which key
//! lengths u32 [n]    tokens of each, and   tokens u32 [sum of lengths]         ttl f64 [n]  (infinite: none)   priority u8 [n]
//! group.G.present u8 [n]     group.G.blocks u8 [present ones, bytes of a block]
//! key.K.salt ...     the parts of key K
//! ```
#![forbid(unsafe_code)]

use std::path::Path;
use std::time::Duration;

use super::keys;
use crate::cache::KvCache;
use crate::paging::{ImportEntry, OwnedKey, Place, PrefixEntry, Retention, SlotId};
use crate::storage::Cleaner;
use crate::storage::persist::{self, Dtype, Reader, TensorSpec};
use crate::threads::ShouldStop;
use crate::{Error, Result};

const KIND: &str = "prefixes";

/// The file in the folder that the caller names.
const FILE: &str = "prefixes.safetensors";

impl KvCache {
    /// Write all cached prefixes to a file in `folder`, which is made if need be; how many blocks of tokens. What the
    /// second tier cannot give back is forgotten and left out.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if it cannot be written, [`Error::Interrupted`]; a file that was there is untouched then.
    pub fn save_prefixes(&mut self, folder: &Path, should_stop: ShouldStop<'_>) -> Result<usize> {
        self.tick();
        std::fs::create_dir_all(folder)
            .map_err(|e| Error::Checkpoint(format!("{}: the folder cannot be made: {e}", folder.display())))?;
        loop {
            let mut lost = None;
            let saved = self.write_prefixes(folder, should_stop, &mut lost);
            match lost {
                Some((group, slot)) => self.manager.forget_slot(group, slot),
                None => return saved,
            }
        }
    }

    /// Writes the file, or stops at a slot that cannot be read, which is `lost` then.
    fn write_prefixes(
        &mut self,
        folder: &Path,
        should_stop: ShouldStop<'_>,
        lost: &mut Option<(usize, SlotId)>,
    ) -> Result<usize> {
        let entries = self.manager.export_prefixes();
        let mut keys: Vec<OwnedKey> = Vec::new();
        let key_of: Vec<u32> = entries
            .iter()
            .map(|entry| {
                let known = keys.iter().position(|key| *key == entry.key);
                known.unwrap_or_else(|| {
                    keys.push(entry.key.clone());
                    keys.len() - 1
                }) as u32
            })
            .collect();
        let n = entries.len();
        let tokens: Vec<u32> = entries.iter().flat_map(|entry| entry.tokens.iter().copied()).collect();
        let mut specs = vec![
            TensorSpec::new("parents", Dtype::I64, [n]),
            TensorSpec::new("ttl", Dtype::F64, [n]),
            TensorSpec::new("keys", Dtype::U32, [n]),
            TensorSpec::new("lengths", Dtype::U32, [n]),
            TensorSpec::new("tokens", Dtype::U32, [tokens.len()]),
            TensorSpec::new("priority", Dtype::U8, [n]),
        ];
        for (group, store) in self.stores.iter().enumerate() {
            specs.push(TensorSpec::new(format!("group.{group}.present"), Dtype::U8, [n]));
            let present = entries.iter().filter(|entry| entry.places[group] != Place::Nowhere).count();
            let shape = [present, store.layout().block_bytes()];
            specs.push(TensorSpec::new(format!("group.{group}.blocks"), Dtype::U8, shape));
        }
        for (number, key) in keys.iter().enumerate() {
            specs.extend(keys::specs(&format!("key.{number}."), key.as_key()));
        }
        let fingerprint = self.fingerprint();
        let (level, stores, spill) = (self.level, &self.stores, &mut self.spill);
        persist::save(&folder.join(FILE), KIND, &fingerprint, &specs, should_stop, |writer| {
            let column = |value: fn(&PrefixEntry) -> i64| entries.iter().map(value).collect::<Vec<_>>();
            writer.values("parents", &column(|entry| entry.parent.map_or(-1, |parent| parent as i64)))?;
            let ttl = |entry: &PrefixEntry| entry.retention.ttl.map_or(f64::INFINITY, |ttl| ttl.as_secs_f64());
            writer.values("ttl", &entries.iter().map(ttl).collect::<Vec<_>>())?;
            writer.values("keys", &key_of)?;
            writer.values("lengths", &entries.iter().map(|entry| entry.tokens.len() as u32).collect::<Vec<_>>())?;
            writer.values("tokens", &tokens)?;
            writer.values("priority", &entries.iter().map(|entry| entry.retention.priority).collect::<Vec<_>>())?;
            let mut fetched = Vec::new();
            for (group, store) in stores.iter().enumerate() {
                let present = |entry: &PrefixEntry| u8::from(entry.places[group] != Place::Nowhere);
                writer.values(&format!("group.{group}.present"), &entries.iter().map(present).collect::<Vec<_>>())?;
                let name = format!("group.{group}.blocks");
                let mut cleaner = Cleaner::new(store)?;
                for entry in &entries {
                    let bytes = match (entry.places[group], spill.as_mut()) {
                        (Place::Block(block), _) => store.block_bytes(block),
                        (Place::Slot(slot), Some(spill)) => {
                            fetched.resize(store.layout().block_bytes(), 0);
                            spill
                                .read(group, slot.index(), &mut fetched)
                                .inspect_err(|_| *lost = Some((group, slot)))?;
                            &fetched
                        }
                        _ => continue,
                    };
                    writer.write(&name, cleaner.clean(level, bytes, entry.tokens.len()))?;
                }
            }
            for (number, key) in keys.iter().enumerate() {
                keys::write(writer, &format!("key.{number}."), key.as_key())?;
            }
            Ok(())
        })?;
        Ok(n)
    }

    /// Take cached prefixes from a folder, as many as vacant blocks hold; how many blocks of tokens.
    ///
    /// # Errors
    /// As [`Self::load`]; nothing has changed then.
    pub fn load_prefixes(&mut self, folder: &Path, should_stop: ShouldStop<'_>) -> Result<usize> {
        if !self.config.enable_prefix_caching {
            return Err(Error::InvalidState("load_prefixes: this cache shares no prefixes".into()));
        }
        self.tick();
        let mut reader = Reader::open(&folder.join(FILE), KIND, &self.fingerprint(), should_stop)?;
        let entries = self.import_entries(&mut reader)?;
        let granted = self.manager.import_prefixes(&entries).map_err(|e| reader.error(e))?;
        let filled = self.fill_prefixes(&entries, &granted, &mut reader);
        if let Err(error) = filled {
            for blocks in &granted {
                for (group, block) in blocks.iter().enumerate() {
                    if let Some(block) = block {
                        self.manager.forget_block(group, *block);
                    }
                }
            }
            return Err(error);
        }
        Ok(granted.iter().filter(|blocks| blocks.iter().any(Option::is_some)).count())
    }

    fn fill_prefixes(
        &mut self,
        entries: &[ImportEntry],
        granted: &[Vec<Option<crate::paging::BlockId>>],
        reader: &mut Reader<'_>,
    ) -> Result<()> {
        for (group, store) in self.stores.iter_mut().enumerate() {
            let bytes = store.layout().block_bytes();
            let mut blocks = reader.tensor(&format!("group.{group}.blocks"), Dtype::U8, &[None, Some(bytes)])?;
            for (entry, granted) in entries.iter().zip(granted) {
                match granted[group] {
                    Some(block) => blocks.read(store.block_bytes_mut(block))?,
                    None if entry.present[group] => blocks.skip(bytes)?,
                    None => {}
                }
            }
        }
        Ok(())
    }

    fn import_entries(&self, reader: &mut Reader<'_>) -> Result<Vec<ImportEntry>> {
        let parents = reader.values::<i64>("parents", &[None])?;
        let n = parents.len();
        let ttl = reader.values::<f64>("ttl", &[Some(n)])?;
        let key_of = reader.values::<u32>("keys", &[Some(n)])?;
        let lengths = reader.values::<u32>("lengths", &[Some(n)])?;
        let tokens = reader.values::<u32>("tokens", &[None])?;
        let priority = reader.values::<u8>("priority", &[Some(n)])?;
        let num_keys = key_of.iter().max().map_or(0, |&last| last as usize + 1);
        if num_keys > n {
            return Err(reader.error("keys: a number beyond the keys that there can be"));
        }
        let keys = (0..num_keys).map(|k| keys::read(reader, &format!("key.{k}."))).collect::<Result<Vec<_>>>()?;
        let mut present = Vec::new();
        for group in 0..self.stores.len() {
            let flags = reader.values::<u8>(&format!("group.{group}.present"), &[Some(n)])?;
            let count = flags.iter().filter(|&&flag| flag != 0).count();
            let bytes = self.stores[group].layout().block_bytes();
            if reader.shape(&format!("group.{group}.blocks"))? != [count, bytes] {
                return Err(reader.error(format!("group {group}: not as many blocks as are said to be present")));
            }
            present.push(flags);
        }
        let mut rest = tokens.as_slice();
        let mut entries = Vec::with_capacity(n);
        for i in 0..n {
            let Some((own, after)) = rest.split_at_checked(lengths[i] as usize) else {
                return Err(reader.error("tokens: fewer than the lengths say"));
            };
            rest = after;
            let ttl = match ttl[i] {
                f64::INFINITY => None,
                seconds => Some(Duration::try_from_secs_f64(seconds).map_err(|e| reader.error(format!("ttl: {e}")))?),
            };
            entries.push(ImportEntry {
                key: keys[key_of[i] as usize].clone(),
                parent: usize::try_from(parents[i]).ok(),
                tokens: own.to_vec(),
                retention: Retention { ttl, priority: priority[i] },
                present: present.iter().map(|flags| flags[i] != 0).collect(),
            });
        }
        Ok(entries)
    }
}
