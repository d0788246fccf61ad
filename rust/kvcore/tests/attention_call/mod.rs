//! One call of attention, with all that it needs in its own hands, so that a test can break any of it; and what the
//! oracle says of it.

use std::borrow::Cow;
use std::collections::BTreeSet;

use half::bf16;
use kvcore::attention::reference::Dense;
use kvcore::attention::{Call, Mask, Output, Rows, attend, attention_weights};
use kvcore::paging::BlockId;
use kvcore::simd::Level;
use kvcore::storage::{KvDtype, KvStore, ScaleMode, Scales};
use kvcore::threads::{ShouldStop, Threads};
use kvcore::{Error, Result};

use crate::attention_inputs::{Random, Shape, Style};

/// What outputs hold before a call.
pub const UNTOUCHED: f32 = -12345.5;

/// A sequence's part of a call, as it is drawn.
#[derive(Clone, Debug)]
pub struct Drawn {
    /// Tokens before the first row.
    pub start: usize,
    pub len: usize,
    /// A width of 0 is the causal mask.
    pub window: usize,
    /// Attends to `start + len` tokens of another sequence, from a position of its own.
    pub cross: Option<usize>,
    /// Whether the rows branch.
    pub tree: bool,
    /// How much of the table is that of the sequence before, and how much of the rest are any blocks.
    pub shared: f32,
    pub mixed: f32,
}

/// A sequence's part of a call.
#[derive(Clone, Debug)]
pub struct Seq {
    pub table: Vec<BlockId>,
    pub start: usize,
    pub len: usize,
    pub mask: Mask,
    pub parents: Option<Vec<Option<usize>>>,
}

impl Seq {
    pub fn rows(&self) -> Rows<'_> {
        Rows { parents: self.parents.as_deref(), ..Rows::new(&self.table, self.start, self.len, self.mask) }
    }

    /// The tokens that any row sees.
    pub fn seen(&self) -> std::ops::Range<usize> {
        match self.len {
            0 => 0..0,
            len => self.mask.sees(self.start).start..self.mask.sees(self.start + len - 1).end,
        }
    }

    /// The rows that a row follows and itself, in order: the slots from `start` on that it sees.
    fn path(&self, row: usize) -> Vec<usize> {
        let Some(parents) = &self.parents else { return (0..=row).collect() };
        let mut path = vec![row];
        while let Some(parent) = parents[path[path.len() - 1]] {
            path.push(parent);
        }
        path.reverse();
        path
    }

    /// The position of a row.
    pub fn position(&self, row: usize) -> usize {
        self.start + self.path(row).len() - 1
    }
}

/// A call but for the store.
#[derive(Clone, Debug)]
pub struct Parts {
    pub seqs: Vec<Seq>,
    pub num_q_heads: usize,
    pub scale: f32,
    pub style: Style,
    pub q: Vec<f32>,
    /// Lengths of the outputs.
    pub out: usize,
    pub lse: usize,
}

/// A result: the output, and the logarithms of the sums.
pub type Results = (Vec<f32>, Vec<f32>);

impl Parts {
    fn call<'a>(&'a self, store: &'a KvStore, rows: &'a [Rows<'a>]) -> Call<'a> {
        let scoring = self.style.scoring(self.scale);
        Call { view: store.layer(0), rows, num_q_heads: self.num_q_heads, scoring, q: &self.q }
    }

    /// Attend; the outputs come back whatever happens.
    pub fn attend(
        &self,
        store: &KvStore,
        level: Level,
        threads: usize,
        should_stop: ShouldStop<'_>,
    ) -> (Result<()>, Results) {
        let rows: Vec<Rows> = self.seqs.iter().map(Seq::rows).collect();
        let (mut out, mut lse) = (vec![UNTOUCHED; self.out], vec![UNTOUCHED; self.lse]);
        let output = Output { out: &mut out, lse: Some(&mut lse) };
        let threads = Threads::new(Some(threads)).unwrap();
        let result = attend(level, &threads, &self.call(store, &rows), output, should_stop);
        (result, (out, lse))
    }

    /// The weights of some rows and heads of a sequence, `[rows, heads, tokens]`.
    pub fn weights(
        &self,
        store: &KvStore,
        level: Level,
        (sequence, rows, heads): (usize, &[usize], &[usize]),
        len: usize,
        should_stop: ShouldStop<'_>,
    ) -> (Result<()>, Vec<f32>) {
        let all: Vec<Rows> = self.seqs.iter().map(Seq::rows).collect();
        let mut out = vec![UNTOUCHED; len];
        let call = self.call(store, &all);
        let result = attention_weights(level, &call, sequence, rows, heads, &mut out, should_stop);
        (result, out)
    }
}

/// A call that is right, and its store. Slots that no row sees hold NaN, and blocks of which no row sees any are not in
/// the tables.
pub struct World {
    pub shape: Shape,
    pub store: KvStore,
    pub parts: Parts,
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Parts { seqs, style, .. } = &self.parts;
        f.debug_struct("World").field("shape", &self.shape).field("seqs", seqs).field("style", style).finish()
    }
}

