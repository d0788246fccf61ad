//! One suite for every level: each operation against plain arithmetic on the scalar truth.
#![forbid(unsafe_code)]

use super::*;
use crate::formats::fp8;

/// Checks that do not depend on rounding must be bitwise equal to plain arithmetic on every level.
struct Suite;

fn lanes(f: impl Fn(usize) -> f32) -> [f32; LANES] {
    std::array::from_fn(f)
}

const ODD: [f32; LANES] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    1.5,
    3.0e38,
    -3.0e38,
    1.0e-38,
    1.0e-40,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    65504.0,
    1.003_906_3,
    1.011_718_8,
    -7.25,
];

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

impl<S: Simd> Work<S> for Suite {
    type Output = ();
    #[inline(always)]
    fn run(self, s: S) {
        let out = |v: S::F32| {
            let mut x = [0.0; LANES];
            s.store(v, &mut x);
            x
        };
        let other = lanes(|i| 0.37 * i as f32 - 2.0);
        let (a, b) = (s.load(&ODD), s.load(&other));
        for i in 0..LANES {
            assert!(same(out(s.add(a, b))[i], ODD[i] + other[i]), "{} add {i}", S::NAME);
            assert!(same(out(s.sub(a, b))[i], ODD[i] - other[i]), "{} sub {i}", S::NAME);
            assert!(same(out(s.mul(a, b))[i], ODD[i] * other[i]), "{} mul {i}", S::NAME);
            assert!(same(out(s.div(a, b))[i], ODD[i] / other[i]), "{} div {i}", S::NAME);
            let fused = out(s.mul_add(b, b, s.splat(0.5)))[i];
            assert!((fused - (other[i] * other[i] + 0.5)).abs() <= 1e-6 * fused.abs(), "{} mul_add {i}", S::NAME);
            let larger = out(s.max(b, a))[i];
            assert!(same(larger, if ODD[i].is_nan() || ODD[i] > other[i] { ODD[i] } else { other[i] }), "max {i}");
            assert!(same(out(s.round_bf16(a))[i], half::bf16::from_f32(ODD[i]).to_f32()), "{} bf16 {i}", S::NAME);
        }
        let bytes: [u8; 4 * LANES] = std::array::from_fn(|i| (i * 53 + 7) as u8 | if i % 9 == 0 { 0xff } else { 0 });
        let w = s.load_bytes(&bytes);
        let (low, high) = s.nibbles(w);
        let mut stored = [0; 4 * LANES];
        s.store_bytes(w, &mut stored);
        assert_eq!(stored, bytes, "{} store_bytes", S::NAME);
        let whole: [i32; LANES] = std::array::from_fn(|i| (i as i32 - 7) * 0x0080_0001);
        let loaded = out(s.to_f32(s.load_i32(&whole)));
        assert_eq!(loaded, whole.map(|x| x as f32), "{} load_i32", S::NAME);
        for a in [[1i8, -2, 3, -4], [127, 127, 127, 127], [-128, -128, -128, -128], [-128, 127, 0, 5]] {
            let twice = s.dot_bytes(s.dot_bytes(s.splat_i32(0), w, &a), w, &a);
            for (got, byte) in [
                (s.to_f32(twice), &(|x: u8| 2 * i32::from(x)) as &dyn Fn(u8) -> i32),
                (s.to_f32(s.dot_bytes(s.splat_i32(0), low, &a)), &|x: u8| i32::from(x & 15)),
                (s.to_f32(s.dot_bytes(s.splat_i32(0), high, &a)), &|x: u8| i32::from(x >> 4)),
            ] {
                for i in 0..LANES {
                    let expected: i32 = (0..4).map(|k| byte(bytes[4 * i + k]) * i32::from(a[k])).sum();
                    assert!(same(out(got)[i], expected as f32), "{} dot_bytes {i}", S::NAME);
                }
            }
        }
        for n in 0..=LANES {
            let mixed = out(s.first_lanes(n, s.splat(1.0), s.splat(f32::NAN)));
            assert!((0..LANES).all(|i| if i < n { mixed[i] == 1.0 } else { mixed[i].is_nan() }), "{} {n}", S::NAME);
        }
        let mut halves = [0; LANES];
        s.store_bf16(s.round_bf16(a), &mut halves);
        assert!((0..LANES).all(|i| halves[i] == half::bf16::from_f32(ODD[i]).to_bits()), "{} store_bf16", S::NAME);
        let mut pairs = [0; 2 * LANES];
        s.store_bf16_pairs(s.round_bf16(a), s.round_bf16(b), &mut pairs);
        for i in 0..LANES {
            let expected = [ODD[i], other[i]].map(|x| half::bf16::from_f32(x).to_bits());
            assert_eq!(pairs[2 * i..2 * i + 2], expected, "{} store_bf16_pairs {i}", S::NAME);
        }
        for start in (0..=u16::MAX).step_by(LANES) {
            let f16s: [u16; LANES] = std::array::from_fn(|i| start + i as u16);
            let widened = out(s.load_f16(&f16s));
            for i in 0..LANES {
                assert!(same(widened[i], half::f16::from_bits(f16s[i]).to_f32()), "{} f16 {:#x}", S::NAME, f16s[i]);
            }
        }
        assert_eq!(s.reduce_max(b), other[LANES - 1]);
        assert!((s.reduce_sum(b) - other.iter().sum::<f32>()).abs() < 1e-5);
        // 16 vectors of whole numbers, whose sums are exact in any order.
        let rows: [[f32; LANES]; LANES] =
            std::array::from_fn(|i| std::array::from_fn(|j| ((i * 37 + j * 11) % 64) as f32));
        let mut vectors = [a; LANES];
        for i in 0..LANES {
            vectors[i] = s.load(&rows[i]);
        }
        let (max, sum) = (out(s.max_of_each(vectors)), out(s.sum_of_each(vectors)));
        for i in 0..LANES {
            assert_eq!(max[i], rows[i].iter().copied().fold(0.0, f32::max), "{} max_of_each {i}", S::NAME);
            assert_eq!(sum[i], rows[i].iter().sum::<f32>(), "{} sum_of_each {i}", S::NAME);
        }

        // Each of a pair on its own: multiplied by one and by zero, added to zero.
        let mut ones: [S::Factor; LANES / 2] = [bytemuck::Zeroable::zeroed(); LANES / 2];
        let alternating: [f32; LANES] = std::array::from_fn(|i| f32::from(u8::from(matches!(i, 0 | 3))));
        s.store_factors(s.load(&alternating), &mut ones);
        let alone = |x: S::Pair, second: bool| out(s.dot_pair(s.splat(0.0), x, &ones[usize::from(second)]));
        for start in (0..256).step_by(2 * LANES) {
            let codes: [u8; 2 * LANES] = std::array::from_fn(|i| (start + i) as u8);
            let integers = codes.map(|code| code as i8);
            let check = |pair: S::Pair, value: &dyn Fn(usize) -> f32, what: &str| {
                for i in 0..LANES {
                    let truth = [value(2 * i), value(2 * i + 1)];
                    if truth.iter().all(|x| x.is_finite()) {
                        assert_eq!(alone(pair, false)[i], truth[0], "{} {what} {:#x}", S::NAME, codes[2 * i]);
                        assert_eq!(alone(pair, true)[i], truth[1], "{} {what} {:#x}", S::NAME, codes[2 * i + 1]);
                    } else {
                        // Zero times infinity is NaN, so that only the first of each pair is seen alone.
                        assert!(alone(pair, false)[i].is_nan() && alone(pair, true)[i].is_nan(), "{what}");
                        assert!(same(alone(s.pair_first(pair), false)[i], truth[0]), "{what}");
                        assert!(truth[0].is_finite() || same(alone(s.pair_second(pair), true)[i], truth[1]), "{what}");
                    }
                }
            };
            check(s.pair_e4m3(&codes), &|i| fp8::e4m3_to_f32(codes[i]), "e4m3");
            check(s.pair_e5m2(&codes), &|i| fp8::e5m2_to_f32(codes[i]), "e5m2");
            let two: [u8; 4 * LANES] = std::array::from_fn(|i| codes[(i + 6 * (i / 32)) % 32]);
            for half in 0..2 {
                let code = |i: usize| two[32 * half + i];
                check(s.two_pairs_e4m3(&two)[half], &|i| fp8::e4m3_to_f32(code(i)), "two e4m3");
                check(s.two_pairs_e5m2(&two)[half], &|i| fp8::e5m2_to_f32(code(i)), "two e5m2");
            }
            check(s.pair_int8(&integers), &|i| f32::from(integers[i]), "int8");
            let bytes: &[u8; LANES] = codes[LANES..].first_chunk().expect("16 bytes");
            let (low, high) = s.load_nibbles(bytes);
            for i in 0..LANES {
                assert_eq!(out(low)[i], f32::from(bytes[i] & 15), "{} low nibble of {:#x}", S::NAME, bytes[i]);
                assert_eq!(out(high)[i], f32::from(bytes[i] >> 4), "{} high nibble of {:#x}", S::NAME, bytes[i]);
            }
        }
        let bf16s: [u16; 2 * LANES] = std::array::from_fn(|i| half::bf16::from_f32(1.3 * i as f32 - 11.0).to_bits());
        let pair = s.pair_bf16(&bf16s);
        for i in 0..LANES {
            assert_eq!(alone(pair, false)[i], half::bf16::from_bits(bf16s[2 * i]).to_f32());
            assert_eq!(alone(pair, true)[i], half::bf16::from_bits(bf16s[2 * i + 1]).to_f32());
        }

        // Weights keep 8 bits: what bf16 holds, and as near as its nearest.
        for step in 0..1000 {
            let x = lanes(|i| (step * LANES + i) as f32 / 16000.0 * (-(step as f32) / 9.0).exp2());
            let mut stored = [bytemuck::Zeroable::zeroed(); LANES / 2];
            let rounded = out(s.store_weights(s.load(&x), &mut stored));
            let mut expected = stored;
            s.store_factors(s.load(&rounded), &mut expected);
            assert_eq!(bytemuck::bytes_of(&stored), bytemuck::bytes_of(&expected), "{}", S::NAME);
            for i in 0..LANES {
                let nearest = half::bf16::from_f32(x[i]).to_f32();
                assert_eq!(rounded[i].to_bits() & 0xffff, 0, "{} {}", S::NAME, x[i]);
                assert!((rounded[i] - x[i]).abs() <= (nearest - x[i]).abs(), "{} {} {}", S::NAME, x[i], rounded[i]);
            }
        }
        assert!(out(s.store_weights(s.splat(f32::NAN), &mut [bytemuck::Zeroable::zeroed(); LANES / 2]))[0].is_nan());

        // Two at a time: the same weights; their sum is that of what is stored.
        for step in 0..100 {
            let x = [0, 1].map(|k| lanes(|i| ((step * 2 + k) * LANES + i) as f32 / 3200.0));
            let (mut one, mut two) = ([bytemuck::Zeroable::zeroed(); LANES / 2], [bytemuck::Zeroable::zeroed(); LANES]);
            let sum = out(s.add_two_weights(s.splat(0.5), x.map(|x| s.load(&x)), &mut two));
            let mut expected = 8.0;
            for (x, two) in x.iter().zip(two.chunks_exact(LANES / 2)) {
                expected += out(s.store_weights(s.load(x), &mut one)).iter().map(|&x| f64::from(x)).sum::<f64>();
                assert_eq!(
                    bytemuck::cast_slice::<_, u8>(&one),
                    bytemuck::cast_slice::<_, u8>(two),
                    "{} {step}",
                    S::NAME
                );
            }
            let sum: f64 = sum.iter().map(|&x| f64::from(x)).sum();
            assert!((sum - expected).abs() <= 1e-5 * expected, "{} {sum} {expected}", S::NAME);
        }
        // The short power of two over all that weights may be; what is hidden has none.
        for step in 0..2600 {
            let x = lanes(|i| (step * LANES + i) as f32 / -300.0);
            let power = out(math::exp2_short(s, s.load(&x)));
            for i in 0..LANES {
                let (truth, power) = (f64::from(x[i]).exp2(), f64::from(power[i]));
                let near = if x[i] >= -126.0 { (power - truth).abs() <= 5e-6 * truth } else { power <= 1.2e-38 };
                assert!(near, "{} exp2_short({}) = {power} not {truth}", S::NAME, x[i]);
            }
        }
        let hidden = [f32::NEG_INFINITY, -127.0, 0.0, f32::NAN];
        let ends = math::exp2_short(s, s.load(&lanes(|i| hidden[i % 4])));
        let ends = out(s.store_weights(ends, &mut [bytemuck::Zeroable::zeroed(); LANES / 2]));
        assert!(ends[0] == 0.0 && ends[1] == 0.0 && ends[2] == 1.0 && ends[3].is_nan(), "{} {ends:?}", S::NAME);

        // tanh against f64, near 0 and far from it.
        for step in -1500..1500 {
            let x = lanes(|i| (step as f32 + i as f32 / 16.0) * if step % 2 == 0 { 0.01 } else { 1e-5 });
            let t = out(math::tanh(s, s.load(&x)));
            for i in 0..LANES {
                let truth = f64::from(x[i]).tanh();
                let near = (f64::from(t[i]) - truth).abs() <= 4e-7 * truth.abs();
                assert!(near, "{} tanh({}) = {} not {truth}", S::NAME, x[i], t[i]);
            }
        }
        let ends = out(math::tanh(s, s.load(&lanes(|i| [f32::NEG_INFINITY, f32::NAN, 1e30, 0.0][i % 4]))));
        assert!(ends[0] == -1.0 && ends[1].is_nan() && ends[2] == 1.0 && ends[3] == 0.0, "{} {ends:?}", S::NAME);

        // exp2 and silu against f64, over the range and at its ends.
        for step in 0..2000 {
            let x = lanes(|i| -140.0 + 0.0821 * (step as f32 + i as f32 / 16.0));
            let (e, sig) = (out(math::exp2(s, s.load(&x))), out(math::silu(s, s.load(&x))));
            let short = out(math::exp2_short(s, s.load(&x)));
            for i in 0..LANES {
                let truth = f64::from(x[i]).exp2();
                let near = (f64::from(e[i]) - truth).abs() <= 2e-7 * truth + 1.2e-38;
                assert!(near, "{} exp2({}) = {} not {truth}", S::NAME, x[i], e[i]);
                let near = (f64::from(short[i]) - truth).abs() <= 4e-6 * truth + 1.2e-38;
                assert!(near, "{} exp2_short({}) = {} not {truth}", S::NAME, x[i], short[i]);
                let truth = f64::from(x[i]) / (1.0 + (-f64::from(x[i])).exp());
                // The exponent's own rounding grows with it.
                let near =
                    (f64::from(sig[i]) - truth).abs() <= (4e-7 + 1e-7 * f64::from(x[i].abs())) * truth.abs() + 1e-35;
                assert!(near, "{} silu({}) = {} not {truth}", S::NAME, x[i], sig[i]);
            }
        }
        let ends = s.load(&lanes(|i| [f32::NEG_INFINITY, f32::NAN, 0.0, -127.0][i % 4]));
        for ends in [out(math::exp2(s, ends)), out(math::exp2_short(s, ends))] {
            assert!(ends[0] == 0.0 && ends[1].is_nan() && ends[2] == 1.0 && ends[3] == 0.0, "{} {ends:?}", S::NAME);
        }
        let ends = out(math::silu(s, s.load(&lanes(|i| [-1e30, f32::NAN, 1e30, 0.0][i % 4]))));
        assert!(ends[0] == 0.0 && ends[1].is_nan() && ends[2] == 1e30 && ends[3] == 0.0, "{} {ends:?}", S::NAME);
    }
}

