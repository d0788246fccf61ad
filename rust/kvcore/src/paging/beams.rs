//! Branches of a sequence: by reference until one of them writes.
//!
//! ```text
//! reorder(seqs, parents): result[i] continues seqs[parents[i]]
//!     the first that continues a parent keeps its handle, further ones are forks, parents without any are freed
//! ```
#![forbid(unsafe_code)]

use std::collections::HashSet;

use super::block::BlockId;
use super::blocks::Blocks;
use super::manager::BlockManager;
use super::pool::BlockPool;
use super::sequence::{SeqId, Sequence};
use crate::{Error, Result};

impl BlockManager {
    /// A second sequence with the same tokens that shares every computed block by reference, and the blocks of an
    /// encoder. What the first has planned but not committed is forgotten. Errors: `InvalidHandle`, `OutOfMemory`.
    pub fn fork(&mut self, seq: SeqId) -> Result<SeqId> {
        // What could fail comes first.
        self.sequences.make_room()?;
        let sequence = self.sequences.get_mut(seq)?;
        let (tokens, tables) = sequence.copied()?;
        self.blocks.release_plan(sequence, self.config.block_size)?;
        self.blocks.share(sequence)?;
        if let Some(cross) = &mut self.cross
            && let Err(error) = retain_all(cross, &sequence.cross)
        {
            self.blocks.unshare(sequence, usize::MAX)?;
            return Err(error);
        }
        let child = sequence.child(tokens, tables);
        self.blocks.classes.hold(child.class);
        child.marks.iter().for_each(|mark| self.blocks.classes.hold(mark.class));
        Ok(self.sequences.insert(child))
    }

    /// Beam search: `result[i]` continues `seqs[parents[i]]`. The first use of a parent keeps its handle, others are
    /// forks (for which what the parent planned is forgotten), unused parents are freed.
    ///
    /// Errors, with nothing changed: `InvalidHandle`; `InvalidArgument` for a parent outside `seqs`, a sequence that is
    /// named twice, or no parent at all.
    pub fn reorder(&mut self, seqs: &[SeqId], parents: &[usize]) -> Result<Vec<SeqId>> {
        let mut seen = HashSet::with_capacity(seqs.len());
        for (index, &seq) in seqs.iter().enumerate() {
            self.sequences.get(seq)?;
            if !seen.insert(seq) {
                return Err(Error::InvalidArgument(format!("seqs: item {index} names a sequence a second time")));
            }
        }
        if parents.is_empty() {
            return Err(Error::InvalidArgument("parents: expected one or more, got none".into()));
        }
        if let Some(&parent) = parents.iter().find(|&&parent| parent >= seqs.len()) {
            let known = seqs.len();
            return Err(Error::InvalidArgument(format!(
                "parents: expected a position in seqs, which has {known}, got {parent}"
            )));
        }
        let mut used = vec![false; seqs.len()];
        let mut result = Vec::with_capacity(parents.len());
        let mut forks = Vec::new();
        for &parent in parents {
            if !std::mem::replace(&mut used[parent], true) {
                result.push(seqs[parent]);
                continue;
            }
            match self.fork(seqs[parent]) {
                Ok(fork) => {
                    forks.push(fork);
                    result.push(fork);
                }
                Err(error) => {
                    forks.into_iter().try_for_each(|fork| self.free(fork))?;
                    return Err(error);
                }
            }
        }
        for (&seq, _) in seqs.iter().zip(used).filter(|(_, used)| !used) {
            self.free(seq)?;
        }
        Ok(result)
    }