impl World {
    pub fn new(shape: Shape, drawn: &[Drawn], style: Style, seed: u64) -> Self {
        let mut random = Random(seed | 1);
        let size = shape.block_size;
        let blocks: usize = drawn.iter().map(|d| (d.start + d.len).div_ceil(size)).sum();
        let layout = shape.layout(blocks + 2);
        // What a model's calibration may give to each head, where the format takes it.
        let scaled = shape.dtype.is_fp8() && shape.scale_mode == ScaleMode::Static;
        let mut scales = |largest: f32| -> Vec<f32> {
            (0..shape.kv_heads).map(|_| if scaled { largest * (1.0 + random.next() / 2.0) } else { 1.0 }).collect()
        };
        let (k, v) = (scales(0.5), scales(2.0));
        let mut store = KvStore::new(layout, Scales { k, v }).unwrap();
        for block in 0..layout.num_blocks as u32 {
            store.block_bytes_mut(BlockId::new(block)).fill(0xff);
        }
        let tables = tables(drawn, size, layout.num_blocks, &mut random);
        let mut seqs: Vec<Seq> = drawn.iter().zip(tables).map(|(d, table)| sequence(d, table, &mut random)).collect();

        let seen = seqs.iter().flat_map(|seq| seq.seen().map(|p| (seq.table[p / size], p % size)));
        let slots: BTreeSet<(BlockId, usize)> = seen.collect();
        let k = random.values(slots.len() * shape.kv_heads * shape.k_dim, if shape.latent { 1.0 } else { 2.0 });
        let v = random.values(slots.len() * shape.kv_heads * shape.v_dim, 1.0);
        store.write(Level::best(), 0, slots.into_iter(), &k, (!shape.latent).then_some(&v));

        for seq in &mut seqs {
            let seen = seq.seen();
            for (i, block) in seq.table.iter_mut().enumerate() {
                if i * size >= seen.end || (i + 1) * size <= seen.start {
                    *block = BlockId::NONE;
                }
            }
        }
        let rows: usize = seqs.iter().map(|seq| seq.len).sum();
        let (q_width, out_width) = shape.widths();
        let num_q_heads = shape.q_heads();
        let q = random.values(rows * q_width, 1.5);
        let scale = (shape.k_dim as f32).sqrt().recip();
        let parts = Parts { seqs, num_q_heads, scale, style, q, out: rows * out_width, lse: rows * num_q_heads };
        Self { shape, store, parts }
    }

    /// Whether the oracle's numbers mean something: at positions that f32 does not have, a bias is larger than scores.
    pub fn is_near(&self) -> bool {
        self.parts.style.slopes.is_empty() || self.parts.seqs.iter().all(|seq| seq.start < 1 << 20)
    }

    /// How far results may be from the oracle's: of values, and of logarithms.
    pub fn bounds(&self) -> (f32, f32) {
        let plain = self.parts.style.scoring(1.0).is_plain();
        let bound = self.shape.bound() + if plain { 0.0 } else { 8e-6 };
        let largest = self.parts.seqs.iter().flat_map(|seq| {
            let (_, v) = self.read(seq);
            let row = self.shape.kv_heads * self.shape.v_dim;
            seq.seen().flat_map(move |token| v[token * row..][..row].to_vec())
        });
        (bound * largest.fold(0.0, |max: f32, x| max.max(x.abs())), bound + 4e-6)
    }

    /// K and V of a sequence, token after token; what no row sees may be anything.
    fn read(&self, seq: &Seq) -> Results {
        let blocks: Vec<BlockId> =
            seq.table.iter().map(|&block| if block.is_none() { BlockId::new(0) } else { block }).collect();
        let (k, v) = self.store.read(Level::best(), 0, &blocks, seq.seen().end);
        match self.shape.latent {
            true => {
                let dense = Dense::latent(&k, self.shape.k_dim, self.shape.v_dim);
                let v = dense.v.into_owned();
                (k, v)
            }
            false => (k, v),
        }
    }

    /// What the oracle says.
    pub fn expected(&self) -> Results {
        let (mut outs, mut lses) = (Vec::new(), Vec::new());
        let mut next = 0;
        for seq in &self.parts.seqs {
            let (k, v) = self.read(seq);
            for row in 0..seq.len {
                let (k, v) = self.along_path(seq, row, (&k, &v));
                let q = &self.parts.q[next..][..self.shape.widths().0];
                next += q.len();
                let (out, lse) = self.row(seq, row, q, (&k, &v));
                outs.extend(out);
                lses.extend(lse);
            }
        }
        (outs, lses)
    }

