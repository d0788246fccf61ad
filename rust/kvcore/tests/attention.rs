//! Attention against the naive oracle and against itself: every level, every format, odd sizes, poisoned memory,
//! and law 1 (a row's bits depend on nothing but its token, its position and what it may see).

mod cases;

use cases::cases;
use half::bf16;
use kvcore::attention::{Rows, attend, reference};
use kvcore::paging::BlockId;
use kvcore::simd::Level;
use kvcore::storage::{KvDtype, KvStore, Layout, ScaleMode, Scales};
use kvcore::threads::{NEVER, Threads};
use proptest::prelude::*;

/// The formats that attention reads.
const DTYPES: [KvDtype; 4] = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Fp8E4M3];

/// Small xorshift: inputs need spread, not quality.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
    fn values(&mut self, n: usize, spread: f32) -> Vec<f32> {
        (0..n).map(|_| self.next() * spread).collect()
    }
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    kv_heads: usize,
    group: usize,
    head_dim: usize,
    block_size: usize,
    dtype: KvDtype,
}

impl Shape {
    fn q_heads(&self) -> usize {
        self.kv_heads * self.group
    }
}

/// A store with one written sequence per length; the rest of the pool holds `poison`.
struct Fixture {
    shape: Shape,
    store: KvStore,
    tables: Vec<Vec<BlockId>>,
    lengths: Vec<usize>,
    q: Vec<Vec<f32>>,
}

impl Fixture {
    fn new(shape: Shape, lengths: &[usize], poison: f32, (k_scale, v_scale): (f32, f32)) -> Self {
        let blocks: usize = lengths.iter().map(|n| n.div_ceil(shape.block_size)).sum();
        let layout = Layout {
            num_layers: 1,
            num_blocks: blocks + 3,
            num_kv_heads: shape.kv_heads,
            k_dim: shape.head_dim,
            v_dim: shape.head_dim,
            latent: false,
            block_size: shape.block_size,
            dtype: shape.dtype,
            scale_mode: shape.dtype.default_scale_mode(),
        };
        let mut store = KvStore::new(layout, Scales::uniform(&layout, k_scale, v_scale)).unwrap();
        store.fill(poison);
        // Tables run backwards through the pool, so that no kernel can count on neighbours.
        let mut free = (0..layout.num_blocks as u32).rev().map(BlockId::new);
        let mut tables = Vec::new();
        let mut queries = Vec::new();
        for (i, &n) in lengths.iter().enumerate() {
            let table: Vec<BlockId> = free.by_ref().take(n.div_ceil(shape.block_size)).collect();
            let mut random = Random(77 + i as u64);
            let row = shape.kv_heads * shape.head_dim;
            let (k, v) = (random.values(n * row, 2.0), random.values(n * row, 1.0));
            let slots = (0..n).map(|p| (table[p / shape.block_size], p % shape.block_size));
            store.write(Level::best(), 0, slots, &k, Some(&v));
            tables.push(table);
            queries.push(random.values(n * shape.q_heads() * shape.head_dim, 1.5));
        }
        Self { shape, store, tables, lengths: lengths.to_vec(), q: queries }
    }

    fn scale(&self) -> f32 {
        (self.shape.head_dim as f32).sqrt().recip()
    }

    /// Attend for rows `start..start + len` of the given sequences in one call; one output for each.
    fn attend(&self, level: Level, threads: usize, items: &[(usize, usize, usize)]) -> Vec<Vec<f32>> {
        let width = self.shape.q_heads() * self.shape.head_dim;
        let rows: Vec<Rows> =
            items.iter().map(|&(seq, start, len)| Rows { blocks: &self.tables[seq], start, len }).collect();
        let q: Vec<f32> = items
            .iter()
            .flat_map(|&(seq, start, len)| self.q[seq][start * width..(start + len) * width].iter().copied())
            .collect();
        let mut out = vec![f32::NAN; q.len()];
        let threads = Threads::new(Some(threads)).unwrap();
        let heads = self.shape.q_heads();
        attend(level, &threads, self.store.layer(0), &rows, heads, self.scale(), &q, &mut out, NEVER).unwrap();
        let mut rest = out.as_slice();
        items
            .iter()
            .map(|&(_, _, len)| {
                let (this, after) = rest.split_at(len * width);
                rest = after;
                this.to_vec()
            })
            .collect()
    }

