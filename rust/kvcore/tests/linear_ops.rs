//! The operations between products: against f64, row by row, and their argument checks.

mod cases;

use cases::cases;
use kvcore::Error;
use kvcore::ops::{
    Activation, HeadNorms, Norm, NormKind, RopeShape, Routing, Scoring, activate, argmax, normalize, rope, rope_split,
    route, softcap,
};
use kvcore::simd::Level;
use kvcore::threads::{NEVER, Threads};
use proptest::collection::vec;
use proptest::prelude::*;

fn threads() -> Threads {
    Threads::new(Some(2)).unwrap()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn near(a: f32, b: f64, tolerance: f64) -> bool {
    (f64::from(a) - b).abs() <= tolerance * b.abs() + 1e-30
}

/// One to eight rows of `n` numbers.
fn rows(n: usize) -> impl Strategy<Value = Vec<f32>> {
    vec(vec(-4.0f32..4.0, n), 1..9).prop_map(|rows| rows.concat())
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn rms_is_near_f64_and_row_by_row(
        (x, weight) in (1usize..80).prop_flat_map(|n| (rows(n), vec(-2.0f32..2.0, n))),
    ) {
        let (n, eps, threads) = (weight.len(), 1e-5, threads());
        for level in Level::available() {
            let mut out = vec![f32::NAN; x.len()];
            normalize(level, &threads, &x, Norm::rms(&weight, eps), &mut out, NEVER).unwrap();
            for (x, out) in x.chunks(n).zip(out.chunks(n)) {
                let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / n as f64;
                let inv = 1.0 / (mean + f64::from(eps)).sqrt();
                for i in 0..n {
                    prop_assert!(near(out[i], f64::from(weight[i]) * f64::from(x[i]) * inv, 1e-6), "{}", level.name());
                }
                let mut alone = vec![0.0; n];
                normalize(level, &threads, x, Norm::rms(&weight, eps), &mut alone, NEVER).unwrap();
                prop_assert_eq!(bits(&alone), bits(out));
            }
        }
    }

    #[test]
    fn gated_silu_is_near_f64_and_row_by_row((n, x) in (1usize..60).prop_flat_map(|n| (Just(n), rows(2 * n)))) {
        let threads = threads();
        for level in Level::available() {
            let mut out = vec![f32::NAN; x.len() / 2];
            activate(level, &threads, Activation::Silu, true, &x, n, &mut out, NEVER).unwrap();
            for (x, out) in x.chunks(2 * n).zip(out.chunks(n)) {
                for i in 0..n {
                    let (gate, up) = (f64::from(x[i]), f64::from(x[n + i]));
                    prop_assert!(near(out[i], gate / (1.0 + (-gate).exp()) * up, 2e-6), "{}", level.name());
                }
                let mut alone = vec![0.0; n];
                activate(level, &threads, Activation::Silu, true, x, n, &mut alone, NEVER).unwrap();
                prop_assert_eq!(bits(&alone), bits(out));
            }
        }
    }

    #[test]
    fn rope_split_is_the_plain_rotation(
        seed in 0u32..1000, rows in 1usize..6, num_heads in 1usize..5, num_kv_heads in 1usize..4, head_dim in 1usize..70,
        part in 0.0f64..=1.0, interleaved: bool,
    ) {
        let cos_width = ((head_dim / 2) as f64 * part).round() as usize;
        let shape = RopeShape { num_heads, num_kv_heads, head_dim, cos_width, interleaved };
        let width = (num_heads + 2 * num_kv_heads) * head_dim;
        let wave = |n: usize, step: f32| (0..n).map(|i| (seed as f32 + i as f32 * step).sin()).collect::<Vec<f32>>();
        let (qkv, cos, sin) = (wave(rows * width, 0.7), wave(rows * cos_width, 0.3), wave(rows * cos_width, 1.1));
        for level in Level::available() {
            let mut q = vec![f32::NAN; rows * num_heads * head_dim];
            let mut k = vec![f32::NAN; rows * num_kv_heads * head_dim];
            let mut v = k.clone();
            rope_split(level, &threads(), &qkv, (&cos, &sin), shape, None, (&mut q, &mut k, &mut v), NEVER).unwrap();
            for row in 0..rows {
                let (cos, sin) = (&cos[row * cos_width..], &sin[row * cos_width..]);
                for head in 0..num_heads + 2 * num_kv_heads {
                    let x = &qkv[row * width + head * head_dim..][..head_dim];
                    let out = if head < num_heads {
                        &q[(row * num_heads + head) * head_dim..]
                    } else if head < num_heads + num_kv_heads {
                        &k[(row * num_kv_heads + head - num_heads) * head_dim..]
                    } else {
                        &v[(row * num_kv_heads + head - num_heads - num_kv_heads) * head_dim..]
                    };
                    for i in 0..head_dim {
                        let w = cos_width;
                        let truth = if head >= num_heads + num_kv_heads || i >= 2 * w {
                            x[i]
                        } else if interleaved && i % 2 == 0 {
                            x[i] * cos[i / 2] - x[i + 1] * sin[i / 2]
                        } else if interleaved {
                            x[i] * cos[i / 2] + x[i - 1] * sin[i / 2]
                        } else if i < w {
                            x[i] * cos[i] - x[i + w] * sin[i]
                        } else {
                            x[i] * cos[i - w] + x[i - w] * sin[i - w]
                        };
                        prop_assert_eq!(out[i], truth, "{} row {} head {} dim {}", level.name(), row, head, i);
                    }
                }
            }
        }
    }

    #[test]
    fn argmax_is_the_first_of_the_largest(x in vec((-6i8..6).prop_map(f32::from), 1..90)) {
        let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let first = x.iter().position(|&x| x == max).unwrap();
        for level in Level::available() {
            prop_assert_eq!(argmax(level, &x), Ok(first));
        }
    }
}

#[test]
fn argmax_takes_infinities_and_reports_nan() {
    for level in Level::available() {
        for n in [1, 15, 16, 17, 40] {
            let lowest = vec![f32::NEG_INFINITY; n];
            assert_eq!(argmax(level, &lowest), Ok(0));
            for at in 0..n {
                let mut x = lowest.clone();
                x[at] = f32::INFINITY;
                assert_eq!(argmax(level, &x), Ok(at));
                x[n - 1 - at] = f32::NAN;
                let message = argmax(level, &x).unwrap_err().to_string();
                assert!(message.contains(&format!("NaN at index {}", n - 1 - at)), "{message}");
            }
        }
        assert!(matches!(argmax(level, &[]), Err(Error::InvalidArgument(_))));
    }
}

/// Enough rows for several tasks.
#[test]
fn threads_change_no_bit() {
    let level = Level::best();
    let x: Vec<f32> = (0..700 * 600).map(|i| (i as f32 * 0.37).sin()).collect();
    let weight: Vec<f32> = (0..600).map(|i| (i as f32 * 0.11).cos()).collect();
    let shape = RopeShape { num_heads: 6, num_kv_heads: 2, head_dim: 60, cos_width: 30, interleaved: true };
    let angles: Vec<f32> = (0..700 * 30).map(|i| (i as f32 * 0.013).cos()).collect();
    let run = |n| {
        let threads = Threads::new(Some(n)).unwrap();
        let (mut normed, mut gated) = (vec![0.0; x.len()], vec![0.0; x.len() / 2]);
        normalize(level, &threads, &x, Norm::rms(&weight, 1e-6), &mut normed, NEVER).unwrap();
        activate(level, &threads, Activation::Gelu, true, &x, 300, &mut gated, NEVER).unwrap();
        let (mut q, mut k, mut v) = (vec![0.0; 700 * 360], vec![0.0; 700 * 120], vec![0.0; 700 * 120]);
        rope_split(level, &threads, &x, (&angles, &angles), shape, None, (&mut q, &mut k, &mut v), NEVER).unwrap();
        [normed, gated, q, k, v].map(|x| bits(&x))
    };
    let one = run(1);
    assert!(one == run(2) && one == run(5));
}

#[test]
fn bad_arguments_are_errors() {
    let (level, threads) = (Level::best(), threads());
    let norm = |x: usize, weight: usize, eps: f32, out: usize| {
        normalize(level, &threads, &vec![1.0; x], Norm::rms(&vec![1.0; weight], eps), &mut vec![0.0; out], NEVER)
    };
    let bad = |result: Result<(), Error>| assert!(matches!(result, Err(Error::InvalidArgument(_))), "{result:?}");
    bad(norm(4, 0, 1e-5, 4));
    bad(norm(5, 2, 1e-5, 5));
    bad(norm(4, 2, 1e-5, 5));
    bad(norm(4, 2, f32::NAN, 4));
    bad(norm(4, 2, -1.0, 4));
    assert_eq!(norm(0, 2, 0.0, 0), Ok(()));

    let silu = |x: usize, n, out: usize| {
        activate(level, &threads, Activation::Silu, true, &vec![1.0; x], n, &mut vec![0.0; out], NEVER)
    };
    bad(silu(4, 0, 0));
    bad(silu(6, 2, 3));
    bad(silu(8, 2, 3));
    bad(silu(8, usize::MAX, 3));
    assert_eq!(silu(0, 2, 0), Ok(()));

    let rope = |shape: RopeShape, qkv: usize, cos: usize, q: usize, kv: usize| {
        let (mut q, mut k, mut v) = (vec![0.0; q], vec![0.0; kv], vec![0.0; kv]);
        let cos = vec![1.0; cos];
        rope_split(level, &threads, &vec![1.0; qkv], (&cos, &cos), shape, None, (&mut q, &mut k, &mut v), NEVER)
    };
    let shape = RopeShape { num_heads: 2, num_kv_heads: 1, head_dim: 4, cos_width: 2, interleaved: false };
    assert_eq!(rope(shape, 32, 4, 16, 8), Ok(()));
    assert_eq!(rope(shape, 0, 0, 0, 0), Ok(()));
    bad(rope(shape, 31, 4, 16, 8));
    bad(rope(shape, 32, 2, 16, 8));
    bad(rope(shape, 32, 4, 15, 8));
    bad(rope(shape, 32, 4, 16, 4));
    bad(rope(RopeShape { cos_width: 3, ..shape }, 32, 6, 16, 8));
    bad(rope(RopeShape { num_heads: 0, ..shape }, 32, 4, 16, 8));
    bad(rope(RopeShape { num_heads: usize::MAX, ..shape }, 32, 4, 16, 8));
    bad(rope(RopeShape { num_kv_heads: usize::MAX / 4, ..shape }, 32, 4, 16, 8));
}

/// A function and what it is in f64.
type Exact = (Activation, fn(f64) -> f64);

/// The functions of one value.
const PLAIN: [Exact; 5] = [
    (Activation::Silu, |x| x / (1.0 + (-x).exp())),
    (Activation::Gelu, |x| x * normal(x)),
    (Activation::GeluTanh, |x| 0.5 * x * (1.0 + (0.7978845608028654 * (x + 0.044715 * x * x * x)).tanh())),
    (Activation::Relu, |x| x.max(0.0)),
    (Activation::Sigmoid, |x| 1.0 / (1.0 + (-x).exp())),
];

/// The normal distribution, by its series; good to 1e-10 where |x| < 6.
fn normal(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for k in 1..200 {
        term *= x * x / (2 * k + 1) as f64;
        sum += term;
    }
    0.5 + sum * (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt()
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn activations_are_near_f64_wherever_a_value_stands((n, x) in (1usize..60).prop_flat_map(|n| (Just(n), rows(n)))) {
        let threads = threads();
        for level in Level::available() {
            for (activation, f) in PLAIN {
                let mut out = vec![f32::NAN; x.len()];
                activate(level, &threads, activation, false, &x, n, &mut out, NEVER).unwrap();
                for (&x, &out) in x.iter().zip(&out) {
                    let error = (f64::from(out) - f(f64::from(x))).abs();
                    prop_assert!(error <= 1e-6 * f64::from(x.abs()).max(0.1), "{activation:?} of {x}: {out}");
                    let mut alone = [0.0];
                    activate(level, &threads, activation, false, &[x], 1, &mut alone, NEVER).unwrap();
                    prop_assert_eq!(bits(&alone), bits(&[out]));
                    let mut gated = [0.0];
                    activate(level, &threads, activation, true, &[x, 1.0], 1, &mut gated, NEVER).unwrap();
                    prop_assert_eq!(bits(&gated), bits(&[out]));
                }
            }
        }
    }

    #[test]
    fn clamped_swiglu_is_near_f64(x in vec((-9.0f32..9.0, -9.0f32..9.0), 1..40), alpha in 0.1f32..3.0, limit in 0.5f32..8.0) {
        let joint: Vec<f32> = x.iter().map(|x| x.0).chain(x.iter().map(|x| x.1)).collect();
        for level in Level::available() {
            let mut out = vec![0.0; x.len()];
            let activation = Activation::ClampedSwiglu { alpha, limit };
            activate(level, &threads(), activation, true, &joint, x.len(), &mut out, NEVER).unwrap();
            for (&(gate, up), &out) in x.iter().zip(&out) {
                let (gate, up) = (f64::from(gate.min(limit)), f64::from(up.clamp(-limit, limit)));
                let truth = (up + 1.0) * gate / (1.0 + (-f64::from(alpha) * gate).exp());
                prop_assert!((f64::from(out) - truth).abs() <= 2e-6 * truth.abs().max(1.0), "{out} {truth}");
            }
        }
    }

    #[test]
    fn layer_norm_is_near_f64_and_row_by_row(
        (x, weight, bias) in (1usize..80).prop_flat_map(|n| (rows(n), vec(-2.0f32..2.0, n), vec(-2.0f32..2.0, n))),
        with_bias: bool,
    ) {
        let (n, threads) = (weight.len(), threads());
        let norm = Norm { kind: NormKind::Layer, weight: &weight, bias: with_bias.then_some(&bias), eps: 1e-5 };
        for level in Level::available() {
            let mut out = vec![f32::NAN; x.len()];
            normalize(level, &threads, &x, norm, &mut out, NEVER).unwrap();
            for (x, out) in x.chunks(n).zip(out.chunks(n)) {
                let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / n as f64;
                let var = x.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n as f64;
                for i in 0..n {
                    let mut truth = f64::from(weight[i]) * (f64::from(x[i]) - mean) / (var + 1e-5).sqrt();
                    truth += if with_bias { f64::from(bias[i]) } else { 0.0 };
                    prop_assert!((f64::from(out[i]) - truth).abs() <= 2e-4, "{} {truth}", out[i]);
                }
                let mut alone = vec![0.0; n];
                normalize(level, &threads, x, norm, &mut alone, NEVER).unwrap();
                prop_assert_eq!(bits(&alone), bits(out));
            }
        }
    }

    #[test]
    fn heads_are_normed_before_they_turn(heads in 1usize..4, half in 1usize..20, joint: bool, interleaved: bool) {
        let (level, threads, dim) = (Level::best(), threads(), 2 * half);
        let wave = |n: usize| (0..n).map(|i| (i as f32 * 0.7).sin() + 0.1).collect::<Vec<f32>>();
        let (width, weights) = (heads * dim, wave(heads * dim));
        let (qkv, angles) = (wave(3 * width), wave(half));
        let shape = RopeShape { num_heads: heads, num_kv_heads: heads, head_dim: dim, cos_width: half, interleaved };
        let norm = Norm::rms(&weights, 1e-5);
        let norms = HeadNorms { q: norm, k: norm, joint };
        let outs = || (vec![0.0; width], vec![0.0; width], vec![0.0; width]);
        let (mut q, mut k, mut v) = outs();
        let out = (&mut q[..], &mut k[..], &mut v[..]);
        rope_split(level, &threads, &qkv, (&angles, &angles), shape, Some(norms), out, NEVER).unwrap();
        for (x, turned) in [(&qkv[..width], &q), (&qkv[width..2 * width], &k)] {
            let mut normed = vec![0.0; width];
            let span = if joint { width } else { dim };
            for at in (0..width).step_by(span) {
                let norm = Norm::rms(&weights[at..at + span], 1e-5);
                normalize(level, &threads, &x[at..at + span], norm, &mut normed[at..at + span], NEVER).unwrap();
            }
            let mut alone = vec![0.0; width];
            rope(level, &threads, &normed, (&angles, &angles), (heads, dim), interleaved, &mut alone, NEVER).unwrap();
            prop_assert_eq!(bits(&alone), bits(turned));
        }
        prop_assert_eq!(bits(&v), bits(&qkv[2 * width..]));
    }

    #[test]
    fn experts_are_the_best_of_the_best_groups(
        logits in vec(-4.0f32..4.0, 12 * 3), bias in vec(-1.0f32..1.0, 12), top_k in 1usize..6, sigmoid: bool, groups in 0usize..3,
        renormalize: bool,
    ) {
        let (groups, top_groups, group_best) = [(1, 1, 1), (4, 2, 1), (4, 2, 2)][groups];
        let scoring = if sigmoid { Scoring::Sigmoid } else { Scoring::Softmax };
        let routing = Routing { scoring, top_k, groups, top_groups, group_best, renormalize, scale: 2.5 };
        let (mut ids, mut weights) = (vec![0; 3 * top_k], vec![0.0; 3 * top_k]);
        route(&threads(), &logits, 12, Some(&bias), routing, &mut ids, &mut weights, NEVER).unwrap();
        for (row, logits) in logits.chunks(12).enumerate() {
            let total: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
            let score = |x: f32| if sigmoid { 1.0 / (1.0 + f64::from(-x).exp()) } else { f64::from(x).exp() / total };
            let merit: Vec<f64> = (0..12).map(|i| score(logits[i]) + f64::from(bias[i])).collect();
            let size = 12 / groups;
            let group = |g: usize| {
                let mut of: Vec<f64> = merit[g * size..][..size].to_vec();
                of.sort_by(|a, b| b.total_cmp(a));
                of[..group_best].iter().sum::<f64>()
            };
            let mut best: Vec<usize> = (0..groups).collect();
            best.sort_by(|&a, &b| group(b).total_cmp(&group(a)));
            let mut open: Vec<usize> = (0..12).filter(|i| best[..top_groups].contains(&(i / size))).collect();
            open.sort_by(|&a, &b| merit[b].total_cmp(&merit[a]));
            let mut want = open[..top_k].to_vec();
            want.sort_unstable();
            let got = &ids[row * top_k..][..top_k];
            prop_assert_eq!(got.iter().map(|&i| i as usize).collect::<Vec<_>>(), want.clone());
            let sum: f64 = if renormalize { want.iter().map(|&i| score(logits[i])).sum() } else { 1.0 };
            for (at, i) in want.into_iter().enumerate() {
                prop_assert!(near(weights[row * top_k + at], 2.5 * score(logits[i]) / sum, 1e-5));
            }
            let (mut ids_alone, mut alone) = (vec![0; top_k], vec![0.0; top_k]);
            route(&threads(), logits, 12, Some(&bias), routing, &mut ids_alone, &mut alone, NEVER).unwrap();
            prop_assert_eq!(bits(&alone), bits(&weights[row * top_k..][..top_k]));
        }
    }
}

#[test]
fn activations_at_the_ends() {
    let ends = [f32::NEG_INFINITY, -1e30, -50.0, -0.0, 0.0, 50.0, 1e30, f32::INFINITY];
    for level in Level::available() {
        for (activation, lowest) in [(Activation::Silu, false), (Activation::Gelu, true), (Activation::Relu, true)] {
            let mut out = [f32::NAN; 8];
            activate(level, &threads(), activation, false, &ends, 8, &mut out, NEVER).unwrap();
            for (x, out) in ends.into_iter().zip(out).skip(usize::from(!lowest)) {
                assert!((out - x.max(0.0)).abs() < 1e-15 || out == x, "{activation:?} of {x}: {out}");
            }
        }
        let mut out = [0.0; 2];
        activate(level, &threads(), Activation::Gelu, false, &[f32::NAN, 1.0], 2, &mut out, NEVER).unwrap();
        assert!(out[0].is_nan() && !out[1].is_nan());
        let mut x = [-1e30, -3.0, 0.0, 3.0, f32::INFINITY];
        softcap(level, &threads(), &mut x, 2.0, NEVER).unwrap();
        assert_eq!((x[0], x[2], x[4]), (-2.0, 0.0, 2.0));
        assert!((x[3] - 2.0 * 1.5f32.tanh()).abs() < 1e-6 && x[1] == -x[3]);
    }
}

#[test]
fn bad_arguments_of_experts_and_activations_are_errors() {
    let (level, threads) = (Level::best(), threads());
    let bad = |result: Result<(), Error>| assert!(matches!(result, Err(Error::InvalidArgument(_))), "{result:?}");
    let good = Routing {
        scoring: Scoring::Softmax,
        top_k: 2,
        groups: 2,
        top_groups: 1,
        group_best: 2,
        renormalize: false,
        scale: 1.0,
    };
    let run = |routing: Routing, logits: usize, bias: usize, ids: usize| {
        let bias = vec![0.0; bias];
        let (mut ids, mut weights) = (vec![0; ids], vec![0.0; ids]);
        route(&threads, &vec![0.0; logits], 4, Some(&bias), routing, &mut ids, &mut weights, NEVER)
    };
    assert_eq!(run(good, 8, 4, 4), Ok(()));
    bad(run(good, 7, 4, 4));
    bad(run(good, 8, 3, 4));
    bad(run(good, 8, 4, 3));
    for routing in [
        Routing { top_k: 0, ..good },
        Routing { top_k: 3, ..good },
        Routing { groups: 3, ..good },
        Routing { groups: 0, ..good },
        Routing { top_groups: 3, ..good },
        Routing { group_best: 3, ..good },
        Routing { scale: f32::NAN, ..good },
    ] {
        bad(run(routing, 8, 4, 4));
    }
    let clamped = |alpha, limit, gated| {
        let activation = Activation::ClampedSwiglu { alpha, limit };
        activate(level, &threads, activation, gated, &[1.0; 2], if gated { 1 } else { 2 }, &mut [0.0; 2][..], NEVER)
    };
    bad(clamped(1.0, 1.0, false));
    bad(clamped(f32::NAN, 1.0, true));
    bad(clamped(1.0, -1.0, true));
    bad(softcap(level, &threads, &mut [1.0], 0.0, NEVER));
    bad(softcap(level, &threads, &mut [1.0], f32::INFINITY, NEVER));
}
