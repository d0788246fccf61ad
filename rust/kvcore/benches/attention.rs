//! Attention over block tables beside the machine's limits of the same run.
//!
//! Before criterion's own figures a table of ratios is printed, for every format and level and for 1 and 2 threads:
//! decode against the read bandwidth (a cache larger than the last-level cache) and against the product peak (a cache
//! that fits), prefill against the product peak. Kernel and limit are measured in turn and medians compared, since
//! the limits move with the machine's neighbours. `KVCORE_SIMD` restricts the run to one level.

mod limits;

use std::time::Instant;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvcore::attention::{Rows, attend};
use kvcore::paging::BlockId;
use kvcore::simd::Level;
use kvcore::storage::{KvDtype, KvStore, Layout, Scales};
use kvcore::threads::{NEVER, Threads, available};

/// (name, q heads, kv heads, head_dim)
const SHAPES: [(&str, usize, usize, usize); 3] =
    [("llama-3-8b", 32, 8, 128), ("smollm2", 9, 3, 64), ("gemma-3", 4, 1, 256)];

/// The formats that attention reads.
const DTYPES: [KvDtype; 4] = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Fp8E4M3];

const BLOCK: usize = 16;

/// Some sequences of equal length in one layer; their tables run through the pool in a shuffled order, as those of a
/// server that has run for a while do.
struct Cache {
    store: KvStore,
    tables: Vec<Vec<BlockId>>,
    tokens: usize,
    q_heads: usize,
}

impl Cache {
    fn new(shape: (&str, usize, usize, usize), dtype: KvDtype, batch: usize, tokens: usize) -> Self {
        let (_, q_heads, num_kv_heads, head_dim) = shape;
        let per_seq = tokens.div_ceil(BLOCK);
        let num_blocks = batch * per_seq;
        let layout = Layout {
            num_layers: 1,
            num_blocks,
            num_kv_heads,
            k_dim: head_dim,
            v_dim: head_dim,
            latent: false,
            block_size: BLOCK,
            dtype,
            scale_mode: dtype.default_scale_mode(),
        };
        let mut store = KvStore::new(layout, Scales::unit(&layout)).expect("a store");
        store.fill(0.25);
        // Steps of a number that shares no factor with the pool's size visit every block once.
        let stride = (num_blocks * 5 / 8..).find(|s| gcd(*s, num_blocks) == 1).expect("a stride");
        let order: Vec<BlockId> = (0..num_blocks).map(|i| BlockId::new((i * stride % num_blocks) as u32)).collect();
        let tables = order.chunks(per_seq).map(<[_]>::to_vec).collect();
        Self { store, tables, tokens, q_heads }
    }

    fn bytes(&self) -> usize {
        self.store.layout().total_bytes()
    }

    /// The last `rows` positions of every sequence; returns seconds.
    fn attend(&self, level: Level, threads: &Threads, rows: usize) -> f64 {
        let l = self.store.layout();
        let items: Vec<Rows> =
            self.tables.iter().map(|blocks| Rows { blocks, start: self.tokens - rows, len: rows }).collect();
        let q = vec![0.5; items.len() * rows * self.q_heads * l.k_dim];
        let mut out = vec![0.0; q.len()];
        let start = Instant::now();
        attend(level, threads, self.store.layer(0), &items, self.q_heads, 0.1, &q, &mut out, NEVER).expect("attend");
        let seconds = start.elapsed().as_secs_f64();
        assert!(out.iter().all(|x| (x - 0.25).abs() < 1e-2));
        seconds
    }

    /// Multiply-adds of one call.
    fn products(&self, rows: usize) -> f64 {
        let l = self.store.layout();
        let visible: usize = (self.tokens - rows..self.tokens).map(|p| p + 1).sum();
        (self.tables.len() * visible * self.q_heads * 2 * l.k_dim) as f64
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn levels() -> Vec<Level> {
    match std::env::var_os("KVCORE_SIMD") {
        Some(_) => vec![Level::from_env().expect("KVCORE_SIMD")],
        None => Level::available(),
    }
}

/// Medians of a kernel's rate and of its limit, measured in turn.
fn beside(mut kernel: impl FnMut() -> f64, limit: impl Fn() -> f64) -> (f64, f64) {
    kernel();
    let (rates, limits) = (0..5).map(|_| (kernel(), limit())).unzip();
    (limits::median(rates), limits::median(limits))
}

fn table() {
    let read = limits::ReadBuffer::new();
    println!("decode of a cache larger than the last-level cache: GB/s of K and V beside the read bandwidth");
    println!("decode of a resident cache, prefill: GMAC/s beside the level's product peak (bf16 pairs, or f32)");
    for level in levels() {
        for num_threads in 1..=available().min(2) {
            let threads = Threads::new(Some(num_threads)).expect("threads");
            for shape in SHAPES {
                for dtype in DTYPES {
                    let bf16 = dtype.step() == 2;
                    let line = |what: &str, unit: &str, (rate, limit): (f64, f64)| {
                        println!(
                            "{:<10} {num_threads} thread(s)  {:<10} {:<8}  {what:<22} {rate:7.1} of {limit:6.1} {unit:<6} = {:.2}",
                            level.name(),
                            shape.0,
                            dtype.name(),
                            rate / limit
                        );
                    };
                    // 160 MB and 2 MB at a time, whatever the format.
                    let per_token = 2 * shape.2 * shape.3 * dtype.bits() / 8;
                    let tokens = 8192.min((160 << 20) / per_token);
                    let large = Cache::new(shape, dtype, ((160 << 20) / per_token / tokens).max(1), tokens);
                    let bytes = large.bytes() as f64;
                    line(
                        &format!("decode {} x {tokens}", large.tables.len()),
                        "GB/s",
                        beside(|| bytes / large.attend(level, &threads, 1) / 1e9, || read.read(level, &threads)),
                    );
                    drop(large);
                    let tokens = ((2 << 20) / per_token / 2).max(64);
                    let small = Cache::new(shape, dtype, 2, tokens);
                    let peak = || limits::products(level, &threads, bf16);
                    line(
                        &format!("decode 2 x {tokens}"),
                        "GMAC/s",
                        beside(|| small.products(1) / small.attend(level, &threads, 1) / 1e9, peak),
                    );
                    let prompt = Cache::new(shape, dtype, 1, 2048);
                    line(
                        "prefill 2048",
                        "GMAC/s",
                        beside(|| prompt.products(2048) / prompt.attend(level, &threads, 2048) / 1e9, peak),
                    );
                }
            }
        }
    }
}

/// Criterion's record of single cases on the best (or forced) level, so that changes show from run to run.
fn cases(c: &mut Criterion) {
    table();
    let (level, threads) = (Level::from_env().expect("KVCORE_SIMD"), Threads::new(Some(1)).expect("threads"));
    for (name, rows) in [("decode", 1), ("prefill", 256)] {
        let mut group = c.benchmark_group(format!("attention/{name}"));
        group.sample_size(20);
        for shape in SHAPES {
            for dtype in DTYPES {
                let cache = Cache::new(shape, dtype, 1, 2048);
                group.throughput(Throughput::Elements(cache.products(rows) as u64));
                group.bench_function(BenchmarkId::new(shape.0, dtype.name()), |b| {
                    b.iter(|| cache.attend(level, &threads, rows));
                });
            }
        }
        group.finish();
    }
}

criterion_group!(benches, cases);
criterion_main!(benches);
