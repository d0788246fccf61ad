//! What was planned becomes computed: all of it, or some rows of each sequence.
//!
//! ```text
//! commit(batch):             planned tokens count as computed and are published
//! commit_rows(batch, kept):  the caller has moved K and V of the kept rows to the front of the slots
//!                            tokens = those before the plan, those of the kept rows, those behind the plan
//!                            blocks wholly behind the kept rows go back; then as commit; the batch ends
//! ```
#![forbid(unsafe_code)]

use super::batch::{Batch, BatchSeq};
use super::blocks::Blocks;
use super::manager::BlockManager;
use super::sequence::Sequence;
use crate::{Error, Result};

impl BlockManager {
    /// Counts the planned tokens as computed and publishes them. The caller has written K and V of every layer.
    ///
    /// Errors, with nothing changed: those of `validate`, `InvalidState` for a batch committed before,
    /// `InvalidArgument` for one whose rows are not those of the plan.
    pub fn commit(&mut self, batch: &Batch) -> Result<()> {
        self.check_commit(batch)?;
        batch.rows.iter().try_for_each(|row| self.commit_sequence(row))
    }

    /// Counts the planned tokens of some rows (counted within each sequence's; `None`: all of them) as computed, one
    /// after the other, and publishes them; the tokens of the other rows are forgotten. The caller has written K and V
    /// of every layer, and moved those of the kept rows to the front of the new slots. The batch is stale afterwards.
    ///
    /// Errors, with nothing changed: those of `commit`; `InvalidArgument` unless there are rows for each sequence that
    /// ascend below its number of planned tokens, and for a sequence that would be left without tokens.
    pub fn commit_rows(&mut self, batch: &Batch, kept: &[Option<&[usize]>]) -> Result<()> {
        self.check_commit_rows(batch, kept)?;
        for (row, kept) in batch.rows.iter().zip(kept) {
            let sequence = self.sequences.get_mut(row.seq)?;
            if let Some(kept) = kept {
                self.blocks.keep_rows(sequence, kept, self.config.block_size)?;
            }
            self.commit_sequence(row)?;
            self.sequences.get_mut(row.seq)?.forget_plan();
        }
        Ok(())
    }

    /// The errors of [`Self::commit_rows`], before anything is moved.
    pub fn check_commit_rows(&self, batch: &Batch, kept: &[Option<&[usize]>]) -> Result<()> {
        self.check_commit(batch)?;
        if kept.len() != batch.rows.len() {
            let (expected, got) = (batch.rows.len(), kept.len());
            return Err(Error::InvalidArgument(format!(
                "keep: expected the rows of each of {expected} sequences, got those of {got}"
            )));
        }
        for (item, (row, kept)) in batch.rows.iter().zip(kept).enumerate() {
            let Some(kept) = kept else { continue };
            if let Some(&row) = kept.iter().find(|&&kept| kept >= row.len) {
                let last = batch.rows[item].len - 1;
                return Err(Error::InvalidArgument(format!("keep[{item}]: expected rows from 0 to {last}, got {row}")));
            }
            if let Some(pair) = kept.windows(2).find(|pair| pair[0] >= pair[1]) {
                return Err(Error::InvalidArgument(format!(
                    "keep[{item}]: expected rows that ascend, got {} before {}",
                    pair[0], pair[1]
                )));
            }
            if kept.is_empty() && self.sequences.get(row.seq)?.tokens.len() == row.len {
                return Err(Error::InvalidArgument(format!(
                    "keep[{item}]: expected at least one row, since the sequence has no other tokens, got none"
                )));
            }
        }
        Ok(())
    }

    fn check_commit(&self, batch: &Batch) -> Result<()> {
        self.validate(batch)?;
        if self.is_committed(batch) {
            return Err(Error::InvalidState("the batch was committed already".into()));
        }
        for (row, of) in batch.rows.iter().enumerate() {
            let sequence = self.sequences.get(of.seq)?;
            if (of.start, of.len) != (sequence.computed, sequence.planned) {
                return Err(Error::InvalidArgument(format!("row {row} of the batch was altered after the plan")));
            }
        }
        Ok(())
    }

    fn commit_sequence(&mut self, row: &BatchSeq) -> Result<()> {
        let block_size = self.config.block_size;
        let sequence = self.sequences.get_mut(row.seq)?;
        let end = sequence.computed + sequence.planned;
        for (group, table) in self.blocks.groups.iter_mut().zip(&sequence.tables) {
            for index in (sequence.computed / block_size).max(table.returned)..table.blocks.len() {
                group.pool.set_filled(table.blocks[index], block_size.min(end - index * block_size));
            }
        }
        sequence.computed = end;
        sequence.planned = 0;
        sequence.committed = true;
        if sequence.use_prefix && sequence.era == self.era {
            self.blocks.publish(sequence, block_size);
        }
        Ok(())
    }
}

impl Blocks {
    /// Of the planned tokens those of these rows stay, and blocks for them.
    fn keep_rows(&mut self, sequence: &mut Sequence, kept: &[usize], block_size: usize) -> Result<()> {
        let (start, planned) = (sequence.computed, sequence.planned);
        let blocks = (start + kept.len()).div_ceil(block_size);
        for (group, table) in self.groups.iter_mut().zip(&mut sequence.tables) {
            group.pool.release_all(&table.blocks[blocks..])?;
            table.blocks.truncate(blocks);
        }
        for (at, &row) in kept.iter().enumerate() {
            sequence.tokens[start + at] = sequence.tokens[start + row];
        }
        sequence.tokens.drain(start + kept.len()..start + planned);
        sequence.planned = kept.len();
        let known = sequence.tokens.len();
        for mark in &mut sequence.marks {
            mark.num_tokens = mark.num_tokens.min(known);
        }
        Ok(())
    }
}