#[test]
fn every_level_agrees_with_plain_arithmetic() {
    for level in Level::available() {
        level.dispatch(Suite);
    }
}

#[test]
fn levels_are_forced_by_name() {
    assert_eq!(Level::select("scalar").unwrap().name(), "scalar");
    assert_eq!(Level::select("auto").unwrap().name(), Level::best().name());
    for level in Level::available() {
        assert_eq!(Level::select(level.name()).unwrap().name(), level.name());
    }
    let unknown = Level::select("sse9").unwrap_err().to_string();
    assert!(unknown.contains("sse9") && unknown.contains("scalar"), "{unknown}");
    let foreign = if cfg!(target_arch = "x86_64") { "neon" } else { "avx2" };
    let missing = Level::select(foreign).unwrap_err().to_string();
    assert!(missing.contains("does not have it"), "{missing}");
}

/// What tile registers give, in plain arithmetic: each step's even products and its odd ones in order from zero, then their sum.
fn step_sum(left: &[u32], right: impl Fn(usize) -> u32) -> f32 {
    let parts = |bits: u32| [f32::from_bits(bits << 16), f32::from_bits(bits & 0xffff_0000)];
    let mut sums = [0.0f32; 2];
    for (i, &left) in left.iter().enumerate() {
        let (left, right) = (parts(left), parts(right(i)));
        for half in 0..2 {
            sums[half] = left[half].mul_add(right[half], sums[half]);
        }
    }
    sums[0] + sums[1]
}

