//! Attention over block tables beside the machine's limits of the same run.
//!
//! Before criterion's own figures a table of ratios is printed, for every level and for 1 and 2 threads: decode against
//! the read bandwidth (a cache larger than the last-level cache) and against the product peak (a cache that fits),
//! prefill against the product peak; a sliding window and latent rows for one shape each. Kernel and limit are measured
//! in turn and medians compared, since the limits move with the machine's neighbours. `KVCORE_SIMD` restricts the run to
//! one level, words to the lines that have them all: `cargo bench --bench attention -- "llama bfloat16"`. With
//! `KVCORE_ROOFLINE=FOLDER` a picture of each level's lines under these limits is written there.

mod limits;

use std::cell::RefCell;
use std::path::Path;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvcore::attention::{Call, Mask, Rows, Scoring, attend};
use kvcore::paging::BlockId;
use kvcore::simd::Level;
use kvcore::storage::{KvDtype, KvStore, Layout, Scales};
use kvcore::threads::{NEVER, Threads, available};
use limits::roofline::{Point, Roofline};

/// Heads and their widths.
#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    q_heads: usize,
    kv_heads: usize,
    k_dim: usize,
    v_dim: usize,
    latent: bool,
}

impl Shape {
    const fn plain(name: &'static str, q_heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        Self { name, q_heads, kv_heads, k_dim: head_dim, v_dim: head_dim, latent: false }
    }

    fn layout(&self, num_blocks: usize, dtype: KvDtype) -> Layout {
        Layout {
            num_layers: 1,
            num_blocks,
            num_kv_heads: self.kv_heads,
            k_dim: self.k_dim,
            v_dim: self.v_dim,
            latent: self.latent,
            block_size: BLOCK,
            dtype,
            scale_mode: dtype.default_scale_mode(),
        }
    }
}

const SHAPES: [Shape; 3] =
    [Shape::plain("llama-3-8b", 32, 8, 128), Shape::plain("smollm2", 9, 3, 64), Shape::plain("gemma-3", 4, 1, 256)];

const DEEPSEEK: Shape = Shape { name: "deepseek-v3", q_heads: 128, kv_heads: 1, k_dim: 576, v_dim: 512, latent: true };

/// Formats of the table; of those that share their products with others the first shape alone is measured.
fn formats(shape: &Shape) -> &'static [KvDtype] {
    const ALL: [KvDtype; 6] =
        [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Fp8E4M3, KvDtype::Int8, KvDtype::Int4];
    if shape.name == SHAPES[0].name { &ALL } else { &ALL[..4] }
}

const BLOCK: usize = 16;

/// One measurement takes at least this long.
const LEAST: Duration = Duration::from_millis(5);

/// Measurements of a kernel and its limit; medians count.
const ROUNDS: usize = 5;

/// Some sequences of equal length in one layer; their tables run through the pool in a shuffled order, as those of a
/// server that has run for a while do.
struct Cache {
    store: KvStore,
    tables: Vec<Vec<BlockId>>,
    tokens: usize,
    shape: Shape,
    mask: Mask,
}

impl Cache {
    fn new(shape: Shape, dtype: KvDtype, batch: usize, tokens: usize) -> Self {
        let per_seq = tokens.div_ceil(BLOCK);
        let num_blocks = batch * per_seq;
        let layout = shape.layout(num_blocks, dtype);
        let mut store = KvStore::new(layout, Scales::unit(&layout)).expect("a store");
        store.fill(0.25);
        // Steps of a number that shares no factor with the pool's size visit every block once.
        let stride = (num_blocks * 5 / 8..).find(|s| gcd(*s, num_blocks) == 1).expect("a stride");
        let order: Vec<BlockId> = (0..num_blocks).map(|i| BlockId::new((i * stride % num_blocks) as u32)).collect();
        let tables = order.chunks(per_seq).map(<[_]>::to_vec).collect();
        Self { store, tables, tokens, shape, mask: Mask::Causal }
    }

    /// `batch` sequences that begin with the same `shared` tokens and have `own` more.
    fn sharing(shape: Shape, dtype: KvDtype, batch: usize, shared: usize, own: usize) -> Self {
        let mut cache = Self::new(shape, dtype, batch, shared + own);
        let (first, rest) = cache.tables.split_first_mut().expect("a sequence");
        for table in rest {
            table[..shared / BLOCK].copy_from_slice(&first[..shared / BLOCK]);
        }
        cache
    }

    fn bytes(&self) -> usize {
        self.tables.len() * self.tokens * self.store.layout().bytes_per_token()
    }