    fn check_against_oracle(&self, level: Level) {
        let Shape { kv_heads, head_dim, dtype, .. } = self.shape;
        for (seq, &n) in self.lengths.iter().enumerate() {
            let (k, v) = self.store.read(Level::best(), 0, &self.tables[seq], n);
            // The kernels multiply bf16 and fp8 caches by bf16 queries: that rounding is part of the definition.
            let paired = matches!(dtype, KvDtype::Bf16 | KvDtype::Fp8E4M3);
            let q: Vec<f32> = match paired {
                true => self.q[seq].iter().map(|&x| bf16::from_f32(x).to_f32()).collect(),
                false => self.q[seq].clone(),
            };
            let expected = reference::attend(&q, &k, &v, n, self.shape.q_heads(), kv_heads, head_dim, self.scale());
            let out = &self.attend(level, 1, &[(seq, 0, n)])[0];
            // Softmax weights are rounded to bf16 (relative 2^-9 each) in the paired formats.
            let bound = if paired { 2.0f32.powi(-8) } else { 2e-6 } * self.store.scales().v[0];
            for (i, (x, e)) in out.iter().zip(&expected).enumerate() {
                assert!((x - e).abs() <= bound, "{} {:?} n={n} [{i}]: {x} not {e}", level.name(), self.shape);
            }
        }
    }
}

/// Values in a row of queries, at most.
const WIDEST: usize = 1152;

fn shapes() -> impl Strategy<Value = Shape> {
    let head_dim = prop_oneof![Just(2usize), Just(24), Just(64), (1usize..=24).prop_map(|d| 2 * d), Just(256usize)];
    (1usize..=3, 1usize..=9, head_dim, prop_oneof![Just(16usize), Just(48)], 0..DTYPES.len()).prop_map(
        |(kv_heads, group, head_dim, block_size, dtype)| {
            // A few of the widest heads, or many narrow ones: the tests run under emulators, too.
            let group = group.min(WIDEST / head_dim / kv_heads).max(1);
            Shape { kv_heads, group, head_dim, block_size, dtype: DTYPES[dtype] }
        },
    )
}

