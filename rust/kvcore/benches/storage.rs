//! Writing K and V into blocks and reading them back: float32 values a second, for every format, on the best level or
//! the one that `KVCORE_SIMD` asks for, with one thread.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvcore::paging::BlockId;
use kvcore::simd::Level;
use kvcore::storage::{KvDtype, KvStore, Layout, Scales};

/// Tokens of one call: a chunk of a prompt.
const TOKENS: usize = 256;

fn cases(c: &mut Criterion) {
    let level = Level::from_env().expect("KVCORE_SIMD");
    let x: Vec<f32> = (0..TOKENS * 8 * 128).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
    for reading in [false, true] {
        let mut group = c.benchmark_group(if reading { "storage/read" } else { "storage/write" });
        group.sample_size(20).throughput(Throughput::Elements(2 * x.len() as u64));
        for dtype in KvDtype::ALL {
            for &scale_mode in dtype.scale_modes() {
                let layout = Layout {
                    num_layers: 1,
                    num_blocks: TOKENS / 16,
                    num_kv_heads: 8,
                    k_dim: 128,
                    v_dim: 128,
                    latent: false,
                    block_size: 16,
                    dtype,
                    scale_mode,
                };
                let mut store = KvStore::new(layout, Scales::unit(&layout)).expect("a store");
                let blocks: Vec<BlockId> = (0..TOKENS as u32 / 16).map(BlockId::new).collect();
                let mut write = || {
                    let slots = (0..TOKENS).map(|p| (blocks[p / 16], p % 16));
                    store.write(level, 0, slots, &x, Some(&x));
                };
                write();
                let id = BenchmarkId::new(dtype.name(), scale_mode);
                if reading {
                    group.bench_function(id, |b| b.iter(|| store.read(level, 0, &blocks, TOKENS)));
                } else {
                    group.bench_function(id, |b| b.iter(&mut write));
                }
            }
        }
        group.finish();
    }
}

criterion_group!(benches, cases);
criterion_main!(benches);
