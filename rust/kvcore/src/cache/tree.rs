//! Trees of drafts: planned as rows that branch, committed as one path each.
//!
//! ```text
//! plan_trees(items, parents)    slots as for rows that follow each other: start + row
//! write, attend                 a row sees the tokens before, and of the tree its own path
//! commit_rows(batch, keep)      for each i, row of the path, in every layer:
//!                                   slot start + i = what slot start + row has
//!                               the slots behind are given back, the tokens of other rows forgotten
//! ```
//! Rows of a path ascend, so no slot is read after it was overwritten. Afterwards all is as if the path had been
//! planned and written without the tree. (Trees of drafts as in SpecInfer, Miao et al., 2024.)
#![forbid(unsafe_code)]

use super::{Batch, KvCache};
use crate::attention::MAX_TREE_ROWS;
use crate::paging::SeqId;
use crate::{Error, Result};

/// The most rows of all trees of a plan: attention notes the path of each.
pub const MAX_ROWS_OF_TREES: usize = 1 << 16;

/// The drafts of one sequence: the row that each row follows, and how many rows are before it on its path.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    parents: Vec<Option<usize>>,
    depths: Vec<usize>,
}

impl Tree {
    /// The tree of the plan's item `item`, of `len` rows.
    fn new(item: usize, parents: Vec<Option<usize>>, len: usize) -> Result<Self> {
        let wrong = |what: String| Err(Error::InvalidArgument(format!("parents[{item}]: {what}")));
        if parents.len() != len {
            return wrong(format!("expected one for each of {len} new tokens, got {}", parents.len()));
        }
        if len > MAX_TREE_ROWS {
            return wrong(format!("expected a tree of at most {MAX_TREE_ROWS} rows, got {len}"));
        }
        let mut depths: Vec<usize> = Vec::with_capacity(len);
        for (row, parent) in parents.iter().enumerate() {
            depths.push(match parent.map(|parent| depths.get(parent).ok_or(parent)) {
                None => 0,
                Some(Ok(depth)) => depth + 1,
                Some(Err(parent)) => {
                    return wrong(format!("expected that row {row} follows none or one before it, got row {parent}"));
                }
            });
        }
        Ok(Self { parents, depths })
    }

    pub fn parents(&self) -> &[Option<usize>] {
        &self.parents
    }

    pub fn depth(&self, row: usize) -> usize {
        self.depths[row]
    }
}

/// Trees for each item of a plan, none for rows that follow each other.
fn trees(items: &[(SeqId, usize)], parents: Vec<Option<Vec<Option<usize>>>>) -> Result<Vec<Option<Tree>>> {
    if parents.len() != items.len() {
        let (expected, got) = (items.len(), parents.len());
        return Err(Error::InvalidArgument(format!(
            "parents: expected those of each of {expected} sequences, got those of {got}"
        )));
    }
    let rows: usize = parents.iter().flatten().map(Vec::len).sum();
    if rows > MAX_ROWS_OF_TREES {
        return Err(Error::InvalidArgument(format!(
            "parents: expected at most {MAX_ROWS_OF_TREES} rows in all trees, got {rows}"
        )));
    }
    let tree = |(item, (parents, &(_, len))): (usize, (Option<Vec<Option<usize>>>, _))| {
        parents.map(|parents| Tree::new(item, parents, len)).transpose()
    };
    parents.into_iter().zip(items).enumerate().map(tree).collect()
}

/// That `rows`, which ascend below the number of rows, are a path from the beginning to one row.
fn check_path(item: usize, rows: &[usize], parent: impl Fn(usize) -> Option<usize>) -> Result<()> {
    let mut before = None;
    for &row in rows {
        if parent(row) != before {
            let name = |row: Option<usize>| row.map_or("the token before the plan".into(), |row| format!("row {row}"));
            return Err(Error::InvalidArgument(format!(
                "keep[{item}]: expected a path: row {row} follows {}, got it after {}",
                name(parent(row)),
                name(before)
            )));
        }
        before = Some(row);
    }
    Ok(())
}

impl KvCache {
    /// As [`Self::plan`], for new tokens that may branch: for each item `None` if they follow each other, or for each
    /// of its new tokens the row (counted among them) that it follows, `None` for the token before them. A batch with
    /// trees is committed with [`Self::commit_rows`].
    ///
    /// # Errors
    /// As [`Self::plan`]; [`Error::InvalidArgument`] for parents that do not fit the items, that are not before their
    /// row, or that are more than [`MAX_TREE_ROWS`] or, all together, [`MAX_ROWS_OF_TREES`]. Nothing is changed then.
    pub fn plan_trees(&mut self, items: &[(SeqId, usize)], parents: Vec<Option<Vec<Option<usize>>>>) -> Result<Batch> {
        let trees = trees(items, parents)?;
        Ok(Batch { trees, ..self.plan(items)? })
    }

    /// Commit one path of each sequence: rows of its plan from one that follows the token before it to any other, in
    /// order; of rows that follow each other the first ones. `None`: all rows, of a sequence without a tree. The slots
    /// of other rows are given back, and their tokens are forgotten; tokens behind the plan stay behind the path. Then
    /// all is as if the paths had been planned, written and committed alone. The batch is stale afterwards.
    ///
    /// # Errors
    /// As [`Self::commit`]; [`Error::InvalidArgument`] for rows that are no path, `None` for a tree, and a sequence
    /// that would be left without tokens. Nothing is changed then.
    pub fn commit_rows(&mut self, batch: &Batch, keep: &[Option<&[usize]>]) -> Result<()> {
        self.tick();
        self.manager.check_commit_rows(&batch.plan, keep)?;
        for (item, rows) in keep.iter().enumerate() {
            match (batch.tree(item), rows) {
                (Some(tree), Some(rows)) => check_path(item, rows, |row| tree.parents[row])?,
                (None, Some(rows)) => check_path(item, rows, |row| row.checked_sub(1))?,
                (Some(_), None) => return Err(no_path(item)),
                (None, None) => {}
            }
        }
        self.check_written(batch)?;
        for (row, kept) in batch.plan.rows.iter().zip(keep) {
            let moves = kept.iter().flat_map(|kept| kept.iter().enumerate()).filter(|(at, from)| at != *from);
            for (at, &from) in moves {
                for (store, table) in self.stores.iter_mut().zip(&row.tables) {
                    let block_size = store.layout().block_size;
                    let slot = |row: usize| (table[row / block_size], row % block_size);
                    store.copy_token(slot(row.start + from), slot(row.start + at));
                }
            }
        }
        self.manager.commit_rows(&batch.plan, keep)
    }
}

/// That a tree's rows are all to be committed.
pub(super) fn no_path(item: usize) -> Error {
    Error::InvalidArgument(format!("keep[{item}]: expected the rows of one path of the sequence's tree, got None"))
}