proptest! {
    #![proptest_config(cases(24))]

    #[test]
    fn every_level_matches_the_oracle(shape in shapes(), n in prop_oneof![1usize..40, 250usize..300]) {
        for level in Level::available() {
            Fixture::new(shape, &[n], f32::NAN, (1.0, 1.0)).check_against_oracle(level);
        }
    }

    /// Law 1: alone, in any batch and slot, whole or in chunks, one thread or more: the same bits.
    #[test]
    fn a_rows_bits_depend_on_nothing_beside_it(
        shape in shapes(),
        lengths in prop::collection::vec(prop_oneof![3 => 1usize..40, 1 => 240usize..600], 1..5),
        cut in 0.0f64..1.0,
    ) {
        for level in Level::available() {
            let fixture = Fixture::new(shape, &lengths, f32::NAN, (1.0, 1.0));
            let width = shape.q_heads() * shape.head_dim;
            let whole: Vec<(usize, usize, usize)> = lengths.iter().enumerate().map(|(i, &n)| (i, 0, n)).collect();
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

    /// Law 7 (trap 13): what lies in unwritten slots has no effect.
    #[test]
    fn stale_memory_has_no_effect(shape in shapes(), n in 1usize..70) {
        for level in Level::available() {
            let clean = Fixture::new(shape, &[n], 0.0, (1.0, 1.0)).attend(level, 1, &[(0, 0, n)]);
            for poison in [f32::NAN, 1e30, f32::NEG_INFINITY] {
                let dirty = Fixture::new(shape, &[n], poison, (1.0, 1.0)).attend(level, 1, &[(0, 0, n)]);
                prop_assert_eq!(&clean, &dirty);
            }
        }
    }
}

/// A long decode step is split over threads by chunks: still the same bits.
#[test]
fn long_sequences_split_over_threads_without_a_change() {
    for dtype in DTYPES {
        let shape = Shape { kv_heads: 1, group: 3, head_dim: 64, block_size: 16, dtype };
        let fixture = Fixture::new(shape, &[5000, 17], f32::NAN, (1.0, 1.0));
        for level in Level::available() {
            let items = [(0, 4999, 1), (1, 16, 1)];
            let one = fixture.attend(level, 1, &items);
            for threads in [2, 3, 8] {
                assert_eq!(one, fixture.attend(level, threads, &items), "{}", level.name());
            }
        }
    }
}

/// Trap 18's kind: unequal scales, so that a swap would show.
#[test]
fn fp8_scales_apply_to_their_own_tensor() {
    let shape = Shape { kv_heads: 2, group: 2, head_dim: 32, block_size: 16, dtype: KvDtype::Fp8E4M3 };
    for level in Level::available() {
        let fixture = Fixture::new(shape, &[45], f32::NAN, (0.5, 2.0));
        fixture.check_against_oracle(level);
        let (k, v) = fixture.store.read(Level::best(), 0, &fixture.tables[0], 45);
        let (k1, v1) = (k.iter().copied().fold(0.0, f32::max), v.iter().copied().fold(0.0, f32::max));
        assert!((1.8..=2.0).contains(&k1) && (0.9..=1.0).contains(&v1), "{k1} {v1}");
    }
}

#[test]
fn a_later_token_that_is_not_a_number_does_not_reach_back() {
    for dtype in DTYPES {
        let shape = Shape { kv_heads: 1, group: 2, head_dim: 16, block_size: 16, dtype };
        let mut fixture = Fixture::new(shape, &[40], 0.0, (1.0, 1.0));
        for level in Level::available() {
            let before = fixture.attend(level, 1, &[(0, 0, 39)]);
            let nan = vec![f32::NAN; 16];
            let slot = (fixture.tables[0][2], 39 % 16);
            fixture.store.write(level, 0, std::iter::once(slot), &nan, Some(&nan));
            assert_eq!(before[0], fixture.attend(level, 1, &[(0, 0, 40)])[0][..39 * 32], "{}", level.name());
            assert!(fixture.attend(level, 1, &[(0, 39, 1)])[0].iter().all(|x| x.is_nan()));
            fixture.store.write(level, 0, std::iter::once(slot), &nan.map_to(0.5), Some(&nan.map_to(0.5)));
        }
    }
}

trait MapTo {
    fn map_to(&self, x: f32) -> Vec<f32>;
}
impl MapTo for Vec<f32> {
    fn map_to(&self, x: f32) -> Vec<f32> {
        vec![x; self.len()]
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
    let shape = Shape { kv_heads: 2, group: 2, head_dim: 8, block_size: 16, dtype: KvDtype::F32 };
    let f = Fixture::new(shape, &[20], 0.0, (1.0, 1.0));
    let threads = Threads::new(Some(1)).unwrap();
    let rows = |start, len| [Rows { blocks: &f.tables[0], start, len }];
    let call = |rows: &[Rows], heads, scale, q_len, out_len| {
        let (q, mut out) = (vec![0.0; q_len], vec![0.0; out_len]);
        attend(Level::best(), &threads, f.store.layer(0), rows, heads, scale, &q, &mut out, NEVER)
    };
    assert!(call(&rows(0, 20), 4, 1.0, 640, 640).is_ok());
    assert!(call(&rows(0, 0), 4, 1.0, 0, 0).is_ok());
    for (result, word) in [
        (call(&rows(0, 20), 3, 1.0, 480, 480), "multiple"),
        (call(&rows(0, 20), 0, 1.0, 0, 0), "multiple"),
        (call(&rows(0, 20), 4, 1.0, 639, 640), "q:"),
        (call(&rows(0, 20), 4, 1.0, 640, 641), "out:"),
        (call(&rows(13, 20), 4, 1.0, 640, 640), "block table"),
        (call(&rows(usize::MAX, 20), 4, 1.0, 640, 640), "block table"),
        (call(&rows(0, 20), 4, f32::NAN, 640, 640), "scale"),
    ] {
        let message = result.unwrap_err().to_string();
        assert!(message.contains(word), "{message}");
    }
}
