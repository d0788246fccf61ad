//! Writes K and V of planned tokens, attends with their queries, and reads back what is stored.
#![forbid(unsafe_code)]

use super::tree::Tree;
use super::{Batch, KvCache, Place};
use crate::attention::{self, Bias, Call, Mask, Output, Rows, Scoring};
use crate::paging::{BlockId, SeqId};
use crate::simd::Level;
use crate::storage::{KvStore, Layout};
use crate::threads::ShouldStop;
use crate::{Error, Result};

/// What a query does with what it sees.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttendOptions<'a> {
    /// Multiplies the scores; `None`: 1 / sqrt(head_dim). A latent layer needs it: the width of its rows says nothing
    /// about that of the heads.
    pub scale: Option<f32>,
    /// Tokens that a query sees, its own among them; `None`: all that the layer keeps.
    pub window: Option<usize>,
    /// Bends scores to stay within plus and minus this.
    pub softcap: Option<f32>,
    /// Is added to the scores.
    pub bias: Bias<'a>,
    /// One logit for each query head that takes part in the softmax's sum.
    pub sinks: Option<&'a [f32]>,
}

/// Dense K and V, `[tokens, KV heads, width]` each.
#[derive(Debug, Clone, PartialEq)]
pub struct Dense {
    /// Position of the first token: not 0 where a sliding window has passed.
    pub start: usize,
    /// Tokens.
    pub tokens: usize,
    /// K.
    pub k: Vec<f32>,
    /// V.
    pub v: Vec<f32>,
}

impl KvCache {
    /// The shape of a layer; `None` for one that keeps nothing.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a layer that is not there.
    pub fn layout_of(&self, layer: usize) -> Result<Option<Layout>> {
        Ok(match self.place(layer)? {
            Place::Paged { group, .. } => Some(*self.stores[group].layout()),
            Place::Cross { .. } => self.cross.as_ref().map(|store| *store.layout()),
            Place::Nowhere => None,
        })
    }

    /// Store K and V of the planned tokens in one layer: `[new tokens, KV heads, head_dim]` each, in the plan's order;
    /// of latent layers only K, which is the whole row. May be called again for a layer until the batch is committed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a layer or shape that does not fit, [`Error::StaleBatch`],
    /// [`Error::InvalidState`] after the commit.
    pub fn write(&mut self, layer: usize, batch: &mut Batch, k: &[f32], v: Option<&[f32]>) -> Result<()> {
        let Place::Paged { group, index } = self.place(layer)? else {
            return Err(Error::InvalidArgument(format!("write: layer {layer} keeps no K and V of new tokens")));
        };
        self.manager.validate(&batch.plan)?;
        if self.manager.is_committed(&batch.plan) {
            return Err(Error::InvalidState("write: the batch is committed, its blocks may be shared".into()));
        }
        let l = *self.stores[group].layout();
        let v_width = if l.latent { None } else { Some(l.v_dim) };
        for (name, len, width) in [("k", Some(k.len()), Some(l.k_dim)), ("v", v.map(<[f32]>::len), v_width)] {
            let expected = width.map(|width| batch.num_tokens() * l.num_kv_heads * width);
            if len != expected {
                return Err(Error::InvalidArgument(match expected {
                    None => format!("{name}: expected none in a latent layer, whose rows are K and V at once"),
                    Some(_) => format!(
                        "{name}: expected {} new tokens x {} KV heads x {} dimensions, got {} values",
                        batch.num_tokens(),
                        l.num_kv_heads,
                        width.unwrap_or(0),
                        len.unwrap_or(0)
                    ),
                }));
            }
        }
        let slots = batch.plan.rows.iter().flat_map(|row| {
            let table = &row.tables[group];
            (row.start..row.start + row.len).map(|p| (table[p / l.block_size], p % l.block_size))
        });
        self.stores[group].write(self.level, index, slots, k, v);
        batch.written[layer] = true;
        Ok(())
    }

