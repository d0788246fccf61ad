//! Drafts that branch: after the commit of a path all is what it would be had the path been planned and written alone.

mod cases;

use std::sync::Arc;
use std::time::Duration;

use cases::cases;
use kvcore::Error;
use kvcore::attention::{Bias, Output};
use kvcore::cache::{AttendOptions, Batch, CacheConfig, GroupKind, GroupSpec, KvCache};
use kvcore::formats::{KvDtype, ScaleMode};
use kvcore::paging::{AddOptions, SeqId};
use kvcore::simd::Level;
use kvcore::threads::{NEVER, Threads};
use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_64_with_seed;

const FULL: usize = 0;
const WINDOW: usize = 2;
const LATENT: usize = 3;
const CROSS: usize = 4;
/// Layers 0 and 1 are full.
const LAYERS: [usize; 5] = [FULL, 1, WINDOW, LATENT, CROSS];
/// KV heads, width of K and of V of each layer.
const SHAPES: [(usize, usize, usize); 5] = [(2, 6, 10), (2, 6, 10), (1, 4, 4), (1, 12, 8), (1, 4, 4)];
const Q_HEADS: usize = 2;
const ENCODER: usize = 5;

type Form = (KvDtype, ScaleMode);

fn forms() -> Vec<Form> {
    KvDtype::ALL.into_iter().flat_map(|dtype| dtype.scale_modes().iter().map(move |&mode| (dtype, mode))).collect()
}

fn cache((dtype, scale_mode): Form, window: usize, block_size: usize, max_rollback: usize) -> KvCache {
    let spec = |kind, layers: &[usize]| {
        let (num_kv_heads, head_dim, v_head_dim) = SHAPES[layers[0]];
        GroupSpec { kind, layers: layers.to_vec(), num_kv_heads, head_dim, v_head_dim, num_blocks: 400, scales: None }
    };
    let groups = vec![
        spec(GroupKind::Full, &[FULL, 1]),
        spec(GroupKind::SlidingWindow { window }, &[WINDOW]),
        spec(GroupKind::Latent { rank: 8, rope_dim: 4 }, &[LATENT]),
        spec(GroupKind::Cross, &[CROSS]),
    ];
    let config = CacheConfig { groups, scale_mode, max_rollback, ..CacheConfig::new(1, 1, 2, 1, block_size, dtype) };
    let mut cache = KvCache::new(config, None, Level::best(), Arc::new(Threads::new(Some(1)).unwrap())).unwrap();
    cache.set_now(Duration::ZERO);
    if !matches!(dtype, KvDtype::Int8 | KvDtype::Int4) {
        cache.fill(f32::NAN);
    }
    cache
}

/// Numbers that only the tokens up to this one decide about.
fn digests(tokens: &[u32]) -> Vec<u64> {
    let mut digest = 0;
    let mut next = |&token: &u32| {
        digest = xxh3_64_with_seed(&token.to_le_bytes(), digest);
        digest
    };
    tokens.iter().map(&mut next).collect()
}

/// K, V or Q (`what`) of the tokens with these digests in one layer.
fn values(digests: &[u64], layer: usize, what: u64, width: usize) -> Vec<f32> {
    let value = |digest: u64, i: usize| {
        let hash = xxh3_64_with_seed(&(i as u64).to_le_bytes(), digest ^ (what << 8 | layer as u64));
        (hash >> 40) as f32 / (1 << 22) as f32 - 2.0
    };
    digests.iter().flat_map(|&digest| (0..width).map(move |i| value(digest, i))).collect()
}

fn write(cache: &mut KvCache, batch: &mut Batch, digests: &[u64]) {
    for layer in LAYERS.into_iter().filter(|&layer| layer != CROSS) {
        let (heads, k_dim, v_dim) = SHAPES[layer];
        let (k, v) = (values(digests, layer, 0, heads * k_dim), values(digests, layer, 1, heads * v_dim));
        cache.write(layer, batch, &k, (layer != LATENT).then_some(&v)).unwrap();
    }
}