    /// The last `rows` positions of every sequence; returns the seconds of one call, of as many as take a few milliseconds.
    fn attend(&self, level: Level, threads: &Threads, rows: usize) -> f64 {
        let Shape { q_heads: num_q_heads, k_dim, v_dim, .. } = self.shape;
        let (start, mask) = (self.tokens - rows, self.mask);
        let items: Vec<Rows> = self.tables.iter().map(|blocks| Rows::new(blocks, start, rows, mask)).collect();
        let q = vec![0.5; items.len() * rows * num_q_heads * k_dim];
        let mut out = vec![0.0; items.len() * rows * num_q_heads * v_dim];
        let scoring = Scoring::plain(0.1);
        let call = Call { view: self.store.layer(0), rows: &items, num_q_heads, scoring, q: &q };
        let (start, mut calls) = (Instant::now(), 0);
        let seconds = loop {
            attend(level, threads, &call, &mut out[..], NEVER).expect("attend");
            calls += 1;
            let elapsed = start.elapsed();
            if elapsed >= LEAST {
                break elapsed.as_secs_f64() / f64::from(calls);
            }
        };
        assert!(out.iter().all(|x| (x - 0.25).abs() < 1e-2));
        seconds
    }

    /// Multiply-adds of one call.
    fn products(&self, rows: usize) -> f64 {
        let visible: usize = (self.tokens - rows..self.tokens).map(|p| self.mask.sees(p).len()).sum();
        (self.tables.len() * visible * self.shape.q_heads * (self.shape.k_dim + self.shape.v_dim)) as f64
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
    let (rates, limits) = (0..ROUNDS).map(|_| (kernel(), limit())).unzip();
    (limits::median(rates), limits::median(limits))
}

/// What a line shows, and the multiply-adds for each byte.
struct Rates {
    rate: f64,
    beside: f64,
    intensity: f64,
}

/// What a table is made of: a level, threads, and the words that a line must have to be measured.
struct Table<'a> {
    level: Level,
    threads: Threads,
    read: &'a limits::ReadBuffer,
    filter: Option<String>,
    measured: RefCell<Vec<Measured>>,
}

/// A line, for the roofline.
struct Measured {
    point: Point,
    /// Beside it: GB/s, or GMAC/s in bf16 pairs or f32.
    limit: f64,
    what: Limit,
}

#[derive(Clone, Copy, PartialEq)]
enum Limit {
    Bandwidth,
    Bf16,
    F32,
}

impl Table<'_> {
    /// Measure and print one line: a rate beside its limit.
    fn line(&self, shape: &Shape, dtype: KvDtype, what: &str, limit: Limit, rates: impl FnOnce() -> Rates) {
        let unit = if limit == Limit::Bandwidth { "GB/s" } else { "GMAC/s" };
        let threads = self.threads.num_threads();
        let label = format!("{:<10} {threads} thread(s)  {:<11} {:<8}", self.level.name(), shape.name, dtype.name());
        let line = format!("{label}  {what:<26}");
        if self.filter.as_ref().is_some_and(|filter| !filter.split(' ').all(|word| line.contains(word))) {
            return;
        }
        let Rates { rate, beside, intensity } = rates();
        println!("{line} {rate:7.1} of {beside:6.1} {unit:<6} = {:.2}", rate / beside);
        let kinds = ["memory", "resident", "prefill", "shared"];
        let kind = kinds.into_iter().find(|kind| what.contains(kind)).unwrap_or("others");
        let rate = if limit == Limit::Bandwidth { rate * intensity } else { rate };
        let point = Point { kind, label: format!("{} {} {what}", shape.name, dtype.name()), intensity, rate };
        self.measured.borrow_mut().push(Measured { point, limit: beside, what: limit });
    }

    /// Decode of a cache that is read from memory, in GB/s of K and V.
    fn memory(&self, shape: Shape, dtype: KvDtype, tokens: usize) {
        let bytes = limits::beyond_caches();
        let batch = (bytes / shape.layout(1, dtype).bytes_per_token() / tokens).max(1);
        self.line(&shape, dtype, &format!("memory, decode {batch} x {tokens}"), Limit::Bandwidth, || {
            let cache = Cache::new(shape, dtype, batch, tokens);
            let bytes = cache.bytes() as f64;
            let rate = || bytes / cache.attend(self.level, &self.threads, 1) / 1e9;
            let (rate, beside) = beside(rate, || self.read.read(self.level, &self.threads));
            Rates { rate, beside, intensity: cache.products(1) / bytes }
        });
    }

    /// The last `rows` rows of a cache, in GMAC/s.
    fn products(&self, what: &str, shape: Shape, dtype: KvDtype, rows: usize, cache: impl FnOnce() -> Cache) {
        let limit = if dtype.step() == 2 { Limit::Bf16 } else { Limit::F32 };
        self.line(&shape, dtype, what, limit, || {
            let cache = cache();
            let peak = || limits::products(self.level, &self.threads, limit == Limit::Bf16);
            let products = cache.products(rows);
            let (rate, beside) = beside(|| products / cache.attend(self.level, &self.threads, rows) / 1e9, peak);
            Rates { rate, beside, intensity: products / cache.bytes() as f64 }
        });
    }

    fn print(&self) {
        for shape in SHAPES {
            for &dtype in formats(&shape) {
                self.memory(shape, dtype, 8192);
                let tokens = (RESIDENT / shape.layout(1, dtype).bytes_per_token() / 2).next_multiple_of(BLOCK);
                let resident = || Cache::new(shape, dtype, 2, tokens);
                self.products(&format!("resident, decode 2 x {tokens}"), shape, dtype, 1, resident);
                self.products("prefill 2048", shape, dtype, 2048, || Cache::new(shape, dtype, 1, 2048));
            }
        }
        let [llama, _, gemma] = SHAPES;
        for tokens in [256, 32_768] {
            self.memory(llama, KvDtype::Bf16, tokens);
        }
        for shape in [llama, gemma] {
            let shared = || Cache::sharing(shape, KvDtype::Bf16, 32, 4096, 64);
            self.products("32 x 4096 shared + 64", shape, KvDtype::Bf16, 1, shared);
        }
        let window = || Cache { mask: Mask::Window(1024), ..Cache::new(gemma, KvDtype::Bf16, 4, 4096) };
        self.products("decode, window 1024", gemma, KvDtype::Bf16, 1, window);
        self.products("prefill, window 1024", gemma, KvDtype::Bf16, 128, window);
        for (what, rows) in [("decode 1 x 2048", 1), ("prefill of 4", 4)] {
            self.products(what, DEEPSEEK, KvDtype::Bf16, rows, || Cache::new(DEEPSEEK, KvDtype::Bf16, 1, 2048));
        }
    }
}