/// Bits of bf16 numbers of all sizes, in pairs.
fn noise_pairs(n: usize, seed: u32) -> Vec<u32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        half::bf16::from_f32(((state >> 8) as f32 / 8_388_608.0 - 1.0) * 2.0f32.powi((state >> 5 & 15) as i32 - 8))
            .to_bits()
    };
    (0..n).map(|_| u32::from(next()) | u32::from(next()) << 16).collect()
}

struct TileProducts;

impl<S: Simd> Work<S> for TileProducts {
    type Output = bool;

    fn run(self, s: S) -> bool {
        let Some(tiles) = s.tiles() else { return false };
        for (rows, words, steps) in [(16, 16, 3), (16, 8, 4), (1, 16, 2), (5, 8, 1), (13, 16, 1), (7, 3, 2)] {
            // Strides with room between rows; what lies there is never read.
            let (pairs, right_stride) = (steps * words, 3);
            let stride = pairs + 5;
            let mut left = noise_pairs(2 * rows * stride, 7);
            for row in left.chunks_exact_mut(stride) {
                row[pairs..].fill(0x7fc0_7fc0);
            }
            let right: Vec<Pairs> = noise_pairs(pairs * right_stride * LANES, 9)
                .chunks_exact(LANES)
                .map(|x| bytemuck::pod_read_unaligned(bytemuck::cast_slice(x)))
                .collect();
            let left = [&left[..rows * stride - 5], &left[rows * stride..]];
            let panels = |panel: usize, step: usize| {
                &right[step * words * right_stride + panel..][..(words - 1) * right_stride + 1]
            };
            let mut sums = [TwoTiles([[[0.5f32; LANES]; TILE_ROWS]; 2]); 2];
            for anew in [false, true, false] {
                let before = sums;
                tiles.shaped(rows, words, |tiles| {
                    assert_eq!(tiles.rows(), rows);
                    let mut behind = 0;
                    let left = Left { tiles: left, stride };
                    tiles.bf16(left, steps, 2, panels, right_stride, anew, Sums::of(&mut sums), || behind += 1);
                    assert_eq!(behind, 1);
                });
                for (r, panel, row, lane) in
                    (0..2 * 2 * TILE_ROWS * LANES).map(|i| (i / 512, i / 256 % 2, i / 16 % 16, i % 16))
                {
                    let mut expected = if anew && row < rows { 0.0 } else { before[r].0[panel][row][lane] };
                    for step in (0..steps).filter(|_| row < rows) {
                        let left = &left[r][row * stride + step * words..][..words];
                        let pair = |i: usize| {
                            let pairs = &right[(step * words + i) * right_stride + panel];
                            u32::from(pairs[2 * lane]) | u32::from(pairs[2 * lane + 1]) << 16
                        };
                        expected += step_sum(left, pair);
                    }
                    let got = sums[r].0[panel][row][lane];
                    assert_eq!(got.to_bits(), expected.to_bits(), "{rows} {words} {steps} {anew}: {got} {expected}");
                }
            }

            // Whole numbers, exact at their largest, too.
            let bytes: Vec<i32> = (0..rows * words + 9)
                .map(|i| if i % 7 == 0 { i32::MIN } else { (i as i32).wrapping_mul(0x0101_4f3b) })
                .collect();
            let fours: Vec<Fours> = (0..words)
                .map(|i| std::array::from_fn(|k| if i == 1 { 0x80 } else { (i * 91 + k * 37) as u8 }))
                .collect();
            let mut whole = TwoTiles([[[-1i32; LANES]; TILE_ROWS]; 2]);
            tiles.shaped(rows, words, |tiles| tiles.bytes([&bytes, &bytes[9..]], words, [&fours, &fours], &mut whole));
            for (tile, row, lane) in (0..2 * TILE_ROWS * LANES).map(|i| (i / 256, i / 16 % 16, i % 16)) {
                let product = |i: usize| {
                    let left = bytes[9 * tile + row * words + i].to_le_bytes();
                    (0..4).map(|k| i32::from(left[k] as i8) * i32::from(fours[i][4 * lane + k] as i8)).sum::<i32>()
                };
                let expected = if row < rows { (0..words).map(product).sum() } else { -1 };
                assert_eq!(whole.0[tile][row][lane], expected, "bytes {rows} {words}");
            }
        }
        true
    }
}

