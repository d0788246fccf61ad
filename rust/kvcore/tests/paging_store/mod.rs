//! A store that knows what lies in every slot, in place of bytes: what a real one would get wrong shows here.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::collections::HashMap;
use std::rc::Rc;

use kvcore::paging::{AddOptions, Batch, BlockId, BlockManager, Carrier, Key, ManagerConfig, Move, SeqId, SlotId};

/// Which K and V a slot holds: those of the last token of `prefix`, computed under `salt` with `version` of the weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Content {
    pub version: u64,
    pub salt: Option<Vec<u8>>,
    pub prefix: Rc<[u32]>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Slot {
    /// Never written, or half written (some layers only).
    Garbage,
    Token(Content),
}

pub struct Store {
    block_size: usize,
    /// Group, block, slot.
    groups: Vec<Vec<Vec<Slot>>>,
    spilled: HashMap<(usize, usize), Vec<Slot>>,
}

impl Store {
    pub fn new(num_blocks: usize, block_size: usize) -> Self {
        Self::of(&ManagerConfig::new(num_blocks, block_size))
    }

    pub fn of(config: &ManagerConfig) -> Self {
        let block = vec![Slot::Garbage; config.block_size];
        let groups = config.groups.iter().map(|group| vec![block.clone(); group.num_blocks]).collect();
        Self { block_size: config.block_size, groups, spilled: HashMap::new() }
    }

    pub fn carry_out(&mut self, moves: &[Move]) {
        for &step in moves {
            match step {
                Move::Copy { group, src, dst } => {
                    self.groups[group][dst.index()] = self.groups[group][src.index()].clone();
                }
                Move::Spill { group, block, slot } => {
                    self.spilled.insert((group, slot.index()), self.groups[group][block.index()].clone());
                }
                Move::Fetch { group, slot, block } => {
                    self.groups[group][block.index()] = self.spilled.remove(&(group, slot.index())).unwrap();
                }
            }
        }
    }

    pub fn lose(&mut self, group: usize, slot: SlotId) {
        self.spilled.remove(&(group, slot.index()));
    }

    pub fn get(&self, group: usize, block: BlockId, slot: usize) -> &Slot {
        &self.groups[group][block.index()][slot]
    }

    pub fn spilled(&self, group: usize, index: usize) -> &[Slot] {
        &self.spilled[&(group, index)]
    }

    pub fn set(&mut self, group: usize, table: &[BlockId], position: usize, slot: Slot) {
        let block = table[position / self.block_size];
        self.groups[group][block.index()][position % self.block_size] = slot;
    }

    /// Writes some layers of the planned tokens only.
    pub fn write_half(&mut self, batch: &Batch) {
        for row in &batch.rows {
            for (group, table) in row.tables.iter().enumerate() {
                for position in row.start..row.start + row.len {
                    self.set(group, table, position, Slot::Garbage);
                }
            }
        }
    }

    /// Writes the planned tokens in every layer.
    pub fn write(&mut self, manager: &BlockManager, batch: &Batch, salt: Option<&[u8]>, version: u64) {
        for row in &batch.rows {
            let tokens = manager.token_ids(row.seq).unwrap();
            for (group, table) in row.tables.iter().enumerate() {
                for position in row.start..row.start + row.len {
                    self.set(group, table, position, token(tokens, position, salt, version));
                }
            }
        }
    }

    /// Panics unless every computed token of the sequence is where its tables say.
    pub fn assert_reads(&self, manager: &BlockManager, seq: SeqId, salt: Option<&[u8]>, version: u64) {
        let tokens = manager.token_ids(seq).unwrap();
        for group in 0..self.groups.len() {
            let table = manager.block_table(seq, group).unwrap();
            for position in 0..manager.num_computed_tokens(seq).unwrap() {
                let block = table[position / self.block_size];
                if !block.is_none() {
                    let slot = self.get(group, block, position % self.block_size);
                    assert_eq!(*slot, token(tokens, position, salt, version), "position {position}, group {group}");
                }
            }
        }
    }
}

/// A second tier that fails: each call of it takes a bit of `faults`, over and over.
pub struct Disk<'a> {
    pub store: &'a mut Store,
    pub faults: u64,
    /// What was carried out.
    pub moves: Vec<Move>,
    pub failed: bool,
}

impl<'a> Disk<'a> {
    pub fn new(store: &'a mut Store, faults: u64) -> Self {
        Self { store, faults, moves: Vec::new(), failed: false }
    }

    fn fails(&mut self) -> bool {
        self.faults = self.faults.rotate_right(1);
        let fails = self.faults >> 63 == 1;
        self.failed |= fails;
        fails
    }

    pub fn count(&self, which: impl Fn(&Move) -> bool) -> u64 {
        self.moves.iter().filter(|step| which(step)).count() as u64
    }
}

impl Carrier for Disk<'_> {
    fn carry_out(&mut self, step: Move) -> bool {
        if let Move::Spill { group, slot, .. } = step
            && self.fails()
        {
            self.store.lose(group, slot);
            return false;
        }
        self.store.carry_out(&[step]);
        self.moves.push(step);
        true
    }

    fn can_fetch(&mut self, group: usize, slot: SlotId) -> bool {
        let fails = self.fails();
        if fails {
            self.store.lose(group, slot);
        }
        !fails
    }
}

pub fn token(tokens: &[u32], position: usize, salt: Option<&[u8]>, version: u64) -> Slot {
    Slot::Token(Content { version, salt: salt.map(<[u8]>::to_vec), prefix: tokens[..=position].into() })
}

/// Plans, moves, writes and commits `n` tokens of one sequence.
pub fn run(manager: &mut BlockManager, store: &mut Store, seq: SeqId, n: usize) -> kvcore::Result<Batch> {
    let mut moves = Vec::new();
    let batch = manager.plan(&[(seq, n)], &mut moves)?;
    store.carry_out(&moves);
    store.write(manager, &batch, None, 0);
    manager.commit(&batch)?;
    manager.check().unwrap();
    Ok(batch)
}

/// Shorter calls for caches of one group without a second tier.
pub trait OneGroup {
    fn admit(&mut self, tokens: &[u32], salt: Option<&[u8]>, use_prefix: bool) -> kvcore::Result<SeqId>;
    fn found(&self, tokens: &[u32], salt: Option<&[u8]>) -> Vec<BlockId>;
    fn known(&self, tokens: &[u32], salt: Option<&[u8]>) -> usize;
    fn table(&self, seq: SeqId) -> kvcore::Result<&[BlockId]>;
}

impl OneGroup for BlockManager {
    fn admit(&mut self, tokens: &[u32], salt: Option<&[u8]>, use_prefix: bool) -> kvcore::Result<SeqId> {
        let mut moves = Vec::new();
        let seq = self.add(tokens, &AddOptions { use_prefix, ..AddOptions::salted(salt) }, &mut moves)?;
        assert!(moves.is_empty());
        Ok(seq)
    }

    fn found(&self, tokens: &[u32], salt: Option<&[u8]>) -> Vec<BlockId> {
        self.find_prefix(tokens, Key { salt, ..Key::default() }).tables.remove(0)
    }

    fn known(&self, tokens: &[u32], salt: Option<&[u8]>) -> usize {
        self.find_prefix(tokens, Key { salt, ..Key::default() }).num_tokens
    }

    fn table(&self, seq: SeqId) -> kvcore::Result<&[BlockId]> {
        self.block_table(seq, 0)
    }
}