    /// K and V in the order of the tokens that a row sees.
    fn along_path<'a>(
        &self,
        seq: &Seq,
        row: usize,
        (k, v): (&'a [f32], &'a [f32]),
    ) -> (Cow<'a, [f32]>, Cow<'a, [f32]>) {
        // Parents of rows that see another sequence's tokens say their positions, and no more.
        if seq.parents.is_none() || matches!(seq.mask, Mask::Cross { .. }) {
            return (Cow::Borrowed(k), Cow::Borrowed(v));
        }
        let Shape { kv_heads, k_dim, v_dim, .. } = self.shape;
        let slots: Vec<usize> = (0..seq.start).chain(seq.path(row).into_iter().map(|row| seq.start + row)).collect();
        let chosen = |rows: &[f32], width: usize| -> Vec<f32> {
            slots.iter().flat_map(|&slot| rows[slot * width..][..width].iter().copied()).collect()
        };
        (Cow::Owned(chosen(k, kv_heads * k_dim)), Cow::Owned(chosen(v, kv_heads * v_dim)))
    }

    fn row(&self, seq: &Seq, row: usize, q: &[f32], (k, v): (&[f32], &[f32])) -> Results {
        let Shape { kv_heads: num_kv_heads, k_dim, v_dim, dtype, .. } = self.shape;
        let dense = Dense { k, v: Cow::Borrowed(v), num_kv_heads, k_dim, v_dim };
        // All formats but f32 and f16 multiply bf16 queries: that rounding is part of the definition.
        let q: Vec<f32> = match dtype {
            KvDtype::F32 | KvDtype::F16 => q.to_vec(),
            _ => q.iter().map(|&x| bf16::from_f32(x).to_f32()).collect(),
        };
        let (heads, position) = (self.parts.num_q_heads, seq.position(row));
        let scoring = self.parts.style.scoring(self.parts.scale);
        let (mut outs, mut lses) = (Vec::new(), Vec::new());
        for (head, q) in q.chunks_exact(k_dim).enumerate() {
            let (out, lse) = dense.attend_query(q, (head, heads), position, seq.mask.sees(position), &scoring);
            outs.extend(out);
            lses.push(lse);
        }
        (outs, lses)
    }

    /// Weights of a row and a query head of a sequence, times V: what attention gives, in f64.
    pub fn mix(&self, seq: &Seq, row: usize, head: usize, weights: &[f32]) -> Vec<f32> {
        let Shape { kv_heads, v_dim, group, .. } = self.shape;
        let (k, v) = self.read(seq);
        let (_, v) = self.along_path(seq, row, (&k, &v));
        let of = |token: usize| &v[(token * kv_heads + head / group) * v_dim..][..v_dim];
        let seen: Vec<usize> = (0..weights.len()).filter(|&token| weights[token] != 0.0).collect();
        let sum = |d: usize| seen.iter().map(|&t| f64::from(weights[t]) * f64::from(of(t)[d])).sum::<f64>() as f32;
        (0..v_dim).map(sum).collect()
    }
}

/// Block tables: of each a front that the one before has, too, then new blocks and here and there one of any table's.
fn tables(drawn: &[Drawn], size: usize, num_blocks: usize, random: &mut Random) -> Vec<Vec<BlockId>> {
    // Backwards through the pool, so that no kernel can count on neighbours.
    let mut free = (0..num_blocks as u32).rev().map(BlockId::new);
    let (mut tables, mut used): (Vec<Vec<BlockId>>, Vec<BlockId>) = (Vec::new(), Vec::new());
    for d in drawn {
        let blocks = (d.start + d.len).div_ceil(size);
        let before = tables.last().map_or(&[][..], Vec::as_slice);
        let mut table = before[..(d.shared * before.len().min(blocks) as f32) as usize].to_vec();
        while table.len() < blocks {
            let any = random.next().abs() < d.mixed && !used.is_empty();
            let block = if any {
                used[(random.next().abs() * used.len() as f32) as usize % used.len()]
            } else {
                free.next().expect("one for each")
            };
            used.push(block);
            table.push(block);
        }
        tables.push(table);
    }
    tables
}

fn sequence(d: &Drawn, table: Vec<BlockId>, random: &mut Random) -> Seq {
    let Drawn { start, len, .. } = *d;
    let mut parent = |row: usize| match (random.next().abs() * (row + 1) as f32) as usize {
        0 => None,
        // Rather a late one, so that paths grow.
        i => Some(row - i.min(row)),
    };
    let parents = d.tree.then(|| (0..len).map(&mut parent).collect());
    if let Some(position) = d.cross {
        let mask = Mask::Cross { tokens: (start + len).max(1) };
        // As far as positions go.
        return Seq { table, start: position.min(usize::MAX - len), len, mask, parents };
    }
    let mask = if d.window == 0 { Mask::Causal } else { Mask::Window(d.window) };
    Seq { table, start, len, mask, parents }
}

/// Whether a result is an error of the kind that bad arguments are.
pub fn is_invalid<T>(result: &Result<T>) -> bool {
    matches!(result, Err(Error::InvalidArgument(_)))
}