#[test]
fn tiles_agree_with_plain_arithmetic() {
    for level in Level::available() {
        assert_eq!(level.dispatch(TileProducts), level.has_tiles(), "{level:?}");
        assert_eq!(level.has_tiles(), level.name() == "amx");
    }
}

/// What is refused before any tile is read or written.
struct Refused(usize);

impl<S: Simd> Work<S> for Refused {
    type Output = ();

    fn run(self, s: S) {
        let Some(tiles) = s.tiles() else { panic!("no tiles") };
        let (left, right) = (vec![0u32; 16 * 16], vec![[0u16; 2 * LANES]; 16]);
        let mut sums = vec![0.0f32; 2 * TILE_VALUES];
        let whole = |_, _| &right[..];
        let all = Left { tiles: [&left[..]], stride: 16 };
        fn sums_of(sums: &mut [f32]) -> Sums<'_, 1> {
            Sums { tiles: [sums], stride: LANES, panel: TILE_VALUES }
        }
        match self.0 {
            0 => tiles.shaped(17, 16, |_| ()),
            1 => tiles.shaped(16, 16, |tiles| {
                let left = Left { tiles: [&left[1..]], stride: 16 };
                tiles.bf16(left, 1, 2, whole, 1, true, sums_of(&mut sums), || ());
            }),
            2 => tiles.shaped(16, 16, |tiles| {
                tiles.bf16(all, 1, 2, whole, 1, true, sums_of(&mut sums[1..]), || ());
            }),
            3 => tiles.shaped(16, 16, |tiles| {
                tiles.bf16(all, 1, 2, |panel, _| &right[panel..], 1, true, sums_of(&mut sums), || ());
            }),
            4 => tiles.shaped(16, 16, |outer| {
                tiles.shaped(1, 1, |_| ());
                outer.bf16(all, 1, 2, whole, 1, true, sums_of(&mut sums), || ());
            }),
            5 => tiles.shaped(16, 16, |tiles| {
                tiles.bf16(all, 1, 3, whole, 1, true, sums_of(&mut sums), || ());
            }),
            6 => tiles.shaped(16, 16, |tiles| {
                tiles.bf16(all, 1, 2, whole, usize::MAX, true, sums_of(&mut sums), || ());
            }),
            _ => tiles.shaped(16, 16, |tiles| {
                let left = Left { stride: usize::MAX, ..all };
                tiles.bf16(left, 1, 2, whole, 1, true, sums_of(&mut sums), || ());
            }),
        }
    }
}

