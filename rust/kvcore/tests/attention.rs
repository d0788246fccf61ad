//! Attention against the naive oracle and against itself: every level, format and mask, odd sizes, poisoned memory, and
//! law 1 (a row's bits depend on nothing but its token, its position and what it may see).

mod attention_inputs;
mod cases;

use std::borrow::Cow;

use attention_inputs::{Random, Shape, Style};
use cases::{cases, few};
use half::bf16;
use kvcore::attention::reference::Dense;
use kvcore::attention::{Call, Mask, Output, Rows, Scoring, attend};
use kvcore::paging::BlockId;
use kvcore::simd::Level;
use kvcore::storage::{KvDtype, KvStore, Layout, ScaleMode, Scales};
use kvcore::threads::{NEVER, Threads};
use proptest::prelude::*;

/// Which mask the sequences of a fixture have.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Causal,
    Window(usize),
    Cross,
}

impl Kind {
    fn mask(self, tokens: usize) -> Mask {
        match self {
            Kind::Causal => Mask::Causal,
            Kind::Window(width) => Mask::Window(width),
            Kind::Cross => Mask::Cross { tokens },
        }
    }
}

/// Rows `start..start + len` of a sequence.
type Item = (usize, usize, usize);

/// A store with one written sequence per length; the rest of the pool holds `poison`.
struct Fixture {
    shape: Shape,
    kind: Kind,
    style: Style,
    store: KvStore,
    tables: Vec<Vec<BlockId>>,
    lengths: Vec<usize>,
    q: Vec<Vec<f32>>,
}

impl Fixture {
    fn new(shape: Shape, lengths: &[usize], poison: f32) -> Self {
        Self::with(shape, Kind::Causal, lengths, poison, shape.scales(1.0, 1.0))
    }

    fn with(shape: Shape, kind: Kind, lengths: &[usize], poison: f32, scales: Scales) -> Self {
        let blocks: usize = lengths.iter().map(|n| n.div_ceil(shape.block_size)).sum();
        let layout = shape.layout(blocks + 3);
        let mut store = KvStore::new(layout, scales).unwrap();
        store.fill(poison);
        if poison.is_nan() {
            // NaN in every floating-point format, scales among them.
            for block in 0..layout.num_blocks as u32 {
                store.block_bytes_mut(BlockId::new(block)).fill(0xff);
            }
        }
        // Tables run backwards through the pool, so that no kernel can count on neighbours.
        let mut free = (0..layout.num_blocks as u32).rev().map(BlockId::new);
        let tables = lengths.iter().map(|n| free.by_ref().take(n.div_ceil(shape.block_size)).collect()).collect();
        let style = Style::default();
        let mut fixture = Self { shape, kind, style, store, tables, lengths: lengths.to_vec(), q: Vec::new() };
        for (i, &n) in lengths.iter().enumerate() {
            let mut random = Random(77 + i as u64);
            let k = random.values(n * shape.kv_heads * shape.k_dim, 2.0);
            let v = random.values(n * shape.kv_heads * shape.v_dim, 1.0);
            // A latent row is V too.
            let k: Vec<f32> = if shape.latent { k.iter().map(|x| 0.5 * x).collect() } else { k };
            fixture.write(i, 0, &k, &v);
            fixture.q.push(random.values(n * shape.widths().0, 1.5));
        }
        fixture
    }

    /// Write tokens of a sequence from position `start` on.
    fn write(&mut self, seq: usize, start: usize, k: &[f32], v: &[f32]) {
        let (shape, table) = (self.shape, &self.tables[seq]);
        let tokens = k.len() / (shape.kv_heads * shape.k_dim);
        let slots = (start..start + tokens).map(|p| (table[p / shape.block_size], p % shape.block_size));
        self.store.write(Level::best(), 0, slots, k, (!shape.latent).then_some(v));
    }

    /// Overwrite some tokens with one value.
    fn fill_tokens(&mut self, seq: usize, tokens: std::ops::Range<usize>, value: f32) {
        let Shape { kv_heads, k_dim, v_dim, .. } = self.shape;
        let (k, v) = (vec![value; tokens.len() * kv_heads * k_dim], vec![value; tokens.len() * kv_heads * v_dim]);
        self.write(seq, tokens.start, &k, &v);
    }

    fn scale(&self) -> f32 {
        (self.shape.k_dim as f32).sqrt().recip()
    }

    fn mask(&self, seq: usize) -> Mask {
        self.kind.mask(self.lengths[seq])
    }

    /// Attend for the rows of `items` in one call; one output for each. Blocks that no row sees are not in the tables.
    fn attend(&self, level: Level, threads: usize, items: &[Item]) -> Vec<Vec<f32>> {
        self.attend_with_lse(level, threads, items).into_iter().map(|(out, _)| out).collect()
    }

