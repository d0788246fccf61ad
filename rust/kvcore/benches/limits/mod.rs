//! What the machine can do at most, measured in the same run as the kernels: neighbours move these figures.
#![allow(dead_code, reason = "each bench uses its part")]

pub mod roofline;

use std::hint::black_box;
use std::time::Instant;

use kvcore::simd::{
    self, LANES, Left, Level, Pairs, Shaped, Simd, TILE_ROWS, TILE_VALUES, TILE_WORDS, Tiles, TwoTiles, Work,
};
use kvcore::threads::{NEVER, Threads};

/// Bytes of what is read to measure memory, not caches: twice the last-level cache, as far as that is known and sane.
pub fn beyond_caches() -> usize {
    let size = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index3/size").unwrap_or_default();
    let kibibytes = size.trim().strip_suffix('K').and_then(|n| n.parse::<usize>().ok()).unwrap_or(0);
    (2 * (kibibytes << 10)).clamp(160 << 20, 512 << 20)
}
/// Measurements; the median counts.
const ROUNDS: usize = 9;

/// The median of a few measurements.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Sums 16 lanes of a buffer, so that every byte is loaded: eight streams of sums that do not wait for each other.
struct ReadAll<'a>(&'a [[f32; LANES]]);

impl<S: Simd> Work<S> for ReadAll<'_> {
    type Output = f32;

    #[inline(always)]
    fn run(self, s: S) -> f32 {
        let mut sums = [s.splat(0.0); 4];
        for step in self.0.chunks_exact(4) {
            for (sum, x) in sums.iter_mut().zip(step) {
                *sum = s.add(*sum, s.load(x));
            }
        }
        s.reduce_sum(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])))
    }
}

/// Memory that is read again and again: on huge pages where the system offers them, as the weights are.
pub struct ReadBuffer(memmap2::MmapMut);

impl ReadBuffer {
    /// A touched buffer.
    pub fn new() -> Self {
        let mut map = memmap2::MmapMut::map_anon(beyond_caches()).expect("memory for the bandwidth measurement");
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        map.fill(1);
        Self(map)
    }

    /// GB/s (10^9) of one reading with all of `threads`, each streaming its own contiguous part.
    pub fn read(&self, level: Level, threads: &Threads) -> f64 {
        let lanes: &[[f32; LANES]] = bytemuck::cast_slice(&self.0);
        let parts = 4 * threads.num_threads();
        let items: Vec<_> = lanes.chunks(lanes.len().div_ceil(parts)).collect();
        let start = Instant::now();
        threads
            .for_each(items, NEVER, |part| {
                black_box(level.dispatch(ReadAll(part)));
            })
            .expect("threads");
        self.0.len() as f64 / start.elapsed().as_secs_f64() / 1e9
    }
}

/// Read bandwidth in GB/s (10^9 bytes) of `threads` threads over a buffer larger than the last cache.
pub fn read_bandwidth(threads: usize) -> f64 {
    let (buffer, threads) = (ReadBuffer::new(), Threads::new(Some(threads)).expect("threads"));
    median((0..ROUNDS).map(|_| buffer.read(Level::best(), &threads)).collect())
}

/// Products with operands that never leave the registers.
struct Products {
    rounds: usize,
    bf16: bool,
}

impl Products {
    /// Independent sums: enough to hide the latency, few enough to stay in registers.
    const fn sums<S: Simd>() -> usize {
        if S::ACCUMULATORS < 12 { S::ACCUMULATORS } else { 12 }
    }
}

impl<S: Simd> Work<S> for Products {
    type Output = f32;

    #[inline(always)]
    fn run(self, s: S) -> f32 {
        let mut sums = [s.splat(0.0); 12];
        let n = Self::sums::<S>();
        if self.bf16 {
            let x = s.pair_bf16(&black_box([0x3f80; 2 * LANES]));
            let mut factors: [S::Factor; LANES / 2] = [bytemuck::Zeroable::zeroed(); LANES / 2];
            s.store_factors(s.splat(0.0078125), &mut factors);
            let factor = black_box(factors)[0];
            for _ in 0..self.rounds {
                for sum in &mut sums[..n] {
                    *sum = s.dot_pair(*sum, x, &factor);
                }
            }
        } else {
            let (x, factor) = (s.splat(black_box(1.0)), s.splat(black_box(0.01)));
            for _ in 0..self.rounds {
                for sum in &mut sums[..n] {
                    *sum = s.mul_add(x, factor, *sum);
                }
            }
        }
        let mut total = sums[0];
        for sum in &sums[1..] {
            total = s.add(total, *sum);
        }
        s.reduce_sum(total)
    }
}

/// The register tile's width of `level`.
struct Sums;

