//! Stored values against the scalar truth: every format, scale mode and level, odd widths, every code, and ten million
//! random floats with ties, subnormals, infinities and NaNs among them.

use half::{bf16, f16};
use kvcore::formats::codec::{self, Codec};
use kvcore::formats::{KvDtype, ScaleMode, int4};
use kvcore::paging::BlockId;
use kvcore::simd::Level;
use kvcore::storage::{KvStore, Layout, Scales, TILE, expand_int4_k_tile, expand_int4_v_tile};

struct Random(u64);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u32
    }

    /// From -1 to 1.
    fn unit(&mut self) -> f32 {
        (self.bits() >> 8) as f32 / (1 << 23) as f32 - 1.0
    }

    /// A row as hard as the formats know: any bits; around a magnitude; points half way between two values of a format;
    /// subnormals; with single infinities and NaNs.
    fn hard_row(&mut self, n: usize) -> Vec<f32> {
        let kind = self.bits() % 8;
        let magnitude = f32::exp2((self.bits() % 60) as f32 - 40.0);
        let shift = 12 + self.bits() % 12;
        let mut row: Vec<f32> = (0..n)
            .map(|_| match kind {
                0 => f32::from_bits(self.bits()),
                1 => f32::from_bits(self.bits() & 0x807f_ffff),
                // Few bits of mantissa, the last of them half a unit of some format, and neighbours of such points.
                2 | 3 => {
                    let tie = (self.unit() * magnitude).to_bits() >> shift << shift;
                    f32::from_bits(tie.saturating_add(self.bits() % 3).saturating_sub(1))
                }
                4 => self.unit() * magnitude + magnitude,
                _ => self.unit() * magnitude,
            })
            .collect();
        match self.bits() % 16 {
            0 => row[self.bits() as usize % n] = f32::INFINITY,
            1 => row[self.bits() as usize % n] = f32::NEG_INFINITY,
            2 => row[self.bits() as usize % n] = f32::NAN,
            3 => row.fill(0.0),
            4 => row[self.bits() as usize % n] = -0.0,
            _ => {}
        }
        row
    }
}

/// Equal bits, or both NaN with one sign.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

fn layout(dtype: KvDtype, scale_mode: ScaleMode, k_dim: usize, v_dim: usize) -> Layout {
    Layout {
        num_layers: 2,
        num_blocks: 3,
        num_kv_heads: 2,
        k_dim,
        v_dim,
        latent: false,
        block_size: 32,
        dtype,
        scale_mode,
    }
}

/// Every format with every scale mode.
fn formats() -> impl Iterator<Item = (KvDtype, ScaleMode)> {
    KvDtype::ALL.into_iter().flat_map(|dtype| dtype.scale_modes().iter().map(move |&mode| (dtype, mode)))
}

/// What a row becomes by the formats' own functions.
fn truth(l: &Layout, row: &[f32], scale: f32, group: usize) -> Vec<f32> {
    fn values<C: Codec>(l: &Layout, row: &[f32], scale: f32) -> Vec<f32> {
        let scale = if l.scale_mode == ScaleMode::PerTokenHead { C::row_scale(row) } else { scale };
        row.iter().map(|&x| C::decode(C::encode(x, scale), scale)).collect()
    }
    match l.dtype {
        KvDtype::F32 => values::<codec::F32>(l, row, scale),
        KvDtype::F16 => values::<codec::F16>(l, row, scale),
        KvDtype::Bf16 => values::<codec::Bf16>(l, row, scale),
        KvDtype::Fp8E4M3 => values::<codec::Fp8E4M3>(l, row, scale),
        KvDtype::Fp8E5M2 => values::<codec::Fp8E5M2>(l, row, scale),
        KvDtype::Int8 => values::<codec::Int8>(l, row, scale),
        KvDtype::Int4 => row
            .chunks(group)
            .flat_map(|row| {
                let group = int4::Group::of(row);
                row.iter().map(move |&x| group.decode(group.encode(x)))
            })
            .collect(),
    }
}