    /// The same with the logarithms of the sums of exponentials.
    fn attend_with_lse(&self, level: Level, threads: usize, items: &[Item]) -> Vec<(Vec<f32>, Vec<f32>)> {
        let (q_width, out_width) = self.shape.widths();
        let size = self.shape.block_size;
        let tables: Vec<Vec<BlockId>> = items
            .iter()
            .map(|&(seq, start, len)| {
                let (first, last) = (self.mask(seq).sees(start), self.mask(seq).sees(start + len - 1));
                let seen = |i: usize| i * size < last.end && (i + 1) * size > first.start;
                let table = self.tables[seq].iter().enumerate();
                table.map(|(i, &block)| if seen(i) { block } else { BlockId::NONE }).collect()
            })
            .collect();
        let rows: Vec<Rows> = items
            .iter()
            .zip(&tables)
            .map(|(&(seq, start, len), blocks)| Rows::new(blocks, start, len, self.mask(seq)))
            .collect();
        let q: Vec<f32> = items
            .iter()
            .flat_map(|&(seq, start, len)| self.q[seq][start * q_width..(start + len) * q_width].iter().copied())
            .collect();
        let mut out = vec![f32::NAN; q.len() / q_width * out_width];
        let mut lse = vec![f32::NAN; q.len() / q_width * self.shape.q_heads()];
        let threads = Threads::new(Some(threads)).unwrap();
        let (view, num_q_heads) = (self.store.layer(0), self.shape.q_heads());
        let call = Call { view, rows: &rows, num_q_heads, scoring: self.style.scoring(self.scale()), q: &q };
        let output = Output { out: &mut out, lse: Some(&mut lse) };
        attend(level, &threads, &call, output, NEVER).unwrap();
        let (mut outs, mut lses) = (out.as_slice(), lse.as_slice());
        let mut take = |len: usize| {
            let (out, lse);
            (out, outs) = outs.split_at(len * out_width);
            (lse, lses) = lses.split_at(len * num_q_heads);
            (out.to_vec(), lse.to_vec())
        };
        items.iter().map(|&(_, _, len)| take(len)).collect()
    }

    fn check_against_oracle(&self, level: Level) {
        let (q_width, _) = self.shape.widths();
        for (seq, &n) in self.lengths.iter().enumerate() {
            self.check_rows(level, (seq, 0, n), &self.q[seq][..n * q_width]);
        }
    }

    fn check_rows(&self, level: Level, (seq, start, len): Item, q: &[f32]) {
        let Shape { kv_heads: num_kv_heads, k_dim, v_dim, dtype, .. } = self.shape;
        let (k, v) = self.store.read(Level::best(), 0, &self.tables[seq], self.lengths[seq]);
        let dense = match self.shape.latent {
            true => Dense::latent(&k, k_dim, v_dim),
            false => Dense { k: &k, v: Cow::Borrowed(&v), num_kv_heads, k_dim, v_dim },
        };
        // The kernels multiply all formats but f32 and f16 by bf16 queries: that rounding is part of the definition.
        let q: Vec<f32> = match dtype {
            KvDtype::F32 | KvDtype::F16 => q.to_vec(),
            _ => q.iter().map(|&x| bf16::from_f32(x).to_f32()).collect(),
        };
        let scoring = self.style.scoring(self.scale());
        let (expected, expected_lse) = dense.attend(&q, self.shape.q_heads(), &scoring, self.mask(seq), start);
        let (out, lse) = &self.attend_with_lse(level, 1, &[(seq, start, len)])[0];
        // A bias of up to 16 and the tanh add their roundings to the exponents: 16 * 2^-23 and a few more.
        let bound = self.shape.bound() + if self.style.scoring(1.0).is_plain() { 0.0 } else { 8e-6 };
        let of_values = bound * dense.v.iter().fold(0.0, |max: f32, x| max.max(x.abs()));
        let check = |got: &[f32], expected: &[f32], bound: f32, what: &str| {
            assert_eq!(got.len(), expected.len());
            for (i, (x, e)) in got.iter().zip(expected).enumerate() {
                let near = (x - e).abs() <= bound;
                let (name, Self { shape, kind, style, .. }) = (level.name(), self);
                assert!(near, "{what}: {name} {shape:?} {kind:?} {style:?} n={len} [{i}]: {x} not {e}");
            }
        };
        check(out, &expected, of_values, "out");
        // The sum's relative error is the weights', and the logarithm is itself rounded.
        check(lse, &expected_lse, bound + 4e-6, "lse");
    }
}

/// Values in a row of queries, at most.
const WIDEST: usize = 1152;

