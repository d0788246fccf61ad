//! Sequences: token ids, the block table, and how far both have come.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::block::BlockId;
use super::key::OwnedKey;
use super::prefix::Link;
use super::retention::ClassId;
use super::room::{copied, make_room};
use crate::{Error, Result};

/// Handle of a sequence. Never given twice, so one that was freed or belongs to another cache is an error everywhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SeqId {
    pub(super) manager: u64,
    serial: u64,
    index: u32,
}

impl SeqId {
    /// A number that no other sequence of its cache has or had.
    pub const fn serial(self) -> u64 {
        self.serial
    }
}

/// The blocks of a sequence in one group.
#[derive(Debug, Default)]
pub(super) struct Table {
    /// Covers `computed + planned` tokens.
    pub blocks: Vec<BlockId>,
    /// Leading entries that are [`BlockId::NONE`], because no token to come can see them.
    pub returned: usize,
}

impl Table {
    /// The blocks that are held.
    pub fn held(&self) -> &[BlockId] {
        &self.blocks[self.returned..]
    }
}

/// A prefix that shall stay longer than the rest.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mark {
    pub num_tokens: usize,
    pub class: ClassId,
}

/// One sequence.
#[derive(Debug)]
pub(super) struct Sequence {
    serial: u64,
    pub tokens: Vec<u32>,
    /// One per group.
    pub tables: Vec<Table>,
    /// Whether the last block of every table is only borrowed: `add` found tokens in its leading slots.
    pub borrowed: bool,
    pub cross: Vec<BlockId>,
    pub cross_tokens: usize,
    /// Leading tokens whose K and V are committed.
    pub computed: usize,
    /// Tokens of the newest plan that is not committed.
    pub planned: usize,
    /// Tokens that were found in the cache by `add`.
    pub cached: usize,
    /// The batch that may be written, attended and committed; 0 if none.
    pub batch: u64,
    /// Whether that batch was committed.
    pub committed: bool,
    /// The last call of `plan` that saw this sequence, to find it twice in one call.
    pub seen: u64,
    pub domain: Arc<OwnedKey>,
    pub use_prefix: bool,
    /// Whether it was added as one that shares prefixes; it may have become one that cannot since.
    pub was_to_share: bool,
    /// Resets of the prefix cache before the first token was computed: what is older is not published any more.
    pub era: u64,
    /// Leading blocks that were published, or found to be published by others already, and the node of the last.
    pub chained: usize,
    pub link: Link,
    /// Whether some of these are others'.
    pub hangs: bool,
    /// Retention of what it publishes, and of some of its prefixes.
    pub class: ClassId,
    pub marks: Vec<Mark>,
}

impl Sequence {
    pub fn new(tokens: Vec<u32>, tables: Vec<Table>, domain: Arc<OwnedKey>, class: ClassId) -> Self {
        Self {
            serial: 0,
            tokens,
            tables,
            borrowed: false,
            cross: Vec::new(),
            cross_tokens: 0,
            computed: 0,
            planned: 0,
            cached: 0,
            batch: 0,
            committed: false,
            seen: 0,
            domain,
            use_prefix: false,
            was_to_share: false,
            era: 0,
            chained: 0,
            link: Link::NONE,
            hangs: false,
            class,
            marks: Vec::new(),
        }
    }

    /// Copies of the tokens and tables, those of a plan included.
    pub fn copied(&self) -> Result<(Vec<u32>, Vec<Table>)> {
        let table =
            |table: &Table| Ok(Table { blocks: copied(&table.blocks, "block tables")?, returned: table.returned });
        Ok((copied(&self.tokens, "token ids")?, self.tables.iter().map(table).collect::<Result<_>>()?))
    }

    /// A sequence like this one, from copies that were made before its plan was forgotten.
    pub fn child(&self, tokens: Vec<u32>, mut tables: Vec<Table>) -> Self {
        for (table, own) in tables.iter_mut().zip(&self.tables) {
            table.blocks.truncate(own.blocks.len());
        }
        Self {
            tokens,
            tables,
            cross: self.cross.clone(),
            domain: Arc::clone(&self.domain),
            marks: self.marks.clone(),
            ..*self
        }
    }

    /// Forgets what is planned but not committed (its blocks are the caller's business).
    pub fn forget_plan(&mut self) {
        (self.planned, self.batch) = (0, 0);
    }
}

/// All sequences of one manager.
#[derive(Debug)]
pub(super) struct SequenceTable {
    manager: u64,
    entries: Vec<Option<Sequence>>,
    unused: Vec<u32>,
    last_serial: u64,
}

impl SequenceTable {
    pub fn new(manager: u64) -> Self {
        Self { manager, entries: Vec::new(), unused: Vec::new(), last_serial: 0 }
    }

    pub fn len(&self) -> usize {
        self.entries.len() - self.unused.len()
    }

    /// Room for one more, so that neither [`Self::insert`] nor [`Self::remove`] asks for memory.
    pub fn make_room(&mut self) -> Result<()> {
        if self.unused.is_empty() {
            make_room(&mut self.entries, 1, "sequences")?;
            let more = (self.entries.len() + 1).saturating_sub(self.unused.len());
            make_room(&mut self.unused, more, "sequences")?;
        }
        Ok(())
    }

    pub fn insert(&mut self, mut sequence: Sequence) -> SeqId {
        self.last_serial += 1;
        sequence.serial = self.last_serial;
        let index = self.unused.pop().unwrap_or_else(|| {
            self.entries.push(None);
            (self.entries.len() - 1) as u32
        });
        self.entries[index as usize] = Some(sequence);
        SeqId { manager: self.manager, serial: self.last_serial, index }
    }

    pub fn remove(&mut self, id: SeqId) -> Result<Sequence> {
        self.get(id)?;
        self.unused.push(id.index);
        self.entries[id.index as usize].take().ok_or_else(freed)
    }

    pub fn get(&self, id: SeqId) -> Result<&Sequence> {
        self.own(id)?;
        self.entries.get(id.index as usize).and_then(Option::as_ref).filter(|s| s.serial == id.serial).ok_or_else(freed)
    }

    pub fn get_mut(&mut self, id: SeqId) -> Result<&mut Sequence> {
        self.own(id)?;
        let entry = self.entries.get_mut(id.index as usize).and_then(Option::as_mut);
        entry.filter(|s| s.serial == id.serial).ok_or_else(freed)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.entries.iter().flatten()
    }

    pub fn ids(&self) -> impl Iterator<Item = SeqId> {
        let id = |(index, entry): (usize, &Option<Sequence>)| {
            let serial = entry.as_ref()?.serial;
            Some(SeqId { manager: self.manager, serial, index: index as u32 })
        };
        self.entries.iter().enumerate().filter_map(id)
    }

    fn own(&self, id: SeqId) -> Result<()> {
        if id.manager != self.manager {
            return Err(Error::InvalidHandle("the sequence belongs to another cache".into()));
        }
        Ok(())
    }
}

fn freed() -> Error {
    Error::InvalidHandle("the sequence was freed".into())
}
