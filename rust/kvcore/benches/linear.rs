//! Linear layers in the shapes of SmolLM2-135M and Llama 3.2 1B beside the machine's limits of the same run.
//!
//! Before criterion's own figures a table of ratios is printed: one row (decode) against the read bandwidth, many
//! rows (prefill) against the product peak. Kernel and limit are measured in turn and medians compared, since the
//! limits move with the machine's neighbours. `KVCORE_SIMD` forces a level.

mod limits;

use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvcore::linear::{Arena, Linear, WeightDtype, WeightsIn};
use kvcore::simd::Level;
use kvcore::threads::{NEVER, Threads};

/// (inputs, outputs)
const SMOLLM2: [(usize, usize); 5] = [(576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152)];
const LLAMA_1B: [(usize, usize); 4] = [(2048, 3072), (2048, 2048), (2048, 16384), (8192, 2048)];
const DTYPES: [WeightDtype; 5] =
    [WeightDtype::Bf16, WeightDtype::Int4, WeightDtype::Int8, WeightDtype::F16, WeightDtype::F32];
const ROWS: [usize; 4] = [1, 8, 32, 256];
/// Bytes of the layers that decode walks through, so that none is found in a cache.
const WALK: usize = 160 << 20;
/// Multiply-adds of one measurement at most, if one layer's are not more.
const MOST: usize = 1 << 30;

fn noise(n: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    std::iter::repeat_with(next).take(n).collect()
}

/// Layers of one shape, at least one, until they hold `bytes`.
fn pack(level: Level, threads: &Threads, shape: (usize, usize), dtype: WeightDtype, bytes: usize) -> Vec<Linear> {
    let ((inputs, outputs), arena) = (shape, Arena::new());
    let weights = noise(inputs * outputs);
    let mut layers = Vec::<Linear>::new();
    while layers.is_empty() || layers.len() * layers[0].nbytes() < bytes {
        let layer = arena.pack(level, threads, WeightsIn::F32(&weights), outputs, inputs, dtype, None);
        layers.push(layer.expect("packed weights"));
    }
    layers
}

/// Median seconds of a product over `layers`, one after the other, and the median of `limit` measured in turn.
fn beside(layers: &[Linear], rows: usize, level: Level, threads: &Threads, limit: impl Fn() -> f64) -> (f64, f64) {
    let x = noise(rows * layers[0].inputs());
    let mut out = vec![0.0; rows * layers[0].outputs()];
    let mut walk = || {
        let start = Instant::now();
        for layer in layers {
            layer.forward(level, threads, &x, &mut out, false, NEVER).expect("forward");
        }
        start.elapsed().as_secs_f64() / layers.len() as f64
    };
    walk();
    let (times, limits) = (0..7).map(|_| (walk(), limit())).unzip();
    (limits::median(times), limits::median(limits))
}

fn table(level: Level) {
    let read = limits::ReadBuffer::new();
    println!("level {}", level.name());
    for num_threads in 1..=kvcore::threads::available().min(2) {
        let threads = Threads::new(Some(num_threads)).expect("threads");
        for dtype in DTYPES {
            let bf16 = dtype == WeightDtype::Bf16;
            let shapes = SMOLLM2.into_iter().chain(LLAMA_1B);
            for shape in shapes.filter(|&shape| bf16 || [SMOLLM2[2], LLAMA_1B[1]].contains(&shape)) {
                let layers = pack(level, &threads, shape, dtype, WALK);
                let what = format!("{num_threads} threads {dtype:?} {:>4} -> {:<5}", shape.0, shape.1);
                let (time, limit) = beside(&layers, 1, level, &threads, || read.read(level, &threads));
                let rate = layers[0].nbytes() as f64 / time / 1e9;
                println!("{what}   1 row:  {rate:6.1} GB/s   of {limit:6.1} = {:.2}", rate / limit);
                for rows in &ROWS[1..] {
                    let products = shape.0 * shape.1 * rows;
                    let layers = &layers[..(MOST / products).clamp(1, layers.len())];
                    let peak = || match dtype {
                        WeightDtype::Int4 | WeightDtype::Int8 => limits::byte_products(level, &threads),
                        _ => limits::products(level, &threads, bf16),
                    };
                    let (time, limit) = beside(layers, *rows, level, &threads, peak);
                    let rate = products as f64 / time / 1e9;
                    println!("{what} {rows:3} rows: {rate:6.1} GMAC/s of {limit:6.1} = {:.2}", rate / limit);
                }
            }
        }
    }
}

fn bench(c: &mut Criterion) {
    let level = Level::from_env().expect("KVCORE_SIMD");
    // `cargo test --benches` runs each bench once and asks for no table.
    if std::env::args().any(|arg| arg == "--bench") {
        table(level);
    }
    let threads = Threads::new(None).expect("threads");
    let mut group = c.benchmark_group("linear");
    group.sample_size(10).warm_up_time(Duration::from_millis(100)).measurement_time(Duration::from_millis(400));
    for dtype in DTYPES {
        for shape in SMOLLM2 {
            let layer = &pack(level, &threads, shape, dtype, 1)[0];
            for rows in ROWS {
                let (x, mut out) = (noise(rows * shape.0), vec![0.0; rows * shape.1]);
                group.throughput(Throughput::Elements((rows * shape.0 * shape.1) as u64));
                let name = format!("{dtype:?}/{}x{}", shape.0, shape.1);
                group.bench_function(BenchmarkId::new(name, rows), |b| {
                    b.iter(|| layer.forward(level, &threads, &x, &mut out, false, NEVER));
                });
            }
        }
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