fn dims() -> impl Strategy<Value = usize> {
    prop_oneof![Just(2usize), Just(24), Just(64), (1usize..=24).prop_map(|d| 2 * d), Just(256usize)]
}

fn shapes() -> impl Strategy<Value = Shape> {
    let formats: Vec<_> = Shape::all_formats().collect();
    let widths = prop_oneof![
        3 => dims().prop_map(|d| (d, d, false)),
        2 => (dims(), dims()).prop_map(|(k, v)| (k, v, false)),
        2 => prop_oneof![Just((20usize, 16usize)), Just((40, 34)), Just((576, 512)), Just((96, 96))]
            .prop_map(|(k, v)| (k, v, true)),
    ];
    (1usize..=3, 1usize..=9, widths, prop_oneof![Just(16usize), Just(48)], prop::sample::select(formats)).prop_map(
        |(kv_heads, group, (k_dim, v_dim, latent), block_size, (dtype, scale_mode))| {
            let kv_heads = if latent { 1 } else { kv_heads };
            // A few of the widest heads, or many narrow ones: the tests run under emulators, too.
            let group = group.min(WIDEST / k_dim.max(v_dim) / kv_heads).max(1);
            Shape { kv_heads, group, k_dim, v_dim, latent, block_size, dtype, scale_mode }
        },
    )
}

fn kinds() -> impl Strategy<Value = Kind> {
    let width = prop_oneof![Just(1usize), 2usize..40, 200usize..300, Just(usize::MAX)];
    prop_oneof![2 => Just(Kind::Causal), 3 => width.prop_map(Kind::Window), 1 => Just(Kind::Cross)]
}

fn styles() -> impl Strategy<Value = (Option<f32>, u8, usize, bool)> {
    let softcap = prop_oneof![Just(None), Just(Some(3.0f32)), Just(Some(50.0))];
    prop_oneof![Just((None, 0, 0, false)), (softcap, 0u8..3, 0usize..40, any::<bool>())]
}

impl Fixture {
    /// With a style's numbers for each of the shape's query heads.
    fn styled(mut self, (softcap, bias, before, sinks): (Option<f32>, u8, usize, bool)) -> Self {
        let (heads, mut random) = (self.shape.q_heads(), Random(5));
        let slopes = if bias == 1 { random.values(heads, 0.05) } else { Vec::new() };
        let table = if bias == 2 { random.values(heads * (before + 1 + 3), 4.0) } else { Vec::new() };
        let sinks = if sinks { random.values(heads, 6.0) } else { Vec::new() };
        self.style = Style { softcap, slopes, table, before, sinks };
        self
    }
}

proptest! {
    #![proptest_config(cases(32))]

    #[test]
    fn every_level_matches_the_oracle(
        shape in shapes(),
        kind in kinds(),
        style in styles(),
        n in prop_oneof![2 => 1usize..40, 1 => 250usize..300],
    ) {
        for level in Level::available() {
            let fixture = Fixture::with(shape, kind, &[n], f32::NAN, shape.scales(1.0, 1.0));
            fixture.styled(style).check_against_oracle(level);
        }
    }

    /// Law 1: alone, in any batch and slot, whole or in chunks, one thread or more: the same bits.
    #[test]
    fn a_rows_bits_depend_on_nothing_beside_it(
        shape in shapes(),
        kind in kinds(),
        lengths in prop::collection::vec(prop_oneof![3 => 1usize..40, 1 => 240usize..600], 1..5),
        style in styles(),
        cut in 0.0f64..1.0,
    ) {
        for level in Level::available() {
            let fixture = Fixture::with(shape, kind, &lengths, f32::NAN, shape.scales(1.0, 1.0)).styled(style);
            let width = shape.widths().1;
            let whole: Vec<Item> = lengths.iter().enumerate().map(|(i, &n)| (i, 0, n)).collect();
            let all = fixture.attend(level, 1, &whole);
            prop_assert_eq!(&all, &fixture.attend(level, 3, &whole));
            let mut reversed: Vec<_> = whole.clone();
            reversed.reverse();
            let mut back = fixture.attend(level, 2, &reversed);
            back.reverse();
            prop_assert_eq!(&all, &back);
            // Two chunks, and the last row as a decode step, in one mixed call.
            for (i, &n) in lengths.iter().enumerate() {
                let cut = (cut * n as f64) as usize;
                let mut items = vec![(i, cut, n - cut), (i, n - 1, 1), (0, lengths[0] - 1, 1)];
                if cut > 0 {
                    items.push((i, 0, cut));
                }
                for threads in [1, 2] {
                    let parts = fixture.attend(level, threads, &items);
                    prop_assert_eq!(&all[i][cut * width..], &parts[0][..]);
                    prop_assert_eq!(&all[i][(n - 1) * width..], &parts[1][..]);
                    if cut > 0 {
                        prop_assert_eq!(&all[i][..cut * width], &parts[3][..]);
                    }
                }
            }
        }
    }

    /// Law 7 (trap 13): what lies in unwritten slots has no effect, nor what lies before a window.
    #[test]
    fn stale_memory_has_no_effect(shape in shapes(), kind in kinds(), n in 1usize..70, cut in 0.0f64..1.0) {
        let start = (cut * n as f64) as usize;
        let fixture = |value: f32| {
            let mut fixture = Fixture::with(shape, kind, &[n], value, shape.scales(1.0, 1.0));
            let before = fixture.mask(0).sees(start).start;
            fixture.fill_tokens(0, 0..before, value);
            fixture
        };
        let clean = fixture(0.0);
        for level in Level::available() {
            let expected = clean.attend(level, 1, &[(0, start, n - start)]);
            prop_assert!(expected[0].iter().all(|x| x.is_finite()));
            for poison in [f32::NAN, 1e30, f32::NEG_INFINITY] {
                prop_assert_eq!(&expected, &fixture(poison).attend(level, 1, &[(0, start, n - start)]));
            }
        }
    }
}