impl<S: Simd> Work<S> for Sums {
    type Output = usize;
    fn run(self, _: S) -> usize {
        Products::sums::<S>()
    }
}

/// Products of bf16 by tile registers, with operands in the first-level cache.
struct TileProducts {
    rounds: usize,
}

impl TileProducts {
    const STEPS: usize = 16;
    /// Multiply-adds of a round: two tiles of rows with two panels.
    const EACH: usize = Self::STEPS * 4 * TILE_VALUES * 2 * TILE_WORDS;
}

impl<S: Simd> Work<S> for TileProducts {
    type Output = f32;

    #[inline(always)]
    fn run(self, s: S) -> f32 {
        let Some(tiles) = s.tiles() else { return 0.0 };
        // Rows of tiles are cache lines: one that lay across two would take twice as long.
        const LINE: usize = 64;
        let stride = Self::STEPS * TILE_WORDS;
        let words = black_box(vec![0x3f80_3f80_u32; TILE_ROWS * stride + LINE]);
        let start = words.as_ptr().addr();
        let left = &words[(start.next_multiple_of(LINE) - start) / size_of::<u32>()..];
        let right = black_box(TwoTiles([[[0x3f80_3f80_u32; LANES]; TILE_WORDS]; 2]));
        let panels: [&[Pairs]; 2] = std::array::from_fn(|i| bytemuck::cast_slice(&right.0[i]));
        let mut sums = [TwoTiles([[[0.0f32; LANES]; TILE_ROWS]; 2]); 2];
        tiles.shaped(TILE_ROWS, TILE_WORDS, |tiles| {
            for _ in 0..self.rounds {
                let left = Left { tiles: [left, left], stride };
                tiles.bf16(left, Self::STEPS, 2, |panel, _| panels[panel], 1, true, simd::Sums::of(&mut sums), || ());
            }
        });
        sums[0].0[0][0][0]
    }
}

/// GMAC/s (10^9 multiply-adds) of one measurement of a few milliseconds.
pub fn products(level: Level, threads: &Threads, bf16: bool) -> f64 {
    if bf16 && level.has_tiles() {
        let (rounds, parts) = (1_000, 4 * threads.num_threads());
        let start = Instant::now();
        let run = |()| {
            black_box(level.dispatch(TileProducts { rounds }));
        };
        threads.for_each(vec![(); parts], NEVER, run).expect("threads");
        return (rounds * TileProducts::EACH * parts) as f64 / start.elapsed().as_secs_f64() / 1e9;
    }
    let (rounds, parts) = (200_000, 4 * threads.num_threads());
    let start = Instant::now();
    let run = |()| {
        black_box(level.dispatch(Products { rounds, bf16 }));
    };
    threads.for_each(vec![(); parts], NEVER, run).expect("threads");
    let each = rounds * level.dispatch(Sums) * LANES * if bf16 { 2 } else { 1 };
    (each * parts) as f64 / start.elapsed().as_secs_f64() / 1e9
}

/// The most GMAC/s (10^9 multiply-adds) of `threads` threads on `level`, in bf16 pairs or f32.
pub fn product_peak(level: Level, threads: usize, bf16: bool) -> f64 {
    let threads = Threads::new(Some(threads)).expect("threads");
    median((0..ROUNDS).map(|_| products(level, &threads, bf16)).collect())
}

/// Products of bytes with operands that never leave the registers.
struct ByteProducts {
    rounds: usize,
}

impl<S: Simd> Work<S> for ByteProducts {
    type Output = f32;

    #[inline(always)]
    fn run(self, s: S) -> f32 {
        let mut sums = [s.splat_i32(0); 12];
        let n = Products::sums::<S>();
        let (w, a) = (s.load_bytes(&black_box([3; 4 * LANES])), black_box([1, -1, 2, -2]));
        for _ in 0..self.rounds {
            for sum in &mut sums[..n] {
                *sum = s.dot_bytes(*sum, w, &a);
            }
        }
        let mut total = s.splat(0.0);
        for sum in sums {
            total = s.add(total, s.to_f32(sum));
        }
        s.reduce_sum(total)
    }
}

/// GMAC/s (10^9 multiply-adds) of bytes.
pub fn byte_products(level: Level, threads: &Threads) -> f64 {
    let (rounds, parts) = (200_000, 4 * threads.num_threads());
    let start = Instant::now();
    let run = |()| {
        black_box(level.dispatch(ByteProducts { rounds }));
    };
    threads.for_each(vec![(); parts], NEVER, run).expect("threads");
    let each = rounds * level.dispatch(Sums) * LANES * 4;
    (each * parts) as f64 / start.elapsed().as_secs_f64() / 1e9
}