/// The result of every layer, row after row, as bits.
fn attend(cache: &KvCache, batch: &Batch, digests: &[u64]) -> Vec<Vec<u32>> {
    let mut rows = vec![Vec::new(); digests.len()];
    for layer in LAYERS {
        let (heads, k_dim, v_dim) = SHAPES[layer];
        let q_heads = Q_HEADS * heads;
        let table = [0.5, -0.25, 1.5, 0.0, 0.75, -1.0, 0.125, 2.0];
        let bias = Bias::Relative { table: &table[..q_heads * 2], before: 1 };
        let options = AttendOptions { scale: Some(0.4), bias, ..AttendOptions::default() };
        let q = values(digests, layer, 2, q_heads * k_dim);
        let width = q_heads * v_dim;
        let mut out = vec![0.0; digests.len() * width];
        cache.attend(layer, batch, q_heads, options, &q, Output::from(&mut out[..]), NEVER).unwrap();
        for (row, out) in rows.iter_mut().zip(out.chunks_exact(width)) {
            assert!(out.iter().all(|x| x.is_finite()), "layer {layer}");
            row.extend(out.iter().map(|x| x.to_bits()));
        }
    }
    rows
}

fn encode(cache: &mut KvCache, seq: SeqId) {
    let (heads, k_dim, v_dim) = SHAPES[CROSS];
    let of: Vec<u64> = (0..ENCODER as u64).collect();
    let (k, v) = (values(&of, CROSS, 0, heads * k_dim), values(&of, CROSS, 1, heads * v_dim));
    cache.write_cross(CROSS, seq, &k, &v).unwrap();
}

/// The rows of the path to `row`.
fn path_to(parents: &[Option<usize>], row: usize) -> Vec<usize> {
    let mut path = vec![row];
    while let Some(parent) = parents[path[0]] {
        path.insert(0, parent);
    }
    path
}

/// One sequence in both caches, and its tokens.
#[derive(Clone)]
struct Live {
    tree: SeqId,
    twin: SeqId,
    tokens: Vec<u32>,
    computed: usize,
}

/// A cache that is given trees, and its twin that is given their paths.
struct Pair {
    tree: KvCache,
    twin: KvCache,
    live: Vec<Live>,
}

/// What a step does with one sequence.
#[derive(Clone, Debug)]
struct Draft {
    /// Which sequence.
    seq: usize,
    /// Tokens to be added, and for each row how it finds its parent.
    tokens: Vec<(u32, u8)>,
    /// Whether the rows branch at all.
    branches: bool,
    /// Which row the path ends with.
    end: usize,
    /// Tokens that are added behind the tree before it is committed.
    behind: Vec<u32>,
}

/// A draft of a sequence that is there.
struct Item<'a> {
    seq: usize,
    parents: Vec<Option<usize>>,
    path: Vec<usize>,
    draft: &'a Draft,
}

#[derive(Clone, Debug)]
enum Op {
    Add { from: usize, cut: usize, tail: Vec<u32> },
    Step(Vec<Draft>),
    Fork(usize),
    Truncate(usize, usize),
    Free(usize),
}

fn tokens(most: usize) -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(0..3u32, 0..=most)
}

fn draft() -> impl Strategy<Value = Draft> {
    let rows = prop_oneof![3 => 0..8usize, 1 => 8..40usize];
    let rows = rows.prop_flat_map(|n| prop::collection::vec((0..3u32, any::<u8>()), n));
    (0..8usize, rows, any::<bool>(), any::<usize>(), tokens(2)).prop_map(|(seq, tokens, branches, end, behind)| Draft {
        seq,
        tokens,
        branches,
        end,
        behind,
    })
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        2 => (0..8usize, any::<usize>(), tokens(40)).prop_map(|(from, cut, tail)| Op::Add { from, cut, tail }),
        5 => prop::collection::vec(draft(), 1..3).prop_map(Op::Step),
        1 => (0..8usize).prop_map(Op::Fork),
        1 => (0..8usize, any::<usize>()).prop_map(|(seq, to)| Op::Truncate(seq, to)),
        1 => (0..8usize).prop_map(Op::Free),
    ]
}