/// Sequences that begin with the same blocks read them together: the same bits as each alone, for any tree of prefixes.
#[test]
fn shared_prefixes_change_no_bit() {
    // Tokens shared with the sequence named, in all: a tree, with forks in the middle of a chunk, and one that is alone.
    let tree = [(0, 0, 900), (0, 512, 700), (1, 600, 640), (0, 768, 769), (0, 0, 300), (4, 256, 600), (0, 896, 1100)];
    let level = Level::best();
    for (i, (dtype, scale_mode)) in Shape::swept_formats().enumerate() {
        for (j, shape) in [Shape::plain(2, 3, 16, dtype), Shape::latent(5, 16, 8, dtype)].into_iter().enumerate() {
            let shape = Shape { scale_mode, ..shape };
            // Each kind with each format: on plain rows or on latent ones.
            let kind = [Kind::Causal, Kind::Window(400)][(i + j) % 2];
            let lengths = tree.map(|(_, _, n)| n);
            let mut fixture = Fixture::with(shape, kind, &lengths, f32::NAN, shape.scales(1.0, 1.0));
            for (i, (from, shared, _)) in tree.into_iter().enumerate() {
                let blocks = shared / shape.block_size;
                let (from, to) = (fixture.tables[from][..blocks].to_vec(), &mut fixture.tables[i][..blocks]);
                to.copy_from_slice(&from);
            }
            let fixture = fixture.styled((Some(20.0), 1, 0, true));
            let items: Vec<Item> = lengths.iter().enumerate().map(|(i, &n)| (i, n - 1, 1)).collect();
            let alone: Vec<_> = items.iter().flat_map(|&item| fixture.attend_with_lse(level, 1, &[item])).collect();
            for threads in [1, 5] {
                assert_eq!(alone, fixture.attend_with_lse(level, threads, &items), "{dtype} {kind:?} {threads}");
            }
            // Rows of a prompt beside them.
            let mixed = [(1, 680, 20), items[0], (3, 768, 1), (2, 630, 10)];
            let parts = fixture.attend(level, 2, &mixed);
            for (item, part) in mixed.iter().zip(&parts) {
                assert_eq!(&fixture.attend(level, 1, &[*item])[0], part, "{dtype} {kind:?} {item:?}");
            }
        }
    }
}

/// A row of a tree of drafts has the bits that it has where its path alone is written, in order.
#[test]
fn a_tree_is_its_paths() {
    // Three branches from the context and one from the middle, with slots in every order.
    let parents = [None, Some(0), None, Some(1), Some(2), Some(1), None, Some(5), Some(7), Some(3)];
    for start in [5, 250, 510, 700] {
        for (dtype, scale_mode) in Shape::swept_formats() {
            for shape in [Shape::plain(2, 3, 32, dtype), Shape::latent(3, 24, 8, dtype)] {
                let shape = Shape { scale_mode, ..shape };
                for kind in [Kind::Causal, Kind::Window(9), Kind::Window(300)] {
                    let total = start + parents.len();
                    let fixture = Fixture::with(shape, kind, &[total], f32::NAN, shape.scales(1.0, 1.0));
                    let fixture = fixture.styled((Some(20.0), 1, 0, true));
                    check_tree(&fixture, start, &parents);
                }
            }
        }
    }
}