    /// Takes blocks for K and V of an encoder's `num_tokens` tokens: once per sequence, shared by its forks.
    /// What is planned but not committed is forgotten, because its batch does not know these blocks. Errors, with
    /// nothing changed: `InvalidHandle`; `InvalidArgument` for 0 tokens; `InvalidState` the second time, or for a cache
    /// without a pool for it; `OutOfBlocks`.
    pub fn reserve_cross(&mut self, seq: SeqId, num_tokens: usize) -> Result<&[BlockId]> {
        let block_size = self.config.block_size;
        let sequence = self.sequences.get_mut(seq)?;
        let Some(pool) = &mut self.cross else {
            return Err(Error::InvalidState("this cache has no layers for cross attention".into()));
        };
        if sequence.cross_tokens > 0 {
            return Err(Error::InvalidState("the sequence has the K and V of its encoder already".into()));
        }
        if num_tokens == 0 {
            return Err(Error::InvalidArgument("num_tokens: expected 1 or more, got 0".into()));
        }
        let (needed, available) = (num_tokens.div_ceil(block_size), pool.num_free());
        if needed > available {
            return Err(Error::OutOfBlocks { needed, available, total: pool.num_blocks() });
        }
        sequence.cross.extend((0..needed).map_while(|_| pool.allocate()));
        for (index, &block) in sequence.cross.iter().enumerate() {
            pool.set_filled(block, block_size.min(num_tokens - index * block_size));
        }
        sequence.cross_tokens = num_tokens;
        // A batch that was planned before does not know these blocks.
        self.blocks.release_plan(sequence, block_size)?;
        Ok(&sequence.cross)
    }

    /// Gives `seq` the encoder's blocks of `source`, by reference: another sequence with the same encoder input. What is
    /// planned but not committed is forgotten. Errors, with nothing changed: `InvalidHandle`; `InvalidState` if `seq` has
    /// such blocks already, or `source` has none.
    pub fn share_cross(&mut self, seq: SeqId, source: SeqId) -> Result<()> {
        let (blocks, num_tokens) = self.cross(source)?;
        let blocks = blocks.to_vec();
        let sequence = self.sequences.get_mut(seq)?;
        let (Some(pool), 1..) = (&mut self.cross, num_tokens) else {
            return Err(Error::InvalidState("the source has no K and V of an encoder".into()));
        };
        if sequence.cross_tokens > 0 {
            return Err(Error::InvalidState("the sequence has the K and V of its encoder already".into()));
        }
        retain_all(pool, &blocks)?;
        (sequence.cross, sequence.cross_tokens) = (blocks, num_tokens);
        self.blocks.release_plan(sequence, self.config.block_size)
    }

    /// The blocks of `reserve_cross` and the tokens in them; none and 0 before. Errors: `InvalidHandle`.
    pub fn cross(&self, seq: SeqId) -> Result<(&[BlockId], usize)> {
        let sequence = self.sequences.get(seq)?;
        Ok((&sequence.cross, sequence.cross_tokens))
    }
}

impl Blocks {
    /// One reference more to every block, or an error and no reference more to any.
    fn share(&mut self, sequence: &Sequence) -> Result<()> {
        let mut done = 0;
        for (group, table) in self.groups.iter_mut().zip(&sequence.tables) {
            for &block in table.held() {
                if let Err(error) = group.pool.retain(block) {
                    self.unshare(sequence, done)?;
                    return Err(error);
                }
                done += 1;
            }
        }
        if sequence.borrowed {
            for (group, table) in self.groups.iter_mut().zip(&sequence.tables) {
                table.blocks.last().into_iter().for_each(|&last| group.pool.lend(last));
            }
        }
        Ok(())
    }

    /// Takes back the first `count` references of `share`; `usize::MAX`: all of it.
    fn unshare(&mut self, sequence: &Sequence, count: usize) -> Result<()> {
        let mut left = count;
        for (group, table) in self.groups.iter_mut().zip(&sequence.tables) {
            if let (true, usize::MAX, Some(&last)) = (sequence.borrowed, count, table.blocks.last()) {
                group.pool.unlend(last);
            }
            let held = &table.held()[..left.min(table.held().len())];
            group.pool.release_all(held)?;
            left -= held.len();
        }
        Ok(())
    }
}

fn retain_all(pool: &mut BlockPool, blocks: &[BlockId]) -> Result<()> {
    for (done, &block) in blocks.iter().enumerate() {
        if let Err(error) = pool.retain(block) {
            pool.release_all(&blocks[..done])?;
            return Err(error);
        }
    }
    Ok(())
}