impl Pair {
    fn run(&mut self, op: &Op) {
        match op {
            Op::Add { from, cut, tail } => self.add(*from, *cut, tail),
            Op::Step(drafts) => self.step(drafts),
            _ if self.live.is_empty() => {}
            Op::Fork(seq) => {
                let live = self.live[seq % self.live.len()].clone();
                let (tree, twin) = (self.tree.fork(live.tree).unwrap(), self.twin.fork(live.twin).unwrap());
                self.live.push(Live { tree, twin, ..live });
            }
            Op::Truncate(seq, to) => {
                let seq = seq % self.live.len();
                let live = &mut self.live[seq];
                let to = 1 + to % live.tokens.len();
                let results = (self.tree.truncate(live.tree, to), self.twin.truncate(live.twin, to));
                assert_eq!(results.0, results.1);
                if results.0.is_ok() {
                    live.tokens.truncate(to);
                    live.computed = live.computed.min(to);
                }
            }
            Op::Free(seq) => {
                let live = self.live.swap_remove(seq % self.live.len());
                self.tree.free(live.tree).unwrap();
                self.twin.free(live.twin).unwrap();
            }
        }
        self.check();
    }

    fn add(&mut self, from: usize, cut: usize, tail: &[u32]) {
        let mut tokens = match self.live.len() {
            0 => vec![1],
            n => {
                let like = &self.live[from % n].tokens;
                like[..1 + cut % like.len()].to_vec()
            }
        };
        tokens.extend_from_slice(tail);
        let [tree, twin] = [&mut self.tree, &mut self.twin].map(|cache| {
            let seq = cache.add(&tokens, &AddOptions::default()).unwrap();
            encode(cache, seq);
            (seq, cache.manager().num_computed_tokens(seq).unwrap())
        });
        assert_eq!(tree.1, twin.1, "another hit");
        self.live.push(Live { tree: tree.0, twin: twin.0, tokens, computed: tree.1 });
    }

    fn step(&mut self, drafts: &[Draft]) {
        let mut items: Vec<Item> = Vec::new();
        for draft in drafts.iter().filter(|_| !self.live.is_empty()) {
            let seq = draft.seq % self.live.len();
            let live = &self.live[seq];
            let open = live.tokens.len() - live.computed;
            let rows = open + draft.tokens.len();
            if rows == 0 || items.iter().any(|item| item.seq == seq) {
                continue;
            }
            let choice = |row: usize| row.checked_sub(open).map_or(7, |at| draft.tokens[at].1);
            let parents: Vec<_> = (0..rows)
                .map(|row| match choice(row) % 8 {
                    _ if row == 0 => None,
                    _ if !draft.branches => Some(row - 1),
                    // The first token of all is in every path, so that the twin can have it, too.
                    0 => (live.computed == 0).then_some(0),
                    1..=3 => Some(usize::from(choice(row)) * 7 % row),
                    _ => Some(row - 1),
                })
                .collect();
            let end = draft.end % (rows + 1);
            let path = match end {
                _ if end < rows => path_to(&parents, end),
                _ if live.computed == 0 => path_to(&parents, rows - 1),
                _ => vec![],
            };
            items.push(Item { seq, parents, path, draft });
        }
        if items.is_empty() {
            return;
        }
        for Item { seq, draft, .. } in &items {
            let live = &mut self.live[*seq];
            let new: Vec<u32> = draft.tokens.iter().map(|&(token, _)| token).collect();
            self.tree.append(live.tree, &new).unwrap();
            live.tokens.extend_from_slice(&new);
        }
        // Every row by its path, in the tree and in the twin.
        let of_row = |live: &Live, parents: &[Option<usize>], row: usize| {
            let mut tokens = live.tokens[..live.computed].to_vec();
            tokens.extend(path_to(parents, row).iter().map(|&row| live.tokens[live.computed + row]));
            *digests(&tokens).last().unwrap()
        };
        let mut of_rows = Vec::new();
        let mut expected_positions = Vec::new();
        for Item { seq, parents, .. } in &items {
            let live = &self.live[*seq];
            of_rows.extend((0..parents.len()).map(|row| of_row(live, parents, row)));
            let depth = |row| path_to(parents, row).len() - 1;
            expected_positions.extend((0..parents.len()).map(|row| live.computed + depth(row)));
        }
        let plan: Vec<_> = items.iter().map(|item| (self.live[item.seq].tree, item.parents.len())).collect();
        let trees = items.iter().map(|item| item.draft.branches.then(|| item.parents.clone())).collect();
        let mut batch = self.tree.plan_trees(&plan, trees).unwrap();
        assert_eq!(batch.positions().collect::<Vec<_>>(), expected_positions);
        self.tree.check().unwrap();
        write(&mut self.tree, &mut batch, &of_rows);
        let outs = attend(&self.tree, &batch, &of_rows);
        for Item { seq, draft, .. } in &items {
            self.tree.append(self.live[*seq].tree, &draft.behind).unwrap();
        }
        let keep: Vec<Option<&[usize]>> = items
            .iter()
            .map(|Item { parents, path, draft, .. }| {
                (draft.branches || path.len() < parents.len()).then_some(&path[..])
            })
            .collect();
        self.tree.commit_rows(&batch, &keep).unwrap();
        assert!(matches!(self.tree.commit(&batch), Err(Error::StaleBatch(_))));

        let mut first = 0;
        let mut plan = Vec::new();
        let (mut of_paths, mut expected) = (Vec::new(), Vec::new());
        for Item { seq, parents, path, .. } in &items {
            let live = &mut self.live[*seq];
            let drafts = live.tokens.split_off(live.computed);
            let kept: Vec<u32> = path.iter().map(|&row| drafts[row]).collect();
            // What was open already is taken back, as the path may not have it. A sequence has at least one token.
            let known = live.computed.max(1);
            self.twin.truncate(live.twin, known).unwrap();
            self.twin.append(live.twin, &kept[known - live.computed..]).unwrap();
            live.tokens.extend_from_slice(&kept);
            if path.is_empty() {
                // One token that is not kept: a plan may unpublish, what is committed is published again.
                self.twin.append(live.twin, &[0]).unwrap();
                let mut batch = self.twin.plan(&[(live.twin, 1)]).unwrap();
                write(&mut self.twin, &mut batch, &[0]);
                self.twin.commit_rows(&batch, &[Some(&[])]).unwrap();
            } else {
                plan.push((live.twin, path.len()));
                of_paths.extend(path.iter().map(|&row| of_rows[first + row]));
                expected.extend(path.iter().map(|&row| outs[first + row].clone()));
            }
            first += parents.len();
        }
        if !plan.is_empty() {
            let mut batch = self.twin.plan(&plan).unwrap();
            write(&mut self.twin, &mut batch, &of_paths);
            assert_eq!(attend(&self.twin, &batch, &of_paths), expected);
            self.twin.commit(&batch).unwrap();
        }
        for Item { seq, path, draft, .. } in &items {
            let live = &mut self.live[*seq];
            live.computed += path.len();
            live.tokens.extend_from_slice(&draft.behind);
            self.twin.append(live.twin, &draft.behind).unwrap();
        }
    }