impl Table<'_> {
    /// A picture of all lines.
    fn draw(&self, folder: &Path) {
        let measured = self.measured.take();
        let limit = |what| {
            let values: Vec<f64> = measured.iter().filter(|m| m.what == what).map(|m| m.limit).collect();
            (!values.is_empty()).then(|| limits::median(values))
        };
        let Some(bandwidth) = limit(Limit::Bandwidth) else { return };
        let peaks = [("bf16", Limit::Bf16), ("f32", Limit::F32)];
        let peaks: Vec<_> = peaks.into_iter().filter_map(|(name, what)| Some((name, limit(what)?))).collect();
        if peaks.is_empty() {
            return;
        }
        let (level, threads) = (self.level.name(), self.threads.num_threads());
        let title = format!("Attention, {level}, {threads} thread{}", if threads == 1 { "" } else { "s" });
        let points = measured.into_iter().map(|m| m.point).collect();
        let path = folder.join(format!("roofline_{level}_{threads}.svg"));
        std::fs::write(&path, Roofline { title, bandwidth, peaks, points }.svg()).expect("KVCORE_ROOFLINE");
        println!("{}", path.display());
    }
}

/// Bytes of a cache that stays in a second-level cache, all heads together.
const RESIDENT: usize = 1 << 20;

fn table() {
    let read = limits::ReadBuffer::new();
    // The first word that is no option, as criterion takes it.
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    println!("memory: GB/s of K and V beside the read bandwidth, in a cache twice as large as the last level's");
    println!("resident, prefill, shared: GMAC/s beside the level's product peak (bf16 pairs, or f32)");
    for level in levels() {
        for num_threads in 1..=available().min(2) {
            let threads = Threads::new(Some(num_threads)).expect("threads");
            let table = Table { level, threads, read: &read, filter: filter.clone(), measured: RefCell::default() };
            table.print();
            if let Some(folder) = std::env::var_os("KVCORE_ROOFLINE") {
                table.draw(Path::new(&folder));
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
            for &dtype in formats(&shape) {
                let cache = Cache::new(shape, dtype, 1, 2048);
                group.throughput(Throughput::Elements(cache.products(rows) as u64));
                group.bench_function(BenchmarkId::new(shape.name, dtype.name()), |b| {
                    b.iter_custom(|n| Duration::from_secs_f64(n as f64 * cache.attend(level, &threads, rows)));
                });
            }
        }
        group.finish();
    }
}

criterion_group!(benches, cases);
criterion_main!(benches);