    /// Attend with the planned tokens' queries in one layer: `q` is `[new tokens, q heads, head_dim]` and `out` as many
    /// rows of V's width. A row sees its own token and what its layer keeps before it; in a cross layer the whole
    /// encoder's memory.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for what does not fit, [`Error::StaleBatch`], [`Error::InvalidState`] if the layer
    /// is not written, [`Error::Interrupted`].
    #[expect(clippy::too_many_arguments, reason = "the call that everything else exists for")]
    pub fn attend(
        &self,
        layer: usize,
        batch: &Batch,
        num_q_heads: usize,
        options: AttendOptions<'_>,
        q: &[f32],
        output: Output<'_>,
        should_stop: ShouldStop<'_>,
    ) -> Result<()> {
        self.with_call(layer, batch, num_q_heads, options, q, |call| {
            attention::attend(self.level, &self.threads, call, output, should_stop)
        })
    }

    /// The attention weights of some rows of the batch's sequence `index` (counted from its first planned token) and some
    /// query heads: `[rows, heads, tokens]`, tokens being those up to the last planned one; of a tree the tokens of the
    /// row's path, by position. `q` as for [`Self::attend`].
    ///
    /// # Errors
    /// As [`Self::attend`]; [`Error::InvalidArgument`] for an index, a row or a head that is not there,
    /// [`Error::OutOfMemory`].
    #[expect(clippy::too_many_arguments, reason = "as attend, and what to show")]
    pub fn attention_weights(
        &self,
        layer: usize,
        batch: &Batch,
        num_q_heads: usize,
        options: AttendOptions<'_>,
        q: &[f32],
        (index, rows, q_heads): (usize, &[usize], &[usize]),
        should_stop: ShouldStop<'_>,
    ) -> Result<(usize, Vec<f32>)> {
        self.with_call(layer, batch, num_q_heads, options, q, |call| {
            let tokens = call.rows.get(index).map_or(0, Rows::tokens);
            let len = rows.len().saturating_mul(q_heads.len()).saturating_mul(tokens);
            let mut out = Vec::new();
            out.try_reserve_exact(len).map_err(|e| Error::OutOfMemory {
                bytes: len.saturating_mul(size_of::<f32>()),
                what: "the weights",
                reason: e.to_string(),
            })?;
            out.resize(len, 0.0);
            attention::attention_weights(self.level, call, index, rows, q_heads, &mut out, should_stop)?;
            Ok((tokens, out))
        })
    }