    fn check(&self) {
        self.tree.check().unwrap();
        self.twin.check().unwrap();
        for live in &self.live {
            let [tree, twin] = [(&self.tree, live.tree), (&self.twin, live.twin)].map(|(cache, seq)| {
                let manager = cache.manager();
                assert_eq!(manager.token_ids(seq).unwrap(), live.tokens);
                assert_eq!(manager.num_computed_tokens(seq).unwrap(), live.computed);
                let returned = |group| {
                    let table = cache.block_table(seq, group).unwrap();
                    (table.len(), table.iter().filter(|block| block.is_none()).count())
                };
                let stored = LAYERS.map(|layer| {
                    let dense = cache.read(layer, seq).unwrap();
                    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                    (dense.start, dense.tokens, bits(dense.k), bits(dense.v))
                });
                ([0, 1, 2].map(returned), stored)
            });
            assert_eq!(tree, twin);
        }
    }
}

proptest! {
    #![proptest_config(cases(200))]

    #[test]
    fn a_committed_path_is_what_it_would_be_alone(
        form in prop::sample::select(forms()),
        window in prop::sample::select(vec![1, 7, 16, 33]),
        block_size in prop::sample::select(vec![16, 32]),
        max_rollback in prop::sample::select(vec![0, 5, 20]),
        ops in prop::collection::vec(op(), 1..25),
    ) {
        let [tree, twin] = [0, 1].map(|_| cache(form, window, block_size, max_rollback));
        let mut pair = Pair { tree, twin, live: Vec::new() };
        for op in &ops {
            pair.run(op);
        }
        for live in std::mem::take(&mut pair.live) {
            pair.tree.free(live.tree).unwrap();
        }
        pair.tree.check().unwrap();
        assert_eq!(pair.tree.stats().used, 0);
    }
}