fn check_tree(fixture: &Fixture, start: usize, parents: &[Option<usize>]) {
    let Shape { kv_heads, k_dim, v_dim, .. } = fixture.shape;
    let (q_width, out_width) = fixture.shape.widths();
    let level = Level::best();
    let mut random = Random(3);
    let rows = parents.len();
    let k = random.values(rows * kv_heads * k_dim, 1.0);
    let v = random.values(rows * kv_heads * v_dim, 1.0);
    let q = random.values(rows * q_width, 1.5);
    let attend_with = |store: &KvStore, rows: &[Rows], q: &[f32], threads: usize| {
        let (view, num_q_heads) = (store.layer(0), fixture.shape.q_heads());
        let scoring = fixture.style.scoring(fixture.scale());
        let mut out = vec![f32::NAN; q.len() / q_width * out_width];
        let threads = Threads::new(Some(threads)).unwrap();
        attend(level, &threads, &Call { view, rows, num_q_heads, scoring, q }, &mut out[..], NEVER).unwrap();
        out
    };
    let table = &fixture.tables[0];
    let slot = |p: usize| (table[p / fixture.shape.block_size], p % fixture.shape.block_size);
    let latent = fixture.shape.latent;
    // The context as it is, and behind it the rows `of` at the slots from `start` on.
    let written = |of: &[usize]| {
        let layout = *fixture.store.layout();
        let mut store = KvStore::new(layout, fixture.shape.scales(1.0, 1.0)).unwrap();
        for block in (0..layout.num_blocks as u32).map(BlockId::new) {
            store.block_bytes_mut(block).copy_from_slice(fixture.store.block_bytes(block));
        }
        for (at, &row) in of.iter().enumerate() {
            let k = &k[row * kv_heads * k_dim..][..kv_heads * k_dim];
            let v = &v[row * kv_heads * v_dim..][..kv_heads * v_dim];
            store.write(level, 0, [slot(start + at)].into_iter(), k, (!latent).then_some(v));
        }
        store
    };
    let in_order: Vec<usize> = (0..rows).collect();
    let tree_store = written(&in_order);
    let mask = fixture.mask(0);
    let tree = Rows { parents: Some(parents), ..Rows::new(table, start, rows, mask) };
    let all: Vec<_> = [1, 2].map(|threads| attend_with(&tree_store, &[tree], &q, threads)).into();
    assert_eq!(all[0], all[1]);
    for row in 0..rows {
        let mut path = vec![row];
        while let Some(parent) = parents[path[0]] {
            path.insert(0, parent);
        }
        let alone = written(&path);
        let at = Rows::new(table, start + path.len() - 1, 1, mask);
        let expected = attend_with(&alone, &[at], &q[row * q_width..][..q_width], 1);
        assert_eq!(
            &all[0][row * out_width..][..out_width],
            &expected[..],
            "{:?} {:?} {row}",
            fixture.shape,
            fixture.kind
        );
    }
}

/// A long decode step is split over threads by chunks: still the same bits.
#[test]
fn long_sequences_split_over_threads_without_a_change() {
    let formats = Shape::swept_formats().filter(|(dtype, mode)| *mode == dtype.default_scale_mode());
    for (dtype, _) in formats {
        for shape in [Shape::plain(1, 3, 64, dtype), Shape::latent(3, 48, 16, dtype)] {
            for kind in [Kind::Causal, Kind::Window(3001), Kind::Cross] {
                let fixture = Fixture::with(shape, kind, &[5000, 17], f32::NAN, shape.scales(1.0, 1.0));
                for level in Level::available() {
                    let items = [(0, 4999, 1), (1, 16, 1)];
                    let one = fixture.attend(level, 1, &items);
                    for threads in [2, 3, 8] {
                        assert_eq!(one, fixture.attend(level, threads, &items), "{} {kind:?}", level.name());
                    }
                }
            }
        }
    }
}

/// A row alone, in batches of 2 and 7, in every slot, with 1 and 2 threads, prompt whole and in chunks.
#[test]
fn trap_16_a_row_alone_and_in_batches() {
    let lengths = [530, 1, 33, 270, 16, 300, 64];
    for (dtype, scale_mode) in Shape::swept_formats() {
        for kind in [Kind::Causal, Kind::Window(100), Kind::Cross] {
            // Small: it runs hundreds of whole prompts, under an emulator too.
            let shape = Shape { scale_mode, ..Shape::plain(1, 3, 16, dtype) };
            let fixture = Fixture::with(shape, kind, &lengths, f32::NAN, shape.scales(1.0, 1.0));
            let level = Level::best();
            let alone = &fixture.attend(level, 1, &[(0, 529, 1)])[0];
            let same = |parts: &[Vec<f32>], slot: usize| {
                assert_eq!(alone[..], parts[slot][parts[slot].len() - alone.len()..], "{dtype} {kind:?} {slot}");
            };
            for threads in [1, 2] {
                for batch in [2, 7] {
                    for slot in 0..batch {
                        let mut items: Vec<Item> = (1..batch).map(|i| (i, lengths[i] - 1, 1)).collect();
                        items.insert(slot, (0, 529, 1));
                        same(&fixture.attend(level, threads, &items), slot);
                    }
                }
                // All are stored: of a prompt in two chunks the second has the row.
                for first in if threads == 1 { [0, 256, 529] } else { [17, 400, 529] } {
                    same(&fixture.attend(level, threads, &[(0, first, 530 - first)]), 0);
                }
            }
        }
    }
}