    /// Make the call that `attend` and `attention_weights` describe, and use it.
    fn with_call<T>(
        &self,
        layer: usize,
        batch: &Batch,
        num_q_heads: usize,
        options: AttendOptions<'_>,
        q: &[f32],
        run: impl FnOnce(&Call<'_>) -> Result<T>,
    ) -> Result<T> {
        let place = self.place(layer)?;
        self.manager.validate(&batch.plan)?;
        if options.window == Some(0) {
            return Err(Error::InvalidArgument("window: expected at least 1, got 0".into()));
        }
        let (store, index, rows) = match place {
            Place::Nowhere => {
                return Err(Error::InvalidArgument(format!(
                    "attend: layer {layer} is of kind none: it keeps no K and V"
                )));
            }
            Place::Paged { group, index } => {
                if !batch.written[layer] {
                    return Err(Error::InvalidState(format!(
                        "attend: layer {layer} of this batch is not written; call write({layer}, batch, k, v) first"
                    )));
                }
                let own = self.paged_groups().nth(group).and_then(|spec| spec.kind.window());
                let mask = match own.into_iter().chain(options.window).min() {
                    None => Mask::Causal,
                    Some(window) => Mask::Window(window),
                };
                let rows = batch.plan.rows.iter().enumerate().map(|(i, r)| Rows {
                    parents: batch.tree(i).map(Tree::parents),
                    ..Rows::new(&r.tables[group], r.start, r.len, mask)
                });
                (&self.stores[group], index, rows.collect())
            }
            Place::Cross { index } => {
                if options.window.is_some() {
                    return Err(Error::InvalidArgument(format!(
                        "window: expected none in layer {layer}, which is of kind cross: every query sees all of it"
                    )));
                }
                let Some(store) = &self.cross else { return Err(missing(layer)) };
                (store, index, self.cross_rows(layer, index, batch)?)
            }
        };
        let layout = store.layout();
        let scale = match options.scale {
            Some(scale) => scale,
            None if layout.latent => {
                return Err(Error::InvalidArgument(
                    "scale: a latent layer needs it (1 / sqrt of the width of an expanded head), got none".into(),
                ));
            }
            None => (layout.k_dim as f32).sqrt().recip(),
        };
        let AttendOptions { softcap, bias, sinks, .. } = options;
        let scoring = Scoring { scale, softcap, bias, sinks };
        run(&Call { view: store.layer(index), rows: &rows, num_q_heads, scoring, q })
    }

    fn cross_rows<'a>(&self, layer: usize, index: usize, batch: &'a Batch) -> Result<Vec<Rows<'a>>> {
        let written = |row: &crate::paging::BatchSeq| {
            row.cross.first().is_some_and(|&first| self.cross_written.has(first, index))
        };
        if let Some(at) = batch.plan.rows.iter().position(|row| !written(row)) {
            return Err(Error::InvalidState(format!(
                "attend: layer {layer} of the batch's sequence {at} has no encoder memory; call write_cross({layer}, \
                 seq, k, v) before the plan"
            )));
        }
        let rows = batch.plan.rows.iter().enumerate().map(|(i, row)| Rows {
            parents: batch.tree(i).map(Tree::parents),
            ..Rows::new(&row.cross, row.start, row.len, Mask::Cross { tokens: row.cross_tokens })
        });
        Ok(rows.collect())
    }

    /// Dense copies of a sequence's stored K and V in one layer. In a latent layer V is the first part of K's rows.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`], [`Error::InvalidArgument`] for a layer that is not there or keeps nothing,
    /// [`Error::InvalidState`] for a cross layer that is not written, [`Error::OutOfMemory`].
    pub fn read(&self, layer: usize, seq: SeqId) -> Result<Dense> {
        let tokens = self.manager.num_computed_tokens(seq)?;
        match self.place(layer)? {
            Place::Nowhere => Err(Error::InvalidArgument(format!("read: layer {layer} is of kind none"))),
            Place::Paged { group, index } => {
                let table = self.manager.block_table(seq, group)?;
                let returned = table.iter().take_while(|&&block| block == BlockId::NONE).count();
                let start = (returned * self.config.block_size).min(tokens);
                dense(self.level, &self.stores[group], index, &table[returned..], start, tokens - start)
            }
            Place::Cross { index } => {
                let Some(store) = &self.cross else { return Err(missing(layer)) };
                let (blocks, tokens) = self.manager.cross(seq)?;
                if !blocks.first().is_some_and(|&first| self.cross_written.has(first, index)) {
                    return Err(Error::InvalidState(format!("read: layer {layer} of this sequence is not written")));
                }
                dense(self.level, store, index, blocks, 0, tokens)
            }
        }
    }
}

fn dense(
    level: Level,
    store: &KvStore,
    index: usize,
    blocks: &[BlockId],
    start: usize,
    tokens: usize,
) -> Result<Dense> {
    let l = store.layout();
    let zeros = |width: usize| {
        let (len, mut values) = (tokens * l.num_kv_heads * width, Vec::new());
        values.try_reserve_exact(len).map_err(|e| Error::OutOfMemory {
            bytes: len * size_of::<f32>(),
            what: "a copy of K and V",
            reason: e.to_string(),
        })?;
        values.resize(len, 0.0);
        Ok(values)
    };
    let (mut k, mut v) = (zeros(l.k_dim)?, zeros(l.v_dim)?);
    store.read_into(level, index, blocks, &mut k, &mut v);
    Ok(Dense { start, tokens, k, v })
}

pub(super) fn missing(layer: usize) -> Error {
    Error::InvalidState(format!("layer {layer} is of a group that this cache does not have"))
}
