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