/// W = 4, K = 0, V one-hot by position: the query at 9 sees 6, 7, 8 and itself, each with a quarter.
#[test]
fn trap_14_a_window_includes_its_own_token() {
    for (dtype, scale_mode) in Shape::all_formats() {
        let shape = Shape { scale_mode, ..Shape::plain(1, 2, 16, dtype) };
        let mut fixture = Fixture::with(shape, Kind::Window(4), &[12], f32::NAN, shape.scales(1.0, 1.0));
        let one_hot: Vec<f32> = (0..12 * 16).map(|i| f32::from(u8::from(i / 16 == i % 16))).collect();
        fixture.write(0, 0, &[0.0; 12 * 16], &one_hot);
        let exact = dtype == KvDtype::Int4 || scale_mode == ScaleMode::Static;
        let bound = if exact { 0.0 } else { 0.25 * shape.bound() };
        for level in Level::available() {
            let out = &fixture.attend(level, 1, &[(0, 9, 1)])[0];
            for (i, &x) in out.iter().enumerate() {
                let expected = if (6..=9).contains(&(i % 16)) { 0.25 } else { 0.0 };
                assert!((x - expected).abs() <= bound, "{} {dtype} {scale_mode} [{i}]: {x}", level.name());
            }
        }
    }
}

/// nope 8, rope 4, v 6, rank 16: attention on the 20 values of a latent row, by queries that are absorbed, gives what
/// attention on the expanded K (12) and V (6) gives.
#[test]
fn trap_15_absorbed_and_expanded_latent_attention_agree() {
    const NOPE: usize = 8;
    const ROPE: usize = 4;
    const V: usize = 6;
    const RANK: usize = 16;
    let (heads, tokens) = (3, 300);
    let scale = 1.0 / 12.0f32.sqrt();
    assert_eq!(Shape::latent(heads, RANK, ROPE, KvDtype::F32).k_dim, 20);

    let mut random = Random(15);
    let rows = random.values(tokens * (RANK + ROPE), 1.0);
    let up_k = random.values(heads * NOPE * RANK, 0.5);
    let up_v = random.values(heads * V * RANK, 0.5);
    let q = random.values(tokens * heads * (NOPE + ROPE), 2.0);
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>() as f32;

    // K of a head is [up_k latent, rope], V is up_v latent.
    let (mut k, mut v) = (Vec::new(), Vec::new());
    for row in rows.chunks_exact(RANK + ROPE) {
        for head in 0..heads {
            k.extend(up_k[head * NOPE * RANK..][..NOPE * RANK].chunks_exact(RANK).map(|up| dot(up, row)));
            k.extend(&row[RANK..]);
            v.extend(up_v[head * V * RANK..][..V * RANK].chunks_exact(RANK).map(|up| dot(up, row)));
        }
    }
    // An absorbed query is [up_k^T nope, rope].
    let mut absorbed = Vec::new();
    for (i, q) in q.chunks_exact(NOPE + ROPE).enumerate() {
        let up = &up_k[i % heads * NOPE * RANK..][..NOPE * RANK];
        absorbed.extend((0..RANK).map(|r| {
            let column: Vec<f32> = up.chunks_exact(RANK).map(|up| up[r]).collect();
            dot(&column, &q[..NOPE])
        }));
        absorbed.extend(&q[NOPE..]);
    }

    let run = |level: Level, shape: Shape, k: &[f32], v: &[f32], q: &[f32]| -> Vec<f32> {
        let mut fixture = Fixture::new(shape, &[tokens], f32::NAN);
        fixture.write(0, 0, k, v);
        let mut out = vec![0.0; tokens * shape.widths().1];
        let rows = [Rows::new(&fixture.tables[0], 0, tokens, Mask::Causal)];
        let call =
            Call { view: fixture.store.layer(0), rows: &rows, num_q_heads: heads, scoring: Scoring::plain(scale), q };
        attend(level, &Threads::new(Some(1)).unwrap(), &call, &mut out[..], NEVER).unwrap();
        out
    };
    let dense = Dense { k: &k, v: Cow::Borrowed(&v), num_kv_heads: heads, k_dim: NOPE + ROPE, v_dim: V };
    let (by_hand, _) = dense.attend(&q, heads, &Scoring::plain(scale), Mask::Causal, 0);
    for level in Level::available() {
        let wide = Shape { k_dim: NOPE + ROPE, v_dim: V, ..Shape::plain(heads, 1, V, KvDtype::F32) };
        let expanded = run(level, wide, &k, &v, &q);
        let latent = run(level, Shape::latent(heads, RANK, ROPE, KvDtype::F32), &rows, &[], &absorbed);
        let up = |(i, x): (usize, &[f32])| -> Vec<f32> {
            up_v[i % heads * V * RANK..][..V * RANK].chunks_exact(RANK).map(|up| dot(up, x)).collect()
        };
        let latent: Vec<f32> = latent.chunks_exact(RANK).enumerate().flat_map(up).collect();
        assert_eq!((expanded.len(), latent.len()), (by_hand.len(), by_hand.len()));
        for i in 0..by_hand.len() {
            let (e, l, hand) = (expanded[i], latent[i], by_hand[i]);
            assert!((e - l).abs() <= 1e-5 && (l - hand).abs() <= 1e-5, "{} [{i}] {l} {e} {hand}", level.name());
        }
    }
}