/// Write rows of all tokens of all blocks and compare what is read.
fn round_trip(l: Layout, level: Level, random: &mut Random) -> usize {
    let scales = match l.dtype.is_fp8() && l.scale_mode == ScaleMode::Static {
        true => Scales { k: vec![0.5, 1.0, 0.003, 700.0][..l.num_layers * l.num_kv_heads].to_vec(), v: vec![2.0; 4] },
        false => Scales::unit(&l),
    };
    let scales = Scales { v: scales.v[..l.num_layers * l.num_kv_heads].to_vec(), ..scales };
    let mut store = KvStore::new(l, scales.clone()).unwrap();
    store.fill(f32::NAN);
    let tokens = l.num_blocks * l.block_size;
    let blocks: Vec<BlockId> = (0..l.num_blocks as u32).rev().map(BlockId::new).collect();
    let slots = || (0..tokens).map(|p| (blocks[p / l.block_size], p % l.block_size));
    for layer in 0..l.num_layers {
        let rows = |random: &mut Random, dim: usize| -> Vec<f32> {
            (0..tokens * l.num_kv_heads).flat_map(|_| random.hard_row(dim)).collect()
        };
        let (k, v) = (rows(random, l.k_dim), rows(random, l.v_dim));
        store.write(level, layer, slots(), &k, (!l.latent).then_some(&v));
        let (k_read, v_read) = store.read(level, layer, &blocks, tokens);
        for (is_v, written, read, dim) in [(false, &k, &k_read, l.k_dim), (true, &v, &v_read, l.v_dim)] {
            let rows = written.chunks_exact(dim).zip(read.chunks_exact(dim));
            for (i, (written, read)) in rows.enumerate() {
                let head = layer * l.num_kv_heads + i % l.num_kv_heads;
                let expected = match (is_v, l.latent) {
                    (true, true) => k_read[i * l.k_dim..][..dim].to_vec(),
                    (true, false) => truth(&l, written, scales.v[head], int4::V_GROUP),
                    (false, _) => truth(&l, written, scales.k[head], int4::K_GROUP),
                };
                for d in 0..dim {
                    assert!(
                        same(read[d], expected[d]),
                        "{} {} {} v={is_v} row {i} [{d}] of {written:?}: {} not {}",
                        level.name(),
                        l.dtype,
                        l.scale_mode,
                        read[d],
                        expected[d]
                    );
                }
            }
        }
    }
    tokens * l.num_layers * l.num_kv_heads * (l.k_dim + if l.latent { 0 } else { l.v_dim })
}

#[test]
fn every_width_reads_back_as_the_truth() {
    let mut random = Random(11);
    for level in Level::available() {
        for (dtype, scale_mode) in formats() {
            for (k_dim, v_dim) in [(2, 2), (6, 10), (24, 24), (34, 40), (64, 64), (66, 130), (96, 64), (256, 256)] {
                round_trip(layout(dtype, scale_mode, k_dim, v_dim), level, &mut random);
            }
            for (k_dim, v_dim) in [(576, 512), (40, 34), (2, 2)] {
                let l = Layout { latent: true, num_kv_heads: 1, ..layout(dtype, scale_mode, k_dim, v_dim) };
                round_trip(l, level, &mut random);
            }
        }
    }
}

/// Ten million floats for each format in an optimised build; fewer under an emulator, which sets `PROPTEST_CASES`.
#[test]
fn ten_million_floats_read_back_as_the_truth() {
    let wanted = if std::env::var_os("PROPTEST_CASES").is_some() { 100_000 } else { 10_000_000 };
    for level in Level::available() {
        for (dtype, scale_mode) in formats() {
            let (mut random, mut done) = (Random(5 + done_bits(dtype, scale_mode)), 0);
            while done < wanted {
                done +=
                    round_trip(Layout { num_blocks: 16, ..layout(dtype, scale_mode, 128, 128) }, level, &mut random);
            }
        }
    }
}

