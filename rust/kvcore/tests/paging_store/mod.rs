//! A store that knows what lies in every slot, in place of bytes: what a real one would get wrong shows here.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::rc::Rc;

use kvcore::paging::{Batch, BlockCopy, BlockId, BlockManager, SeqId};

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
    blocks: Vec<Vec<Slot>>,
}

impl Store {
    pub fn new(num_blocks: usize, block_size: usize) -> Self {
        Self { block_size, blocks: vec![vec![Slot::Garbage; block_size]; num_blocks] }
    }

    pub fn copy(&mut self, copies: &[BlockCopy]) {
        for copy in copies {
            self.blocks[copy.dst.index()] = self.blocks[copy.src.index()].clone();
        }
    }

    pub fn get(&self, table: &[BlockId], position: usize) -> &Slot {
        &self.blocks[table[position / self.block_size].index()][position % self.block_size]
    }

    pub fn set(&mut self, table: &[BlockId], position: usize, slot: Slot) {
        self.blocks[table[position / self.block_size].index()][position % self.block_size] = slot;
    }

    /// Writes some layers of the planned tokens only.
    pub fn write_half(&mut self, batch: &Batch) {
        for row in &batch.rows {
            for position in row.start..row.start + row.len {
                self.set(&row.blocks, position, Slot::Garbage);
            }
        }
    }

    /// Writes the planned tokens in every layer.
    pub fn write(&mut self, manager: &BlockManager, batch: &Batch, salt: Option<&[u8]>, version: u64) {
        for row in &batch.rows {
            let tokens = manager.token_ids(row.seq).unwrap();
            for position in row.start..row.start + row.len {
                self.set(&row.blocks, position, token(tokens, position, salt, version));
            }
        }
    }

    /// Panics unless every computed token of the sequence is where its table says.
    pub fn assert_reads(&self, manager: &BlockManager, seq: SeqId, salt: Option<&[u8]>, version: u64) {
        let (tokens, table) = (manager.token_ids(seq).unwrap(), manager.block_table(seq).unwrap());
        for position in 0..manager.num_computed_tokens(seq).unwrap() {
            assert_eq!(*self.get(table, position), token(tokens, position, salt, version), "position {position}");
        }
    }
}

pub fn token(tokens: &[u32], position: usize, salt: Option<&[u8]>, version: u64) -> Slot {
    Slot::Token(Content { version, salt: salt.map(<[u8]>::to_vec), prefix: tokens[..=position].into() })
}

/// Plans, copies, writes and commits `n` tokens of one sequence.
pub fn run(manager: &mut BlockManager, store: &mut Store, seq: SeqId, n: usize) -> kvcore::Result<Batch> {
    let mut copies = Vec::new();
    let batch = manager.plan(&[(seq, n)], &mut copies)?;
    store.copy(&copies);
    store.write(manager, &batch, None, 0);
    manager.commit(&batch)?;
    manager.check().unwrap();
    Ok(batch)
}