/// DeepSeek-V3's latent attention: 128 query heads on rows of 512 + 64 values, as a decode step and a short prefill.
#[test]
fn many_query_heads_share_one_latent_row() {
    let all = [KvDtype::Bf16, KvDtype::F32, KvDtype::Fp8E4M3, KvDtype::Int8, KvDtype::Int4];
    for &dtype in if few() { &all[..1] } else { &all[..] } {
        let shape = Shape::latent(128, 512, 64, dtype);
        let fixture = Fixture::new(shape, &[37], f32::NAN);
        let width = shape.widths().0;
        for level in Level::available() {
            for (start, len) in [(36, 1), (34, 3)] {
                fixture.check_rows(level, (0, start, len), &fixture.q[0][start * width..(start + len) * width]);
            }
        }
    }
}

/// Trap 18's kind: unequal scales, for each tensor and each head, so that a swap would show.
#[test]
fn static_scales_apply_to_their_own_tensor_and_head() {
    for dtype in [KvDtype::Fp8E4M3, KvDtype::Fp8E5M2] {
        let shape = Shape { scale_mode: ScaleMode::Static, ..Shape::plain(2, 2, 32, dtype) };
        for level in Level::available() {
            let scales = Scales { k: vec![0.5, 0.25], v: vec![2.0, 8.0] };
            let fixture = Fixture::with(shape, Kind::Causal, &[45], f32::NAN, scales);
            fixture.check_against_oracle(level);
            let (k, v) = fixture.store.read(Level::best(), 0, &fixture.tables[0], 45);
            let (k1, v1) = (k.iter().copied().fold(0.0, f32::max), v.iter().copied().fold(0.0, f32::max));
            assert!((1.7..=2.3).contains(&k1) && (0.8..=1.2).contains(&v1), "{k1} {v1}");
        }
    }
    // A latent row has one scale, K's.
    let shape = Shape { scale_mode: ScaleMode::Static, ..Shape::latent(4, 32, 8, KvDtype::Fp8E4M3) };
    for level in Level::available() {
        let scales = Scales { k: vec![0.5], v: vec![2.0] };
        Fixture::with(shape, Kind::Causal, &[45], f32::NAN, scales).check_against_oracle(level);
    }
}

/// Tokens of very different magnitude: each has its own scale.
#[test]
fn token_scales_follow_their_tokens() {
    for dtype in [KvDtype::Int8, KvDtype::Fp8E4M3, KvDtype::Fp8E5M2] {
        for latent in [false, true] {
            let scale_mode = ScaleMode::PerTokenHead;
            let plain = Shape { scale_mode, ..Shape::plain(2, 2, 24, dtype) };
            let shape = if latent { Shape { scale_mode, ..Shape::latent(2, 24, 8, dtype) } } else { plain };
            let mut fixture = Fixture::with(shape, Kind::Window(70), &[290], f32::NAN, shape.scales(1.0, 1.0));
            let (k_row, v_row) = (shape.kv_heads * shape.k_dim, shape.kv_heads * shape.v_dim);
            let mut random = Random(5);
            for token in 0..290 {
                let size = 2.0f32.powi(-(token as i32 % 11));
                let (k, v) = (random.values(k_row, size), random.values(v_row, 1.0 / size / 1024.0));
                fixture.write(0, token, &k, &v);
            }
            for level in Level::available() {
                fixture.check_against_oracle(level);
            }
        }
    }
}