fn done_bits(dtype: KvDtype, scale_mode: ScaleMode) -> u64 {
    dtype as u64 * 2 + scale_mode as u64
}

/// Every code decodes as it must, wherever it stands in a tile, also those that no encoding makes.
#[test]
fn every_code_decodes_on_every_level() {
    for level in Level::available() {
        for dtype in [KvDtype::Fp8E4M3, KvDtype::Fp8E5M2, KvDtype::F16, KvDtype::Bf16] {
            let l = Layout { num_kv_heads: 1, num_layers: 1, ..layout(dtype, ScaleMode::Static, 256, 256) };
            let size = dtype.bits() / 8;
            let mut store = KvStore::new(l, Scales::uniform(&l, 1.0, 1.0)).unwrap();
            let codes = 1usize << dtype.bits();
            for first in (0..codes).step_by(256) {
                let block = BlockId::new(1);
                // Value number `i` of the block's bytes has the code `first + i % 256`.
                for (i, bytes) in store.block_bytes_mut(block).chunks_exact_mut(size).enumerate() {
                    bytes.copy_from_slice(&((first + i % 256) as u32).to_le_bytes()[..size]);
                }
                let (k, v) = store.read(level, 0, &[block], l.block_size);
                let value = |code: usize| match dtype {
                    KvDtype::F16 => f16::from_bits(code as u16).to_f32(),
                    KvDtype::Bf16 => bf16::from_bits(code as u16).to_f32(),
                    KvDtype::Fp8E4M3 => kvcore::formats::fp8::e4m3_to_f32(code as u8),
                    _ => kvcore::formats::fp8::e5m2_to_f32(code as u8),
                };
                // Tiles are multiples of 256 values, so that the place within the tile gives the code.
                for token in 0..l.block_size {
                    for dim in 0..256 {
                        let code = first + l.k_element(token % TILE, dim) % 256;
                        assert!(same(k[token * 256 + dim], value(code)), "{} {dtype} K {code:#x}", level.name());
                        let code = first + l.v_element(token % TILE, dim) % 256;
                        assert!(same(v[token * 256 + dim], value(code)), "{} {dtype} V {code:#x}", level.name());
                    }
                }
            }
        }
    }
}