#[test]
fn tiles_refuse_what_would_leave_their_slices() {
    let Some(level) = Level::available().into_iter().find(Level::has_tiles) else { return };
    for case in 0..8 {
        let refused = std::panic::catch_unwind(|| level.dispatch(Refused(case)));
        assert!(refused.is_err(), "case {case}");
    }
    // A panic leaves no shape behind.
    assert!(level.dispatch(TileProducts));
}

/// Every 8-bit code.
struct Widened;

impl<S: Simd> Work<S> for Widened {
    type Output = ();

    fn run(self, s: S) {
        for start in (0..256).step_by(4 * LANES) {
            let codes: [u8; 4 * LANES] = std::array::from_fn(|i| (start + i) as u8);
            let mut out = [[0; 2 * LANES]; 2];
            let check = |out: &[[u16; 2 * LANES]; 2], value: &dyn Fn(u8) -> f32| {
                for (&code, &bits) in codes.iter().zip(out.as_flattened()) {
                    let got = f32::from_bits(u32::from(bits) << 16);
                    assert!(same(got, value(code)), "{} {code}: {got}", S::NAME);
                }
            };
            s.widen_e4m3(&codes, &mut out);
            check(&out, &fp8::e4m3_to_f32);
            s.widen_e5m2(&codes, &mut out);
            check(&out, &fp8::e5m2_to_f32);
            s.widen_int8(&codes.map(|code| code as i8), &mut out);
            check(&out, &|code| f32::from(code as i8));
        }
    }
}

#[test]
fn codes_are_widened_exactly() {
    for level in Level::available() {
        level.dispatch(Widened);
    }
}