#[test]
fn a_later_token_that_is_not_a_number_does_not_reach_back() {
    for dtype in KvDtype::ALL {
        let shape = Shape::plain(1, 2, 16, dtype);
        let mut fixture = Fixture::new(shape, &[40], 0.0);
        for level in Level::available() {
            let before = fixture.attend(level, 1, &[(0, 0, 39)]);
            fixture.fill_tokens(0, 39..40, f32::NAN);
            assert_eq!(before[0], fixture.attend(level, 1, &[(0, 0, 40)])[0][..39 * 32], "{}", level.name());
            let after = fixture.attend(level, 1, &[(0, 39, 1)]);
            assert!(after[0].iter().all(|x| x.is_nan()), "{} {dtype}", level.name());
            fixture.fill_tokens(0, 39..40, 0.5);
        }
    }
}

#[test]
fn copies_take_every_layer() {
    let layout = Layout {
        num_layers: 3,
        num_blocks: 4,
        num_kv_heads: 2,
        k_dim: 6,
        v_dim: 6,
        latent: false,
        block_size: 16,
        dtype: KvDtype::Bf16,
        scale_mode: ScaleMode::Static,
    };
    let level = Level::best();
    let mut store = KvStore::new(layout, Scales::unit(&layout)).unwrap();
    let (src, dst) = (BlockId::new(3), BlockId::new(1));
    for layer in 0..3 {
        let k: Vec<f32> = (0..16 * 12).map(|i| (i + layer) as f32).collect();
        store.write(level, layer, (0..16).map(|t| (src, t)), &k, Some(&k));
    }
    store.copy_block(src, dst);
    for layer in 0..3 {
        assert_eq!(store.read(level, layer, &[src], 16), store.read(level, layer, &[dst], 16));
        assert_eq!(store.read(level, layer, &[BlockId::new(2)], 16).0, vec![0.0; 16 * 12]);
    }
}

#[test]
fn bad_shapes_are_errors() {
    let shape = Shape { k_dim: 8, v_dim: 6, ..Shape::plain(2, 2, 8, KvDtype::F32) };
    let f = Fixture::new(shape, &[40], 0.0);
    let threads = Threads::new(Some(1)).unwrap();
    let table = &f.tables[0];
    let rows = |start, len| [Rows::new(table, start, len, Mask::Causal)];
    let call = |rows: &[Rows], num_q_heads, scale, q_len, out_len| {
        let (q, mut out) = (vec![0.0; q_len], vec![0.0; out_len]);
        let call = Call { view: f.store.layer(0), rows, num_q_heads, scoring: Scoring::plain(scale), q: &q };
        attend(Level::best(), &threads, &call, &mut out[..], NEVER)
    };
    let masked = |mask, blocks: &[BlockId]| call(&[Rows::new(blocks, 38, 2, mask)], 4, 1.0, 64, 48);
    let returned = [BlockId::NONE, table[1], table[2]];
    assert!(call(&rows(0, 20), 4, 1.0, 640, 480).is_ok());
    assert!(call(&rows(0, 0), 4, 1.0, 0, 0).is_ok());
    assert!(masked(Mask::Window(23), &returned).is_ok());
    assert!(masked(Mask::Cross { tokens: 48 }, table).is_ok());
    assert!(masked(Mask::Cross { tokens: 16 }, &table[..1]).is_ok());
    for (result, word) in [
        (call(&rows(0, 20), 3, 1.0, 480, 360), "multiple"),
        (call(&rows(0, 20), 0, 1.0, 0, 0), "multiple"),
        (call(&rows(0, 20), 4, 1.0, 639, 480), "q:"),
        (call(&rows(0, 20), 4, 1.0, 640, 640), "out:"),
        (call(&rows(30, 20), 4, 1.0, 640, 480), "block table"),
        (call(&rows(usize::MAX - 3, 20), 4, 1.0, 640, 480), "block table"),
        (call(&rows(0, usize::MAX), 4, 1.0, 640, 480), "q:"),
        (call(&[rows(0, usize::MAX), rows(0, 2)].concat(), 4, 1.0, 640, 480), "q:"),
        (call(&rows(0, 20), 4, f32::NAN, 640, 480), "scale"),
        (masked(Mask::Window(0), table), "window"),
        (masked(Mask::Cross { tokens: 0 }, table), "cross"),
        (masked(Mask::Cross { tokens: 49 }, table), "block table"),
        (masked(Mask::Cross { tokens: usize::MAX }, table), "block table"),
        (masked(Mask::Window(24), &returned), "block table"),
        (masked(Mask::Causal, &returned), "block table"),
        (masked(Mask::Causal, &[table[0], table[1], BlockId::new(6)]), "block table"),
    ] {
        let message = result.unwrap_err().to_string();
        assert!(message.contains(word), "{message}");
    }
}
