//! What block management costs, over pools of 1e3, 1e5 and 1e6 blocks of 16 tokens: the figures must not grow with the
//! pool (beyond what a colder memory costs). `used` pools have every block published once and freed, the worst case.
#![allow(missing_docs, reason = "criterion_group! makes a public function")]

use std::hint::black_box;

use criterion::{BatchSize, BenchmarkId, Criterion, criterion_group, criterion_main};
use kvcore::Result;
use kvcore::paging::{AddOptions, BlockManager, BlockPool, GroupConfig, ManagerConfig, SeqId};

const POOLS: [usize; 3] = [1_000, 100_000, 1_000_000];
const BLOCK_SIZE: usize = 16;

/// Token ids without repetition, so that no two blocks are equal.
fn tokens(from: usize, len: usize) -> Vec<u32> {
    (from..from + len).map(|token| (token as u32).wrapping_mul(0x9E37_79B9)).collect()
}

fn add(manager: &mut BlockManager, tokens: &[u32]) -> Result<SeqId> {
    manager.add(tokens, &AddOptions::default(), &mut Vec::new())
}

fn compute(manager: &mut BlockManager, seq: SeqId) {
    let n = manager.num_tokens(seq).unwrap() - manager.num_computed_tokens(seq).unwrap();
    let batch = manager.plan(&[(seq, n)], &mut Vec::new()).unwrap();
    manager.commit(&batch).unwrap();
}

/// A manager all of whose blocks hold cached prefixes of 8,192 tokens or less.
fn used_manager(num_blocks: usize) -> BlockManager {
    let mut manager = BlockManager::new(ManagerConfig::new(num_blocks, BLOCK_SIZE)).unwrap();
    for start in (0..num_blocks).step_by(512) {
        let len = 512.min(num_blocks - start) * BLOCK_SIZE;
        let seq = add(&mut manager, &tokens(start * BLOCK_SIZE, len)).unwrap();
        compute(&mut manager, seq);
        manager.free(seq).unwrap();
    }
    assert_eq!(manager.stats().cached, num_blocks);
    manager
}

fn pool(c: &mut Criterion) {
    let mut group = c.benchmark_group("pool");
    for num_blocks in POOLS {
        let mut pool = BlockPool::new(num_blocks).unwrap();
        group.bench_function(BenchmarkId::new("allocate + release", num_blocks), |b| {
            b.iter(|| {
                let block = pool.allocate().unwrap();
                pool.release(black_box(block)).unwrap();
            });
        });
        let block = pool.allocate().unwrap();
        group.bench_function(BenchmarkId::new("retain + release", num_blocks), |b| {
            b.iter(|| {
                pool.retain(black_box(block)).unwrap();
                pool.release(black_box(block)).unwrap();
            });
        });
    }
    group.bench_function("manager of 1000000 blocks", |b| {
        b.iter(|| BlockManager::new(ManagerConfig::new(1_000_000, BLOCK_SIZE)).unwrap());
    });
    group.finish();
}

fn manager(c: &mut Criterion) {
    let mut group = c.benchmark_group("manager");
    for num_blocks in POOLS {
        let mut manager = used_manager(num_blocks);
        let prompt = tokens(1 << 30, 8192);
        let seq = add(&mut manager, &prompt).unwrap();
        compute(&mut manager, seq);
        manager.free(seq).unwrap();
        let mut moves = Vec::new();
        group.bench_function(BenchmarkId::new("add + plan + free, 8192 tokens cached", num_blocks), |b| {
            b.iter(|| {
                let seq = add(&mut manager, black_box(&prompt)).unwrap();
                assert_eq!(manager.num_cached_tokens(seq).unwrap(), 8191);
                black_box(manager.plan(&[(seq, 1)], &mut moves).unwrap());
                moves.clear();
                manager.free(seq).unwrap();
            });
        });
        // The same, with prompts that were not touched for a while: every access goes to memory.
        // (Pools of 1,000 hold one prompt: never cold.)
        let mut start = 512;
        if num_blocks > 1_000 {
            group.bench_function(BenchmarkId::new("add + free, 8192 tokens cached, cold", num_blocks), |b| {
                b.iter_batched(
                    || {
                        start = if start + 2 * 512 > num_blocks { 2 * 512 } else { start + 512 };
                        tokens(start * BLOCK_SIZE, 8192)
                    },
                    |prompt| {
                        let seq = add(&mut manager, &prompt).unwrap();
                        assert_eq!(manager.num_cached_tokens(seq).unwrap(), 8191);
                        manager.free(seq).unwrap();
                        prompt
                    },
                    BatchSize::SmallInput,
                );
            });
        }
        let mut start = 1 << 29;
        group.bench_function(BenchmarkId::new("add + plan + commit + free, 8192 tokens new", num_blocks), |b| {
            b.iter_batched(
                || {
                    start += 8192;
                    tokens(start, 8192)
                },
                |prompt| {
                    let seq = add(&mut manager, &prompt).unwrap();
                    compute(&mut manager, seq);
                    manager.free(seq).unwrap();
                    prompt
                },
                BatchSize::SmallInput,
            );
        });

        let mut manager = used_manager(num_blocks.max(2_000));
        let long = add(&mut manager, &tokens(1 << 28, 1_000 * BLOCK_SIZE)).unwrap();
        compute(&mut manager, long);
        group.bench_function(BenchmarkId::new("fork + free, 1000 blocks", num_blocks), |b| {
            b.iter(|| {
                let child = manager.fork(black_box(long)).unwrap();
                manager.free(child).unwrap();
            });
        });
    }
    group.finish();
}