#[test]
fn expanded_int4_tiles_are_what_is_read() {
    let mut random = Random(3);
    for level in Level::available() {
        for (k_dim, v_dim, latent) in
            [(2, 2, false), (24, 40, false), (64, 64, false), (128, 256, false), (96, 80, false), (576, 512, true)]
        {
            let heads = if latent { 1 } else { 2 };
            let l =
                Layout { latent, num_kv_heads: heads, ..layout(KvDtype::Int4, ScaleMode::PerTokenHead, k_dim, v_dim) };
            let bf16_layout = Layout { dtype: KvDtype::Bf16, scale_mode: ScaleMode::Static, ..l };
            let mut store = KvStore::new(l, Scales::unit(&l)).unwrap();
            // Any bytes at all: NaNs and infinities among the scales.
            let block = BlockId::new(2);
            store.block_bytes_mut(block).fill_with(|| random.bits() as u8);
            for layer in 0..l.num_layers {
                let (k, v) = store.read(level, layer, &[block], l.block_size);
                let view = store.layer(layer);
                for head in 0..heads {
                    for tile in 0..l.block_size / TILE {
                        let mut k_tile = vec![0; TILE * k_dim];
                        expand_int4_k_tile(level, &view, block, head, tile, &mut k_tile);
                        let mut v_tile = vec![0; TILE * l.width()];
                        if !latent {
                            expand_int4_v_tile(level, &view, block, head, tile, &mut v_tile);
                        }
                        for token in 0..TILE {
                            let row = (tile * TILE + token) * heads + head;
                            for dim in 0..k_dim {
                                let expanded = bf16::from_bits(k_tile[bf16_layout.k_element(token, dim)]).to_f32();
                                assert!(same(expanded, k[row * k_dim + dim]), "{} K {token} {dim}", level.name());
                            }
                            for dim in 0..if latent { 0 } else { v_dim } {
                                let expanded = bf16::from_bits(v_tile[bf16_layout.v_element(token, dim)]).to_f32();
                                assert!(same(expanded, v[row * v_dim + dim]), "{} V {token} {dim}", level.name());
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Law 1 for stored bytes: they depend on the token alone, not on its neighbours, their order, the batch or the level.
#[test]
fn stored_bytes_depend_on_the_token_alone() {
    for (dtype, scale_mode) in formats() {
        let l = layout(dtype, scale_mode, 34, 40);
        let mut random = Random(21);
        let row = |random: &mut Random, dim: usize| -> Vec<f32> { random.hard_row(l.num_kv_heads * dim) };
        let tokens: Vec<(Vec<f32>, Vec<f32>)> =
            (0..l.block_size).map(|_| (row(&mut random, l.k_dim), row(&mut random, l.v_dim))).collect();
        let block = BlockId::new(1);
        let mut together = KvStore::new(l, Scales::unit(&l)).unwrap();
        let k: Vec<f32> = tokens.iter().flat_map(|(k, _)| k.iter().copied()).collect();
        let v: Vec<f32> = tokens.iter().flat_map(|(_, v)| v.iter().copied()).collect();
        together.write(Level::available()[0], 0, (0..l.block_size).map(|t| (block, t)), &k, Some(&v));
        for level in Level::available() {
            let mut alone = KvStore::new(l, Scales::unit(&l)).unwrap();
            for token in (0..l.block_size).rev() {
                // Something else first, as if the slot had been another sequence's.
                let (k, v) = (vec![1e3; tokens[0].0.len()], vec![f32::NAN; tokens[0].1.len()]);
                alone.write(level, 0, std::iter::once((block, token)), &k, Some(&v));
                let (k, v) = &tokens[token];
                alone.write(level, 0, std::iter::once((block, token)), k, Some(v));
            }
            // Padding apart, which nothing reads: compare what is read, and the other layer, which nobody wrote.
            let read = |store: &KvStore| {
                let (k, v) = store.read(level, 0, &[block], l.block_size);
                k.iter().chain(&v).map(|x| x.to_bits()).collect::<Vec<_>>()
            };
            assert_eq!(read(&together), read(&alone), "{} {dtype} {scale_mode}", level.name());
            let (k, v) = alone.read(level, 1, &[block], l.block_size);
            assert!(k.iter().chain(&v).all(|x| x.to_bits() == 0), "{dtype}: a write to layer 0 changed layer 1");
        }
    }
}

#[test]
fn what_cannot_be_stored_saturates_and_nan_stays() {
    for level in Level::available() {
        for (dtype, scale_mode) in formats() {
            let l = layout(dtype, scale_mode, 64, 64);
            let mut store = KvStore::new(l, Scales::unit(&l)).unwrap();
            let block = BlockId::new(0);
            let mut row = vec![0.5f32; 128];
            (row[3], row[70]) = (3.0e38, -3.0e38);
            store.write(level, 0, std::iter::once((block, 0)), &row, Some(&row));
            for values in <[Vec<f32>; 2]>::from(store.read(level, 0, &[block], 1)) {
                assert!(values.iter().all(|x| x.is_finite()), "{dtype} {scale_mode}: {values:?}");
                assert!(values[3] >= 448.0 && values[70] <= -448.0, "{dtype} {scale_mode}");
            }
            (row[3], row[70]) = (f32::INFINITY, 0.5);
            store.write(level, 0, std::iter::once((block, 1)), &row, Some(&row));
            let (k, _) = store.read(level, 0, &[block], 2);
            let infinite = dtype.bits() >= 16;
            assert_eq!(k[128 + 3].is_infinite(), infinite, "{dtype} {scale_mode}: {}", k[131]);
            assert!(!k[128..].iter().any(|x| x.is_nan()));
            row[3] = f32::NAN;
            store.write(level, 0, std::iter::once((block, 2)), &row, Some(&row));
            let (k, v) = store.read(level, 0, &[block], 3);
            assert!(k[2 * 128 + 3].is_nan() && v[2 * 128 + 3].is_nan(), "{dtype} {scale_mode}");
            // The other head, and for int4 the other group, do not know of it.
            assert!(k[2 * 128 + 64..].iter().all(|x| (x - 0.5).abs() < 0.05), "{dtype} {scale_mode}");
        }
    }
}

#[test]
fn bad_scales_are_refused_and_change_nothing() {
    let l = layout(KvDtype::Fp8E4M3, ScaleMode::Static, 8, 8);
    let mut store = KvStore::new(l, Scales::uniform(&l, 0.5, 2.0)).unwrap();
    for bad in [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-40, 3e38, 1e-50f64 as f32] {
        for at in 0..4 {
            let mut scales = vec![1.0; 4];
            scales[at] = bad;
            let good = vec![1.0; 4];
            let error = store.set_scales(Scales { k: scales.clone(), v: good.clone() }).unwrap_err().to_string();
            assert!(error.starts_with("k_scale: expected a number from"), "{error}");
            let error = store.set_scales(Scales { k: good, v: scales }).unwrap_err().to_string();
            assert!(error.starts_with("v_scale: expected a number from"), "{error}");
        }
        assert!(KvStore::new(l, Scales::uniform(&l, bad, 1.0)).is_err());
    }
    for n in [0, 1, 3, 5] {
        let error = store.set_scales(Scales { k: vec![1.0; 4], v: vec![1.0; n] }).unwrap_err().to_string();
        assert!(error.contains("v_scale: expected 2 layers x 2 KV heads"), "{error}");
    }
    assert_eq!(*store.scales(), Scales::uniform(&l, 0.5, 2.0));
    let scales = Scales { k: vec![1.0, 2.0, 3.0, 4.0], v: vec![5.0, 6.0, 7.0, 8.0] };
    store.set_scales(scales.clone()).unwrap();
    let view = store.layer(1);
    assert_eq!((view.k_scale(0), view.k_scale(1), view.v_scale(0), view.v_scale(1)), (3.0, 4.0, 7.0, 8.0));
    // Only static fp8 takes any.
    for (dtype, mode) in formats() {
        let l = layout(dtype, mode, 8, 8);
        let takes = dtype.is_fp8() && mode == ScaleMode::Static;
        assert_eq!(KvStore::new(l, scales.clone()).is_ok(), takes, "{dtype} {mode}");
    }
}

#[test]
fn calibration_sees_the_largest_of_each_head() {
    let l = layout(KvDtype::Fp8E4M3, ScaleMode::Static, 4, 2);
    let mut store = KvStore::new(l, Scales::unit(&l)).unwrap();
    let slot = |token| std::iter::once((BlockId::new(0), token));
    let level = Level::best();
    assert_eq!(store.take_observed(), None);
    store.write(level, 0, slot(0), &[9.0; 8], Some(&[9.0; 4]));
    store.observe(true);
    store.write(level, 0, slot(1), &[1.0, -7.0, 2.0, 0.0, 0.5, 0.5, 0.5, 0.5], Some(&[3.0, 1.0, -4.0, f32::NAN]));
    store.write(level, 0, slot(2), &[-2.0; 8], Some(&[-5.0, 0.0, 0.0, 0.0]));
    store.write(level, 1, slot(2), &[1e4; 8], Some(&[0.0; 4]));
    assert_eq!(store.take_observed(), Some((vec![7.0, 2.0, 1e4, 1e4], vec![5.0, 4.0, 0.0, 0.0])));
    assert_eq!(store.take_observed(), None);
    store.observe(true);
    assert_eq!(store.take_observed(), Some((vec![0.0; 4], vec![0.0; 4])));
    store.observe(true);
    store.observe(false);
    assert_eq!(store.take_observed(), None);
}

/// Per token and head: a large row has no effect on its neighbours, and scales stand where the kernels look for them.
#[test]
fn token_scales_are_those_of_the_rows() {
    for dtype in [KvDtype::Int8, KvDtype::Fp8E4M3, KvDtype::Fp8E5M2] {
        let max = match dtype {
            KvDtype::Int8 => 127.0,
            KvDtype::Fp8E4M3 => 448.0,
            _ => 57344.0,
        };
        for level in Level::available() {
            let l = layout(dtype, ScaleMode::PerTokenHead, 8, 6);
            let mut store = KvStore::new(l, Scales::unit(&l)).unwrap();
            let block = BlockId::new(2);
            for token in 0..l.block_size {
                let k: Vec<f32> = (0..16).map(|i| (i / 8 + 1) as f32 * (token + 1) as f32).collect();
                let v: Vec<f32> = (0..12).map(|i| (i / 6 + 1) as f32 * -1000.0 * (token + 1) as f32).collect();
                store.write(level, 1, std::iter::once((block, token)), &k, Some(&v));
            }
            let view = store.layer(1);
            for head in 0..2 {
                for tile in 0..2 {
                    let k = view.k_token_scales(block, head, tile).unwrap();
                    let v = view.v_token_scales(block, head, tile).unwrap();
                    for token in 0..TILE {
                        let largest = (head + 1) as f32 * (tile * TILE + token + 1) as f32;
                        assert_eq!((k[token], v[token]), (largest / max, 1000.0 * largest / max), "{dtype}");
                    }
                }
            }
        }
    }
}

/// A block's bytes are all there is to it: another arena that takes them over reads the same.
#[test]
fn blocks_move_as_bytes() {
    for dtype in KvDtype::ALL {
        let mode = dtype.default_scale_mode();
        let l = Layout { num_layers: 3, num_blocks: 5, block_size: 16, ..layout(dtype, mode, 34, 20) };
        let level = Level::best();
        let mut store = KvStore::new(l, Scales::unit(&l)).unwrap();
        let src = BlockId::new(4);
        for layer in 0..3 {
            let k: Vec<f32> = (0..16 * 2 * 34).map(|i| ((i * (layer + 1)) as f32).sin()).collect();
            let v: Vec<f32> = (0..16 * 2 * 20).map(|i| ((i * (layer + 1)) as f32).cos()).collect();
            store.write(level, layer, (0..16).map(|t| (src, t)), &k, Some(&v));
        }
        let mut other = KvStore::new(Layout { num_blocks: 2, ..l }, Scales::unit(&l)).unwrap();
        assert_eq!(store.block_bytes(src).len(), l.bytes_per_token() * 16);
        other.block_bytes_mut(BlockId::new(1)).copy_from_slice(store.block_bytes(src));
        store.copy_block(src, BlockId::new(0));
        for layer in 0..3 {
            let expected = store.read(level, layer, &[src], 16);
            assert!(expected.0.iter().any(|&x| x != 0.0));
            assert_eq!(store.read(level, layer, &[BlockId::new(0)], 16), expected, "{dtype}");
            assert_eq!(other.read(level, layer, &[BlockId::new(1)], 16), expected, "{dtype}");
            // Nobody else was touched.
            for block in [1, 2, 3] {
                let (k, v) = store.read(level, layer, &[BlockId::new(block)], 16);
                assert!(k.iter().chain(&v).all(|&x| x == 0.0), "{dtype}");
            }
        }
    }
}