fn decode(c: &mut Criterion) {
    let mut group = c.benchmark_group("decode step");
    for (num_seqs, len) in [(1, 100), (1, 100_000), (64, 1_000)] {
        let mut manager = used_manager(100_000);
        let mut items = Vec::new();
        for index in 0..num_seqs {
            let seq = add(&mut manager, &tokens((1 << 28) + index * len, len)).unwrap();
            compute(&mut manager, seq);
            items.push((seq, 1));
        }
        let mut moves = Vec::new();
        let mut token = 0;
        group.bench_function(format!("{num_seqs} sequences of {len} tokens"), |b| {
            b.iter(|| {
                token += 1;
                for &(seq, _) in &items {
                    manager.append(seq, &[token]).unwrap();
                }
                let batch = manager.plan(&items, &mut moves).unwrap();
                manager.commit(&batch).unwrap();
                // Every length stays near `len`, however often this runs.
                if token % 64 == 0 {
                    for &(seq, _) in &items {
                        manager.truncate(seq, len).unwrap();
                    }
                }
            });
        });
    }
    group.finish();
}

/// One prompt's continuation differs from 100,000 others': the child with the longest common beginning is wanted.
fn siblings(c: &mut Criterion) {
    const CHILDREN: u32 = 100_000;
    let mut manager = BlockManager::new(ManagerConfig::new(2 * CHILDREN as usize, BLOCK_SIZE)).unwrap();
    let word = |n: u32| (0..BLOCK_SIZE as u32).map(move |i| n.wrapping_mul(0x9E37_79B9) >> (2 * i) & 3);
    for n in 0..CHILDREN {
        let prompt: Vec<u32> = tokens(0, BLOCK_SIZE).into_iter().chain(word(n)).collect();
        let seq = add(&mut manager, &prompt).unwrap();
        compute(&mut manager, seq);
        manager.free(seq).unwrap();
    }
    let mut group = c.benchmark_group("siblings");
    let mut n = CHILDREN;
    group.bench_function(format!("add + free below {CHILDREN} children, part of a block cached"), |b| {
        b.iter(|| {
            n = n.wrapping_add(1);
            let prompt: Vec<u32> = tokens(0, BLOCK_SIZE).into_iter().chain(word(n)).chain([9]).collect();
            let seq = add(&mut manager, black_box(&prompt)).unwrap();
            assert!(manager.num_cached_tokens(seq).unwrap() > BLOCK_SIZE);
            manager.free(seq).unwrap();
        });
    });
    group.finish();
}

/// A layer group that keeps all tokens beside one with a window.
fn windows(c: &mut Criterion) {
    let groups = [None, Some(1024)].map(|window| GroupConfig { num_blocks: 10_000, window });
    let config = ManagerConfig { groups: groups.to_vec(), ..ManagerConfig::new(1, BLOCK_SIZE) };
    let mut manager = BlockManager::new(config).unwrap();
    let prompt = tokens(0, 8192);
    let seq = add(&mut manager, &prompt).unwrap();
    compute(&mut manager, seq);
    manager.free(seq).unwrap();
    let mut moves = Vec::new();
    c.bench_function("two groups, one with a window: add + plan + free, 8192 tokens cached", |b| {
        b.iter(|| {
            let seq = add(&mut manager, black_box(&prompt)).unwrap();
            assert_eq!(manager.num_cached_tokens(seq).unwrap(), 8191);
            black_box(manager.plan(&[(seq, 1)], &mut moves).unwrap());
            moves.clear();
            manager.free(seq).unwrap();
        });
    });
}

criterion_group!(benches, pool, manager, decode, siblings, windows);
criterion_main!(benches);
